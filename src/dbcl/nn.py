"""Sketched layers: one parametrization for any matrix weight, and a faster form for `nn.Linear`.

Both compute z = x W_eff^T with the effective weight W_eff = V D R^T. The parametrization writes W_eff out, which costs
one gather and leaves the layer's native kernel alone. `nn.Linear` never needs it: it sketches its input,
z = (x R) D V^T, and works with matrices `ratio` times smaller.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dbcl.sketch import Sketch


class EffectiveWeight(nn.Module):
    """The parametrization V -> V D R^T, reshaped to the weight's own shape.

    >>> from dbcl import CountSketch
    >>> layer = sketch_parameter(nn.Conv2d(2, 4, 3), "weight", CountSketch(18, 9, seed=bytes(32)), torch.ones(4, 9))
    >>> layer.weight.shape, layer.parametrizations.weight.original.shape
    (torch.Size([4, 2, 3, 3]), torch.Size([4, 9]))
    """

    def __init__(self, sketch: Sketch, shape: torch.Size) -> None:
        super().__init__()
        self.sketch = sketch
        self.shape = shape

    def forward(self, compact: Tensor) -> Tensor:  # (dout, width) -> shape
        return self.sketch.expand(compact).reshape(self.shape)


class _Replace(EffectiveWeight):
    """While it is being registered: takes the compact weight from the server and drops the one in the layer."""

    def __init__(self, sketch: Sketch, shape: torch.Size, compact: Tensor) -> None:
        super().__init__(sketch, shape)
        self._compact: Tensor | None = compact

    def right_inverse(self, weight: Tensor) -> Tensor:
        compact, self._compact = self._compact, None
        assert compact is not None
        return compact


def sketch_parameter(module: nn.Module, name: str, sketch: Sketch, compact: Tensor) -> nn.Module:
    """Let `module` hold the compact weight V instead of its weight; returns the module, changed in place.

    >>> from dbcl import CountSketch
    >>> layer = sketch_parameter(nn.Linear(6, 2), "weight", CountSketch(6, 3, seed=bytes(32)), torch.zeros(2, 3))
    >>> [tuple(p.shape) for p in layer.parameters()]
    [(2,), (2, 3)]
    """
    weight = getattr(module, name)
    compact = compact.detach().to(weight.device, weight.dtype, copy=True)
    # Exactly nn.Linear: a subclass may read its weight in ways that forward() does not show (attention does).
    is_linear = type(module) is nn.Linear
    parametrize.register_parametrization(module, name, _Replace(sketch, weight.shape, compact), unsafe=True)
    if is_linear:
        # parametrize made a class for this one module, so this touches no other layer.
        type(module).forward = _linear_forward
    if isinstance(module, nn.RNNBase):
        with torch.no_grad():
            module._init_flat_weights()  # its cache still held the old weight
    return module


def compact_parameter(module: nn.Module, name: str) -> Tensor:
    """Give the compact weight V that `sketch_parameter` put into a module.

    >>> from dbcl import CountSketch
    >>> layer = sketch_parameter(nn.Linear(6, 2), "weight", CountSketch(6, 3, seed=bytes(32)), torch.zeros(2, 3))
    >>> compact_parameter(layer, "weight").shape
    torch.Size([2, 3])
    """
    original: Tensor = module.parametrizations[name].original  # type: ignore[index, union-attr]
    return original


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    # Looked up in the dictionaries: nn.Module's own look-up takes a noticeable part of a small layer's time.
    held: Any = self._modules["parametrizations"]._modules["weight"]  # type: ignore[union-attr]
    return F.linear(held._modules["0"].sketch.project(x), held._parameters["original"], self._parameters["bias"])
