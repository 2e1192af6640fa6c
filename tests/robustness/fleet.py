"""Many simulated clients, some of which drop out and some of which are hostile, over many rounds.

python tests/robustness/fleet.py            # 10,000 clients for 200 rounds; one hostile client in ten on the digits
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import dbcl
from dbcl import data
from dbcl.engines import LocalTraining, StackedEngine, evaluate
from dbcl.engines.engine import client_name
from dbcl.model import networks
from dbcl.objective import CLASSIFICATION

Hostile = Callable[[dbcl.Update, random.Random], list[dbcl.Update | bytes]]
"""What a hostile client sends instead of its honest update: one message or several."""


def scaled(factor: float) -> Hostile:
    return lambda u, rng: [replace(u, tensors={name: tensor * factor for name, tensor in u.tensors.items()})]


def copies(update: dbcl.Update, rng: random.Random) -> list[dbcl.Update | bytes]:
    """Ten copies of an update that pulls the other way."""
    return 10 * scaled(-10.0)(update, rng)


HOSTILE: dict[str, Hostile] = {
    "NaN": scaled(math.nan),
    "x1e6": scaled(1e6),
    "x-10": scaled(-10.0),
    "wrong round": lambda u, rng: [replace(u, round=u.round + 1)],
    "garbage": lambda u, rng: [rng.randbytes(rng.randrange(2_000))],
    "examples 10^7": lambda u, rng: scaled(-1.0)(replace(u, examples=10_000_000), rng),
    "ten copies": copies,
    "huge metrics": lambda u, rng: [replace(u, metrics={"loss": 1e99, **{f"<{n}>": 1e99 for n in range(99)}})],
}


# A fleet on a task that any client can draw for itself

TEACHER = torch.randn(12, 4, generator=torch.Generator().manual_seed(99))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def examples(client: int, count: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(client))
    return x, (x @ TEACHER).argmax(1)


@dataclass
class Fleet:
    """What became of a fleet: its rounds, what was accepted and refused, its accuracy, and the memory on the way."""

    rounds: int = 0
    accepted: int = 0
    refused: int = 0
    accuracy: float = 0.0
    resident: tuple[int, int] = (0, 0)
    """Bytes of memory after a tenth of the rounds, and at the end."""


def play(clients: int, rounds: int, cohort: int, *, hostile: float = 0.01, drop: float = 0.1, seed: int = 0) -> Fleet:
    """Play rounds with a cohort of many clients; a share of those asked drops, a share of all clients is hostile."""
    rng, server, fleet = random.Random(seed), dbcl.Server(net(), insecure_seed=seed), Fleet()
    for number in range(rounds):
        asked = rng.sample(range(clients), cohort)
        there = [client for client in asked if rng.random() >= drop]
        sent = {client: server.open_round(f"client {client}") for client in asked}
        answers: dict[str, dbcl.Update | bytes] = {}
        for client, message in _answers(sent, there, int(clients * (1 - hostile)), rng):
            answers.setdefault(client, message)  # of several messages of a client the first counts
        report = server.close_round(answers)
        fleet.rounds, fleet.accepted, fleet.refused = server.round, report.accepted, len(report.refused) + fleet.refused
        if number + 1 == max(1, rounds // 10):
            fleet.resident = (resident(), 0)
    fleet.resident = (fleet.resident[0], resident())
    x, y = examples(10**9, 5_000)
    with torch.no_grad():
        fleet.accuracy = float((server.model(x).argmax(1) == y).double().mean())
    return fleet


def _answers(
    sent: dict[int, dbcl.Broadcast], there: list[int], honest: int, rng: random.Random
) -> Iterator[tuple[str, dbcl.Update | bytes]]:
    lanes = {}
    for broadcast in {id(each): each for each in sent.values()}.values():
        local = dbcl.blinded(net(), broadcast)
        lanes[id(broadcast)] = local, [parameter.detach().clone() for parameter in local.parameters()]
    for client in there:
        broadcast, (local, start) = sent[client], lanes[id(sent[client])]
        x, y = examples(client)
        with torch.no_grad():
            for parameter, first in zip(local.parameters(), start, strict=True):
                parameter.copy_(first)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.2)
        for half in (slice(0, 10), slice(10, 20)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(x[half]), y[half]).backward()
            optimizer.step()
        update = dbcl.make_update(local, broadcast, examples=len(x), metrics={"loss": 1.0})
        if client < honest:
            yield f"client {client}", dbcl.encode(update)
        else:
            for message in rng.choice([*HOSTILE.values()])(update, rng):
                yield f"client {client}", message


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


# One hostile client in ten, on the digits


ONE_IN_TEN = ("x1e6", "x-10", "examples 10^7", "ten copies")


def digits(attack: str | None, seed: int, rounds: int, validator: dbcl.protocol.UpdateValidator | None = None) -> float:
    """The accuracy that mnist-mlp reaches with nine honest clients, and with an attack with a tenth client."""
    dataset = data.load("digits")
    shares = data.iid(dataset.y_train.numpy(), 10, seed=bytes([seed] * 32))
    clients = [(dataset.x_train[share], dataset.y_train[share]) for share in map(torch.from_numpy, shares)]
    model, template = (networks.build("mnist-mlp", shape=dataset.shape, seed=seed) for _ in range(2))
    server = dbcl.Server(model, insecure_seed=seed, optimizer=dbcl.optim.momentum(), validator=validator)
    training = LocalTraining(lr=0.05, batch_size=10, epochs=1, proximal=0.1)  # the command's defaults
    engine = StackedEngine(server, template, clients, training, seed=bytes([seed] * 32))
    rng = random.Random(seed)
    for _ in range(rounds):
        sent = {client: server.open_round(client_name(client)) for client in range(10)}
        trained = engine.train_cohort(sent)
        updates = [trained[client_name(client)] for client in sent]
        last = updates.pop()
        assert isinstance(last, dbcl.Update)
        server.close_round([*updates, *(HOSTILE[attack](last, rng) if attack else [])])
    held_out = data.examples_of((dataset.x_test, dataset.y_test))
    return evaluate(server.model, held_out, CLASSIFICATION).score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--digits", type=int, default=100, help="rounds on the digits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rounds:
        for hostile in (0.0, 0.01):
            print(f"hostile {hostile}: {play(options.clients, options.rounds, 100, hostile=hostile)}", flush=True)
    for attack in (None, *ONE_IN_TEN) if options.digits else ():
        for validator in (
            dbcl.protocol.UpdateValidator(max_influence=4),
            dbcl.protocol.UpdateValidator(max_influence=2),
            dbcl.protocol.UpdateValidator(),
        ):
            scores = [_score(attack, seed, options.digits, validator) for seed in range(3)]
            print(f"{attack or 'without it'}; {validator}: {', '.join(scores)}", flush=True)
    return 0


def _score(attack: str | None, seed: int, rounds: int, validator: dbcl.protocol.UpdateValidator) -> str:
    try:
        return f"{100 * digits(attack, seed, rounds, validator):.1f}"
    except dbcl.errors.ProtocolError as error:
        return str(error).split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
