from pathlib import Path
from typing import Any

import pytest

from experiments import rounds
from experiments.experiment import ExperimentJob, Results

NOWHERE = Path("nowhere")
JOBS = tuple(rounds.jobs(False, NOWHERE))


def run(job: ExperimentJob, count: int, *, reached: bool = True) -> dict[str, Any]:
    megabytes = {"plain": 16, "veil": 16}.get(job["way"], 8)
    return {
        "rounds": count, "reached": reached, "accuracy": 0.97, "accuracies": [0.97] * count, "refused": 0, "error": "",
        "bytes": megabytes * 1_000_000 * count,
    }  # fmt: skip


def counted(job: ExperimentJob) -> int:
    """Rounds at which `plain` is best with momentum 0.7, which a comparison must not miss."""
    return {"plain": 40 if job["server_momentum"] != 0.7 else 20, "blind": 30}.get(job["way"], 50)


def test_plain_is_scanned_over_momentum_and_rate_with_every_seed() -> None:
    scanned = [job for job in JOBS if job["part"] == "mlp" and job["way"] == "plain"]
    for momentum in (0.0, 0.5, 0.7, 0.9):
        own = [job for job in scanned if job["server_momentum"] == momentum]
        assert {job["seed"] for job in own} == {0, 1, 2, 3, 4, 11, 12, 13}
        assert len({job["lr"] for job in own}) >= 3
    assert {job["way"] for job in JOBS if job["part"] == "mlp"} == {
        "plain",
        "blind",
        "veil",
        "paper",
        "blind, one lane",
    }


@pytest.mark.parametrize("part", sorted({job["part"] for job in JOBS}))
def test_every_job_describes_a_run(part: str) -> None:
    for job in JOBS:
        if job["part"] == part and job["seed"] == 0:
            config = rounds.config_of(job)
            assert config.lr == job["lr"]
            assert (config.server_optimizer == "momentum") == (job["server_momentum"] > 0)


def test_ways_are_compared_with_the_best_plain_setting() -> None:
    rows = tuple({"job": job, "result": run(job, counted(job))} for job in JOBS)
    found = Results(JOBS, rows)
    job, runs = rounds.best(found, "mlp", "plain") or ({}, [])
    assert job["server_momentum"] == 0.7
    assert rounds.median_rounds(runs) == 20
    line = next(line for line in rounds.table(found).splitlines() if line.startswith("| `blind` |"))
    assert " | 1.50 | 0.75 | " in line
    assert len(rounds.draw(found)["rounds"].axes) == 6


def test_runs_that_miss_the_target_have_no_ratio() -> None:
    rows = tuple({"job": job, "result": run(job, 200, reached=job["way"] == "plain")} for job in JOBS)
    line = next(line for line in rounds.table(Results(JOBS, rows)).splitlines() if line.startswith("| `blind` |"))
    assert "not in 200 rounds" in line
    assert " | – | – | – | " in line
