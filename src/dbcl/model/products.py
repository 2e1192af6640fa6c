"""Detection of weights that are used in matrix products, with the axes that are summed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dbcl._torch import view_base
from dbcl.model.coverage import LAYERS
from dbcl.model.tensors import owner

Operands = Iterator[tuple[Tensor, tuple[int, ...]]]


def find_layers(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, tuple[int, ...]]:
    """Find the input axes of custom layers by one forward pass in evaluation mode.

    Returns weights that are used in a product, each with the axes that the product sums over.
    PyTorch's own layers are omitted because they are already known, and so are weights that are
    used in products over different axes. Code paths that the given inputs do not reach are not
    detected.

    Args:
        model: The network.
        inputs: Positional arguments of the forward pass.
        named: Keyword arguments of the forward pass.

    Returns:
        Input axes by parameter name, for `SketchConfig.layers`.

    >>> class Backwards(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.randn(64, 4))
    ...     def forward(self, x):
    ...         return x @ self.weight
    >>> model = nn.Sequential(Backwards(), nn.Linear(4, 2))
    >>> find_layers(model, torch.ones(1, 64))
    {'0.weight': (0,)}
    >>> from dbcl import SketchConfig, SketchPlan
    >>> SketchPlan.from_model(model, SketchConfig(layers=find_layers(model, torch.ones(1, 64)))).rows()[0][3]
    '32 of 64 inputs (axis 0)'
    """
    watch, modes = _Watch(model), {module: module.training for module in model.modules()}
    try:
        with watch, torch.no_grad():
            model.eval()(*inputs, **named)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {name: axes.pop() for name, axes in watch.found.items() if len(axes) == 1}


class _Watch(TorchFunctionMode):
    """Mode that records the summed axes of every parameter used in a product."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {
            id(parameter): name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.ndim >= 2 and not isinstance(owner(model, name)[0], LAYERS)
        }
        self.found: dict[str, set[tuple[int, ...]]] = {}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        operands = PRODUCTS.get(function)
        if operands is not None:
            for tensor, summed in operands(*arguments, **(named or {})):
                self._note(tensor, summed)
        return function(*arguments, **(named or {}))

    def _note(self, tensor: Tensor, summed: tuple[int, ...]) -> None:
        whole = tensor if id(tensor) in self.names else view_base(tensor)
        if whole is None or id(whole) not in self.names:
            return
        # The axes of a view by their steps in memory; a view that merges or repeats axes has no such place.
        places = {(size, step): axis for axis, (size, step) in enumerate(zip(whole.shape, whole.stride(), strict=True))}
        axes = [places.get((tensor.shape[axis], tensor.stride(axis))) for axis in summed]
        kept = tuple(sorted(axis for axis in axes if axis is not None))
        if len(kept) == len(summed) and 0 < len(kept) < whole.ndim:
            self.found.setdefault(self.names[id(whole)], set()).add(kept)


def _linear(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Operands:
    yield weight, (weight.ndim - 1,)


def _matmul(input: Tensor, other: Tensor, **_: Any) -> Operands:
    yield input, (input.ndim - 1,)
    yield other, (max(other.ndim - 2, 0),)


def _addmm(_: Tensor, input: Tensor, other: Tensor, **__: Any) -> Operands:
    yield from _matmul(input, other)


def _convolution(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Operands:
    yield weight, tuple(range(1, weight.ndim))


def _transposed(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Operands:
    yield weight, (0, *range(2, weight.ndim))


def _einsum(equation: Any, *operands: Any) -> Operands:
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    before, after = equation.replace(" ", "").split("->")
    for letters, tensor in zip(before.split(","), given, strict=True):
        yield tensor, tuple(axis for axis, letter in enumerate(letters) if letter not in after)


PRODUCTS: dict[Any, Callable[..., Operands]] = {
    F.linear: _linear,
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), _matmul
    ),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), _addmm),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    torch.einsum: _einsum,
}
"""Functions that sum over an axis of a weight, each with a function that returns the summed axes.
"""
