"""What Flower adds to a round: 10 clients of 600 examples, the MLP of the paper, one local epoch, on one thread.

The sides: our `local` engine; `DoubleBlind` around FedAvg on a `LocalGrid` with the same clients. The wrapper's own
time is what is left of its round without the exchange of messages, the clients' work and the inner strategy: opening
the round, encoding, checking, lifting, closing.
"""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import interleaved, one_thread, ratios, report, show, sizes

import dbcl
from dbcl.data import examples_of
from dbcl.engines import Engine, LocalEngine, LocalTraining
from dbcl.flower import DoubleBlind, LocalGrid, blinded, reply
from dbcl.model import networks

from flwr.app import Context, Message  # isort: skip  (after dbcl, which turns its telemetry off)
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp.strategy import FedAvg  # isort: skip

SEED = bytes(range(32))
CLIENTS, EXAMPLES = 10, 600
TRAINING = LocalTraining(lr=0.05, batch_size=10)


class Clock:
    """Adds up the time that some calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def data() -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    torch.manual_seed(0)
    x, y = torch.randn(CLIENTS * EXAMPLES, 1, 28, 28), torch.arange(CLIENTS * EXAMPLES) % 10
    return x, y, np.array_split(np.arange(CLIENTS * EXAMPLES), CLIENTS)


def engine(kind: type[Engine]) -> Callable[[], object]:
    x, y, shards = data()
    server, template = dbcl.Server(networks.build("mnist-mlp")), networks.build("mnist-mlp", seed=1)
    return kind(server, template, examples_of((x, y)).divide(shards), TRAINING, seed=SEED).play_round


def strategy(others: Clock, rounds: int = 1) -> Callable[[], object]:
    """Rounds of DoubleBlind around FedAvg; `others` is told the time that is not the wrapper's."""
    x, y, shards = data()
    template = networks.build("mnist-mlp", seed=1)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = blinded(template, message)
        round = int(message.content["config"]["server-round"]) - 1
        index = torch.from_numpy(shards[client])
        metrics = TRAINING.train(model, (x[index], y[index]), seed=SEED, round=round, client=client)
        return reply(model, message, examples=len(index), metrics=metrics)

    inner, grid = FedAvg(fraction_evaluate=0.0), LocalGrid(app, CLIENTS)
    for thing, name in ((inner, "configure_train"), (inner, "aggregate_train"), (grid, "send_and_receive")):
        setattr(thing, name, others.around(getattr(thing, name)))
    outer = DoubleBlind(inner, networks.build("mnist-mlp"))
    return lambda: outer.start(grid, num_rounds=outer.server.round + rounds)


def main() -> None:
    one_thread()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    others = Clock()
    sides = {
        "local engine": engine(LocalEngine),
        "double-blind FedAvg, local grid": strategy(others),
    }
    table = ratios(interleaved(sides, repeats=31), to="local engine")
    show("one round of mnist-mlp, 10 clients of 600 examples", table)

    shares, play = [], strategy(others, rounds=5)
    for _ in sizes(range(7)):
        others.seconds, began = 0.0, time.perf_counter()
        play()
        whole = time.perf_counter() - began
        shares.append((whole - others.seconds) / whole)
    own = {"median": round(statistics.median(shares), 4), "most": round(max(shares), 4)}
    print(f"the wrapper's own share of a round: {own['median']:.2%} (at most {own['most']:.2%})")
    report("flower", {"rounds": table, "wrapper_share": own}, "make bench")


if __name__ == "__main__":
    main()
