"""Sketched layers: one parametrization for any matrix weight, and a faster implementation for
`nn.Linear`.

Both compute z = x W_eff^T with the effective weight W_eff = V D R^T. The parametrization
materialises W_eff with one gather and keeps the layer's native kernel. `nn.Linear` avoids W_eff: it
sketches its input, z = (x R) D V^T, and multiplies matrices that are `ratio` times smaller.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils import parametrize

from dbcl._torch import (
    autocast_enabled,
    children,
    direct_apply,
    functorch_active,
    is_expanded,
    own_parameters,
    version,
)
from dbcl.errors import PlanError
from dbcl.model.layout import Layout
from dbcl.sketch import Sketch
from dbcl.sketch.buckets import BucketSketch, Tables
from dbcl.sketch.operator import linear_map


class EffectiveWeight(nn.Module):
    """Parametrization V -> V D R^T, reshaped to the weight's original shape.

    >>> from dbcl.sketch import CountSketch
    >>> layer = sketch_parameter(nn.Conv2d(2, 4, 3), "weight", CountSketch(18, 9, seed=bytes(32)), torch.ones(4, 9))
    >>> layer.weight.shape, layer.parametrizations.weight.original.shape
    (torch.Size([4, 2, 3, 3]), torch.Size([4, 9]))
    """

    def __init__(self, sketch: Sketch, layout: Layout) -> None:
        super().__init__()
        self.sketch = sketch
        self.layout = layout

    def forward(self, compact: Tensor) -> Tensor:  # (rows, width) -> the weight's shape
        if is_expanded(compact):
            modes = "'hooks', 'functorch' or 'ghost'"
            raise PlanError(f"expanded weights (Opacus' grad_sample_mode='ew') cannot be sketched; use {modes}")
        return self.layout.weight(self.sketch.expand(compact))


class _Replace(EffectiveWeight):
    """`EffectiveWeight` that replaces the layer's own weight by the server's compact weight on
    registration.

    `register_parametrization` calls `right_inverse` with the old weight, which is discarded.
    """

    def __init__(self, sketch: Sketch, layout: Layout, compact: Tensor) -> None:
        super().__init__(sketch, layout)
        self._compact: Tensor | None = compact

    def right_inverse(self, weight: Tensor) -> Tensor:
        compact, self._compact = self._compact, None
        assert compact is not None
        return compact


def sketch_parameter(
    module: nn.Module, name: str, sketch: Sketch, compact: Tensor, inputs: tuple[int, ...] = ()
) -> nn.Module:
    """Replace a module's weight by the compact weight V, in place.

    Args:
        module: The layer.
        name: Name of the weight in the layer.
        sketch: Sketch of the weight.
        compact: The compact weight V.
        inputs: Axes that the sketch compresses; empty for all axes but the first.

    Returns:
        The module.

    >>> from dbcl.sketch import CountSketch
    >>> layer = sketch_parameter(nn.Linear(6, 2), "weight", CountSketch(6, 3, seed=bytes(32)), torch.zeros(2, 3))
    >>> [tuple(p.shape) for p in layer.parameters()]
    [(2,), (2, 3)]
    """
    weight = getattr(module, name)
    compact = compact.detach().to(weight.device, weight.dtype, copy=True)
    # Exactly nn.Linear: a subclass may read its weight in ways that forward() does not show (attention does).
    is_linear = type(module) is nn.Linear and name == "weight" and not inputs
    if parametrize.is_parametrized(module):
        # The class that parametrize made holds a property for each tensor, and a copy of a module has the same class.
        module.__class__ = type(type(module).__name__, type(module).__bases__, dict(vars(type(module))))
    effective = _Replace(sketch, Layout(tuple(weight.shape), inputs), compact)
    parametrize.register_parametrization(module, name, effective, unsafe=True)
    if is_linear:
        # parametrize made a class for this one module, so this touches no other layer.
        type(module).forward = _bucket_linear if isinstance(sketch, BucketSketch) else _linear
    if isinstance(module, nn.RNNBase):
        with torch.no_grad():
            module.to(weight.device)  # makes it rebuild its own list of weights, which now has V in W's place
    return module


_shared: dict[tuple[object, ...], type[nn.Module]] = {}


def share_class(module: nn.Module) -> None:
    """Give sketched layers of one type a shared class, so that `torch.compile` reuses its compiled
    code.

    `parametrize` creates a new class for every module, and `torch.compile` recompiles for each new
    class.

    >>> from dbcl.sketch import CountSketch
    >>> sketch, V = CountSketch(6, 3, seed=bytes(32)), torch.zeros(2, 3)
    >>> one, two = (sketch_parameter(nn.Linear(6, 2), "weight", sketch, V) for _ in range(2))
    >>> share_class(one), share_class(two), type(one) is type(two)
    (None, None, True)
    """
    held: Any = getattr(module, "parametrizations", {})
    if held and all(isinstance(each, EffectiveWeight) for weights in held.values() for each in weights):
        kind = type(module)
        module.__class__ = _shared.setdefault((kind.__bases__, tuple(sorted(held)), kind.forward), kind)


def compact_parameter(module: nn.Module, name: str) -> Tensor:
    """Return the compact weight V that `sketch_parameter` registered in a module.

    >>> from dbcl.sketch import CountSketch
    >>> layer = sketch_parameter(nn.Linear(6, 2), "weight", CountSketch(6, 3, seed=bytes(32)), torch.zeros(2, 3))
    >>> compact_parameter(layer, "weight").shape
    torch.Size([2, 3])
    """
    original: Tensor = module.parametrizations[name].original  # type: ignore[index, union-attr]
    return original


def inner_name(plan_name: str) -> str:
    """Return the name of a sketched weight inside a client's model. Plans and messages use the
    plain name.

    >>> inner_name("encoder.0.weight")
    'encoder.0.parametrizations.weight.original'
    """
    path, dot, last = plan_name.rpartition(".")
    return f"{path}{dot}parametrizations.{last}.original"


def plan_name(inner_name: str) -> str:
    """Return the plan name of a parameter of a client's model: the inverse of `inner_name` for
    sketched weights.

    >>> plan_name("encoder.0.parametrizations.weight.original"), plan_name("encoder.0.bias")
    ('encoder.0.weight', 'encoder.0.bias')
    """
    match inner_name.split("."):
        case [*path, "parametrizations", last, "original"]:
            return ".".join([*path, last])
    return inner_name


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    weight: Any = self.parametrizations["weight"]  # type: ignore[index]
    return F.linear(weight[0].sketch.project(x), weight.original, self.bias)


def _bucket_linear(self: nn.Linear, x: Tensor) -> Tensor:
    # torch.compile, torch.func and autocast must see each operation by itself, not one function of them all.
    if is_compiling() or x.ndim != 2 or x.shape[1] != self.in_features or functorch_active() or autocast_enabled():
        return _linear(self, x)
    # Looked up in the dictionaries: nn.Module's own look-up takes a noticeable part of a small layer's time.
    weight = children(children(self)["parametrizations"])["weight"]
    tables = children(weight)["0"].sketch.tables(x)
    compact, bias = own_parameters(weight)["original"], own_parameters(self)["bias"]
    if is_expanded(compact):
        return _linear(self, x)
    if not x.requires_grad:  # a first layer: nothing of the sketch is differentiated
        return F.linear(tables.project(x), compact, bias)
    return _sketched_linear(x, compact, bias, tables)  # type: ignore[no-any-return]


class _SketchedLinear(torch.autograd.Function):
    """z = (x R) D V^T + b as a single autograd node. In a small layer each node costs as much time
    as a product.

    For higher-order derivatives, the gradient is computed with operations that autograd records.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, compact: Tensor, bias: Tensor | None, tables: Tables) -> Tensor:
        sketched = tables.project(x)
        # Not `save_for_backward`, which takes longer; its check that V was not changed in place is made below.
        ctx.kept = x, compact, version(compact), sketched, tables, bias is not None
        return F.linear(sketched, compact, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, compact, before, sketched, tables, biased = ctx.kept
        if version(compact) != before:
            raise RuntimeError("a sketched weight was changed in place between the forward and the backward pass")
        inner = grad.mm(compact)
        if torch.is_grad_enabled():
            sketched = linear_map(x, tables.project, tables.expand)
            outer = linear_map(inner, tables.expand, tables.project)
        else:
            outer = tables.expand(inner)
        return outer, grad.t().mm(sketched), grad.sum(dim=0) if biased else None, None


_sketched_linear = direct_apply(_SketchedLinear)
