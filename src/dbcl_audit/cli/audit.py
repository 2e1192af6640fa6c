"""`dbcl audit`: attack a run, print the worst results, and write the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dbcl.cli.console import check_place, console, errors, print_path, table
from dbcl.cli.options import AllowCode, DataDir
from dbcl.errors import ConfigError
from dbcl.files import user_path, write_atomic
from dbcl.simulation.run_folder import read_config
from dbcl.simulation.user_code import user_code
from dbcl_audit.cli import missing_extra

if TYPE_CHECKING:
    from dbcl_audit.findings import Audit, Finding

HIDDEN = ("ssim", "share above 20 dB", "relative error", "tpr at 0.1 % fpr")
"""Measures shown only on the page, not in the terminal."""
MAX_PARTIES = 1000
"""Maximum number of simulated clients."""


def audit(
    run: Annotated[Path, typer.Argument(parser=user_path)],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, images and attacks: within 3 minutes.")] = False,
    parties: Annotated[int, typer.Option(help="Clients in the simulated runs, attacker included.")] = 2,
    fail_above: Annotated[
        str | None,
        typer.Option(
            help="Exit with status 1 if an attack exceeds a limit: client.psnr=15,server.auc=0.8. Adversaries are "
            "client, colluders, server and anyone; psnr=15 is for all. With a guarantee: epsilon=8."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the page. Default: audit.html in the run's folder.", parser=user_path),
    ] = None,
    seed: Annotated[int, typer.Option(help="Source of the attacks' randomness.")] = 0,
    data_dir: DataDir = None,
    allow_code: AllowCode = False,
) -> None:
    """Attack a run as its clients, its server and owners of its model could, and report what leaks.

    Attacks the recorded transcripts of the run (train with --transcripts 0,server), and short
    simulated runs with the same settings, in which the victim's examples are known. Writes one page
    for any browser, and JSON beside it. RUN is the folder of a finished run.

    For a run with a guarantee it measures the epsilon, with canaries in a simulated run and fresh
    secrets.

    Examples:

      dbcl audit runs/001-blind-digits --quick
      dbcl audit runs/001-blind-digits --parties 10 --fail-above client.cosine=0.5,client.psnr=15
      dbcl audit runs/002-private-digits --fail-above epsilon=10
    """
    try:
        from dbcl_audit import audit as audits
        from dbcl_audit import effort
        from dbcl_audit.report import page as report
        from dbcl_audit.report import promises, rating, wording
    except ImportError as error:
        raise missing_extra(error) from None
    limits = {} if fail_above is None else rating.parse_limits(fail_above)
    if not 2 <= parties <= MAX_PARTIES:
        raise ConfigError(
            f"parties must be 2 or more, an attacker and a victim, and at most {MAX_PARTIES}; got {parties}"
        )
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be 0 or more, and below 2^32; got {seed}")
    settings = read_config(run)
    page = out or run / "audit.html"
    check_place(page)
    if page.suffix == ".json":
        raise ConfigError(f"--out is the page, such as audit.html; the JSON is written beside it, got {page}")
    if settings.privacy is None and any(name.rpartition(".")[2] == "epsilon" for name in limits):
        raise ConfigError(f"--fail-above epsilon is for a run with a guarantee, and {run} promises nothing")
    columns = (TextColumn("[bold]auditing"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with user_code(settings), Progress(*columns, console=console) as progress:
        task = progress.add_task("")
        found = audits.audit(
            run,
            effort=effort.QUICK if quick else effort.FULL,
            clients=parties,
            seed=seed,
            data_dir=data_dir,
            allow_code=allow_code,
            tell=lambda text: progress.update(task, description=text),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, report.page(found).encode())
    write_atomic(page.with_suffix(".json"), found.json().encode())
    explained = wording.simulation_text(found)
    console.print(" ".join(explained if promises.promised(found) else explained[:1]), highlight=False)
    for _, verdict, worst, _ in wording.verdicts(found):
        console.print(f"[bold]{escape(verdict)}[/] {escape(worst)}", highlight=False)
    title = f"leaks of {found.name}: the worst naive and the worst adaptive attack"
    console.print(table(title, ("target", "adversary", "guessing", "naive", "adaptive"), worst_rows(found)))
    for what, why in found.not_attacked.items():
        console.print(f"not attacked: {what}: {why}", highlight=False, markup=False)
    if promises.promised(found):
        console.print(promises.proof_text(found), highlight=False)
    else:
        console.print("An attack that failed proves nothing: a better one may not.")
    print_path("page", page)
    broken = rating.exceeded(found, limits)
    for sentence in broken:
        console.print(f"[red]{sentence}")
    failed = [finding for finding in found.findings if finding.failures]
    for reason in dict.fromkeys(reason for finding in failed for reason in finding.failures):
        parts = ", ".join(dict.fromkeys(finding.attack for finding in failed if reason in finding.failures))
        line = " ".join(f"incomplete: {parts} failed: {reason}".split())
        errors.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if broken or len(failed) == len(found.findings):
        raise typer.Exit(1)


def worst_rows(audit: "Audit") -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a row for each target, adversary and measure, with the chance level and the worst
    attacks.

    >>> from dbcl_audit.findings import Audit, Finding
    >>> finding = Finding("rewind, twice", "client", "adaptive", "update", "cosine", 0.99, 0.98, 1.0, 0.0)
    >>> next(worst_rows(Audit("a", {}, {}, (), (finding,), 1.0)))
    ('update\\ncosine', 'client', '0.000', '–', '0.990\\n0.980 to 1.000\\n[bold]as bad as no defence')
    """
    from dbcl_audit.report.measures import number_text
    from dbcl_audit.report.rating import risks

    for risk in risks(audit):
        if risk.measure not in HIDDEN:
            guessing = number_text(risk.chance, risk.measure)
            target = audit.property_name if risk.target == "property" and audit.property_name else risk.target
            measure = risk.measure if risk.measure.family != "tpr" else "found at 1 % false alarms"
            yield f"{target}\n{measure}", risk.adversary, guessing, _cell(risk.naive), _cell(risk.adaptive)


def _cell(finding: "Finding | None") -> str:
    from dbcl_audit.report.measures import cases_text, number_text
    from dbcl_audit.report.rating import UNSURE, WIDE, word

    if finding is None:
        return "–"
    ends = [number_text(end, finding.measure).split()[0] for end in (finding.low, finding.high) if end is not None]
    lines = (number_text(finding.value, finding.measure), " to ".join(ends), cases_text(finding).split(" and ")[0])
    short = {WIDE: "unclear", UNSURE: "may leak"}.get(word(finding), word(finding))  # the page has room for more
    return "\n".join([*filter(None, lines), f"[bold]{short}"])
