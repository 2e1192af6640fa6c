from pathlib import Path
from typing import Any

import pytest

from dbcl.simulation import RunConfig, preset
from experiments import runner
from experiments.experiment import Context, ExperimentJob
from experiments.registry import find
from experiments.training import train


class Over(Exception):  # noqa: N818
    pass


def until(rounds: int, scratch: Path) -> Context:
    """A context whose time is over after so many rounds."""

    def tell(text: str, done: int, total: int) -> None:
        if done >= rounds:
            raise Over

    return Context(tell=tell, scratch=scratch)


def without_times(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "training_seconds"}


@pytest.mark.parametrize("name", ["paper", "blind"])
def test_a_run_goes_on_in_the_middle_and_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    config: RunConfig = preset(name, clients=10, fraction=0.4, rounds=6, seed=3)
    whole = train(config, Context())
    for rounds in (2, 5):
        with pytest.raises(Over):
            train(config, until(rounds, tmp_path))
    again = train(config, Context(scratch=tmp_path))
    assert without_times(again) == without_times(whole)
    assert again["numbers"] == [1, 2, 3, 4, 5, 6]


def test_a_run_may_be_evaluated_every_few_rounds_and_always_at_its_end() -> None:
    run = train(preset("plain", clients=10, rounds=5, seed=0), Context(), every=2)
    assert run["numbers"] == [2, 4, 5]
    assert len(run["accuracies"]) == len(run["losses"]) == 3


def test_the_runner_removes_what_a_job_kept(tmp_path: Path) -> None:
    experiment = find("table1")
    order = runner.Order(tmp_path, quick=True, only=("network=mlp", "preset=plain", "percent=10"))
    calls: list[str] = []

    def tell(text: str, done: int, total: int) -> None:
        calls.append(text)
        if len(calls) == 4:
            raise runner.OutOfTime

    assert not runner.play(experiment, order, Context(tell=tell))
    folder = order.folder("table1")
    assert len(list(folder.glob("unfinished-*/round-*.dbcl"))) == 1
    assert runner.play(experiment, order, Context())
    assert list(folder.glob("unfinished-*")) == []
    job: ExperimentJob = experiment.jobs(True, tmp_path)[0]
    rows = runner.results(experiment, order).rows
    assert [row["job"] for row in rows] == [job]
    assert without_times(rows[0]["result"]) == without_times(experiment.play(job, Context()))
