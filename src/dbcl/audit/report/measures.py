"""The measures of findings: their families, what guessing gives, and their values as text."""

import math
import re
from collections.abc import Mapping
from typing import Any

from dbcl.audit.findings import Audit, Finding

KINDS = ("share", "tpr", "auc", "accuracy", "cosine", "psnr", "ssim", "error")
CHANCE = {"share": 0.0, "auc": 0.5, "accuracy": 0.0, "cosine": 0.0, "psnr": 13.0, "ssim": 0.0, "error": 1.0}
"""What guessing gives, where a finding does not say."""


def kind(measure: str) -> str:
    """The family of a measure, which decides how it is read; empty where it is unknown.

    >>> kind("tpr at 1 % fpr"), kind("share above 20 dB"), kind("colour")
    ('tpr', 'share', '')
    """
    return next((name for name in KINDS if name in measure.lower()), "")


def chance_of(finding: Finding) -> float:
    """What guessing gives: as the attack measured it, else the default of the measure's family, else NaN.

    >>> chance_of(Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.03))
    0.01
    """
    if finding.chance is not None:
        return finding.chance
    family = kind(finding.measure)
    if family == "tpr":
        rate = re.search(r"([\d.]*\d)\s*%", finding.measure)
        return float(rate[1]) / 100 if rate else 0.01
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


def leak_text(audit: Audit, seat: str, measure: str) -> str:
    """The worst value of a measure from a seat; a dash where there is none.

    >>> leak_text(Audit("a", {}, {}, (), (), 1.0), "client", "cosine")
    '—'
    """
    worst = audit.worst(measure, seat)
    return "—" if worst is None else number_text(worst, measure)
