"""Layers for all clients at once: every parameter has a leading client axis.

Activations are either rows, (clients, batch, ...), or images, (batch, clients * channels, height, width), which is the
layout of a grouped convolution. A network that is a plain stack of known layers becomes a list of stages; what a
network has that no stage knows is said in `NotStackable`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbcl.plan import RoundPlan
from dbcl.sketch import Sketch
from dbcl.sketch.buckets import BucketSketch, Tables
from dbcl.sketch.operator import linear_map

Params = dict[str, Tensor]
Noise = Callable[[tuple[int, ...], float], Tensor]
"""Makes a dropout mask, (clients, batch, *shape), from the shape of one example and the probability."""

ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.ELU,
    nn.SiLU,
    nn.Softplus,
    nn.Hardtanh,
    nn.ReLU6,
    nn.Identity,
)
NUMPY = (torch.float32, torch.float64)
"""Where a client's batch is a few rows, NumPy multiplies it with a matrix in 0.6 of PyTorch's time on a CPU, on the way
back too, and takes 0.4 of it for the gradient of a layer with few outputs (`benchmarks/small.py` measures all)."""
NARROW = 16
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
IMAGE_LAYERS = (nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d, *POOLS)
ROW_LAYERS = (nn.Linear, nn.Flatten, nn.LayerNorm, nn.BatchNorm1d)


class NotStackable(Exception):  # noqa: N818  it is an answer, not a fault
    """Says why a network is no plain stack of layers that can be trained for all clients at once."""


@dataclass
class Batch:
    """What a stage may need to know of the step: how many clients there are, and which examples count.

    `weight` is (clients, batch): 1 / n for the n examples of a client's batch and 0 for padding. `noise` makes a
    dropout mask of a shape for every client. `rate` is the learning rate, as a tensor, and all gradients come
    multiplied by it: so it may change without a new CUDA graph.

    Where an `anchor` is given, plain SGD happens inside the backward pass, and a weight's gradient is never written to
    memory. The anchor is a number that nothing depends on but that wants a gradient: it makes autograd call the
    backward pass of a layer whose input and weights do not.
    """

    clients: int
    weight: Tensor
    noise: Noise
    rate: Tensor
    anchor: Tensor | None = None


class Stage:
    """One layer of the stack: `forward` with this round's tables and every client's parameters."""

    names: tuple[str, ...] = ()
    descends = False
    """Whether the stage takes its own step in the backward pass when `Batch.anchor` is given."""

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        raise NotImplementedError

    def back(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor | None:
        """The backward pass by hand, with the SGD step of the stage's parameters: `saved` is what `enter` gave."""
        raise NotImplementedError

    def load(self, sketches: dict[str, Sketch], like: Tensor) -> None:
        """Take the sketches of a new round, into the same memory where the shapes allow it."""

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter as the stage wants to hold it, from the plan's layout; without the client axis."""
        return tensor

    def unpack(self, name: str, stacked: Tensor) -> Tensor:
        """The way back, with the client axis."""
        return stacked


class Apply(Stage):
    """A layer without parameters that works on either layout."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        result: Tensor = self.layer(h)
        return result

    def back(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor:
        # Only a stack whose other layers are all ReLUs is taken back by hand (`StageStack.by_hand`).
        return torch.ops.aten.threshold_backward(grad, out, 0)  # type: ignore[no-any-return]


class ToImages(Stage):
    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:  # (c, b, ch, H, W) -> (b, c * ch, H, W)
        return h.transpose(0, 1).flatten(1, 2)


class ToRows(Stage):
    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:  # (b, c * ch, H, W) -> (c, b, ch, H, W)
        return clients_first(h, batch.clients)


class Flatten(Stage):
    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:  # (c, b, ...) -> (c, b, features)
        return h.flatten(2)


class Dropout(Stage):
    def __init__(self, layer: nn.Dropout, images: bool) -> None:
        self.p, self.images = layer.p, images

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        if self.p == 0:
            return h
        if self.images:
            shape = (h.shape[1] // batch.clients, *h.shape[2:])
            return h * batch.noise(shape, self.p).transpose(0, 1).flatten(1, 2)
        return h * batch.noise(tuple(h.shape[2:]), self.p)


class Linear(Stage):
    """z = (x R) D V^T for every client: one batched product.

    V is held transposed, (clients, width, dout), so that its gradient comes out in the order of memory. Where the stage
    before is another `Linear` with nothing but elementwise layers between, this layer's permutation is folded into the
    rows of that one: `fold` tells it so, and then sketching needs no gather, only a signed addition of slices. The very
    first layer may get its input sketched already, once for the round (`presketched`).
    """

    descends = True

    def __init__(self, layer: nn.Linear, prefix: str) -> None:
        self.weight, self.bias = f"{prefix}weight", f"{prefix}bias"
        self.has_bias = layer.bias is not None
        self.names = (self.weight, self.bias) if self.has_bias else (self.weight,)
        self.tables: Tables | None = None
        self.presketched = False
        self.folds: Linear | None = None  # the next layer, whose order the rows of this one follow
        self.folded = False
        self.order: Tensor | None = None  # where each of this layer's inputs comes from, and the way back
        self.back_order: Tensor | None = None

    def load(self, sketches: dict[str, Sketch], like: Tensor) -> None:
        self.tables = refresh(self.tables, sketches.get(self.weight), like)
        if self.tables is not None and self.folded:
            self.order = torch.cat(self.tables.layers)
            self.back_order = torch.argsort(self.order)

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        if self.tables is not None and not self.presketched:
            h = linear_map(h, self.enter, self.leave)
        shape = h.shape
        h = h.flatten(1, -2)
        weight, bias = params[self.weight], params[self.bias] if self.has_bias else None
        if batch.anchor is not None:
            z: Tensor = _Descending.apply(h, batch.anchor, weight, bias)  # type: ignore[no-untyped-call]
        else:
            z = self.product(h, params)
        return z.view(*shape[:-1], z.shape[-1])

    def product(self, h: Tensor, params: Params) -> Tensor:
        weight = params[self.weight]
        return torch.baddbmm(params[self.bias].unsqueeze(1), h, weight) if self.has_bias else torch.bmm(h, weight)

    def product_by_hand(self, h: Tensor, params: Params) -> Tensor:
        if not in_numpy(h):
            return self.product(h, params)
        z = by_numpy(h, params[self.weight])
        return z.add_(params[self.bias].unsqueeze(1)) if self.has_bias else z

    def enter(self, h: Tensor) -> Tensor:
        """Sketch the input, x R D; without a gather where it comes in the order of the sketch."""
        if self.tables is None or self.presketched:
            return h
        return slices(h, self.tables) if self.folded else self.tables.project(h)

    def leave(self, grad: Tensor) -> Tensor:
        """The adjoint of `enter`."""
        if self.tables is None:
            return grad
        return repeat(grad, self.tables) if self.folded else self.tables.expand(grad)

    def back(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor | None:
        weight, inner = params[self.weight], None
        numpy, narrow = in_numpy(weight), weight.shape[2] <= NARROW
        if not self.presketched:
            product = by_numpy if numpy and not narrow else torch.bmm
            inner = self.leave(product(grad, weight.transpose(1, 2)))  # before W moves
        if numpy and narrow:
            weight.sub_(by_numpy(saved.transpose(1, 2), grad))
        else:
            weight.baddbmm_(saved.transpose(1, 2), grad, alpha=-1)
        if self.has_bias:
            params[self.bias].sub_(grad.sum(dim=1))
        return inner

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        if self.folds is not None and self.folds.order is not None:
            tensor = tensor.index_select(0, self.folds.order)
        return tensor.t().contiguous() if name == self.weight else tensor

    def unpack(self, name: str, stacked: Tensor) -> Tensor:
        if name == self.weight:
            stacked = stacked.transpose(1, 2).contiguous()  # first, so that the outputs below are whole rows of memory
        if self.folds is not None and self.folds.back_order is not None:
            stacked = stacked.index_select(1, self.folds.back_order)
        return stacked


class _Descending(torch.autograd.Function):
    """h W + b, whose backward pass takes the SGD step of W and b on the way: W - h^T G in one batched product."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.h, ctx.weight, ctx.bias = h, weight, bias
        return torch.bmm(h, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), h, weight)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, None, None, None]:
        grad = torch.bmm(G, ctx.weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None  # before W moves
        ctx.weight.baddbmm_(ctx.h.transpose(1, 2), G, alpha=-1)
        if ctx.bias is not None:
            ctx.bias.sub_(G.sum(dim=1))
        return grad, None, None, None


def in_numpy(tensor: Tensor) -> bool:
    return not tensor.is_cuda and tensor.dtype in NUMPY


def by_numpy(one: Tensor, other: Tensor) -> Tensor:
    return torch.from_numpy(np.matmul(one.numpy(), other.numpy()))


class Conv2d(Stage):
    """A grouped convolution with the clients' effective weights, V D R^T, one group of channels a client."""

    def __init__(self, layer: nn.Conv2d, prefix: str) -> None:
        if layer.padding_mode != "zeros":
            raise NotStackable(f"{prefix[:-1]}: padding mode {layer.padding_mode}")
        self.layer, self.weight, self.bias = layer, f"{prefix}weight", f"{prefix}bias"
        self.has_bias = layer.bias is not None
        self.names = (self.weight, self.bias) if self.has_bias else (self.weight,)
        self.shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
        self.tables: Tables | None = None

    def load(self, sketches: dict[str, Sketch], like: Tensor) -> None:
        self.tables = refresh(self.tables, sketches.get(self.weight), like)

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        weight, layer = params[self.weight], self.layer
        if self.tables is not None:
            weight = linear_map(weight, self.tables.expand, self.tables.project)
        weight = weight.reshape(-1, *self.shape[1:])
        bias = params[self.bias].flatten() if self.has_bias else None
        groups = batch.clients * layer.groups
        return F.conv2d(h, weight, bias, layer.stride, layer.padding, layer.dilation, groups)


class BatchNorm(Stage):
    """Batch statistics for each client over the examples that count, and its running averages."""

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, prefix: str, images: bool) -> None:
        if layer.momentum is None:
            raise NotStackable(f"{prefix[:-1]}: a cumulative average")
        self.layer, self.prefix, self.images = layer, prefix, images
        names = ["weight", "bias"] if layer.affine else []
        names += ["running_mean", "running_var"] if layer.track_running_stats else []
        self.names = tuple(prefix + name for name in names)

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        layer, c = self.layer, batch.clients
        x = clients_first(h, c) if self.images else h  # (c, b, ch) or (c, b, ch, H, W)
        if x.ndim not in (3, 5):
            raise NotStackable(f"{self.prefix[:-1]}: batch norm over {x.ndim - 1}-dimensional examples")
        wide = (c, 1, -1) + (1,) * (x.ndim - 3)
        places = x[0, 0, 0].numel()
        weight = batch.weight.reshape(c, -1, *(1,) * (x.ndim - 2)) / places
        axes = [1, *range(3, x.ndim)]
        mean = (x * weight).sum(axes)  # (c, ch)
        centred = x - mean.view(wide)
        var = (centred.square() * weight).sum(axes)
        out = centred * (var + layer.eps).rsqrt().view(wide)
        if layer.affine:
            out = out * params[f"{self.prefix}weight"].view(wide) + params[f"{self.prefix}bias"].view(wide)
        if layer.track_running_stats:
            assert layer.momentum is not None
            with torch.no_grad():
                count = places / batch.weight.amax(dim=1, keepdim=True).clamp(min=1e-30)  # n * places, for each client
                active = (batch.weight.amax(dim=1, keepdim=True) > 0).to(x.dtype) * layer.momentum
                for name, value in (("running_mean", mean), ("running_var", var * count / (count - 1).clamp(min=1))):
                    running = params[self.prefix + name]
                    running.add_(active * (value - running))
        return out.transpose(0, 1).flatten(1, 2) if self.images else out


class LayerNorm(Stage):
    def __init__(self, layer: nn.LayerNorm, prefix: str) -> None:
        self.layer, self.weight, self.bias = layer, f"{prefix}weight", f"{prefix}bias"
        own = dict(layer.named_parameters())
        self.names = tuple(prefix + name for name in own)

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        h = F.layer_norm(h, self.layer.normalized_shape, eps=self.layer.eps)
        between = (1,) * (h.ndim - 1 - len(self.layer.normalized_shape))
        for name in self.names:
            value = params[name].view(batch.clients, *between, *self.layer.normalized_shape)
            h = h * value if name == self.weight else h + value
        return h


class GroupNorm(Stage):
    def __init__(self, layer: nn.GroupNorm, prefix: str) -> None:
        self.layer, self.weight, self.bias = layer, f"{prefix}weight", f"{prefix}bias"
        self.names = (self.weight, self.bias) if layer.affine else ()

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        weight, bias = (params[name].flatten() for name in self.names) if self.names else (None, None)
        return F.group_norm(h, batch.clients * self.layer.num_groups, weight, bias, self.layer.eps)


def clients_first(h: Tensor, clients: int) -> Tensor:  # (b, c * ch, ...) -> (c, b, ch, ...)
    return h.view(len(h), clients, -1, *h.shape[2:]).transpose(0, 1)


def build(model: nn.Module, plan: RoundPlan, ndim: int) -> list[Stage]:
    """Turn a network into stages, or raise `NotStackable` with the reason; `ndim` is that of one example."""
    for part in plan.tensors:
        if part.sketched and not isinstance(plan.sketches[part.name], BucketSketch):
            raise NotStackable(f"{part.name}: sketch {part.scheme}")
    stages: list[Stage] = []
    images = False
    for name, layer in _leaves(model, ""):
        if isinstance(layer, IMAGE_LAYERS) and not images:
            if stages or ndim != 3:
                raise NotStackable(f"{name}: images after rows")
            stages.append(ToImages())
            images = True
        if isinstance(layer, ROW_LAYERS) and images:
            stages.append(ToRows())
            images = False
        stages.append(_stage(layer, f"{name}.", images))
    known = {name for stage in stages for name in stage.names}
    missing = [part.name for part in plan.tensors if part.name not in known]
    if missing:
        raise NotStackable(f"no stage holds {', '.join(missing)}")
    _fold(stages, plan)
    return stages


def _leaves(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise NotStackable(f"{path or 'the model'}: has hooks")
    if type(module) is nn.Sequential:
        prefix = f"{path}." if path else ""
        return [leaf for name, child in module.named_children() for leaf in _leaves(child, prefix + name)]
    return [(path, module)]


def _stage(layer: nn.Module, prefix: str, images: bool) -> Stage:
    kind = type(layer)
    if kind is nn.Linear:
        return Linear(layer, prefix)  # type: ignore[arg-type]
    if kind is nn.Conv2d:
        return Conv2d(layer, prefix)  # type: ignore[arg-type]
    if kind is nn.Flatten and layer.start_dim == 1 and layer.end_dim == -1:
        return Flatten()
    if kind in ELEMENTWISE or (kind in POOLS and not getattr(layer, "return_indices", False)):
        return Apply(layer)
    if kind is nn.Dropout:
        return Dropout(layer, images)  # type: ignore[arg-type]
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d):
        return BatchNorm(layer, prefix, images)  # type: ignore[arg-type]
    if kind is nn.LayerNorm:
        return LayerNorm(layer, prefix)  # type: ignore[arg-type]
    if kind is nn.GroupNorm:
        return GroupNorm(layer, prefix)  # type: ignore[arg-type]
    raise NotStackable(f"{prefix[:-1] or 'the model'}: no fast form of {kind.__name__}")


def _fold(stages: list[Stage], plan: RoundPlan) -> None:
    """Let each sketched `Linear` that follows another over elementwise layers only take its input in its own order."""
    covered = {part.name for part in plan.tensors if part.sketched and part.scheme != "sampling-v1"}
    before: Linear | None = None
    for stage in stages:
        if isinstance(stage, Linear):
            if before is not None and stage.weight in covered:
                before.folds, stage.folded = stage, True
            before = stage
        elif not (isinstance(stage, Apply) and isinstance(stage.layer, ELEMENTWISE)):
            before = None


def slices(h: Tensor, tables: Tables) -> Tensor:
    """`tables.project` for an input whose entries are in the order of the layers: slices instead of gathers."""
    width = len(tables.layers[0])
    out = h[..., :width] * tables.project_weights[0]
    start = width
    for layer, weight in zip(tables.layers[1:], tables.project_weights[1:], strict=True):
        part = out if len(layer) == width else out[..., : len(layer)]
        part.addcmul_(h[..., start : start + len(layer)], weight)
        start += len(layer)
    return out


def repeat(y: Tensor, tables: Tables) -> Tensor:
    """The adjoint of `slices`."""
    if tables.even.numel():
        return (y.unsqueeze(-2) * tables.even).flatten(-2)
    out = y.new_empty(*y.shape[:-1], len(tables.bucket))
    start = 0
    for layer, weight in zip(tables.layers, tables.project_weights, strict=True):
        torch.mul(y[..., : len(layer)], weight, out=out[..., start : start + len(layer)])
        start += len(layer)
    return out


def refresh(held: Tables | None, sketch: Sketch | None, like: Tensor) -> Tables | None:
    """Tables of our own for a sketch: in the memory of those held already where the shapes agree."""
    if sketch is None:
        return None
    assert isinstance(sketch, BucketSketch)
    drawn = sketch.tables(like)
    return held if held is not None and held.copy_(drawn) else drawn.clone()
