"""Estimates of the other clients' updates from all rounds, compared with the drift alone. Reads:
client-N and its allies.

Any party with similar examples can compute the drift. Only the component of an estimate beyond the
drift reveals information about the other clients; every cosine is therefore reported with the
cosine of the drift. Sums over many rounds have larger cosines than single rounds, because fresh
noise averages out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbcl.transcripts import Truth
from dbcl_audit.attacks.trajectory import Trajectory
from dbcl_audit.attacks.updates import MIN_ENTRIES_FOR_COSINE
from dbcl_audit.findings import Curve, Finding, Measure
from dbcl_audit.numerics import cosine
from dbcl_audit.scoring import true_change

SUM_LENGTHS = (1, 5, 20, 60)
"""Numbers of rounds over which updates are summed."""


def trajectory_update_findings(trajectory: Trajectory, truth: Truth, adversary: str, note: str = "") -> list[Finding]:
    """Score the smoother with drift, its component beyond the drift, and sums over rounds, by
    cosines.

    The reported tensor is the one with the largest median cosine beyond the drift.

    >>> from dbcl_audit.examples import example_batches
    >>> import numpy as np
    >>> from dbcl_audit.attacks.trajectory import Knowledge
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("veil", model="dlg-lenet", lr=0.1)
    >>> task = task_of(config)
    >>> played = example_batches("veil", rounds=8, batch=4, model="dlg-lenet", lr=0.1)
    >>> trajectory = Trajectory(played.attacker, Knowledge(task.train.subset(np.arange(100, 200)), examples=50))
    >>> [finding.attack for finding in trajectory_update_findings(trajectory, played.truth, "client")]
    ['smoother with drift', 'smoother beyond the drift', 'smoother with drift, sums of 5 rounds']
    """
    tensors = [name for name, view in trajectory.views.items() if view.seen[0].numel() >= MIN_ENTRIES_FOR_COSINE]
    sketched = [name for name in tensors if trajectory.views[name].sketched]
    scored = {name: _Cosines(trajectory, truth, name) for name in sketched or tensors}
    worst = max(scored.values(), key=lambda each: each.beyond)
    rounds = len(trajectory.rounds)
    named: dict[str, Any] = {
        "adversary": adversary,
        "attacker": "adaptive",
        "target": "update",
        "measure": Measure.COSINE,
    }
    budget = {"rounds seen": rounds, "scored rounds": rounds - 1, "tensors": ", ".join(scored)}
    found = []
    for length in SUM_LENGTHS:
        if length >= rounds:
            continue
        own, drift = worst.sums(length)
        value, expected = float(np.median(own)), float(np.median(drift))
        low, high = (float(np.quantile(own, q)) for q in (0.025, 0.975))
        what = "" if length == 1 else f", sums of {length} rounds"
        said = f"{worst.name}; the drift alone, which is independent of the others, has {expected:.2f}"
        found.append(
            Finding(
                f"smoother with drift{what}", value=value, low=low, high=high, chance=max(expected, 0.0), budget=budget,
                note=f"{said}; {note}" if note else said, **named,
            )
        )  # fmt: skip
        if length == 1:
            curve = Curve(worst.name, tuple(map(float, trajectory.rounds[:-1])), tuple(worst.left))
            low, high = (float(np.quantile(worst.left, q)) for q in (0.025, 0.975))
            said = f"{worst.name}: what is estimated beyond the drift against what was beyond it"
            low, high = (float(np.quantile(worst.left, q)) for q in (0.025, 0.975))
            found.append(
                Finding(
                    "smoother beyond the drift", value=worst.beyond, low=low, high=high, chance=0.0, budget=budget,
                    note=f"{said}; {note}" if note else said, curves=(curve,),
                    axes=("round", "cosine beyond the drift"), **named,
                )
            )  # fmt: skip
    return found


class _Cosines:
    """Cosines of the estimated changes of one tensor, with and without the drift."""

    def __init__(self, trajectory: Trajectory, truth: Truth, name: str) -> None:
        view, count = trajectory.views[name], len(trajectory.rounds) - 1
        self.name = name
        self.found = trajectory.posteriors[name].changes()[:count]
        gaps = view.gaps[:count]
        self.drift = [view.lr * gap * each for gap, each in zip(gaps, trajectory.drift[name][:count], strict=True)]
        self.true = [true_change(truth, view, index).float() for index in range(count)]

    @property
    def left(self) -> list[float]:
        """Cosine of the components beyond the drift, by round."""
        each = zip(self.found, self.true, self.drift, strict=True)
        return [cosine(found - drift, true - drift) for found, true, drift in each]

    @property
    def beyond(self) -> float:
        return float(np.median(self.left))

    def sums(self, length: int) -> tuple[list[float], list[float]]:
        """Return the cosines of sums over `length` rounds with the true sums: for the estimate, and
        for the drift.
        """
        starts = range(0, len(self.true) - length + 1, max(1, length // 4))
        pairs = [[_summed(each, start, length) for each in (self.found, self.drift, self.true)] for start in starts]
        return [cosine(found, true) for found, _, true in pairs], [cosine(drift, true) for _, drift, true in pairs]


def _summed(each: Sequence[Tensor], start: int, length: int) -> Tensor:
    return torch.stack([one.float() for one in each[start : start + length]]).sum(dim=0)
