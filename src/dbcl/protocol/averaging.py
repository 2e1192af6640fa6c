"""Averaging of the accepted updates: per lane in its sketched space, then lifted and summed."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dbcl.blinding import lift
from dbcl.errors import DivergedError, ProtocolError
from dbcl.protocol.aggregation import Aggregate, stacked_sums, summed
from dbcl.protocol.keeper import Keeper
from dbcl.protocol.round_sequence import RoundSequence
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.protocol.validation import ValidationResult, not_finite
from dbcl.round_plan import RoundPlan, mismatches


class Aggregation(Protocol):
    """Interface of an aggregation: computes one aggregate of the accepted updates of a round."""

    def aggregate(self, result: ValidationResult) -> Aggregate:
        """Return the aggregate of the accepted updates.

        Raises:
            ProtocolError: The updates cannot be aggregated. Nothing has changed.
        """


class MeanAggregation:
    """The mean of the updates, weighted by examples.

    Under a guarantee, the sum is divided by the planned cohort size. If a lane has no accepted
    updates, the other lanes receive its weight.

    Args:
        trained: The weights W.
        keeper: The enforcer of the guarantee.
        sequence: The rounds, one of which is open.
    """

    def __init__(self, trained: TrainedWeights, keeper: Keeper, sequence: RoundSequence) -> None:
        self.trained, self.keeper, self.sequence = trained, keeper, sequence

    def aggregate(self, result: ValidationResult) -> Aggregate:
        """Return the lifted mean of the accepted updates."""
        own = self.trained.model_tensors()
        like = {name: own[name].new_empty(0, dtype=kind) for name, kind in self.trained.dtypes().items()}
        denominator = self.keeper.denominator([each.weight for each in result.accepted.values()])
        return average(result, self.sequence.opened().by_digest(), like, self.trained.statistics, denominator)

    def lifted(self, result: ValidationResult) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Iterate over each accepted client's lifted weights W + dV R^T, by sender.

        >>> import dbcl
        >>> server = dbcl.Server(torch.nn.Linear(6, 2))
        >>> broadcast = server.open_round()
        >>> update = dbcl.make_update(dbcl.blinded(torch.nn.Linear(6, 2), broadcast), broadcast, examples=1)
        >>> same = dict(server.averaging.lifted(server.validate({"me": update})))
        >>> torch.equal(same["me"]["weight"], server.model.weight)
        True
        """
        return lifted(result, self.sequence.opened().by_digest(), self.trained.read(), self.trained.statistics)


def average(
    result: ValidationResult,
    plans: Mapping[str, RoundPlan],
    like: Mapping[str, Tensor],
    statistics: set[str],
    denominator: float,
) -> Aggregate:
    """Average the accepted updates of a round and lift the average.

    Args:
        result: The accepted updates, with their weights.
        plans: The plan of each lane, by digest.
        like: Tensors with the dtype and device of each sum.
        statistics: Names of normalisation statistics. Their values are averaged over the clients
            that report them.
        denominator: Divisor of the weighted sum.

    Returns:
        The lifted aggregate.
    """
    sums: dict[str, Tensor] = {}
    for digest, part in _sums_by_lane(result, like, statistics, denominator):
        for name, change in lift(plans[digest], part).items():
            sums[name] = sums[name].add_(change) if name in sums else change
    return Aggregate(sums, weight=1.0, count=len(result.accepted), lifted=True)


def _sums_by_lane(
    result: ValidationResult, like: Mapping[str, Tensor], statistics: set[str], denominator: float
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Iterate over the weighted sum of each lane in its sketched space, by plan digest."""
    accepted = list(result.accepted.values())
    digests = list(dict.fromkeys(each.update.plan for each in accepted))
    if result.stack is None:
        every = result.weighted()
        changes = {name: tensor for name, tensor in like.items() if name not in statistics}
        for digest in digests:
            own = [one for one, each in zip(every, accepted, strict=True) if each.update.plan == digest]
            yield digest, summed(own, changes, whole=denominator)
        held = {name: like[name] for name in statistics}
        yield digests[0], summed(every, held, held)
        return
    stack = result.stack.only(list(result.accepted))
    shares = [[each.weight / denominator * (each.update.plan == digest) for each in accepted] for digest in digests]
    scaled = [[share * each.factor for share, each in zip(row, accepted, strict=True)] for row in shares]
    changed = {name: tensor for name, tensor in stack.items() if name not in statistics}
    measured = {name: tensor for name, tensor in stack.items() if name in statistics}
    for rows, tensors in ((scaled, changed), (shares, measured)):
        yield from zip(digests, stacked_sums(tensors, rows, like), strict=True)


def lifted(
    result: ValidationResult, plans: Mapping[str, RoundPlan], weights: Mapping[str, Tensor], statistics: set[str]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Iterate over each accepted client's lifted weights W + dV R^T, by sender."""
    own = {name: tensor.detach() for name, tensor in weights.items()}
    for who, each in result.accepted.items():
        sent = {name: each.update.tensors[name].to(W) for name, W in own.items() if name in each.update.tensors}
        changes = lift(plans[each.update.plan], sent)
        made = {name: changes.get(name, W) for name, W in own.items()}  # statistics: the client's own values
        for name in own.keys() - statistics:
            made[name] = torch.add(own[name], changes[name], alpha=each.factor)
        yield who, made


def changes_of(
    aggregate: Aggregate, plan: RoundPlan, weights: Mapping[str, Tensor], min_updates: int
) -> dict[str, Tensor]:
    """Return the average change of every tensor, lifted to W.

    Raises:
        ProtocolError: The aggregate does not fit the plan, is not finite, or has too few updates.
    """
    mean = aggregate.mean()
    shapes = {
        tensor.name: tensor.shape if aggregate.lifted else tensor.sent_shape
        for tensor in plan.tensors
        if tensor.name in mean or not tensor.measured
    }
    problems, changes = mismatches(shapes, mean), dict[str, Tensor]()
    if plan.lanes > 1 and not aggregate.lifted:
        problems.append(f"it is not lifted, and the round has {plan.lanes} lanes")
    if aggregate.count < min_updates:
        problems.append(f"it is made of {aggregate.count} updates and {min_updates} are needed")
    if not problems:
        changes = dict(mean) if aggregate.lifted else lift(plan, mean)
        for tensor in plan.tensors:
            if tensor.measured and tensor.name in changes:
                changes[tensor.name] = changes[tensor.name].to(weights[tensor.name]) - weights[tensor.name]
        problems = [f"{name} is not finite" for name in not_finite(changes)]
        if problems:
            raise DivergedError("\n  - ".join([f"round {plan.round}: the aggregate is rejected", *problems]))
    if problems:
        raise ProtocolError("\n  - ".join([f"round {plan.round}: the aggregate is rejected", *problems]))
    return changes
