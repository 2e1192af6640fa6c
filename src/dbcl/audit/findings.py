"""What an audit found: one `Finding` for each attack and measure, and an `Audit` that holds them all."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SEATS = ("client", "server", "anyone")
ATTACKERS = ("naive", "adaptive")


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    >>> Curve("rewind", (1.0, 2.0), (0.1, 0.9)).label
    'rewind'
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


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
    target: str  # update, image, label, property or membership
    measure: str  # cosine, error, psnr, ssim, share above 20 dB, accuracy, auc, tpr at 1 % fpr ...
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


@dataclass(frozen=True)
class Audit:
    """All findings of one audit, with the settings of the run that was attacked.

    `seats` says who sees what: party, what it receives, what it does not. `run` holds accuracy, rounds and bytes.

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
                    "curves": tuple(Curve(c["label"], tuple(c["x"]), tuple(c["y"])) for c in entry["curves"]),
                }
            )
            for entry in read["findings"]
        )
        return Audit(**{**read, "findings": findings, "seats": tuple(tuple(row) for row in read["seats"])})

    def worst(self, measure: str, seat: str | None = None) -> float | None:
        """The highest value that any attack reached by a measure, from one seat or any; None where none was taken."""
        values = [
            finding.value
            for finding in self.findings
            if finding.measure == measure and seat in (None, finding.seat) and finding.value == finding.value
        ]
        return max(values, default=None)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
