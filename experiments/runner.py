"""Runner: plays the remaining jobs of an experiment and writes its report."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from dbcl import data
from dbcl.errors import ConfigError
from dbcl.files import file_in_the_way, make_folder, write_atomic
from experiments import rows
from experiments.experiment import Context, Experiment, ExperimentJob, Results, Row, select
from experiments.figures import save
from experiments.tables import page

log = logging.getLogger(__name__)

ROWS, TUNING = "rows.jsonl", "tuning.jsonl"
OnJob = Callable[[int, int, ExperimentJob], None]
"""Callback before and after jobs, with the number of finished jobs, that of all, and the next or last job."""


class OutOfTime(Exception):  # noqa: N818
    """Control flow: the time limit ends a job in the middle."""


@dataclass(frozen=True)
class Order:
    """Selection of an experiment's jobs, and the folder of its results.

    `part` (1, 3) is the first third of the jobs, every third of them: several processes may play one experiment.

    >>> Order(Path("results"), quick=True).folder("theory").as_posix()
    'results/theory/quick'
    """

    out: Path
    quick: bool = False
    tune: bool = False
    only: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)
    seconds: float | None = None
    """Seconds after which no job is begun or goes on."""

    def folder(self, name: str) -> Path:
        """Return the folder of an experiment's results, another one for the reduced setting."""
        return self.out / name / "quick" if self.quick else self.out / name


def check(experiment: Experiment, order: Order, data_dir: str | None) -> None:
    """Raise an error if a dataset or a package is missing, before anything is played."""
    for module, extra in experiment.extras.items():
        if find_spec(module) is None:
            raise ConfigError(
                f"{experiment.name} needs {module}, which is not installed: pip install '.[{extra}]' in a clone of dbcl"
            )
    if order.tune and experiment.tuning is None:
        raise ConfigError(f"{experiment.name} has nothing to tune: leave out --tune")
    if order.tune and order.quick:
        raise ConfigError("--tune is for the full setting: the reduced one has fixed settings; leave out --quick")
    if taken := file_in_the_way(order.folder(experiment.name)):
        raise ConfigError(f"--out cannot be {order.out}: {taken} is a file")
    for name in experiment.needs(order.quick):
        data.load(name, data_dir)


def play(experiment: Experiment, order: Order, context: Context, on_job: OnJob = lambda done, total, job: None) -> bool:
    """Play the jobs that have no row yet, each written as soon as it is over; return whether all were played."""
    began, folder = time.monotonic(), order.folder(experiment.name)
    make_folder(folder)
    path = folder / (TUNING if order.tune else ROWS)
    jobs = _ordered(experiment, order)
    there = {rows.key(row["job"]) for row in rows.read(path)}
    left = [job for job in jobs if rows.key(job) not in there]
    if not order.tune:
        _write_settings(experiment, order)

    def tell(text: str, done: int, total: int) -> None:
        if order.seconds is not None and time.monotonic() - began > order.seconds:
            raise OutOfTime
        context.tell(text, done, total)

    for number, job in enumerate(left, len(jobs) - len(left)):
        on_job(number, len(jobs), job)
        scratch = folder / f"unfinished-{hashlib.sha256(rows.key(job).encode()).hexdigest()[:12]}"
        try:
            tell("", 0, 0)
            row = _row(experiment, job, replace(context, tell=tell, scratch=scratch))
        except OutOfTime:
            return False
        rows.append(path, row)
        shutil.rmtree(scratch, ignore_errors=True)
        on_job(number + 1, len(jobs), job)
    return True


def _ordered(experiment: Experiment, order: Order) -> list[ExperimentJob]:
    every = all_jobs(experiment, order)
    number, count = order.part
    return select(every, order.only)[number - 1 :: count]


def all_jobs(experiment: Experiment, order: Order) -> Sequence[ExperimentJob]:
    """Return the jobs of an experiment, or of its tuning."""
    folder = order.folder(experiment.name)
    if order.tune:
        assert experiment.tuning is not None
        return experiment.tuning.jobs(folder)
    return experiment.jobs(order.quick, folder)


def _row(experiment: Experiment, job: ExperimentJob, context: Context) -> Row:
    began = time.perf_counter()
    result = experiment.play(job, context)
    seconds = round(time.perf_counter() - began, 2)
    device = rows.device_name(context.device)
    return {"job": job, "result": result, "seconds": seconds, "device": device, "versions": rows.versions()}


def results(experiment: Experiment, order: Order) -> Results:
    """Return all jobs and the rows of those that were played."""
    jobs = all_jobs(experiment, order)
    path = order.folder(experiment.name) / (TUNING if order.tune else ROWS)
    return Results(tuple(jobs), rows.played(jobs, rows.read(path)), order.quick)


def report(experiment: Experiment, order: Order) -> list[Path]:
    """Write the table and the figures (if matplotlib is installed); after a tuning, the chosen settings."""
    found, folder = results(experiment, order), order.folder(experiment.name)
    if not found.rows:
        path = folder / (TUNING if order.tune else ROWS)
        raise ConfigError(f"{path} has no row of {experiment.name}: play it first, without --report")
    if order.tune:
        assert experiment.tuning is not None
        path = folder / experiment.tuning.file
        write_atomic(path, experiment.tuning.choose(found).encode())
        return [path]
    drawn: list[Path] = []
    if find_spec("matplotlib") is None:
        log.warning("matplotlib is not installed: no figure is drawn; --report draws it later")
    else:
        drawn = [save(figure, folder / name) for name, figure in experiment.draw(found).items()]
    path = folder / "README.md"
    write_atomic(path, page(experiment, found, [path.name for path in drawn]).encode())
    return [path, *drawn]


def resolve(device: str) -> str:
    """Return the device that `auto` stands for here; an absent one is an error.

    >>> resolve("cpu")
    'cpu'
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or auto, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and PyTorch finds no CUDA device here; --device auto takes what there is")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _write_settings(experiment: Experiment, order: Order) -> None:
    """Write the jobs of the experiment as they are planned."""
    facts = {
        "experiment": experiment.name,
        "quick": order.quick,
        "versions": rows.versions(),
        "jobs": list(all_jobs(experiment, order)),
    }
    write_atomic(order.folder(experiment.name) / "settings.json", json.dumps(facts, indent=1).encode() + b"\n")
