"""Covariances of an unknown update over the columns of W, equal for all rows, and their Cholesky
factors.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dbcl.errors import AuditError
from dbcl.sketch import Sketch
from dbcl.sketch.buckets import BucketSketch
from dbcl_audit.estimators.observations import TensorObservations

GROWTH = 10.0
"""Factor by which the jitter increases after a failed factorisation."""


def cholesky(covariance: Tensor) -> Tensor:
    """Return the lower Cholesky factor of a covariance matrix, which may be singular or, by
    rounding, slightly indefinite.

    A pivot below the rounding error of its diagonal entry is not significant: its sign and
    magnitude depend on the CPU. Jitter proportional to the diagonal therefore increases from this
    rounding error until every pivot exceeds it. A matrix that is well-conditioned after scaling to
    a unit diagonal receives no jitter.

    Raises:
        AuditError: The matrix holds NaN or infinity, or no jitter makes it positive definite.

    >>> cholesky(torch.ones(2, 2)).isfinite().all()
    tensor(True)
    >>> cholesky(torch.tensor([[4.0, 0.0], [0.0, 9.0]])).diagonal()
    tensor([2., 3.])
    """
    if not covariance.isfinite().all():
        raise AuditError("a covariance of the attacker's model is not finite: the values behind it diverged")
    rounding, smallest = torch.finfo(covariance.dtype).eps, torch.finfo(covariance.dtype).tiny
    least = max(rounding * float(covariance.detach().abs().max()), smallest)
    scale = covariance.detach().diagonal().clamp(min=least)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance)
    jitter = rounding
    while failed or not (factor.diagonal().square() > rounding * scale).all():
        shifted = covariance + torch.diag(jitter * scale)
        if not shifted.isfinite().all():
            raise AuditError("a matrix of the attacker's model is no covariance: it is far from positive definite")
        factor, failed = torch.linalg.cholesky_ex(shifted)
        jitter *= GROWTH
    return factor


def solve(covariance: Tensor, right: Tensor) -> Tensor:
    """Solve covariance x = right with the factor that `cholesky` returns.

    >>> solve(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[4.0], [0.0]])).T.round(decimals=4)
    tensor([[2., 0.]])
    """
    return torch.cholesky_solve(right, cholesky(covariance))


class WhiteUpdates:
    """White updates in the space of V with standard deviation `update`: covariance R R^T in the
    space of W.

    With several lanes, the covariance is the mean of R_k R_k^T, weighted by the fraction of the
    other clients in each lane. The sketches of missed rounds are unknown, and the covariance of
    their updates is isotropic. Without `known_range` it is isotropic in all rounds.

    >>> from dbcl.sketch import Identity
    >>> seen = (torch.zeros(1, 2), torch.ones(1, 2))
    >>> view = TensorObservations("w", (0, 1), (1, 1), (Identity(2), Identity(2)), seen, seen)
    >>> WhiteUpdates(view, 0.5).times(0, torch.ones(1, 2))
    tensor([[0.2500, 0.2500]])
    """

    def __init__(self, view: TensorObservations, update: float, *, known_range: bool = True) -> None:
        self.view, self.variance, self.known_range = view, update**2, known_range

    def isotropic(self, t: int) -> float:
        """Return the variance of an entry in a missed round, for an update with the norm of an
        observed round's update.
        """
        return self.variance * self.view.update_width(t) / self.view.dim

    def add(self, t: int, covariance: Tensor, factor: float) -> None:
        """Add `factor` times the covariance of the t-th observed round's update in place."""
        if not self.known_range:
            return self.add_missed(t, covariance, factor)
        for sketch, share in self.view.lanes(t):
            for rows, columns, values in sketch_range(sketch, covariance):
                covariance[rows, columns] += factor * share * self.variance * values
        return None

    def add_missed(self, t: int, covariance: Tensor, factor: float) -> None:
        """Add, in place, `factor` times the covariance of one missed round's update after the t-th
        observed round.
        """
        covariance.diagonal().add_(factor * self.isotropic(t))

    def times(self, t: int, x: Tensor) -> Tensor:
        """Return x times the covariance of an observed round's update."""
        if not self.known_range:
            return self.times_missed(t, x)
        found = torch.zeros_like(x)
        for sketch, share in self.view.lanes(t):
            found += share * self.variance * sketch.lift(sketch.apply(x))
        return found

    def times_missed(self, t: int, x: Tensor) -> Tensor:
        """Return x times the covariance of a missed round's update."""
        return self.isotropic(t) * x


class ShapedUpdates(WhiteUpdates):
    """Updates with a covariance C over the columns of W, seen through the sketch R_t of each lane.

    >>> from dbcl.sketch import Identity
    >>> seen = (torch.zeros(1, 2), torch.ones(1, 2))
    >>> view = TensorObservations("w", (0, 1), (1, 1), (Identity(2), Identity(2)), seen, seen)
    >>> ShapedUpdates(view, 1.0, torch.tensor([[1.0, 0.5], [0.5, 1.0]])).times(0, torch.ones(1, 2))
    tensor([[1.5000, 1.5000]])
    """

    def __init__(self, view: TensorObservations, update: float, columns: Tensor) -> None:
        super().__init__(view, update)
        self.columns = columns

    def _dense(self, t: int) -> Tensor:
        found = torch.zeros_like(self.columns)
        for sketch, share in self.view.lanes(t):
            compact = sketch.apply(sketch.apply(self.columns).T)
            size = float(compact.diagonal().mean())
            if size > 0:
                found += share * self.variance / size * sketch.lift(sketch.lift(compact).T)
        return found

    def add(self, t: int, covariance: Tensor, factor: float) -> None:
        covariance.add_(self._dense(t).to(covariance), alpha=factor)

    def add_missed(self, t: int, covariance: Tensor, factor: float) -> None:
        covariance.add_(self.columns.to(covariance), alpha=factor * self.isotropic(t))

    def times(self, t: int, x: Tensor) -> Tensor:
        return x @ self._dense(t).to(x)

    def times_missed(self, t: int, x: Tensor) -> Tensor:
        return self.isotropic(t) * (x @ self.columns.to(x))


def sketch_range(sketch: Sketch, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the nonzero entries of R R^T, which join the inputs of one bucket, as (rows, columns,
    values).
    """
    if not isinstance(sketch, BucketSketch):
        every = torch.arange(sketch.dim)
        yield every, every, like.new_ones(sketch.dim)
        return
    tables = sketch.tables(like)
    pairs = list(zip(tables.layers, tables.apply_weights, strict=True))
    for one, weight in pairs:
        for other, factor in pairs:
            count = min(len(one), len(other))
            yield one[:count], other[:count], weight[:count] * factor[:count]
