"""Several audits side by side: the worst leaks beside accuracy and cost, as rows and as a page."""

from collections.abc import Sequence
from typing import NamedTuple

from dbcl_audit.findings import Audit
from dbcl_audit.report.figures import escape, trade_off
from dbcl_audit.report.measures import accuracy_text, chance_of, kind, number_text, plain_text, size_text
from dbcl_audit.report.page import definitions, details, document, table
from dbcl_audit.report.rating import worst
from dbcl_audit.report.wording import GLOSSARY, NO_PROOF, promised


class Leak(NamedTuple):
    """One column of a comparison: who attacks, and the family of measures of which the worst is shown."""

    who: str
    adversaries: tuple[str, ...]
    family: str
    name: str


CLIENTS = ("client", "colluders")
LEAKS = (
    Leak("client", CLIENTS, "cosine", "cosine"),
    Leak("client", CLIENTS, "psnr", "PSNR"),
    Leak("client", CLIENTS, "auc", "AUC"),
    Leak("server", ("server",), "psnr", "PSNR"),
    Leak("server", ("server",), "auc", "AUC"),
    Leak("anyone", ("anyone",), "auc", "AUC"),
)
"""Clients count alone or together. The server has the updates, so that no cosine is shown for it."""


def leaks(audit: Audit) -> list[str]:
    """Return the worst value of each of `LEAKS` as text; a dash where nothing was measured.

    >>> leaks(Audit("a", {}, {}, (), (), 1.0))
    ['—', '—', '—', '—', '—', '—']
    """
    values = [(worst(audit, each.family, each.adversaries), each.family) for each in LEAKS]
    return ["—" if value is None else number_text(value, family) for value, family in values]


def guessing(audits: Sequence[Audit]) -> list[str]:
    """Return what guessing gives for each of `LEAKS`; a range where the audits differ.

    >>> from dbcl_audit.findings import Finding
    >>> found = [Finding("a", "client", "naive", "image", "psnr", 9.0, chance=chance) for chance in (13.1, 13.7)]
    >>> guessing([Audit("a", {}, {}, (), (each,), 1.0) for each in found])[1]
    '13.1 dB to 13.7 dB'
    """
    found = []
    for leak in LEAKS:
        every = [each for audit in audits for each in audit.findings if each.seat in leak.adversaries]
        values = [chance_of(each) for each in every if kind(each.measure) == leak.family]
        ends = [number_text(end, leak.family) for end in (min(values), max(values))] if values else ["—"]
        found.append(" to ".join(dict.fromkeys(ends)))
    return found


def epsilon(audit: Audit) -> str:
    """Return the stated epsilon of a run and, in brackets, the measured one; a dash without a guarantee.

    A run whose noise follows from `--seed` promises nothing.

    >>> epsilon(Audit("a", {"epsilon": 8.0}, {}, (), (), 1.0)), epsilon(Audit("a", {}, {}, (), (), 1.0))
    ('8', '—')
    >>> epsilon(Audit("a", {"epsilon": 8.0, "seed": 0}, {}, (), (), 1.0))
    'none (seed)'
    """
    if not promised(audit):
        return "—"
    if audit.settings.get("seed") is not None:
        return "none (seed)"
    measured = worst(audit, "epsilon")
    return f"{audit.settings['epsilon']:g}" + ("" if measured is None else f" ({measured:.2g})")


def comparison(audits: Sequence[Audit]) -> str:
    """Return a page that sets runs side by side: accuracy and cost against the worst leaks.

    >>> "paper" in comparison([Audit("paper", {}, {"accuracy": 0.9}, (), (), 1.0)])
    True
    """
    heads = (
        "number",
        "run",
        "accuracy (higher is better)",
        "rounds (fewer is cheaper)",
        "bytes (fewer is cheaper)",
        "epsilon of the guarantee, stated (measured); lower is stronger",
        *(f"{each.who}: {each.name} (higher is worse)" for each in LEAKS),
    )
    rows = [["", "guessing", "", "", "", "", *guessing(audits)]]
    for number, audit in enumerate(audits, 1):
        cost = [accuracy_text(audit), plain_text(audit.run.get("rounds", "—")), size_text(audit.run.get("bytes"))]
        rows.append([str(number), audit.name, *cost, epsilon(audit), *leaks(audit)])
    intro = (
        f"<p class='warn'>{escape(NO_PROOF)} A dash: not measured.</p>"
        "<p>The worst that any attack reached, from clients (one alone, or several that collude), from the server, and "
        "from anyone who has the finished model. The first row is what guessing gives without any attack: a run that "
        "is no higher leaked nothing to these attacks. Sketch and veil are against clients. The server holds every "
        "client's update: against it only noise on the updates or secure aggregation help.</p>"
    )
    body = f"<section><h2>Side by side</h2>{intro}{table('Audits side by side', heads, rows)}</section>"
    shown = ""
    for who in dict.fromkeys(each.who for each in LEAKS):
        picture = trade_off(audits, who, next(each.adversaries for each in LEAKS if each.who == who))
        if picture:
            shown += f"<figure class='plot'><figcaption>to {escape(who)}</figcaption>{picture}</figure>"
    if shown:
        note = "<p>Right and low is better: more accuracy, less leak. Numbers as in the table; dotted: guessing.</p>"
        body += f"<section><h2>Leak against accuracy</h2>{note}<div class='plots'>{shown}</div></section>"
    words = f"<section><h2>Words</h2>{details('Glossary', definitions(GLOSSARY))}</section>"
    return document("Leakage audits compared", body + words)
