"""A crash at every I/O call: one call fails, or the process dies there; then what a person would do, and compare.

python tests/robustness/crash.py          # every point of every scenario; prints a line for each scenario
"""

import builtins
import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from torch import nn

import dbcl
import dbcl.simulation.run
from dbcl.errors import ConfigError, DbclError, ProtocolError
from dbcl.files import make_folder
from dbcl.flower import DoubleBlind, GuaranteeMod, LocalGrid, blinded, reply
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import checkpoint

ROUNDS = 3
CALLS = ("open", "fsync", "replace", "unlink", "mkdir", "chmod", "rmdir", "ftruncate", "pwrite")


class DeathError(BaseException):
    """The process dies here: nothing may catch this, and nothing touches the disk any more."""


KINDS: dict[str, Callable[[], BaseException]] = {
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EROFS": lambda: OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "death": DeathError,
}


class Disk:
    """Counts the I/O calls below a folder while it is active, and lets the one at a position fail."""

    def __init__(self, root: Path, at: int = -1, kind: str = "EIO") -> None:
        self.root, self.at, self.kind = str(root), at, kind
        self.count, self.struck = 0, False
        self._handles: set[int] = set()
        self._real = {name: getattr(os, name) for name in CALLS}
        self._opens = builtins.open

    def _below(self, target: Any) -> bool:
        return target in self._handles if isinstance(target, int) else os.fspath(target).startswith(self.root)

    def strike(self) -> None:
        """Count a call, and fail where it is the one; a dead process fails at every call from there on."""
        number = self.count
        self.count += 1
        if number == self.at or (self.struck and self.kind == "death"):
            self.struck = True
            raise KINDS[self.kind]()

    def _patched(self, name: str) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **more: Any) -> Any:
            mine = self._below(target)
            if mine:
                self.strike()
            result = self._real[name](target, *arguments, **more)
            if name == "open":  # numbers are used again, also for files elsewhere
                (self._handles.add if mine else self._handles.discard)(result)
            return result

        return call

    def _open(self, target: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        """The builtin: writing to what it gives is a call of its own, and the one that fails writes half."""
        mine = set(mode) & set("wax+") and self._below(target)
        if mine and not isinstance(target, int):
            self.strike()
        file = self._opens(target, mode, *arguments, **more)
        return _File(file, self) if mine else file

    @contextlib.contextmanager
    def active(self) -> Iterator["Disk"]:
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self._patched(name)))
            stack.enter_context(mock.patch.object(builtins, "open", self._open))
            yield self


class _File:
    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> None:
        try:
            self._disk.strike()
        except BaseException:
            self._file.write(data[: len(data) // 2])
            raise
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


# What is played


@dataclass(frozen=True)
class Scenario:
    """`play` goes from what `prepare` made to the end, and again from wherever it was left; `result` is compared."""

    name: str
    play: Callable[[Path], None]
    result: Callable[[Path], dict[str, Any]]
    prepare: Callable[[Path], None] = lambda folder: None


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def examples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.randn(6, 6, generator=generator), torch.arange(6) % 2


def play_server(folder: Path) -> None:
    try:
        server = dbcl.Server.load(folder, net(), insecure_seed=0, optimizer=dbcl.optim.momentum())
    except ProtocolError as error:
        if "no whole checkpoint" not in str(error):
            raise
        server = dbcl.Server(net(), insecure_seed=0, optimizer=dbcl.optim.momentum())
        server.save(folder)
    while server.round < ROUNDS:
        broadcast = server.open_round("ann")
        local = dbcl.blinded(net(), broadcast)
        local(examples(server.round)[0]).square().mean().backward()
        torch.optim.SGD(local.parameters(), lr=0.1).step()
        server.close_round({"ann": dbcl.make_update(local, broadcast, examples=6)})
        server.save(folder)


def server_result(folder: Path) -> dict[str, Any]:
    newest = sorted(folder.glob("round-*"))[-checkpoint.KEEP :]  # an older one goes at the next save
    return {path.name: path.read_bytes() for path in newest}


GUARANTEE: dict[str, Any] = {"epsilon": 8.0, "clip": 0.01, "ema_decay": 0.5}


def play_run(folder: Path, rounds: int = ROUNDS, **more: Any) -> None:
    clients = [examples(client) for client in range(3)]
    made: dict[str, Any] = {"rounds": rounds, "seed": 0, "transcripts": ("1", "server", "server-sum"), "lr": 0.1}
    made |= more
    try:
        dbcl.simulate(net, clients, examples(9), folder=folder, resume=True, settings="blind", **made)
    except ConfigError as error:
        # A run that died before it began: nothing has been sent, so a person empties the folder and begins anew.
        if "is not empty" not in str(error):
            raise
        assert not (folder / "config.toml").exists()
        shutil.rmtree(folder)
        dbcl.simulate(net, clients, examples(9), folder=folder, settings="blind", **made)


def run_result(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"metrics": [{**line, "seconds": 0} for line in lines]}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("metrics.jsonl", ".lock"):
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def private_nodes(folder: Path) -> ClientApp:
    """Nodes with trackers of their own beside the server's folder, and with keys that are the same in every run."""
    own = folder.with_name(f"nodes-{folder.name}")
    for number in range(2):
        make_folder(own / f"partition-{number}", secret=True)
        (own / f"partition-{number}" / "key.dbcl").write_bytes(bytes([number]) * 32)
    return nodes_with(GuaranteeMod(PLAN, own))


@cache
def nodes() -> ClientApp:
    return nodes_with()


def nodes_with(*mods: GuaranteeMod) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = blinded(net(), message)
        model(examples(int(context.node_config["partition-id"]))[0]).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return reply(model, message, examples=6, metrics={"loss": 0.5})

    return app


def play_flower(folder: Path, privacy: PrivacyPlan | None = None) -> None:
    inner = flower.FedAvg(fraction_evaluate=0.0) if privacy else flower.FedAdam(eta=0.1, fraction_evaluate=0.0)
    strategy = DoubleBlind(inner, net(), insecure_seed=0, checkpoint=folder, privacy=privacy)
    grid = LocalGrid(private_nodes(folder) if privacy else nodes(), 2)
    strategy.start(grid, num_rounds=ROUNDS, evaluate_fn=lambda round, arrays: MetricRecord({"round": round}))


PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.01, rounds=ROUNDS, clients=2, cohort=2)
SCENARIOS = {
    each.name: each
    for each in (
        Scenario("server", play_server, server_result),
        Scenario("run", play_run, run_result),
        Scenario("resume", play_run, run_result, prepare=lambda folder: play_run(folder, ROUNDS - 1)),
        Scenario("flower", play_flower, server_result),
        Scenario("private run", lambda folder: play_run(folder, **GUARANTEE), run_result),
        Scenario("private flower", lambda folder: play_flower(folder, PLAN), server_result),
    )
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No pictures, which take most of the time, and no log."""
    logging.disable(logging.ERROR)
    try:
        with mock.patch.object(dbcl.simulation.run, "curves", return_value=b"picture"):
            yield
    finally:
        logging.disable(logging.NOTSET)


@cache
def undisturbed(name: str) -> tuple[int, dict[str, Any]]:
    """How many I/O calls a scenario makes, and what it ends with."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as place, quiet():
        folder = Path(place).resolve() / "folder"
        scenario.prepare(folder)
        with Disk(folder).active() as disk:
            scenario.play(folder)
        return disk.count, scenario.result(folder)


def crash(name: str, at: int, kind: str) -> str:
    """Play a scenario with a crash, go on after it, and compare; gives what is wrong, or nothing."""
    scenario, (_, expected) = SCENARIOS[name], undisturbed(name)
    with tempfile.TemporaryDirectory() as place, quiet():
        folder = Path(place).resolve() / "folder"
        scenario.prepare(folder)
        ended = "went on"
        with Disk(folder, at, kind).active() as disk:
            try:
                scenario.play(folder)
            except DeathError:
                ended = "died"
            except (OSError, DbclError) as error:
                ended = f"ended with {error}"
        if not disk.struck:
            return "the call was never made"
        if kind == "death" and ended != "died":
            return f"death was caught: {ended}"
        try:
            scenario.play(folder)
        except (OSError, DbclError) as error:
            return f"{ended}, and cannot go on: {type(error).__name__}: {error}"
        found = scenario.result(folder)
        if found.keys() != expected.keys():
            return f"{ended}, and other files: {sorted(found.keys() ^ expected.keys())}"
        different = [each for each in expected if found[each] != expected[each]]
        return f"{ended}, and different: {different}" if different else ""


def points(name: str) -> list[tuple[int, str]]:
    return [(at, kind) for at in range(undisturbed(name)[0]) for kind in KINDS]


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    for name in sys.argv[1:] or SCENARIOS:
        listed = points(name)
        wrong = [(at, kind, said) for at, kind in listed if (said := crash(name, at, kind))]
        for each in wrong:
            print(name, *each, flush=True)
        print(f"{name}: {len(listed)} crashes, {len(wrong)} wrong", flush=True)
        failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
