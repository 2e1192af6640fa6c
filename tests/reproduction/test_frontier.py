from pathlib import Path
from typing import Any

import pytest

from dbcl.simulation.build import secagg_config
from experiments import frontier
from experiments.experiment import Context, ExperimentJob, Results
from experiments.frontier import DEFENCES, EXPERIMENT

NOWHERE = Path("nowhere")
JOBS = tuple(EXPERIMENT.jobs(False, NOWHERE))


def run(job: ExperimentJob, *, reached: bool = True) -> dict[str, Any]:
    """A result as a job gives it."""
    promised = job["preset"] == "private"
    adversaries = (
        ("run", "server") if promised else ("cohort", "run", "server") if job["sums"] else frontier.ADVERSARIES
    )
    got = {"auc": 0.75, "attack": "losses over all rounds", "tpr": 0.25, "in_a_sum": 10 if job["sums"] else 1}
    return {
        "accuracy": 0.95,
        "accuracies": [0.5, 0.91 if reached else 0.6],
        "rounds": 2,
        "bytes": 8_000_000,
        "error": "",
        "attacks": dict.fromkeys(adversaries, got),
        "not_attacked": {adversary: "why" for adversary in frontier.ADVERSARIES if adversary not in adversaries},
        "auc_bound": 0.875 if promised else None,
    }


def results(jobs: tuple[ExperimentJob, ...], played: tuple[ExperimentJob, ...]) -> Results:
    return Results(jobs, tuple({"job": job, "result": run(job)} for job in played))


def line(text: str, *cells: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(f"| {' | '.join(cells)} |"))


def test_every_defence_is_there_with_and_without_sums_and_the_most_telling_come_first() -> None:
    named = [(job["defence"], job["sums"]) for job in JOBS]
    assert sorted(named) == sorted(
        (name, sums) for each in DEFENCES.values() for name in each for sums in (False, True)
    )
    assert named[:5] == frontier.FIRST
    assert [(job["defence"], job["sums"]) for job in EXPERIMENT.jobs(True, NOWHERE)] == frontier.QUICK
    assert {job["rounds"] for job in JOBS if job["family"] == "private"} == {400}


@pytest.mark.parametrize("job", JOBS, ids=frontier.title_of)
def test_every_run_can_be_played(job: ExperimentJob) -> None:
    config = frontier.config_of(job)
    assert config.secure_aggregation == job["sums"]
    lanes = 2 if job["family"] == "blind" else 1
    secagg = secagg_config(config, lanes=lanes, largest=40, values=1000)
    assert (secagg is not None) == job["sums"]  # enough clients in each lane
    assert (config.privacy is not None) == (job["family"] == "private")
    assert (config.sketch.veil > 0) == (job["family"] == "blind")


def test_the_table_has_a_line_for_each_defence_and_says_what_is_not_possible() -> None:
    text = frontier.table(results(JOBS, JOBS[:-1]))
    assert text.count("\n| ") == len(JOBS) + 1
    assert line(text, "none", "none", "no").endswith("| 95.0% | 2 | 8 | 8 | 0.750 | 0.750 | 0.750 | 25%, 0.750 |")
    assert line(text, "blind", "veil 0.2", "yes").endswith("| – (why) | 0.750 | 0.750 | 25%, 0.750, sums of 10 |")
    assert "| – (why) | – (why) | 0.750 (at most 0.88) |" in line(text, "private", "epsilon 8", "no")
    assert "not run" in line(text, "private", "epsilon 8", "yes")


def test_a_run_that_never_had_the_target_says_so_and_is_drawn_with_all_it_sent() -> None:
    job = JOBS[1]
    never = run(job, reached=False)
    found = Results(JOBS, ({"job": job, "result": never},))
    assert "| 95.0% | not in 2 rounds | – | 8 |" in frontier.table(found)
    right = frontier.draw(found)["frontier"].axes[1]
    assert [(each.get_marker(), *each.get_xdata()) for each in right.lines if each.get_marker() == ">"] == [(">", 8.0)]


def test_the_figure_joins_the_points_of_a_family() -> None:
    figure = frontier.draw(results(JOBS, JOBS))["frontier"]
    assert len(figure.axes) == 6
    labels = figure.axes[2].get_legend_handles_labels()[1]  # as the run is: every family, with sums and without
    assert sorted(labels) == sorted(f"{family}{more}" for family in DEFENCES for more in ("", ", sums"))
    assert max(len(each.get_xdata()) for each in figure.axes[2].lines[:-1]) == len(DEFENCES["blind"])
    assert not any(label.startswith("private") for label in figure.axes[0].get_legend_handles_labels()[1])


def test_the_strongest_attack_has_the_highest_auc() -> None:
    from dbcl_audit.findings import Finding

    findings = [
        Finding(attack, "client", "adaptive", "membership", measure, value)
        for attack, measure, value in (
            ("weak", "auc", 0.6), ("strong", "auc", 0.8), ("weak", "tpr at 0.1 % fpr", 0.3),
            ("strong", "tpr at 1 % fpr", 0.9), ("strong", "tpr at 0.1 % fpr", 0.2),
        )
    ]  # fmt: skip
    assert frontier._strongest(findings) == {"auc": 0.8, "attack": "strong", "tpr": 0.3}
    assert frontier._strongest(findings[:1]) == {"auc": 0.6, "attack": "weak", "tpr": None}


@pytest.mark.slow
def test_without_a_veil_a_client_tells_the_members_of_all_others_and_with_one_it_does_not() -> None:
    plain, paper, sums = (EXPERIMENT.play(job, Context()) for job in EXPERIMENT.jobs(True, NOWHERE))
    for found in (plain, paper):
        assert found["attacks"]["two"]["auc"] > 0.99
        assert found["attacks"]["cohort"]["auc"] > 0.95
        assert found["attacks"]["server"]["tpr"] == 1
    assert sums["not_attacked"]["two"] == frontier.WITH_SUMS
    assert sums["attacks"]["server"]["in_a_sum"] == 10
    assert sums["attacks"]["cohort"]["auc"] < plain["attacks"]["cohort"]["auc"] - 0.1
