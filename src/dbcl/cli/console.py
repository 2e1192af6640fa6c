"""What the commands share to print: the two consoles, tables, and a line of numbers as bars."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dbcl.errors import ConfigError
from dbcl.files import file_in_the_way

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(facts: Any) -> None:
    """Print facts for another program, without colours and without wrapping.

    >>> print_json({"rounds": 3})
    {
      "rounds": 3
    }
    """
    print(json.dumps(facts, indent=2))


def table(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose long cells wrap.

    >>> table("a table", ["name", "size"], [["W", "3"]]).row_count
    1
    """
    made = Table(title=title)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_path(label: str, path: object) -> None:
    """Print where something lies on a line of its own, never wrapped, so that it can be copied.

    >>> print_path("page", "runs/1/audit.html")
    page     runs/1/audit.html
    """
    console.print(f"{label:<8} {path}", soft_wrap=True)


def check_place(path: Path) -> None:
    """Refuse a place for a page where there can be none, before the work that fills it.

    >>> check_place(Path("."))
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: --out is a folder, and must be a file: .
    """
    if path.is_dir():
        raise ConfigError(f"--out is a folder, and must be a file: {path}")
    if taken := file_in_the_way(path.parent):
        raise ConfigError(f"--out cannot be {path}: {taken} is a file")


def sparkline(values: Sequence[float], shown: Callable[[float], str], width: int = 32) -> str:
    """Numbers as a line of bars between the smallest and the largest; at most `width` of them, evenly chosen.

    >>> sparkline([0.1, 0.5, 0.9], "{:.0%}".format)
    '10% ▁▅█ 90%'
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "no finite number"
    low, high = min(values), max(values)
    bars = min(width, len(values))
    chosen = [values[bar * (len(values) - 1) // max(1, bars - 1)] for bar in range(bars)]
    drawn = "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in chosen)
    return f"{shown(low)} {drawn} {shown(high)}"
