"""The door: what an update must be to get in, and what an aggregate must be before the server steps on it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dbcl.errors import ProtocolError
from dbcl.privacy import clip_factor, norm
from dbcl.protocol.aggregation import Aggregate, Weighted, mean_metrics
from dbcl.protocol.codec import decode_update
from dbcl.protocol.messages import Broadcast, Tally, Update
from dbcl.round_plan import mismatches

MAX_LENGTH = 1e18
"""An update this long would carry float32 weights out of their range, and every other client's with them."""


@dataclass(frozen=True)
class Door:
    """What an update must be to get in.

    `norm_bound` limits the length of an update, all its tensors together (the lift keeps lengths, so it is the length
    of the change of W too); a longer one is shortened to it, or refused where `clip` is False.

    >>> Door(min_updates=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: min_updates must be 1 or more, got 0
    """

    min_updates: int = 1
    norm_bound: float | None = None
    clip: bool = True
    max_examples: int = 10_000_000

    def __post_init__(self) -> None:
        if self.min_updates < 1:
            raise ProtocolError(f"min_updates must be 1 or more, got {self.min_updates}")
        if self.norm_bound is not None and not (math.isfinite(self.norm_bound) and self.norm_bound > 0):
            raise ProtocolError(f"norm_bound must be above 0, got {self.norm_bound}")
        if self.max_examples < 1:
            raise ProtocolError(f"max_examples must be 1 or more, got {self.max_examples}")

    def admit(self, message: Update | bytes, broadcast: Broadcast) -> "Admitted":
        """Check one update to a broadcast; raises `ProtocolError` with the reason where it must be refused."""
        update = decode_update(bytes(message)) if isinstance(message, bytes | bytearray | memoryview) else message
        if not isinstance(update, Update):
            raise ProtocolError(f"is a {type(update).__name__} and no update")
        if update.round != broadcast.round:
            raise ProtocolError(f"answers round {update.round}, and round {broadcast.round} is open")
        if update.plan != broadcast.plan.digest:
            raise ProtocolError("answers another plan than this round's")
        if isinstance(update.examples, bool) or not isinstance(update.examples, int):
            raise ProtocolError(f"examples must be a whole number, got {update.examples!r}")
        if not 1 <= update.examples <= self.max_examples:
            raise ProtocolError(f"examples must be between 1 and {self.max_examples}, got {update.examples}")
        for name, value in update.metrics.items():
            if not math.isfinite(value):
                raise ProtocolError(f"metric {name} is {value}")
        statistics = {tensor.name for tensor in broadcast.plan.tensors if tensor.measured}
        asked = {
            name: tuple(sent.shape)
            for name, sent in broadcast.tensors.items()
            if name in update.tensors or name not in statistics
        }
        problems = mismatches(asked, update.tensors)
        if problems:
            raise ProtocolError("; ".join(problems[:5]))
        for name, tensor in update.tensors.items():
            if tensor.dtype != broadcast.tensors[name].dtype:
                raise ProtocolError(f"{name} is {tensor.dtype}, and {broadcast.tensors[name].dtype} was sent")
        length = norm({name: tensor for name, tensor in update.tensors.items() if name not in statistics})
        for name, tensor in update.tensors.items():
            if (name in statistics or not math.isfinite(length)) and not torch.isfinite(tensor).all():
                raise ProtocolError(f"{name} holds {'NaN' if tensor.isnan().any() else 'infinity'}")
            if name in statistics and name.endswith("running_var") and (tensor < 0).any():
                raise ProtocolError(f"{name} holds a negative variance")
        if length > MAX_LENGTH:
            raise ProtocolError(f"its length {length:.4g} is absurd (above {MAX_LENGTH:g})")
        if self.norm_bound is not None and length > self.norm_bound and not self.clip:
            raise ProtocolError(f"its length {length:.4g} is above the bound {self.norm_bound:g}")
        return Admitted(update, clip_factor(length, self.norm_bound))

    def problems(self, aggregate: Aggregate, changes: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with an aggregate, as far as that can be told without any single update.

        `changes` is its mean as a change of the weights, and `made` the weights with it: they must stay finite.
        """
        problems = []
        if aggregate.count < self.min_updates:
            problems.append(f"it is made of {aggregate.count} updates and {self.min_updates} are needed")
        for name, change in changes.items():
            if not torch.isfinite(made[name]).all():
                reason = "is not finite" if not change.isfinite().all() else "leaves the range of the weights' dtype"
                problems.append(f"{name} {reason}")
        return problems


@dataclass(frozen=True)
class Admitted:
    """An update that passed the door, and the factor that clips it (1 where it was short enough)."""

    update: Update
    factor: float


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
        """The accepted updates, clipped, each with its number of examples as its weight."""
        return [Weighted(each.update.tensors, each.update.examples, each.factor) for each in self.accepted.values()]

    def tally(self) -> Tally:
        """What the round's report says of these updates."""
        updates = [each.update for each in self.accepted.values()]
        return Tally(
            refused=self.reasons,
            clipped=sum(each.factor != 1.0 for each in self.accepted.values()),
            examples=sum(update.examples for update in updates),
            metrics=mean_metrics([(update.metrics, update.examples) for update in updates]),
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
