"""The stacked engine on a GPU: samples a second, seconds a round, time to an accuracy, and distance from the CPU.

python benchmarks/gpu.py          needs a CUDA device and, under DBCL_DATA, MNIST
"""

import time
from typing import Any

import numpy as np
import torch
from common import report

import dbcl
from dbcl import data
from dbcl.config import UNSKETCHED
from dbcl.engines import Engine, LocalTraining, StackedEngine, evaluate
from dbcl.model import networks

SEED = bytes(range(32))


def engine(
    name: str,
    x: torch.Tensor,
    y: torch.Tensor,
    training: LocalTraining,
    fraction: float,
    *,
    device: str = "cuda",
    ema_decay: float = 0.0,
    **settings: Any,
) -> Engine:
    shape = tuple(x.shape[1:])
    model, template = (networks.build(name, shape=shape, seed=seed).to(device, x.dtype) for seed in (0, 1))
    server = dbcl.Server(model, insecure_seed=0, ema_decay=ema_decay, **settings)
    shards = data.iid(y.cpu().numpy(), 100, seed=SEED)
    own = data.examples_of((x, y)).to(device).divide(shards)
    return StackedEngine(server, template, own, training, fraction=fraction, seed=SEED)


def seconds(action: Any, repeats: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def steps(made: Engine) -> dict[str, float]:
    """The captured step by itself, and a whole round of the engine with blinding, checks and aggregation."""
    made.play_round()
    made.play_round()
    round_s = seconds(made.play_round, 5)
    captured = made._cuda_graph  # type: ignore[attr-defined]
    count = captured.loop.rows.shape[1]

    def replay() -> None:
        captured.step_number.zero_()
        for _ in range(50):
            captured.graph.replay()

    step_s = seconds(replay, 10) / 50
    return {"step_us": 1e6 * step_s, "samples_per_s": count / step_s, "round_s": round_s}


def difference(name: str, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    ends = []
    for device in ("cpu", "cuda"):
        made = engine(name, x, y, LocalTraining(lr=0.01), 0.1, device=device)
        for _ in range(3):
            made.play_round()
        ends.append({key: value.cpu() for key, value in made.server.model.state_dict().items()})
    worst = max(float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0])
    size = float(np.sqrt(np.mean([float(value.square().mean()) for value in ends[0].values()])))
    return {"difference": worst, "rms": size}


PLAIN = {"sketch": UNSKETCHED}
BLIND = {"sketch": dbcl.SketchConfig(veil=0.2, coverage="large"), "optimizer": dbcl.optim.momentum(0.7)}
"""What the preset `blind` asks of a server, in two lanes; it also averages W over five rounds."""


def main() -> None:
    results: dict[str, Any] = {}
    mnist = data.load("mnist")
    x, y = mnist.x_train, mnist.y_train
    mlp = LocalTraining(lr=0.05)
    for label, settings in (("dbcl", BLIND), ("plain", PLAIN)):
        results[f"mlp, 100 clients, {label}"] = steps(engine("mnist-mlp", x, y, mlp, 1.0, **settings))
        results[f"mlp, 10 clients, {label}"] = steps(engine("mnist-mlp", x, y, mlp, 0.1, **settings))
    cnn = LocalTraining(lr=0.02, epochs=5)
    for label, settings in (("dbcl", BLIND), ("plain", PLAIN)):
        results[f"mnist cnn, 10 clients, 5 epochs, {label}"] = steps(engine("mnist-cnn", x, y, cnn, 0.1, **settings))
    # Only the time matters here, so any images of CIFAR's shape will do.
    images = torch.randn(50_000, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(50_000) % 10
    cifar = LocalTraining(lr=0.001, epochs=5, batch_size=50)
    for label, settings in (("dbcl", BLIND), ("plain", PLAIN)):
        results[f"cifar cnn, 10 clients, 5 epochs, {label}"] = steps(
            engine("cifar-cnn", images, labels, cifar, 0.1, **settings)
        )

    made = engine("mnist-mlp", x, y, mlp, 0.1, ema_decay=0.8, **BLIND)
    x_test, y_test = mnist.x_test.cuda(), mnist.y_test.cuda()
    made.play_round()
    spent, rounds = 0.0, 1
    while evaluate(made.server.released, (x_test, y_test)).score < 0.97 and rounds < 300:
        spent += seconds(made.play_round, 1)
        rounds += 1
    results["mlp with dbcl to 97 %"] = {"rounds": rounds, "training_s": spent}

    for name in ("mnist-mlp", "mnist-cnn"):
        for dtype in (torch.float32, torch.float64):
            few = x[:6000].to(dtype), y[:6000]
            results[f"{name}, {dtype}, 3 rounds: largest difference of a weight from the CPU's"] = difference(
                name, *few
            )

    for name, row in results.items():
        print(name, {key: float(f"{value:.4g}") for key, value in row.items()})
    report("gpu", results, "python benchmarks/gpu.py")


if __name__ == "__main__":
    main()
