from pathlib import Path
from typing import Any

import pytest

from experiments import gan
from experiments.experiment import Context, Results

SMALL = {"rounds": 6, "examples": 300, "drawings": 20, "judge": 2, "steps": 1}


@pytest.fixture(scope="module")
def played() -> Results:
    jobs = [{**job, **SMALL} for job in gan.jobs(True, Path("nowhere"))[:2]]
    rows = tuple({"job": job, "result": gan.play(job, Context())} for job in jobs)
    return Results(tuple(jobs), rows, quick=True)


def test_a_sketched_model_is_attacked_as_received_and_as_estimated(played: Results) -> None:
    plain, paper = played.of()
    assert list(plain["drawn"]) == ["received"]
    assert list(paper["drawn"]) == ["received", "estimated"]
    assert plain["turns"] == paper["turns"] == 6
    assert plain["drawn"]["received"] != paper["drawn"]["received"]
    assert plain["real"]["nearest"] > 0.7


def test_table_and_figure_have_a_line_for_each(played: Results) -> None:
    text = gan.table(played)
    assert [text.count(f"| `{name}` | 2 | the victim alone |") for name in ("plain", "paper")] == [1, 2]
    assert set(gan.draw(played)) == {"gan"}
    some: Any = Results(played.jobs, played.rows[:1], quick=True)
    assert gan.table(some).count("not run") == 1


def test_the_same_job_gives_the_same_drawings(played: Results) -> None:
    again = gan.play(played.jobs[0], Context())
    assert again["pictures"] == played.of()[0]["pictures"]


def test_a_guarantee_for_each_client_leaves_the_attacker_its_turns() -> None:
    job = {**gan.jobs(True, Path("nowhere"))[-1], **SMALL, "rounds": 30}
    found = gan.play(job, Context())
    assert found["turns"] == 3  # one round in ten
    assert set(found["drawn"]) == {"received", "estimated"}
