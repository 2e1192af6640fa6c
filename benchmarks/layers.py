"""One layer, forward and backward, on one thread: plain, ours, the paper's listing, its vectorised form."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from authors import SketchConv2d, SketchLinear
from common import interleaved, one_thread, ratios, report, show, sizes
from torch import Tensor, nn

from dbcl.model.parametrization import sketch_parameter
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


def compare(make: Mapping[str, Callable[[], nn.Module]], x: Tensor, *, inner: int) -> dict[str, dict[str, float]]:
    """Times of all sides, each built several times: where its memory lies moves a ratio by a few hundredths."""
    times: dict[str, list[float]] = {name: [] for name in make}
    for _ in sizes(range(5)):
        sides = {name: both_ways(build(), x) for name, build in make.items()}
        for name, measured in interleaved(sides, repeats=5, inner=inner).items():
            times[name] += measured
    return ratios(times, to="plain")


def main() -> None:
    one_thread()
    torch.manual_seed(0)
    results = {}
    # Last, the first layer of a network: its input is data and needs no gradient.
    for (batch, din, dout), first in [*((shape, False) for shape in sizes(LINEAR)), (LINEAR[0], True)]:
        x = torch.randn(batch, din, requires_grad=not first)
        sides: dict[str, Callable[[], nn.Module]] = {
            "plain": partial(nn.Linear, din, dout),
            "ours": lambda: ours(nn.Linear(din, dout)),  # noqa: B023
            "vectorised": partial(SketchLinear, din, dout),
        }
        if batch * din <= 40_000:
            sides["listing"] = partial(SketchLinear, din, dout, listing=True)
        name = f"linear {batch}, {din}, {dout}{', first' if first else ''}"
        results[name] = compare(sides, x, inner=max(1, min(100, 3 * 10**8 // (batch * din * dout))))
        show(f"{name} (batch, in, out)", results[name])
    for name, (batch, channels, filters, side) in sizes(list(CONV.items())):
        x = torch.randn(batch, channels, side, side, requires_grad=True)
        sides = {
            "plain": partial(nn.Conv2d, channels, filters, 5),
            "ours": lambda: ours(nn.Conv2d(channels, filters, 5)),  # noqa: B023
            "vectorised": partial(SketchConv2d, channels, filters, 5),
        }
        results[name] = compare(sides, x, inner=1)
        show(name, results[name])
    report("layers", results, "make bench")


if __name__ == "__main__":
    main()
