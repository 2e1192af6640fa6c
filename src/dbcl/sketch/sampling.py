"""Uniform sampling: keep `width` of the inputs, the same ones for every client."""

import torch
from torch import Tensor

from dbcl import seeds
from dbcl.sketch.operator import Sketch, check_width


class UniformSampling(Sketch):
    """Keep `width` inputs chosen at random without replacement; the gain is dim / width.

    A layer sketched so is dropout on its input with a mask that all clients share in a round.

    >>> UniformSampling(4, 2, seed=bytes(32)).apply(torch.arange(4.0))
    tensor([1., 2.])
    """

    scheme = "sampling-v1"

    def __init__(self, dim: int, width: int, *, seed: bytes, round: int = 0, name: str = "") -> None:
        check_width(dim, width)
        chosen = seeds.permutation(seed, self.scheme, round, name, dim, width, n=dim)[:width]
        chosen.sort()
        self.dim, self.width = dim, width
        self._chosen = {torch.device("cpu"): torch.from_numpy(chosen)}

    def gain(self, like: Tensor) -> Tensor:
        return torch.full((self.width,), self.dim / self.width, dtype=like.dtype, device=like.device)

    def _apply(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self._on(x.device))

    def _lift(self, y: Tensor) -> Tensor:
        return y.new_zeros(*y.shape[:-1], self.dim).index_copy_(-1, self._on(y.device), y)

    def _table(self) -> bytes:
        return self._on(torch.device("cpu")).numpy().astype("<i8").tobytes()

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._chosen:
            self._chosen[device] = self._chosen[torch.device("cpu")].to(device)
        return self._chosen[device]
