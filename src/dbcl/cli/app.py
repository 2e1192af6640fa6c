"""The commands gathered into one program, and how it ends when something is wrong."""

import logging
import sys
from typing import Annotated

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
    """Run the command; an error of dbcl's own is one message and exit status 2, never a traceback."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    try:
        app()
    except DbclError as error:
        errors.print("[bold red]error[/]", end=" ")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
