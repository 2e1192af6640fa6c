"""`python -m experiments NAME`: play experiments, and write their tables and figures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dbcl.cli import main
from dbcl.cli.console import AsJson, console, errors, print_json, print_path, table
from dbcl.cli.options import DataDir
from dbcl.errors import ConfigError, DataError
from dbcl.files import user_path

if TYPE_CHECKING:
    from experiments.experiment import Experiment, ExperimentJob, Tell
    from experiments.runner import OnJob, Order

QUIET_SECONDS = 60.0
"""Seconds between progress messages of a long job without a terminal."""


def reproduce(
    name: Annotated[str, typer.Argument(help="Which experiment, or all.")] = "",
    listed: Annotated[
        bool, typer.Option("--list", help="Say what there is, how long each takes and which data it needs.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A reduced setting, within 3 minutes on 2 cores; its results lie apart."),
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where it is computed: cpu, cuda, or auto (cuda where there is one).")
    ] = "auto",
    out: Annotated[
        Path,
        typer.Option(help="The results go into a folder here, by the experiment's name.", parser=user_path),
    ] = Path("results"),
    data_dir: DataDir = None,
    report: Annotated[
        bool, typer.Option("--report", help="Play nothing: write tables and figures of the rows that are there.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Try a grid of settings, and write those that the experiment shall take.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Stop after this many minutes; the same command goes on.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only the jobs with a setting, for example network=mlp; again for more.")
    ] = None,
    part: Annotated[
        str, typer.Option(help="Only a share of the jobs, 1/3 for the first of three processes side by side.")
    ] = "1/1",
    as_json: AsJson = False,
) -> None:
    """Play an experiment of the paper and write its table, with the paper's numbers beside ours, and its figure.

    A row for each job that was played goes into results/NAME/rows.jsonl at once: what was interrupted goes on where it
    stopped.

    Examples:

      python -m experiments --list
      python -m experiments theory --quick
      python -m experiments table1 --device cuda --time-limit 9
      python -m experiments all --quick
    """
    from experiments.registry import EXPERIMENTS, find
    from experiments.runner import Order, resolve

    if listed:
        _list(EXPERIMENTS, as_json=as_json)
        return
    if not name:
        raise ConfigError("name an experiment, or all; `python -m experiments --list` shows them")
    if time_limit is not None and not time_limit > 0:
        raise ConfigError(f"time-limit must be above 0 minutes, got {time_limit:g}")
    seconds = None if time_limit is None else 60 * time_limit
    order = Order(out, quick, tune, tuple(only or ()), _part(part), seconds)
    if name != "all":
        if not _reproduce(find(name), order, resolve(device), data_dir, report=report):
            raise typer.Exit(3)
        return
    _all(EXPERIMENTS, order, resolve(device), data_dir, report=report)


def _all(
    experiments: "tuple[Experiment, ...]", order: "Order", device: str, data_dir: str | None, *, report: bool
) -> None:
    """Play one after another; what is missing for one of them does not stop the others."""
    failed = []
    for experiment in experiments:
        console.print(f"[bold]{experiment.name}[/]: {experiment.title}", highlight=False)
        try:
            whole = _reproduce(experiment, order, device, data_dir, report=report)
        except (ConfigError, DataError) as error:
            errors.print(f"{experiment.name} is left out: {error}", style="yellow", markup=False, soft_wrap=True)
            whole = False
        if not whole:
            failed.append(experiment.name)
    if failed:
        errors.print(f"not complete: {', '.join(failed)}", style="yellow", markup=False, soft_wrap=True)
        raise typer.Exit(3)


def _reproduce(experiment: "Experiment", order: "Order", device: str, data_dir: str | None, *, report: bool) -> bool:
    """Play what is left and write the report; whether all was played."""
    from experiments import runner
    from experiments.experiment import Context

    whole = True
    if not report:
        runner.check(experiment, order, data_dir)
        with _bars() as (tell, on_job):
            whole = runner.play(experiment, order, Context(device, data_dir, tell), on_job)
    if runner.results(experiment, order).rows or report:
        for path in runner.report(experiment, order):
            print_path("wrote", path)
    if not whole:
        console.print("the time limit ended it; the same command goes on where it stopped", highlight=False)
    return whole


@contextmanager
def _bars() -> "Iterator[tuple[Tell, OnJob]]":
    """A bar for the jobs and one for the steps of the present one; without a terminal lines, one a minute or more."""
    columns = (
        TextColumn("[bold]{task.fields[name]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        jobs = progress.add_task("", name="jobs", total=None)
        steps = progress.add_task("", name="this one", total=None)
        last, place, printed = "", "", time.monotonic()

        def show() -> None:
            nonlocal printed
            console.print(f"{place}  {last}", highlight=False, markup=False, soft_wrap=True)
            printed = time.monotonic()

        def tell(text: str, done: int, total: int) -> None:
            nonlocal last
            last = text or last
            progress.update(steps, description=text, completed=done, total=total or None)
            if not console.is_terminal and last and time.monotonic() - printed > QUIET_SECONDS:
                show()

        def on_job(done: int, total: int, job: "ExperimentJob") -> None:
            nonlocal last, place
            progress.update(jobs, completed=done, total=total)
            place = f"{done}/{total}"
            if not console.is_terminal and last:
                show()
                last = ""

        yield tell, on_job


def _part(text: str) -> tuple[int, int]:
    try:
        number, count = (int(each) for each in text.split("/"))
        if not 1 <= number <= count:
            raise ValueError
    except ValueError:
        raise ConfigError(f"part is a number and how many there are, for example 1/3; got {text!r}") from None
    return number, count


def _list(experiments: "tuple[Experiment, ...]", *, as_json: bool) -> None:
    if as_json:
        keys = ("name", "title", "what", "minutes", "data", "quick_data")
        print_json([{key: getattr(experiment, key) for key in keys} for experiment in experiments])
        return
    cells = [(each.name, each.what, each.minutes, ", ".join(each.data) or "none") for each in experiments]
    console.print(table("python -m experiments NAME", ("name", "what", "minutes", "data"), cells))


app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.command()(reproduce)

if __name__ == "__main__":
    main(app, "python -m experiments")
