"""The diff of a Flower app in docs/howto/flower.md, both of its sides, run as they are written."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from torch import Tensor, nn

import dbcl
from dbcl.flower import LocalGrid

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "flower.md").read_text()
DIFF = PAGE.split("## The diff")[1].split("```diff\n")[1].split("```")[0]
SECURE = PAGE.split("## Secure aggregation")[1].split("```diff\n")[1].split("```")[0]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


def measured(model: nn.Module, data: Tensor) -> float:
    return float(model(data).square().mean())


def fit(model: nn.Module, data: Tensor) -> float:
    model(data).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return measured(model, data)


def side(sign: str, diff: str = DIFF) -> str:
    """The lines of one side of the diff, with two rounds instead of a hundred."""
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign, "")]
    return "\n".join(lines).replace("num_rounds=100", "num_rounds=2")


def play(code: str) -> list[str]:
    """Run the app in this process, and note which kinds of messages its clients answered."""
    server_code, client_code = re.split(r"(?=@app\.train)", code)
    names: dict[str, Any] = {
        **{each.__name__: each for each in (ArrayRecord, FedAdam, Message, MetricRecord, RecordDict, Net, fit)},
        "test": measured,
        "data": torch.ones(5, 8),
    }
    # The client's file imports dbcl, too; the diff shows the line once.
    server, client = {**names, "app": ServerApp()}, {**names, "app": ClientApp()}
    exec(server_code, server)
    exec(("import dbcl\n" if "import dbcl" in server_code else "") + client_code, client)
    seen: list[str] = []
    grid = LocalGrid(client["app"], nodes=3, hook=lambda message, *more: seen.append(message.metadata.message_type))
    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
    server["app"](grid, context)
    return seen


@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_diff_train_and_evaluate(sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = play(side(sign))
    assert {"train", "evaluate"} <= set(seen)
    assert (tmp_path / "checkpoints").exists() == (sign == "+")


def test_the_diff_for_secure_aggregation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "secure" not in side("-", SECURE).lower()
    names: dict[str, Any] = {"dbcl": dbcl, "FedAvg": FedAvg, "ClientApp": ClientApp, "Net": Net}
    exec(side("+", SECURE), names)

    @names["app"].train()
    def train(message: Message, context: Context) -> Message:
        model = dbcl.flower.blinded(Net(), message)
        return dbcl.flower.reply(model, message, examples=5, metrics={"loss": fit(model, torch.ones(5, 8))})

    kept: list[str] = []
    grid = LocalGrid(names["app"], nodes=8, hook=lambda message: kept.extend(message.content["dbcl"]))
    names["strategy"].start(grid, num_rounds=1)
    assert [report.accepted for report in names["strategy"].reports] == [8]
    assert set(kept) == {"hello", "broadcast", "secure", "step"}
    assert len(list((tmp_path / "dbcl-secrets").iterdir())) == 8


def test_every_function_of_the_client_is_in_the_diff() -> None:
    after = side("+")
    assert after.count("dbcl.flower.blinded(Net(), message)") == after.count("dbcl.flower.reply(model, message") == 2
    assert "@app.evaluate()" in after
