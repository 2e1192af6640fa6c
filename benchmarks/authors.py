"""The sketched layers of the paper, written anew from its appendix, to measure ours against.

`listing=True` loops over the buckets as the paper's listing does; otherwise the same maps with index tensors instead of
loops, which is how the authors' experiments vectorise them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Hash:
    """A random permutation cut into q rows of s inputs, and a sign for each input."""

    def __init__(self, dim: int, q: int = 2) -> None:
        self.dim, self.s = dim, dim // q
        self.index = torch.randperm(dim)[: self.s * q].reshape(q, self.s)
        self.sign = torch.randint(0, 2, (dim,)).float() * 2 - 1

    def sketch(self, a: Tensor, listing: bool) -> Tensor:  # (m, dim) -> (m, s)
        signed = a * self.sign
        if not listing:
            return signed[:, self.index].sum(dim=1)
        out = torch.zeros(len(a), self.s)
        for h in range(self.s):
            out[:, h] = signed[:, self.index[:, h]].sum(dim=1)
        return out

    def transpose(self, c: Tensor, listing: bool) -> Tensor:  # (m, s) -> (m, dim)
        out = torch.zeros(len(c), self.dim)
        if listing:
            for h in range(self.s):
                out[:, self.index[:, h]] = c[:, h : h + 1]
        else:
            out[:, self.index] = c.unsqueeze(1).expand(-1, len(self.index), -1)
        return out * self.sign


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, hash: Hash, listing: bool) -> Tensor:
        x_sketch, w_sketch = hash.sketch(x, listing), hash.sketch(weight, listing)
        ctx.save_for_backward(x_sketch, w_sketch)
        ctx.hash, ctx.listing = hash, listing
        return x_sketch @ w_sketch.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x_sketch, w_sketch = ctx.saved_tensors
        back = ctx.hash.transpose
        grad_x = back(grad @ w_sketch, ctx.listing) if ctx.needs_input_grad[0] else None
        return grad_x, back(grad.t() @ x_sketch, ctx.listing), grad.sum(dim=0), None, None


class SketchLinear(nn.Linear):
    def __init__(self, *args: Any, listing: bool = False) -> None:
        super().__init__(*args)
        self.hash, self.listing = Hash(self.in_features), listing

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self.hash, self.listing)


class SketchConv2d(nn.Conv2d):
    """Unfold, the sketched product, fold; no stride or padding, as in the paper."""

    def __init__(self, *args: Any, listing: bool = False) -> None:
        super().__init__(*args)
        self.hash, self.listing = Hash(self.weight[0].numel()), listing

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, self.kernel_size)  # (b, dim, places)
        b, dim, places = patches.shape
        rows = patches.transpose(1, 2).reshape(b * places, dim)
        z = _Linear.apply(rows, self.weight.flatten(1), self.bias, self.hash, self.listing)
        side = x.shape[2] - self.kernel_size[0] + 1
        return z.reshape(b, places, -1).transpose(1, 2).reshape(b, -1, side, places // side)
