"""The victim's pictures, by gradient matching and by solving a dense first layer. Reads: server; client-0.

From the server's seat the victim's update is known; from a client's seat an estimate of it takes its place.
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
from dbcl_audit import picture_quality as pictures
from dbcl_audit.attacks import OnProgress
from dbcl_audit.attacks.first_layer import FirstLayer, dense_first_layer, solve_first_layer
from dbcl_audit.attacks.gradients import as_gradient
from dbcl_audit.attacks.labels import label_chance, labels_of_gradient
from dbcl_audit.attacks.matching import Matching, Recovered, recover
from dbcl_audit.attacks.updates import ESTIMATORS, others_update_lifted
from dbcl_audit.attacks.victim import Changes, VictimsRound, victims_rounds
from dbcl_audit.estimators.view import views
from dbcl_audit.findings import Finding
from dbcl_audit.rehearsal import VICTIM, Rehearsal


class Attack(NamedTuple):
    name: str
    seat: str
    attacker: str


@dataclass(frozen=True, eq=False)
class _Attempts:
    """Runs attacks on one picture after another; `results` holds what each recovered, or why it failed."""

    dataset: Dataset
    settings: Matching
    inverting: Matching | None
    solver_steps: int
    tell: OnProgress
    pictures: int
    results: dict[Attack, list[Recovered | str]] = field(default_factory=dict)

    @property
    def box(self) -> tuple[float, float]:
        return pictures.span(self.dataset)

    def match(
        self,
        attack: Attack,
        model: nn.Module,
        gradient: Mapping[str, Tensor],
        number: int,
        settings: Matching | None = None,
        count: int = 1,
    ) -> None:
        """Match a gradient with those of a model, for `count` pictures together."""
        self.tell(f"pictures, {attack.seat}'s seat, {attack.name}: {number + 1} of {self.pictures}")
        how = replace(settings or self.settings, box=self.box)
        try:
            result: Recovered | str = recover(model, gradient, self.dataset.shape, None, count, how, seed=number)
        except (ConfigError, ValueError, RuntimeError) as error:
            result = str(error).split("\n")[0]
        self.results.setdefault(attack, []).append(result)

    def solve(self, attack: Attack, gradient: Mapping[str, Tensor], broadcast: Broadcast) -> None:
        """Solve the first layer, where the network has one that can be solved."""
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
    rehearsal: Rehearsal,
    dataset: Dataset,
    found: Mapping[str, Changes],
    rounds: Sequence[int],
    settings: Matching,
    tell: OnProgress,
    *,
    inverting: Matching | None = None,
    solver_steps: int = 300,
) -> list[Finding]:
    """Recover the victim's single pictures, from the server's seat and from the attacker's, naive and adaptive.

    `found` holds the attacker's estimates. With `inverting` the server also tries these settings, such as those of
    Inverting Gradients. A dense first layer is solved in `solver_steps` for each weight of the total variation.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from dbcl import data
    >>> from dbcl_audit.rehearsal import draw_batches, rehearse
    >>> from dbcl.simulation import preset, task_of
    >>> script = draw_batches(np.arange(100), (3, 2, 1), seed=0)
    >>> config = preset("paper", model="dlg-lenet")
    >>> played = rehearse(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> settings = Matching(steps=1, restarts=1)
    >>> findings = image_findings(played, data.load("digits"), {}, [0], settings, tell=str)
    >>> sorted({(finding.attack, finding.seat) for finding in findings})
    [('matching the lifted update', 'server'), ('matching through the sketch', 'server')]
    """
    attempts = _Attempts(dataset, settings, inverting, solver_steps, tell, len(rounds))
    template = rehearsal.attacker.template().double()
    seen = views(rehearsal.attacker, allies=rehearsal.allies)
    known = victims_rounds(rehearsal, seen, found, rounds) if found else []
    for number, round in enumerate(rounds):
        _server_attacks(attempts, number, rehearsal, round, template)
        if known:
            _client_attacks(attempts, number, rehearsal, round, template, known[number], found)
    victims = torch.from_numpy(rehearsal.script[list(rounds), VICTIM, 0])
    together = [rehearsal.script[round, list(rehearsal.server_saw(round).clients), 0] for round in rounds]
    findings = []
    for attack, results in attempts.results.items():
        each = zip(results, together, strict=True)
        paired = [_victims_own(result, dataset, torch.from_numpy(rows)) for result, rows in each]
        findings += picture_findings(attack, paired, dataset, victims)
    # A sum shows which labels are in it and not whose they are: the one that was paired with the victim's says nothing.
    summed = rehearsal.bound is not None
    return [finding for finding in findings if not (summed and (finding.seat, finding.target) == ("server", "label"))]


def _victims_own(result: Recovered | str, dataset: Dataset, truth: Tensor) -> Recovered | str:
    """Of pictures that were recovered together the victim's: the first, when all are paired with the true ones."""
    if isinstance(result, str) or len(result.images) == 1:
        return result
    paired = pictures.pair(result.images, dataset.x_train[truth].double(), pictures.span(dataset))
    place = next(number for number, image in enumerate(result.images) if torch.equal(image, paired[0]))
    return replace(result, images=paired[:1], labels=result.labels[place : place + 1])


def _server_attacks(attempts: _Attempts, number: int, rehearsal: Rehearsal, round: int, template: nn.Module) -> None:
    """The server knows W and the victim's update, or the mean of several."""
    (known, broadcast, sent, clients), lr = rehearsal.server_saw(round), rehearsal.server.setting.local.lr
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
    rehearsal: Rehearsal,
    round: int,
    template: nn.Module,
    victim: VictimsRound,
    found: Mapping[str, Changes],
) -> None:
    """A client has only estimates of the victim's update, and in another lane than its own of the victim's model."""
    transcript, seat = rehearsal.attacker, rehearsal.seat
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
            attempts.solve(Attack(f"solving the first layer on {name}", seat, "adaptive"), gradient, broadcast)
        attempts.match(Attack(f"matching on {name}", seat, kind), model, gradient, number)


def picture_findings(
    attack: Attack, results: Sequence[Recovered | str], dataset: Dataset, victims: Tensor
) -> list[Finding]:
    truth, labels, box = dataset.x_train[victims].double(), dataset.y_train[victims], pictures.span(dataset)
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
    named: dict[str, Any] = {
        "attack": attack.name, "seat": attack.seat, "attacker": attack.attacker,
        "budget": budget, "failures": failures,
    }  # fmt: skip
    low, high = float(values.min()), float(values.max())
    similar = float(np.median(pictures.ssim(got, truth, box, ordered=True)))
    return [
        Finding(**named, target="image", measure="psnr", value=float(np.median(values)), low=low, high=high,
                chance=chance, note="median; interval: worst and best picture. Guessing: the mean of these pictures",
                images=(("the true pictures, and below them what the attacker rebuilt", grid),)),
        Finding(**named, target="image", measure="ssim", value=similar, note="median"),
        Finding(**named, target="image", measure="share above 20 dB", value=pictures.share_above(values), chance=0.0),
        Finding(**named, target="label", measure="accuracy", value=float(np.mean(right)),
                chance=label_chance(dataset.y_train)),
    ]  # fmt: skip


def _plain_model(template: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """An unsketched model that holds these weights, in double precision."""
    model = copy.deepcopy(template).double()
    with torch.no_grad():
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in weights.items():
            own[name].copy_(tensor.reshape(own[name].shape))
    return model


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}
