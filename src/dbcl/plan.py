"""Which tensor of a model gets which sketch and how much veil, and what is left in clear."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor, nn

from dbcl import seeds
from dbcl._torch import unwrapped
from dbcl.cover import (
    Cover,
    Covered,
    Layers,
    broadcast_names,
    cannot_be_sent,
    covered_names,
    frozen_parameters,
    named_tensors,
    nothing_left,
    plain_numbers,
    without_values,
)
from dbcl.errors import PlanError
from dbcl.layout import Layout
from dbcl.round_plan import CLEAR, MAX_LANES, MEASURED, UNSKETCHED, RoundPlan, RoundTensor
from dbcl.sketch import SCHEMES, LaneSketch, Sketch, draw
from dbcl.statistics import is_statistic

Ratio = float | tuple[float, float]
COUNT = "count-v1"


@dataclass(frozen=True)
class TensorPlan:
    """One tensor's two independent choices: its sketch (with the range of its ratio) and its veil."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    ratio: tuple[float, float]
    veil: float
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
    def in_clear(self) -> bool:
        """Nothing hides this tensor: neither a sketch nor a veil."""
        return not self.sketched and self.veil == 0

    @property
    def dim(self) -> int:
        return self.layout.dim

    @property
    def widths(self) -> tuple[int, int]:
        """The smallest and the largest width that a round may draw."""
        low, high = self.ratio
        return (int(self.dim / high), int(self.dim / low)) if self.sketched else (self.dim, self.dim)

    def problems(self) -> Iterator[str]:
        """Say what is wrong with these choices."""
        if not (math.isfinite(self.veil) and self.veil >= 0):
            yield f"{self.name}: veil must be 0 or more, got {self.veil}"
        if self.scheme not in SCHEMES and self.scheme != MEASURED:
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

    def draw(self, seed: bytes, round: int, lanes: int = 1) -> tuple[RoundTensor, Sketch]:
        """Settle the width of one round, and draw the sketch that has it, in the first lane."""
        low, high = self.widths
        width = low
        if low < high:
            width += int(seeds.words(seed, "width-v1", round, self.name, n=1)[0] % (high - low + 1))
        scheme = self.scheme if self.sketched else CLEAR
        sketch = draw(scheme, self.dim, width, seed=seed, round=round, name=self.name, lanes=lanes)
        return RoundTensor(self.name, self.shape, self.scheme, width, sketch.width, self.inputs), sketch

    def row(self) -> tuple[str, str, str, str, str]:
        """This tensor as a row of the plan's table."""
        low, high = self.widths
        seen = f"{_span(low, high)} of {self.dim} numbers of each row" if self.sketched else "every number"
        if self.sketched and self.inputs:
            axes = ", ".join(map(str, self.inputs))
            seen = f"{_span(low, high)} of {self.dim} inputs ({'axis' if len(self.inputs) == 1 else 'axes'} {axes})"
        veil = f"{self.veil:g}" if self.veil else "none"
        return self.name, "x".join(map(str, self.shape)), self.scheme if self.sketched else "none", seen, veil


@dataclass(frozen=True)
class SketchPlan:
    """For every tensor that leaves the server: how it is sketched and how it is veiled.

    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(SketchPlan.of(model, veil=0))
    tensor    shape  sketch    a client sees               veil
    0.weight  4x8    lanes-v1  4 of 8 numbers of each row  none
    0.bias    4      none      every number                none
    2.weight  2x4    none      every number                none
    2.bias    2      none      every number                none
    sketched: 70 % of the numbers
    lanes: 2, whose sketches complement each other; each client trains in one of them
    in clear: 0.bias, 2.weight, 2.bias
    sketched without a veil, so a client that remembers can undo it: 0.weight
    """

    tensors: tuple[TensorPlan, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """What a word in `cover` would have sketched, and why it is not."""
    at_home: tuple[tuple[str, str], ...] = ()
    """What is not sent, since every party has its own: the name, and "frozen" or "constant"."""
    base: tuple[TensorPlan, ...] = ()
    """The frozen parameters that are sent once, with their veils."""
    lanes: int = 1
    """Among so many complementary sketches the clients of a round are spread; one is the paper's shared sketch."""
    grouped: bool = False
    """Whether every group of as many clients as there are lanes has buckets of its own."""

    def __post_init__(self) -> None:
        problems = [problem for tensor in (*self.tensors, *self.base) for problem in tensor.problems()]
        if not 1 <= self.lanes <= MAX_LANES:
            problems.append(f"lanes must be between 1 and {MAX_LANES}, got {self.lanes}")
        laned = [tensor.name for tensor in self.tensors if tensor.scheme == LaneSketch.scheme]
        if laned and self.lanes == 1:
            problems.append(f"{laned[0]}: {LaneSketch.scheme} needs two lanes or more; of one lane it is {COUNT}")
        if self.grouped and self.lanes == 1:
            problems.append("grouped buckets need two lanes or more: a group is one client of each lane")
        _refuse(problems)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        cover: Cover = "hidden",
        ratio: Ratio = 2,
        veil: float = 0.2,
        sketch: str = COUNT,
        buffers: Sequence[str] = (),
        layers: Layers | None = None,
        send_frozen: bool = False,
        lanes: int | None = None,
        grouped: bool = False,
    ) -> "SketchPlan":
        """Plan a model.

        `cover` says what is sketched: "hidden" (the paper's choice: every dense and convolutional layer but the one
        that the model registers last), "large" (of those the layers that hold at least 1 % of the parameters), "all",
        or a list of these words and of name patterns such as ["hidden", "!encoder.embed.*"]. `ratio` is how many times
        narrower a compact weight is, or a range from which each round's width is drawn. `veil` is the size of the
        secret noise on everything that leaves the server, relative to the size of the weights; 0 is the paper. What
        leaves is what is trained and the statistics of normalisation layers; `buffers` are patterns of further buffers
        to send.

        `lanes` is among how many complementary sketches the clients of a round are spread: the ratio rounded unless
        given, so that the lanes together miss nothing; 1 is the paper's, one sketch for all. With `grouped` every group
        of as many clients as there are lanes has buckets of its own: a little fewer rounds, but no two clients share a
        sketch, so that their updates cannot be added up before they are lifted.

        `layers` tells the words in `cover` of layers that they do not know: a class, or a pattern of parameter names,
        and on which axis (or axes) of the weight the inputs lie: -1 for x @ W.T, 0 for x @ W, -1 for experts
        (experts, out, in).

        Frozen parameters stay at home: a client must have the same. With `send_frozen` the server sends those that are
        floating-point numbers, once (`Server.base`), under one noise that never changes.

        >>> import torch
        >>> class Backwards(nn.Module):
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(0.1 * torch.randn(inputs, outputs))
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> model = nn.Sequential(Backwards(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> SketchPlan.of(model, layers={Backwards: 0}).rows()[0]
        ('0.weight', '8x4', 'lanes-v1', '4 of 8 inputs (axis 0)', '0.2')
        """
        model = unwrapped(model)
        low, high = ratio if isinstance(ratio, tuple) else (ratio, ratio)
        sketch, lanes = _laned(sketch, lanes, low)
        _refuse([*without_values(model), *cannot_be_sent(model)])
        own = named_tensors(model)
        sent = broadcast_names(model, buffers)
        covered = Covered({}, set(), {}, []) if sketch == CLEAR else covered_names(model, cover, layers)

        def planned(name: str, scheme: str) -> TensorPlan:
            inputs = covered.names.get(name, ())
            return TensorPlan(name, tuple(own[name].shape), scheme, (float(low), float(high)), float(veil), inputs)

        left_out = dict(covered.left_out)
        for name in sorted(covered.by_word):
            inputs = planned(name, sketch).dim
            if 1 < low <= high and int(inputs / high) < 1:
                left_out[name] = f"has {inputs} inputs, too few for the ratio {_span(low, high)}"
        names = covered.names.keys() - left_out.keys()
        if covered.names and not names:
            covered.problems.append(nothing_left(left_out))
        unsketched = {name: MEASURED if is_statistic(name) else CLEAR for name in sent}
        tensors = [planned(name, sketch if name in names else unsketched[name]) for name in sent]
        _refuse([*covered.problems, *(problem for tensor in tensors for problem in tensor.problems())])
        frozen = frozen_parameters(model)
        base = [planned(name, CLEAR) for name, tensor in frozen.items() if send_frozen and plain_numbers(tensor)]
        at_home = [(name, "frozen") for name in frozen if name not in {tensor.name for tensor in base}]
        at_home += [(name, "constant") for name, tensor in own.items() if _is_constant(name, tensor, sent)]
        return cls(tuple(tensors), tuple(left_out.items()), tuple(at_home), tuple(base), lanes, grouped)

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
        every = (*self.tensors, *self.base)
        if not any(fnmatchcase(tensor.name, pattern) for tensor in every):
            names = ", ".join(tensor.name for tensor in every)
            raise PlanError(f"pattern {pattern!r} matches no tensor; there are {names}")
        changes: dict[str, object] = {}
        if sketch is not None:
            changes["scheme"] = sketch
            bare = [t.name for t in every if fnmatchcase(t.name, pattern) and not t.sketched]
            if bare and sketch != CLEAR:
                raise PlanError(f"not covered, so it cannot get a sketch: {', '.join(bare)}; name it in cover instead")
        if ratio is not None:
            changes["ratio"] = ratio if isinstance(ratio, tuple) else (ratio, ratio)
        if veil is not None:
            changes["veil"] = veil
        fixed = {name: value for name, value in changes.items() if name != "scheme"}

        def changed(tensor: TensorPlan) -> TensorPlan:
            if not fnmatchcase(tensor.name, pattern):
                return tensor
            return dataclasses.replace(tensor, **(changes if tensor.sketched else fixed))  # type: ignore[arg-type]

        return dataclasses.replace(self, tensors=tuple(map(changed, self.tensors)), base=tuple(map(changed, self.base)))

    @property
    def veils(self) -> dict[str, float]:
        """The relative size of every tensor's veil, by name."""
        return {tensor.name: tensor.veil for tensor in self.tensors}

    @property
    def least_veil(self) -> float:
        """The smallest veil of any tensor that is sent; 0 where one has none."""
        return float(min((tensor.veil for tensor in self.tensors), default=0.0))

    @property
    def in_clear(self) -> tuple[str, ...]:
        """The tensors that every client receives exactly."""
        return tuple(tensor.name for tensor in (*self.tensors, *self.base) if tensor.in_clear)

    @cached_property
    def digest(self) -> str:
        """A name for this plan, to recognise it in a checkpoint."""
        parts = [dataclasses.astuple(tensor) for tensor in self.tensors]
        base = [dataclasses.astuple(tensor) for tensor in self.base]
        settled: list[object] = [parts, base] if base else [*parts]
        settled += [{"lanes": self.lanes, "grouped": self.grouped}] if self.lanes > 1 else []
        return hashlib.sha256(json.dumps(settled).encode()).hexdigest()

    def draw(self, seed: bytes, round: int, frozen: tuple[tuple[str, str], ...] = ()) -> RoundPlan:
        """Settle a round, in its first lane: draw the width of every covered tensor.

        `frozen` are names and fingerprints. `RoundPlan.in_lane` gives the other lanes.
        """
        drawn = [tensor.draw(seed, round, self.lanes) for tensor in self.tensors]
        plan = RoundPlan(round, seed, tuple(tensor for tensor, _ in drawn), frozen, lanes=self.lanes)
        vars(plan)["sketches"] = {tensor.name: sketch for tensor, sketch in drawn if tensor.sketched}  # not drawn again
        return plan

    def numbers_sent(self) -> int:
        """How many numbers one message holds, at most."""
        return sum(t.layout.rows * t.widths[1] if t.sketched else math.prod(t.shape) for t in self.tensors)

    @property
    def share_sketched(self) -> float:
        """The share of the numbers that leave the server which is sketched.

        >>> SketchPlan.of(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))).share_sketched
        0.695...
        """
        sizes = {tensor.name: math.prod(tensor.shape) for tensor in self.tensors}
        return sum(sizes[tensor.name] for tensor in self.tensors if tensor.sketched) / (sum(sizes.values()) or 1)

    def notes(self) -> list[str]:
        """What a reader of the table must know besides: the share that is sketched, and what is not sent at all."""
        lines = []
        if any(tensor.sketched for tensor in self.tensors):
            few = "" if self.share_sketched >= 0.5 else ", less than half: name more layers in cover"
            lines.append(f"sketched: {self.share_sketched:.0%} of the numbers{few}".replace("%", " %"))
        if self.lanes > 1:
            buckets = f"; every {self.lanes} clients have buckets of their own" if self.grouped else ""
            lines.append(
                f"lanes: {self.lanes}, whose sketches complement each other; each client trains in one of them{buckets}"
            )
        lines += [f"not sketched: {name} {reason}" for name, reason in self.left_out]
        if self.base:
            veils = sorted({tensor.veil for tensor in self.base})
            shown = _shown([tensor.name for tensor in self.base])
            lines.append(f"sent once: {len(self.base)} frozen parameters ({shown}), veil {_span(veils[0], veils[-1])}")
        for why, what in (("frozen", "frozen parameters"), ("constant", "buffers that are constants")):
            names = [name for name, reason in self.at_home if reason == why]
            if names:
                lines.append(f"stays at home: {len(names)} {what} ({_shown(names)})")
        return lines

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
        lines += self.notes()
        lines.append(f"in clear: {', '.join(self.in_clear) or 'nothing'}")
        bare = [tensor.name for tensor in self.tensors if tensor.sketched and not tensor.veil]
        if bare:
            lines.append(f"sketched without a veil, so a client that remembers can undo it: {', '.join(bare)}")
        return "\n".join(lines)


def _refuse(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PlanError("\n  - ".join([f"{count} with this plan:", *problems]))


def _laned(sketch: str, lanes: int | None, ratio: float) -> tuple[str, int]:
    """The scheme and the number of lanes: of the balanced count sketch as many as the ratio, unless told otherwise."""
    balanced = sketch in (COUNT, LaneSketch.scheme)
    if lanes is None:
        lanes = max(1, min(MAX_LANES, int(ratio + 0.5))) if balanced and math.isfinite(ratio) else 1
    if not isinstance(lanes, int) or isinstance(lanes, bool):
        _refuse([f"lanes must be a whole number, got {lanes!r}"])
    if lanes > 1 and not balanced:
        _refuse([f"lanes are of the balanced count sketch: {sketch} has one, got {lanes}"])
    return (LaneSketch.scheme if lanes > 1 else COUNT) if balanced else sketch, lanes


def _is_constant(name: str, tensor: Tensor, sent: Sequence[str]) -> bool:
    """Whether a buffer stays at home; the counters of normalisation layers are not worth a word."""
    return not isinstance(tensor, nn.Parameter) and name not in sent and not name.endswith("num_batches_tracked")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
