import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dbcl.errors import ConfigError, DataError
from experiments import rows
from experiments.__main__ import app
from experiments.registry import EXPERIMENTS

Invoke = Callable[..., str]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command in this process and a folder of its own; its errors are raised here."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
        if result.exception:
            raise result.exception
        return result.output

    return run


def test_the_list_has_every_experiment(invoke: Invoke) -> None:
    out = invoke("--list")
    for experiment in EXPERIMENTS:
        assert experiment.name in out
    listed = json.loads(invoke("--list", "--json"))
    assert [each["name"] for each in listed] == [experiment.name for experiment in EXPERIMENTS]
    assert all(each["what"] and each["minutes"] for each in listed)


def test_an_experiment_is_played_reported_and_not_played_again(invoke: Invoke, tmp_path: Path) -> None:
    only = ("--only", "check=corollary")
    out = invoke("theory", "--quick", *only)
    folder = tmp_path / "results" / "theory" / "quick"
    assert "8/8" in out
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "rows.jsonl", "settings.json", "theory.png",
    ]  # fmt: skip
    before = (folder / "rows.jsonl").read_bytes()
    assert "8/8" not in invoke("theory", "--quick", *only)
    assert (folder / "rows.jsonl").read_bytes() == before
    (folder / "README.md").unlink()
    assert "README.md" in invoke("theory", "--quick", "--report")
    assert "21 of 29 jobs have not been played" in (folder / "README.md").read_text()


def test_without_a_terminal_a_long_job_says_how_far_it_is(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    only = ("--only", "split=iid", "--only", "preset=plain")
    monkeypatch.setattr("experiments.__main__.QUIET_SECONDS", 0.0)
    often = invoke("non-iid", "--quick", *only)
    assert "0/1  plain, IID, seed 0: round 1, " in often
    assert "0/1  plain, IID, seed 0: round 2, " in often
    monkeypatch.setattr("experiments.__main__.QUIET_SECONDS", 1e9)
    seldom = invoke("non-iid", "--quick", *only, "--out", "elsewhere")
    assert "round 1," not in seldom
    assert "1/1  plain, IID, seed 0: round " in seldom


def test_a_time_limit_has_a_status_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments", "theory", "--quick", "--time-limit", "0.00001"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3
    assert "the time limit ended it; the same command goes on where it stopped" in done.stdout
    assert rows.read(tmp_path / "theory" / "quick" / "rows.jsonl") == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "name an experiment, or all; `python -m experiments --list` shows them"),
        (("tabel1",), r"no experiment 'tabel1'; did you mean table1\?"),
        (("theory", "--device", "tpu"), "device must be cpu, cuda or auto, got 'tpu'"),
        (("theory", "--tune"), "theory has nothing to tune: leave out --tune"),
        (("table1", "--tune", "--quick"), "--tune is for the full setting"),
        (("theory", "--report"), "has no row of theory: play it first, without --report"),
        (("theory", "--part", "3/2"), "part is a number and how many there are, for example 1/3; got '3/2'"),
        (("theory", "--time-limit", "0"), "time-limit must be above 0 minutes, got 0"),
        (("theory", "--only", "network=mlp"), "--only is NAME=VALUE with a NAME of check, "),
    ],
)
def test_what_is_wrong_is_one_sentence(invoke: Invoke, arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        invoke(*arguments)


def test_missing_data_is_told_with_the_remedy(invoke: Invoke, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing; try `dbcl data fetch mnist`, or point `data_dir`"):
        invoke("table1", "--data-dir", str(tmp_path))
    with pytest.raises(DataError, match=r"lfw.npz is missing; docs/data.md says how to make it"):
        invoke("lfw-roc", "--data-dir", str(tmp_path))
    assert not (tmp_path / "results").exists()


def test_all_goes_on_where_one_cannot_be_played(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tuple(experiment for experiment in EXPERIMENTS if experiment.name in ("table1", "theory"))
    monkeypatch.setattr("experiments.registry.EXPERIMENTS", wanted)
    monkeypatch.setattr("dbcl_audit.theory_checks.simulate_veil", lambda *_, **__: pytest.fail("not wanted"))
    with pytest.raises((typer.Exit, SystemExit)):
        invoke("all", "--data-dir", str(tmp_path), "--only", "check=remark")
    assert len(rows.read(tmp_path / "results" / "theory" / "rows.jsonl")) == 3
    assert not (tmp_path / "results" / "table1").exists()
