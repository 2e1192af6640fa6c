"""Reputation of clients: the agreement of their updates with other updates over many rounds.

A single round cannot distinguish a harmful update from an honest update on unusual data, and
adversaries may be the majority in some rounds. Over many rounds, honest updates have a small
positive mean cosine with each other. Updates that reverse the training have a negative mean cosine,
and their sender loses its weight.
"""

import math
import statistics
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dbcl.protocol.messages import Update, UpdateStack
from dbcl.state import State

MIN_CLIENTS = 8
"""Minimum number of clients in a round for computing agreement."""
MIN_ROUNDS = 3
"""Minimum number of rounds before a client's weight may be reduced."""
DECAY = 0.9
"""Weight of a round relative to the next round, in the mean cosine."""
UNTRUSTED = 0.03
"""Minimum distance of a client's mean cosine below the median at which its weight is 0."""
STANDARD_ERRORS = 4.0
"""Minimum of the same distance in standard errors of the mean.

Random variation alone must not reduce a client's weight.
"""
TRUSTED = 1 / 3
"""Fraction of that distance up to which a client keeps its full weight."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
HIGHEST_MEDIAN = 0.03
"""Upper bound on the median in the comparison.

If the clients agree strongly, a client with weaker agreement is not an adversary.
"""


class Reputation:
    """Mean cosine of each client's updates with other updates, over the client's rounds.

    >>> reputation = Reputation()
    >>> for _ in range(MIN_ROUNDS):
    ...     reputation.observe({"ann": 0.1, "bob": 0.1, "eve": -0.2})
    >>> reputation.trust(["ann", "bob", "eve", "dan"])
    {'ann': 1.0, 'bob': 1.0, 'eve': 0.0, 'dan': 1.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # sum of the cosines, sum of their weights, number of rounds
        self._spread = [0.0, 0.0]  # sum of the spreads of rounds, sum of their weights

    def trust(self, clients: Collection[str]) -> dict[str, float]:
        """Return the weight factor of each given client, from 0 to 1."""
        means = {who: self._sums[who][0] / self._sums[who][1] for who in clients if who in self._sums}
        median = min(statistics.median(means.values()), HIGHEST_MEDIAN) if means else 0.0
        spread = self._spread[0] / max(self._spread[1], 1.0)

        def factor(who: str) -> float:
            if who not in means or self._sums[who][2] < MIN_ROUNDS:
                return 1.0
            limit = max(UNTRUSTED, STANDARD_ERRORS * spread / math.sqrt(self._sums[who][1]))
            return min(1.0, max(0.0, (1 - (median - means[who]) / limit) / (1 - TRUSTED)))

        return {who: factor(who) for who in clients}

    def observe(self, agreement: Mapping[str, float]) -> None:
        """Add the cosines of a round."""
        for who, cosine in agreement.items():
            total, weight, count = self._sums.get(who, (0.0, 0.0, 0.0))
            self._sums[who] = [DECAY * total + cosine, DECAY * weight + 1.0, count + 1.0]
        if agreement:
            median = statistics.median(agreement.values())
            deviation = MAD_TO_DEVIATION * statistics.median(abs(cosine - median) for cosine in agreement.values())
            self._spread = [DECAY * self._spread[0] + deviation, DECAY * self._spread[1] + 1.0]

    def state(self) -> State:
        """Return the state for a checkpoint."""
        clients = {who: list(sums) for who, sums in self._sums.items()}
        return State({"clients": clients, "spread": list(self._spread)}, {})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        held: Mapping[str, Any] = state.values["clients"]
        sums = {str(who): [float(value) for value in each] for who, each in held.items()}
        if not all(len(each) == 3 and each[1] > 0 and abs(each[0]) <= 2 * each[1] for each in sums.values()):
            raise ValueError("the reputation of a client")
        spread, weight = map(float, state.values["spread"])
        if not 0 <= spread <= 2 * weight:
            raise ValueError("the spread of the clients' reputations")
        self._sums, self._spread = sums, [spread, weight]


def agreement(
    updates: Mapping[str, Update], trust: Mapping[str, float], sketched: Collection[str], statistics: Collection[str]
) -> dict[str, float]:
    """Return the trust-weighted mean cosine of each update with the others.

    Updates in the same lane are compared on all tensors. Updates in different lanes are compared
    only on unsketched tensors, because sketched tensors have different coordinates. Normalisation
    statistics are not compared.

    >>> def update(plan, w, b):
    ...     return Update(0, plan, {"w": torch.tensor([w]), "b": torch.tensor([b])}, examples=1)
    >>> sent = {"ann": update("p", 1.0, 0.0), "bob": update("p", 1.0, 0.0), "eve": update("q", 0.0, -1.0)}
    >>> agreement(sent, {"ann": 1.0, "bob": 1.0, "eve": 1.0}, {"w"}, ())
    {'ann': 0.5, 'bob': 0.5, 'eve': 0.0}
    """
    if isinstance(updates, UpdateStack):
        return _of_stack(updates, trust, sketched, statistics)
    own_lane: dict[str, dict[str, Tensor]] = {}  # by lane: sum of the directions over all tensors
    any_lane: dict[str, dict[str, Tensor]] = {}  # by lane: sum of the directions over unsketched tensors
    for who, update in updates.items():
        tensors = {name: tensor for name, tensor in update.tensors.items() if name not in statistics}
        bare = {name: tensor for name, tensor in tensors.items() if name not in sketched}
        for sums, part in ((own_lane, tensors), (any_lane, bare)):
            total, size = sums.setdefault(update.plan, {}), _norm(part)
            for name, tensor in part.items():
                add = tensor.float() * (trust[who] / size)
                total[name] = total[name].add_(add) if name in total else add
    every: dict[str, Tensor] = {}
    for total in any_lane.values():
        for name, tensor in total.items():
            every[name] = every[name] + tensor if name in every else tensor
    whole = sum(trust[who] for who in updates)
    found = {}
    for who, update in updates.items():
        tensors = {name: tensor for name, tensor in update.tensors.items() if name not in statistics}
        bare = {name: tensor for name, tensor in tensors.items() if name not in sketched}
        same = _product(tensors, own_lane[update.plan]) / _norm(tensors)
        others = {name: every[name] - any_lane[update.plan][name] for name in bare}
        across = _product(bare, others) / _norm(bare)
        found[who] = _mean(same, across, trust[who], whole)
    return found


def _mean(same: float, across: float, own: float, whole: float) -> float:
    """Return the mean cosine with the other updates, without the update's product with itself.

    The sum over the update's own lane contains this product once.
    """
    return (same - own + across) / (whole - own) if whole > own else 0.0


def _norm(tensors: Mapping[str, Tensor]) -> float:
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2 for tensor in tensors.values()]
    return float(torch.stack(squares).sum()) ** 0.5 or 1.0 if squares else 1.0


def _product(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    return sum(float((tensor.float() * others[name]).sum(dtype=torch.float64)) for name, tensor in tensors.items())


def _of_stack(
    stack: UpdateStack, trust: Mapping[str, float], sketched: Collection[str], statistics: Collection[str]
) -> dict[str, float]:
    """Compute `agreement` for a stack without copying its tensors."""
    names = [name for name in stack.tensors if name not in statistics]
    bare = [name for name in names if name not in sketched]
    lanes = {plan: number for number, plan in enumerate(dict.fromkeys(stack.plans))}
    lane = torch.tensor([lanes[plan] for plan in stack.plans])
    own = torch.tensor([trust[who] for who in stack.senders], dtype=torch.float64)
    member = torch.nn.functional.one_hot(lane, len(lanes)).T.double() * own  # (lanes, clients)

    def products(chosen: list[str], other_lanes: bool) -> Tensor:
        """Return each client's inner product with the sum of its lane, or of the other lanes."""
        if not chosen:
            return torch.zeros(len(stack), dtype=torch.float64)
        norms = stack.norms(chosen).cpu()
        norms = torch.where(norms > 0, norms, 1.0)
        found = torch.zeros(len(stack), len(lanes), dtype=torch.float64)
        for name in chosen:
            rows = stack.tensors[name].unsqueeze(-1).flatten(1).float()
            sums = (member / norms).to(rows) @ rows
            found += (rows @ (sums.sum(dim=0) - sums if other_lanes else sums).T).double().cpu()
        return found[torch.arange(len(stack)), lane] / norms

    same, across, whole = products(names, False), products(bare, True), float(own.sum())
    pairs = zip(stack.senders, same.tolist(), across.tolist(), strict=True)
    return {who: _mean(one, other, trust[who], whole) for who, one, other in pairs}
