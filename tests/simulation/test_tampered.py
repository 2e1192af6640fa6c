"""A run's checkpoint with any of its values replaced, and a seal that fits: resumed, or refused with a `DbclError`."""

import copy
import logging
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dbcl
from dbcl.errors import DbclError, ProtocolError
from dbcl.protocol import checkpoint
from dbcl.protocol.codec import CHECKPOINT, pack
from dbcl.simulation import Run
from dbcl.simulation.task import Task
from dbcl.state import State

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 2
REPLACEMENTS: tuple[Any, ...] = (None, "x", 7, [], {})
KINDS: dict[str, dict[str, Any]] = {
    "blind": {"settings": "blind", "clients": 4},
    "secure aggregation": {
        "settings": "blind", "clients": 6, "secure_aggregation": True, "min_cohort": 3, "lanes": 1,
    },
    "guarantee": {"settings": "private", "clients": 20, "fraction": 0.25, "clip": 1.0, "rounds": 4},
    "guarantee, noise by clients": {"settings": "guaranteed", "clients": 10, "epsilon": 50.0},
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


class StopAfterOne:
    """Interrupts a run after its first round."""

    task: Task

    def begin(self, folder: Path, settings: Any, round: int) -> None: ...
    def log(self, round: int, values: Any) -> None:
        raise KeyboardInterrupt

    def end(self) -> None: ...


@cache
def begun(kind: str) -> tuple[Path, State, dict[str, bytes], Task]:
    """A run after one round: its folder, its state, its other files, and what is trained."""
    folder, made = Path(tempfile.mkdtemp()) / "run", list[Task]()
    settings = {"rounds": 3, "batch_size": 10, "seed": 0, "lr": 0.05, **KINDS[kind]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            Run, "start", lambda *arguments, task, **more: made.append(task) or start(*arguments, task=task)
        )
        with pytest.raises(KeyboardInterrupt):
            dbcl.simulate(net, (X, Y), (X, Y), folder=folder, trackers=[StopAfterOne()], **settings)
    others = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return folder, checkpoint.load(folder / "checkpoints"), others, made[0]


start = Run.start


def resumed(kind: str, values: Any) -> Run:
    """Resume the run after its values were replaced."""
    folder, state, others, task = begun(kind)
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    for name, data in others.items():
        (folder / name).write_bytes(data)
    (folder / "checkpoints" / "round-00000001.dbcl").write_bytes(pack(CHECKPOINT, values, state.tensors))
    return Run.resume(folder, task=task)


def places(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested values, from the outermost on."""
    if at:
        yield at
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))


def replaced(values: Any, at: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(values)
    place = changed
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = new
    return changed


def test_any_replaced_value_of_a_run_is_taken_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Those that a run reads itself, whole parts, and those that only the next round needs."""
    caplog.set_level(logging.CRITICAL)
    values, refused = begun("blind")[1].values, 0
    for at in places(values):
        if not (at[0] == "run" or len(at) < 3 or {"groups", "number", "influence", "mean"} & {*at}):
            continue
        for new in REPLACEMENTS:
            try:
                run = resumed("blind", replaced(values, at, new))
                next(iter(run.play()))
            except DbclError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{at} = {new!r}") from error
    assert refused > 100


@pytest.mark.parametrize("kind", KINDS)
def test_any_replaced_value_of_a_server_is_taken_or_refused(kind: str) -> None:
    """Clients are alike: the values of one of them are replaced."""
    state = begun(kind)[1]
    server = resumed(kind, state.values).server
    refused = 0
    for at in places(state.values):
        if at[0] != "server" or any(str(key).startswith("client ") and key != "client 1" for key in at):
            continue
        for new in REPLACEMENTS:
            try:
                server.load_state(State(replaced(state.values, at, new), state.tensors).part("server"))
            except DbclError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{at} = {new!r}") from error
            if server.round != 1:  # with a guarantee it would refuse to go back
                server = resumed(kind, state.values).server
    server.load_state(state.part("server"))
    assert refused > 100


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_replaced_goes_on(kind: str) -> None:
    run = resumed(kind, begun(kind)[1].values)
    assert next(iter(run.play())).round == 2


@pytest.mark.parametrize("seed", ["", "00", "00" * 31, "00" * 33, "zz" * 32, 7, None])
def test_a_seed_of_another_size_is_named(seed: Any) -> None:
    values = begun("blind")[1].values
    with pytest.raises(ProtocolError, match="the checkpoint is damaged: the run's seed"):
        resumed("blind", replaced(values, ("run", "seed"), seed))


def test_a_setting_of_the_optimiser_is_named() -> None:
    at = ("server", "weights", "optimizer", "groups", 0, "momentum")
    with pytest.raises(ProtocolError, match=r"damaged, or of another optimiser: momentum is 'x' there and '0\.5' here"):
        resumed("blind", replaced(begun("blind")[1].values, at, "x"))
