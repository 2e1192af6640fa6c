"""TensorBoard where it is installed, and trackers of one's own."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dbcl
from dbcl.errors import ConfigError
from dbcl.simulation import Run, RunConfig
from dbcl.trackers import TensorBoard

NUMBERS = {"accuracy", "loss", "train_loss", "bytes_down", "bytes_up", "accepted", "refused", "clipped", "seconds"}


def config(*places: str, rounds: int = 2) -> RunConfig:
    return RunConfig(rounds=rounds, clients=10, seed=0, track=places)


def test_tensorboard_gets_every_number_of_every_round_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Run.start(config(f"tensorboard:{tmp_path / 'logs'}"), tmp_path / "run")
    history = list(first.play())
    history += Run.resume(tmp_path / "run", rounds=3).play()
    read = EventAccumulator(str(tmp_path / "logs" / "run"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == NUMBERS
    drawn = [(event.step, event.value) for event in read.Scalars("accuracy")]
    assert drawn == [(metrics.round, pytest.approx(metrics.score)) for metrics in history]
    assert [step for step, _ in drawn] == [1, 2, 3]
    assert read.Tags()["tensors"] == ["settings/text_summary"]


def test_tensorboard_without_a_folder_writes_into_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    list(Run.start(config("tensorboard", rounds=1), tmp_path / "run").play())
    assert len(list((tmp_path / "run" / "tensorboard").glob("events.*"))) == 1


class Noted:
    """Notes the names of the calls that a run makes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.settings: Mapping[str, Any] = {}

    def begin(self, folder: Path, settings: Mapping[str, Any], round: int) -> None:
        self.calls.append("begin")
        self.settings = settings

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self.calls.append(f"log {round}")

    def end(self) -> None:
        self.calls.append("end")


def test_a_tracker_of_ones_own_is_told_of_every_round_and_of_the_end(tmp_path: Path) -> None:
    noted = Noted()
    list(Run.start(config(), tmp_path / "run").play(noted))
    assert noted.calls == ["begin", "log 1", "log 2", "end"]
    assert noted.settings == {**config().options(), "dbcl": dbcl.__version__}
    assert noted.settings["veil"] == 0.2  # by its flat name


def test_a_tracker_is_closed_when_the_training_fails(tmp_path: Path) -> None:
    noted = Noted()
    run = Run.start(RunConfig(rounds=2, clients=10, seed=0, lr=1000.0), tmp_path / "run")
    with pytest.raises(ConfigError, match="training diverged"):
        list(run.play(noted))
    assert noted.calls == ["begin", "end"]


def test_what_is_not_installed_is_said_before_the_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard"):
        Run.start(config("tensorboard"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_does_not_exist_is_refused_with_the_settings() -> None:
    with pytest.raises(ConfigError, match="no tracker 'paper'"):
        config("paper")


def test_end_without_begin_does_nothing() -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    TensorBoard().end()
