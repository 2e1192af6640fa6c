"""Dense layer for all clients at once with a sketched input, z = (x R) D V^T.

Optimisations:

- The backward pass can perform the SGD step of the parameters.
- The outputs can be computed in the order of the next layer's sketch, which then adds slices
  instead of gathering.
- On a CPU the layer can run without autograd, with NumPy's matrix products where they are faster.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.stacked.layers import Lanes, Stage, own_tables
from dbcl.sketch.buckets import Tables
from dbcl.sketch.operator import linear_map

NUMPY_DTYPES = (torch.float32, torch.float64)
"""Dtypes whose products NumPy computes on a CPU. A product of a few rows with a matrix takes 0.6 of
PyTorch's time in the forward and backward pass, and the gradient of a layer with few outputs 0.4
(`benchmarks/small.py`).
"""
MAX_OUTPUTS_IN_NUMPY = 16
"""Maximum number of outputs of a layer whose gradient NumPy computes."""


class Linear(Stage):
    """Dense layer z = (x R) D V^T for every client, as one batched product.

    V is stored transposed, (clients, width, dout), so that its gradient is contiguous. If the
    preceding `Linear` is separated only by elementwise layers, it computes its outputs in the order
    of this layer's sketch (`reorder_outputs`). Sketching then needs only signed additions of
    slices, without a gather. The first layer can receive an input that was sketched once for the
    whole round (`presketched`).
    """

    steps_in_backward = True

    def __init__(self, layer: nn.Linear, prefix: str) -> None:
        self.weight, self.bias = f"{prefix}weight", f"{prefix}bias"
        self.has_bias = layer.bias is not None
        self.names = (self.weight, self.bias) if self.has_bias else (self.weight,)
        self.tables: Tables | None = None
        self.presketched = False
        self.next: Linear | None = None  # the layer whose sketch sets the order of this one's outputs
        self.reordered = False  # whether the inputs come in the order of this layer's sketch
        self.order: Tensor | None = None  # which input is at each place of that order, and the inverse
        self.inverse_order: Tensor | None = None

    def reorder_outputs(self, following: "Linear") -> None:
        """Compute all further outputs in the order of the next layer's sketch."""
        self.next, following.reordered = following, True

    def load(self, lanes: Lanes, like: Tensor) -> None:
        self.tables = own_tables(self.tables, lanes, self.weight, like)
        if self.tables is not None and self.reordered:
            self.order = torch.cat(self.tables.layers)
            self.inverse_order = torch.argsort(self.order)

    def forward(self, h: Tensor, params: Params, batch: Batch) -> Tensor:
        shape = h.shape
        h = h.flatten(1, -2)
        if self.tables is not None and not self.presketched:
            h = linear_map(h, self.sketch_input, self.sketch_input_adjoint)
        weight, bias = params[self.weight], params[self.bias] if self.has_bias else None
        if batch.step_in_backward:
            z: Tensor = _LinearWithStep.apply(h, batch.dummy_leaf, weight, bias)  # type: ignore[no-untyped-call]
        else:
            z = _product(h, weight, bias)
        return z.view(*shape[:-1], z.shape[-1])

    def manual_forward(self, sketched: Tensor, params: Params) -> Tensor:
        """Compute `forward` from the sketched input, without autograd."""
        weight, bias = params[self.weight], params[self.bias] if self.has_bias else None
        if not _numpy_takes(sketched):
            return _product(sketched, weight, bias)
        z = _numpy_product(sketched, weight)
        return z if bias is None else z.add_(bias.unsqueeze(1))

    def manual_backward(self, grad: Tensor, saved: Tensor, out: Tensor, params: Params) -> Tensor | None:
        weight, inner = params[self.weight], None
        in_numpy, few_outputs = _numpy_takes(weight), weight.shape[2] <= MAX_OUTPUTS_IN_NUMPY
        if not self.presketched:
            product = _numpy_product if in_numpy and not few_outputs else torch.bmm
            # Before the weight changes below.
            inner = self.sketch_input_adjoint(product(grad, weight.transpose(1, 2)))
        if in_numpy and few_outputs:
            weight.sub_(_numpy_product(saved.transpose(1, 2), grad))
        else:
            weight.baddbmm_(saved.transpose(1, 2), grad, alpha=-1)
        if self.has_bias:
            params[self.bias].sub_(grad.sum(dim=1))
        return inner

    def input_gradient(self, grad: Tensor, out: Tensor, params: Params) -> Tensor:
        if self.presketched:  # there is nothing before it
            return grad
        return self.sketch_input_adjoint(torch.bmm(grad, params[self.weight].transpose(1, 2)))

    def sketch_input(self, h: Tensor) -> Tensor:
        """Sketch the input, x R D, without a gather if the input has the order of the sketch."""
        if self.tables is None or self.presketched:
            return h
        return project_reordered(h, self.tables) if self.reordered else self.tables.project(h)

    def sketch_input_adjoint(self, grad: Tensor) -> Tensor:
        if self.tables is None:
            return grad
        return expand_reordered(grad, self.tables) if self.reordered else self.tables.expand(grad)

    def pack(self, name: str, tensor: Tensor) -> Tensor:
        if self.next is not None and self.next.order is not None:
            tensor = tensor.index_select(0, self.next.order)
        return tensor.t().contiguous() if name == self.weight else tensor

    def unpack(self, name: str, stacked: Tensor) -> Tensor:
        if name == self.weight:
            stacked = stacked.transpose(1, 2).contiguous()  # first, so that the outputs below are whole rows of memory
        if self.next is not None and self.next.inverse_order is not None:
            stacked = stacked.index_select(1, self.next.inverse_order)
        return stacked


class _LinearWithStep(torch.autograd.Function):
    """Dense layer h W + b whose backward pass performs the SGD step of W and b: W - h^T G in one
    batched product.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, dummy_leaf: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.h, ctx.weight, ctx.bias = h, weight, bias
        return _product(h, weight, bias)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, None, None, None]:
        # Before the weight changes in the next line.
        grad = torch.bmm(G, ctx.weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        ctx.weight.baddbmm_(ctx.h.transpose(1, 2), G, alpha=-1)
        if ctx.bias is not None:
            ctx.bias.sub_(G.sum(dim=1))
        return grad, None, None, None


def _product(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(h, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), h, weight)


def _numpy_takes(tensor: Tensor) -> bool:
    return not tensor.is_cuda and tensor.dtype in NUMPY_DTYPES


def _numpy_product(one: Tensor, other: Tensor) -> Tensor:
    return torch.from_numpy(np.matmul(one.numpy(), other.numpy()))


def project_reordered(h: Tensor, tables: Tables) -> Tensor:
    """Apply `tables.project` to an input in the order of the sketch, with slices instead of
    gathers.
    """
    width = len(tables.layers[0])
    out = h[..., :width] * tables.project_weights[0]
    start = width
    for layer, weight in zip(tables.layers[1:], tables.project_weights[1:], strict=True):
        part = out if len(layer) == width else out[..., : len(layer)]
        part.addcmul_(h[..., start : start + len(layer)], weight)
        start += len(layer)
    return out


def expand_reordered(y: Tensor, tables: Tables) -> Tensor:
    """Adjoint of `project_reordered`."""
    if tables.even.numel():
        return (y.unsqueeze(-2) * tables.even).flatten(-2)
    out = y.new_empty(*y.shape[:-1], len(tables.bucket))
    start = 0
    for layer, weight in zip(tables.layers, tables.project_weights, strict=True):
        torch.mul(y[..., : len(layer)], weight, out=out[..., start : start + len(layer)])
        start += len(layer)
    return out
