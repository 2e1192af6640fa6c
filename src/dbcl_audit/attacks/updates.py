"""Estimates of the other clients' updates by every estimator. Reads: client-N, simulated or of the
run itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from dbcl.transcripts import Transcript, Truth
from dbcl_audit.attacks.victim import Changes
from dbcl_audit.context import AuditContext, OnProgress
from dbcl_audit.effort import MIN_LAG
from dbcl_audit.estimators.observations import TensorObservations, tensor_observations
from dbcl_audit.estimators.paper_estimators import option_1, option_2
from dbcl_audit.estimators.rewind import rewind
from dbcl_audit.estimators.smoother import fitted_scales, known_scales, shaped_smoother, smoother
from dbcl_audit.findings import Curve, Finding, Measure
from dbcl_audit.scoring import Scores, score

MIN_ENTRIES_FOR_COSINE = 8
"""Minimum number of entries of a tensor that is scored by cosine. In few dimensions, random cosines
are large.
"""

ESTIMATORS: dict[str, tuple[str, Callable[[TensorObservations, float], list[Tensor]]]] = {
    "option I": ("naive", lambda view, veil: option_1(view)),
    "option II": ("naive", lambda view, veil: option_2(view)),
    "rewind": ("adaptive", lambda view, veil: rewind(view)),
    "smoother": ("adaptive", lambda view, veil: smoother(view, known_scales(view, veil))),
    "smoother, sizes fitted": (
        "adaptive",
        lambda view, veil: smoother(view, fitted_scales(view, known_scales(view, max(veil, 1e-3)))),
    ),
    "shaped smoother": ("adaptive", lambda view, veil: shaped_smoother(view, known_scales(view, veil))),
}
"""For each estimator name, the type of attacker and the estimator, a function of the observations
and the relative veil size.
"""


def estimates(
    transcript: Transcript,
    names: Sequence[str],
    tell: OnProgress = lambda text: None,
    *,
    allies: Sequence[Transcript] = (),
) -> dict[str, Changes]:
    """Run estimators on every tensor that a client observed, alone or together with `allies`.

    >>> from dbcl_audit.examples import example_batches
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> found = estimates(played.attacker, ["option I"])
    >>> len(found["option I"]["1.bias"])  # from each of three rounds to the next
    2
    """
    seen = tensor_observations(transcript, allies=allies)
    found: dict[str, Changes] = {}
    for name in names:
        _, run = ESTIMATORS[name]
        for tensor, view in seen.items():
            tell(f"{name}: {tensor}")
            found.setdefault(name, {})[tensor] = run(view, transcript.setting.veil)
    return found


def update_findings(
    transcript: Transcript,
    truth: Truth,
    found: Mapping[str, Changes],
    tell: OnProgress,
    *,
    min_lag: int = MIN_LAG,
    allies: Sequence[Transcript] = (),
) -> list[Finding]:
    """Score estimates of the other clients' updates: the median cosine over the rounds, for the
    worst tensor.

    Sketched and unprotected tensors have separate findings, because reading unprotected tensors
    needs no attack.

    >>> from dbcl_audit.examples import example_batches
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> found = estimates(played.attacker, ["option I"])
    >>> findings = update_findings(played.attacker, played.truth, found, tell=str)
    >>> [(finding.attack, finding.measure) for finding in findings]
    [('option I', 'cosine'), ('option I', 'relative error'), ('unprotected tensors', 'cosine')]
    """
    seen, adversary = tensor_observations(transcript, allies=allies), "colluders" if allies else "client"
    min_lag = min(min_lag, len(transcript) // 2)
    findings = []
    for name, changes in found.items():
        attacker = ESTIMATORS[name][0]
        scores: dict[str, Scores] = {}
        for tensor, guesses in changes.items():
            tell(f"scoring {name}: {tensor}")
            scores[tensor] = score(truth, seen[tensor], guesses)
        sketched = [tensor for tensor in scores if seen[tensor].sketched] or _telling(seen, scores) or list(scores)
        worst = max(sketched, key=lambda tensor: abs(scores[tensor].median_cosine(min_lag)))
        values = [c for c, lag in zip(scores[worst].cosines, scores[worst].lags, strict=True) if lag >= min_lag]
        low, high = (float(np.quantile(values, q)) for q in (0.025, 0.975))
        note = f"{worst}, median over rounds with {min_lag} or more after them; interval: 95 % of those rounds"
        budget = {"rounds seen": len(transcript), "tensors": ", ".join(sketched)}
        curves = tuple(Curve(t, tuple(map(float, s.lags)), s.cosines) for t, s in scores.items() if t in sketched)
        findings.append(
            Finding(
                name, adversary, attacker, "update", Measure.COSINE, scores[worst].median_cosine(min_lag),
                low, high, 0.0, budget, note=note, curves=curves,
                axes=("rounds seen after it", "cosine with the update"),
            )
        )  # fmt: skip
        error = scores[worst].median_error(min_lag)
        findings.append(
            Finding(
                name, adversary, attacker, "update", Measure.ERROR, error, chance=1.0, budget=budget,
                note=f"{worst}; 1 is what saying 'no change' gives",
            )
        )  # fmt: skip
    unsketched = _telling(seen, [tensor for tensor, view in seen.items() if not view.sketched])
    if unsketched:
        best = max(abs(score(truth, seen[t], found[next(iter(found))][t]).median_cosine()) for t in unsketched)
        kind = "unprotected tensors" if transcript.setting.veil == 0 else "unsketched, veiled tensors"
        note = f"{', '.join(unsketched)}: the difference of two broadcasts, no attack at all"
        findings.append(Finding(kind, adversary, "naive", "update", Measure.COSINE, best, chance=0.0, note=note))
    return findings


def _telling(seen: Mapping[str, TensorObservations], tensors: Iterable[str]) -> list[str]:
    """Keep tensors with enough entries for a meaningful cosine."""
    return [tensor for tensor in tensors if seen[tensor].seen[0].numel() >= MIN_ENTRIES_FOR_COSINE]


def scored_updates(
    transcript: Transcript,
    truth: Truth,
    found: dict[str, Changes],
    context: AuditContext,
    allies: Sequence[Transcript] = (),
) -> list[Finding]:
    """Return `update_findings` with the number of scored rounds added to each finding's budget."""
    min_lag = min(context.effort.min_lag, len(transcript) // 2)
    every = len(transcript) - 1  # from each observed round to the next
    scored = sum(lag >= min_lag for lag in range(1, every + 1))
    each = update_findings(transcript, truth, found, context.tell, min_lag=context.effort.min_lag, allies=allies)
    return [
        replace(finding, budget={**finding.budget, "scored rounds": scored if finding.attack in found else every})
        for finding in each
    ]


def audit_recording(folder: Path, context: AuditContext) -> list[Finding]:
    """Estimate the other clients' updates from a recorded transcript of a client of the run
    itself.
    """
    transcript = Transcript(folder)
    found = estimates(transcript, context.effort.estimators, context.tell)
    each = scored_updates(transcript, Truth(folder.parent), found, context)
    return [replace(finding, attack=f"{finding.attack} ({transcript.party} of the run)") for finding in each]


def recording_steps(context: AuditContext) -> int:
    """Expected progress steps of `audit_recording`."""
    return 2 * len(context.effort.estimators) * context.tensors


def others_update_lifted(changes: Changes, index: int, cohort: int) -> dict[str, Tensor]:
    """Return an estimate of the other clients' average update in the space of W, as matrices.
    `index` counts the observed rounds.

    >>> import torch
    >>> others_update_lifted({"w": [torch.ones(1, 2)]}, 0, cohort=2)
    {'w': tensor([[2., 2.]])}
    """
    return {name: guesses[index] * (cohort / max(1, cohort - 1)) for name, guesses in changes.items()}
