"""`dbcl audit`: attack a run, show the worst of each kind, and write the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dbcl.cli.console import console, print_path, table
from dbcl.cli.options import DataDir
from dbcl.errors import ConfigError
from dbcl.files import write_atomic

if TYPE_CHECKING:
    from dbcl.audit.findings import Audit, Finding

SHOWN = ("cosine", "psnr", "accuracy", "auc", "tpr at 1 % fpr")
"""The measures that the terminal shows; the page shows all."""


def audit(
    run: Path,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, pictures and attacks: within 3 minutes.")
    ] = False,
    parties: Annotated[int, typer.Option(help="How many clients take part in the rehearsals, attacker included.")] = 2,
    fail_above: Annotated[
        str | None,
        typer.Option(help="Exit with status 1 where any attack, from whichever seat, got more: cosine=0.5,psnr=15."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes. Default: audit.html in the run's folder.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which examples and starts the attacks draw.")] = 0,
    data_dir: DataDir = None,
) -> None:
    """Attack a run as its clients and its server could, and say what leaks.

    Attacks what the run recorded (train with --transcripts 0,server), and rehearses short runs under the same settings
    in which it knows what the victim trained on. Writes one page that opens in any browser, and JSON beside it. RUN is
    the folder of a finished run.

    Examples:

      dbcl audit runs/001-blind-digits --quick
      dbcl audit runs/001-blind-digits --parties 10 --fail-above cosine=0.5
    """
    try:
        from dbcl.audit import suite
        from dbcl.audit.report import page as report
        from dbcl.audit.report import rating
    except ImportError as error:
        raise ConfigError(
            f"an audit needs more packages ({error.name} is missing): pip install 'dbcl[audit]'"
        ) from None
    limits = rating.parse_limits(fail_above) if fail_above else {}
    if parties < 2:
        raise ConfigError(f"parties must be 2 or more, an attacker and a victim, got {parties}")
    columns = (TextColumn("[bold]auditing"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("")
        found = suite.audit(
            run,
            budget=suite.QUICK if quick else suite.FULL,
            clients=parties,
            seed=seed,
            data_dir=data_dir,
            tell=lambda text: progress.update(task, description=text),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    page = out or run / "audit.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, report.page(found).encode())
    write_atomic(page.with_suffix(".json"), found.json().encode())
    title = f"what leaked from {found.name}: the worst naive and the worst adaptive attack"
    console.print(table(title, ("what", "who", "guessing", "naive", "adaptive"), worst_rows(found)))
    console.print("An attack that failed proves nothing: a better one may not.")
    print_path("page", page)
    broken = rating.exceeded(found, limits)
    for sentence in broken:
        console.print(f"[red]{sentence}")
    if broken:
        raise typer.Exit(1)


def worst_rows(audit: "Audit") -> Iterator[tuple[str, str, str, str, str]]:
    """For each target, seat and measure: what guessing gives, and what the worst attack of each kind reached.

    >>> from dbcl.audit.findings import Audit, Finding
    >>> finding = Finding("rewind, twice", "client", "adaptive", "update", "cosine", 0.99, 0.98, 1.0, 0.0)
    >>> next(worst_rows(Audit("a", {}, {}, (), (finding,), 1.0)))
    ('update\\ncosine', 'client', '0.000', '–', '0.990\\n[bold]as bad as no defence')
    """
    from dbcl.audit.report.measures import number_text
    from dbcl.audit.report.rating import risks

    for risk in risks(audit):
        if risk.measure in SHOWN:
            guessing = number_text(risk.chance, risk.measure)
            yield f"{risk.target}\n{risk.measure}", risk.seat, guessing, _cell(risk.naive), _cell(risk.adaptive)


def _cell(finding: "Finding | None") -> str:
    from dbcl.audit.report.measures import number_text
    from dbcl.audit.report.rating import GUESS, WIDE, word

    if finding is None:
        return "–"
    short = GUESS if word(finding) == WIDE else word(finding)  # only the page has room for the interval
    return f"{number_text(finding.value, finding.measure)}\n[bold]{short}"
