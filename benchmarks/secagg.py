"""Secure aggregation at 2^20 values: what one client and the server of a group do, and how many bytes a client sends.

All clients of a group are in this process, since one alone cannot play; only one client's steps are timed, and the
server's. Everything is encoded and decoded, as it would be on its way.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import TINY, one_thread, report

from dbcl.protocol.secagg import (
    ClientRound,
    GroupRound,
    Registry,
    SecAggConfig,
    SigningKey,
    decode_message,
    encode_message,
    groups,
)
from dbcl.protocol.secagg.messages import Agreed, Delivery, Roster, Survivors

LENGTH = 1 << 10 if TINY else 1 << 20
TERMS = SecAggConfig(clip=1.0, weight_cap=600)
GOALS = {"client_s": 0.1, "server_s": 0.5, "server_dropping_s": 1.0, "bytes_ratio": 1.35}


class Stopwatch:
    """Adds up the processor seconds of what it runs: with one thread those of a core, whoever else is busy."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        self.seconds += time.process_time() - began
        return result


def played(count: int, dropping: int) -> dict[str, float]:
    """One round of a group, of which some send shares and then nothing more."""
    names = [f"client-{number:04d}" for number in range(count)]
    identities = {name: SigningKey() for name in names}
    registry = Registry({name: identity.public for name, identity in identities.items()})
    digest = bytes(32)
    clients = {name: ClientRound(name, identities[name], 0, digest, digest, TERMS, registry) for name in names}
    server = GroupRound(0, digest, digest, LENGTH, TERMS, registry=registry)
    values = np.random.default_rng(0).standard_normal(LENGTH)
    values /= np.linalg.norm(values) * 1.001
    watched, sent, one = Stopwatch(), 0, names[count // 2]
    serving = Stopwatch()

    def ask(some: list[str], step: Callable[[ClientRound], Any]) -> dict[str, bytes]:
        nonlocal sent
        answers = {}
        for name in some:
            work = watched if name == one else Stopwatch()
            answers[name] = work.run(lambda name=name: encode_message(step(clients[name])))
        sent += len(answers[one])
        return answers

    def told(kind: type, data: bytes, act: Callable[[Any], Any]) -> Any:
        return act(decode_message(kind, data))

    answers = ask(names, lambda own: own.advertise())
    roster = serving.run(lambda: encode_message(server.roster(answers)))
    answers = ask(names, lambda own: told(Roster, roster, own.share))
    down = serving.run(lambda: {name: encode_message(each) for name, each in server.deliver(answers).items()})
    rest = names[: count - dropping]
    answers = ask(rest, lambda own: told(Delivery, down[own.name], lambda got: own.mask(got, values, 600)))
    survivors = serving.run(lambda: encode_message(server.survivors(answers)))
    answers = ask(rest, lambda own: told(Survivors, survivors, own.agree))
    agreed = serving.run(lambda: encode_message(server.agreed(answers)))
    answers = ask(rest, lambda own: told(Agreed, agreed, own.reveal))
    total = serving.run(lambda: server.total(answers))
    assert np.abs(total.values - len(rest) * values).max() < len(rest) / 2**15
    return {"client_s": watched.seconds, "server_s": serving.seconds, "bytes_up": sent}


def median(count: int, dropping: int, repeats: int) -> dict[str, float]:
    """Of some rounds, the middle one of each figure."""
    rounds = [played(count, dropping) for _ in range(repeats)]
    return {name: sorted(each[name] for each in rounds)[repeats // 2] for name in rounds[0]}


def group(count: int, repeats: int) -> dict[str, Any]:
    dropping = min(int(0.3 * count), count - TERMS.threshold(count))
    whole, less = median(count, 0, repeats), median(count, dropping, repeats)
    return {
        "clients": count,
        "threshold": TERMS.threshold(count),
        "client_s": round(whole["client_s"], 4),
        "server_s": round(whole["server_s"], 3),
        "dropping": dropping,
        "server_dropping_s": round(less["server_s"], 3),
        "bytes_up": int(whole["bytes_up"]),
        "bytes_ratio": round(whole["bytes_up"] / (2 * LENGTH), 4),
    }


def main() -> None:
    one_thread()
    results: dict[str, Any] = {"values": LENGTH, "goals of 32 clients": GOALS}
    played(32, 0)  # warms up
    results["32 clients"] = one = group(32, repeats=1 if TINY else 3)
    if not TINY:
        results["64 clients"] = one = group(64, repeats=1)
    sizes = [len(each) for each in groups([str(number) for number in range(1000)])]
    results["1000 clients"] = {
        "groups": len(sizes),
        "largest": max(sizes),
        "server_s": round(len(sizes) * one["server_s"], 1),
        "server_dropping_s": round(len(sizes) * one["server_dropping_s"], 1),
        "how": "that of the group of 64, times the groups; a client's work and bytes are those of that group",
    }
    for name, row in results.items():
        print(name, row, sep=": ")
    report("secagg", results, "OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python benchmarks/secagg.py")


if __name__ == "__main__":
    main()
