"""Command-line application: registration of all commands, and error handling."""

import importlib
import io
import logging
import os
import sys
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer
from rich.logging import RichHandler
from typer.main import get_command

from dbcl import __version__
from dbcl.cli.console import as_options, errors, system_error
from dbcl.cli.data import data, fetch
from dbcl.cli.env import env
from dbcl.cli.plan import plan
from dbcl.cli.privacy import privacy
from dbcl.cli.train import train
from dbcl.errors import DbclError
from dbcl.simulation.user_code import memory_remedy
from dbcl.user_code import out_of_memory

try:  # newer versions of typer bring click along
    click: Any = importlib.import_module("typer._click.exceptions")
except ImportError:
    click = importlib.import_module("click.exceptions")

LOUD = ("flwr", "ray")
"""Loggers silenced because they print long tracebacks when a client fails. The errors of dbcl
contain the relevant information.
"""
MAX_ERROR_LINES = 30
"""Maximum number of lines of an error message before it is shortened."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests as well, and the two were printed one after the other
    help="Double-Blind Collaborative Learning: train one model together over random sketches of its weights.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dbcl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Read the options that stand before a command."""


app.command()(train)
app.command()(plan)
app.command()(privacy)
app.command()(env)
for point in sorted(entry_points(group="dbcl.commands")):  # of dbcl_audit and other packages that add commands
    app.command(point.name)(point.load())

datasets = typer.Typer(invoke_without_command=True)
datasets.callback()(data)
datasets.command()(fetch)
app.add_typer(datasets, name="data")


def main(program: typer.Typer = app, name: str = "dbcl") -> None:
    """Run a command. An error prints one message and returns exit status 2 without a traceback.

    Applies to errors of dbcl, invalid input, and operating system errors such as a full disk or an
    unreadable file. Any other exception is a bug in dbcl and prints its traceback.
    """
    _print_anything()
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    for logger in LOUD:
        logging.getLogger(logger).disabled = True
    try:
        status = _run(program, name)
        _flush()  # here, where an error of it is still ours
        sys.exit(status)
    except click.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    except click.ClickException as error:
        _end(f"{error.format_message().strip()}{_help(error)}")
    except DbclError as error:
        _end(as_options(str(error)))
    except BrokenPipeError:  # the reader of the output has ended
        _drop_output()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        _end(system_error(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _end(as_options(memory_remedy(error)))


def _run(program: typer.Typer, name: str) -> int:
    """Run a command without click's handling of errors and interruptions."""
    try:
        with get_command(program).make_context(name, sys.argv[1:]) as context:
            context.command.invoke(context)
    except typer.Exit as ended:
        return int(ended.exit_code)
    return 0


def _print_anything() -> None:
    """Make the output streams replace unencodable characters, such as table borders, by a question
    mark.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _help(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context else ""


def _drop_output() -> None:
    """Redirect standard output to the null device after a write error. Python would otherwise retry
    the write at exit.
    """
    try:
        _flush()
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _flush() -> None:
    if sys.stdout is not None:  # as it is where it was closed
        sys.stdout.flush()


def _end(message: str) -> NoReturn:
    first, *more = message.splitlines() or [""]
    if len(more) == 1:  # a list of one problem is no list
        message = f"{first} {more[0].strip().removeprefix('- ')}"
    elif len(more) > MAX_ERROR_LINES:  # a traceback from elsewhere, whose end says what happened
        message = "\n".join([first, "...", *more[-3:]])
    errors.print("[bold red]error[/]", end=" ")
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
