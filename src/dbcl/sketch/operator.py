"""Interface of a sketch: a linear map with orthonormal columns, and a gain."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dbcl._torch import direct_apply, functorch_active
from dbcl.errors import SketchError

Map = Callable[[Tensor], Tensor]


class Sketch(ABC):
    """Random linear map R from `dim` inputs to `width` outputs, with R^T R = I, and a diagonal gain
    D.

    The paper's sketching matrix is S = R D^(1/2). A sketched layer computes z = (x R) D V^T with V
    = W R, which equals x S S^T W^T. A sketch is immutable, so copies share it.

    >>> from dbcl.sketch import CountSketch
    >>> sketch = CountSketch(6, 3, seed=bytes(32))
    >>> sketch.apply(torch.ones(2, 6)).shape, sketch.lift(torch.ones(2, 3)).shape
    (torch.Size([2, 3]), torch.Size([2, 6]))
    """

    scheme: str
    dim: int
    width: int

    def apply(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., width)
        """Sketch the last axis: x R."""
        self._check(x, self.dim)
        return linear_map(x, self._apply, self._lift)

    def lift(self, y: Tensor) -> Tensor:  # (..., width) -> (..., dim)
        """Map the last axis back to full size: y R^T, the adjoint and pseudo-inverse of `apply`."""
        self._check(y, self.width)
        return linear_map(y, self._lift, self._apply)

    def project(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., width)
        """Sketch a layer's input, including the gain: x R D."""
        return self.apply(x) * self.gain(x)

    def expand(self, y: Tensor) -> Tensor:  # (..., width) -> (..., dim)
        """Expand a compact weight to the effective weight: y D R^T, the adjoint of `project`."""
        return self.lift(y * self.gain(y))

    @abstractmethod
    def gain(self, like: Tensor) -> Tensor:  # (width,)
        """Return the diagonal of D, the squared column norms of S, with the dtype and device of
        `like`.
        """

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _lift(self, y: Tensor) -> Tensor: ...

    def dense(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:  # (dim, width)
        """Return R as a dense matrix, for tests and inspection."""
        return self.apply(torch.eye(self.dim, dtype=dtype, device=device))

    def fingerprint(self) -> str:
        """Return a hash of the map, which is equal for equal maps on every machine."""
        head = f"{self.scheme} {self.dim} {self.width} ".encode()
        return hashlib.sha256(head + self._table()).hexdigest()

    @abstractmethod
    def _table(self) -> bytes:
        """Return the random draws as integers in a fixed byte order."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sketch":
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dim} -> {self.width})"

    def _check(self, x: Tensor, size: int) -> None:
        if x.ndim == 0 or x.shape[-1] != size:
            raise SketchError(f"{self}: the last axis must have {size} entries, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise SketchError(f"{self}: needs floating-point numbers, got {x.dtype}")


def linear_map(x: Tensor, forward: Map, adjoint: Map) -> Tensor:
    """Apply a linear map whose adjoint is given for autograd. Supports derivatives of any order.

    By default autograd would turn a gather into a scatter, which is slow and nondeterministic on a
    GPU.

    Args:
        x: Input of the map.
        forward: The map.
        adjoint: Its adjoint.

    >>> linear_map(torch.ones(2), lambda x: 3 * x, lambda y: 3 * y)
    tensor([3., 3.])
    """
    if functorch_active() or is_compiling():
        # torch.func differentiates and batches the gathers themselves. So does torch.compile: traced as a function of
        # its own, PyTorch 2.11 loses the gradient of a parametrized weight without a word.
        return forward(x)
    result: Tensor = _apply_linear_map(x, forward, adjoint)
    return result


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, adjoint: Map) -> Tensor:
        ctx.forward, ctx.adjoint = forward, adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not torch.is_grad_enabled():
            return ctx.adjoint(grad), None, None
        return _LinearMap.apply(grad, ctx.adjoint, ctx.forward), None, None  # type: ignore[no-untyped-call]


_apply_linear_map = direct_apply(_LinearMap)


def check_width(dim: int, width: int) -> None:
    """Raise `SketchError` for a width below 1, or a width that does not compress."""
    if not 1 <= width < dim:
        raise SketchError(f"width must be between 1 and {dim - 1} (one less than its {dim} inputs), got {width}")
