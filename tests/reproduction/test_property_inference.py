from pathlib import Path
from typing import Any

import pytest

from experiments import property_inference
from experiments.experiment import Context, Results

JOBS = property_inference.jobs(True, Path("nowhere"))


@pytest.mark.slow
def test_both_seats_and_all_learners_are_played() -> None:
    small = {"model": "dlg-lenet", "rounds": 30, "batch": 4, "own_batches": 1, "own_examples": 8}
    found = property_inference.play({**JOBS[1], **small}, Context())
    assert (found["property"], found["tested"]) == ("thick strokes", 20)
    places = {(each["adversary"], each["attack"]) for each in found["scores"]}
    assert set(property_inference.PUBLISHED) < places
    assert ("client", "matched filter of magnitudes on rewind") in places
    assert all(each["low"] <= each["auc"] <= each["high"] for each in found["scores"])


def score(adversary: str, attack: str, auc: float) -> dict[str, Any]:
    return {"adversary": adversary, "attack": attack, "auc": auc, "low": auc - 0.05, "high": auc + 0.02}


def test_the_table_has_the_papers_numbers_beside_ours() -> None:
    forest, rewind = "random forest on option I", "matched filter on rewind"
    scores = {
        "plain": [score("client", forest, 0.97)],
        "paper": [score("client", forest, 0.52), score("client", rewind, 0.96)],
    }
    rows = tuple(
        {"job": job, "result": {"property": "p", "tested": 9, "trained": 1, "scores": scores[job["preset"]]}}
        for job in JOBS
    )
    text = property_inference.table(Results(tuple(JOBS), rows, quick=True))
    lines = [line for line in text.splitlines() if line.startswith("| client")]
    assert lines == [
        f"| client | {forest} | published | 0.970 (0.92 to 0.99) | 0.520 (0.47 to 0.54) | 1.0 | 0.5 |",
        f"| client | {rewind} | adaptive |  | 0.960 (0.91 to 0.98) |  |  |",
    ]
    only = Results(tuple(JOBS), rows[1:], quick=True)
    assert property_inference.table(only).count("not run") == 2
    assert set(property_inference.draw(only)) == {"property-inference"}
