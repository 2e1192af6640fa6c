"""Real processes: killed at random moments and resumed, or two of them at once on one folder.

python tests/robustness/kill.py --kills 200 --pairs 50
"""

import argparse
import logging
import multiprocessing
import random
import re
import sys
import tempfile
from collections.abc import Collection, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dbcl
import dbcl.simulation.run
from dbcl.errors import DbclError
from dbcl.protocol import checkpoint
from robustness.crash import GUARANTEE, examples, net

ROUNDS = 12
PLAIN_REFUSAL = re.compile(
    r"is in use by process \d+ on |holds a run already; go on|exists and is not empty|: another process has gone on"
)


class Counting:
    """A tracker that tells the parent which rounds were played."""

    def __init__(self, told: Connection) -> None:
        self.told = told

    def begin(self, folder: Path, config: Any, round: int) -> None:
        self.told.send(("began", round))

    def log(self, round: int, numbers: Any) -> None:
        self.told.send(("played", round))

    def end(self) -> None:
        pass


def work(folder: Path, told: Connection, resume: bool, rounds: int, more: Mapping[str, Any]) -> None:
    """What one process does: it waits for the word, then plays a run and says how it ended.

    With a guarantee it says what it sends, before it does, and waits for a word again.
    """
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    told.send(("ready", 0))
    told.recv()
    settings: dict[str, Any] = {"rounds": rounds, "seed": 0, "transcripts": ("1", "server"), "lr": 0.1}
    settings |= more
    if "epsilon" in more:
        opens = dbcl.Server.open_round

        def tell(server: dbcl.Server, client: str | int | None = None) -> dbcl.Broadcast:
            broadcast = opens(server, client)
            if client is not None:  # without a client nothing is sent: the noisy weights are evaluated
                told.send(("sent", (server.round, client, dbcl.encode(broadcast))))
                told.recv()
            return broadcast

        mock.patch.object(dbcl.Server, "open_round", tell).start()
    clients, tracker = [examples(client) for client in range(3)], Counting(told)
    mock.patch.object(dbcl.simulation.run, "curves", return_value=b"picture").start()  # it takes most of the time
    try:
        dbcl.simulate(
            net, clients, examples(9), settings="blind", folder=folder, resume=resume, trackers=[tracker], **settings
        )
    except DbclError as error:
        told.send(("refused", str(error)))
    except BaseException as error:
        told.send(("crashed", repr(error)))
        raise
    else:
        told.send(("ended", 0))


@cache
def processes() -> Any:
    """Processes that are forked from one that has everything imported, so that a kill costs milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dbcl", "dbcl.simulation.run", "dbcl.simulation.simulated"])
    return context


class Worker:
    """A process at work on a folder."""

    def __init__(self, folder: Path, *, resume: bool, rounds: int = ROUNDS, **more: Any) -> None:
        self.pipe, theirs = processes().Pipe()
        self.process = processes().Process(target=work, args=(folder, theirs, resume, rounds, more))
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == ("ready", 0)

    def begin(self) -> None:
        self.pipe.send("begin")

    def kill_after(self, seconds: float) -> bool:
        """Kill it after a while; whether it was still at work."""
        self.process.join(seconds)
        alive = self.process.is_alive()
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return alive

    def said(self) -> list[tuple[str, Any]]:
        """All that it tells until it ends."""
        told = []
        while not told or told[-1][0] not in ("refused", "ended", "crashed"):
            assert self.pipe.poll(120), f"nothing more after {told[-3:]}"
            told.append(self.pipe.recv())
        self.process.join()
        self.pipe.close()
        return told


def finish(folder: Path) -> list[tuple[str, Any]]:
    """Go on with a run to its end, or begin it."""
    worker = Worker(folder, resume=True)
    worker.begin()
    return worker.said()


def result(folder: Path) -> dict[str, Any]:
    """What must be the same, bit for bit, however the run went: all but seconds and lock."""
    from robustness.crash import run_result

    return run_result(folder)


@cache
def undisturbed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        said = finish(Path(place, "run"))
        assert said[-1] == ("ended", 0), said
        return result(Path(place, "run"))


def kills(count: int, seed: int) -> tuple[int, list[str]]:
    """Kill runs at random moments, up to five times each, until so many have died; gives deaths and what is wrong."""
    rng, died, wrong = random.Random(seed), 0, []
    expected = undisturbed()
    while died < count:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place, "run")
            for _ in range(min(5, count - died)):
                worker = Worker(folder, resume=True)
                worker.begin()
                died += worker.kill_after(rng.uniform(0, 0.25))
                if not (folder / "config.toml").exists() and folder.exists():
                    break
            said = finish(folder)
            if said[-1][0] == "refused" and "is not empty" in said[-1][1] and not (folder / "config.toml").exists():
                continue  # killed before it began: nothing has been sent
            if said[-1] != ("ended", 0):
                wrong.append(f"cannot go on: {said[-1]}")
            elif result(folder) != expected:
                wrong.append("another result")
    return died, wrong


def private_kill(rounds: Collection[int]) -> tuple[dict[int, list[bytes]], dict[str, int]]:
    """Kill a run with a guarantee and fresh secrets in these rounds, between the disk and the wire, and go on.

    Gives what was to be sent in each round, by each process, and how often each client was counted.
    """
    settings, left = {"seed": None, "fraction": 1 / 3, **GUARANTEE}, set(rounds)
    sent: dict[int, list[bytes]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, ended = Path(place, "run"), False
        while not ended:
            worker = Worker(folder, resume=True, **settings)
            worker.begin()
            while worker.process.is_alive() or worker.pipe.poll():
                assert worker.pipe.poll(120)
                kind, said = worker.pipe.recv()
                ended = kind == "ended"
                assert kind in ("began", "played", "sent", "ended"), said
                if kind == "sent":
                    sent.setdefault(said[0], []).append(said[2])
                    if said[0] in left:
                        left.remove(said[0])
                        worker.process.kill()
                        break
                    worker.begin()
                if ended:
                    break
            worker.process.join()
            worker.pipe.close()
        tracker = checkpoint.load(folder / "checkpoints").values["server"]["guarantee"]["participation"]
        return sent, {client: count for client, (count, _) in tracker["uses"].items()}


MODES = {"both train": (False, False), "both resume": (True, True), "one resumes": (False, True)}


def pair(mode: str, rng: random.Random) -> tuple[list[str], str]:
    """Two processes at once on one folder; gives what each said at its end, and what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        before = 0
        if mode == "both resume":
            worker, before = Worker(folder, resume=False, rounds=3), 3
            worker.begin()
            worker.said()
        workers = [Worker(folder, resume=resume) for resume in MODES[mode]]
        workers[0].begin()
        told: list[tuple[str, Any]] = []
        if mode == "one resumes":  # the other is at play
            told = [workers[0].pipe.recv() for _ in range(rng.randrange(1, 4))]
        else:
            workers[0].process.join(rng.uniform(0, 0.03))
        workers[1].begin()
        said = [told + workers[0].said(), workers[1].said()]
        ends = [f"{each[-1][0]}: {each[-1][1]}" for each in said]
        played = sorted(round for each in said for kind, round in each if kind == "played")
        if played != list(range(before + 1, ROUNDS + 1)):
            return ends, f"{mode}: the rounds {played} were played, by {ends}"
        for each in said:
            if each[-1][0] == "crashed" or (each[-1][0] == "refused" and not PLAIN_REFUSAL.search(each[-1][1])):
                return ends, f"{mode}: {each[-1]}"
        return ends, "" if result(folder) == undisturbed() else f"{mode}: another result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    died, wrong = kills(options.kills, options.seed)
    print(f"{died} kills, wrong: {wrong}", flush=True)
    rng, contended = random.Random(options.seed), 0
    for number in range(options.pairs):
        ends, said = pair([*MODES][number % 3], rng)
        contended += any("is in use by" in end for end in ends)
        wrong += [said] if said else []
    print(f"{options.pairs} pairs, {contended} of them met; wrong: {wrong}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
