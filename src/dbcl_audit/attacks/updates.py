"""The others' updates, by every estimator. Reads: client-N, in a rehearsal or in the run itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from dbcl.transcripts import Transcript, Truth
from dbcl_audit.attacks import OnProgress
from dbcl_audit.attacks.victim import Changes
from dbcl_audit.estimators.options import option_1, option_2
from dbcl_audit.estimators.rewind import rewind
from dbcl_audit.estimators.smoother import fitted_scales, known_scales, shaped_smoother, smoother
from dbcl_audit.estimators.view import View, views
from dbcl_audit.findings import Curve, Finding
from dbcl_audit.scoring import Scores, score

MIN_LAG = 40
"""Only rounds with so many seen rounds after them are scored: going backward, the first guess has faded by then."""
FEW = 8
"""A tensor of fewer numbers than this is not scored by its cosine."""

ESTIMATORS: dict[str, tuple[str, Callable[[View, float], list[Tensor]]]] = {
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
"""By name: which kind of attacker uses it, and the estimator itself, a function of a view and the veil's size."""


def estimates(
    transcript: Transcript,
    names: Sequence[str],
    tell: OnProgress = lambda text: None,
    *,
    allies: Sequence[Transcript] = (),
) -> dict[str, Changes]:
    """Run estimators on every tensor that a client saw, alone or together with `allies`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from dbcl_audit.rehearsal import draw_batches, rehearse
    >>> from dbcl.simulation import preset, task_of
    >>> script = draw_batches(np.arange(100), (3, 2, 1), seed=0)
    >>> config = preset("paper", model="dlg-lenet")
    >>> played = rehearse(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> found = estimates(played.attacker, ["option I"])
    >>> len(found["option I"]["1.bias"])  # from each of three rounds to the next
    2
    """
    seen = views(transcript, allies=allies)
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
    """How well the others' updates were estimated: the median cosine over the rounds, of the worst tensor.

    What was sent sketched and what was sent in clear are told apart: what is in clear needs no attack.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from dbcl_audit.rehearsal import draw_batches, rehearse
    >>> from dbcl.simulation import preset, task_of
    >>> script = draw_batches(np.arange(100), (3, 2, 1), seed=0)
    >>> config = preset("paper", model="dlg-lenet")
    >>> played = rehearse(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> found = estimates(played.attacker, ["option I"])
    >>> findings = update_findings(played.attacker, played.truth, found, tell=str)
    >>> [(finding.attack, finding.measure) for finding in findings]
    [('option I', 'cosine'), ('option I', 'relative error'), ('tensors in clear', 'cosine')]
    """
    seen, seat = views(transcript, allies=allies), "colluders" if allies else "client"
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
                name, seat, attacker, "update", "cosine", scores[worst].median_cosine(min_lag), low, high, 0.0,
                budget, note=note, curves=curves, axes=("rounds seen after it", "cosine with the update"),
            )
        )  # fmt: skip
        error = scores[worst].median_error(min_lag)
        findings.append(
            Finding(
                name, seat, attacker, "update", "relative error", error, chance=1.0, budget=budget,
                note=f"{worst}; 1 is what saying 'no change' gives",
            )
        )  # fmt: skip
    clear = _telling(seen, [tensor for tensor, view in seen.items() if not view.sketched])
    if clear:
        best = max(abs(score(truth, seen[t], found[next(iter(found))][t]).median_cosine()) for t in clear)
        kind = "in clear" if transcript.setting.veil == 0 else "unsketched, veiled"
        note = f"{', '.join(clear)}: the difference of two broadcasts, no attack at all"
        findings.append(Finding(f"tensors {kind}", seat, "naive", "update", "cosine", best, chance=0.0, note=note))
    return findings


def _telling(seen: Mapping[str, View], tensors: Iterable[str]) -> list[str]:
    """Those tensors whose cosines say something: of two numbers any two directions are close, of one they are equal."""
    return [tensor for tensor in tensors if seen[tensor].seen[0].numel() >= FEW]


def others_update_lifted(changes: Changes, index: int, cohort: int) -> dict[str, Tensor]:
    """An estimate of the others' average update in W's space, as matrices; `index` counts the rounds that were seen.

    >>> import torch
    >>> others_update_lifted({"w": [torch.ones(1, 2)]}, 0, cohort=2)
    {'w': tensor([[2., 2.]])}
    """
    return {name: guesses[index] * (cohort / max(1, cohort - 1)) for name, guesses in changes.items()}
