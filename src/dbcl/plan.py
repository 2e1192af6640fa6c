"""Which tensor of a model gets which sketch and how much veil, and what is left in clear."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor, nn

from dbcl import seeds
from dbcl.cover import Cover, broadcast_tensors, covered_names, without_shape
from dbcl.errors import PlanError, SketchError
from dbcl.sketch import SCHEMES, Sketch, draw

CLEAR = "identity-v1"
"""The scheme of a tensor that is not sketched."""

Ratio = float | tuple[float, float]


@dataclass(frozen=True)
class RoundTensor:
    """One tensor of a message: its name, its full shape, and the sketch it is sent through.

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

    @property
    def sketched(self) -> bool:
        return self.scheme != CLEAR

    @property
    def dim(self) -> int:
        """How many inputs one output has: the length of a row of the weight as a matrix, output first."""
        return math.prod(self.shape[1:])

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of the tensor as it travels."""
        return (self.shape[0], self.columns) if self.sketched else self.shape

    def draw(self, seed: bytes, round: int) -> Sketch:
        """Draw this tensor's sketch for a round."""
        sketch = draw(self.scheme, self.dim, self.width, seed=seed, round=round, name=self.name)
        if sketch.width != self.columns:
            raise SketchError(f"{self.name}: the sketch has {sketch.width} columns, and the plan says {self.columns}")
        return sketch


@dataclass(frozen=True)
class RoundPlan:
    """What is fixed for one round: the seed and every tensor's sketch. All of it is sent to the clients.

    >>> tensors = RoundTensor("fc.weight", (2, 6), "count-v1", 3, 3), RoundTensor("fc.bias", (2,), CLEAR, 1, 1)
    >>> RoundPlan(0, bytes(32), tensors).sketches
    {'fc.weight': CountSketch(6 -> 3)}
    """

    round: int
    seed: bytes
    tensors: tuple[RoundTensor, ...]

    @cached_property
    def sketches(self) -> dict[str, Sketch]:
        """The sketch of every covered tensor, by name."""
        return {tensor.name: tensor.draw(self.seed, self.round) for tensor in self.tensors if tensor.sketched}

    @cached_property
    def digest(self) -> str:
        """A name for this plan; an answer to another plan is refused by it."""
        text = json.dumps([self.round, self.seed.hex(), [dataclasses.astuple(tensor) for tensor in self.tensors]])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TensorPlan:
    """One tensor's two independent choices: its sketch (with the range of its ratio) and its veil."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    ratio: tuple[float, float]
    veil: float

    @property
    def sketched(self) -> bool:
        return self.scheme != CLEAR

    @property
    def in_clear(self) -> bool:
        """Nothing hides this tensor: neither a sketch nor a veil."""
        return not self.sketched and self.veil == 0

    @property
    def dim(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def widths(self) -> tuple[int, int]:
        """The smallest and the largest width that a round may draw."""
        low, high = self.ratio
        return (int(self.dim / high), int(self.dim / low)) if self.sketched else (self.dim, self.dim)

    def problems(self) -> Iterator[str]:
        """Say what is wrong with these choices."""
        if not (math.isfinite(self.veil) and self.veil >= 0):
            yield f"{self.name}: veil must be 0 or more, got {self.veil}"
        if self.scheme not in SCHEMES:
            yield f"{self.name}: unknown sketch {self.scheme!r}; choose one of {', '.join(SCHEMES)}"
        elif self.sketched:
            low, high = self.ratio
            if not (math.isfinite(high) and 1 < low <= high):
                yield f"{self.name}: ratio must be above 1 (and a range must rise), got {_span(low, high)}"
                return
            for width in set(self.widths):
                if not 1 <= width < self.dim:
                    bounds = f"between 1 and {self.dim - 1} (its inputs less one)"
                    remedy = f"choose another ratio, or leave it out with '!{self.name}' in cover"
                    yield f"{self.name}: width must be {bounds}, got {width}; {remedy}"

    def draw(self, seed: bytes, round: int) -> tuple[RoundTensor, Sketch]:
        """Settle the width of one round, and draw the sketch that has it."""
        low, high = self.widths
        width = low
        if low < high:
            width += int(seeds.words(seed, "width-v1", round, self.name, n=1)[0] % (high - low + 1))
        sketch = draw(self.scheme, self.dim, width, seed=seed, round=round, name=self.name)
        return RoundTensor(self.name, self.shape, self.scheme, width, sketch.width), sketch

    def row(self) -> tuple[str, str, str, str, str]:
        """This tensor as a row of the plan's table."""
        low, high = self.widths
        seen = f"{_span(low, high)} of {self.dim} numbers of each row" if self.sketched else "every number"
        veil = f"{self.veil:g}" if self.veil else "none"
        return self.name, "x".join(map(str, self.shape)), self.scheme if self.sketched else "none", seen, veil


@dataclass(frozen=True)
class SketchPlan:
    """For every tensor that leaves the server: how it is sketched and how it is veiled.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(SketchPlan.of(model, veil=0))
    tensor    shape  sketch    a client sees               veil
    0.weight  4x8    count-v1  4 of 8 numbers of each row  none
    0.bias    4      none      every number                none
    2.weight  2x4    none      every number                none
    2.bias    2      none      every number                none
    in clear: 0.bias, 2.weight, 2.bias
    sketched without a veil, so a client that remembers can undo it: 0.weight
    """

    tensors: tuple[TensorPlan, ...]

    def __post_init__(self) -> None:
        _refuse([problem for tensor in self.tensors for problem in tensor.problems()])

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        cover: Cover = "hidden",
        ratio: Ratio = 2,
        veil: float = 0.2,
        sketch: str = "count-v1",
    ) -> "SketchPlan":
        """Plan a model.

        `cover` says what is sketched: "hidden" (the paper's choice: every dense and convolutional layer but the one
        that the model registers last), "all", or name patterns such as ["encoder.*", "!encoder.embed.*"]. `ratio` is
        how many times narrower a compact weight is, or a range from which each round's width is drawn. `veil` is the
        size of the secret noise on everything that leaves the server, relative to the size of the weights; 0 is the
        paper.
        """
        _refuse(without_shape(model))
        shapes = {name: tuple(tensor.shape) for name, tensor in broadcast_tensors(model).items()}
        covered, problems = (set[str](), list[str]()) if sketch == CLEAR else covered_names(model, cover)
        low, high = ratio if isinstance(ratio, tuple) else (ratio, ratio)
        tensors = [
            TensorPlan(name, shape, sketch if name in covered else CLEAR, (float(low), float(high)), float(veil))
            for name, shape in shapes.items()
        ]
        _refuse([*problems, *(problem for tensor in tensors for problem in tensor.problems())])
        return cls(tuple(tensors))

    def adjust(
        self, pattern: str, *, sketch: str | None = None, ratio: Ratio | None = None, veil: float | None = None
    ) -> "SketchPlan":
        """Give a plan in which the tensors that match a pattern have another sketch, ratio or veil.

        A tensor that is not covered cannot get a sketch here: `cover` decides that, with all its checks.

        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> plan = SketchPlan.of(model, veil=0).adjust("2.*", veil=0.5)
        >>> plan.in_clear
        ('0.bias',)
        """
        if not any(fnmatchcase(tensor.name, pattern) for tensor in self.tensors):
            names = ", ".join(tensor.name for tensor in self.tensors)
            raise PlanError(f"pattern {pattern!r} matches no tensor; there are {names}")
        changes: dict[str, object] = {}
        if sketch is not None:
            changes["scheme"] = sketch
            bare = [t.name for t in self.tensors if fnmatchcase(t.name, pattern) and not t.sketched]
            if bare and sketch != CLEAR:
                raise PlanError(f"not covered, so it cannot get a sketch: {', '.join(bare)}; name it in cover instead")
        if ratio is not None:
            changes["ratio"] = ratio if isinstance(ratio, tuple) else (ratio, ratio)
        if veil is not None:
            changes["veil"] = veil
        return SketchPlan(
            tuple(
                dataclasses.replace(tensor, **changes) if fnmatchcase(tensor.name, pattern) else tensor  # type: ignore[arg-type]
                for tensor in self.tensors
            )
        )

    @property
    def veils(self) -> dict[str, float]:
        """The relative size of every tensor's veil, by name."""
        return {tensor.name: tensor.veil for tensor in self.tensors}

    @property
    def in_clear(self) -> tuple[str, ...]:
        """The tensors that every client receives exactly."""
        return tuple(tensor.name for tensor in self.tensors if tensor.in_clear)

    @property
    def digest(self) -> str:
        """A name for this plan, to recognise it in a checkpoint."""
        return hashlib.sha256(json.dumps([dataclasses.astuple(tensor) for tensor in self.tensors]).encode()).hexdigest()

    def draw(self, seed: bytes, round: int) -> RoundPlan:
        """Settle a round: draw the width of every covered tensor."""
        drawn = [tensor.draw(seed, round) for tensor in self.tensors]
        plan = RoundPlan(round, seed, tuple(tensor for tensor, _ in drawn))
        vars(plan)["sketches"] = {tensor.name: sketch for tensor, sketch in drawn if tensor.sketched}  # not drawn again
        return plan

    def numbers_sent(self) -> int:
        """How many numbers one message holds, at most."""
        return sum(t.shape[0] * t.widths[1] if t.sketched else math.prod(t.shape) for t in self.tensors)

    def header(self) -> tuple[str, str, str, str, str]:
        """The headings of `rows`."""
        return "tensor", "shape", "sketch", "a client sees", "veil"

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """The plan as a table."""
        return [tensor.row() for tensor in self.tensors]

    def __str__(self) -> str:
        table = [self.header(), *self.rows()]
        sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip() for row in table]
        lines.append(f"in clear: {', '.join(self.in_clear) or 'nothing'}")
        bare = [tensor.name for tensor in self.tensors if tensor.sketched and not tensor.veil]
        if bare:
            lines.append(f"sketched without a veil, so a client that remembers can undo it: {', '.join(bare)}")
        return "\n".join(lines)


def mismatches(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor]) -> list[str]:
    """Say where the names and shapes of tensors are not those expected.

    >>> import torch
    >>> mismatches({"a": (2,), "b": (3, 4)}, {"b": torch.zeros(4, 3), "c": torch.zeros(1)})
    ['a is missing', "'c' was not asked for", 'b has shape (4, 3) and must have (3, 4)']
    """
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name!r} was not asked for" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(found[name].shape)} and must have {shape}")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PlanError("\n  - ".join([f"{count} with this plan:", *problems]))


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
