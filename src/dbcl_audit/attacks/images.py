"""Gradient inversion of the victim's images, by gradient matching and by solving a dense first
layer.

Reads: server; client-0.

The server knows the victim's update. A client uses an estimate of the update.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dbcl.blinding import lift
from dbcl.data import Dataset
from dbcl.errors import ConfigError
from dbcl.protocol import Broadcast, blinded
from dbcl.sketch import Identity
from dbcl_audit import image_quality
from dbcl_audit.attacks.first_layer import FirstLayer, dense_first_layer, solve_first_layer
from dbcl_audit.attacks.gradients import as_gradient
from dbcl_audit.attacks.labels import label_chance, labels_of_gradient
from dbcl_audit.attacks.matching import Matching, Recovered, recover
from dbcl_audit.attacks.updates import ESTIMATORS, others_update_lifted
from dbcl_audit.attacks.victim import Changes, VictimsRound, victims_rounds
from dbcl_audit.context import OnProgress
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.findings import Finding, Measure
from dbcl_audit.simulated_run import VICTIM, SimulatedRun


class Attack(NamedTuple):
    name: str
    adversary: str
    attacker: str


@dataclass(frozen=True, eq=False)
class _Attempts:
    """Attack results for one image after another. `results` holds the recovered images, or the
    error message of a failed attack.
    """

    dataset: Dataset
    settings: Matching
    inverting: Matching | None
    solver_steps: int
    tell: OnProgress
    images: int
    results: dict[Attack, list[Recovered | str]] = field(default_factory=dict)

    @property
    def box(self) -> tuple[float, float]:
        return image_quality.span(self.dataset)

    def match(
        self,
        attack: Attack,
        model: nn.Module,
        gradient: Mapping[str, Tensor],
        number: int,
        settings: Matching | None = None,
        count: int = 1,
    ) -> None:
        """Recover `count` images by matching a gradient with the gradients of a model."""
        self.tell(f"images, {attack.adversary}, {attack.name}: {number + 1} of {self.images}")
        how = replace(settings or self.settings, box=self.box)
        try:
            result: Recovered | str = recover(model, gradient, self.dataset.shape, None, count, how, seed=number)
        except (ConfigError, ValueError, RuntimeError) as error:
            result = str(error).split("\n")[0]
        self.results.setdefault(attack, []).append(result)

    def solve(self, attack: Attack, gradient: Mapping[str, Tensor], broadcast: Broadcast) -> None:
        """Recover the image by solving the first layer, if the layer is dense and has a bias."""
        shape = self.dataset.shape
        layer = dense_first_layer(broadcast, shape)
        if layer is None:
            return
        began = perf_counter()
        sketch = broadcast.sketches().get(f"{layer}weight") or Identity(int(np.prod(shape)))
        shown = FirstLayer(gradient[f"{layer}weight"], gradient[f"{layer}bias"], sketch)
        try:
            image = solve_first_layer([shown], shape, box=self.box, steps=self.solver_steps).reshape(1, *shape)
            biases = [part.name for part in broadcast.plan.tensors if part.name.endswith("bias")]
            label = labels_of_gradient(None, gradient[biases[-1]])
            result: Recovered | str = Recovered(image, label, 0.0, (), (), perf_counter() - began)
        except (ConfigError, ValueError) as error:
            result = str(error)
        self.results.setdefault(attack, []).append(result)


def image_findings(
    simulated: SimulatedRun,
    dataset: Dataset,
    found: Mapping[str, Changes],
    rounds: Sequence[int],
    settings: Matching,
    tell: OnProgress,
    *,
    inverting: Matching | None = None,
    solver_steps: int = 300,
) -> list[Finding]:
    """Recover the victim's single images as the server and as a client, with naive and adaptive
    attacks.

    Args:
        simulated: simulated run with known batches.
        dataset: dataset of the run.
        found: the attacking client's estimates of the changes, by estimator name.
        rounds: rounds to attack.
        settings: settings of gradient matching.
        tell: callback for progress messages.
        inverting: settings of a further attack by the server, such as Inverting Gradients.
        solver_steps: iterations for a dense first layer at each weight of the total variation.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl import data
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> settings = Matching(steps=1, restarts=1)
    >>> findings = image_findings(played, data.load("digits"), {}, [0], settings, tell=str)
    >>> sorted({(finding.attack, finding.adversary) for finding in findings})
    [('matching the lifted update', 'server'), ('matching through the sketch', 'server')]
    """
    attempts = _Attempts(dataset, settings, inverting, solver_steps, tell, len(rounds))
    template = simulated.attacker.template().double()
    seen = tensor_observations(simulated.attacker, allies=simulated.allies)
    known = victims_rounds(simulated, seen, found, rounds) if found else []
    for number, round in enumerate(rounds):
        _server_attacks(attempts, number, simulated, round, template)
        if known:
            _client_attacks(attempts, number, simulated, round, template, known[number], found)
    victims = torch.from_numpy(simulated.script[list(rounds), VICTIM, 0])
    together = [simulated.script[round, list(simulated.server_observation(round).clients), 0] for round in rounds]
    findings = []
    for attack, results in attempts.results.items():
        each = zip(results, together, strict=True)
        paired = [_victims_own(result, dataset, torch.from_numpy(rows)) for result, rows in each]
        findings += recovered_image_findings(attack, paired, dataset, victims)
    # A sum shows its labels but not whose they are, so that the label paired with the victim's has no meaning.
    summed = simulated.bound is not None
    return [
        finding for finding in findings if not (summed and (finding.adversary, finding.target) == ("server", "label"))
    ]


def _victims_own(result: Recovered | str, dataset: Dataset, truth: Tensor) -> Recovered | str:
    """Select the victim's image from jointly recovered images: pair all with the true images and
    return the first.
    """
    if isinstance(result, str) or len(result.images) == 1:
        return result
    paired = image_quality.pair(result.images, dataset.x_train[truth].double(), image_quality.span(dataset))
    place = next(number for number, image in enumerate(result.images) if torch.equal(image, paired[0]))
    return replace(result, images=paired[:1], labels=result.labels[place : place + 1])


def _server_attacks(attempts: _Attempts, number: int, simulated: SimulatedRun, round: int, template: nn.Module) -> None:
    """Attack as the server, which knows W and either the victim's update or the mean of several
    updates.
    """
    (known, broadcast, sent, clients), lr = simulated.server_observation(round), simulated.server.setting.local.lr
    client, count = blinded(template, broadcast), len(clients)
    assert known.weights is not None
    gradient = as_gradient(_double(sent), lr)
    lifted = as_gradient(_double(lift(broadcast.plan, sent)), lr)
    attempts.match(
        Attack("matching the lifted update", "server", "naive"),
        _plain_model(template, known.weights),
        lifted,
        number,
        count=count,
    )
    attempts.match(Attack("matching through the sketch", "server", "adaptive"), client, gradient, number, count=count)
    if attempts.inverting is not None:
        attack = Attack("inverting gradients through the sketch", "server", "adaptive")
        attempts.match(attack, client, gradient, number, attempts.inverting, count)
    if count == 1:
        attempts.solve(Attack("solving the first layer", "server", "adaptive"), gradient, broadcast)


def _client_attacks(
    attempts: _Attempts,
    number: int,
    simulated: SimulatedRun,
    round: int,
    template: nn.Module,
    victim: VictimsRound,
    found: Mapping[str, Changes],
) -> None:
    """Attack as a client, which estimates the victim's update and, if the victim is in another
    lane, the victim's model.
    """
    transcript, adversary = simulated.attacker, simulated.adversary
    setting, index = transcript.setting, transcript.rounds.index(round)
    for name, changes in found.items():
        kind = ESTIMATORS[name][0]
        if kind == "naive":  # takes every V lifted for W
            broadcast = transcript[round].broadcast
            update = others_update_lifted(changes, index, setting.cohort)
            parts = {part.name: part for part in broadcast.plan.tensors}
            update = {n: parts[n].layout.weight(c) if parts[n].sketched else c for n, c in update.items()}
            shapes = {part.name: part.shape for part in broadcast.plan.tensors}
            model = _plain_model(template, lift(broadcast.plan, broadcast.tensors))
        else:
            broadcast = victim.broadcast
            update = victim.others_update(changes, index, setting.cohort)
            shapes = {part.name: part.sent_shape for part in broadcast.plan.tensors}
            model = blinded(template, broadcast)
        shaped = {tensor: change.double().reshape(shapes[tensor]) for tensor, change in update.items()}
        gradient = as_gradient(shaped, setting.local.lr)
        if kind == "adaptive" and (name != "rewind" or setting.veil == 0):
            attempts.solve(Attack(f"solving the first layer on {name}", adversary, "adaptive"), gradient, broadcast)
        attempts.match(Attack(f"matching on {name}", adversary, kind), model, gradient, number)


def recovered_image_findings(
    attack: Attack, results: Sequence[Recovered | str], dataset: Dataset, victims: Tensor
) -> list[Finding]:
    truth, labels, box = dataset.x_train[victims].double(), dataset.y_train[victims], image_quality.span(dataset)
    failures = tuple(r for r in results if isinstance(r, str)) + tuple(
        failure for r in results if isinstance(r, Recovered) for failure in r.failures
    )
    blank = torch.full_like(truth[:1], sum(box) / 2)
    got = torch.cat([r.images if isinstance(r, Recovered) else blank for r in results])
    values = image_quality.psnr(got, truth, box, ordered=True)
    mean = truth.mean(dim=0, keepdim=True).expand_as(truth)
    chance = float(np.median(image_quality.psnr(mean, truth, box, ordered=True)))
    seconds = sum(r.seconds for r in results if isinstance(r, Recovered))
    budget = {"images": len(results), "seconds": round(seconds, 1)}
    grid = image_quality.grid_png([("truth", truth), ("rebuilt", got)], box)
    right = [isinstance(r, Recovered) and int(r.labels[0]) == int(y) for r, y in zip(results, labels, strict=True)]
    named: dict[str, Any] = {
        "attack": attack.name, "adversary": attack.adversary, "attacker": attack.attacker,
        "budget": budget, "failures": failures,
    }  # fmt: skip
    low, high = float(values.min()), float(values.max())
    similar = float(np.median(image_quality.ssim(got, truth, box, ordered=True)))
    return [
        Finding(**named, target="image", measure=Measure.PSNR, value=float(np.median(values)), low=low, high=high,
                chance=chance, note="median; interval: worst and best image. Guessing: the mean of these images",
                images=(("the true images, and below them what the attacker rebuilt", grid),)),
        Finding(**named, target="image", measure=Measure.SSIM, value=similar, note="median"),
        Finding(**named, target="image", measure=Measure.SHARE_ABOVE_20_DB,
                value=image_quality.share_above(values), chance=0.0),
        Finding(**named, target="label", measure=Measure.ACCURACY, value=float(np.mean(right)),
                chance=label_chance(dataset.y_train)),
    ]  # fmt: skip


def _plain_model(template: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return an unsketched model with the given weights, in double precision."""
    model = copy.deepcopy(template).double()
    with torch.no_grad():
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in weights.items():
            own[name].copy_(tensor.reshape(own[name].shape))
    return model


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}
