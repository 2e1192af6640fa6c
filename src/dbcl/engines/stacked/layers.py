"""Layers for all clients at once: every parameter has a leading client axis.

Activations have one of two layouts: rows, (clients, batch, ...), or images, (batch, clients *
channels, height, width), as grouped convolutions require. `linear.py` implements the dense layer,
and `build.py` converts a network to a list of stages.
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
    """Sketches of a chunk's lanes, and the lane of each client."""

    sketches: Sequence[Mapping[str, Sketch]]
    lane_of: Tensor  # (clients,)


class NotStackable(Exception):  # noqa: N818  Control flow: selects the next path.
    """Raised for a network that is not a sequence of supported layers."""


class Stage:
    """One layer of the sequence, applied to all clients."""

    names: tuple[str, ...] = ()
    """Plan names of the stage's parameters and buffers."""
    steps_in_backward = False
    """True if the backward pass performs the SGD step of the stage's parameters when
    `Batch.step_in_backward` is set.
    """

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        """Return the layer's output with the current sketches and every client's parameters."""
        raise NotImplementedError

    def manual_backward(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor | None:
        """Perform the SGD step of the stage's parameters without autograd; return the input
        gradient.

        Args:
            grad: Gradient of the output.
            saved: The stage's input, sketched if the stage has a sketch.
            out: The stage's output.
            params: Parameters by name, updated in place.
        """
        raise NotImplementedError

    def input_gradient(self, grad: Tensor, out: Tensor, params: Params) -> Tensor:
        """Return the input gradient from the output gradient without autograd and without any
        update.
        """
        raise NotImplementedError

    def load(self, lanes: Lanes, like: Tensor) -> None:
        """Load the sketches of a chunk's clients, in place if the shapes are unchanged."""

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a parameter without client axis from the plan's layout to the stage's layout."""
        return tensor

    def unpack(self, name: str, stacked: Tensor) -> Tensor:
        """Convert a parameter with client axis back to the plan's layout: the inverse of `pack`."""
        return stacked


class Apply(Stage):
    """Stage of a parameter-free layer that accepts either layout."""

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
    """Grouped convolution with the clients' effective weights, V D R^T, one group per client."""

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
    """Batch normalisation with each client's batch statistics, excluding padding, and running
    averages.
    """

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
    """Return a stage's own copy of its clients' index tables, in the current memory if the shapes
    match.

    A captured CUDA graph reads the tables of every round from the same addresses, so they must be
    copied.
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
