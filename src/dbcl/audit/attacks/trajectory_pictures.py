"""The victim's pictures by maximum likelihood over all rounds, where it trains on the same ones in every round.

Reads: client-0 and its allies; server, for the victim's plan.

Such pictures x are the parameters of one regression over all that the attacker saw. In round t it saw
V_t = W_t R_t + tau Z_t, and W_t = W_0 + S_t(x): its own updates are known, and the victim's follow from x by the
gradients of the loss at the model that the victim was sent. W_0 is integrated out; white noise averages out over rounds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from dbcl import models
from dbcl.audit import picture_quality as pictures
from dbcl.audit.attacks import OnProgress
from dbcl.audit.attacks.images import Attack, picture_findings
from dbcl.audit.attacks.matching import Recovered
from dbcl.audit.attacks.victim import Changes, VictimsRound, victims_rounds
from dbcl.audit.estimators.kalman import Scales
from dbcl.audit.estimators.smoother import known_scales
from dbcl.audit.estimators.view import View, views
from dbcl.audit.findings import Finding
from dbcl.audit.rehearsal import VICTIM, Rehearsal
from dbcl.data import Dataset
from dbcl.errors import AuditError, ConfigError
from dbcl.sketch import Identity, Sketch
from dbcl.sketch.buckets import BucketSketch
from dbcl.transcripts import Setting

Map = Callable[[Tensor], Tensor]


class TensorLikelihood:
    """How likely one tensor's broadcasts are, given how the victim changed the server's velocity in every round.

    With y_t = V_t - S_t R_t = W_0 R_t + tau Z_t and W_0 ~ N(0, w^2) integrated out,

        -log p = 1/2 sum |y_t - W R_t|^2 / tau^2 + 1/2 |W|^2 / w^2 + constant,     W = b Lambda^-1,
        b = sum y_t R_t^T / tau^2,     Lambda = sum R_t R_t^T / tau^2 + I / w^2.

    S_t is linear in the changes c, so this is a quadratic form with a gradient g(c) = g(0) + H c. Where W_0 is known it
    is `start`, and nothing is integrated.

    >>> seen, own = tuple(torch.full((1, 1), float(t)).double() for t in range(3)), (torch.zeros(1, 1).double(),) * 3
    >>> view = View("w", (0, 1, 2), (1,) * 3, (Identity(1),) * 3, seen, own)
    >>> likelihood = TensorLikelihood(view, Scales(veil=1.0, update=0.0, weight=1e6))
    >>> value, gradient = likelihood(torch.ones(2, 1, 1).double())  # W moves by 1 a round, as V does
    >>> round(value, 3), [round(float(slope), 3) for slope in gradient]
    (-1.0, [0.0, 0.0])
    """

    def __init__(
        self, view: View, scales: Scales, start: Tensor | None = None, through: Sequence[Map] | None = None
    ) -> None:
        if max(view.gaps) > 1:
            raise AuditError(f"{view.name}: all rounds must be seen; what the victim was sent in a missed one is unknown")
        self.view, self.precision = view, scales.veil**-2
        self.projections = [projection(sketch) for sketch in view.sketches]
        self.through = list(through or [_same] * (len(view.rounds) - 1))
        self.inverse = None if start is not None else _inverse(view, self.precision, scales.weight**-2)  # of Lambda
        zero = torch.zeros(len(view.seen[0]), view.dim, dtype=torch.float64)
        weights, velocity, lifted = zero if start is None else view.matrix(start).double(), zero, []
        for sketch, seen, own in zip(view.sketches, view.seen, view.own, strict=True):
            lifted.append(sketch.lift(seen.double() - sketch.apply(weights)))  # y_t R_t^T
            velocity = view.momentum * velocity + sketch.lift(own.double())
            weights = weights + view.lr * velocity
        # Where the veil is not tiny, its noise is far above the rounding of single precision, which is faster.
        self.dtype = torch.float32 if scales.veil > 1e-3 * scales.weight else torch.float64
        self.kept = torch.stack(lifted)
        self.at_zero = self._adjoint(torch.empty_like(self.kept[1:])).neg_().to(self.dtype)
        self.kept, self.slopes = self.kept.to(self.dtype), torch.empty_like(self.at_zero)
        if isinstance(self.inverse, Tensor):
            self.inverse = self.inverse.to(self.dtype)

    def __call__(self, changes: Tensor) -> tuple[float, Tensor]:  # (rounds - 1, rows, dim)
        """-log p(changes) + log p(0), and its gradient, which the next call overwrites: c (g(0) + g(c)) / 2 and g(c)."""
        weights = velocity = changes.new_zeros(changes.shape[1:])
        self.kept[0] = 0
        for t, change in enumerate(changes):
            velocity = self.through[t](change) + self.view.momentum * velocity
            weights = torch.add(weights, velocity, alpha=self.view.lr)
            self.kept[t + 1] = self.projections[t + 1](weights)
        slopes, flat = self._adjoint(self.slopes), changes.flatten()
        value = float(flat @ self.at_zero.flatten()) + float(flat @ slopes.flatten()) / 2
        return value, slopes.add_(self.at_zero)

    def _adjoint(self, out: Tensor) -> Tensor:
        """From y_t R_t^T of all rounds, in `kept`, to the sum of (y_t - W R_t) R_t^T / tau^2 over what a change enters."""
        weights = None
        if self.inverse is not None:
            b = self.kept.sum(dim=0).mul_(self.precision)
            weights = b @ self.inverse if isinstance(self.inverse, Tensor) else b * self.inverse
        total = entering = torch.zeros_like(self.kept[0])
        for t in range(len(out), 0, -1):
            total = total + self.kept[t]
            if weights is not None:
                total -= self.projections[t](weights)
            entering = total + self.view.momentum * entering
            torch.mul(self.through[t - 1](entering), self.view.lr * self.precision, out=out[t - 1])
        return out


def _same(x: Tensor) -> Tensor:
    return x


def _inverse(view: View, precision: float, prior: float) -> Tensor | float:
    if all(isinstance(sketch, Identity) for sketch in view.sketches):
        return 1 / (len(view.sketches) * precision + prior)
    eye = torch.eye(view.dim, dtype=torch.float64)
    total = max(prior, 1e-13 * len(view.sketches) * precision) * eye  # or directions that no round shows are lost
    for sketch in view.sketches:
        total += precision * sketch.lift(sketch.apply(eye))
    return torch.cholesky_inverse(torch.linalg.cholesky(total))


def projection(sketch: Sketch, power: int = 0, scale: float = 1.0) -> Map:
    """The map x -> scale x R D^power R^T, of rows.

    >>> from dbcl import CountSketch
    >>> sketch, x = CountSketch(4, 2, seed=bytes(32)), torch.arange(4.0)
    >>> torch.allclose(projection(sketch, 1)(x), sketch.lift(sketch.project(x)))
    True
    """
    if isinstance(sketch, Identity):
        return _same if scale == 1 else lambda x: scale * x

    def through(x: Tensor) -> Tensor:
        return sketch.lift(sketch.apply(x) * (scale * sketch.gain(x) ** power))

    if not isinstance(sketch, BucketSketch) or not sketch.tables(torch.ones(1)).pairs:
        return through
    made: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = {}

    def of_pairs(x: Tensor) -> Tensor:
        """With two inputs in every bucket, R D^power R^T adds to each a multiple of its partner."""
        if x.dtype not in made:
            tables = sketch.tables(x)
            one, other = tables.layers
            partner = torch.empty_like(tables.bucket)
            partner[one], partner[other] = other, one
            gained = tables.lift_weight * (scale * tables.gain[tables.bucket] ** power)
            made[x.dtype] = partner, tables.lift_weight * gained, tables.lift_weight[partner] * gained
        partner, own, others = made[x.dtype]
        return torch.addcmul(x * own, x.index_select(-1, partner), others)

    return of_pairs


@dataclass(frozen=True)
class TrajectoryMatching:
    """How pictures are fitted to a trajectory, by L-BFGS with bounds, from `restarts` points of `steps` steps each.

    The prior is Laplacian: `tv` times the sum of the differences of neighbouring pixels, in a range from 0 to 1, is
    added to -log p. Labels are those given, or the likeliest of the `candidates` that are likeliest at the start.
    `local_steps` is how many steps of SGD on all its pictures the victim takes in a round.

    >>> TrajectoryMatching(steps=40).tv
    5.0
    """

    steps: int = 60
    restarts: int = 1
    tv: float = 5.0
    candidates: int = 2
    local_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "candidates", "local_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not (math.isfinite(self.tv) and self.tv >= 0):
            raise ConfigError(f"tv must be 0 or more, got {self.tv}")


class _Victim:
    """A victim with given pictures: its changes in every round, and how likely they make what the attacker saw.

    The gradients of all rounds are computed at once, at the effective weights V D R^T. Where the attacker was in
    another lane it does not know the veil of the victim's V: `hidden` names these tensors, and the noise is estimated
    together with the pictures.
    """

    def __init__(
        self,
        template: nn.Module,
        setting: Setting,
        seen: Mapping[str, View],
        known: Sequence[VictimsRound],
        weights: Mapping[str, Tensor],
        local_steps: int,
    ) -> None:
        self.rate, self.local_steps = setting.local.lr, local_steps
        self.scales = {name: known_scales(view, setting.veil) for name, view in seen.items()}
        plans = [each.broadcast.plan for each in known]
        self.layouts = {part.name: part.layout for part in plans[0].tensors if part.sketched}
        self.sketches = {name: [plan.sketches[name] for plan in plans] for name in self.layouts}
        scale = -setting.local.lr / setting.cohort
        self.likelihoods = {}
        for name, view in seen.items():
            maps = [projection(sketch, 1, scale) for sketch in self.sketches.get(name, [Identity(view.dim)] * len(known))]
            self.likelihoods[name] = TensorLikelihood(view, self.scales[name], weights.get(name), maps)
        single = all(each.dtype == torch.float32 for each in self.likelihoods.values())
        self.dtype = torch.float32 if single else torch.float64
        self.hidden = [
            name
            for name in self.layouts
            if single and not _shows(seen[name].sketches[0], self.sketches[name][0])
        ]
        sent = {
            part.name: torch.stack([each.broadcast.tensors[part.name].to(self.dtype) for each in known])
            for part in plans[0].tensors
        }
        self.sent = {n: self._effective(n, list(V)) if n in self.layouts else V for n, V in sent.items()}
        model = template.to(self.dtype)

        def loss(weights: dict[str, Tensor], rest: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
            return models.loss(torch.func.functional_call(model, {**weights, **rest}, (images,)), labels)

        self.of_rounds = torch.func.vmap(torch.func.grad(loss), in_dims=(0, 0, None, None))

    def noise(self) -> dict[str, Tensor]:
        """No veil, in units of its size, for each hidden tensor in the space of V."""
        rows = {name: len(self.likelihoods[name].view.seen[0]) for name in self.hidden}
        width = {name: max(sketch.width for sketch in self.sketches[name]) for name in self.hidden}
        count = len(self.likelihoods[next(iter(self.likelihoods))].through)
        return {name: torch.zeros(count, rows[name], width[name], dtype=self.dtype) for name in self.hidden}

    def unlikelihood(
        self, images: Tensor, labels: Tensor, noise: Mapping[str, Tensor]
    ) -> tuple[float, Tensor, dict[str, Tensor]]:
        """-log p of the broadcasts given pictures and veil, up to a constant, and its gradients."""
        images = images.to(self.dtype).requires_grad_()
        held = {name: self.sent[name] for name in self.likelihoods}
        for name, each in noise.items():
            veil = self.scales[name].veil
            held[name] = (held[name] + self._effective(name, list(veil * each))).requires_grad_()
        found = self._gradients(held, images, labels)
        value, slopes = 0.0, []
        for name, likelihood in self.likelihoods.items():
            part, slope = likelihood(self._matrices(name, found[name].detach()).to(likelihood.dtype))
            value += part
            slopes.append(self._shaped(name, slope.to(self.dtype)))
        for_images, *rest = torch.autograd.grad(
            [found[name] for name in self.likelihoods], [images, *(held[name] for name in noise)], slopes
        )
        for_noise = {}
        for name, slope in zip(noise, rest, strict=True):
            out = for_noise[name] = torch.zeros_like(noise[name])
            for row, sketch, each in zip(out, self.sketches[name], self._matrices(name, slope), strict=True):
                row[:, : sketch.width] = self.scales[name].veil * sketch.project(each)
        return value, for_images, for_noise

    def _gradients(self, held: dict[str, Tensor], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The sum of dL/dW_eff over the local steps, for all rounds."""
        rest = {name: tensor for name, tensor in self.sent.items() if name not in held}
        total: dict[str, Tensor] = self.of_rounds(held, rest, images, labels)
        last = total
        for _ in range(self.local_steps - 1):
            moved = {}
            for name, gradient in last.items():
                step = self._matrices(name, gradient)
                if name in self.sketches:  # a step of V moves V D R^T by as much through D R^T
                    step = torch.stack([projection(s, 2)(g) for s, g in zip(self.sketches[name], step, strict=True)])
                moved[name] = held[name] - self.rate * self._shaped(name, step)
            held = moved
            last = self.of_rounds(held, rest, images, labels)
            total = {name: total[name] + last[name] for name in total}
        return total

    def _effective(self, name: str, compact: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.sketches[name], compact, strict=True)
        return self._shaped(name, torch.stack([sketch.expand(V[..., : sketch.width]) for sketch, V in pairs]))

    def _matrices(self, name: str, stacked: Tensor) -> Tensor:
        layout = self.layouts.get(name)
        if layout is None or not layout.inputs:
            return stacked.reshape(len(stacked), -1, self.likelihoods[name].view.dim)
        return torch.stack([layout.matrix(each) for each in stacked])

    def _shaped(self, name: str, matrices: Tensor) -> Tensor:
        layout = self.layouts.get(name)
        if layout is None:
            return matrices.reshape(self.sent[name].shape)
        if not layout.inputs:
            return matrices.reshape(len(matrices), *layout.shape)
        return torch.stack([layout.weight(each) for each in matrices])


def _shows(held: Sketch, asked: Sketch) -> bool:
    """Whether what comes through one sketch can be told from what comes through another."""
    probe = asked.lift(torch.linspace(1, 2, asked.width, dtype=torch.float64))
    return bool(torch.allclose(held.lift(held.apply(probe)), probe))
