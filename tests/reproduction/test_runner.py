import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbcl.errors import ConfigError, DataError
from experiments import figures, rows, runner
from experiments.experiment import Context, Experiment, ExperimentJob, Results, Tuning, select
from experiments.runner import Order
from experiments.tables import markdown

JOBS: list[ExperimentJob] = [{"size": size, "seed": seed} for seed in (0, 1) for size in (2, 3, 5)]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    context.tell(f"size {job['size']}", 1, 1)
    return {"square": job["size"] ** 2 + job["seed"]}


def draw(found: Results) -> dict[str, Any]:
    figure, panels = figures.new(3, 2)
    panels[0, 0].plot([job["size"] for job in found.jobs], [1] * len(found.jobs), label="ones")
    figures.label(panels[0, 0], "size", "one", "a title")
    return {"squares": figure}


SQUARES = Experiment(
    name="squares",
    title="Squares",
    what="Squares of numbers.",
    minutes="none",
    jobs=lambda quick, folder: JOBS[:2] if quick else JOBS,
    play=play,
    table=lambda found: markdown(["square"], [[run["square"]] for run in found.of()]),
    draw=draw,
)


def stop_after(count: int) -> Callable[[ExperimentJob, Context], dict[str, Any]]:
    """Play so many jobs and be interrupted in the next."""
    left = [count]

    def played(job: ExperimentJob, context: Context) -> dict[str, Any]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return play(job, context)

    return played


def without_times(path: Path) -> list[rows.Row]:
    return [{**row, "seconds": 0} for row in rows.read(path)]


def test_an_interrupted_experiment_goes_on_and_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = Order(tmp_path / "whole"), Order(tmp_path / "parts")
    assert runner.play(SQUARES, whole, Context())
    for count in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            runner.play(replace(SQUARES, play=stop_after(count)), parts, Context())
    path = parts.folder("squares") / "rows.jsonl"
    with path.open("a") as file:
        file.write('{"job": {"size": 5, "se')  # what a kill in the middle of a write leaves
    assert len(rows.read(path)) == 3
    played: list[ExperimentJob] = []
    again = replace(SQUARES, play=lambda job, context: played.append(job) or play(job, context))
    assert runner.play(again, parts, Context())
    assert played == JOBS[3:]
    assert without_times(path) == without_times(whole.folder("squares") / "rows.jsonl")
    for order in (whole, parts):
        runner.report(SQUARES, order)
    tables = [(order.folder("squares") / "README.md").read_text().split("\n\n")[2] for order in (whole, parts)]
    assert tables[0] == tables[1]


def test_rows_and_settings_say_what_was_played(tmp_path: Path) -> None:
    order = Order(tmp_path)
    runner.play(SQUARES, order, Context())
    first = rows.read(order.folder("squares") / "rows.jsonl")[0]
    assert first["job"] == JOBS[0]
    assert first["result"] == {"square": 4}
    assert first["device"] == "cpu"
    assert {"dbcl", "torch", "python"} <= first["versions"].keys()
    assert json.loads((order.folder("squares") / "settings.json").read_text())["jobs"] == JOBS


def test_the_time_limit_ends_it_between_and_inside_jobs(tmp_path: Path) -> None:
    order = Order(tmp_path, seconds=0.0)
    assert not runner.play(SQUARES, order, Context())
    assert rows.read(order.folder("squares") / "rows.jsonl") == []
    slow = replace(SQUARES, play=lambda job, context: [context.tell("", n, 9) for n in range(10**9)] and {})
    assert not runner.play(slow, Order(tmp_path, seconds=0.05), Context())


def test_parts_are_all_jobs_once_and_share_a_file(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        assert runner.play(SQUARES, Order(tmp_path, part=(number, 3)), Context())
    path = Order(tmp_path).folder("squares") / "rows.jsonl"
    assert len(rows.read(path)) == len(JOBS)
    assert [row["job"] for row in rows.played(JOBS, rows.read(path))] == JOBS


def test_processes_that_append_at_the_same_time_lose_no_row(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from experiments import rows\n"
        "for n in range(40): rows.append(Path(sys.argv[1]), {'job': {'who': sys.argv[2], 'n': n}, 'result': {}})"
    )
    path = tmp_path / "rows.jsonl"
    both = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "ab"]
    assert [each.wait() for each in both] == [0, 0]
    found = {(row["job"]["who"], row["job"]["n"]) for row in rows.read(path)}
    assert found == {(who, n) for who in "ab" for n in range(40)}


def test_only_takes_jobs_by_a_setting(tmp_path: Path) -> None:
    assert select(JOBS, ["size=3", "seed=1"]) == [{"size": 3, "seed": 1}]
    with pytest.raises(ConfigError, match="--only size=4: no job has that; size is one of 2, 3, 5"):
        select(JOBS, ["size=4"])
    with pytest.raises(ConfigError, match="--only is NAME=VALUE with a NAME of seed, size; got 'lr=1'"):
        select(JOBS, ["lr=1"])


def test_figures_are_written_and_are_the_same_again(tmp_path: Path) -> None:
    order = Order(tmp_path, quick=True)
    runner.play(SQUARES, order, Context())
    written = runner.report(SQUARES, order)
    assert [path.name for path in written] == ["README.md", "squares.png"]
    assert written[1].read_bytes()[:4] == b"\x89PNG"
    before = written[1].read_bytes()
    assert runner.report(SQUARES, order)[1].read_bytes() == before
    text = written[0].read_text()
    assert "![squares](squares.png)" in text
    assert "This is the reduced setting (`--quick`)" in text
    assert "| 4 |" in text


def test_a_report_of_some_jobs_says_how_many_are_missing(tmp_path: Path) -> None:
    runner.play(SQUARES, Order(tmp_path, only=("seed=0",)), Context())
    runner.report(SQUARES, Order(tmp_path))
    text = (tmp_path / "squares" / "README.md").read_text()
    assert "3 of 6 jobs have not been played" in text
    assert "reduced setting" not in text


def test_without_matplotlib_the_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    runner.play(SQUARES, Order(tmp_path), Context())
    assert [path.name for path in runner.report(SQUARES, Order(tmp_path))] == ["README.md"]
    assert "no figure is drawn" in caplog.text


def test_quick_results_lie_apart(tmp_path: Path) -> None:
    runner.play(SQUARES, Order(tmp_path), Context())
    before = (tmp_path / "squares" / "rows.jsonl").read_bytes()
    runner.play(SQUARES, Order(tmp_path, quick=True), Context())
    assert (tmp_path / "squares" / "rows.jsonl").read_bytes() == before
    assert len(rows.read(tmp_path / "squares" / "quick" / "rows.jsonl")) == 2


def test_rows_of_older_settings_are_kept_and_not_shown(tmp_path: Path) -> None:
    runner.play(SQUARES, Order(tmp_path), Context())
    fewer = replace(SQUARES, jobs=lambda quick, folder: JOBS[:1])
    assert len(runner.results(fewer, Order(tmp_path)).rows) == 1
    assert len(rows.read(tmp_path / "squares" / "rows.jsonl")) == len(JOBS)


def test_a_tuning_has_rows_and_a_file_of_its_own(tmp_path: Path) -> None:
    tuning = Tuning(
        lambda folder: JOBS[:3], lambda found: f"best = {max(each['square'] for each in found.of())}\n", "b.toml"
    )
    order = Order(tmp_path, tune=True)
    tuned = replace(SQUARES, tuning=tuning)
    runner.play(tuned, order, Context())
    assert [path.name for path in runner.report(tuned, order)] == ["b.toml"]
    assert (tmp_path / "squares" / "b.toml").read_text() == "best = 25\n"
    assert not (tmp_path / "squares" / "rows.jsonl").exists()
    with pytest.raises(ConfigError, match="squares has nothing to tune: leave out --tune"):
        runner.check(SQUARES, order, None)


def test_what_is_missing_is_told_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is missing; try `dbcl data fetch mnist`"):
        runner.check(replace(SQUARES, data=("mnist",)), Order(tmp_path), str(tmp_path))
    runner.check(replace(SQUARES, data=("mnist",)), Order(tmp_path, quick=True), str(tmp_path))
    needy = replace(SQUARES, extras={"no_such_module": "audit"})
    with pytest.raises(
        ConfigError, match=r"squares needs no_such_module, which is not installed: pip install '\.\[audit\]'"
    ):
        runner.check(needy, Order(tmp_path), None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out cannot be .*file: .*file is a file"):
        runner.check(SQUARES, Order(tmp_path / "file"), None)
    with pytest.raises(ConfigError, match="has no row of squares: play it first, without --report"):
        runner.report(SQUARES, Order(tmp_path))


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"job": {}, "result": {}}\nnonsense\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: is no row of an experiment"):
        rows.read(tmp_path / "rows.jsonl")
