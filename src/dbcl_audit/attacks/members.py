"""Membership inference on the other clients' data, by likelihood ratios over all rounds.

Reads: client-N and its allies; server, for the clients' lanes.

A client that trains on the same examples in every round repeats their influence, while fresh noise
averages out over the rounds. Correlation between examples is a larger error source than the noise:
an example that resembles a member moves the model as the member does. The attacker therefore uses
its null examples, known not to be in any other client's data. In each round it regresses their
scores on their gradients and keeps the residual of every candidate. The log-likelihood ratio of the
residuals weights rounds and examples by the shift that membership would cause: an example with a
small gradient gives little evidence, and one with a large gradient and a score near zero is not a
member.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbcl.data import Examples
from dbcl.errors import AuditError
from dbcl.simulation.task import pooled
from dbcl_audit.attacks.layer_gradients import layer_gradients
from dbcl_audit.attacks.membership import judge
from dbcl_audit.attacks.roc import Array, measure_auc
from dbcl_audit.attacks.trajectory import Lane, Trajectory, loaded
from dbcl_audit.estimators.covariance import solve
from dbcl_audit.findings import Finding
from dbcl_audit.numerics import standardized
from dbcl_audit.simulated_run import ShardRun

RIDGE = 0.03
"""Score variance that gradients do not explain, relative to the variance that they explain."""
PROCESS_NOISE_SCALE = 10.0
"""Ratio of two deviations of the other clients from the drift: along gradients of examples, and
along any direction.
"""
NEIGHBOUR_ROUNDS_FACTOR = 3.0
"""Factor by which membership shifts the score of a round beyond the effect of this round's
training, because members also train in the neighbouring rounds.
"""
SHIFT_SPREAD = 1.0
"""Standard deviation of a member's shift, relative to its mean. The attacker knows the victim's
gradients only roughly.
"""
MIN_SQUARED_NORM = 1e-12


@dataclass(frozen=True, eq=False)
class RoundScores:
    """Scores of examples in one lane of a round.

    Args:
        plan: digest of the lane's plan.
        others: expected number of other clients in the lane.
        ratios: log-likelihood ratios of membership.
        losses: losses of the examples.

    >>> RoundScores("ab12", 1.0, np.zeros(3), np.ones(3)).others
    1.0
    """

    plan: str
    others: float
    ratios: Array
    losses: Array


def log_ratio(left: Array, variance: Array, shift: Array, spread: float = SHIFT_SPREAD) -> Array:
    """Log-likelihood ratio of residuals: N(shift, variance + (spread shift)^2) for members against
    N(0, variance).

    With spread 0 the ratio is shift left / variance - v / 2, where v = shift^2 / variance. Its mean
    is v / 2 for members and -v / 2 for non-members. Its variance is v for both.

    >>> log_ratio(np.array([0.0, 2.0]), np.ones(2), np.full(2, 2.0), spread=0.0)
    array([-2.,  2.])
    """
    wide = variance + np.square(spread * shift)
    found: Array = np.square(left) / (2 * variance) - np.square(left - shift) / (2 * wide) - np.log(wide / variance) / 2
    return found


def round_scores(trajectory: Trajectory, examples: Examples, null: Examples) -> list[list[RoundScores]]:
    """Score examples in every lane of every observed round except the last.

    Kriging predicts z = <d(x), influence> / |d(x)| from the null examples and the cosines k of
    gradients: k(x) (K + ridge I)^-1 z_null. `log_ratio` compares the residual with the expected
    shift of a member.

    Args:
        trajectory: the attacker's model of the rounds.
        examples: candidates.
        null: examples known not to be in any other client's data.

    >>> from dbcl_audit.examples import example_run
    >>> from dbcl_audit.attacks.trajectory import Knowledge
    >>> played = example_run("veil", model="mnist-mlp")
    >>> shards = played.shards
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
    squares = torch.full((len(both),), MIN_SQUARED_NORM, dtype=torch.float64)
    kernel = torch.zeros(len(both), len(both) - count, dtype=torch.float64)
    for each in layer_gradients(model, both, objective):
        if each.name in trajectory.views:
            seen, compact = float(trajectory.information(each.name)[index, index]), each.through(plan)
            squares += seen * compact.squares.double()
            kernel += seen * compact.products(count).double()
    lengths = squares.sqrt()
    z = slopes / lengths
    z = z - z[count:].mean()
    kernel = kernel / (lengths[:, None] * lengths[count:])
    known = kernel[count:] + RIDGE * torch.eye(len(both) - count, dtype=torch.float64)
    solved = solve(
        known, torch.cat([z[count:, None], kernel[:count].T], dim=1)
    )  # of the scores, then of each candidate
    left = z[:count] - kernel[:count] @ solved[:, 0]
    own = (1 - (kernel[:count] * solved[:, 1:].T).sum(dim=1)).clamp(min=0)  # share unlike all null examples
    scale = float(z[count:] @ solved[:, 0]) / len(solved)
    ratios = np.zeros(count)
    if scale > 0:  # the round shows something
        shift = NEIGHBOUR_ROUNDS_FACTOR * trajectory.entries * trajectory.rate(index, lane) ** 2 * lengths[:count] * own
        ratios = log_ratio(left.numpy(), (scale * (own + RIDGE)).numpy(), shift.numpy())
    return RoundScores(plan.digest, lane.others, ratios, trajectory.losses(lane, both))


def ratio_scores(
    scores: Sequence[Sequence[RoundScores]], lanes: Sequence[str | None], clients: int | None = None
) -> Array:
    """Sum the log-likelihood ratios of membership over the rounds.

    Args:
        scores: scores of every round, by lane.
        lanes: plan digest of the client's lane in each round; None if unknown. An unknown lane is
            averaged over all lanes, weighted by the expected number of other clients, and over
            absence.
        clients: number of other clients; by default all of them take part.

    >>> lanes = [RoundScores("a", 1.0, np.array([1.0]), np.ones(1)), RoundScores("b", 3.0, np.array([5.0]), np.ones(1))]
    >>> ratio_scores([lanes], ["a"]), ratio_scores([lanes], [None]).round(2)
    (array([1.]), array([4.72]))
    """
    total = np.zeros(len(scores[0][0].ratios))
    for each, plan in zip(scores, lanes, strict=True):
        known = [lane for lane in each if lane.plan == plan] or each
        present = sum(lane.others for lane in known)
        everyone = max(present, clients or 0)
        cases = [np.log(lane.others / everyone) + lane.ratios for lane in known]
        if everyone > present:
            cases.append(np.full(len(total), np.log(1 - present / everyone)))
        total += np.logaddexp.reduce(cases, axis=0)
    return total


def loss_scores(scores: Sequence[Sequence[RoundScores]], groups: Array, null: slice) -> Array:
    """Score examples by their mean loss over all rounds, in standard deviations of the null
    examples of the same group.

    `groups` holds the class of each example, because classes differ in difficulty. Use a single
    group if there are no classes.

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
        found[inside] = standardized(values[inside], known if len(known) > 2 else values[null])
    return found


def member_findings(
    played: ShardRun, trajectory: Trajectory, *, null: int = 600, seed: int = 0, note: str = ""
) -> list[Finding]:
    """Infer membership in the other clients' shards, compared with examples that no client has.

    With full participation the attacker is given the lane of every other client (worst case) and
    tests each client's examples in that client's lanes. With partial participation the attacker
    knows neither lanes nor cohort.

    >>> from dbcl_audit.examples import example_run
    >>> from dbcl_audit.attacks.trajectory import Knowledge
    >>> played = example_run("veil", model="mnist-mlp")
    >>> own = played.shards.examples.subset(played.shards.own)
    >>> trajectory = Trajectory(played.recorded.attacker, Knowledge(own, examples=50))
    >>> sorted({finding.attack for finding in member_findings(played, trajectory, null=100)})
    ['likelihood ratio and losses over all rounds', 'likelihood ratio over all rounds', 'losses over all rounds']
    """
    began, shards = perf_counter(), played.shards
    trajectory = trajectory.knowing(replace(trajectory.knowledge, process_noise_scale=PROCESS_NOISE_SCALE))
    others = [client for client in range(len(shards.of_clients)) if client not in played.known]
    own = np.concatenate([shards.of_clients[client] for client in played.known])
    members = [shards.of_clients[client] for client in others]
    clients = None
    if played.config.cohort < len(shards.of_clients):  # their lanes are unknown, so that all are looked for alike
        clients, others, members = len(others), others[:1], [np.concatenate(members)]
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
    count, non_members = sum(map(len, members)), len(shards.others)
    outside = slice(count, count + non_members)
    attacks: dict[str, list[Array]] = {}
    start = 0
    for client, rows_of in zip(others, members, strict=True):
        ratios = ratio_scores(scores, _lanes_of(played, client, trajectory.rounds[: len(scores)]), clients)
        both = ratios + weight * by_loss[: len(ratios)]  # that of a normal with variance 1, shifted by `weight`
        for name, values in (("likelihood ratio", ratios), ("losses", by_loss), ("likelihood ratio and losses", both)):
            picked = np.concatenate([values[start : start + len(rows_of)], values[outside]])
            attacks.setdefault(f"{name} over all rounds", []).append(picked)
        start += len(rows_of)
    budget = {
        "members": count, "non-members": non_members, "rounds seen": len(trajectory.rounds),
        "own examples": len(sure), "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip
    sizes = [len(rows_of) for rows_of in members]
    return [
        finding
        for attack, each in attacks.items()
        for finding in _judged(played, attack, each, sizes, budget, note, seed)
    ]


def _judged(
    played: ShardRun,
    attack: str,
    scores: Sequence[Array],
    members: Sequence[int],
    budget: Mapping[str, Any],
    note: str,
    seed: int,
) -> list[Finding]:
    """Measure the scores of all clients' members against non-members. Every client has separate
    scores of the non-members.
    """
    values = np.concatenate(scores)
    truth = np.concatenate([np.arange(len(each)) < count for each, count in zip(scores, members, strict=True)])
    interval = measure_auc(values, truth, seed)
    first, *rates = judge(values, truth).findings(attack, played.recorded.adversary, "adaptive")
    found = [replace(first, low=interval.low, high=interval.high), *rates]
    return [replace(each, budget=budget, note=note) for each in found]


def _lanes_of(played: ShardRun, client: int, rounds: Sequence[int]) -> list[str | None]:
    """Return the plan digest of a client's lane in each round, or None for every round with partial
    participation.
    """
    if played.config.cohort < len(played.shards.of_clients):
        return [None] * len(rounds)
    return [played.recorded.lane_of(round, client)[0] for round in rounds]


def _groups(examples: Examples) -> Array:
    """Return the class of each example, or 0 for all examples if the targets are not classes."""
    targets = examples.take(np.arange(len(examples))).targets
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        return np.asarray(targets.numpy(), dtype=np.float64)
    return np.zeros(len(examples))
