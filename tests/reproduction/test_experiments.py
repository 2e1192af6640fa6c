"""Each experiment by itself: what its table and figure make of rows, and the reduced setting of all of them."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments import complexity, gradient_error, lfw_roc, tables, theory
from experiments.experiment import Context, Results
from experiments.registry import EXPERIMENTS

NOWHERE = Path("nowhere")
LIMIT = 180
"""Seconds that the reduced setting of any experiment may take on 2 cores."""


def test_theory_compares_simulations_with_formulas() -> None:
    jobs = [{**job, "draws": 200} if "draws" in job else job for job in theory.jobs(True, NOWHERE)]
    rows = tuple({"job": job, "result": theory.play(job, Context())} for job in jobs)
    found = Results(tuple(jobs), rows, quick=True)
    deviations = [run["deviation"] for run in found.of() if "deviation" in run]
    assert len(deviations) == 18
    assert max(map(abs, deviations)) < 4  # chance of a false alarm: about 18 times 6e-5
    text = theory.table(found)
    assert text.count("Theorem 1") == text.count("Theorem 2") == text.count("Lemma 5") == 3
    assert "not run" not in text
    assert set(theory.draw(found)) == {"theory"}


def test_theorem_2_as_printed_is_that_of_hashed_buckets() -> None:
    jobs = [job for job in theory.jobs(True, NOWHERE) if job["check"] == "linear"]
    runs = {job["scheme"]: theory.play({**job, "draws": 10}, Context()) for job in jobs}
    assert runs["count-hashed-v1"]["printed"] == pytest.approx(runs["count-hashed-v1"]["predicted"])
    assert runs["count-v1"]["printed"] > 1.8 * runs["count-v1"]["predicted"]


def timed(job: dict[str, Any]) -> dict[str, Any]:
    """Times that follow the paper's formula, with other weights."""
    b, din, dout, s = (job[name] for name in ("batch", "din", "dout", "s"))
    sketched, server = 1e-9 * b * din + 1e-10 * b * s * dout, 2e-9 * din * dout
    seconds = {"plain": 1e-10 * b * din * dout, "sketched": sketched, "server": server}
    return {"seconds": seconds, "bytes": {"plain": 4 * din * dout, "sketched": 4 * s * dout}}


def test_complexity_finds_the_growth_that_is_there() -> None:
    jobs = complexity.jobs(True, NOWHERE)
    found = Results(tuple(jobs), tuple({"job": job, "result": timed(job)} for job in jobs), quick=True)
    text = complexity.table(found)
    assert "1 b din + 2 din dout + 0.1 b s dout nanoseconds, which is off by 0% in the median" in text
    row = next(line for line in text.splitlines() if line.startswith("| s |"))
    cells = row.split(" | ")
    assert cells[1] == cells[2]  # the fitted formula grows as the times do
    assert (cells[3], cells[5], cells[6]) == ("0.00", "0.00", "1.00 |")  # plain pass, server, bytes
    assert complexity.exponent([1, 2, 4, 8], [5, 20, 80, 320]) == pytest.approx(2)


def test_complexity_measures_a_layer_that_is_sketched() -> None:
    job = {"sweep": "s", "batch": 8, "din": 256, "dout": 64, "s": 64, "seed": 0, "repeats": 3}
    found = complexity.play(job, Context())
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert found["bytes"]["sketched"] < 0.27 * found["bytes"]["plain"]


def test_estimates_are_compared_with_what_the_others_changed() -> None:
    jobs = gradient_error.jobs(True, NOWHERE)
    job = {**jobs[0], "model": "dlg-lenet", "lr": 0.1, "rounds": 40, "clients": 40}
    runs = [gradient_error.play(job, Context())]
    estimates = runs[0]["estimates"]
    assert runs[0]["rounds"] == list(range(39))
    assert set(runs[0]["tensors"]) == {"0.0.weight", "0.2.weight", "0.4.weight"}
    first = {name: each["errors"][0] for name, each in estimates.items()}
    assert first["option I"] > 10  # far from the truth, as the paper says
    assert first["smoother"] < 1e-3  # and yet a client that remembers knows it
    assert estimates["smoother"]["cosines"][0] > 0.999
    assert abs(estimates["option I"]["cosines"][0]) < 0.2
    found = Results((job,), ({"job": job, "result": runs[0]},), quick=True)
    assert gradient_error.table(found).count("every round") == 4
    assert set(gradient_error.draw(found)) == {"gradient-error"}


def test_an_attacker_with_its_own_rounds_sees_the_others_not() -> None:
    job = {**gradient_error.jobs(True, NOWHERE)[1], "rounds": 40}
    found = gradient_error.play(job, Context())
    assert 2 <= len(found["rounds"]) < 20
    assert all(math.isfinite(error) for each in found["estimates"].values() for error in each["errors"])


def test_lower_targets_are_read_off_the_curve_of_a_run() -> None:
    run = {"accuracies": [0.5, 0.94, 0.9, 0.96], "error": ""}
    assert tables.until(run, 0.95) == {"reached": True, "rounds": 4, "error": ""}
    assert tables.until(run, 0.97) == {"reached": False, "rounds": 4, "error": ""}


def test_a_roc_curve_comes_from_held_out_scores() -> None:
    job = {**lfw_roc.jobs(True, NOWHERE)[0], "rounds": 2}
    found = lfw_roc.play(job, Context())
    assert (found["positives"], found["negatives"]) == (200, 800)
    assert found["false"][0] == found["true"][0] == 0
    assert found["false"][-1] == found["true"][-1] == 1
    assert found["low"] <= found["auc"] <= found["high"]
    assert found["areas"][-1] == pytest.approx(found["auc"], abs=1e-4)


def test_two_runs_of_a_preset_on_lfw_are_told_apart_by_their_steps() -> None:
    jobs = lfw_roc.jobs(False, NOWHERE)
    curve = {"false": [0.0, 1.0], "true": [0.0, 1.0], "numbers": [1, 2], "areas": [0.6, 0.7], "positives": 3}
    rows = tuple(
        {"job": job, "result": {**curve, "negatives": 4, "auc": auc, "low": 0.5, "high": 1.0}}
        for job, auc in zip(jobs[1:], (0.7, 0.8, 0.9), strict=True)
    )
    text = lfw_roc.table(Results(tuple(jobs), rows))
    assert "| `plain` | 8,000 | not run | not run |" in text
    assert "| `paper` | 8,000 | 0.7000 (0.5000 to 1.0000) | 0.6000 |" in text
    assert "| `paper` | 20,000 | 0.9000 (0.5000 to 1.0000) | 0.6000 |" in text
    labels = lfw_roc.draw(Results(tuple(jobs), rows))["lfw-roc"].axes[1].get_legend_handles_labels()[1]
    assert labels == ["paper, 8,000 steps", "blind, 8,000 steps", "paper, 20,000 steps"]


def test_every_network_has_an_attacker_that_sees_all_rounds() -> None:
    jobs = gradient_error.jobs(False, NOWHERE)
    seen = {(job["network"], job["sees"]) for job in jobs}
    assert seen == {("mlp", "every"), ("mlp", "own"), ("cnn", "every"), ("cifar", "every")}
    text = gradient_error.table(Results(tuple(jobs), ()))
    assert text.count("not run") == len(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [experiment.name for experiment in EXPERIMENTS])
def test_the_reduced_setting_takes_less_than_three_minutes(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments", name, "--quick", "--out", str(tmp_path), "--device", "cpu"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests side by side would wait for each other's threads
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    folder = tmp_path / name / "quick"
    assert "jobs have not been played" not in (folder / "README.md").read_text()
    assert list(folder.glob("*.png"))
    assert seconds < LIMIT
