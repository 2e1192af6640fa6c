"""The door that every update comes through, the average of what passes, and the step on the true weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbcl.errors import ProtocolError
from dbcl.protocol.codec import decode_update
from dbcl.protocol.messages import Broadcast, Update, mismatches

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

    def admit(self, answer: Update | bytes, broadcast: Broadcast) -> "Admitted":
        """Check one answer to a broadcast; raises `ProtocolError` with the reason where it must be refused."""
        update = decode_update(bytes(answer)) if isinstance(answer, bytes | bytearray | memoryview) else answer
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
        problems = mismatches({name: tuple(sent.shape) for name, sent in broadcast.tensors.items()}, update.tensors)
        if problems:
            raise ProtocolError("; ".join(problems[:5]))
        for name, tensor in update.tensors.items():
            if tensor.dtype != broadcast.tensors[name].dtype:
                raise ProtocolError(f"{name} is {tensor.dtype}, and {broadcast.tensors[name].dtype} was sent")
        length = norm(update.tensors)
        if not math.isfinite(length):
            for name, tensor in update.tensors.items():
                if not torch.isfinite(tensor).all():
                    raise ProtocolError(f"{name} holds {'NaN' if tensor.isnan().any() else 'infinity'}")
        if length > MAX_LENGTH:
            raise ProtocolError(f"its length {length:.4g} is absurd (above {MAX_LENGTH:g})")
        scale = 1.0
        if self.norm_bound is not None and length > self.norm_bound:
            if not self.clip:
                raise ProtocolError(f"its length {length:.4g} is above the bound {self.norm_bound:g}")
            scale = self.norm_bound / length
        return Admitted(update, scale)


@dataclass(frozen=True)
class Admitted:
    """An update that passed the door, and what its length is to be multiplied by (1 unless it was clipped)."""

    update: Update
    scale: float


@dataclass(frozen=True)
class Admission:
    """The answers to a round by who sent them: those that passed the door, and why the others did not.

    >>> Admission(3, {}, {"update 0": "bias holds NaN"}).require(1)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3 has 0 updates and needs 1
      - update 0: bias holds NaN
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
            raise ProtocolError("\n  - ".join([needed, *self.reasons]))


def average(admitted: Sequence[Admitted], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of the updates, each weighted by its examples, still in the sketched space.

    The sums have the dtype and device of `like`, which are the true weights'.

    >>> one = Update(0, "", {"b": torch.tensor([1.0])}, examples=1)
    >>> three = Update(0, "", {"b": torch.tensor([5.0])}, examples=3)
    >>> average([Admitted(one, 1.0), Admitted(three, 1.0)], {"b": torch.zeros(1)})
    {'b': tensor([4.])}
    """
    total = sum(each.update.examples for each in admitted)
    mean = {}
    for name, weight in like.items():
        first, *rest = ((each.update.tensors[name].to(weight), each) for each in admitted)
        result = first[0] * (first[1].scale * first[1].update.examples / total)
        for tensor, each in rest:
            result.add_(tensor, alpha=each.scale * each.update.examples / total)
        mean[name] = result
    return mean


def average_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """The clients' metrics, weighted by examples; one that only some clients report is the mean over those."""
    names = {name: None for update in updates for name in update.metrics}
    means = {}
    for name in names:
        having = [update for update in updates if name in update.metrics]
        total = sum(update.examples for update in having)
        means[name] = sum(update.metrics[name] * update.examples for update in having) / total
    return means


def norm(tensors: Mapping[str, Tensor]) -> float:
    """The length of all tensors together.

    >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    lengths = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    return float(torch.linalg.vector_norm(torch.stack(lengths))) if lengths else 0.0
