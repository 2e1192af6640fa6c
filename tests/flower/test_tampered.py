"""A checkpoint that others have changed: `DoubleBlind` goes on from it or raises `ProtocolError`, whatever it holds."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, Strategy
from torch import nn

from dbcl.config import SecAggConfig, SketchConfig
from dbcl.errors import ProtocolError
from dbcl.files import write_atomic
from dbcl.flower import DoubleBlind, LocalGrid, SecureMod, blinded, reply
from dbcl.protocol import checkpoint
from dbcl.protocol.codec import CHECKPOINT, pack
from dbcl.state import State

CONFIG = SecAggConfig(clip=4.0, weight_cap=40, min_cohort=3)
VALUES: list[Any] = [None, "x", -1, ["x"], {}]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


def app(secure: bool) -> ClientApp:
    made = ClientApp(mods=[SecureMod(CONFIG)] if secure else [])

    @made.train()
    def train(message: Message, context: Context) -> Message:
        model = blinded(net(), message)
        model(torch.ones(5, 8)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return reply(model, message, examples=5, metrics={"loss": 1.0})

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return reply(blinded(net(), message), message, examples=5, metrics={"loss": 1.0})

    return made


def strategy(folder: Path, *, secure: bool) -> DoubleBlind:
    inner: Strategy = FedAvg(fraction_evaluate=0.0) if secure else FedAdam(eta=0.01)
    sketch, secagg = SketchConfig(lanes=1), CONFIG if secure else None
    return DoubleBlind(inner, net(), sketch, secagg=secagg, insecure_seed=0, checkpoint=folder)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value, itself included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(values: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    values = copy.deepcopy(values)
    place: Any = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return values


@pytest.mark.parametrize("secure", [False, True])
def test_every_value_of_a_checkpoint_may_be_anything(
    secure: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="flwr")
    strategy(tmp_path, secure=secure).start(LocalGrid(app(secure), 3), num_rounds=1)
    state = checkpoint.load(tmp_path)
    (newest,) = tmp_path.glob("round-00000001.dbcl")
    (tmp_path / "round-00000000.dbcl").unlink()
    accepted, rejected = 0, 0
    for path in places(state.values):
        for value in VALUES if path else ():
            tampered = State(changed(state.values, path, value), state.tensors)
            write_atomic(newest, pack(CHECKPOINT, *tampered))
            try:
                resumed = strategy(tmp_path, secure=secure)
            except ProtocolError:
                rejected += 1
                continue
            except Exception as error:
                raise AssertionError(f"{path} = {value!r}") from error
            resumed.summary()
            checkpoint.save(tmp_path / "again", resumed.server.round, resumed.server.state())
            (tmp_path / "again" / f"round-{resumed.server.round:08d}.dbcl").unlink()
            accepted += 1
    assert rejected > accepted > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evaluated", None),
        ("evaluated", "yes"),
        ("nodes", None),
        ("nodes", ["node 1000", "node 1000"]),
        ("nodes", [1000]),
        ("nodes", {"node 1000": 0}),
        ("shown", ["node 9"]),
        ("shown", "node 1000"),
        ("history", [[], []]),
        ("history", [[[-1, {"loss": 1.0}]], [], []]),
        ("history", [[[1, {"loss": "low"}]], [], []]),
        ("history", [[[1, None]], [], []]),
    ],
)
def test_progress_that_cannot_be_is_named_with_the_folder(name: str, value: Any, tmp_path: Path) -> None:
    strategy(tmp_path, secure=False).start(LocalGrid(app(False), 3), num_rounds=1)
    state = checkpoint.load(tmp_path)
    changed_state = State(changed(state.values, ("flower", name), value), state.tensors)
    write_atomic(tmp_path / "round-00000001.dbcl", pack(CHECKPOINT, *changed_state))
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ProtocolError, match=r"cannot go on.*the checkpoint is damaged"):
        DoubleBlind(FedAdam(eta=0.01), model, SketchConfig(lanes=1), insecure_seed=0, checkpoint=tmp_path)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
