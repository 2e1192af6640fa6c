"""Which examples the others train on, by matched filters over all rounds.

Reads: client-N and its allies; server, for the clients' lanes.

A client that trains on the same examples in every round shows them again and again, and noise that is fresh each round
averages out. What is in the way then is not the noise but that examples are alike: one that looks like a member moves
the model as a member does. So a score counts as far as examples of the attacker's own, which surely are no members, do
not predict it: the attacker regresses the scores of its own examples on their gradients, round by round, and takes what
is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbcl.audit.attacks.layer_gradients import layer_gradients
from dbcl.audit.attacks.membership import judge
from dbcl.audit.attacks.roc import Array, measure_auc
from dbcl.audit.attacks.trajectory import Lane, Trajectory, loaded
from dbcl.audit.findings import Curve, Finding
from dbcl.audit.run_rehearsal import RunRehearsal
from dbcl.data import Examples
from dbcl.errors import AuditError
from dbcl.run.task import pooled

RIDGE = 0.03
"""The variance, relative to that of the scores, that is not explained by gradients."""
LEAST = 1e-12


@dataclass(frozen=True, eq=False)
class RoundScores:
    """The scores of examples in one lane of a round: what is left of them, in standard deviations, and their losses.

    >>> RoundScores("ab12", 1.0, np.zeros(3), np.ones(3)).others
    1.0
    """

    plan: str
    others: float
    left: Array
    losses: Array


def round_scores(trajectory: Trajectory, examples: Examples, null: Examples) -> list[list[RoundScores]]:
    """Score examples in every lane of every seen round but the last; `null` are such as the others surely have not.

    With z = <d(x), pull> / |d(x)| and the cosines k of gradients, the null examples predict z by kriging:
    k(x) (K + ridge I)^-1 z_null; what is left is divided by its expected size.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from dbcl.audit.attacks.trajectory import Knowledge
    >>> from dbcl.audit.run_rehearsal import rehearse_run, shards_of
    >>> from dbcl.run import preset, task_of
    >>> config = preset("veil", model="mnist-mlp")
    >>> task = task_of(config)
    >>> shards = shards_of(config, task, clients=2)
    >>> played = rehearse_run(config, task, shards, Path(tempfile.mkdtemp()), rounds=3)
    >>> own, members = (shards.examples.subset(rows) for rows in (shards.own[:100], shards.members()))
    >>> trajectory = Trajectory(played.recorded.attacker, Knowledge(own, examples=50))
    >>> [len(lanes) for lanes in round_scores(trajectory, members, own)]
    [1, 1]
    """
    both = pooled([examples, null])
    found = []
    for index, lanes in enumerate(trajectory.lanes[: len(trajectory.rounds) - 1]):
        found.append([_scored(trajectory, index, lane, both, len(examples)) for lane in lanes])
        trajectory.step()
    return found


def _scored(trajectory: Trajectory, index: int, lane: Lane, both: Examples, count: int) -> RoundScores:
    slopes = torch.from_numpy(trajectory.example_slopes(index, lane, both))
    model = loaded(trajectory.template, trajectory.middle(lane))
    plan, objective = lane.broadcast.plan, trajectory.knowledge.objective
    layers = [each.through(plan) for each in layer_gradients(model, both, objective)]
    lengths = sum((each.squares for each in layers), torch.full((len(both),), LEAST)).sqrt()
    z = slopes.float() / lengths
    z = (z - z[count:].mean()) / (z[count:].std() + LEAST)
    kernel = sum((each.products(count) for each in layers), torch.zeros(len(both), len(both) - count))
    kernel = kernel / (lengths[:, None] * lengths[count:])
    factor = torch.linalg.cholesky(kernel[count:] + RIDGE * torch.eye(len(both) - count))
    predicted = kernel[:count] @ torch.cholesky_solve(z[count:, None], factor)[:, 0]
    explained = torch.linalg.solve_triangular(factor, kernel[:count].T, upper=False).square().sum(dim=0)
    left = ((z[:count] - predicted) / ((1 - explained).clamp(min=0) + RIDGE).sqrt()).double().numpy()
    losses = trajectory.losses(lane, both)
    return RoundScores(plan.digest, lane.others, left / (left.std() + LEAST), losses)


def filter_scores(scores: Sequence[Sequence[RoundScores]], lanes: Sequence[str | None]) -> Array:
    """The sum over the rounds of what is left: in the lane of that plan, or where it is None by how many are in each.

    >>> lanes = [RoundScores("a", 1.0, np.array([1.0]), np.ones(1)), RoundScores("b", 3.0, np.array([5.0]), np.ones(1))]
    >>> filter_scores([lanes], ["a"]), filter_scores([lanes], [None])
    (array([1.]), array([4.]))
    """
    total = np.zeros(len(scores[0][0].left))
    for each, plan in zip(scores, lanes, strict=True):
        known = [lane for lane in each if lane.plan == plan] or each
        everyone = sum(lane.others for lane in known)
        for lane in known:
            total += lane.others / everyone * lane.left
    return total


def loss_scores(scores: Sequence[Sequence[RoundScores]], groups: Array, null: slice) -> Array:
    """How small the loss of each example was over all rounds, in standard deviations of its group's null examples.

    `groups` are the examples' classes, since some are harder than others; one for all where there are none.

    >>> lanes = [RoundScores("a", 1.0, np.zeros(1), np.array([0.1, 1.0, 2.0, 3.0]))]
    >>> bool(loss_scores([lanes], np.zeros(4), slice(1, 4))[0] > 2)
    True
    """
    losses = np.mean([np.mean([lane.losses for lane in each], axis=0) for each in scores], axis=0)
    values: Array = -np.log(np.maximum(losses, 0) + 1e-9)
    found = np.zeros(len(values))
    for group in np.unique(groups):
        inside = groups == group
        known = values[null][inside[null]]
        centre, size = (known.mean(), known.std()) if len(known) > 2 else (values[null].mean(), values[null].std())
        found[inside] = (values[inside] - centre) / (size + 1e-9)
    return found


def member_findings(
    played: RunRehearsal, trajectory: Trajectory, *, null: int = 600, seed: int = 0, note: str = ""
) -> list[Finding]:
    """How well the examples that the others train on are told from such as nobody has.

    Where all clients take part in every round the attacker is told in which lane each of the others is, the worst case;
    each client's examples are then looked for in its lanes. Where some are absent it knows neither.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from dbcl.audit.attacks.trajectory import Knowledge
    >>> from dbcl.audit.run_rehearsal import rehearse_run, shards_of
    >>> from dbcl.run import preset, task_of
    >>> config = preset("veil", model="mnist-mlp")
    >>> task = task_of(config)
    >>> shards = shards_of(config, task, clients=2)
    >>> played = rehearse_run(config, task, shards, Path(tempfile.mkdtemp()), rounds=3)
    >>> trajectory = Trajectory(played.recorded.attacker, Knowledge(shards.examples.subset(shards.own), examples=50))
    >>> sorted({finding.attack for finding in member_findings(played, trajectory, null=100)})
    ['losses over all rounds', 'matched filter and losses over all rounds', 'matched filter over all rounds']
    """
    began, shards = perf_counter(), played.shards
    others = [client for client in range(len(shards.of_clients)) if client not in played.known]
    own = np.concatenate([shards.of_clients[client] for client in played.known])
    members = [shards.of_clients[client] for client in others]
    if played.config.cohort < len(shards.of_clients):  # their lanes are unknown, so that all are looked for alike
        others, members = others[:1], [np.concatenate(members)]
    rows = np.concatenate([*members, shards.others, own])
    sure = shards.own[: min(null, len(shards.own))]
    if len(sure) < 20:
        raise AuditError(f"the attacker has {len(sure)} examples of its own beside its shard; it needs 20 or more")
    examples = shards.examples.subset(rows)
    scores = round_scores(trajectory, examples, shards.examples.subset(sure))
    everything = pooled([examples, shards.examples.subset(sure)])
    by_loss = loss_scores(scores, _groups(everything), slice(len(rows), None))
    mine = slice(len(rows) - len(own), len(rows))
    weight = max(0.0, float(by_loss[mine].mean()))  # how far the attacker's own examples, members all, stand out
    count, strangers = sum(map(len, members)), len(shards.others)
    stranger = slice(count, count + strangers)
    attacks: dict[str, list[Array]] = {}
    start = 0
    for client, rows_of in zip(others, members, strict=True):
        filtered = filter_scores(scores, _lanes_of(played, client, trajectory.rounds[: len(scores)]))
        filtered = (filtered - filtered[stranger].mean()) / (filtered.std() + LEAST)
        both = filtered + weight * by_loss[: len(filtered)]
        for name, values in (("matched filter", filtered), ("losses", by_loss), ("matched filter and losses", both)):
            picked = np.concatenate([values[start : start + len(rows_of)], values[stranger]])
            attacks.setdefault(f"{name} over all rounds", []).append(picked)
        start += len(rows_of)
    budget = {
        "members": count, "non-members": strangers, "rounds seen": len(trajectory.rounds),
        "own examples": len(sure), "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip
    named: dict[str, Any] = {
        "seat": played.recorded.seat, "attacker": "adaptive", "target": "membership", "budget": budget, "note": note,
    }  # fmt: skip
    return [
        finding
        for attack, each in attacks.items()
        for finding in _judged(attack, each, [len(rows_of) for rows_of in members], named, seed)
    ]


def _judged(
    attack: str, scores: Sequence[Array], members: Sequence[int], named: dict[str, Any], seed: int
) -> list[Finding]:
    """All clients' members against the non-members; with several clients each has scores of its own for these."""
    values = np.concatenate(scores)
    truth = np.concatenate([np.arange(len(each)) < count for each, count in zip(scores, members, strict=True)])
    result, interval = judge(values, truth), measure_auc(values, truth, seed)
    curve, axes = Curve("", *result.roc), ("false positive rate", "true positive rate")
    found = [
        Finding(
            attack, measure="membership auc", value=result.auc, low=interval.low, high=interval.high, chance=0.5,
            curves=(curve,), axes=axes, **named,
        ),
        Finding(attack, measure="tpr at 1 % fpr", value=result.tpr_at_1_percent, chance=0.01, **named),
        Finding(attack, measure="tpr at 0.1 % fpr", value=result.tpr_at_01_percent, chance=0.001, **named),
    ]  # fmt: skip
    return [finding for finding in found if finding.value == finding.value]


def _lanes_of(played: RunRehearsal, client: int, rounds: Sequence[int]) -> list[str | None]:
    """The plan of a client's lane in each round, or None where not all clients take part in every round."""
    if played.config.cohort < len(played.shards.of_clients):
        return [None] * len(rounds)
    return [played.recorded.server[round].answered(str(client)).plan.digest for round in rounds]


def _groups(examples: Examples) -> Array:
    """The class of each example; one for all where targets are no classes."""
    targets = examples.take(np.arange(len(examples))).targets
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        return np.asarray(targets.numpy(), dtype=np.float64)
    return np.zeros(len(examples))
