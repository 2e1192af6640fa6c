"""The commands gathered into one program, and how it ends when something is wrong."""

import logging
import os
import sys
from typing import Annotated, NoReturn

import torch
import typer
from rich.logging import RichHandler

from dbcl import __version__
from dbcl.cli.audit import audit
from dbcl.cli.compare import compare
from dbcl.cli.console import errors
from dbcl.cli.data import data, fetch
from dbcl.cli.env import env
from dbcl.cli.plan import plan
from dbcl.cli.train import train
from dbcl.errors import DbclError

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
    """Take the options that stand before a command."""


app.command()(train)
app.command()(plan)
app.command()(audit)
app.command()(compare)
app.command()(env)

datasets = typer.Typer(invoke_without_command=True)
datasets.callback()(data)
datasets.command()(fetch)
app.add_typer(datasets, name="data")


def main() -> None:
    """Run the command; what is wrong is one message and exit status 2, never a traceback.

    That holds for errors of dbcl's own and for what the system has to say: a disk that is full, a file that may not be
    read. Any other exception is a fault of dbcl, and shows where it is.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    try:
        app()
    except DbclError as error:
        _end(str(error))
    except BrokenPipeError:  # whoever read our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.exit(1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _end(f"{error.strerror or error}{where}")
    except MemoryError:
        _end("out of memory")
    except torch.OutOfMemoryError as error:
        _end(f"out of the device's memory; a smaller --batch-size or --fraction takes less\n{error}")


def _end(message: str) -> NoReturn:
    errors.print("[bold red]error[/]", end=" ")
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
