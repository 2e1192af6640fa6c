"""The attacks of an audit, from transcripts to findings: updates, pictures, properties, membership."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbcl.audit import picture_quality as pictures
from dbcl.audit.attacks import membership
from dbcl.audit.attacks.matching import (
    FirstLayer,
    Matching,
    Recovered,
    as_gradient,
    clear_label,
    first_layer,
    recover,
)
from dbcl.audit.estimators import smoother as estimate
from dbcl.audit.estimators.smoother import View, believed
from dbcl.audit.findings import Curve, Finding
from dbcl.audit.rehearsal import VICTIM, Rehearsal, guess
from dbcl.audit.scoring import Scores, others, score
from dbcl.audit.theory import veil_cosine
from dbcl.blind import lift
from dbcl.data import Dataset
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.protocol import Broadcast, blinded
from dbcl.sketch import Identity
from dbcl.transcripts import Transcript, Truth

OLD = 40
"""Rounds with so many after them are old: an attacker that goes backward has forgotten its first guess by then."""
OnProgress = Callable[[str], None]
Changes = dict[str, list[Tensor]]
"""For each tensor the estimated changes from each seen round to the next, as matrices over W's columns."""

ESTIMATORS: dict[str, tuple[str, Callable[[View, float], list[Tensor]]]] = {
    "option I": ("naive", lambda view, rho: list(estimate.option_1(view))),
    "option II": ("naive", lambda view, rho: list(estimate.option_2(view))),
    "rewind": ("adaptive", lambda view, rho: estimate.rewind(view)),
    "smoother": ("adaptive", lambda view, rho: estimate.smoother(view, believed(view, rho))),
    "smoother, sizes fitted": (
        "adaptive",
        lambda view, rho: estimate.smoother(view, estimate.fitted(view, believed(view, max(rho, 1e-3)))),
    ),
    "shaped smoother": ("adaptive", lambda view, rho: estimate.shaped_smoother(view, believed(view, rho))),
}


def estimates(transcript: Transcript, names: Sequence[str], tell: OnProgress = lambda text: None) -> dict[str, Changes]:
    """Run estimators on every tensor that a client saw."""
    views = estimate.views(transcript)
    found: dict[str, Changes] = {}
    for name in names:
        _, run = ESTIMATORS[name]
        for tensor, view in views.items():
            tell(f"{name}: {tensor}")
            found.setdefault(name, {})[tensor] = run(view, transcript.setting.veil)
    return found


def updates(transcript: Transcript, truth: Truth, found: Mapping[str, Changes], tell: OnProgress) -> list[Finding]:
    """How well the others' updates were estimated: the median cosine over the rounds, worst tensor first.

    What was sent sketched and what was sent in clear are told apart: what is in clear needs no attack.
    """
    views = estimate.views(transcript)
    oldest = min(OLD, len(transcript) // 2)
    findings = []
    for name, changes in found.items():
        attacker = ESTIMATORS[name][0]
        scores: dict[str, Scores] = {}
        for tensor, guesses in changes.items():
            tell(f"scoring {name}: {tensor}")
            scores[tensor] = score(truth, views[tensor], guesses)
        sketched = [t for t in scores if views[t].sketches[0].width < views[t].sketches[0].dim] or list(scores)
        worst = max(sketched, key=lambda tensor: abs(scores[tensor].typical(oldest)))
        values = [c for c, lag in zip(scores[worst].cosines, scores[worst].lags, strict=True) if lag >= oldest]
        low, high = (float(np.quantile(values, q)) for q in (0.025, 0.975))
        note = f"{worst}, median over rounds with {oldest} or more after them; interval: 95 % of those rounds"
        budget = {"rounds seen": len(transcript), "tensors": ", ".join(sketched)}
        curves = tuple(Curve(t, tuple(map(float, s.lags)), s.cosines) for t, s in scores.items() if t in sketched)
        findings.append(
            Finding(
                name, "client", attacker, "update", "cosine", scores[worst].typical(oldest), low, high, 0.0, budget,
                note=note, curves=curves, axes=("rounds seen after it", "cosine with the update"),
            )
        )  # fmt: skip
        error = scores[worst].typical_error(oldest)
        findings.append(
            Finding(
                name, "client", attacker, "update", "relative error", error, chance=1.0, budget=budget,
                note=f"{worst}; 1 is what saying 'no change' gives",
            )
        )  # fmt: skip
    clear = [tensor for tensor, view in views.items() if view.sketches[0].width == view.sketches[0].dim]
    if clear:
        best = max(abs(score(truth, views[t], found[next(iter(found))][t]).typical()) for t in clear)
        kind = "in clear" if transcript.setting.veil == 0 else "unsketched, veiled"
        note = f"{', '.join(clear)}: the difference of two broadcasts, no attack at all"
        findings.append(Finding(f"tensors {kind}", "client", "naive", "update", "cosine", best, chance=0.0, note=note))
    return findings


def predicted(transcript: Transcript, truth: Truth, view: View) -> float:
    """The isotropic formula 1 / (1 + 4 kappa^2)^(1/4), with the true size of the others' updates; for scoring only."""
    noise = believed(view, transcript.setting.veil)
    sizes = [
        float(view.sketches[place].apply(others(truth, view, place)).square().mean())
        for place in range(len(view.rounds) - 1)
    ]
    return float(veil_cosine(noise.veil / float(np.mean(sizes)) ** 0.5))


def compact_changes(views: Mapping[str, View], changes: Changes, place: int, chosen: int) -> dict[str, Tensor]:
    """An estimate of the others' average update in V's space, as a client would have sent it.

    With one other client it is that client's; with more it is the mean of all others.
    """
    scale = chosen / max(1, chosen - 1)
    return {name: views[name].sketches[place].apply(guesses[place]) * scale for name, guesses in changes.items()}


def lifted_changes(changes: Changes, place: int, chosen: int) -> dict[str, Tensor]:
    """The same in W's space, as matrices."""
    return {name: guesses[place] * (chosen / max(1, chosen - 1)) for name, guesses in changes.items()}


def _shaped(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double().reshape(like[name].shape) for name, tensor in tensors.items()}


def images(
    rehearsal: Rehearsal,
    dataset: Dataset,
    found: Mapping[str, Changes],
    rounds: Sequence[int],
    settings: Matching,
    tell: OnProgress,
    *,
    inverting: Matching | None = None,
) -> list[Finding]:
    """Bring back the victim's single pictures, from the server's seat and from the attacker's, naive and adaptive.

    With `inverting` the server also tries these settings, such as those of Inverting Gradients.
    """
    attacker, server = rehearsal.attacker, rehearsal.server
    setting, template = attacker.setting, attacker.setting.template().double()
    views, lr = estimate.views(attacker), setting.local.lr
    victims = [int(rehearsal.script[round, VICTIM, 0]) for round in rounds]
    truth, labels = dataset.x_train[victims].double(), dataset.y_train[victims]
    box = pictures.span(dataset)
    seats: dict[tuple[str, str, str], list[Recovered | str]] = {}

    def attempt(
        key: tuple[str, str, str], model: Any, target: Mapping[str, Tensor], number: int, how: Matching = settings
    ) -> None:
        tell(f"pictures, {key[1]}'s seat, {key[0]}: {number + 1} of {len(rounds)}")
        try:
            result: Recovered | str = recover(model, target, dataset.shape, None, 1, replace(how, box=box), seed=number)
        except (ConfigError, ValueError, RuntimeError) as error:
            result = str(error).split("\n")[0]
        seats.setdefault(key, []).append(result)

    def solve(seat: str, gradient: Mapping[str, Tensor], broadcast: Broadcast, what: str = "") -> None:
        layer = dense_first_layer(broadcast, dataset.shape)
        if layer is None:
            return
        began = perf_counter()
        sketch = broadcast.sketches().get(f"{layer}weight") or Identity(int(np.prod(dataset.shape)))
        shown = FirstLayer(gradient[f"{layer}weight"], gradient[f"{layer}bias"], sketch)
        try:
            image = first_layer([shown], dataset.shape, box=box).reshape(1, *dataset.shape)
            biases = [part.name for part in broadcast.plan.tensors if part.name.endswith("bias")]
            label = clear_label(None, gradient[biases[-1]])
            result: Recovered | str = Recovered(image, label, 0.0, (), (), perf_counter() - began)
        except (ConfigError, ValueError) as error:
            result = str(error)
        seats.setdefault((f"solving the first layer{what}", seat, "adaptive"), []).append(result)

    for number, round in enumerate(rounds):
        seen, own = server[round], attacker[round]
        client = blinded(template, own.broadcast)
        sent = seen.updates[str(VICTIM)].tensors
        lifted = lift(seen.broadcast.plan, sent)
        assert seen.weights is not None
        plain = guess(template, dict(seen.weights))
        attempt(("matching the lifted update", "server", "naive"), plain, as_gradient(_double(lifted), lr), number)
        attempt(("matching through the sketch", "server", "adaptive"), client, as_gradient(_double(sent), lr), number)
        if inverting is not None:
            key = ("inverting gradients through the sketch", "server", "adaptive")
            attempt(key, client, as_gradient(_double(sent), lr), number, inverting)
        solve("server", as_gradient(_double(sent), lr), own.broadcast)
        place = views[next(iter(views))].rounds.index(round)
        for name, changes in found.items():
            kind = ESTIMATORS[name][0]
            if kind == "naive":
                shapes = {part.name: torch.empty(part.shape) for part in own.broadcast.plan.tensors}
                target = _shaped(lifted_changes(changes, place, setting.cohort), shapes)
                model = guess(template, _lifted_view(own.broadcast))
            else:
                target = _shaped(compact_changes(views, changes, place, setting.cohort), own.broadcast.tensors)
                model = client
                if name != "rewind" or setting.veil == 0:
                    solve("client", as_gradient(target, lr), own.broadcast, f" on {name}")
            attempt((f"matching on {name}", "client", kind), model, as_gradient(target, lr), number)
    return [
        finding for key, results in seats.items() for finding in _picture_findings(key, results, truth, labels, box)
    ]


def dense_first_layer(broadcast: Broadcast, shape: Sequence[int]) -> str | None:
    """The prefix of a first layer that is dense, has a bias and takes the whole picture; None where there is none."""
    first = broadcast.plan.tensors[0]
    prefix = first.name.removesuffix("weight")
    biased = any(part.name == f"{prefix}bias" for part in broadcast.plan.tensors)
    whole = len(first.shape) == 2 and first.shape[1] == int(np.prod(shape))
    return prefix if first.name.endswith("weight") and biased and whole else None


def _picture_findings(
    key: tuple[str, str, str], results: list[Recovered | str], truth: Tensor, labels: Tensor, box: tuple[float, float]
) -> list[Finding]:
    attack, seat, kind = key
    failures = tuple(r for r in results if isinstance(r, str)) + tuple(
        failure for r in results if isinstance(r, Recovered) for failure in r.failures
    )
    blank = torch.full_like(truth[:1], sum(box) / 2)
    got = torch.cat([r.images if isinstance(r, Recovered) else blank for r in results])
    values = pictures.psnr(got, truth, box, ordered=True)
    mean = truth.mean(dim=0, keepdim=True).expand_as(truth)
    chance = float(np.median(pictures.psnr(mean, truth, box, ordered=True)))
    seconds = sum(r.seconds for r in results if isinstance(r, Recovered))
    budget = {"pictures": len(results), "seconds": round(seconds, 1)}
    grid = pictures.grid_png([("truth", truth), ("rebuilt", got)], box)
    right = [isinstance(r, Recovered) and int(r.labels[0]) == int(y) for r, y in zip(results, labels, strict=True)]
    named: dict[str, Any] = {"attack": attack, "seat": seat, "attacker": kind, "budget": budget, "failures": failures}
    low, high = float(values.min()), float(values.max())
    similar = float(np.median(pictures.ssim(got, truth, box, ordered=True)))
    return [
        Finding(**named, target="image", measure="psnr", value=float(np.median(values)), low=low, high=high,
                chance=chance, note="median; interval: worst and best picture. Guessing: the mean of these pictures",
                images=(("the true pictures, and below them what the attacker rebuilt", grid),)),
        Finding(**named, target="image", measure="ssim", value=similar, note="median"),
        Finding(**named, target="image", measure="share above 20 dB", value=pictures.share_above(values), chance=0.0),
        Finding(**named, target="label", measure="accuracy", value=float(np.mean(right)), chance=0.1),
    ]  # fmt: skip


def clear_labels(rehearsal: Rehearsal, dataset: Dataset, rounds: Sequence[int]) -> Finding:
    """The victim's labels from what two broadcasts show of the output layer, with no attack on the rest at all."""
    transcript = rehearsal.attacker
    views = estimate.views(transcript)
    names = list(views)
    layer = [part.name for part in transcript[rounds[0]].broadcast.plan.tensors if part.name.endswith("bias")][-1]
    bias = list(estimate.option_2(views[layer]))
    assert layer in names
    right = []
    for round in rounds:
        victim = int(rehearsal.script[round, VICTIM, 0])
        label = clear_label(None, -bias[round].flatten())
        right.append(int(label[0]) == int(dataset.y_train[victim]))
    note = f"from {layer} alone, one example a round"
    return Finding(
        "label from the output layer's bias", "client", "naive", "label", "accuracy", float(np.mean(right)),
        chance=1 / max(2, dataset.outputs), budget={"rounds": len(rounds)}, note=note,
    )  # fmt: skip


def members(
    model: Any, view: Any, dataset: Dataset, make: Callable[[int], Any], *, shadows: int, seed: int, tell: OnProgress
) -> list[Finding]:
    """Was an example in the training data: by the final model's loss, by LiRA, and by a client's noisy view of it."""
    count = min(1000, len(dataset.y_test), len(dataset.y_train))
    inside = torch.randperm(len(dataset.y_train), generator=torch.Generator().manual_seed(seed))[:count]
    x = torch.cat([dataset.x_train[inside], dataset.x_test[:count]])
    y = torch.cat([dataset.y_train[inside], dataset.y_test[:count]])
    is_member = np.arange(2 * count) < count
    tell("membership: shadow models")
    trained = membership.shadows(make, x, y, shadows, LocalTraining(lr=0.05, epochs=10, batch_size=20), seed)
    findings = []
    for seat, what, judged in (("anyone", "final model", model), ("client", "a client's view of it", view)):
        target = membership.confidences(judged, x, y)
        attacks = {
            "loss threshold": ("naive", membership.loss_threshold(target)),
            "LiRA": ("adaptive", membership.lira(target, trained.inside, trained.outside)),
        }
        for name, (kind, scores) in attacks.items():
            result = membership.judge(scores, is_member)
            named: dict[str, Any] = {
                "attack": f"{name} on the {what}" if seat == "anyone" else f"{name} on {what}",
                "seat": seat, "attacker": kind, "target": "membership",
                "budget": {"members": count, "non-members": count, "shadow models": shadows},
            }  # fmt: skip
            curve = Curve("", *result.roc)
            axes = ("false positive rate", "true positive rate")
            findings += [
                Finding(**named, measure="membership auc", value=result.auc, chance=0.5, curves=(curve,), axes=axes),
                Finding(**named, measure="tpr at 1 % fpr", value=result.tpr_at_1_percent, chance=0.01),
                Finding(**named, measure="tpr at 0.1 % fpr", value=result.tpr_at_01_percent, chance=0.001),
            ]
    return findings


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def _lifted_view(broadcast: Broadcast) -> dict[str, Tensor]:
    """The naive client's guess of W: every V lifted."""
    return _double(lift(broadcast.plan, broadcast.tensors))
