"""TensorBoard for real, where it is installed; MLflow and Weights & Biases with modules that write down the calls."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dbcl.errors import ConfigError
from dbcl.run import Run, RunConfig
from dbcl.trackers import TRACKERS, TensorBoard, tracker

NUMBERS = {"accuracy", "loss", "train_loss", "bytes_down", "bytes_up", "accepted", "refused", "clipped", "seconds"}


def config(*places: str, rounds: int = 2) -> RunConfig:
    return RunConfig(rounds=rounds, clients=10, seed=0, track=places)


class Calls(ModuleType):
    """A module whose functions all note their arguments; what they give notes its calls, too."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*arguments: Any, **more: Any) -> "Calls":
            self.calls.append((name, arguments, more))
            return self

        return called


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(name: str) -> Calls:
        module = Calls(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


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


def test_mlflow_is_told_in_its_own_words(tmp_path: Path, fake: Any) -> None:
    mlflow = fake("mlflow")
    history = list(Run.start(config("mlflow:http://127.0.0.1:5000"), tmp_path / "run").play())
    names = [name for name, _, _ in mlflow.calls]
    assert names[:3] == ["set_tracking_uri", "set_experiment", "start_run"]
    assert names[3:] == ["log_params", "log_metrics", "log_metrics", "end_run"]
    assert mlflow.calls[0][1] == ("http://127.0.0.1:5000",)
    assert mlflow.calls[2][2] == {"run_name": "run"}
    assert mlflow.calls[3][1][0]["clients"] == 10
    _, (values,), more = mlflow.calls[5]
    assert more == {"step": 2}
    assert set(values) == NUMBERS
    assert values["accuracy"] == history[1].score


def test_weights_and_biases_is_told_in_its_own_words(tmp_path: Path, fake: Any) -> None:
    wandb = fake("wandb")
    history = list(Run.start(config("wandb:mine"), tmp_path / "run").play())
    assert [name for name, _, _ in wandb.calls] == ["init", "log", "log", "finish"]
    begun = wandb.calls[0][2]
    assert (begun["project"], begun["name"], begun["config"]["clients"]) == ("mine", "run", 10)
    _, (values,), more = wandb.calls[1]
    assert more == {"step": 1}
    assert values["loss"] == history[0].loss
    assert tracker("wandb").project == "dbcl"


def test_a_tracker_is_closed_when_the_training_fails(tmp_path: Path, fake: Any) -> None:
    wandb = fake("wandb")
    run = Run.start(RunConfig(rounds=2, clients=10, seed=0, lr=1000.0, track=("wandb",)), tmp_path / "run")
    with pytest.raises(ConfigError, match="training diverged"):
        list(run.play())
    assert [name for name, _, _ in wandb.calls] == ["init", "finish"]


@pytest.mark.parametrize("place", TRACKERS)
def test_what_is_not_installed_is_said_before_the_folder_is_made(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, place, None)
    with pytest.raises(ConfigError, match=rf"pip install {place}, or pip install '\.\[{place}\]' in a clone of dbcl"):
        Run.start(config(place), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_does_not_exist_is_refused_with_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"no tracker 'paper'; choose tensorboard\[:FOLDER\]"):
        config("paper")


def test_end_without_begin_does_nothing(fake: Any) -> None:
    for name in ("mlflow", "wandb"):
        module = fake(name)
        tracker(name).end()
        assert module.calls == []
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    TensorBoard().end()
