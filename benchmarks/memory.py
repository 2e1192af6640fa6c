"""Memory of the stacked engine: it grows with the clients of a chunk and not with the clients of the run."""

import resource
import subprocess
import sys

import numpy as np
import torch
from common import report, sizes

import dbcl
from dbcl.data import examples_of
from dbcl.engines import LocalTraining, StackedEngine
from dbcl.model import networks


def peak(clients: int, chosen: int, chunk: int) -> int:
    """The peak memory, in MiB, of three rounds in a process of its own."""
    command = [sys.executable, __file__, "--one", str(clients), str(chosen), str(chunk)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def one(clients: int, chosen: int, chunk: int) -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(60_000, 1, 28, 28), torch.arange(60_000) % 10
    shards = np.array_split(np.random.default_rng(0).permutation(60_000), clients)
    server = dbcl.Server(networks.build("mnist-mlp"))
    engine = StackedEngine(
        server,
        networks.build("mnist-mlp"),
        examples_of((x, y)).divide(shards),
        LocalTraining(),
        fraction=chosen / clients,
        seed=bytes(32),
    )
    engine.chunk = chunk
    for _ in range(3):
        engine.play_round()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    results = {}
    for clients, chosen, chunk in sizes([(100, 10, 10), (1000, 10, 10), (10_000, 10, 10)]):
        results[f"{clients} clients, {chosen} a round, chunks of {chunk}"] = peak(clients, chosen, chunk)
    for chunk in sizes((1, 20, 40, 80)):
        results[f"100 clients, 80 a round, chunks of {chunk}"] = peak(100, 80, chunk)
    for name, value in results.items():
        print(f"  {name:<48} {value:>6,} MiB")
    report("memory", results, "make bench")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*map(int, sys.argv[2:5]))
    else:
        main()
