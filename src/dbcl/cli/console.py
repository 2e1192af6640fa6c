"""Terminal output of all commands: consoles, tables and sparklines."""

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dbcl.errors import ConfigError
from dbcl.files import file_in_the_way
from dbcl.simulation.config import OPTIONS

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


QUOTE = '"'
FLAGS = {
    "folder": "--out",
    "resume": "--resume",
    "allow_code": "--allow-code",
    "data_dir": "--data-dir",
    "examples": "--examples",
}
"""Options whose names differ from their settings, by Python name."""


def as_options(text: str) -> str:
    """Rewrite settings in backticks in an error message as command-line options.

    >>> as_options('the remedy is `fraction=0.16`, `engine="local"` or `secure_aggregation=False`; see `folder`')
    'the remedy is --fraction 0.16, --engine local or no --secure-aggregation; see --out'
    """

    def option(found: "re.Match[str]") -> str:
        name, value = found[1], found[2]
        if name not in FLAGS and name not in OPTIONS:
            return found[0]
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value in (None, "True"):
            return flag
        return f"no {flag}" if value == "False" else f"{flag} {_importable(value.strip(QUOTE))}"

    return re.sub(r"`([a-z_]+)(?:=([^`]+))?`", option, text)


def _importable(value: str) -> str:
    """Convert the dotted name of an object, such as torch.nn.functional.mse_loss, to module:name."""
    module, _, name = value.rpartition(".")
    return f"{module}:{name}" if module.isidentifier() or re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", module) else value


def system_error(error: OSError) -> str:
    """Format an operating system error with its message and paths.

    >>> system_error(OSError(28, "No space left on device", "runs/1"))
    'No space left on device: runs/1'
    """
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    return ": ".join([error.strerror or str(error) or type(error).__name__, *paths])


def print_json(facts: Any) -> None:
    """Print values as JSON without colours and line wrapping.

    >>> print_json({"rounds": 3})
    {
      "rounds": 3
    }
    """
    print(json.dumps(facts, indent=2))


def table(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table that wraps long cells.

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
    """Print a path on a separate unwrapped line for copying.

    >>> print_path("page", "runs/1/audit.html")
    page     runs/1/audit.html
    """
    console.print(f"{label:<8} {path}", soft_wrap=True)


def check_place(path: Path) -> None:
    """Raise `ConfigError` before a long computation if its output file cannot be written.

    >>> check_place(Path("."))
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: --out is a folder, and must be a file: .
    """
    if path.is_dir():
        raise ConfigError(f"--out is a folder, and must be a file: {path}")
    if taken := file_in_the_way(path.parent):
        raise ConfigError(f"--out cannot be {path}: {taken} is a file")
    there = next(each for each in path.absolute().parents if each.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ConfigError(f"--out cannot be {path}: {error.strerror}, in {there}") from None


def sparkline(values: Sequence[float], shown: Callable[[float], str], width: int = 32) -> str:
    """Return values as a sparkline between the formatted minimum and maximum.

    Args:
        values: The values.
        shown: Function that formats a value.
        width: Maximum number of bars. Longer series are sampled evenly.

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
