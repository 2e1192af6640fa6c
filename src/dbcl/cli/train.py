"""`dbcl train`: runs a training, shows its progress, and prints a summary of the results and the
clients' view.
"""

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dbcl.cli import summary
from dbcl.cli.console import as_options, console, errors, print_json, print_path, system_error
from dbcl.cli.options import AllowCode, DataDir, Preset, with_settings
from dbcl.data import EMBEDDED
from dbcl.errors import ConfigError
from dbcl.files import user_path
from dbcl.settings import LONG
from dbcl.simulation import RESUMABLE, RoundMetrics, Run, RunConfig, presets, transcript_bytes
from dbcl.simulation.baseline import score_without_noise
from dbcl.simulation.build import device_of
from dbcl.simulation.run_folder import read_config
from dbcl.simulation.task import CODE, Task, code_of, task_of
from dbcl.simulation.user_code import user_code
from dbcl.trackers import ProgressBar

LINES = 10
"""Number of progress lines of a complete run without a terminal."""

TRANSCRIPT_BYTES = 1e9
"""Size of transcripts in bytes above which a warning is printed."""

SMALL_COHORT = 10
"""Number of clients in a round below which a warning is printed."""


def _options(names: Sequence[str]) -> str:
    *most, last = [f"--{name}" for name in names]
    return f"{', '.join(most)} and {last}"


@with_settings()
def train(
    preset: Preset = None,
    *,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder. Default: the next free one under runs/.",
            rich_help_panel=LONG,
            parser=user_path,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help=f"Go on with this run's folder; only {_options(RESUMABLE)} may change.",
            rich_help_panel=LONG,
            parser=user_path,
        ),
    ] = None,
    allow_code: AllowCode = False,
    baseline: Annotated[
        bool | None,
        typer.Option(
            help="Train once more without noise, to show what a guarantee costs. Default: on the embedded dataset.",
            rich_help_panel=LONG,
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but warnings and errors.", rich_help_panel=LONG)
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object at the end, nothing else.", rich_help_panel=LONG),
    ] = False,
    **settings: Any,
) -> None:
    """Train a model together: by default with a guarantee for every example, against everyone.

    Without options this trains a linear head on features of the embedded digits with a guarantee for every example,
    within a minute, and leaves a folder with the configuration, metrics, checkpoints, the model and a picture.

    Examples:

      dbcl train
      dbcl train --data mnist --epsilon 1
      dbcl train --preset private --epsilon 4
      dbcl train --preset paper --data mnist --target 0.97
      dbcl train --preset blind --model mypackage.nets:make --coverage 'encoder.*' --ratio 2-4 --veil 0.5
      dbcl train --resume runs/001-blind-digits --rounds 400
    """
    if resume is not None:
        for name, given in {"out": out, "preset": preset}.items():
            if given is not None:
                raise ConfigError(f"--{name} is for a new run, and --resume goes on with the one in {resume}")
        code = {name: settings.pop(name) for name in CODE if name in settings}
        fixed = sorted(set(settings) - set(RESUMABLE))
        if fixed:
            raise ConfigError(f"with --resume only {_options(RESUMABLE)} may change, not {', '.join(fixed)}")
        allow_code = allow_code or _same_code(resume, code)
        with _user_code(read_config(resume), as_json):
            run = Run.resume(resume, data_dir, allow_code=allow_code, **settings)
    else:
        named, preset = preset, presets.DEFAULT if preset is None else preset
        with presets.hint_of_default(named):
            chosen = presets.preset(preset, **settings)
            with _user_code(chosen, as_json):
                device_of(chosen)  # before features are computed
                task = _task(chosen, data_dir, quiet=quiet or as_json)
                run = Run.start(chosen, out, task=task) if out else _start(chosen, preset, task)
    _warn_of_transcripts(run)
    _warn_of_few_clients(run)
    go_on = f"dbcl train --resume {run.folder}{' --allow-code' if code_of(run.config) else ''}"
    try:
        with _user_code(run.config, as_json, then=f"; mend it and go on with: {go_on}"):
            _play(run, quiet=quiet or as_json)
    except KeyboardInterrupt:
        errors.print(f"stopped after round {run.server.round}; go on with: {go_on}", soft_wrap=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{system_error(error)}; mend it and go on with: {go_on}") from error
    if as_json:
        print_json(summary.facts(run))
    elif not quiet:
        _summarise(run, _without_noise(run, baseline))
    elif warning := run.contributions.warning():
        _warn(as_options(warning))


def _same_code(folder: Path, code: Mapping[str, str]) -> bool:
    """Return whether the command line names all user code of a run again, which implies consent to
    run it.
    """
    if not code:
        return False
    before = code_of(read_config(folder))
    for name, value in code.items():
        if before.get(name, value) != value or name not in before:
            raise ConfigError(f"the run in {folder} has another {name}; with --resume it cannot change")
    return code == before


@contextlib.contextmanager
def _user_code(config: RunConfig, as_json: bool, then: str = "") -> Iterator[None]:
    """Explain an error of user code, and redirect the output of user code away from JSON output."""
    with user_code(config, then), contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        yield


def _task(config: RunConfig, data_dir: str | None, *, quiet: bool) -> Task:
    """Load the task, with a progress bar for feature extraction, which takes minutes for large
    datasets.
    """
    if config.feature_map is None or quiet or not console.is_terminal:
        return task_of(config, data_dir)
    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("", total=None)
        return task_of(config, data_dir, progress=lambda done, total: bar.update(shown, completed=done, total=total))


def _start(config: RunConfig, preset: str, task: Task) -> Run:
    """Start a run in the next free folder; retry with another folder if a concurrent process takes
    it first.
    """
    name = f"{Path(preset).stem}-{config.data.replace(':', '-')}"
    while True:
        folder = _next_folder(name)
        try:
            return Run.start(config, folder, task=task)
        except ConfigError:
            if not folder.exists():  # or else it is taken
                raise


def _play(run: Run, *, quiet: bool) -> None:
    if quiet:
        _play_silently(run)
    elif console.is_terminal:
        _play_with_bar(run)
    else:
        _play_with_lines(run)


def _play_silently(run: Run) -> None:
    for _ in run.play():
        pass


def _play_with_lines(run: Run) -> None:
    every = max(1, run.config.rounds // LINES)
    for metrics in run.play():
        if metrics.round % every == 0 or run.finished:
            console.print(
                f"round {metrics.round}/{run.config.rounds}  {_scored(run, metrics)}loss {metrics.loss:.4g}",
                highlight=False,
                soft_wrap=True,
            )


def _scored(run: Run, metrics: RoundMetrics) -> str:
    objective = run.task.objective
    return "" if objective.name == "loss" else f"{objective.name} {objective.shown(metrics.score, 1)}  "


def _play_with_bar(run: Run) -> None:
    bar = ProgressBar(run.task.objective.shown, console)
    for _ in run.play(bar):
        pass


def _warn_of_transcripts(run: Run) -> None:
    size = transcript_bytes(run)
    if size > TRANSCRIPT_BYTES and not run.finished:
        folder, free = run.folder / "transcripts", shutil.disk_usage(run.folder).free
        _warn(
            f"--transcripts will take up to {size / 1e9:.1f} GB in {folder}, "
            f"where {free / 1e9:.1f} GB are free; "
            "fewer --rounds, a smaller --fraction or fewer parties take less, and server-sum takes less than server"
        )


def _warn_of_few_clients(run: Run) -> None:
    """Warn about rounds with few clients if a veil hides the weights. Without a veil, the summary
    reports the exposure.
    """
    config = run.config
    veiled = config.privacy is None and not config.insecure and any(run.server.plan.veils.values())
    if run.finished or config.cohort >= SMALL_COHORT or not veiled:
        return
    clients = "1 client takes" if config.cohort == 1 else f"{config.cohort} clients take"
    _warn(
        f"{clients} part in a round: with fewer than {SMALL_COHORT}, a client that stores what it got told whether "
        "single examples are another's (AUC 0.95 and more between two, about 0.8 with ten); more clients in a round "
        "help (--clients, --fraction), and only a guarantee bounds it: --preset private, with few clients "
        "private-example"
    )


def _warn(text: str) -> None:
    errors.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _without_noise(run: Run, wanted: bool | None) -> float | None:
    """Repeat the training without noise. By default this is done only for the embedded dataset,
    which is fast.
    """
    privacy = run.config.privacy
    possible = privacy is not None and privacy.unit == "example"
    if wanted and not possible:
        raise ConfigError("--baseline is for runs that guarantee privacy for one example")
    if not possible or not (run.config.data == EMBEDDED if wanted is None else wanted):
        return None
    with console.status("the same training without noise, to compare"):
        return score_without_noise(run)


def _summarise(run: Run, without_noise: float | None) -> None:
    config, last = run.config, run.history[-1]
    table = Table(title=run.title, show_header=False, min_width=60)
    for label, text in summary.rows(run, without_noise):
        table.add_row(label, text)
    console.print(table)
    print_path("picture", run.folder / "curves.png")
    print_path("model", run.folder / "model.safetensors")
    rounds = f" --rounds {max(config.rounds, 2 * last.round)}"
    if config.privacy is not None:
        if run.stopped_by == "rounds":
            console.print("The budget is spent: this run cannot go on.")
            return
        rounds = ""  # the budget is planned for those that it has
    beyond = f" --target {0 if run.task.objective.lower_is_better else 1}" if config.target else ""
    if code_of(config):
        beyond += " --allow-code"
    if config.patience:
        beyond += f" --patience {2 * max(config.patience, last.round)}"
    print_path("resume", f"dbcl train --resume {run.folder}{rounds}{beyond}")


def _next_folder(name: str) -> Path:
    root = Path("runs")
    numbers = (re.match(r"([0-9]{3,9})-", path.name) for path in root.glob("*-*"))
    taken = [int(number[1]) for number in numbers if number]
    return root / f"{max(taken, default=0) + 1:03d}-{name}"
