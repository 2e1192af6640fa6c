"""Likelihood of a client's broadcasts, given another client's changes in every round. Reads: tensor
observations.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dbcl.errors import AuditError
from dbcl.sketch import Identity, Sketch
from dbcl.sketch.buckets import BucketSketch
from dbcl_audit.estimators.covariance import cholesky
from dbcl_audit.estimators.kalman import Scales
from dbcl_audit.estimators.observations import TensorObservations

Map = Callable[[Tensor], Tensor]


class TensorLikelihood:
    """Likelihood of one tensor's broadcasts, given the victim's change of the server's velocity in
    every round.

    With y_t = V_t - S_t R_t = W_0 R_t + tau Z_t, and W_0 ~ N(0, w^2) marginalised,

        -log p = 1/2 sum |y_t - W R_t|^2 / tau^2 + 1/2 |W|^2 / w^2 + constant,     W = b Lambda^-1,
        b = sum y_t R_t^T / tau^2,     Lambda = sum R_t R_t^T / tau^2 + I / w^2.

    S_t is linear in the changes c. The result is a quadratic form with gradient g(c) = g(0) + H c.
    If W_0 is known, it is passed as `start` and nothing is marginalised.

    >>> seen, own = tuple(torch.full((1, 1), float(t)).double() for t in range(3)), (torch.zeros(1, 1).double(),) * 3
    >>> view = TensorObservations("w", (0, 1, 2), (1,) * 3, (Identity(1),) * 3, seen, own)
    >>> likelihood = TensorLikelihood(view, Scales(veil=1.0, update=0.0, weight=1e6))
    >>> value, gradient = likelihood(torch.ones(2, 1, 1).double())  # W moves by 1 a round, as V does
    >>> round(value, 3), [round(float(slope), 3) for slope in gradient]
    (-1.0, [0.0, 0.0])
    """

    def __init__(
        self,
        view: TensorObservations,
        scales: Scales,
        start: Tensor | None = None,
        through: Sequence[Map] | None = None,
    ) -> None:
        if max(view.gaps) > 1:
            raise AuditError(f"{view.name}: rounds were missed, and what the others were sent there is unknown")
        self.view, self.precision = view, scales.veil**-2
        self.projections = [projection(sketch) for sketch in view.sketches]
        self.through = list(through or [_same] * (len(view.rounds) - 1))
        self.inverse = None if start is not None else _inverse(view, self.precision, scales.weight**-2)  # of Lambda
        zero = torch.zeros(len(view.seen[0]), view.dim, dtype=torch.float64)
        weights, velocity = zero if start is None else view.matrix(start).double(), zero
        lifted, moved = list[Tensor](), list[Tensor]()
        for sketch, seen, own in zip(view.sketches, view.seen, view.own, strict=True):
            lifted.append(sketch.lift(seen.double() - sketch.apply(weights)))  # y_t R_t^T
            moved.append(weights)
            velocity = view.momentum * velocity + sketch.lift(own.double())
            weights = weights + view.lr * velocity
        # Where the veil is not tiny, its noise is far above the rounding of single precision, which is faster.
        self.dtype = torch.float32 if scales.veil > 1e-3 * scales.weight else torch.float64
        kept = torch.stack(lifted)
        self.at_zero = self._adjoint(kept).neg_().to(self.dtype)
        self.moved, self.lifted = torch.stack(moved).to(self.dtype), kept.sum(dim=0).to(self.dtype)

    def weights(self, changes: Tensor) -> Tensor:  # (rounds - 1, rows, dim) -> (rounds, rows, dim)
        """Return the expected W before every round, given the changes."""
        added, kept = self._added(changes)
        return self.moved + added + self.expected_start(self.lifted - kept.sum(dim=0))

    def __call__(self, changes: Tensor) -> tuple[float, Tensor]:  # (rounds - 1, rows, dim)
        """Return -log p(changes) + log p(0) and its gradient: c (g(0) + g(c)) / 2 and g(c)."""
        slopes, flat = self._adjoint(self._added(changes)[1]), changes.flatten()
        value = float(flat @ self.at_zero.flatten()) + float(flat @ slopes.flatten()) / 2
        return value, slopes.add_(self.at_zero)

    def _added(self, changes: Tensor) -> tuple[Tensor, Tensor]:
        """Return S_t and S_t R_t R_t^T for every round."""
        added = changes.new_zeros(len(changes) + 1, *changes.shape[1:])
        kept, velocity = torch.zeros_like(added), added[0]
        for t, change in enumerate(changes):
            velocity = self.through[t](change) + self.view.momentum * velocity
            torch.add(added[t], velocity, alpha=self.view.lr, out=added[t + 1])
            kept[t + 1] = self.projections[t + 1](added[t + 1])
        return added, kept

    def expected_start(self, total: Tensor) -> Tensor:
        """Return W = b Lambda^-1 from the sum of all y_t R_t^T, or 0 if W_0 is known."""
        if self.inverse is None:
            return torch.zeros_like(total)
        b = total * self.precision
        return b @ self.inverse.to(b) if isinstance(self.inverse, Tensor) else b * self.inverse

    def _adjoint(self, kept: Tensor) -> Tensor:
        """Map y_t R_t^T of all rounds to the gradient by each change: the sum of (y_t - W R_t)
        R_t^T / tau^2 over later rounds.
        """
        weights = self.expected_start(kept.sum(dim=0))
        out, total, entering = torch.empty_like(kept[1:]), torch.zeros_like(kept[0]), torch.zeros_like(kept[0])
        for t in range(len(out), 0, -1):
            total += kept[t] - self.projections[t](weights)
            entering = total + self.view.momentum * entering
            torch.mul(self.through[t - 1](entering), self.view.lr * self.precision, out=out[t - 1])
        return out


def _same(x: Tensor) -> Tensor:
    return x


def _inverse(view: TensorObservations, precision: float, prior: float) -> Tensor | float:
    if all(isinstance(sketch, Identity) for sketch in view.sketches):
        return 1 / (len(view.sketches) * precision + prior)
    eye = torch.eye(view.dim, dtype=torch.float64)
    total = max(prior, 1e-13 * len(view.sketches) * precision) * eye  # or directions that no round shows are lost
    for sketch in view.sketches:
        total += precision * sketch.lift(sketch.apply(eye))
    return torch.cholesky_inverse(cholesky(total))


def projection(sketch: Sketch, power: int = 0, scale: float = 1.0) -> Map:
    """Return the linear map x -> scale x R D^power R^T, applied to rows.

    >>> from dbcl.sketch import CountSketch
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
        """Apply the map for buckets of two inputs: add to each input a multiple of the other input
        of its bucket.
        """
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
