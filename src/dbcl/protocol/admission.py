"""The door: what an update must be to get in, and what an aggregate must be before the server steps on it."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dbcl.errors import ProtocolError, shown
from dbcl.privacy import clip_factor, norm
from dbcl.protocol.aggregation import Aggregate, Weighted, mean_metrics
from dbcl.protocol.codec import MAX_METRIC, MAX_METRICS, decode_update
from dbcl.protocol.messages import Broadcast, Tally, Update, UpdateStack
from dbcl.round_plan import mismatches

ENOUGH = 3
"""Of so many clients, or of so many rounds, the median cannot be what one of them wants."""
MAX_LENGTH = 1e18
"""An update this long would carry float32 weights out of their range, and every other client's with them."""


@dataclass(frozen=True)
class Door:
    """What an update must be to get in.

    `norm_bound` limits the length of an update, all its tensors together (the lift keeps lengths, so it is the length
    of the change of W too); a longer one is shortened to it, or refused where `clip` is False.

    `max_influence` bounds what one client can do in a round, whatever it sends: its examples count for no more than so
    many times the round's median, and it pulls on the average (its weight times its length) no more than so many times
    the median client, or where there are fewer than three clients, the median of the last rounds. None takes every
    update as it is.

    `max_times_median` is for clients whose training diverges: an update that is longer than so many times the median
    of its lane's is refused, where the lane has three or more (in small layers honest lanes differ by far). One with
    more examples than the median client takes more steps, and may be as many times longer. None refuses none for its
    length.

    With `reject_by_value=False`, as under a guarantee, nothing in an update's values decides whether it counts: values
    that are not finite make it a zero update, any number of examples is taken, and only its form can be wrong (round,
    plan, names, shapes, dtypes), which does not depend on data.

    >>> Door(min_updates=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: min_updates must be 1 or more, got 0
    """

    min_updates: int = 1
    norm_bound: float | None = None
    clip: bool = True
    max_examples: int = 10_000_000
    max_influence: float | None = 1.5
    max_times_median: float | None = 10.0
    reject_by_value: bool = True

    def __post_init__(self) -> None:
        if self.min_updates < 1:
            raise ProtocolError(f"min_updates must be 1 or more, got {self.min_updates}")
        if self.norm_bound is not None and not (math.isfinite(self.norm_bound) and self.norm_bound > 0):
            raise ProtocolError(f"norm_bound must be above 0, got {self.norm_bound}")
        if self.max_examples < 1:
            raise ProtocolError(f"max_examples must be 1 or more, got {self.max_examples}")
        if self.max_influence is not None and not self.max_influence >= 1:
            raise ProtocolError(f"max_influence must be 1 or more, got {self.max_influence}")
        if self.max_times_median is not None and not self.max_times_median >= 1:
            raise ProtocolError(f"max_times_median must be 1 or more, got {self.max_times_median}")

    def __str__(self) -> str:
        """What the door does, in a sentence."""
        said = [f"{self.min_updates} update{'s' * (self.min_updates > 1)} or more"]
        if self.norm_bound is not None:
            said.append(f"updates {'shortened to' if self.clip else 'at most'} {self.norm_bound:g} long")
        if self.max_influence is not None:
            said.append(f"no client counts or pulls more than {self.max_influence:g} times the median one")
        if self.max_times_median is not None:
            said.append(f"none longer than {self.max_times_median:g} times the median")
        return "; ".join(said)

    def admit(self, message: Update | bytes, broadcast: Broadcast) -> "Admitted":
        """Check one update to a broadcast; raises `ProtocolError` with the reason where it must be refused."""
        update = decode_update(bytes(message)) if isinstance(message, bytes | bytearray | memoryview) else message
        if not isinstance(update, Update):
            raise ProtocolError(f"is a {type(update).__name__} and no update")
        self._check_header(update, broadcast)
        self._check_shapes(update.tensors, broadcast)
        measured = {tensor.name for tensor in broadcast.plan.tensors if tensor.measured}
        length = norm({name: tensor for name, tensor in update.tensors.items() if name not in measured})
        if not self.reject_by_value:
            return self._with_length(update if math.isfinite(length) else _zeroed(update), length)
        for name, tensor in update.tensors.items():
            if (name in measured or not math.isfinite(length)) and not torch.isfinite(tensor).all():
                raise ProtocolError(f"{name} holds {'NaN' if tensor.isnan().any() else 'infinity'}")
            if name in measured and name.endswith("running_var") and (tensor < 0).any():
                raise ProtocolError(f"{name} holds a negative variance")
        return self._with_length(update, length)

    def admit_stack(self, stack: UpdateStack, broadcasts: Sequence[Broadcast]) -> "list[Admitted | ProtocolError]":
        """`admit` for a stack of updates, each to its broadcast: what was admitted, or why it was refused.

        The tensors are looked at where they lie and all at once; only an update with something odd is looked at alone.

        >>> import dbcl, torch
        >>> broadcast = dbcl.Server(torch.nn.Linear(2, 1), cover="all", ratio=2, lanes=1).open_round()
        >>> sent = {"weight": torch.tensor([[[3.0]], [[math.nan]]]), "bias": torch.tensor([[4.0], [0.0]])}
        >>> stack = UpdateStack(0, ("ann", "bob"), (broadcast.plan.digest,) * 2, sent, (6, 7), ({}, {}))
        >>> good, bad = Door().admit_stack(stack, [broadcast] * 2)
        >>> good.length, bad
        (5.0, ProtocolError('weight holds NaN'))
        """
        lengths, odd = _measure(stack, {tensor.name for tensor in broadcasts[0].plan.tensors if tensor.measured})
        checked: set[int] = set()  # of which broadcasts the shapes were compared
        found: list[Admitted | ProtocolError] = []
        for place, (broadcast, length, strange) in enumerate(zip(broadcasts, lengths, odd, strict=True)):
            update = stack.at(place)
            try:
                if strange:
                    found.append(self.admit(update, broadcast))
                    continue
                self._check_header(update, broadcast)
                if id(broadcast) not in checked:
                    self._check_shapes(update.tensors, broadcast)
                    checked.add(id(broadcast))
                found.append(self._with_length(update, length))
            except ProtocolError as error:
                found.append(error)
        return found

    def _check_header(self, update: Update, broadcast: Broadcast) -> None:
        if update.round != broadcast.round:
            raise ProtocolError(f"answers round {update.round}, and round {broadcast.round} is open")
        if update.plan != broadcast.plan.digest:
            raise ProtocolError("answers another plan than this round's")
        if isinstance(update.examples, bool) or not isinstance(update.examples, int):
            raise ProtocolError(f"examples must be a whole number, got {update.examples!r}")
        if not self.reject_by_value:
            return
        if not 1 <= update.examples <= self.max_examples:
            raise ProtocolError(f"examples must be between 1 and {self.max_examples}, got {update.examples}")
        if len(update.metrics) > MAX_METRICS:
            raise ProtocolError(f"has {len(update.metrics)} metrics, and {MAX_METRICS} are the most")
        for name, value in update.metrics.items():
            if not abs(value) < MAX_METRIC:
                raise ProtocolError(f"metric {shown(name)} is {value:.4g}")

    @staticmethod
    def _check_shapes(tensors: Mapping[str, Tensor], broadcast: Broadcast) -> None:
        measured = {tensor.name for tensor in broadcast.plan.tensors if tensor.measured}
        asked = {
            name: tuple(sent.shape)
            for name, sent in broadcast.tensors.items()
            if name in tensors or name not in measured
        }
        problems = mismatches(asked, tensors)
        if problems:
            raise ProtocolError("; ".join(problems[:5]))
        for name, tensor in tensors.items():
            if tensor.dtype != broadcast.tensors[name].dtype:
                raise ProtocolError(f"{name} is {tensor.dtype}, and {broadcast.tensors[name].dtype} was sent")

    def _with_length(self, update: Update, length: float) -> "Admitted":
        if not self.reject_by_value:
            length = length if math.isfinite(length) else 0.0
            weight = float(min(max(update.examples, 0), self.max_examples))
            return Admitted(update, clip_factor(length, self.norm_bound), weight, length)
        if length > MAX_LENGTH:
            raise ProtocolError(f"its length {length:.4g} is absurd (above {MAX_LENGTH:g})")
        if self.norm_bound is not None and length > self.norm_bound and not self.clip:
            raise ProtocolError(f"its length {length:.4g} is above the bound {self.norm_bound:g}")
        factor = clip_factor(length, self.norm_bound)
        return Admitted(update, factor, float(update.examples), length * factor)

    def outliers(self, accepted: Mapping[str, "Admitted"]) -> dict[str, str]:
        """Those updates that are too long beside the others, and why.

        >>> def sent(length):
        ...     return Admitted(Update(0, "ab", {}, examples=10), 1.0, 10.0, length)
        >>> Door().outliers({"ann": sent(1.0), "bob": sent(1.2), "cleo": sent(31.0)})
        {'cleo': "its length 31 is 26 times its lane's median: its training has diverged, or it means harm"}
        """
        found: dict[str, str] = {}
        if self.max_times_median is None:
            return found
        lanes: dict[str, dict[str, Admitted]] = {}
        for who, each in accepted.items():
            lanes.setdefault(each.update.plan, {})[who] = each
        for lane in lanes.values():
            middle = statistics.median(each.length for each in lane.values())
            usual = statistics.median(each.weight for each in lane.values())
            for who, each in lane.items() if len(lane) >= ENOUGH else ():
                if each.length > self.max_times_median * middle * max(1.0, each.weight / usual) > 0:
                    times = f"its length {each.length:.4g} is {each.length / middle:.0f} times its lane's median"
                    found[who] = f"{times}: its training has diverged, or it means harm"
        return found

    def balance(
        self, accepted: Mapping[str, "Admitted"], recent: Sequence[float]
    ) -> "tuple[dict[str, Admitted], float]":
        """Bound every client's influence; `recent` are the pulls of the last rounds. Also gives the pull of this one.

        A pull is the median over the clients of weight times length, with the median weight as 1.

        >>> import torch
        >>> def sent(size, examples):
        ...     return Admitted(Update(0, "ab", {"b": torch.tensor([size])}, examples), 1.0, float(examples), abs(size))
        >>> honest = {f"client {number}": sent(1.0, 10) for number in range(3)}
        >>> made, pull = Door().balance({**honest, "greedy": sent(-1e6, 10**6)}, [])
        >>> made["greedy"].weight, made["greedy"].factor, pull
        (15.0, 1e-06, 1.0)
        """
        if not accepted or self.max_influence is None:
            return dict(accepted), 0.0
        middle = statistics.median(each.weight for each in accepted.values())
        most = self.max_influence * middle
        capped = {w: each if each.weight <= most else replace(each, weight=most) for w, each in accepted.items()}
        pull = statistics.median(each.weight / middle * each.length for each in capped.values())
        usual = pull if len(capped) >= ENOUGH else statistics.median(recent) if len(recent) >= ENOUGH else 0.0
        if usual <= 0:  # nobody moves, or nothing is known yet
            return capped, pull
        made = {}
        for who, each in capped.items():
            bound = self.max_influence * usual * middle / each.weight
            factor = clip_factor(each.length, bound)
            made[who] = each
            if factor < 1.0:
                made[who] = replace(each, factor=each.factor * factor, length=each.length * factor)
        return made, pull

    def problems(self, aggregate: Aggregate, changes: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with an aggregate, as far as that can be told without any single update.

        `changes` is its mean as a change of the weights.
        """
        problems = [f"{name} is not finite" for name in not_finite(changes)]
        if aggregate.count < self.min_updates:
            problems.append(f"it is made of {aggregate.count} updates and {self.min_updates} are needed")
        return problems


def _zeroed(update: Update) -> Update:
    return replace(update, tensors={name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()})


def _measure(stack: UpdateStack, measured: set[str]) -> tuple[list[float], list[bool]]:
    """The length of every update of a stack, and whether it holds anything that a closer look would refuse."""
    lengths, odd = stack.lengths([name for name in stack.tensors if name not in measured]), []
    for name in measured & stack.tensors.keys():
        flat = stack.tensors[name].unsqueeze(-1).flatten(1)  # (clients, numbers), of a single number too
        odd.append(~flat.isfinite().all(dim=1))
        if name.endswith("running_var"):
            odd.append((flat < 0).any(dim=1))
    return lengths.tolist(), torch.stack([*odd, ~lengths.isfinite()]).any(dim=0).tolist()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those tensors that hold NaN or infinity.

    >>> not_finite({"a": torch.zeros(2), "b": torch.tensor([math.inf])})
    ['b']
    """
    # A sum is cheap, and finite only where all numbers are; where it is not, it may just have grown too large.
    numbers = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not numbers:
        return []
    home = next(iter(numbers.values())).device
    sums = torch.stack([tensor.sum(dtype=torch.float64).to(home) for tensor in numbers.values()]).tolist()
    doubtful = [name for name, total in zip(numbers, sums, strict=True) if not math.isfinite(total)]
    return [name for name in doubtful if not numbers[name].isfinite().all()]


def copies(accepted: Mapping[str, "Admitted"]) -> dict[str, str]:
    """Those updates that are number for number the same as an earlier one, and which; one that changes nothing is none.

    >>> import torch
    >>> same = Admitted(Update(0, "ab", {"b": torch.ones(1)}, examples=5), 1.0, 5.0, 1.0)
    >>> copies({"update 0": same, "update 1": same})
    {'update 1': 'is a copy of update 0'}
    """
    first: dict[float, list[tuple[str, Update]]] = {}
    found = {}
    for who, each in accepted.items():
        alike = first.setdefault(each.length, [])
        origin = next((other for other, update in alike if _equal(each.update, update)), None)
        if origin is not None and each.length > 0:
            found[who] = f"is a copy of {origin}"
        alike.append((who, each.update))
    return found


def _equal(one: Update, other: Update) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        tensor.equal(other.tensors[name]) for name, tensor in one.tensors.items()
    )


@dataclass(frozen=True)
class Admitted:
    """An update that passed the door, the factor that shortens it, what it counts for, and its length with that."""

    update: Update
    factor: float
    weight: float
    length: float


@dataclass(frozen=True)
class Admission:
    """The updates to a round by who sent them: those that passed the door, and why the others did not.

    >>> Admission(3, {}, {"update 0": "answers round 2, and round 3 is open"}).require(1)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3 has 0 updates and needs 1
      - update 0: answers round 2, and round 3 is open
    """

    round: int
    accepted: Mapping[str, Admitted]
    refused: Mapping[str, str]
    pull: float = 0.0
    """The median client's pull on the average: what later rounds are measured by."""
    stack: UpdateStack | None = None
    """The stack that the updates came in, if they did."""
    lanes: tuple[int, ...] = ()
    """How many were accepted in each lane."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Who was refused, and why."""
        return tuple(f"{who}: {reason}" for who, reason in self.refused.items())

    def require(self, count: int) -> None:
        """Complain, with all the reasons, where fewer than `count` updates were accepted."""
        if len(self.accepted) < count:
            needed = f"round {self.round} has {len(self.accepted)} updates and needs {count}"
            error = ProtocolError("\n  - ".join([needed, *self.reasons]))
            if diverged(error):
                needed += ": the clients' training has diverged, so lower their learning rate or clip their updates"
            raise ProtocolError("\n  - ".join([needed, *self.reasons]))

    def weighted(self) -> list[Weighted]:
        """The accepted updates, each with its weight and the factor that shortens it."""
        return [Weighted(each.update.tensors, each.weight, each.factor) for each in self.accepted.values()]

    def tally(self) -> Tally:
        """What the round's report says of these updates."""
        accepted = self.accepted.values()
        return Tally(
            refused=self.reasons,
            clipped=sum(each.factor != 1.0 or each.weight < each.update.examples for each in accepted),
            examples=sum(each.update.examples for each in accepted),
            metrics=mean_metrics([(each.update.metrics, each.weight) for each in accepted]),
            pull=self.pull,
            senders=tuple(self.accepted),
            lanes=self.lanes,
        )


NOT_FINITE = re.compile(
    r"metric .+ is (nan|-?inf)|'metrics' cannot be .*\b(nan|inf)\b|holds (NaN|infinity)|its length .+ is absurd"
    r"|is not finite|leaves the range of the weights"
)
"""Reasons of the door that only numbers without bound, or beyond a number type's range, can cause."""


def diverged(error: ProtocolError) -> bool:
    """Whether a round failed because of numbers that are no longer finite, and for no other reason.

    >>> diverged(ProtocolError("round 0 has 0 updates and needs 1\\n  - update 0: metric loss is nan"))
    True
    >>> diverged(ProtocolError("round 0 has 0 updates and needs 1\\n  - update 0: answers round 1, not round 0"))
    False
    """
    reasons = str(error).split("\n  - ")[1:]
    return bool(reasons) and all(NOT_FINITE.search(reason) for reason in reasons)
