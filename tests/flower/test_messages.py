"""What a Flower app is told about its checkpoints: where they are, that a run is done, and why one cannot go on."""

import logging
import re
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from torch import nn

from dbcl.config import SketchConfig
from dbcl.errors import ProtocolError
from dbcl.flower import DoubleBlind, LocalGrid, blinded, reply


def net(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = blinded(net(), message)
    model(torch.ones(5, 8)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return reply(model, message, examples=5)


def play(folder: str | Path | None, rounds: int) -> DoubleBlind:
    strategy = DoubleBlind(FedAvg(fraction_evaluate=0.0), net(), SketchConfig(coverage="hidden"), checkpoint=folder)
    strategy.start(LocalGrid(app, 2), num_rounds=rounds)
    return strategy


def test_checkpoints_go_to_an_absolute_folder_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = DoubleBlind(FedAvg(fraction_evaluate=0.0), net(), SketchConfig(coverage="hidden"), checkpoint="kept")
    monkeypatch.chdir("/")  # whatever the program does later
    with caplog.at_level(logging.INFO, logger="flwr.dbcl"):
        strategy.start(LocalGrid(app, 2), num_rounds=1)
    assert f"checkpoints are in {tmp_path / 'kept'}" in caplog.text
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == [".lock", "round-00000000.dbcl", "round-00000001.dbcl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        DoubleBlind(FedAvg(), net(), SketchConfig(coverage="hidden"), checkpoint="~/other").folder == tmp_path / "other"
    )


def test_a_finished_run_says_so_and_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flwr.dbcl"):
        play(tmp_path, 3)
        assert "nothing to train" not in caplog.text
        assert play(tmp_path, 3).reports == []
    assert (
        "all 3 rounds are done; nothing to train. To go on, ask for more rounds (num_rounds); "
        f"to begin anew, use another folder than {tmp_path} as checkpoint"
    ) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="flwr.dbcl"):
        assert len(play(tmp_path, 4).reports) == 1
    assert "nothing to train" not in caplog.text


def test_a_changed_model_or_strategy_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    play(tmp_path, 1)
    words = f"the run in {re.escape(str(tmp_path))} cannot go on; use the model, the plan and the"
    with pytest.raises(ProtocolError, match=rf"{words} .* or another folder as checkpoint, .*: the checkpoint belongs"):
        DoubleBlind(FedAvg(), net(width=7), SketchConfig(coverage="hidden"), checkpoint=tmp_path)
    with pytest.raises(ProtocolError, match=words):
        DoubleBlind(FedAdam(), net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path)
