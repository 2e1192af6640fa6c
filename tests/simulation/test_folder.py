"""The folder of a run: how it stops, where it is computed, and how much the transcripts take."""

import os
from pathlib import Path

import pytest
import torch

from dbcl.errors import ConfigError
from dbcl.files import write_atomic
from dbcl.simulation import RoundMetrics, Run, RunConfig, from_toml, transcript_bytes
from dbcl.simulation.build import resolve_device


def small(**settings: object) -> RunConfig:
    return RunConfig.from_options(**{"clients": 10, "fraction": 0.3, "seed": 0, "rounds": 3, **settings})


def line(round: int, accuracy: float) -> RoundMetrics:
    return RoundMetrics(round, accuracy, 1.0, 1.0, 10, 10, 3, [], 0, 0.1)


def test_patience_stops_a_run_that_no_longer_improves_and_resume_goes_on(tmp_path: Path) -> None:
    run = Run.start(small(rounds=60, patience=3), tmp_path / "run")
    history = list(run.play())
    assert run.stopped_by == "patience"
    assert len(history) < 60
    assert history[-1].round - run.best.round == 3
    assert max(metrics.score for metrics in history[-3:]) <= run.best.score
    assert from_toml((tmp_path / "run" / "config.toml").read_text()).patience == 3
    assert list(Run.resume(tmp_path / "run").play()) == []
    more = Run.resume(tmp_path / "run", patience=60, rounds=len(history) + 2)
    assert len(list(more.play())) == 2
    assert more.stopped_by == "rounds"


def test_patience_counts_from_the_first_best_round(tmp_path: Path) -> None:
    run = Run.start(small(rounds=10, patience=2), tmp_path / "run")
    for accuracies, stopped in (([0.1, 0.5, 0.4], ""), ([0.1, 0.5, 0.4, 0.5], "patience"), ([0.5, 0.4, 0.6], "")):
        run.history = [line(number, accuracy) for number, accuracy in enumerate(accuracies, 1)]
        assert run.stopped_by == stopped
    with pytest.raises(ConfigError, match="patience must be 1 round or more, got 0"):
        small(patience=0)


def test_auto_is_recorded_as_what_it_became(tmp_path: Path) -> None:
    run = Run.start(small(device="auto"), tmp_path / "run")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert run.config.device == here
    assert from_toml((tmp_path / "run" / "config.toml").read_text()).device == here


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert resolve_device(small(device="auto")).device == expected
        assert resolve_device(small(device="cpu")).device == "cpu"


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device is cuda:2, and PyTorch finds 2 CUDA devices here"):
        Run.start(small(device="cuda:2"), tmp_path / "run")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no CUDA device here; `device=auto` takes what there is"):
        Run.start(small(device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_only_some_settings_change_when_a_run_goes_on(tmp_path: Path) -> None:
    Run.start(small(), tmp_path / "run")
    with pytest.raises(ConfigError, match="may change rounds, target, patience, track, not lr, veil"):
        Run.resume(tmp_path / "run", veil=0.0, lr=1.0)


@pytest.mark.parametrize("parties", [("server",), ("server-sum",), ("0", "1", "2", "server"), ()])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_estimate_of_the_transcripts_is_within_a_tenth(tmp_path: Path, parties: tuple, wire: str) -> None:
    run = Run.start(small(fraction=1.0, transcripts=parties, wire=wire, rounds=4), tmp_path / "run")
    expected = transcript_bytes(run)
    list(run.play())
    files = (tmp_path / "run" / "transcripts").rglob("*")
    taken = sum(file.stat().st_size for file in files if file.is_file() and file.stem != "round-000004")
    assert expected == pytest.approx(taken, rel=0.1)
    assert transcript_bytes(run) == 0


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    run = Run.start(small(transcripts=("0", "server"), rounds=1, fraction=1.0), tmp_path / "run")
    list(run.play())
    secret = {"checkpoints", "transcripts"}
    for path in files(run.folder):
        inside = path.relative_to(run.folder).parts[0]
        expected = 0o600 if inside in secret or path.name in ("model.safetensors", ".lock") else 0o644
        assert path.stat().st_mode & 0o777 & ~0o022 == expected & ~0o022, path
        if inside in secret:
            assert path.parent.stat().st_mode & 0o777 == 0o700, path.parent


@pytest.mark.parametrize("left", ["checkpoints/round-00000400.dbcl", "notes.txt"])
def test_a_new_run_never_moves_into_old_files(tmp_path: Path, left: str) -> None:
    old = tmp_path / "run" / left
    old.parent.mkdir(parents=True)
    old.touch()
    with pytest.raises(ConfigError, match="run exists and is not empty; choose another `folder`, or empty it"):
        Run.start(small(), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    Run.start(small(), tmp_path / "empty")


def test_only_one_process_at_a_time_plays_a_run(tmp_path: Path) -> None:
    run = Run.start(small(), tmp_path / "run")
    rounds = run.play()
    next(rounds)
    with pytest.raises(ConfigError, match=rf"run is in use by process {os.getpid()} on .* since 2"):
        Run.resume(tmp_path / "run")
    rounds.close()  # type: ignore[attr-defined]
    other = Run.resume(tmp_path / "run")
    assert len(list(other.play())) == 2
    with pytest.raises(ConfigError, match="at round 3 and this run at round 1: another process has gone on with it"):
        next(run.play())


def test_what_a_dead_process_had_half_written_is_removed(tmp_path: Path) -> None:
    run = Run.start(small(rounds=1), tmp_path / "run")
    list(run.play())
    for place in (run.folder, run.folder / "checkpoints"):
        (place / ".dbcl-half-0123").write_bytes(b"half")
    Run.resume(tmp_path / "run", rounds=2)
    assert not list(run.folder.rglob(".dbcl-*"))


def test_a_link_in_the_place_of_a_scratch_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".dbcl-a.txt-guessed").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "a.txt", b"theirs")
    assert (tmp_path / "victim").read_text() == "mine"
