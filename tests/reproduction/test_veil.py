from pathlib import Path
from typing import Any

import pytest

from experiments import veil
from experiments.experiment import Context, ExperimentJob, Results

NOWHERE = Path("nowhere")
JOBS = tuple(veil.jobs(True, NOWHERE))
SMALL = {"rounds": 24, "batch": 4, "own_batches": 1, "own_examples": 4, "pictures": 1, "steps": 100}


def of(size: float, part: str, clients: int = 2) -> ExperimentJob:
    found = [job for job in JOBS if (job["veil"], job["part"], job.get("clients", clients)) == (size, part, clients)]
    return {**found[0], **{name: value for name, value in SMALL.items() if name in found[0]}}


def test_every_size_has_every_part() -> None:
    for quick in (False, True):
        jobs = veil.jobs(quick, NOWHERE)
        parts = {size: [job["part"] for job in jobs if job["veil"] == size] for size in {job["veil"] for job in jobs}}
        assert set(map(tuple, parts.values())) == {("updates", "updates", "pictures", "accuracy")}


@pytest.mark.slow
def test_without_a_veil_the_update_is_exact_and_with_one_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(veil, "SMOOTHERS", ("smoother",))  # the shaped one takes long
    bare, veiled = (veil.play(of(size, "updates"), Context()) for size in (0.0, 0.2))
    assert bare["cosines"]["smoother"] > 0.98
    assert bare["cosines"]["formula"] == 1
    assert veiled["cosines"]["smoother"] < 0.5
    assert {each["adversary"] for each in bare["scores"]} == {"client", "server"}


@pytest.mark.slow
def test_under_a_veil_a_smoother_that_models_shapes_knows_more() -> None:
    cosines = veil.play(of(0.2, "updates"), Context())["cosines"]
    assert cosines["shaped smoother"] > cosines["smoother"]


@pytest.mark.slow
def test_of_ten_clients_there_is_no_single_update_to_compare_with() -> None:
    found = veil.play(of(0.0, "updates", 10), Context())
    assert set(found) == {"scores"}


@pytest.mark.slow
def test_a_picture_is_rebuilt_without_a_veil_only() -> None:
    bare, veiled = (veil.play(of(size, "pictures"), Context())["psnr"] for size in (0.0, 0.2))
    assert len(bare) == len(veiled) == 1
    assert bare[0] > veiled[0] + 3


def result(job: ExperimentJob) -> dict[str, Any]:
    scores = [
        {"adversary": adversary, "attack": f"{learner} on something", "auc": 0.5 + number / 10}
        for number, (adversary, learner) in enumerate(
            [("client", "random forest"), ("client", "matched filter"), ("server", "matched filter")]
        )
    ]
    cosines = {"smoother": 0.1, "shaped smoother": 0.3, "formula": 0.2}
    return {
        "updates": {"scores": scores, "cosines": cosines},
        "pictures": {"psnr": [8.0, 12.0, 7.0]},
        "accuracy": {"accuracy": 0.9},
    }[job["part"]]


@pytest.mark.parametrize("missing", [0, 1])
def test_the_table_has_a_line_for_each_size(missing: int) -> None:
    rows = tuple({"job": job, "result": result(job)} for job in JOBS[missing:])
    found = Results(JOBS, rows, quick=True)
    text = veil.table(found)
    assert "| 0.2 | 0.10 | 0.20 | 0.30 | 8.0 (8.0, 12.0, 7.0) | 0.60 / 0.50 | 0.60 / 0.50 | 90.0% |" in text
    assert text.count("not run") == 4 * missing  # three cosines and the AUCs
    assert set(veil.draw(found)) == {"veil"}
