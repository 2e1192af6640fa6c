"""One layer, forward and backward, on one thread: plain, ours, the paper's listing, its vectorised form."""

import torch
from authors import SketchConv2d, SketchLinear
from common import interleaved, one_thread, ratios, report, show
from torch import Tensor, nn

from dbcl.nn import sketch_parameter
from dbcl.sketch import CountSketch

LINEAR = [(10, 784, 200), (10, 200, 200), (32, 1024, 512), (256, 4096, 4096), (2048, 1024, 512)]
CONV = {  # batch, channels, filters, side: 5x5 kernels
    "mnist conv2": (10, 32, 64, 12),
    "cifar conv2": (50, 32, 64, 28),
    "cifar conv3": (50, 64, 128, 12),
}


def ours(layer: nn.Module) -> nn.Module:
    dim = layer.weight[0].numel()
    sketch = CountSketch(dim, dim // 2, seed=bytes(32))
    return sketch_parameter(layer, "weight", sketch, torch.randn(len(layer.weight), dim // 2) / dim**0.5)


def both_ways(layer: nn.Module, x: Tensor) -> object:
    parameters = sorted(layer.parameters(), key=Tensor.numel, reverse=True)  # in one order on all sides

    def run() -> None:
        z = layer(x)
        z.backward(z.detach())
        for parameter in parameters:
            parameter.grad = None
        x.grad = None

    return run


def main() -> None:
    one_thread()
    torch.manual_seed(0)
    results = {}
    for batch, din, dout in LINEAR:
        x = torch.randn(batch, din, requires_grad=True)
        sides = {
            "plain": nn.Linear(din, dout),
            "ours": ours(nn.Linear(din, dout)),
            "vectorised": SketchLinear(din, dout),
        }
        if batch * din <= 40_000:
            sides["listing"] = SketchLinear(din, dout, listing=True)
        inner = max(1, min(100, 10**9 // (batch * din * dout)))
        times = interleaved({k: both_ways(v, x) for k, v in sides.items()}, repeats=9, inner=inner)
        results[f"linear {batch}, {din}, {dout}"] = ratios(times, to="plain")
        show(f"linear (batch, in, out) = {batch, din, dout}", results[f"linear {batch}, {din}, {dout}"])
    for name, (batch, channels, filters, side) in CONV.items():
        x = torch.randn(batch, channels, side, side, requires_grad=True)
        sides = {
            "plain": nn.Conv2d(channels, filters, 5),
            "ours": ours(nn.Conv2d(channels, filters, 5)),
            "vectorised": SketchConv2d(channels, filters, 5),
        }
        times = interleaved({k: both_ways(v, x) for k, v in sides.items()}, repeats=9, inner=2)
        results[name] = ratios(times, to="plain")
        show(name, results[name])
    report("layers", results, "make bench")


if __name__ == "__main__":
    main()
