"""Layers for all clients at once: every parameter has a leading client axis.

Activations are either rows, (clients, batch, ...), or images, (batch, clients * channels, height, width), which is the
layout of a grouped convolution. `linear.py` has the dense layer, and `build.py` turns a network into a list of these
stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbcl._torch import relu_backward
from dbcl.engines.stacked.batch import Batch, Params
from dbcl.sketch import Sketch
from dbcl.sketch.buckets import BucketSketch, Tables
from dbcl.sketch.operator import linear_map


@dataclass(frozen=True)
class Lanes:
    """Sketches of the lanes of a chunk's clients, and the lane of each client."""

    sketches: Sequence[Mapping[str, Sketch]]
    lane_of: Tensor  # (clients,)


class NotStackable(Exception):  # noqa: N818  Control flow: selects the next path.
    """A network is not a plain sequence of layers that can be trained for all clients at once."""


class Stage:
    """One layer of the sequence, for all clients."""

    names: tuple[str, ...] = ()
    """Names, in the plan, of the parameters and buffers that the stage uses."""
    steps_in_backward = False
    """True if the backward pass takes the SGD step of the stage's parameters when `Batch.step_in_backward` is set."""

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        """Return the layer's output, with this round's sketches and every client's parameters."""
        raise NotImplementedError

    def manual_backward(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor | None:
        """Take the SGD step of the stage's parameters and return the gradient of its input, without autograd.

        `saved` is the stage's (sketched) input, `out` its output and `grad` the gradient of that.
        """
        raise NotImplementedError

    def input_gradient(self, grad: Tensor, out: Tensor, params: Params) -> Tensor:
        """Return the gradient of the stage's input from that of its output, without autograd; nothing changes."""
        raise NotImplementedError

    def load(self, lanes: Lanes, like: Tensor) -> None:
        """Load the sketches of a chunk's clients, into the same memory if the shapes allow it."""

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter in the stage's own layout, from that of the plan; without the client axis."""
        return tensor

    def unpack(self, name: str, stacked: Tensor) -> Tensor:
        """The inverse of `pack`, with the client axis."""
        return stacked


class Apply(Stage):
    """Calls a layer without parameters, which works on either layout."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        result: Tensor = self.layer(h)
        return result

    def manual_backward(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor:
        # `StageStack.manual` is set only where all layers without parameters are ReLUs.
        return relu_backward(grad, out, 0)

    def input_gradient(self, grad: Tensor, out: Tensor, params: Params) -> Tensor:
        return relu_backward(grad, out, 0)


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
            return h * batch.dropout_masks(shape, self.p).transpose(0, 1).flatten(1, 2)
        return h * batch.dropout_masks(tuple(h.shape[2:]), self.p)


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

    def load(self, lanes: Lanes, like: Tensor) -> None:
        self.tables = own_tables(self.tables, lanes, self.weight, like)

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
        self.places: int | None = None  # of one channel in one example; the first pass says
        names = ["weight", "bias"] if layer.affine else []
        names += ["running_mean", "running_var"] if layer.track_running_stats else []
        self.names = tuple(prefix + name for name in names)

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        layer, c = self.layer, batch.clients
        x = clients_first(h, c) if self.images else h  # (c, b, ch) or (c, b, ch, H, W)
        wide = (c, 1, -1) + (1,) * (x.ndim - 3)
        places = self.places = x[0, 0, 0].numel()
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


def own_tables(current: Tables | None, lanes: Lanes, name: str, like: Tensor) -> Tables | None:
    """Return a stage's own copy of the tables of its clients' sketches, in the memory of the current ones if they fit.

    A copy, since a captured CUDA graph reads the tables of every round from the same addresses.
    """
    drawn = []
    for sketches in lanes.sketches:
        if name not in sketches:
            return None
        sketch = sketches[name]
        assert isinstance(sketch, BucketSketch)
        drawn.append(sketch.tables(like))
    tables = drawn[0] if len(drawn) == 1 else Tables.of_clients(drawn, lanes.lane_of)
    return current if current is not None and current.copy_(tables) else tables.clone()
