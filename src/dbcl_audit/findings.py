"""Results of an audit: a `Finding` for each attack and measure, and the `Audit` that contains all
findings.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

ADVERSARIES = ("client", "colluders", "server", "anyone")
"""Possible adversaries: a single client, clients of all lanes that pool their observations, the
server, and any party with the final model.
"""
ATTACKERS = ("naive", "adaptive")
CASES = ("canaries", "images", "tested rounds", "scored rounds", "members", "rounds")
"""Keys of a finding's budget that hold the number of cases. The first key present is used."""


class Measure(StrEnum):
    """Measure of a finding.

    Attributes:
        family: name of the measure in limits, such as --fail-above.
        text: name of the measure in reports.
        chance: chance level if the finding has none of its own.

    >>> Measure("psnr").chance, Measure.TPR_AT_1_PERCENT.family
    (13.0, 'tpr')
    """

    SHARE_ABOVE_20_DB = "share above 20 dB", "share", "recognisable (above 20 dB)", 0.0
    TPR_AT_1_PERCENT = "tpr at 1 % fpr", "tpr", "members found at 1 % false alarms", 0.01
    TPR_AT_01_PERCENT = "tpr at 0.1 % fpr", "tpr", "members found at 0.1 % false alarms", 0.001
    AUC = "auc", "auc", "told apart (AUC)", 0.5
    ACCURACY = "accuracy", "accuracy", "named correctly", 0.0
    COSINE = "cosine", "cosine", "closeness to the update (cosine)", 0.0
    PSNR = "psnr", "psnr", "likeness (PSNR)", 13.0
    SSIM = "ssim", "ssim", "likeness to the eye (SSIM)", 0.0
    ERROR = "relative error", "error", "error, relative to the update", 1.0
    EPSILON = "epsilon", "epsilon", "measured epsilon", 0.0

    family: str
    text: str
    chance: float

    __repr__ = str.__repr__

    def __new__(cls, value: str, family: str = "", text: str = "", chance: float = 0.0) -> "Measure":
        member = str.__new__(cls, value)
        member._value_ = value
        member.family, member.text, member.chance = family, text, chance
        return member


@dataclass(frozen=True)
class Curve:
    """One line of a plot; dashed if computed from a formula instead of measured.

    >>> Curve("rewind", (1.0, 2.0), (0.1, 0.9)).label
    'rewind'
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Finding:
    """Result of one attack in one measure, with the chance level.

    Attributes:
        attack: Name of the attack.
        adversary: One of `ADVERSARIES`.
        attacker: "naive" for attacks as published, "adaptive" for attacks that use knowledge of the
            defence.
        target: "update", "image", "label", "property", "membership" or "guarantee".
        measure: A `Measure`, or the name of a measure.
        value: The value; NaN if the attack could not run (see `failures`).
        low: Lower end of an interval.
        high: Upper end of an interval.
        chance: Chance level, if measured.
        budget: Effort and number of cases.
        failures: Error messages of failed attempts.
        note: Remark for readers.
        curves: Curves of a plot.
        axes: Labels of the plot's axes.
        images: Pairs of a caption and a PNG encoded as base64.
        simulated_run: Simulated run of the finding; empty for the run itself.

    >>> finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99, chance=0.0)
    >>> finding.attack, finding.measure is Measure.COSINE
    ('rewind', True)
    """

    attack: str
    adversary: str
    attacker: str
    target: str
    measure: Measure
    value: float
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    budget: Mapping[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    note: str = ""
    curves: tuple[Curve, ...] = ()
    axes: tuple[str, str] = ("", "")
    images: tuple[tuple[str, str], ...] = ()
    simulated_run: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure", Measure(self.measure))


@dataclass(frozen=True)
class Audit:
    """All findings of one audit, with the settings of the audited run.

    Attributes:
        name: Name of the run.
        settings: Settings of the run.
        run: Accuracy, rounds and bytes of the run.
        adversaries: For each adversary its name, the data it receives, and the data it does not
            receive.
        findings: The findings.
        seconds: Duration of the audit.
        date: Date of the audit.
        version: Version of dbcl.
        parties: Clients of the simulated runs.
        property_name: Property that was inferred.
        budget: Effort of the audit.
        not_attacked: Omitted targets, each with the reason.

    >>> audit = Audit("paper", {"veil": 0.0}, {"accuracy": 0.9}, (), (), 1.5)
    >>> Audit.from_json(audit.json()) == audit
    True
    """

    name: str
    settings: Mapping[str, Any]
    run: Mapping[str, Any]
    adversaries: tuple[tuple[str, str, str], ...]
    findings: tuple[Finding, ...]
    seconds: float
    date: str = ""
    version: str = ""
    parties: int | None = None
    property_name: str = ""
    budget: Mapping[str, Any] = field(default_factory=dict)
    not_attacked: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> str:
        """Return the audit as JSON; NaN becomes null."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Audit":
        """Return the audit from the output of `json`.

        Raises:
            ValueError: The text is not JSON, or names an unknown measure.
        """
        read = json.loads(text)
        findings = tuple(
            Finding(
                **{
                    **entry,
                    "value": float("nan") if entry["value"] is None else entry["value"],
                    "failures": tuple(entry["failures"]),
                    "axes": tuple(entry["axes"]),
                    "images": tuple((caption, png) for caption, png in entry["images"]),
                    "curves": tuple(Curve(**{**c, "x": tuple(c["x"]), "y": tuple(c["y"])}) for c in entry["curves"]),
                }
            )
            for entry in read["findings"]
        )
        return Audit(**{**read, "findings": findings, "adversaries": tuple(tuple(row) for row in read["adversaries"])})


def cases(finding: Finding) -> tuple[int, str]:
    """Return the number of cases of a finding's value, and the name of the cases; 0 if the budget
    has none.

    >>> cases(Finding("matching", "server", "naive", "image", "psnr", 9.0, budget={"images": 2, "seconds": 1.5}))
    (2, 'images')
    """
    named = next((name for name in CASES if isinstance(finding.budget.get(name), int)), "")
    return (finding.budget[named], named) if named else (0, "")


def with_interval(finding: Finding) -> Finding:
    """Return the finding with a 95 % interval computed from its number of cases.

    Fractions of cases receive Wilson's interval. An AUC of members against equally many non-members
    receives Hanley and McNeil's standard error. Findings that have an interval, and other measures,
    stay unchanged.

    >>> found = with_interval(Finding("a", "client", "naive", "label", "accuracy", 0.5, budget={"images": 2}))
    >>> round(found.low, 3), round(found.high, 3)
    (0.095, 0.905)
    """
    count, value = cases(finding)[0], finding.value
    if finding.low is not None or finding.high is not None or not count or not 0 <= value <= 1:
        return finding
    if finding.measure.family in ("accuracy", "share", "tpr"):
        low, high = _wilson(value, count)
    elif finding.measure is Measure.AUC:
        error = 1.96 * _auc_error(value, count)
        low, high = max(0.0, value - error), min(1.0, value + error)
    else:
        return finding
    return replace(finding, low=low, high=high)


def _wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return min(share, centre - half), max(share, centre + half)


def _auc_error(auc: float, count: int) -> float:
    """Standard error of an AUC (Hanley and McNeil 1982), for `count` positive and `count` negative
    cases.
    """
    one, two = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    return math.sqrt((auc * (1 - auc) + (count - 1) * (one + two - 2 * auc**2)) / count**2)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
