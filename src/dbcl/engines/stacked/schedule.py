"""Schedule of the examples that each client of a chunk uses in each step."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dbcl._torch import queued
from dbcl.engines.training import LocalTraining


@dataclass(frozen=True)
class Schedule:
    """Batches of all clients of a chunk.

    A client with fewer steps than the others has weight 0 in the remaining steps.
    """

    index: Tensor  # (steps, clients, batch): which of the chunk's examples; any, where the batch is padded
    weight: Tensor  # (steps, clients, batch): 1 / n for the n examples of a client's batch, and 0 for padding
    counts: Tensor  # (steps, clients): how many examples each batch has
    padded: bool
    """True if any batch contains padding."""
    sequential: bool = False
    """True if `index` is 0, 1, 2, ..., so that examples can be read without a gather."""

    @classmethod
    def for_clients(
        cls, clients: list[int], sizes: list[int], training: LocalTraining, *, seed: bytes, round: int
    ) -> "Schedule":
        """Lay out the batches of `LocalTraining.batches` for each client.

        `index` numbers the examples of the first client, then those of the second client, and so
        on.

        Args:
            clients: Numbers of the clients.
            sizes: Number of examples of each client.
            training: Configuration of local training.
            seed: Seed of the batches.
            round: Number of the round.

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
        steps, width = max(map(len, batches)), max(len(own[0]) for own in batches)
        index = np.zeros((steps, len(clients), width), dtype=np.int64)
        counts = np.zeros((steps, len(clients)), dtype=np.int64)
        for place, own in enumerate(batches):
            counts[: len(own), place] = [len(batch) for batch in own]
            index[:, place][np.arange(width) < counts[:, place, None]] = np.concatenate(own)
        padded = bool((counts != width).any())
        return cls._of(torch.from_numpy(index), torch.from_numpy(counts), torch.tensor(sizes), padded)

    @classmethod
    def together(
        cls,
        clients: list[int],
        sizes: list[int],
        training: LocalTraining,
        *,
        seed: bytes,
        round: int,
        device: torch.device,
    ) -> "Schedule":
        """Lay out the batches as `for_clients` does, with batched operations on a device. Much
        faster for many clients.

        >>> Schedule.together(
        ...     [0, 1], [3, 2], LocalTraining(batch_size=2), seed=bytes(32), round=0, device=torch.device("cpu")
        ... ).index
        tensor([[[1, 2],
                 [3, 4]],
        <BLANKLINE>
                [[0, 0],
                 [3, 3]]])
        """
        most, batch = max(sizes), training.batch_size
        keys = np.full((len(clients), training.epochs, most), np.iinfo(np.uint64).max)
        for place, (client, size) in enumerate(zip(clients, sizes, strict=True)):
            for epoch in range(training.epochs):
                keys[place, epoch, :size] = training.keys(size, seed=seed, round=round, client=client, epoch=epoch)
        signed = (keys ^ np.uint64(1 << 63)).view(np.int64)  # in the same order: PyTorch sorts no unsigned words
        order = torch.sort(queued(torch.from_numpy(signed), device), dim=2, stable=True).indices
        in_epoch = [-(-size // batch) for size in sizes]
        limit = training.steps or max(in_epoch) * training.epochs
        steps, width = min(limit, max(in_epoch) * training.epochs), min(batch, most)
        each, per_epoch = queued(torch.tensor([sizes, in_epoch]), device)[:, None, :, None]
        step = torch.arange(steps, device=device)[:, None, None]
        where = (step % per_epoch) * batch + torch.arange(width, device=device)
        taken = (step < (per_epoch * training.epochs).clamp(max=limit)) & (where < each)
        who = torch.arange(len(clients), device=device)[None, :, None]
        epoch_of = (step // per_epoch).clamp(max=training.epochs - 1)
        index = order[who, epoch_of, where.clamp(max=most - 1)].where(taken, 0)
        padded = False  # found without asking the device, which has other things to do
        for size, count in zip(sizes, in_epoch, strict=True):
            whole, rest = divmod(min(limit, count * training.epochs), count)
            padded |= whole * size + min(size, rest * batch) < steps * width
        return cls._of(index, taken.sum(dim=2), each.flatten(), padded)

    @classmethod
    def _of(cls, index: Tensor, counts: Tensor, sizes: Tensor, padded: bool) -> "Schedule":
        """Make a schedule from per-client example indices, (steps, clients, batch), and the batch
        sizes.
        """
        offsets = sizes.cumsum(0) - sizes
        taken = torch.arange(index.shape[2], device=index.device) < counts.unsqueeze(2)
        weight = taken.double() / counts.clamp(min=1).unsqueeze(2)
        return cls(index + offsets[None, :, None], weight, counts, padded)

    def made_sequential(self) -> "Schedule":
        """Return the same schedule for examples that are stored in the order of `index`."""
        return replace(self, index=torch.arange(self.index.numel()).view_as(self.index), sequential=True)

    @property
    def steps(self) -> int:
        return len(self.index)

    @property
    def clients(self) -> int:
        return self.index.shape[1]

    @property
    def width(self) -> int:
        """Size of the largest batch."""
        return self.index.shape[2]
