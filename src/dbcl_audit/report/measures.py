"""The measures of findings: their families, what guessing gives, and their values as text."""

import math
import re
from collections.abc import Mapping
from typing import Any

from dbcl_audit.findings import Audit, Finding, cases

KINDS = ("share", "tpr", "auc", "accuracy", "cosine", "psnr", "ssim", "error", "epsilon")
CHANCE = {
    "share": 0.0,
    "auc": 0.5,
    "accuracy": 0.0,
    "cosine": 0.0,
    "psnr": 13.0,
    "ssim": 0.0,
    "error": 1.0,
    "epsilon": 0.0,
}
"""What guessing gives, where a finding does not say."""


def kind(measure: str) -> str:
    """The family of a measure, which decides how it is read; empty where it is unknown.

    >>> kind("tpr at 1 % fpr"), kind("share above 20 dB"), kind("colour")
    ('tpr', 'share', '')
    """
    return next((name for name in KINDS if name in measure.lower()), "")


MEASURES = {
    "cosine": "closeness to the update (cosine)",
    "epsilon": "measured epsilon",
    "relative error": "error, relative to the update",
    "psnr": "likeness (PSNR)",
    "ssim": "likeness to the eye (SSIM)",
    "share above 20 dB": "recognisable (above 20 dB)",
    "accuracy": "named correctly",
    "auc": "told apart (AUC)",
    "membership auc": "told apart (AUC)",
}


AXES = {"false positive rate": "false alarms (share)", "true positive rate": "found (share)"}
"""Labels of axes in words."""


def measure_text(measure: str) -> str:
    """A measure in words; its own name where there are none.

    >>> measure_text("tpr at 0.1 % fpr"), measure_text("psnr"), measure_text("colour")
    ('members found at 0.1 % false alarms', 'likeness (PSNR)', 'colour')
    """
    if kind(measure) == "tpr":
        return f"members found at {_rate(measure)} false alarms"
    return MEASURES.get(measure, measure)


def _rate(measure: str) -> str:
    rate = re.search(r"([\d.]*\d)\s*%", measure)
    return f"{rate[1]} %" if rate else "1 %"


def cases_text(finding: Finding) -> str:
    """How many cases a finding rests on; empty where it does not say.

    >>> cases_text(Finding("LiRA", "anyone", "adaptive", "membership", "auc", 0.5, budget={"members": 1000}))
    '1,000 members'
    >>> cases_text(Finding("matching", "server", "naive", "image", "psnr", 9.0, budget={"pictures": 1}))
    '1 picture'
    """
    count, what = cases(finding)
    others = finding.budget.get("non-members") if what == "members" else None
    more = f" and {others:,} others" if isinstance(others, int) else ""
    return f"{count:,} {what[:-1] if count == 1 else what}{more}" if count else ""


def chance_of(finding: Finding) -> float:
    """What guessing gives: as the attack measured it, else the default of the measure's family, else NaN.

    >>> chance_of(Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.03))
    0.01
    """
    if finding.chance is not None:
        return finding.chance
    family = kind(finding.measure)
    if family == "tpr":
        return float(_rate(finding.measure).split()[0]) / 100
    return CHANCE.get(family, math.nan)


def number_text(value: float, measure: str) -> str:
    """A value in the unit of its measure.

    >>> number_text(0.25, "accuracy"), number_text(21.0, "psnr"), number_text(0.5, "auc")
    ('25.0 %', '21.0 dB', '0.500')
    """
    family = kind(measure)
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "exact" if family == "psnr" else str(value)
    if family in ("share", "tpr", "accuracy"):
        return f"{100 * value:.1f} %"
    if family == "epsilon":
        return f"{value:.2f}"
    return f"{value:.1f} dB" if family == "psnr" else f"{value:.3g} ×" if family == "error" else f"{value:.3f}"


def range_text(finding: Finding) -> str:
    """A finding's value and, in brackets, its interval.

    >>> range_text(Finding("forest", "client", "naive", "property", "auc", 0.52, low=0.4, high=0.64))
    '0.520 (0.400 to 0.640)'
    """
    value = number_text(finding.value, finding.measure)
    if finding.low is None or finding.high is None:
        return value
    low, high = (number_text(end, finding.measure) for end in (finding.low, finding.high))
    return f"{value} ({low.split(' ')[0]} to {high})"


def plain_text(value: Any) -> str:
    """Any value of the settings or the results, without the brackets of Python.

    >>> plain_text({"rounds": 60, "tensors": ["a", "b"]})
    'rounds: 60, tensors: a, b'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain_text(entry) for entry in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def size_text(value: Any) -> str:
    """A number of bytes; a dash for anything else.

    >>> size_text(2_500_000), size_text(None)
    ('2.5 MB', '—')
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "—"
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value:,.0f} B"


def accuracy_text(audit: Audit) -> str:
    """The accuracy of the run that was attacked; a dash where it is unknown.

    >>> accuracy_text(Audit("a", {}, {"accuracy": 0.9}, (), (), 1.0))
    '90.0 %'
    """
    value = audit.run.get("accuracy")
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and math.isfinite(value) else "—"
