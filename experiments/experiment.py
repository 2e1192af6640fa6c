"""Experiments: jobs that are plain settings, a function that plays one, and functions that show the rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbcl.errors import ConfigError

ExperimentJob = dict[str, Any]
"""Settings of one job, its seed among them: whatever JSON can hold. Jobs with equal settings are the same."""
Row = dict[str, Any]
"""Played job: `job`, its `result`, and the `seconds`, `device` and `versions` of the run."""
Tell = Callable[[str, int, int], None]
"""Callback of a running job, with its present task, the number of finished steps, and the number of steps."""


@dataclass(frozen=True)
class Context:
    """Environment of a job: the device (never "auto"), the folder of the datasets, and the callback for progress.

    `tell` must be called often: it is where a time limit ends a job.

    >>> Context().device
    'cpu'
    """

    device: str = "cpu"
    data_dir: str | None = None
    tell: Tell = lambda text, done, total: None
    scratch: Path | None = None
    """Folder in which a long job may keep its state when its time is over, so that it goes on from there; removed at
    its end.
    """


@dataclass(frozen=True)
class Results:
    """Jobs of an experiment and the rows of those that were played, for tables and figures.

    >>> row = {"job": {"lr": 0.1, "seed": 0}, "result": {"rounds": 7}}
    >>> found = Results((row["job"], {"lr": 0.2, "seed": 0}), (row,), quick=True)
    >>> found.of(lr=0.1), found.jobs_of(lr=0.2)
    ([{'rounds': 7}], [{'lr': 0.2, 'seed': 0}])
    """

    jobs: tuple[ExperimentJob, ...]
    rows: tuple[Row, ...]
    quick: bool = False

    def of(self, **settings: Any) -> list[dict[str, Any]]:
        """Return the results of the played jobs that have these settings, in the order of the jobs."""
        return [row["result"] for row in self.rows if _has(row["job"], settings)]

    def jobs_of(self, **settings: Any) -> list[ExperimentJob]:
        """Return the jobs that have these settings, played or not."""
        return [job for job in self.jobs if _has(job, settings)]


@dataclass(frozen=True)
class Experiment:
    """Table or figure. `registry.py` lists them all; each is the `EXPERIMENT` of a file.

    `jobs` is given whether the reduced setting is wanted and the folder of the results, and lists the jobs with the
    cheap and telling ones first. `play` plays one of them and gives its result, as JSON can hold it. `table` makes
    Markdown of the results and `draw` figures of matplotlib by name, which need not be installed for `play`.

    >>> from experiments.registry import find
    >>> find("theory").data
    ()
    """

    name: str
    title: str
    what: str
    minutes: str
    """Duration and machine, as `--list` shows them."""
    jobs: Callable[[bool, Path], Sequence[ExperimentJob]]
    play: Callable[[ExperimentJob, Context], dict[str, Any]]
    table: Callable[[Results], str]
    draw: Callable[[Results], Mapping[str, Any]]
    data: tuple[str, ...] = ()
    """The datasets that the full setting reads; the reduced one takes `quick_data`."""
    quick_data: tuple[str, ...] = ()
    extras: Mapping[str, str] = field(default_factory=dict)
    """The modules beyond dbcl's own dependencies that `play` imports, each with the extra that installs it."""
    tuning: "Tuning | None" = None

    def needs(self, quick: bool) -> tuple[str, ...]:
        """Return the datasets that it reads."""
        return self.quick_data if quick else self.data


@dataclass(frozen=True)
class Tuning:
    """Search for settings of an experiment's jobs: jobs over a grid, and a file made of their rows.

    `choose` makes the text of `file`, which the experiment's `jobs` reads from the folder of its results.

    >>> Tuning(lambda folder: [], lambda results: "", "rates.toml").file
    'rates.toml'
    """

    jobs: Callable[[Path], Sequence[ExperimentJob]]
    choose: Callable[[Results], str]
    file: str


def select(jobs: Sequence[ExperimentJob], only: Sequence[str]) -> list[ExperimentJob]:
    """Return the jobs that have every one of these settings, as written on the command line.

    >>> select([{"network": "mlp", "percent": 1}, {"network": "cnn", "percent": 1}], ["network=cnn"])
    [{'network': 'cnn', 'percent': 1}]
    """
    wanted = []
    for text in only:
        name, sign, value = text.partition("=")
        known = sorted({str(job[name]) for job in jobs if name in job})
        if not sign or not known:
            names = sorted({name for job in jobs for name in job})
            raise ConfigError(f"--only is NAME=VALUE with a NAME of {', '.join(names)}; got {text!r}")
        if value not in known:
            raise ConfigError(f"--only {text}: no job has that; {name} is one of {', '.join(known)}")
        wanted.append((name, value))
    return [job for job in jobs if all(str(job.get(name)) == value for name, value in wanted)]


def _has(job: ExperimentJob, settings: Mapping[str, Any]) -> bool:
    return all(job.get(name) == value for name, value in settings.items())
