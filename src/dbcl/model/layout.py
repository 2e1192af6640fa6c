"""Layout of a weight tensor as a matrix, defined by its input axes."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Shape of a weight, and its input axes; empty `inputs` means all axes but the first.

    A sketch acts on inputs, so W is treated as a matrix (outputs, inputs). Dense and convolutional
    weights have their output axis first, and transposed convolutions have it second. Stacked
    experts (experts, out, in) have their input axis last.

    >>> Layout((4, 2, 3, 3)).dim, Layout((4, 2, 3, 3), (0, 2, 3)).dim, Layout((8, 16, 4), (2,)).rows
    (18, 36, 128)
    """

    shape: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    @classmethod
    def from_axes(cls, shape: tuple[int, ...], inputs: int | tuple[int, ...]) -> "Layout":
        """Return the layout of a weight with the given input axes. Negative axes count from the
        end.

        >>> Layout.from_axes((5, 3), 0), Layout.from_axes((5, 3), -1)
        (Layout(shape=(5, 3), inputs=(0,)), Layout(shape=(5, 3), inputs=()))
        """
        axes = (inputs,) if isinstance(inputs, int) else tuple(inputs)
        settled = tuple(sorted({axis % len(shape) for axis in axes if -len(shape) <= axis < len(shape)}))
        if len(settled) != len(axes) or not 0 < len(settled) < len(shape):
            raise ValueError(f"the inputs of a weight of shape {shape} cannot lie on {inputs}")
        return cls(shape, () if settled == tuple(range(1, len(shape))) else settled)

    @property
    def order(self) -> tuple[int, ...]:
        """Output axes followed by input axes."""
        inputs = self.inputs or tuple(range(1, len(self.shape)))
        return (*(axis for axis in range(len(self.shape)) if axis not in inputs), *inputs)

    @property
    def dim(self) -> int:
        """Number of inputs per output."""
        return math.prod(self.shape[axis] for axis in self.inputs) if self.inputs else math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Number of rows of the matrix."""
        outputs = len(self.shape) - len(self.inputs) if self.inputs else 1
        return math.prod(self.shape[axis] for axis in self.order[:outputs])

    def matrix(self, weight: Tensor) -> Tensor:  # shape -> (rows, dim)
        """Return the weight as a matrix with one row per output."""
        if self.inputs:
            weight = weight.permute(self.order)
        return weight.reshape(self.rows, self.dim)

    def weight(self, matrix: Tensor) -> Tensor:  # (rows, dim) -> shape
        """Return the weight from its matrix: the inverse of `matrix`.

        >>> import torch
        >>> layout, W = Layout((2, 3, 4), (1,)), torch.randn(2, 3, 4)
        >>> torch.equal(layout.weight(layout.matrix(W)), W)
        True
        """
        if not self.inputs:
            return matrix.reshape(self.shape)
        order = self.order
        back = sorted(range(len(order)), key=order.__getitem__)
        return matrix.reshape([self.shape[axis] for axis in order]).permute(back)
