"""Identity sketch: the unprotected baseline."""

from torch import Tensor

from dbcl.sketch.operator import Sketch


class Identity(Sketch):
    """Identity sketch, R = I and D = I: the weight is sent unsketched.

    >>> import torch
    >>> Identity(3).apply(torch.arange(3.0))
    tensor([0., 1., 2.])
    """

    scheme = "identity-v1"

    def __init__(
        self, dim: int, width: int | None = None, *, seed: bytes = b"", round: int = 0, name: str = ""
    ) -> None:
        self.dim = self.width = dim

    def gain(self, like: Tensor) -> Tensor:
        return like.new_ones(self.dim)

    def _apply(self, x: Tensor) -> Tensor:
        return x.clone()

    def _lift(self, y: Tensor) -> Tensor:
        return y.clone()

    def _table(self) -> bytes:
        return b""
