from pathlib import Path
from typing import Any

import pytest
import torch

from dbcl import data
from dbcl.protocol import blinded
from dbcl_audit.attacks.gradients import gradients
from experiments import gradient_matching
from experiments.experiment import Context, Results

JOBS = gradient_matching.jobs(True, Path("nowhere"))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    dataset = data.load("digits")
    jobs = {case: {**JOBS[0], "case": case} for case in ("no sketch", "adaptive")}
    return {
        case: gradient_matching._simulate(job, dataset, tmp_path_factory.mktemp(case.split()[0]))
        for case, job in jobs.items()
    }


def cosine(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([each[name].flatten() for name in sorted(one)]) for each in (one, other))
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("adversary", gradient_matching.ADVERSARIES)
@pytest.mark.parametrize(
    ("case", "low", "high"), [("no sketch", 0.999, 1), ("adaptive", 0.999, 1), ("the paper's attacker", -0.9, 0.9)]
)
def test_who_knows_the_sketch_has_the_victims_gradient(
    rehearsed: dict[str, Any], adversary: str, case: str, low: float, high: float
) -> None:
    played = rehearsed["no sketch" if case == "no sketch" else "adaptive"]
    _, found = gradient_matching.target(played, adversary, case, round=1)
    dataset, rows = data.load("digits"), torch.from_numpy(played.script[1, 1])
    x, y = dataset.x_train[rows].double(), dataset.y_train[rows]
    template = played.attacker.template().double()
    if case == "adaptive":
        true = gradients(blinded(template, played.attacker[1].broadcast), x, y)
    else:
        template.load_state_dict(played.truth.weights(1))
        true = gradients(template, x, y)
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in true.items()}
    assert low < cosine(found, true) <= high + 1e-9


def test_a_picture_is_rebuilt_and_measured() -> None:
    job = {**JOBS[0], "steps": 150}
    found = gradient_matching.play(job, Context())
    assert found["psnr"][0] > 20 > found["guess"][0]  # one sees what it shows
    assert gradient_matching.pictures(found["rebuilt"], found["shape"]).shape == (1, 1, 28, 28)


def test_batches_are_paired_with_the_true_pictures() -> None:
    job = {**JOBS[0], "steps": 1, "batch": 2}
    found = gradient_matching.play(job, Context())
    assert len(found["psnr"]) == len(found["guess"]) == 2
    assert gradient_matching.pictures(found["truth"], found["shape"]).shape == (2, 1, 28, 28)


def test_table_and_figure_have_every_seat_and_case() -> None:
    blank = gradient_matching.pixels(torch.zeros(1, 1, 28, 28))
    result = {"psnr": [30.0], "guess": [12.0], "loss": 0.0, "shape": [1, 28, 28], "truth": blank, "rebuilt": blank}
    found = Results(tuple(JOBS), tuple({"job": job, "result": result} for job in JOBS[1:]), quick=True)
    text = gradient_matching.table(found)
    assert "| embedded digits | server | 1 | 30.0 (30.0) | 30.0 (30.0, 30.0) | 30.0 (30.0, 30.0) | 12.0 |" in text
    assert "“completely fails”" in text
    assert set(gradient_matching.draw(found)) == {"gradient-matching"}
