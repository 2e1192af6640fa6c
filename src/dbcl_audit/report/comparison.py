"""Comparison of several audits: worst leaks, accuracy and cost, as table rows and as a page."""

from collections.abc import Sequence
from typing import NamedTuple

from dbcl_audit.findings import Audit, Finding, Measure
from dbcl_audit.report.figures import trade_off
from dbcl_audit.report.measures import accuracy_text, chance_of, number_text, plain_text, size_text
from dbcl_audit.report.promises import promised, shared_by
from dbcl_audit.report.rating import severity, word, worst, worst_by_adversary
from dbcl_audit.report.render import render
from dbcl_audit.report.wording import GLOSSARY, NO_PROOF


class Leak(NamedTuple):
    """One column of a comparison: a group of adversaries and the measure whose worst value is
    reported.
    """

    who: str
    measure: Measure
    name: str

    @property
    def adversaries(self) -> tuple[str, ...]:
        return WHO[self.who]


WHO = {"client": ("client", "colluders"), "server": ("server",), "anyone": ("anyone",)}
"""Adversaries of each group of columns. The client group includes colluding clients."""
LEAKS = (
    Leak("client", Measure.COSINE, "cosine"),
    Leak("client", Measure.PSNR, "PSNR"),
    Leak("client", Measure.AUC, "AUC"),
    Leak("server", Measure.PSNR, "PSNR"),
    Leak("server", Measure.AUC, "AUC"),
    Leak("anyone", Measure.AUC, "AUC"),
)
"""Columns with one measure each. There is no cosine for the server, because the server receives the
updates.
"""


def worst_finding(audit: Audit, who: str) -> Finding | None:
    """Return the worst finding of a group of adversaries, in the order of `worst_by_adversary`.

    >>> found = Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.3)
    >>> worst_finding(Audit("a", {}, {}, (), (found,), 1.0), "anyone").attack
    'LiRA'
    """
    worst = worst_by_adversary(audit)
    # Where clients add the noise, colluding ones are together with the server.
    also = ("colluders",) if who == "server" and shared_by(audit) is not None else ()
    found = [each for name in (*WHO[who], *also) if (each := worst.get(name)) is not None]
    return max(found, key=severity, default=None)


def worst_findings(audit: Audit) -> list[str]:
    """Return the worst finding of each group of adversaries as text, or a dash if there is no
    finding.

    >>> found = Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.3)
    >>> worst_findings(Audit("a", {}, {}, (), (found,), 1.0))[2]
    '30.0 % members found at 1 % false alarms: leaks'
    """
    found = [worst_finding(audit, who) for who in WHO]
    return [
        f"{number_text(each.value, each.measure)} {worst_text(each)}: {word(each)}" if each else "—" for each in found
    ]


def worst_text(finding: Finding) -> str:
    """Return the target and the measure of a finding as text.

    >>> worst_text(Finding("labels of one update", "server", "adaptive", "label", "accuracy", 0.9))
    'label accuracy'
    """
    if finding.measure.family == "tpr":
        return finding.measure.text
    return f"{finding.target} {finding.measure}"


def leaks(audit: Audit) -> list[str]:
    """Return the worst value of each of `LEAKS` as text, or a dash if there is no value.

    >>> leaks(Audit("a", {}, {}, (), (), 1.0))
    ['—', '—', '—', '—', '—', '—']
    """
    values = [(worst(audit, each.measure.family, each.adversaries), each.measure) for each in LEAKS]
    return ["—" if value is None else number_text(value, measure) for value, measure in values]


def guessing(audits: Sequence[Audit]) -> list[str]:
    """Return the chance level for each of `LEAKS`, or the range of chance levels if the audits
    differ.

    >>> from dbcl_audit.findings import Finding
    >>> found = [Finding("a", "client", "naive", "image", "psnr", 9.0, chance=chance) for chance in (13.1, 13.7)]
    >>> guessing([Audit("a", {}, {}, (), (each,), 1.0) for each in found])[1]
    '13.1 dB to 13.7 dB'
    """
    found = []
    for leak in LEAKS:
        every = [each for audit in audits for each in audit.findings if each.adversary in leak.adversaries]
        values = [chance_of(each) for each in every if each.measure is leak.measure]
        ends = [number_text(end, leak.measure) for end in (min(values), max(values))] if values else ["—"]
        found.append(" to ".join(dict.fromkeys(ends)))
    return found


def epsilon(audit: Audit) -> str:
    """Return the stated epsilon of a run, with the measured epsilon in brackets, or a dash without
    a guarantee.

    A run whose noise is derived from `--seed` has no guarantee.

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
    """Return a page that compares runs: accuracy, cost and worst leaks.

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
        *(f"{who}: worst finding" for who in WHO),
    )
    rows = [["", "guessing", "", "", "", "", *guessing(audits), *[""] * len(WHO)]]
    for number, audit in enumerate(audits, 1):
        cost = [accuracy_text(audit), plain_text(audit.run.get("rounds", "—")), size_text(audit.run.get("bytes"))]
        rows.append([str(number), audit.name, *cost, epsilon(audit), *leaks(audit), *worst_findings(audit)])
    drawings = [(who, trade_off(audits, who, adversaries)) for who, adversaries in WHO.items()]
    return render(
        "comparison.html",
        title="Leakage audits compared",
        no_proof=NO_PROOF,
        heads=heads,
        rows=rows,
        drawings=[(who, drawn) for who, drawn in drawings if drawn],
        glossary=GLOSSARY,
    )
