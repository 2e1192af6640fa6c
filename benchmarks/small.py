"""Sketch generation, codec throughput, whole training steps, and the products that the stacked engine chooses from."""

import hashlib
import statistics
import time

import numpy as np
import torch
from common import interleaved, one_thread, ratios, report, show, sizes
from torch import nn

import dbcl
from dbcl.model import networks
from dbcl.objective import cross_entropy
from dbcl.sketch import CountSketch

NETWORKS = {"mnist-mlp": ((1, 28, 28), 10), "mnist-cnn": ((1, 28, 28), 10), "cifar-cnn": ((3, 32, 32), 50)}


def training_steps() -> dict:
    """A training step of a client's whole model, against the plain model."""
    results = {}
    for name, (shape, batch) in sizes(list(NETWORKS.items())):
        net = networks.build(name, shape=shape)
        local = dbcl.blinded(net, dbcl.Server(net).open_round())
        x, y = torch.randn(batch, *shape), torch.arange(batch) % 10

        def step(model: nn.Module, x: torch.Tensor = x, y: torch.Tensor = y) -> object:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

            def run() -> None:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

            return run

        inner = {"mnist-mlp": 40, "mnist-cnn": 4, "cifar-cnn": 1}[name]
        times = interleaved({"plain": step(net), "ours": step(local)}, repeats=9, inner=inner)
        results[name] = ratios(times, to="plain")
        show(f"one training step of {name}, batch {batch}", results[name])
    return results


def products() -> dict:
    """A few rows with a matrix, ten clients at once: PyTorch's batched product and NumPy's."""
    results = {}
    for width, out in sizes(((392, 200), (100, 200), (200, 10))):
        V, h, G = torch.randn(10, width, out), torch.randn(10, 10, width), torch.randn(10, 10, out)
        sides = {
            "forward, torch": lambda h=h, V=V: torch.bmm(h, V),
            "forward, numpy": lambda h=h, V=V: np.matmul(h.numpy(), V.numpy()),
            "back, torch": lambda G=G, V=V: torch.bmm(G, V.transpose(1, 2)),
            "back, numpy": lambda G=G, V=V: np.matmul(G.numpy(), V.transpose(1, 2).numpy()),
            "gradient, torch": lambda h=h, G=G, V=V: V.baddbmm_(h.transpose(1, 2), G, alpha=-1e-9),
            "gradient, numpy": lambda h=h, G=G, V=V: V.sub_(
                torch.from_numpy(np.matmul(h.transpose(1, 2).numpy(), G.numpy())), alpha=1e-9
            ),
        }
        results[f"{width}x{out}"] = ratios(interleaved(sides, repeats=9, inner=100), to="forward, torch")
        show(f"products of 10 clients, batch 10, {width}x{out}", results[f"{width}x{out}"])
    return results


def throughput() -> dict:
    """What a second buys: inputs sketched into existence, bytes encoded and decoded; SHA-256 alone beside it."""
    rates = {}
    for dim in sizes((1024, 1 << 20)):
        times = interleaved({"draw": lambda dim=dim: CountSketch(dim, dim // 2, seed=bytes(32))}, repeats=5)
        rates[f"sketch of {dim:,} inputs, us"] = round(1e6 * statistics.median(times["draw"]), 1)
    broadcast = dbcl.Server(networks.build("cifar-cnn", shape=(3, 32, 32))).open_round()
    data = dbcl.encode(broadcast)
    sides = {
        "encode": lambda: dbcl.encode(broadcast),
        "decode": lambda: dbcl.protocol.decode_broadcast(data),
        "sha256 alone": lambda: hashlib.sha256(data).digest(),
    }
    for name, times in interleaved(sides, repeats=9, inner=3).items():
        rates[f"{name}, MB/s"] = round(len(data) / statistics.median(times) / 1e6)
    for name, value in rates.items():
        print(f"  {name:<32} {value:>12,}")
    return rates


def main() -> None:
    one_thread()
    torch.manual_seed(0)
    began = time.time()
    results = {"steps": training_steps(), "products": products(), "throughput": throughput()}
    print(f"took {time.time() - began:.0f} s")
    report("small", results, "make bench")


if __name__ == "__main__":
    main()
