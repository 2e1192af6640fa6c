"""Trackers of a run's metrics: a progress bar and TensorBoard.

A tracker receives the settings and the metrics in metrics.jsonl. It receives no weights, updates or
secrets.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dbcl.errors import ConfigError
from dbcl.files import file_in_the_way, user_path


class Tracker(Protocol):
    """Interface of a tracker. `Run.play` accepts any object with these three methods.

    If another tracker fails in `begin`, `end` may be called without `begin`.

    >>> class Printed:
    ...     def begin(self, folder, settings, round):
    ...         print(f"{folder.name}: {settings['rounds']} rounds, from round {round}")
    ...     def log(self, round, values):
    ...         print(f"round {round}: accepted {values['accepted']}")
    ...     def end(self):
    ...         print("done")
    >>> import tempfile
    >>> from dbcl.simulation import Run, RunConfig
    >>> run = Run.start(RunConfig(rounds=1, clients=10, seed=0), Path(tempfile.mkdtemp()) / "mine")
    >>> history = list(run.play(Printed()))
    mine: 1 rounds, from round 0
    round 1: accepted 1
    done
    """

    def begin(self, folder: Path, settings: Mapping[str, Any], round: int) -> None:
        """Start tracking a new or resumed run.

        Args:
            folder: The run's folder.
            settings: Settings by option name.
            round: Number of rounds completed before.
        """

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a round.

        Args:
            round: Number of the round, starting at 1.
            values: Metrics by name, as in metrics.jsonl.
        """

    def end(self) -> None:
        """Finish tracking after the last round or an error."""


class TensorBoard:
    """Tracker that writes TensorBoard event files.

    Args:
        folder: Folder in which a subfolder with the run's name is created; empty for the run's own
            folder.

    >>> check_place("tensorboard:logs")
    """

    def __init__(self, folder: str = "") -> None:
        _needs("tensorboard")
        self.folder = user_path(folder) if folder else None
        if self.folder is not None and (taken := file_in_the_way(self.folder)):
            raise ConfigError(f"TensorBoard cannot write into {folder}: {taken} is a file")
        self.writer: Any = None

    def begin(self, folder: Path, settings: Mapping[str, Any], round: int) -> None:
        """Open the event file. Events after `round`, written before a crash, are hidden."""
        place = self.folder / folder.name if self.folder else folder / "tensorboard"
        writer = _needs("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(place), purge_step=round + 1 if round else None)
        rows = "".join(f"| {name} | {value} |\n" for name, value in settings.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", round)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)

    def end(self) -> None:
        """Flush and close the event file."""
        if self.writer is not None:
            self.writer.close()


class ProgressBar:
    """Tracker that draws a progress bar in a terminal or notebook, with the metric of the last
    round.

    Args:
        shown: Function that formats the metric.
        console: Console to draw on.

    >>> import io
    >>> bar = ProgressBar("{:.0%}".format, Console(file=io.StringIO()))
    >>> bar.begin(Path("mine"), {"rounds": 2}, 0)
    >>> bar.log(1, {"accuracy": 0.5})
    >>> bar.end()
    >>> "1/2 rounds  accuracy 50%" in bar.console.file.getvalue()
    True
    """

    def __init__(self, shown: Callable[[float], str] = "{:.4g}".format, console: Console | None = None) -> None:
        self.console, self.shown = console or Console(), shown
        self.progress: Progress | None = None

    def begin(self, folder: Path, settings: Mapping[str, Any], round: int) -> None:
        """Draw the bar with the completed rounds."""
        columns = (
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds  {task.description}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task("", total=settings["rounds"], completed=round)
        self.progress.start()

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Advance by one round. The first value is the metric."""
        assert self.progress is not None
        name, value = next(iter(values.items()))
        self.progress.update(self.task, completed=round, description=f"{name} {self.shown(value)}")

    def end(self) -> None:
        """Stop drawing the bar."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def tracker(place: str) -> Tracker:
    """Make a tracker from its setting. Requires the tracker's optional package.

    Raises:
        ConfigError: The tracker is unknown, or its package is not installed.

    >>> tracker("paper")
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: no tracker 'paper'; choose tensorboard or tensorboard:FOLDER
    """
    check_place(place)
    return TensorBoard(place.partition(":")[2])


def check_place(place: str) -> None:
    """Raise `ConfigError` for a setting that names no known tracker.

    >>> check_place("tensorboard")
    """
    if place.partition(":")[0] != "tensorboard":
        raise ConfigError(f"no tracker {place!r}; choose tensorboard or tensorboard:FOLDER")


def _needs(module: str) -> Any:
    """Import an optional dependency when it is needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking with TensorBoard needs a package that is not installed ({error}): pip install tensorboard, "
            "or pip install '.[tensorboard]' in a clone of dbcl"
        ) from error
