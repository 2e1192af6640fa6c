"""Dropout masks for all clients: on a CPU those that `LocalEngine` draws, on a GPU its own."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DropoutMasks = Callable[[tuple[int, ...], float], Tensor]
"""Draws a dropout mask, (clients, batch, *shape), from the shape of one example and the probability."""


def client_masks(counts: Tensor, width: int, dropout_seeds: list[int], like: Tensor) -> Callable[[int], DropoutMasks]:
    """Return the masks of each step, for `counts` (steps, clients) examples in batches of up to `width`.

    Every client has a generator of its own, with the seed that `LocalTraining.train` gives it.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in dropout_seeds]

    def at(step: int) -> DropoutMasks:
        def mask(shape: tuple[int, ...], p: float) -> Tensor:
            out = torch.ones(len(generators), width, *shape, dtype=like.dtype)
            for client, generator in enumerate(generators):
                count = int(counts[step, client])
                if p == 1:  # nothing is kept, and nothing is drawn
                    out[client] = 0
                elif count:
                    drawn = torch.empty(count, *shape, dtype=like.dtype).bernoulli_(1 - p, generator=generator)
                    out[client, :count] = drawn / (1 - p)
            return out.to(like.device)

        return mask

    return at


def device_masks(weight: Tensor) -> DropoutMasks:
    """Return masks from the GPU's own generator: not those of the CPU, but repeatable on the same kind of GPU.

    `weight` is that of a `Batch`, (clients, batch).
    """

    def mask(shape: tuple[int, ...], p: float) -> Tensor:
        return F.dropout(weight.new_ones(*weight.shape, *shape), p)

    return mask


def all_kept(weight: Tensor) -> DropoutMasks:
    """Return masks that drop nothing, for a step that is only tried or measured."""

    def mask(shape: tuple[int, ...], p: float) -> Tensor:
        return weight.new_ones(*weight.shape, *shape)

    return mask
