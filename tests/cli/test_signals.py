"""Ctrl-C and SIGTERM end the command with a word and a status, at any moment, and a run can go on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbcl.simulation import Run, read_metrics


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dbcl", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [0.15, 0.6])
def test_while_it_is_loading(number: int, after: float) -> None:
    process = start("train", "--preset", "blind", "--rounds", "100000")
    time.sleep(after)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (130, -number)  # the latter where Python itself was not up yet
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_it_is_training(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(
        "train", "--preset", "blind", "--rounds", "100000", "--out", str(folder), "--seed", "0", "--clients", "10"
    )
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"go on with: dbcl train --resume {folder}" in said
    rounds = len(read_metrics(folder))
    more = Run.resume(folder, rounds=rounds + 1)
    assert more.server.round in (rounds, rounds - 1)  # a line may be ahead of its checkpoint
    assert list(more.play())[-1].round == rounds + 1
