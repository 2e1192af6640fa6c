"""Linear Gaussian state-space model of one tensor over all rounds, from the attacker's point of
view.

Estimators, detectors and reconstructions all maximise or compare likelihoods under this model:

    W_0 ~ N(start, weight^2)                     W_0 is known if `weight` is 0
    m_(s+1) = beta m_s + own_s + drift_s + u_s   server momentum; u_s ~ N(0, update^2) in V's space
    W_(s+1) = W_s + lr m_(s+1)
    V_t = (W_t + N_t) R_t                        N: white, or with known covariance over rounds

The drift is the expected update of the other clients, computed from the attacker's own examples
(`attacks/trajectory.py`). u_s is the deviation from the drift, in the lanes of the other clients.
`smoother.py` handles the case without drift and with a white veil by the Kalman filter of
`kalman.py`, whose docstring explains why both exist.

Longer than 350 lines, because the model and its posterior share every quantity.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.errors import AuditError
from dbcl.sketch import Identity, Sketch
from dbcl_audit.estimators.covariance import cholesky, sketch_range, solve
from dbcl_audit.estimators.observations import TensorObservations

Array = NDArray[np.float64]

TOLERANCE = 1e-3
"""Relative residual at which conjugate gradients stop."""
MAX_STEPS = 200
"""Maximum number of iterations of conjugate gradients."""
MIN_NOISE = 0.1
"""Minimum noise assumed for sketches, relative to the other clients' updates. With less noise,
conjugate gradients do not converge.
"""
NO_NOISE = 1e-12
"""Minimum standard deviation of noise, for a tensor that is 0 in every round. Keeps 1 / noise^2
finite.
"""
MAX_STACK_VALUES = 40_000_000
"""Maximum number of values in a stack over all rounds. Larger problems are solved in blocks of
rows.
"""


@dataclass(frozen=True, eq=False)
class Observation:
    """Additional observation: a weighted mean of W over rounds, with noise of standard deviation
    `noise`.

    `shares` maps rounds to weights: {60: 1.0} is W before round 60, and a running mean has one
    weight per round.

    >>> Observation({60: 1.0}, torch.zeros(4, 3)).noise
    0.0
    """

    shares: dict[int, float]
    value: Tensor  # (rows, dim)
    noise: float = 0.0


class StateSpaceModel:
    """Joint Gaussian model of a tensor's observations. `solve` returns the posterior of every
    update.

    Args:
        view: observations of the tensor.
        veil: standard deviation of the noise, or its covariance over the observed rounds.
        update: standard deviation of an entry of the other clients' summed update about `drift`.
        weight: standard deviation of W before the first observed round.
        drift: expected update of the other clients in each observed round, over the columns of W.
        start: expected W before the first observed round.
        more: further observations of W, such as the released model.

    The covariance of the observations in rounds t and t' is

        K_tt' = G_tt' R_t^T R_t' + sum_s C_ts C_t's R_t^T Q_s R_t',   C_ts = lr (1 - beta^(t-s)) /
            (1 - beta)

    G is the covariance of all terms that are isotropic over the columns of W (W_0, the veil, missed
    rounds). Q_s is the covariance of the updates in the lanes of round s. K is never computed
    explicitly: K e = y is solved by conjugate gradients, preconditioned by exact marginalisation of
    W_0.

    >>> one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    >>> seen = tuple(t * one for t in range(4))
    >>> view = TensorObservations("w", (0, 1, 2, 3), (1,) * 4, (Identity(1),) * 4, seen, (zero,) * 4)
    >>> found = StateSpaceModel(view, veil=1e-3, update=1.0, weight=1.0).solve()
    >>> [round(float(change), 3) for change in found.changes()]
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        view: TensorObservations,
        *,
        veil: float | Tensor,
        update: float | Array,
        weight: float,
        drift: Sequence[Tensor] | None = None,
        start: Tensor | None = None,
        more: Sequence[Observation] = (),
    ) -> None:
        self.view, self.weight, self.drift, self.start, self.more = view, weight, drift, start, tuple(more)
        self.update = np.broadcast_to(np.asarray(update, dtype=np.float64), len(view.rounds))
        if drift is not None and len(drift) < len(view.rounds) - 1:
            raise AuditError(f"{view.name}: {len(drift)} rounds of drift, and {len(view.rounds)} were seen")
        rounds, size = np.array(view.rounds), float(self.update.max())
        last = max([int(rounds[-1]), *(max(each.shares) for each in more)])
        self.ticks = np.arange(rounds[0], last)  # rounds whose updates move what is seen
        self.index = {int(round): place for place, round in enumerate(rounds)}
        self.sketches: list[Sketch] = [*view.sketches, *(Identity(view.dim) for _ in more)]
        rows = [{int(round): 1.0} for round in rounds] + [each.shares for each in more]
        self.kernel = np.stack([self._response(shares) for shares in rows])  # C, (observations, ticks)
        noise = torch.as_tensor(veil, dtype=torch.float64).numpy()
        noise = noise**2 * np.eye(len(rounds)) if noise.ndim == 0 else noise
        self.noise = np.zeros((len(rows), len(rows)))
        self.noise[: len(rounds), : len(rounds)] = noise
        for place, each in enumerate(more, len(rounds)):
            self.noise[place, place] = max(each.noise, 1e-6 * (weight + size)) ** 2
        if view.sketches[0].width < view.dim:
            np.fill_diagonal(self.noise, np.maximum(self.noise.diagonal(), (MIN_NOISE * size) ** 2))
        np.fill_diagonal(self.noise, np.maximum(self.noise.diagonal(), NO_NOISE**2))
        # Where the veil is not tiny, its noise is far above the rounding of single precision, which is faster.
        floor = float(self.noise.diagonal().min()) ** 0.5
        coarse = floor > 1e-3 * max(weight, size) and view.dim > 64
        self.dtype = torch.float32 if coarse else torch.float64

    def _response(self, shares: dict[int, float]) -> Array:
        """Return the coefficient of each tick's update in a weighted mean of W over rounds."""
        beta, found = self.view.momentum, np.zeros(len(self.ticks))
        for round, share in shares.items():
            age = np.maximum(round - self.ticks, 0)
            found += share * self.view.lr * (1 - beta**age) / (1 - beta)
        return found

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Flags of the ticks that are observed rounds, for which the sketches are known."""
        return np.isin(self.ticks, list(self.index))

    @cached_property
    def lanes(self) -> list[list[tuple[Sketch, float]]]:
        """Sketches of the updates in each observed tick, each with the variance of an entry."""
        seen = [self.index[int(tick)] for tick in self.ticks[self.known]]
        return [[(sketch, share * self.update[t] ** 2) for sketch, share in self.view.lanes(t)] for t in seen]

    @cached_property
    def isotropic(self) -> Array:
        """G: the covariance over observations of all terms that are isotropic over the columns of
        W.
        """
        found = self.noise + self.weight**2
        missed = np.flatnonzero(~self.known)
        if len(missed):
            response = self.kernel[:, missed] * np.sqrt([self.missed(int(s)) for s in missed])
            found = found + response @ response.T
        beta = self.view.momentum
        if beta and self.view.rounds[0] > 0:  # a velocity from before, as of an update one round ago
            response = beta * self.kernel[:, 0] * (self.missed(0) / (1 - beta**2)) ** 0.5
            found = found + np.outer(response, response)
        return found

    def before(self, place: int) -> int:
        """Return the index of the observed round at a tick, or of the last observed round before
        the tick.
        """
        return int(np.searchsorted(self.view.rounds, self.ticks[place], side="right")) - 1

    def missed(self, place: int) -> float:
        """Return the variance of an entry of a missed round's update, for an update with the norm
        of an observed round's update.
        """
        t = self.before(place)
        return float(self.update[t] ** 2 * self.view.update_width(t) / self.view.dim)

    @cached_property
    def flat(self) -> Array | None:
        """K as a matrix over observations if nothing is sketched and all columns are identically
        distributed, otherwise None.
        """
        if not all(isinstance(sketch, Identity) for sketch in self.sketches):
            return None
        variances = []
        for lanes in self.lanes:
            if not all(isinstance(sketch, Identity) for sketch, _ in lanes):
                return None
            variances.append(sum(variance for _, variance in lanes))
        response = self.kernel[:, self.known]
        found: Array = self.isotropic + (response * np.array(variances)) @ response.T
        return found

    @cached_property
    def information(self) -> Array:
        """Fisher information about an entry of the updates: the covariance of its influences over
        ticks, C^T K^-1 C.

        Approximated by the information of an unsketched tensor, times the mean fraction of columns
        that an observation contains.
        """
        response = self.kernel[:, self.known]
        variances = np.array([sum(variance for _, variance in lanes) for lanes in self.lanes])
        covariance = self.isotropic + (response * variances) @ response.T
        share = np.mean([sketch.width / sketch.dim for sketch in self.sketches])
        found: Array = (
            share * self.kernel.T @ solve(torch.from_numpy(covariance), torch.from_numpy(self.kernel)).numpy()
        )
        return found

    @cached_property
    def precision(self) -> Tensor:
        """Cholesky factor of sum_t R_t R_t^T / noise_t + I / weight^2, the precision of W_0 in the
        preconditioner.
        """
        found = torch.zeros(self.view.dim, self.view.dim, dtype=torch.float64)
        for sketch, noise in zip(self.sketches, self.noise.diagonal(), strict=True):
            for rows, columns, values in sketch_range(sketch, found):
                found[rows, columns] += values / float(noise)
        found.diagonal().add_(1 / max(self.weight, 1e-12) ** 2)
        return cholesky(found).to(self.dtype)

    def mean(self, moved: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the mean of every observation, given the start, the attacker's own updates and the
        drift.

        `moved` replaces the drift as a hypothesis about the other clients' updates.
        """
        moved = self.drift if moved is None else moved
        view, shape = self.view, (len(self.view.seen[0]), self.view.dim)
        inputs = torch.zeros(len(self.ticks), *shape, dtype=self.dtype)
        for place, tick in enumerate(self.ticks):
            t = self.index.get(int(tick))
            if t is not None:
                inputs[place] = view.sketches[t].lift(view.own[t].to(self.dtype))
            if moved is not None:  # of a missed round the last drift that is known
                inputs[place] += moved[min(self.before(place), len(moved) - 1)].to(self.dtype)
        kernel = torch.from_numpy(self.kernel).to(self.dtype)
        weights = torch.tensordot(kernel, inputs, 1)
        if self.start is not None:
            weights += self.start.to(self.dtype)
        return [sketch.apply(each) for sketch, each in zip(self.sketches, weights, strict=True)]

    def solve(self, tolerance: float = TOLERANCE) -> "Posterior":
        """Solve e = K^-1 (V - mean) and return the posterior."""
        seen = [*self.view.seen, *(each.value for each in self.more)]
        left = [each.to(self.dtype) - mean for each, mean in zip(seen, self.mean(), strict=True)]
        if self.flat is not None:
            stack = torch.stack(left).double()
            solved = solve(torch.from_numpy(self.flat), stack.flatten(1)).reshape(stack.shape)
            return Posterior(self, list(solved.to(self.dtype)))
        rows = len(left[0])
        step = max(1, min(rows, MAX_STACK_VALUES // (len(left) * self.view.dim)))
        starts = range(0, rows, step)
        parts = [self._conjugate([each[start : start + step] for each in left], tolerance) for start in starts]
        return Posterior(self, [torch.cat(each) for each in zip(*parts, strict=True)])

    def covariance_times(self, e: Sequence[Tensor]) -> list[Tensor]:
        """Return K e: lift, combine over rounds, restrict to the lanes, combine over rounds and
        apply the sketches.
        """
        lifted = torch.stack([sketch.lift(each) for sketch, each in zip(self.sketches, e, strict=True)])
        total = _over_rounds(self.isotropic, lifted)
        if self.known.any():
            kernel = self.kernel[:, self.known]
            carried = torch.stack(
                [_restrict(lanes, each) for lanes, each in zip(self.lanes, _over_rounds(kernel.T, lifted), strict=True)]
            )
            total += _over_rounds(kernel, carried)
        return [sketch.apply(each) for sketch, each in zip(self.sketches, total, strict=True)]

    def _precondition(self, left: Sequence[Tensor]) -> list[Tensor]:
        """Apply the inverse of K for the case without updates."""
        scaled = [each / float(noise) for each, noise in zip(left, self.noise.diagonal(), strict=True)]
        if not self.weight:
            return scaled
        pulled = sum(
            (sketch.lift(each) for sketch, each in zip(self.sketches[1:], scaled[1:], strict=True)),
            self.sketches[0].lift(scaled[0]),
        )
        start = torch.cholesky_solve(pulled.T, self.precision).T
        return [
            each - sketch.apply(start) / float(noise)
            for each, sketch, noise in zip(scaled, self.sketches, self.noise.diagonal(), strict=True)
        ]

    def _conjugate(self, left: list[Tensor], tolerance: float) -> list[Tensor]:
        solved = [torch.zeros_like(each) for each in left]
        residual = [each.clone() for each in left]
        direction = self._precondition(residual)
        power = first = _inner(residual, direction)
        if not first > 0:
            return solved
        for _ in range(MAX_STEPS):
            image = self.covariance_times(direction)
            curvature = _inner(direction, image)
            if not curvature > 0:  # nothing but rounding is left
                break
            length = power / curvature
            for s, r, d, i in zip(solved, residual, direction, image, strict=True):
                s.add_(d, alpha=length)
                r.sub_(i, alpha=length)
            turned = self._precondition(residual)
            power, before = _inner(residual, turned), power
            if not power > tolerance**2 * first:
                break
            direction = [t + (power / before) * d for t, d in zip(turned, direction, strict=True)]
        return solved


class Posterior:
    """Posterior of one tensor's updates. `errors` is e = K^-1 (V - mean).

    >>> one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    >>> seen = tuple(t * one for t in range(4))
    >>> view = TensorObservations("w", (0, 1, 2, 3), (1,) * 4, (Identity(1),) * 4, seen, (zero,) * 4)
    >>> found = StateSpaceModel(view, veil=1e-3, update=1.0, weight=1.0).solve()
    >>> [round(float(each), 2) for each in found.influences()], [round(float(each), 2) for each in found.weights()]
    ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0, 3.0])
    """

    def __init__(self, model: StateSpaceModel, errors: list[Tensor]) -> None:
        self.model, self.errors = model, errors

    @cached_property
    def _lifted(self) -> Tensor:
        pairs = zip(self.model.sketches, self.errors, strict=True)
        return torch.stack([sketch.lift(each) for sketch, each in pairs])

    @cached_property
    def _influences(self) -> Tensor:
        """Derivatives of the log-likelihood by the update of every tick, over the columns of W."""
        return _over_rounds(self.model.kernel.T, self._lifted)

    def influences(self) -> list[Tensor]:
        """Return the derivatives of the log-likelihood by the other clients' update, for each
        observed round except the last.

        To first order, an additional update d adds <d, influence> to the log-likelihood. This is
        the matched filter for d.
        """
        seen = self._influences[torch.from_numpy(np.flatnonzero(self.model.known))]
        return list(seen[: len(self.model.view.rounds) - 1])

    def influence(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the influence of an observed round, and the sum of the influences of the missed
        rounds after it.
        """
        places = [place for place in range(len(self.model.ticks)) if self.model.before(place) == index]
        missed = [self._influences[place] for place in places if not self.model.known[place]]
        here = int(np.flatnonzero(self.model.ticks == self.model.view.rounds[index])[0])
        return self._influences[here], sum(missed, torch.zeros_like(self._influences[here]))

    def changes(self) -> list[Tensor]:
        """Return the expected change of W by the other clients between observed rounds: lr (drift +
        Q influence).
        """
        model, found = self.model, list[Tensor]()
        lanes = iter(model.lanes)
        for place in range(len(model.ticks)):
            if model.known[place]:
                found.append(_restrict(next(lanes), self._influences[place]))
            else:
                found[-1] = found[-1] + model.missed(place) * self._influences[place]
            if model.drift is not None:
                found[-1] = found[-1] + model.drift[min(model.before(place), len(model.drift) - 1)].to(found[-1])
        count = len(model.view.rounds) - 1
        return [(model.view.lr * each).double() for each in found[:count]]

    def weights(self) -> list[Tensor]:
        """Return the expected W before each observed round, given all observations."""
        model, count = self.model, len(self.model.view.rounds)
        without = model.isotropic - model.noise
        found = _over_rounds(without[:count], self._lifted)
        known = np.flatnonzero(model.known)
        if len(known):
            influences = self._influences[torch.from_numpy(known)]
            carried = torch.stack([_restrict(lanes, each) for lanes, each in zip(model.lanes, influences, strict=True)])
            found += _over_rounds(model.kernel[:count, known], carried)
        plain = StateSpaceModel(
            _unsketched(model.view), veil=1.0, update=0.0, weight=1.0, drift=model.drift, start=model.start
        )
        return [(one + mean.to(one)).double() for one, mean in zip(found, plain.mean(), strict=True)]


def _unsketched(view: TensorObservations) -> TensorObservations:
    """Return observations with identity sketches, used to compute the expectation of W."""
    whole = tuple(sketch.lift(own) for sketch, own in zip(view.sketches, view.own, strict=True))
    return replace(view, sketches=(Identity(view.dim),) * len(view.sketches), own=whole)


def _over_rounds(matrix: Array, stack: Tensor) -> Tensor:
    """Multiply a matrix over rounds by a stack whose first axis is the rounds."""
    found: Tensor = torch.tensordot(torch.from_numpy(np.ascontiguousarray(matrix)).to(stack), stack, 1)
    return found


def _restrict(lanes: Sequence[tuple[Sketch, float]], x: Tensor) -> Tensor:
    """Return x Q, where Q is the sum of variance R R^T over the lanes."""
    found = torch.zeros_like(x)
    for sketch, variance in lanes:
        found += x * variance if isinstance(sketch, Identity) else variance * sketch.lift(sketch.apply(x))
    return found


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return float(sum((float((a * b).sum(dtype=torch.float64)) for a, b in zip(one, other, strict=True)), 0.0))
