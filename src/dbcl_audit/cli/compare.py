"""`dbcl compare`: compare several audits."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from dbcl.cli.console import check_place, console, print_path
from dbcl.errors import ConfigError
from dbcl.files import user_path, write_atomic
from dbcl.settings import fits
from dbcl_audit.cli import missing_extra

if TYPE_CHECKING:
    from dbcl_audit.findings import Audit


def compare(
    runs: Annotated[list[Path], typer.Argument(parser=user_path)],
    out: Annotated[Path, typer.Option(help="File of the page.", parser=user_path)] = Path("compare.html"),
) -> None:
    """Compare audits: accuracy and cost of each run beside the worst results of attacks on it.

    RUNS are folders of audited runs, or their audit.json files. Prints two tables, and writes a
    page with both.

    Example:

      dbcl compare runs/001-plain-digits runs/002-paper-digits runs/003-blind-digits
    """
    try:
        from dbcl_audit.report import comparison as report
        from dbcl_audit.report.promises import promised
    except ImportError as error:
        raise missing_extra(error) from None

    check_place(out)
    audits = [_read(run) for run in runs]
    table = Table(title="audits side by side: the worst result of any attack", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("run", overflow="fold")
    private = any(promised(each) for each in audits)
    leaks = (f"{each.who}\n{each.name}" for each in report.LEAKS)
    for heading in ("accuracy", "rounds", "MB", *(["epsilon"] if private else []), *leaks):
        table.add_column(heading, no_wrap=heading != "epsilon")
    guesses = (guess.replace(" dB", "").rpartition(" to ")[2] for guess in report.guessing(audits))
    table.add_row("guessing", *[""] * (3 + private), *guesses)
    for each in audits:
        accuracy, sent = each.run.get("accuracy"), each.run.get("bytes")
        table.add_row(
            each.name,
            "—" if accuracy is None else f"{accuracy:.1%}",
            str(each.run.get("rounds", "—")),
            "—" if sent is None else f"{sent / 1e6:.0f}",
            *([report.epsilon(each)] if private else []),
            *(leak.replace(" dB", "") for leak in report.leaks(each)),
        )
    worst = Table(title="worst finding by adversary, whatever its measure", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("run", *report.WHO):
        worst.add_column(heading, overflow="fold")
    for each in audits:
        worst.add_row(each.name, *report.worst_findings(each))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, report.comparison(audits).encode())
    console.print(table)
    console.print(worst)
    console.print(
        "Leaks to clients (alone or together), the server and anyone with the model: higher is worse; at the level of "
        "guessing the attacks failed.",
        highlight=False,
    )
    if private:
        console.print("epsilon: stated, and measured in brackets.", highlight=False)
    console.print("Accuracy: higher is better; rounds and MB: lower is better.", highlight=False)
    print_path("page", out)


def _read(run: Path) -> "Audit":
    from dbcl_audit.findings import Audit

    path = run if run.suffix == ".json" else run / "audit.json"
    try:
        audit = Audit.from_json(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: run `dbcl audit {run}` first") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no audit: {error}") from None
    measured = [audit.run.get(name) for name in ("accuracy", "bytes")] if isinstance(audit.run, Mapping) else []
    shown = replace(audit, findings=tuple(replace(each, curves=()) for each in audit.findings))  # a curve may have gaps
    if not fits(shown, Audit) or not all(fits(number, float | None) for number in measured):
        raise ConfigError(f"{path} is no audit: some of its values are of the wrong kind")
    return audit
