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
"""Scheme of a tensor that is not sketched."""
BATCHNORM_STATS = "statistics-v1"
"""Scheme of a normalisation statistic: not sketched, and a client reports a value and not a change."""
UNSKETCHED = (CLEAR, BATCHNORM_STATS)
MAX_LANES = 1024


@dataclass(frozen=True)
class RoundTensor:
    """Tensor of a message: its name, its full shape, and its sketch.

    `width` is what the sketch is drawn with and `columns` how many columns come out of it: as many, or fewer where a
    hashed sketch has empty buckets.

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
    """The axes that the sketch acts on; all but the first where it is empty."""

    @property
    def layout(self) -> Layout:
        """The tensor as a matrix."""
        return Layout(self.shape, self.inputs)

    @property
    def sketched(self) -> bool:
        return self.scheme not in UNSKETCHED

    @property
    def measured(self) -> bool:
        """Return whether it is a normalisation statistic, of which clients report values and not changes."""
        return self.scheme == BATCHNORM_STATS

    @property
    def dim(self) -> int:
        """Number of inputs of one output: the length of a row of the weight as a matrix."""
        return self.layout.dim

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in messages."""
        return (self.layout.rows, self.columns) if self.sketched else self.shape

    def fields(self) -> list[object]:
        """Return the tensor's entry in a message; the axes of its inputs only if they are not all but the first."""
        plain = [self.name, list(self.shape), self.scheme, self.width, self.columns]
        return [*plain, list(self.inputs)] if self.inputs else plain

    def draw(self, seed: bytes, round: int, lane: int = 0, lanes: int = 1) -> Sketch:
        """Draw this tensor's sketch for a round, in one of its lanes."""
        sketch = draw(self.scheme, self.dim, self.width, seed=seed, round=round, name=self.name, lane=lane, lanes=lanes)
        if sketch.width != self.columns:
            raise SketchError(
                f"{plain(self.name, 100)}: the sketch has {sketch.width} columns, and the plan says {self.columns}"
            )
        return sketch


@dataclass(frozen=True)
class RoundPlan:
    """Public plan of one round: the seed and every tensor's sketch. All of it is sent to the clients.

    >>> tensors = RoundTensor("fc.weight", (2, 6), "count-v1", 3, 3), RoundTensor("fc.bias", (2,), CLEAR, 1, 1)
    >>> RoundPlan(0, bytes(32), tensors).sketches
    {'fc.weight': CountSketch(6 -> 3)}
    """

    round: int
    seed: bytes
    tensors: tuple[RoundTensor, ...]
    frozen: tuple[tuple[str, str], ...] = ()
    """Name and fingerprint of every parameter that is not trained; a client must have the same."""
    lane: int = 0
    """Number of the lane, of those of the round."""
    lanes: int = 1

    @cached_property
    def sketches(self) -> dict[str, Sketch]:
        """The sketch of every covered tensor, by name."""
        where = self.seed, self.round, self.lane, self.lanes
        return {tensor.name: tensor.draw(*where) for tensor in self.tensors if tensor.sketched}

    def in_lane(self, lane: int) -> "RoundPlan":
        """Return the plan of another lane of the same round and the same buckets, without drawing anything again.

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
        """Digest of the plan; an update to another plan is rejected by it."""
        settled: list[object] = [self.round, self.seed.hex(), [tensor.fields() for tensor in self.tensors]]
        settled += [self.frozen] if self.frozen else []
        settled += [{"lane": self.lane, "lanes": self.lanes}] if self.lanes > 1 else []
        return hashlib.sha256(json.dumps(settled).encode()).hexdigest()


def mismatches(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor]) -> list[str]:
    """Return the differences between the expected names and shapes of tensors and the given ones.

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
