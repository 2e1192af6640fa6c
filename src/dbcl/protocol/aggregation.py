"""Aggregation: combines updates into one `Aggregate` for the server's step.

`average` builds an `Aggregate` from individual updates. A Flower strategy builds it from new
weights. Secure aggregation builds it from a sum, without access to individual updates.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dbcl.errors import ProtocolError


@dataclass(frozen=True, eq=False)
class Aggregate:
    """Weighted sum of updates, with the sum of their weights and their number.

    Args:
        sum: Sum over changes of V in the round's sketched space, or over changes of W if `lifted`.
            For normalisation statistics, the sum is over their values. Statistics that no client
            reported are missing.
        weight: Sum of the weights, in any unit: only sum / weight is used.
        count: Number of updates.
        lifted: The sum is over changes of W.

    Raises:
        ProtocolError: There is no update, or the weight is not positive.

    >>> import torch
    >>> Aggregate({"b": torch.tensor([6.0])}, weight=3.0, count=2).mean()
    {'b': tensor([2.])}
    """

    sum: Mapping[str, Tensor]
    weight: float
    count: int
    lifted: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or not self.weight > 0:
            raise ProtocolError(f"an aggregate is of 1 update or more, got {self.count} with weight {self.weight}")

    def mean(self) -> dict[str, Tensor]:
        """Return the weighted mean of the updates: sum / weight."""
        if self.weight == 1.0:
            return dict(self.sum)
        return {name: total / self.weight for name, total in self.sum.items()}


class Weighted(NamedTuple):
    """Tensors of an update, its weight, and the factor that scales it."""

    tensors: Mapping[str, Tensor]
    weight: float
    factor: float = 1.0


def average(updates: Sequence[Weighted], like: Mapping[str, Tensor], statistics: Collection[str] = ()) -> Aggregate:
    """Compute the weighted sum of updates, in the dtype and on the device of `like`.

    Each update is scaled by its share of the total weight. The shares are below 1, so the sum stays
    in the range of half-precision dtypes. Normalisation statistics are values, not changes: they
    are not clipped, and their mean is over the updates that contain them.

    Args:
        updates: The updates with their weights.
        like: Tensors with the dtype and device of each sum.
        statistics: Names of the normalisation statistics.

    Returns:
        The aggregate.

    >>> import torch
    >>> one, three = Weighted({"b": torch.tensor([1.0])}, 1), Weighted({"b": torch.tensor([5.0])}, 3)
    >>> average([one, three], {"b": torch.zeros(1)}).mean()
    {'b': tensor([4.])}
    """
    return Aggregate(summed(updates, like, statistics), weight=1.0, count=len(updates))


def summed(
    updates: Sequence[Weighted],
    like: Mapping[str, Tensor],
    statistics: Collection[str] = (),
    whole: float | None = None,
) -> dict[str, Tensor]:
    """Return the sums of `average`.

    `whole` is the total weight of the round, if `updates` are only a part of it.

    >>> import torch
    >>> summed([Weighted({"b": torch.tensor([4.0])}, 1)], {"b": torch.zeros(1)}, whole=2.0)
    {'b': tensor([2.])}
    """
    sums: dict[str, Tensor] = {}
    for name, tensor in like.items():
        having = [each for each in updates if name in each.tensors] if name in statistics else updates
        total = sum(each.weight for each in having) if whole is None else whole
        for each in having:
            share = (1.0 if name in statistics else each.factor) * each.weight / total
            own = each.tensors[name].to(tensor)
            sums[name] = own * share if name not in sums else sums[name].add_(own, alpha=share)
    return sums


def stacked_sums(
    stack: Mapping[str, Tensor], shares: Sequence[Sequence[float]], like: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return weighted sums of stacked tensors over the client axis, one sum per row of shares.

    >>> import torch
    >>> stacked_sums({"b": torch.tensor([[1.0], [5.0]])}, [[0.25, 0.75]], {"b": torch.zeros(1)})
    [{'b': tensor([4.])}]
    """
    sums: list[dict[str, Tensor]] = [{} for _ in shares]
    table = torch.tensor(shares, dtype=torch.float64)
    for name, tensor in stack.items():
        wide = tensor.to(like[name])
        table = table.to(wide.device)
        added = (table.to(wide) @ wide.unsqueeze(-1).flatten(1)).view(len(shares), *wide.shape[1:])
        for own, each in zip(sums, added, strict=True):
            own[name] = each
    return sums


def replacement(new: Mapping[str, Tensor], old: Mapping[str, Tensor], count: int) -> Aggregate:
    """Return the aggregate that turns the weights `old` into `new`, made from `count` updates.

    >>> import torch
    >>> replacement({"b": torch.tensor([3.0])}, {"b": torch.tensor([1.0])}, count=2).mean()
    {'b': tensor([2.])}
    """
    # A shape that does not fit is left as it is, for the validator to name.
    changes = {
        name: tensor.to(old[name]) - old[name].detach() if name in old and tensor.shape == old[name].shape else tensor
        for name, tensor in new.items()
    }
    return Aggregate(changes, weight=1.0, count=count, lifted=True)


def mean_metrics(reported: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the weighted mean of the clients' metrics, over the clients that report each metric.

    >>> mean_metrics([({"loss": 1.0}, 1), ({"loss": 4.0, "accuracy": 0.5}, 3)])
    {'loss': 3.25, 'accuracy': 0.5}
    """
    means = {}
    for name in dict.fromkeys(name for metrics, _ in reported for name in metrics):
        having = [(metrics[name], examples) for metrics, examples in reported if name in metrics]
        means[name] = sum(value * examples for value, examples in having) / sum(examples for _, examples in having)
    return means
