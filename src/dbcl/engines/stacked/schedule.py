"""Which examples every client of a chunk takes in every step."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dbcl.engines.training import LocalTraining


@dataclass(frozen=True)
class Schedule:
    """The batches of all clients of a chunk, side by side.

    A client that has fewer steps than the others has weight 0 in the rest.
    """

    index: Tensor  # (steps, clients, batch): which of the chunk's examples; any, where the batch is padded
    weight: Tensor  # (steps, clients, batch): 1 / n for the n examples of a client's batch, and 0 for padding
    counts: Tensor  # (steps, clients): how many examples each batch has
    padded: bool
    """Whether any batch has padding."""
    sequential: bool = False
    """Whether `index` counts from 0 up, so that the examples can be read without a gather."""

    @classmethod
    def for_clients(
        cls, clients: list[int], sizes: list[int], training: LocalTraining, *, seed: bytes, round: int
    ) -> "Schedule":
        """Lay out the batches that `LocalTraining.batches` gives each client.

        `index` counts through the examples of the first client, then those of the second, and so on.

        >>> Schedule.for_clients([0, 1], [3, 2], LocalTraining(batch_size=2), seed=bytes(32), round=0).index
        tensor([[[1, 2],
                 [3, 4]],
        <BLANKLINE>
                [[0, 0],
                 [3, 3]]])
        """
        batches = [
            list(training.batches(size, seed=seed, round=round, client=client))
            for client, size in zip(clients, sizes, strict=True)
        ]
        offsets = np.cumsum([0, *sizes[:-1]])
        steps, width = max(map(len, batches)), max(len(own[0]) for own in batches)
        index = np.empty((steps, len(clients), width), dtype=np.int64)
        counts = np.zeros((steps, len(clients)), dtype=np.int64)
        for place, (own, offset) in enumerate(zip(batches, offsets, strict=True)):
            index[:, place] = offset
            order = np.concatenate(own)
            if len(order) == len(own) * width:  # whole batches
                counts[: len(own), place] = width
                index[: len(own), place] += order.reshape(-1, width)
                continue
            counts[: len(own), place] = [len(batch) for batch in own]
            index[:, place][np.arange(width) < counts[:, place, None]] += order
        weight = (np.arange(width) < counts[..., None]) / np.maximum(counts, 1)[..., None]
        padded = bool((counts != width).any())
        return cls(torch.from_numpy(index), torch.from_numpy(weight), torch.from_numpy(counts), padded)

    def made_sequential(self) -> "Schedule":
        """The same steps, for examples that were laid out in the order of `index`."""
        return replace(self, index=torch.arange(self.index.numel()).view_as(self.index), sequential=True)

    @property
    def steps(self) -> int:
        return len(self.index)

    @property
    def clients(self) -> int:
        return self.index.shape[1]

    @property
    def width(self) -> int:
        """The size of the largest batch."""
        return self.index.shape[2]
