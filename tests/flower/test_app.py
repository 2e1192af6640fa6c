"""The example app of examples/flower-app: its two halves together, in this process and in Flower's simulation."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from deploy.federation import APP, MINUTE, Federation
from flwr.app import Context, RecordDict
from torch import Tensor

import dbcl
from dbcl import data
from dbcl.engines import evaluate
from dbcl.errors import ProtocolError
from dbcl.flower import LocalGrid
from dbcl.model import networks
from dbcl.simulation import preset
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.planning import planned

CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_server_and_clients_train_together_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP))
    from dbcl_app import client_app, server_app, task

    def play(rounds: int) -> list[dict[str, float]]:
        config = {**CONFIG, "rounds": rounds, "checkpoint": str(tmp_path)}
        context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        server_app.app(LocalGrid(client_app.app, nodes=3, run_config=config), context)
        return metrics(tmp_path)

    first = play(2)
    assert [line["round"] for line in first] == [0, 1, 2]
    assert first[0]["accuracy"] < 0.3
    assert first[-1]["accuracy"] > 0.7
    # The same command goes on where the first one ended.
    again = play(3)
    assert again[:3] == first
    assert [line["round"] for line in again] == [0, 1, 2, 3]

    model = task.net()
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    digits = data.load("digits")
    assert evaluate(model, (digits.x_test, digits.y_test)).score == pytest.approx(again[-1]["accuracy"])


def test_a_round_that_is_measured_again_has_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP))
    from dbcl_app import client_app, server_app

    def rounds(count: int) -> list[float]:
        config = {**CONFIG, "rounds": count, "checkpoint": str(tmp_path)}
        context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        server_app.app(LocalGrid(client_app.app, nodes=3, run_config=config), context)
        return [line["round"] for line in metrics(tmp_path)]

    def stopped(*lines: str) -> None:
        """Write what a server leaves that is stopped after it has measured a round and before it keeps that."""
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write("".join(lines))

    assert rounds(0) == [0]
    assert rounds(0) == [0]  # the first round was not played, so its starting weights are measured again
    assert rounds(2) == [0, 1, 2]
    stopped(*(tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[-1:], '{"round": 3, "accu')
    assert rounds(3) == [0, 1, 2, 3]
    stopped('{"round": 4, "accuracy": 0.5, "loss": 1.0}\n')
    assert rounds(4) == [0, 1, 2, 3, 4]


def test_the_app_begins_with_weights_that_nobody_knows_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(APP))
    from dbcl_app import client_app, server_app

    monkeypatch.setattr(dbcl.flower, "DoubleBlind", strategies := Kept(dbcl.flower.DoubleBlind))

    def first(seed: str | int) -> dict[str, Tensor]:
        config = {**CONFIG, "rounds": 0, "insecure-seed": seed}
        context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        server_app.app(LocalGrid(client_app.app, nodes=3, run_config=config), context)
        return dict(strategies.last.server.model.state_dict())

    public = networks.build("mnist-mlp").state_dict()
    one, two, fixed, again = (first(seed) for seed in ("", CONFIG["insecure-seed"], 3, 3))
    for name, tensor in one.items():
        assert torch.equal(fixed[name], again[name]), name
        for other in (two, public, fixed):  # of so many numbers some may agree by chance
            assert (tensor == other[name]).float().mean() < 0.001, name


class Kept:
    """Makes strategies, and keeps the last one."""

    def __init__(self, made: type[dbcl.flower.DoubleBlind]) -> None:
        self.made = made

    def __call__(self, *arguments: Any, **more: Any) -> dbcl.flower.DoubleBlind:
        self.last = self.made(*arguments, **more)
        return self.last


def own_config(folder: Path, nodes: int, rounds: int) -> dict[str, Any]:
    """Return the configuration of nodes that insist on the guarantee, each with a key in a folder of its own."""
    keys = [dbcl.flower.make_key(folder / f"partition-{number}") for number in range(nodes)]
    (folder / "keys.txt").write_text("\n".join(keys))
    return {"preset": "guaranteed", "rounds": rounds, "secrets": str(folder), "keys": str(folder / "keys.txt")}


def test_the_app_with_a_guarantee_against_everyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes take part by their own configuration: with a server of another plan, or of none, nobody does."""
    monkeypatch.syspath_prepend(str(APP))
    from dbcl_app import client_app, guarantee, server_app

    whole = planned(preset("guaranteed", rounds=3), examples=4000, values=39_700)
    assert guarantee.plan_of("digits", 10, 3) == privacy_plan(whole, 4000, 39_700)
    few = replace(digits := data.load("digits"), x_train=digits.x_train[:800], y_train=digits.y_train[:800])
    few = replace(few, x_test=digits.x_test[:50], y_test=digits.y_test[:50])
    monkeypatch.setattr(data, "load", lambda name: few)
    monkeypatch.setattr(dbcl.flower, "DoubleBlind", strategies := Kept(dbcl.flower.DoubleBlind))
    own = own_config(tmp_path / "secrets", nodes=10, rounds=3)

    def play(**changes: Any) -> dbcl.flower.DoubleBlind:
        config = {**CONFIG, "preset": "guaranteed", "rounds": 3, "min-nodes": 10, **changes}
        grid = LocalGrid(client_app.app, nodes=10, run_config=config, node_config=own)
        server_app.app(grid, Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config=config))
        return strategies.last

    for other in ({"preset": "blind"}, {"rounds": 4}):
        with pytest.raises(ProtocolError):
            play(**other)
    strategy = play(checkpoint=str(tmp_path / "run"))
    assert [report.accepted for report in strategy.reports] == [10, 10, 10]
    assert strategy.server.guarantee == guarantee.plan_of("digits", 10, 3).promise
    assert [line["round"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert len(list((tmp_path / "secrets").glob("*/features/*"))) == 10


@pytest.mark.slow
def test_flwr_run_simulates_it_without_a_network(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Federation(tmp_path / "federation") as federation:
        federation.start_superlink("--simulation")
        run = federation.run("--federation-config", "num-supernodes=3", rounds=2, checkpoint=str(folder))
        federation.wait(lambda: federation.status(run).startswith("finished"), "the simulation", 3 * MINUTE)
        assert federation.status(run) == "finished:completed", federation.logs()
    assert [line["round"] for line in metrics(folder)] == [0, 1, 2]
    assert metrics(folder)[-1]["accuracy"] > 0.7
