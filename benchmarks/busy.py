"""A round where PyTorch may use one thread and where it may use two, quiet and beside a process that keeps a core busy.

The third side keeps two threads inside the kernels of a dense network, which is what `StackedEngine` did before it held
them to one. Sides are interleaved, and only ratios are stated: how many times one thread's time each takes.

python benchmarks/busy.py          on a machine with two cores on which nothing else runs
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch
from common import interleaved, ratios, report, sizes

import dbcl
from dbcl.data import examples_of
from dbcl.engines import LocalTraining, StackedEngine
from dbcl.engines.stacked import engine as stacked
from dbcl.model import networks

SEED = bytes(range(32))
# name, examples a client, rounds, repeats
NETWORKS = [("mnist-mlp", 600, 2, 7), ("mnist-cnn", 60, 1, 5)]


def spin() -> None:
    while True:
        pass


def side(name: str, share: int, rounds: int, threads: int, *, in_kernels: bool = False) -> Callable[[], None]:
    x, y = torch.randn(10 * share, 1, 28, 28), torch.arange(10 * share) % 10
    clients = examples_of((x, y)).divide(np.array_split(np.arange(len(x)), 10))
    model, template = (networks.build(name, seed=seed) for seed in (0, 1))
    engine = StackedEngine(
        dbcl.Server(model, dbcl.SketchConfig(coverage="large")), template, clients, LocalTraining(lr=0.01), seed=SEED
    )

    def play() -> None:
        torch.set_num_threads(threads)
        held = stacked.one_thread
        if in_kernels:
            stacked.one_thread = lambda wanted: contextlib.nullcontext()  # type: ignore[assignment]
        try:
            for _ in range(rounds):
                engine.play_round()
        finally:
            stacked.one_thread = held

    return play


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    spinner = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    spinner.start()
    try:
        yield
    finally:
        spinner.terminate()
        spinner.join()


def main() -> None:
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("needs two cores")
    results = {}
    for name, share, rounds, repeats in sizes(NETWORKS):
        sides = {
            "one thread": side(name, share, rounds, 1),
            "two threads": side(name, share, rounds, 2),
            "two threads in every kernel": side(name, share, rounds, 2, in_kernels=True),
        }
        for where, beside in (("quiet", contextlib.nullcontext()), ("beside a busy process", neighbour())):
            with beside:
                table = ratios(interleaved(sides, repeats=repeats), "one thread")
            results[f"{name}, {where}"] = table
            for what, row in table.items():
                print(f"{name}, {where}: {what:<28} {row['ratio']:.2f} (+- {row['spread']:.2f}) of one thread's time")
    report("busy", results, "python benchmarks/busy.py")


if __name__ == "__main__":
    main()
