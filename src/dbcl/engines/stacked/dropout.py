"""Dropout masks for all clients: on a CPU equal to those of `LocalEngine`, on a GPU from the GPU's
generator.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

DropoutMasks = Callable[[tuple[int, ...], float], Tensor]
"""Function that draws a dropout mask, (clients, batch, *shape), from an example's shape and the
dropout probability.
"""


def client_masks(counts: Tensor, width: int, dropout_seeds: list[int], like: Tensor) -> Callable[[int], DropoutMasks]:
    """Return a function that gives the masks of each step.

    Every client has a separate generator with the same seed as in `LocalTraining.train`.

    Args:
        counts: Number of examples of each batch, (steps, clients).
        width: Size of the largest batch.
        dropout_seeds: Seed of each client.
        like: Tensor with the dtype and device of the masks.
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
    """Return masks from the GPU's generator. They differ from the CPU's and are reproducible on the
    same GPU model.

    Args:
        weight: Weights of a `Batch`, (clients, batch).
    """

    def mask(shape: tuple[int, ...], p: float) -> Tensor:
        return F.dropout(weight.new_ones(*weight.shape, *shape), p)

    return mask


def all_kept(weight: Tensor) -> DropoutMasks:
    """Return all-ones masks, for test steps and timing."""

    def mask(shape: tuple[int, ...], p: float) -> Tensor:
        return weight.new_ones(*weight.shape, *shape)

    return mask
