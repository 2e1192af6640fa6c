"""Rows of an experiment in a JSONL file: one for each job that was played, written as soon as it is."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from dbcl._version import __version__
from dbcl.errors import ConfigError
from experiments.experiment import ExperimentJob, Row


def key(job: ExperimentJob) -> str:
    """Return a key of a job: all its settings.

    >>> key({"seed": 0, "lr": 0.1}) == key({"lr": 0.1, "seed": 0})
    True
    """
    return json.dumps(job, sort_keys=True)


def read(path: Path) -> list[Row]:
    """Return the rows of a file; none if there is no file.

    A last line without an end is what a killed process left, and is no row; any other that is not JSON is an error.

    >>> read(Path("nowhere"))
    []
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["job"], rows[-1]["result"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}, line {number}: is no row of an experiment; remove it or the file") from None
    return rows


def append(path: Path, row: Row) -> None:
    """Add a row, on the disk before this returns; several processes may share a file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "rows.jsonl")
    >>> _ = path.write_text('{"job": {"seed": 0}, "resu')  # of a process that was killed
    >>> append(path, {"job": {"seed": 1}, "result": {}})
    >>> [row["job"] for row in read(path)]
    [{'seed': 1}]
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        _lock(file.fileno())
        text = file.read()
        whole = text.rfind(b"\n") + 1
        file.truncate(whole)
        file.seek(whole)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def played(jobs: Sequence[ExperimentJob], rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows of these jobs in their order; of several for one job the first, and none of other jobs.

    >>> rows = [{"job": {"seed": 1}, "result": 1}, {"job": {"seed": 9}, "result": 9}, {"job": {"seed": 1}, "result": 0}]
    >>> [row["result"] for row in played([{"seed": 0}, {"seed": 1}], rows)]
    [1]
    """
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(key(row["job"]), row)
    return tuple(found[key(job)] for job in jobs if key(job) in found)


def versions() -> dict[str, str]:
    """Return the versions that a row is made with.

    >>> sorted(versions())
    ['dbcl', 'numpy', 'python', 'torch']
    """
    return {
        "dbcl": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def device_name(device: str) -> str:
    """Return a device's name as a row has it.

    >>> device_name("cpu")
    'cpu'
    """
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device


def _lock(handle: int) -> None:
    """Wait until no other process appends; the lock goes with the file."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system, which has no such lock
        return
    fcntl.flock(handle, fcntl.LOCK_EX)
