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
from dbcl.sketch.buckets import BucketSketch, Tables
from dbcl.sketch.operator import linear_map


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
        type(module).forward = _bucket_linear if isinstance(sketch, BucketSketch) else _linear
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


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    held: Any = self.parametrizations["weight"]  # type: ignore[index]
    return F.linear(held[0].sketch.project(x), held.original, self.bias)


def _bucket_linear(self: nn.Linear, x: Tensor) -> Tensor:
    # What torch.func or autocast change must be seen by them operation by operation.
    if x.ndim != 2 or x.shape[1] != self.in_features or _functorch_active() or _autocast_enabled():
        return _linear(self, x)
    # Looked up in the dictionaries: nn.Module's own look-up takes a noticeable part of a small layer's time.
    held: Any = self._modules["parametrizations"]._modules["weight"]  # type: ignore[union-attr]
    tables = held._modules["0"].sketch.tables(x)
    compact, bias = held._parameters["original"], self._parameters["bias"]
    if not x.requires_grad:  # a first layer: nothing of the sketch is differentiated
        return F.linear(tables.project(x), compact, bias)
    return _sketched_linear(x, compact, bias, tables)  # type: ignore[no-any-return, no-untyped-call]


class _SketchedLinear(torch.autograd.Function):
    """z = (x R) D V^T + b in one function: for a small layer, each step that autograd sees costs as much as a product.

    Its derivative, if that is to be differentiated in turn, is written with operations that autograd sees.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, compact: Tensor, bias: Tensor | None, tables: Tables) -> Tensor:
        sketched = tables.project(x)
        # Held as it is, with a look at its version below: `save_for_backward` does the same and takes longer.
        ctx.held = x, compact, compact._version, sketched, tables, bias is not None
        return F.linear(sketched, compact, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, compact, version, sketched, tables, biased = ctx.held
        if compact._version != version:
            raise RuntimeError("a sketched weight was changed in place between the forward and the backward pass")
        inner = grad.mm(compact)
        if torch.is_grad_enabled():
            sketched = linear_map(x, tables.project, tables.expand)
            outer = linear_map(inner, tables.expand, tables.project)
        else:
            outer = tables.expand(inner)
        return outer, grad.t().mm(sketched), grad.sum(dim=0) if biased else None, None


_functorch_active, _autocast_enabled = torch._C._are_functorch_transforms_active, torch._C._is_any_autocast_enabled
# Function.apply itself, less its preparations for torch.func, which never comes here.
_sketched_linear = super(torch.autograd.Function, _SketchedLinear).apply
