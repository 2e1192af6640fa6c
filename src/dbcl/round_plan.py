"""Public plan of one round: the seed, every tensor's sketch, the lane, and the frozen tensors."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from dbcl.errors import SketchError, plain, shown
from dbcl.model.layout import Layout
from dbcl.sketch import LaneSketch, Sketch, draw

CLEAR = "identity-v1"
"""Scheme of a tensor that is sent without a sketch."""
BATCHNORM_STATS = "statistics-v1"
"""Scheme of a normalisation statistic. It is not sketched, and a client reports its value instead
of a change.
"""
UNSKETCHED = (CLEAR, BATCHNORM_STATS)
MAX_LANES = 1024


@dataclass(frozen=True)
class RoundTensor:
    """A tensor in a message: its name, full shape and sketch.

    `width` is the number of buckets of the sketch and `columns` the number of its outputs, which is
    smaller if a hashed sketch has empty buckets.

    >>> tensor = RoundTensor("conv.weight", (8, 3, 5, 5), "count-v1", width=37, columns=37)
    >>> tensor.dim, tensor.sketched, tensor.sent_shape
    (75, True, (8, 37))
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    width: int
    columns: int
    inputs: tuple[int, ...] = ()
    """Axes that the sketch compresses; empty for all axes but the first."""

    @property
    def layout(self) -> Layout:
        """Layout of the tensor as a matrix."""
        return Layout(self.shape, self.inputs)

    @property
    def sketched(self) -> bool:
        return self.scheme not in UNSKETCHED

    @property
    def measured(self) -> bool:
        """Return whether the tensor is a normalisation statistic. Clients report values of
        statistics instead of changes.
        """
        return self.scheme == BATCHNORM_STATS

    @property
    def dim(self) -> int:
        """Number of inputs per output: the row length of the weight as a matrix."""
        return self.layout.dim

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in messages."""
        return (self.layout.rows, self.columns) if self.sketched else self.shape

    def fields(self) -> list[object]:
        """Return the tensor's entry in a message. The input axes are omitted if they are all axes
        but the first.
        """
        plain = [self.name, list(self.shape), self.scheme, self.width, self.columns]
        return [*plain, list(self.inputs)] if self.inputs else plain

    def draw(self, seed: bytes, round: int, lane: int = 0, lanes: int = 1) -> Sketch:
        """Draw the tensor's sketch for one lane of a round."""
        sketch = draw(self.scheme, self.dim, self.width, seed=seed, round=round, name=self.name, lane=lane, lanes=lanes)
        if sketch.width != self.columns:
            raise SketchError(
                f"{plain(self.name, 100)}: the sketch has {sketch.width} columns, and the plan says {self.columns}"
            )
        return sketch


@dataclass(frozen=True)
class RoundPlan:
    """Public plan of one round: the seed and every tensor's sketch. The broadcast contains the
    whole plan.

    >>> tensors = RoundTensor("fc.weight", (2, 6), "count-v1", 3, 3), RoundTensor("fc.bias", (2,), CLEAR, 1, 1)
    >>> RoundPlan(0, bytes(32), tensors).sketches
    {'fc.weight': CountSketch(6 -> 3)}
    """

    round: int
    seed: bytes
    tensors: tuple[RoundTensor, ...]
    frozen: tuple[tuple[str, str], ...] = ()
    """Name and fingerprint of every frozen parameter. A client must hold the same values."""
    lane: int = 0
    """Index of this plan's lane among the `lanes` of the round."""
    lanes: int = 1

    @cached_property
    def sketches(self) -> dict[str, Sketch]:
        """Sketch of every sketched tensor, by name."""
        where = self.seed, self.round, self.lane, self.lanes
        return {tensor.name: tensor.draw(*where) for tensor in self.tensors if tensor.sketched}

    def in_lane(self, lane: int) -> "RoundPlan":
        """Return the plan of another lane of the same round. Both plans share the buckets and the
        random draws.

        >>> tensors = (RoundTensor("fc.weight", (2, 6), "lanes-v1", 3, 3),)
        >>> RoundPlan(0, bytes(32), tensors, lanes=2).in_lane(1).sketches
        {'fc.weight': LaneSketch(6 -> 3, lane 1 of 2)}
        """
        plan = replace(self, lane=lane)
        sketches = self.sketches.items()
        vars(plan)["sketches"] = {n: s.in_lane(lane) if isinstance(s, LaneSketch) else s for n, s in sketches}
        return plan

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the plan. The server rejects updates that carry another plan's digest."""
        settled: list[object] = [self.round, self.seed.hex(), [tensor.fields() for tensor in self.tensors]]
        settled += [self.frozen] if self.frozen else []
        settled += [{"lane": self.lane, "lanes": self.lanes}] if self.lanes > 1 else []
        return hashlib.sha256(json.dumps(settled).encode()).hexdigest()


def mismatches(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor]) -> list[str]:
    """Return the differences between expected and given tensors in names and shapes.

    >>> import torch
    >>> mismatches({"a": (2,), "b": (3, 4)}, {"b": torch.zeros(4, 3), "c": torch.zeros(1)})
    ['a is missing', "'c' was not asked for", 'b has shape (4, 3) and must have (3, 4)']
    """
    problems = [f"{plain(name, 100)} is missing" for name in expected if name not in found]
    problems += [f"{shown(name)} was not asked for" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"{plain(name, 100)} has shape {tuple(found[name].shape)} and must have {shape}")
    return problems
