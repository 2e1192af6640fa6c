"""Validation of individual updates: structure, finite values, number of examples and norm."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dbcl.errors import DivergedError, ProtocolError, shown
from dbcl.privacy import clip_factor, norm
from dbcl.protocol.aggregation import Weighted, mean_metrics
from dbcl.protocol.codec import MAX_METRIC, MAX_METRICS, decode_update
from dbcl.protocol.messages import AggregationStats, Broadcast, Update, UpdateStack
from dbcl.protocol.rejection import Reason, RejectedError, Rejection, rejection_of
from dbcl.round_plan import mismatches

MAX_NORM = 1e18
"""Maximum norm of an update. Larger updates could overflow float32 weights."""


@dataclass(frozen=True)
class AcceptedUpdate:
    """A valid update with its weight, its scale factor, and its norm after scaling."""

    update: Update
    factor: float
    weight: float
    norm: float


@dataclass(frozen=True)
class UpdateValidator:
    """Limits for updates.

    Args:
        min_updates: Smallest number of accepted updates in a round.
        norm_bound: Bound on the norm of an update over all its tensors. A lift preserves norms, so
            this also bounds the change of W.
        clip: Scale an update above `norm_bound` down to the bound; otherwise reject it.
        max_examples: Largest number of examples that determines an update's weight.
        max_influence: Bound on one client's influence in a round. Its weight is capped at this
            multiple of the round's median weight. Its influence (weight times norm) is capped at
            this multiple of the median client's influence in this round and recent rounds. Clients
            whose updates oppose other updates over several rounds also lose weight
            (`dbcl.protocol.reputation`). None removes all three limits.
        outlier_factor: Reject an update whose norm is above this multiple of the median of its
            lane, if the lane has at least three clients. The limit is proportionally higher for a
            client with more examples than the median, because it takes more steps. None disables
            this check.
        reject_by_value: Permit rejections based on values. A guarantee forbids them: non-finite
            updates then become zero, and only a wrong structure leads to a rejection.

    >>> UpdateValidator(min_updates=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: min_updates must be 1 or more, got 0
    """

    min_updates: int = 1
    norm_bound: float | None = None
    clip: bool = True
    max_examples: int = 10_000_000
    max_influence: float | None = 1.5
    outlier_factor: float | None = 10.0
    reject_by_value: bool = True

    def __post_init__(self) -> None:
        for name in ("min_updates", "max_examples", "max_influence", "outlier_factor"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ProtocolError(f"{name} must be 1 or more, got {value}")
        if self.norm_bound is not None and not 0 < self.norm_bound < math.inf:
            raise ProtocolError(f"norm_bound must be above 0, got {self.norm_bound}")

    def __str__(self) -> str:
        said = [f"{self.min_updates} update{'s' * (self.min_updates > 1)} or more"]
        if self.norm_bound is not None:
            said.append(f"norms {'clipped to' if self.clip else 'at most'} {self.norm_bound:g}")
        if self.max_influence is not None:
            said.append(f"no client has more than {self.max_influence:g} times the influence of the median client")
        if self.outlier_factor is not None:
            said.append(f"no norm above {self.outlier_factor:g} times the median")
        return "; ".join(said)

    def validate(self, message: Update | bytes, broadcast: Broadcast) -> AcceptedUpdate:
        """Validate an update to a broadcast.

        Args:
            message: The update or its bytes.
            broadcast: The broadcast that the update answers.

        Returns:
            The accepted update.

        Raises:
            ProtocolError: The update is rejected. A `RejectedError` holds the reason.
        """
        update = decode_update(bytes(message)) if isinstance(message, bytes | bytearray | memoryview) else message
        if not isinstance(update, Update):
            raise RejectedError(Reason.UNREADABLE, f"is a {type(update).__name__} and no update")
        try:
            return self._validated(update, broadcast)
        except RejectedError:
            raise
        except Exception as error:  # an object of Python may hold anything in its fields
            raise RejectedError(Reason.UNREADABLE, f"cannot be read ({type(error).__name__})") from error

    def _validated(self, update: Update, broadcast: Broadcast) -> AcceptedUpdate:
        self._check_header(update, broadcast)
        self._check_shapes(update.tensors, broadcast)
        statistics = {tensor.name for tensor in broadcast.plan.tensors if tensor.measured}
        size = norm({name: tensor for name, tensor in update.tensors.items() if name not in statistics})
        if not self.reject_by_value:
            return self._accepted(update if math.isfinite(size) else _zeroed(update), size)
        for name, tensor in update.tensors.items():
            if (name in statistics or not math.isfinite(size)) and not torch.isfinite(tensor).all():
                held = "NaN" if tensor.isnan().any() else "infinity"
                raise RejectedError(Reason.NOT_FINITE, f"{name} holds {held}")
            if name in statistics and name.endswith("running_var") and (tensor < 0).any():
                raise RejectedError(Reason.FORM, f"{name} holds a negative variance")
        return self._accepted(update, size)

    def validate_stack(
        self, stack: UpdateStack, broadcasts: Sequence[Broadcast]
    ) -> "list[AcceptedUpdate | ProtocolError]":
        """Validate a stack of updates against their broadcasts, without copying tensors.

        >>> import dbcl, torch
        >>> sketch = dbcl.SketchConfig(coverage="all", lanes=1)
        >>> broadcast = dbcl.Server(torch.nn.Linear(2, 1), sketch).open_round()
        >>> sent = {"weight": torch.tensor([[[3.0]], [[math.nan]]]), "bias": torch.tensor([[4.0], [0.0]])}
        >>> stack = UpdateStack(0, ("ann", "bob"), (broadcast.plan.digest,) * 2, sent, (6, 7), ({}, {}))
        >>> good, bad = UpdateValidator().validate_stack(stack, [broadcast] * 2)
        >>> good.norm, bad
        (5.0, RejectedError('weight holds NaN'))
        """
        norms, odd = _measure(stack, {tensor.name for tensor in broadcasts[0].plan.tensors if tensor.measured})
        checked: set[int] = set()  # broadcasts whose shapes were compared
        found: list[AcceptedUpdate | ProtocolError] = []
        for place, (broadcast, size, strange) in enumerate(zip(broadcasts, norms, odd, strict=True)):
            update = stack.at(place)
            try:
                if strange:
                    found.append(self.validate(update, broadcast))
                    continue
                self._check_header(update, broadcast)
                if id(broadcast) not in checked:
                    self._check_shapes(update.tensors, broadcast)
                    checked.add(id(broadcast))
                found.append(self._accepted(update, size))
            except ProtocolError as error:
                found.append(error)
        return found

    def _check_header(self, update: Update, broadcast: Broadcast) -> None:
        if update.round != broadcast.round:
            raise RejectedError(Reason.STALE, f"answers round {update.round}, and round {broadcast.round} is open")
        if update.plan != broadcast.plan.digest:
            raise RejectedError(Reason.STALE, "answers another plan than this round's")
        if isinstance(update.examples, bool) or not isinstance(update.examples, int):
            raise RejectedError(Reason.FORM, f"examples must be a whole number, got {update.examples!r}")
        if not self.reject_by_value:
            return
        if not 1 <= update.examples <= self.max_examples:
            raise RejectedError(
                Reason.FORM, f"examples must be between 1 and {self.max_examples}, got {update.examples}"
            )
        if len(update.metrics) > MAX_METRICS:
            raise RejectedError(Reason.FORM, f"has {len(update.metrics)} metrics, more than {MAX_METRICS}")
        for name, value in update.metrics.items():
            if not abs(value) < MAX_METRIC:
                reason = Reason.FORM if math.isfinite(value) else Reason.NOT_FINITE
                raise RejectedError(reason, f"metric {shown(name)} is {value:.4g}")

    @staticmethod
    def _check_shapes(tensors: Mapping[str, Tensor], broadcast: Broadcast) -> None:
        optional = {tensor.name for tensor in broadcast.plan.tensors if tensor.measured} - tensors.keys()
        asked = {name: tuple(sent.shape) for name, sent in broadcast.tensors.items() if name not in optional}
        problems = mismatches(asked, tensors)
        if problems:
            raise RejectedError(Reason.FORM, "; ".join(problems[:5]))
        for name, tensor in tensors.items():
            if tensor.dtype != broadcast.tensors[name].dtype:
                kind = broadcast.tensors[name].dtype
                raise RejectedError(Reason.FORM, f"{name} is {tensor.dtype}, and must be {kind}")

    def _accepted(self, update: Update, size: float) -> AcceptedUpdate:
        if not self.reject_by_value:
            size = size if math.isfinite(size) else 0.0
            weight = float(min(max(update.examples, 0), self.max_examples))
            return AcceptedUpdate(update, clip_factor(size, self.norm_bound), weight, size)
        if size > MAX_NORM:
            raise RejectedError(Reason.NOT_FINITE, f"its norm {size:.4g} is beyond {MAX_NORM:g}")
        if self.norm_bound is not None and size > self.norm_bound and not self.clip:
            raise RejectedError(Reason.NORM, f"its norm {size:.4g} is above the bound {self.norm_bound:g}")
        factor = clip_factor(size, self.norm_bound)
        return AcceptedUpdate(update, factor, float(update.examples), size * factor)


@dataclass(frozen=True)
class ValidationResult:
    """The accepted updates of a round and the rejections, by sender.

    >>> stale = Rejection(Reason.STALE, "answers round 2, and round 3 is open")
    >>> ValidationResult(3, {}, {"update 0": stale}).require(1)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3 has 0 updates and needs 1
      - update 0: answers round 2, and round 3 is open
    """

    round: int
    accepted: Mapping[str, AcceptedUpdate]
    rejected: Mapping[str, Rejection]
    influence: float = 0.0
    """Influence of the median client, a reference for later rounds."""
    stack: UpdateStack | None = None
    """The stack that holds the updates, or None."""
    lanes: tuple[int, ...] = ()
    """Number of accepted updates in each lane."""
    agreement: Mapping[str, float] = field(default_factory=dict)
    """Mean cosine of each client's update with the others; empty if not computed."""

    def require(self, count: int) -> None:
        """Raise an error if too few updates were accepted.

        Args:
            count: Minimum number of accepted updates.

        Raises:
            ProtocolError: Fewer updates were accepted. The message lists all rejections.
            DivergedError: A `ProtocolError` if all rejected updates hold non-finite values.
        """
        if len(self.accepted) >= count:
            return
        reasons = [f"{who}: {rejection}" for who, rejection in self.rejected.items()]
        needed = f"round {self.round} has {len(self.accepted)} updates and needs {count}"
        if self.rejected and all(each.reason is Reason.NOT_FINITE for each in self.rejected.values()):
            needed += ": the clients' training has diverged, so lower their learning rate or clip their updates"
            raise DivergedError("\n  - ".join([needed, *reasons]))
        raise ProtocolError("\n  - ".join([needed, *reasons]))

    def weighted(self) -> list[Weighted]:
        """Return the tensors of the accepted updates with their weights and factors."""
        return [Weighted(each.update.tensors, each.weight, each.factor) for each in self.accepted.values()]

    def stats(self) -> AggregationStats:
        """Return the statistics of these updates, for the round's report."""
        accepted = self.accepted.values()
        return AggregationStats(
            rejected=self.rejected,
            capped=tuple(who for who, each in self.accepted.items() if each.weight < each.update.examples),
            clipped=tuple(who for who, each in self.accepted.items() if each.factor != 1.0),
            examples=sum(each.update.examples for each in accepted),
            metrics=mean_metrics([(each.update.metrics, each.weight) for each in accepted]),
            influence=self.influence,
            senders=tuple(self.accepted),
            lanes=self.lanes,
            agreement=self.agreement,
        )


def split(
    found: Iterable[tuple[str, AcceptedUpdate | Exception]],
) -> tuple[dict[str, AcceptedUpdate], dict[str, Rejection]]:
    """Split validation outcomes, by sender, into accepted updates and rejections."""
    accepted: dict[str, AcceptedUpdate] = {}
    rejected: dict[str, Rejection] = {}
    for who, each in found:
        if isinstance(each, AcceptedUpdate):
            accepted[who] = each
        else:
            rejected[who] = rejection_of(each)
    return accepted, rejected


def duplicates(accepted: Mapping[str, AcceptedUpdate]) -> dict[str, Rejection]:
    """Return a rejection for each nonzero update that equals an earlier update.

    >>> import torch
    >>> same = AcceptedUpdate(Update(0, "ab", {"b": torch.ones(1)}, examples=5), 1.0, 5.0, 1.0)
    >>> {who: str(why) for who, why in duplicates({"update 0": same, "update 1": same}).items()}
    {'update 1': 'is a copy of update 0'}
    """
    first: dict[float, list[tuple[str, Update]]] = {}
    found = {}
    for who, each in accepted.items():
        alike = first.setdefault(each.norm, [])
        origin = next((other for other, update in alike if _equal(each.update, update)), None)
        if origin is not None and each.norm > 0:
            found[who] = Rejection(Reason.DUPLICATE, f"is a copy of {origin}")
        alike.append((who, each.update))
    return found


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity.

    >>> not_finite({"a": torch.zeros(2), "b": torch.tensor([math.inf])})
    ['b']
    """
    # A sum is cheap, and finite only if all values are. A sum that is not finite may just have grown too large.
    floating = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not floating:
        return []
    home = next(iter(floating.values())).device
    sums = torch.stack([tensor.sum(dtype=torch.float64).to(home) for tensor in floating.values()]).tolist()
    doubtful = [name for name, total in zip(floating, sums, strict=True) if not math.isfinite(total)]
    return [name for name in doubtful if not floating[name].isfinite().all()]


def _zeroed(update: Update) -> Update:
    return replace(update, tensors={name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()})


def _measure(stack: UpdateStack, statistics: set[str]) -> tuple[list[float], list[bool]]:
    """Return the norm of every update of a stack, and flags for updates to check individually."""
    norms, odd = stack.norms([name for name in stack.tensors if name not in statistics]), []
    for name in statistics & stack.tensors.keys():
        flat = stack.tensors[name].unsqueeze(-1).flatten(1)  # (clients, values), also for a single value
        odd.append(~flat.isfinite().all(dim=1))
        if name.endswith("running_var"):
            odd.append((flat < 0).any(dim=1))
    return norms.tolist(), torch.stack([*odd, ~norms.isfinite()]).any(dim=0).tolist()


def _equal(one: Update, other: Update) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        tensor.equal(other.tensors[name]) for name, tensor in one.tensors.items()
    )
