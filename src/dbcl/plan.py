"""Plan of the sketch and the veil of each tensor of a model, and of the tensors that stay unprotected.

Longer than 350 lines: a plan, its table and its doctests are one public class.
"""

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
from dbcl.config import Ratio, SketchConfig
from dbcl.errors import PlanError
from dbcl.model.coverage import Covered, covered_names, nothing_left, shared_memory
from dbcl.model.layout import Layout
from dbcl.model.norm_stats import is_statistic
from dbcl.model.tensors import (
    broadcast_names,
    cannot_be_sent,
    frozen_parameters,
    named_tensors,
    nothing_trained,
    plain_numbers,
    without_values,
)
from dbcl.round_plan import BATCHNORM_STATS, CLEAR, MAX_LANES, UNSKETCHED, RoundPlan, RoundTensor
from dbcl.sketch import SCHEMES, LaneSketch, Sketch, draw

DEFAULT = SketchConfig()
COUNT = "count-v1"


@dataclass(frozen=True)
class TensorPlan:
    """Protection of one tensor: its sketch, the range of the sketch's ratio, and its veil."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    ratio: tuple[float, float]
    veil: float
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
    def unprotected(self) -> bool:
        """Return whether the tensor has neither a sketch nor a veil."""
        return not self.sketched and self.veil == 0

    @property
    def dim(self) -> int:
        return self.layout.dim

    @property
    def widths(self) -> tuple[int, int]:
        """Minimum and maximum width that a round may draw."""
        low, high = self.ratio
        return (int(self.dim / high), int(self.dim / low)) if self.sketched else (self.dim, self.dim)

    def problems(self) -> Iterator[str]:
        """Iterate over the problems with the tensor's sketch, ratio and veil."""
        if not (math.isfinite(self.veil) and self.veil >= 0):
            yield f"{self.name}: veil must be 0 or more, got {self.veil}"
        if self.scheme not in SCHEMES and self.scheme != BATCHNORM_STATS:
            yield f"{self.name}: unknown sketch {self.scheme!r}; choose one of {', '.join(SCHEMES)}"
        elif self.sketched:
            low, high = self.ratio
            if not (math.isfinite(high) and 1 < low <= high):
                yield f"{self.name}: ratio must be above 1 (and a range must rise), got {_span(low, high)}"
                return
            for width in set(self.widths):
                if not 1 <= width < self.dim:
                    bounds = f"between 1 and {self.dim - 1} (its inputs less one)"
                    remedy = f"choose another ratio, or leave it out with '!{self.name}' in coverage"
                    yield f"{self.name}: width must be {bounds}, got {width}; {remedy}"

    def draw(self, seed: bytes, round: int, lanes: int = 1) -> tuple[RoundTensor, Sketch]:
        """Draw the width and the sketch of a round, in the first lane."""
        low, high = self.widths
        width = low
        if low < high:
            width += int(seeds.words(seed, "width-v1", round, self.name, n=1)[0] % (high - low + 1))
        scheme = self.scheme if self.sketched else CLEAR
        sketch = draw(scheme, self.dim, width, seed=seed, round=round, name=self.name, lanes=lanes)
        return RoundTensor(self.name, self.shape, self.scheme, width, sketch.width, self.inputs), sketch

    def row(self) -> tuple[str, str, str, str, str]:
        """Return the tensor's row of the plan's table."""
        low, high = self.widths
        seen = f"{_span(low, high)} of {self.dim} numbers of each row" if self.sketched else "every number"
        if self.sketched and self.inputs:
            axes = ", ".join(map(str, self.inputs))
            seen = f"{_span(low, high)} of {self.dim} inputs ({'axis' if len(self.inputs) == 1 else 'axes'} {axes})"
        veil = f"{self.veil:g}" if self.veil else "none"
        return self.name, "x".join(map(str, self.shape)), self.scheme if self.sketched else "none", seen, veil


@dataclass(frozen=True)
class SketchPlan:
    """Plan of the sketch and the veil of every tensor that leaves the server.

    >>> model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(SketchPlan.from_model(model, SketchConfig(veil=0)))
    tensor    shape  sketch    a client sees                 veil
    0.weight  4x64   lanes-v1  32 of 64 numbers of each row  none
    0.bias    4      none      every number                  none
    2.weight  2x4    none      every number                  none
    2.bias    2      none      every number                  none
    sketched: 95 % of the numbers
    lanes: 2, whose sketches complement each other; each client trains in one of them
    unprotected: 0.bias, 2.weight, 2.bias
    sketched without a veil, so a client that remembers can undo it: 0.weight
    """

    tensors: tuple[TensorPlan, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """Tensors that a keyword in `coverage` selects but that cannot be sketched, each with the
    reason.
    """
    not_sent: tuple[tuple[str, str], ...] = ()
    """Tensors that are not sent because every party holds its own copy: the name, and "frozen" or
    "constant".
    """
    base: tuple[TensorPlan, ...] = ()
    """Frozen parameters that are sent once, with their veils."""
    lanes: int = 1
    """Number of complementary sketches in a round, each used by a part of the cohort. One lane is
    the paper's shared sketch.
    """

    def __post_init__(self) -> None:
        problems = [problem for tensor in (*self.tensors, *self.base) for problem in tensor.problems()]
        if not 1 <= self.lanes <= MAX_LANES:
            problems.append(f"lanes must be between 1 and {MAX_LANES}, got {self.lanes}")
        laned = [tensor.name for tensor in self.tensors if tensor.scheme == LaneSketch.scheme]
        if laned and self.lanes == 1:
            problems.append(f"{laned[0]}: {LaneSketch.scheme} needs two lanes or more; of one lane it is {COUNT}")
        _refuse(problems)

    @classmethod
    def from_model(cls, model: nn.Module, sketch: SketchConfig = DEFAULT) -> "SketchPlan":
        """Plan the sketch and the veil of every tensor of a model.

        Trained parameters, normalisation statistics, and the buffers named in `sketch.buffers` are
        sent to the clients. A layer that cannot be sketched is skipped, with a reason, if a keyword
        in `sketch.coverage` selects it. If a name pattern selects it, an error is raised.

        Args:
            model: The network to train.
            sketch: Configuration of the sketches and the veil.

        Returns:
            The plan.

        Raises:
            PlanError: The configuration does not fit the model. The message lists every problem.

        >>> import torch
        >>> class Backwards(nn.Module):
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(0.1 * torch.randn(inputs, outputs))
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> model = nn.Sequential(Backwards(64, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> SketchPlan.from_model(model, SketchConfig(layers={Backwards: 0})).rows()[0]
        ('0.weight', '64x4', 'lanes-v1', '32 of 64 inputs (axis 0)', '0.2')
        """
        model = unwrapped(model)
        low, high = sketch.ratio if isinstance(sketch.ratio, tuple) else (sketch.ratio, sketch.ratio)
        scheme, lanes = _laned(sketch.sketch, sketch.lanes, low)
        _refuse([*without_values(model), *cannot_be_sent(model), *shared_memory(model), *nothing_trained(model)])
        own = named_tensors(model)
        sent = broadcast_names(model, sketch.buffers)
        covered = (
            Covered({}, set(), {}, []) if scheme == CLEAR else covered_names(model, sketch.coverage, sketch.layers)
        )

        def planned(name: str, kind: str) -> TensorPlan:
            inputs = covered.names.get(name, ())
            return TensorPlan(name, tuple(own[name].shape), kind, (float(low), float(high)), float(sketch.veil), inputs)

        left_out = dict(covered.left_out)
        for name in sorted(covered.by_word):
            inputs = planned(name, scheme).dim
            if 1 < low <= high and int(inputs / high) < 1:
                left_out[name] = f"has {inputs} inputs, too few for the ratio {_span(low, high)}"
        names = covered.names.keys() - left_out.keys()
        if covered.names and not names:
            covered.problems.append(nothing_left(left_out))
        if scheme != CLEAR and not names and not covered.problems:  # "auto" may cover nothing
            if sketch.lanes is not None and sketch.lanes > 1:
                why = covered_names(model, "large", sketch.layers).problems
                why = why or [f"{nothing_left(left_out)}; use coverage='hidden'"]
                covered.problems.append(f"lanes={sketch.lanes} needs a sketch: {why[0]}")
            scheme, lanes = CLEAR, 1
        unsketched = {name: BATCHNORM_STATS if is_statistic(name) else CLEAR for name in sent}
        tensors = [planned(name, scheme if name in names else unsketched[name]) for name in sent]
        _refuse([*covered.problems, *(problem for tensor in tensors for problem in tensor.problems())])
        frozen = frozen_parameters(model)
        base = [planned(name, CLEAR) for name, tensor in frozen.items() if sketch.send_frozen and plain_numbers(tensor)]
        not_sent = [(name, "frozen") for name in frozen if name not in {tensor.name for tensor in base}]
        not_sent += [(name, "constant") for name, tensor in own.items() if _is_constant(name, tensor, sent)]
        return cls(tuple(tensors), tuple(left_out.items()), tuple(not_sent), tuple(base), lanes)

    def adjust(
        self, pattern: str, *, sketch: str | None = None, ratio: Ratio | None = None, veil: float | None = None
    ) -> "SketchPlan":
        """Return a plan with another sketch, ratio or veil for the tensors that match a pattern.

        A tensor outside the coverage cannot get a sketch here, because `coverage` also validates
        the layer.

        Args:
            pattern: Name pattern of tensors.
            sketch: New sketch scheme; None leaves it unchanged.
            ratio: New ratio or range of ratios; None leaves it unchanged.
            veil: New relative standard deviation of the noise; None leaves it unchanged.

        Raises:
            PlanError: No tensor matches, or the new settings do not fit the tensors.

        >>> model = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> plan = SketchPlan.from_model(model, SketchConfig(veil=0)).adjust("2.*", veil=0.5)
        >>> plan.unprotected
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
                raise PlanError(
                    f"not covered, so it cannot get a sketch: {', '.join(bare)}; name it in coverage instead"
                )
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
        """Relative standard deviation of every tensor's veil, by name."""
        return {tensor.name: tensor.veil for tensor in self.tensors}

    @property
    def least_veil(self) -> float:
        """Smallest relative veil of all tensors that are sent; 0 if any tensor has no veil."""
        return float(min((tensor.veil for tensor in self.tensors), default=0.0))

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Names of the tensors that every client receives exactly."""
        return tuple(tensor.name for tensor in (*self.tensors, *self.base) if tensor.unprotected)

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest of the plan. A checkpoint stores it to detect a different plan."""
        parts = [dataclasses.astuple(tensor) for tensor in self.tensors]
        base = [dataclasses.astuple(tensor) for tensor in self.base]
        settled: list[object] = [parts, base] if base else [*parts]
        settled += [{"lanes": self.lanes, "grouped": False}] if self.lanes > 1 else []
        return hashlib.sha256(json.dumps(settled).encode()).hexdigest()

    def draw(self, seed: bytes, round: int, frozen: tuple[tuple[str, str], ...] = ()) -> RoundPlan:
        """Draw the plan of a round in its first lane: the width and the sketch of every covered
        tensor.

        Use `RoundPlan.in_lane` for the other lanes.

        Args:
            seed: Public seed of the round.
            round: Number of the round.
            frozen: Names and fingerprints of the frozen tensors.
        """
        drawn = [tensor.draw(seed, round, self.lanes) for tensor in self.tensors]
        plan = RoundPlan(round, seed, tuple(tensor for tensor, _ in drawn), frozen, lanes=self.lanes)
        vars(plan)["sketches"] = {tensor.name: sketch for tensor, sketch in drawn if tensor.sketched}  # not drawn again
        return plan

    @property
    def share_sketched(self) -> float:
        """Share of the broadcast values that belong to sketched tensors.

        >>> SketchPlan.from_model(nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2))).share_sketched
        0.948...
        """
        sizes = {tensor.name: math.prod(tensor.shape) for tensor in self.tensors}
        return sum(sizes[tensor.name] for tensor in self.tensors if tensor.sketched) / (sum(sizes.values()) or 1)

    def notes(self) -> list[str]:
        """Return notes below the plan's table: the sketched share of the parameters, and the
        tensors that are not sent.
        """
        lines = []
        if any(tensor.sketched for tensor in self.tensors):
            few = "" if self.share_sketched >= 0.5 else ", less than half: name more layers in coverage"
            lines.append(f"sketched: {self.share_sketched:.0%} of the numbers{few}".replace("%", " %"))
        if self.lanes > 1:
            lines.append(
                f"lanes: {self.lanes}, whose sketches complement each other; each client trains in one of them"
            )
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out:
            by_reason.setdefault(reason, []).append(name)
        lines += [f"not sketched: {_shown(names)} {reason}" for reason, names in by_reason.items()]
        if self.base:
            veils = sorted({tensor.veil for tensor in self.base})
            shown = _shown([tensor.name for tensor in self.base])
            lines.append(f"sent once: {len(self.base)} frozen parameters ({shown}), veil {_span(veils[0], veils[-1])}")
        for why, what in (("frozen", "frozen parameters"), ("constant", "buffers that are constants")):
            names = [name for name, reason in self.not_sent if reason == why]
            if names:
                lines.append(f"not sent: {len(names)} {what} ({_shown(names)})")
        return lines

    def header(self) -> tuple[str, str, str, str, str]:
        """Column headings of `rows`."""
        return "tensor", "shape", "sketch", "a client sees", "veil"

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of the plan's table, one per tensor."""
        return [tensor.row() for tensor in self.tensors]

    def __str__(self) -> str:
        table = [self.header(), *self.rows()]
        sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip() for row in table]
        lines += self.notes()
        lines.append(f"unprotected: {', '.join(self.unprotected) or 'nothing'}")
        bare = [tensor.name for tensor in self.tensors if tensor.sketched and not tensor.veil]
        if bare:
            lines.append(f"sketched without a veil, so a client that remembers can undo it: {', '.join(bare)}")
        return "\n".join(lines)


def _refuse(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PlanError("\n  - ".join([f"{count} with this plan:", *problems]))


def _laned(sketch: str, lanes: int | None, ratio: float) -> tuple[str, int]:
    """Return the scheme and the number of lanes. For the balanced count sketch, the default number
    of lanes is the rounded ratio.
    """
    balanced = sketch == COUNT
    if lanes is None:
        lanes = max(1, min(MAX_LANES, int(ratio + 0.5))) if balanced and math.isfinite(ratio) else 1
    if lanes > 1 and not balanced:
        _refuse([f"lanes are of the balanced count sketch: {sketch} has one, got {lanes}"])
    return (LaneSketch.scheme if lanes > 1 else COUNT) if balanced else sketch, lanes


def _is_constant(name: str, tensor: Tensor, sent: Sequence[str]) -> bool:
    """Return whether a buffer is listed as not sent. Batch counters of normalisation layers are
    omitted from the list.
    """
    return not isinstance(tensor, nn.Parameter) and name not in sent and not name.endswith("num_batches_tracked")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
