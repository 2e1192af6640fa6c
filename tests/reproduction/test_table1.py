from pathlib import Path
from typing import Any

import pytest

from dbcl.errors import ConfigError
from dbcl.simulation import presets
from experiments import table1
from experiments.experiment import Context, Results
from experiments.table1 import EXPERIMENT, GRIDS, NAMES, PERCENTS, VARIANTS, VARIED_CELLS
from experiments.tables import rounds_cell

NOWHERE = Path("nowhere")


def run(rounds: int, *, reached: bool = True, error: str = "", accuracy: float = 0.97) -> dict[str, Any]:
    curve = [0.5] * (rounds - 1) + [accuracy if reached else 0.5]
    return {
        "rounds": rounds,
        "reached": reached,
        "error": error,
        "accuracy": accuracy,
        "bytes": 10**7,
        "accuracies": curve,
    }


def test_every_cell_has_a_run_in_the_papers_setting() -> None:
    jobs = EXPERIMENT.jobs(False, NOWHERE)
    cells = {(job["network"], job["preset"], job["percent"]) for job in jobs}
    assert len(cells) == 2 * 3 * 5 + len(VARIANTS) * len(VARIED_CELLS)
    assert jobs[0]["percent"] == 10
    assert [job["seed"] for job in jobs] == sorted(job["seed"] for job in jobs)  # the first seed of all cells first
    for job in jobs:
        own = {name: job[name] for name in ("data", "clients", "epochs", "target", "rounds", "lr")}
        config = presets.preset(VARIANTS.get(job["preset"], job["preset"]), **own)
        assert (config.data, config.clients) == ("mnist", 100)
        assert (config.epochs, config.target) == ((1, 0.97) if job["network"] == "mlp" else (5, 0.99))
    assert presets.preset("paper").server_optimizer == presets.preset("plain").server_optimizer == "fedavg"


def test_the_local_optimiser_of_the_authors_code_has_lines_of_its_own() -> None:
    jobs = EXPERIMENT.jobs(False, NOWHERE)
    varied = [job for job in jobs if job["preset"] in VARIANTS and job["seed"] == 0]
    text = table1.table(Results(tuple(jobs), tuple({"job": job, "result": run(176)} for job in varied)))
    for title in ("MLP, local Adam", "MLP-Sketch, local Adam"):
        assert f"| **{title}** | 97% | 176 | 176 | – | – | – |" in text
    assert "CNN, local Adam" not in text
    assert set(table1.draw(Results(tuple(jobs), ()))) == {"table1"}
    assert "Adam" not in table1.table(Results(tuple(EXPERIMENT.jobs(True, NOWHERE)), (), quick=True))


def test_adam_is_what_trains_there() -> None:
    job = {**EXPERIMENT.jobs(True, NOWHERE)[0], "preset": "paper-adam", "rounds": 1, "lr": 0.001}
    adam, sgd = (EXPERIMENT.play({**job, "preset": preset}, Context()) for preset in ("paper-adam", "paper"))
    assert adam["accuracy"] > sgd["accuracy"] + 0.1  # at this rate SGD has hardly moved


def test_a_cell_without_the_target_says_in_how_many_rounds() -> None:
    assert rounds_cell([run(600, reached=False)]) == "not in 600 rounds"
    assert rounds_cell([run(40), run(600, reached=False), run(50)]) == "50 (40, 50, not in 600 rounds)"
    assert rounds_cell([run(40), run(600, reached=False)]) == "40, not in 600 rounds"
    assert rounds_cell([run(3, reached=False, error="no update")]) == "diverged in round 4"
    assert rounds_cell([]) == "not run"


def test_the_table_has_the_papers_numbers_beside_ours() -> None:
    jobs = EXPERIMENT.jobs(False, NOWHERE)
    played = [job for job in jobs if job["network"] == "mlp" and job["seed"] == 0]
    rows = tuple(
        {"job": job, "result": run(800, reached=False) if job["preset"] == "paper" else run(48)} for job in played
    )
    text = table1.table(Results(tuple(jobs), rows))
    assert "| MLP, the paper | 97% | 222 | 96 | 84 | 83 | 82 |" in text
    assert "| **MLP** | 97% | 48 | 48 | 48 | 48 | 48 |" in text
    assert "| **MLP-Sketch** | 97% | " + " | ".join(["not in 800 rounds"] * 5) + " |" in text
    assert "| CNN-Sketch, the paper | 99% | 636 | 176 | 189 | 170 | 174 |" in text
    assert "| **CNN, our blind** | 99% | " + " | ".join(["not run"] * 5) + " |" in text


def test_a_run_counts_up_to_the_first_round_at_the_target() -> None:
    jobs = tuple(EXPERIMENT.jobs(False, NOWHERE))
    job = next(job for job in jobs if (job["preset"], job["network"], job["percent"]) == ("plain", "mlp", 1))
    late = {**run(50), "accuracies": [0.5, 0.97, 0.96, 0.98], "bytes": 4 * 10**6}
    text = table1.table(Results(jobs, ({"job": job, "result": late},)))
    assert "| **MLP** | 97% | 2 |" in text
    assert "| MLP | 2 |" in text  # megabytes


def test_the_quick_table_has_no_numbers_of_the_papers_setting() -> None:
    jobs = EXPERIMENT.jobs(True, NOWHERE)
    text = table1.table(Results(tuple(jobs), (), quick=True))
    assert "the paper |" not in text
    assert "| **CNN** | 92% | not run | – |" in text


def test_the_tuned_rate_is_the_one_that_took_fewest_rounds(tmp_path: Path) -> None:
    jobs = [job for job in table1.tuning_jobs(NOWHERE) if job["percent"] in (1, 10)]
    results = []
    for job in jobs:
        reached = job["preset"] != "paper"
        best = job["lr"] == 0.05
        results.append({"job": job, "result": run(10 if best else 20, reached=reached, accuracy=0.9 if best else 0.8)})
    (tmp_path / "rates.toml").write_text(table1.choose(Results(tuple(jobs), tuple(results))))
    rates = table1.read_rates(tmp_path)
    for network, preset in (("mlp", "plain"), ("mlp", "paper"), ("mlp", "blind"), ("cnn", "plain")):
        assert {rates[network][preset][str(percent)]["lr"] for percent in PERCENTS} == {0.05}
    assert "100 = { lr = 0.05 }  # that of 10 %" in (tmp_path / "rates.toml").read_text()
    tuned = [job for job in EXPERIMENT.jobs(False, tmp_path) if job["preset"] not in VARIANTS]
    assert {job["lr"] for job in tuned if job["network"] == "mlp"} == {0.05}


def test_the_rates_of_the_package_are_of_the_grids() -> None:
    rates = table1.read_rates(NOWHERE)
    for (network, preset), grid in GRIDS.items():
        assert set(rates[network][preset]) == {str(percent) for percent in PERCENTS}
        assert preset in NAMES
        assert len(grid) >= 3


def test_a_damaged_file_of_rates_is_named(tmp_path: Path) -> None:
    (tmp_path / "rates.toml").write_text("[mlp]\nplain = 3\n")
    with pytest.raises(ConfigError, match=r"rates.toml: is no file of rates by network, preset and percent"):
        table1.read_rates(tmp_path)


def test_a_run_stops_at_its_target_and_counts_its_rounds() -> None:
    job = {**EXPERIMENT.jobs(True, NOWHERE)[0], "target": 0.5, "rounds": 20}
    told: list[str] = []
    found = EXPERIMENT.play(job, Context(tell=lambda text, done, total: told.append(text)))
    assert found["reached"]
    assert found["rounds"] == len(found["accuracies"]) == len(told) < 20
    assert found["accuracies"][-1] >= 0.5 > max(found["accuracies"][:-1], default=0)
    assert EXPERIMENT.play({**job, "rounds": 1}, Context())["reached"] == (found["rounds"] == 1)


def test_a_run_that_diverges_is_a_row_and_no_error() -> None:
    job = {**EXPERIMENT.jobs(True, NOWHERE)[0], "lr": 1e18, "rounds": 3}
    found = EXPERIMENT.play(job, Context())
    assert not found["reached"]
    assert found["error"]
    assert rounds_cell([found]).startswith("diverged in round")
