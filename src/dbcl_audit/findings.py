"""What an audit found: one `Finding` for each attack and measure, and an `Audit` that holds them all."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SEATS = ("client", "colluders", "server", "anyone")
"""A client alone, clients of all lanes that pool what they saw, the server, and anyone with the finished model."""
ATTACKERS = ("naive", "adaptive")
CASES = ("canaries", "pictures", "tested rounds", "scored rounds", "members", "rounds")
"""The entries of a finding's budget that say how many cases its value rests on; the first that is there counts."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot; what was not measured but follows from a formula is dashed.

    >>> Curve("rewind", (1.0, 2.0), (0.1, 0.9)).label
    'rewind'
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Finding:
    """One attack, one measure: what the attacker got, and what guessing would have given.

    `naive` attackers are those of the published papers, `adaptive` ones know the defence. `value` may be NaN where the
    attack could not run; `failures` then says why. `images` are pairs of a caption and a PNG as base64.

    >>> finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99, chance=0.0)
    >>> finding.attack, finding.value
    ('rewind', 0.99)
    """

    attack: str
    seat: str
    attacker: str
    target: str  # update, image, label, property, membership or guarantee
    measure: str  # cosine, error, psnr, ssim, share above 20 dB, accuracy, auc, tpr at 1 % fpr, epsilon ...
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
    rehearsal: str = ""
    """In which rehearsal it was found, where there are several; audits of older versions do not say."""


@dataclass(frozen=True)
class Audit:
    """All findings of one audit, with the settings of the run that was attacked.

    `seats` says who sees what: party, what it receives, what it does not. `run` holds accuracy, rounds and bytes.
    `date`, `version` (of dbcl), `parties` of the rehearsals, `property_name` and `budget` say how the audit was made;
    audits of older versions do not have them. `not_attacked` says what makes no sense to attack in this run, and why.

    >>> audit = Audit("paper", {"veil": 0.0}, {"accuracy": 0.9}, (), (), 1.5)
    >>> Audit.from_json(audit.json()) == audit
    True
    """

    name: str
    settings: Mapping[str, Any]
    run: Mapping[str, Any]
    seats: tuple[tuple[str, str, str], ...]
    findings: tuple[Finding, ...]
    seconds: float
    date: str = ""
    version: str = ""
    parties: int | None = None
    property_name: str = ""
    budget: Mapping[str, Any] = field(default_factory=dict)
    not_attacked: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> str:
        """Write it as JSON; NaN becomes null."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Audit":
        """Read what `json` wrote."""
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
        return Audit(**{**read, "findings": findings, "seats": tuple(tuple(row) for row in read["seats"])})


def cases(finding: Finding) -> tuple[int, str]:
    """How many cases a finding's value rests on, and what they are; 0 where its budget does not say.

    >>> cases(Finding("matching", "server", "naive", "image", "psnr", 9.0, budget={"pictures": 2, "seconds": 1.5}))
    (2, 'pictures')
    """
    named = next((name for name in CASES if isinstance(finding.budget.get(name), int)), "")
    return (finding.budget[named], named) if named else (0, "")


def with_interval(finding: Finding) -> Finding:
    """The same finding with a 95 % interval from its number of cases, where the attack gave none and we know a formula.

    Shares of cases get Wilson's interval, an AUC of members against as many others Hanley and McNeil's standard error.

    >>> found = with_interval(Finding("a", "client", "naive", "label", "accuracy", 0.5, budget={"pictures": 2}))
    >>> round(found.low, 3), round(found.high, 3)
    (0.095, 0.905)
    """
    count, value = cases(finding)[0], finding.value
    if finding.low is not None or finding.high is not None or not count or not 0 <= value <= 1:
        return finding
    if finding.measure in ("accuracy", "share above 20 dB") or finding.measure.startswith("tpr"):
        low, high = _wilson(value, count)
    elif "auc" in finding.measure:
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
    """Hanley and McNeil 1982, with as many cases of the one kind as of the other."""
    one, two = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    return math.sqrt((auc * (1 - auc) + (count - 1) * (one + two - 2 * auc**2)) / count**2)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
