"""Values of findings as text."""

import math
from collections.abc import Mapping
from typing import Any

from dbcl_audit.findings import Audit, Finding, Measure, cases

AXES = {"false positive rate": "false alarms (share)", "true positive rate": "found (share)"}
"""Labels of plot axes in plain words."""
SHARES = ("share", "tpr", "accuracy")
"""Families of measures whose values are fractions, written as percentages."""
UNITS = {"psnr": "{:.1f} dB", "error": "{:.3g} ×", "epsilon": "{:.2f}"}


def cases_text(finding: Finding) -> str:
    """Return the number of cases of a finding as text; empty if the budget has none.

    >>> cases_text(Finding("LiRA", "anyone", "adaptive", "membership", "auc", 0.5, budget={"members": 1000}))
    '1,000 members'
    >>> cases_text(Finding("matching", "server", "naive", "image", "psnr", 9.0, budget={"images": 1}))
    '1 image'
    """
    count, what = cases(finding)
    others = finding.budget.get("non-members") if what == "members" else None
    more = f" and {others:,} others" if isinstance(others, int) else ""
    return f"{count:,} {what[:-1] if count == 1 else what}{more}" if count else ""


def chance_of(finding: Finding) -> float:
    """Return the chance level of a finding: the measured value, or the default of the measure.

    >>> chance_of(Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.03))
    0.01
    """
    return finding.measure.chance if finding.chance is None else finding.chance


def number_text(value: float, measure: Measure) -> str:
    """Return a value as text in the unit of its measure.

    >>> number_text(0.25, Measure.ACCURACY), number_text(21.0, Measure.PSNR), number_text(0.5, Measure.AUC)
    ('25.0 %', '21.0 dB', '0.500')
    """
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "exact" if measure is Measure.PSNR else str(value)
    if measure.family in SHARES:
        return f"{100 * value:.1f} %"
    return UNITS.get(measure.family, "{:.3f}").format(value)


def range_text(finding: Finding) -> str:
    """Return a finding's value with its interval in brackets.

    >>> range_text(Finding("forest", "client", "naive", "property", "auc", 0.52, low=0.4, high=0.64))
    '0.520 (0.400 to 0.640)'
    """
    value = number_text(finding.value, finding.measure)
    if finding.low is None or finding.high is None:
        return value
    low, high = (number_text(end, finding.measure) for end in (finding.low, finding.high))
    return f"{value} ({low.split(' ')[0]} to {high})"


def plain_text(value: Any) -> str:
    """Return a value of the settings or results as text, without Python brackets and quotes.

    >>> plain_text({"rounds": 60, "tensors": ["a", "b"]})
    'rounds: 60, tensors: a, b'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain_text(entry) for entry in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def size_text(value: Any) -> str:
    """Return a number of bytes as text, or a dash for any other value.

    >>> size_text(2_500_000), size_text(None)
    ('2.5 MB', '—')
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "—"
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value:,.0f} B"


def accuracy_text(audit: Audit) -> str:
    """Return the accuracy of the audited run as text, or a dash if the accuracy is unknown.

    >>> accuracy_text(Audit("a", {}, {"accuracy": 0.9}, (), (), 1.0))
    '90.0 %'
    """
    value = audit.run.get("accuracy")
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and math.isfinite(value) else "—"
