"""Kalman filter over the rounds that a client observed, and the corresponding backward smoother.

The model is that of `state_space.py` without drift and without further observations. This filter is
needed in addition to that solver for three reasons. Without a veil the filter is exact, whereas
conjugate gradients do not converge and the solver must assume a minimum noise. The filter computes
the likelihood including its determinant, which fitting the scales requires. Its updates may have
any covariance over columns (`ShapedUpdates`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dbcl.errors import AuditError
from dbcl.sketch import Identity, Sketch
from dbcl.sketch.buckets import BucketSketch
from dbcl_audit.estimators.covariance import WhiteUpdates, cholesky
from dbcl_audit.estimators.observations import TensorObservations

OnStep = Callable[[int, int], None]
"""Callback with the number of completed steps and the total number of steps."""


@dataclass(frozen=True)
class Scales:
    """Standard deviations in a smoother's model.

    Args:
        veil: of the veil.
        update: of an entry of an update.
        weight: of an entry of W.

    >>> Scales(veil=0.1, update=0.01, weight=1.0).veil
    0.1
    """

    veil: float
    update: float
    weight: float


class Smoothed(list[Tensor]):
    """Expected changes of W between successive observed rounds, without the client's own part.
    `start` is the expected first W.

    >>> from dbcl.sketch import Identity
    >>> one = torch.ones(1, 1)
    >>> view = TensorObservations("w", (0, 1, 2), (1,) * 3, (Identity(1),) * 3, (0 * one, 3 * one, 6 * one), (one,) * 3)
    >>> [float(W) for W in Smoothed([2 * one, 2 * one], start=0 * one).weights(view)]
    [0.0, 3.0, 6.0]
    """

    def __init__(self, changes: Iterable[Tensor], start: Tensor) -> None:
        super().__init__(changes)
        self.start = start

    def weights(self, view: TensorObservations) -> Iterator[Tensor]:
        """Yield the expected W before each observed round, given all rounds."""
        if view.momentum and max(view.gaps) > 1:
            raise AuditError(f"{view.name}: with momentum, W follows from its changes only where no round was missed")
        weights, velocity = self.start, torch.zeros_like(self.start)
        yield weights
        for t, change in enumerate(self):
            own = view.lr * view.sketches[t].lift(view.own[t].to(change))
            velocity = view.momentum * velocity + change + own
            weights = weights + velocity
            yield weights


class KalmanSmoother:
    """Kalman filter over the observed rounds for all rows at once, with a disturbance smoother.

    With server momentum the state is (W, m): m' = beta m + u, W' = W + lr m'. P is the covariance
    of one row's state. G = P Z^T with Z = (R^T, 0), F = Z G + tau^2 I, and e = v F^-1 for the
    innovation v = V - W R.

    To save memory, the filter stores P every `segment` rounds, and the backward pass recomputes P
    for the rounds between. P is updated in strips of `strip` columns. With more than `single_above`
    inputs and a veil, the computation uses single precision.

    >>> from dbcl.sketch import Identity
    >>> seen, own = tuple(torch.full((1, 1), float(t)).double() for t in range(4)), (torch.zeros(1, 1).double(),) * 4
    >>> view = TensorObservations("w", (0, 1, 2, 3), (1,) * 4, (Identity(1),) * 4, seen, own)
    >>> changes = KalmanSmoother(view, Scales(1e-6, 1.0, 1.0), WhiteUpdates(view, 1.0)).smooth()
    >>> [round(float(change), 3) for change in changes]
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        view: TensorObservations,
        scales: Scales,
        updates: WhiteUpdates,
        on_step: OnStep | None = None,
        *,
        segment: int = 16,
        strip: int = 384,
        single_above: int = 1024,
    ) -> None:
        # Where the veil is not tiny, its noise is far above the rounding of single precision, which is faster.
        single = view.dim > single_above and scales.veil > 1e-3 * scales.weight
        self.dtype = torch.float32 if single else torch.float64
        self.view, self.scales, self.updates, self.on_step = view, scales, updates, on_step
        self.segment, self.strip = segment, strip
        beta, lr = view.momentum, view.lr
        self.blocks = 2 if beta else 1
        self.step = torch.tensor([[1.0, lr * beta], [0.0, beta]], dtype=self.dtype)[: self.blocks, : self.blocks]
        self.enter = torch.tensor([lr, 1.0], dtype=self.dtype)[: self.blocks]
        self.total = len(view.rounds)

    def likelihood(self) -> float:
        """Return the log-likelihood of all observations, up to a constant."""
        total = 0.0
        state, covariance = self._start()
        for t in range(self.total):
            gain, factor = self._gain(t, covariance)
            innovation = self._innovation(t, state)
            scaled = torch.linalg.solve_triangular(factor, innovation.T, upper=False)
            total -= len(innovation) * float(factor.diagonal().log().sum()) + 0.5 * float(scaled.square().sum())
            error = torch.cholesky_solve(innovation.T, factor).T
            state, covariance = self._forward(t, state, covariance, gain, factor, error)
        return total

    def smooth(self) -> Smoothed:
        """Return the expected changes of W between successive observed rounds without the client's
        own part, and the first W.

        The adjoint r of the first round, before its observation, gives E[W_0 | all observations] =
        var(W_0) r.
        """
        kept: dict[int, Tensor] = {}
        errors = []
        state, covariance = self._start()
        for t in range(self.total):
            if t % self.segment == 0:
                kept[t] = covariance.clone()
            gain, factor = self._gain(t, covariance)
            errors.append(torch.cholesky_solve(self._innovation(t, state).T, factor).T)
            state, covariance = self._forward(t, state, covariance, gain, factor, errors[-1])
            self._report(t + 1)
        found: list[Tensor] = []
        r = torch.zeros_like(state)
        for start in sorted(kept, reverse=True):
            steps = list(self._again(kept[start], start, min(start + self.segment, self.total)))
            for t, gain, factor in reversed(steps):
                change = torch.zeros(len(r), self.view.dim, dtype=self.dtype)
                for _ in range(self.view.gaps[t] - 1):
                    change += self.updates.times_missed(t, self._at_entry(r))
                    r = self._transposed_step(r)
                if t < self.total - 1:
                    found.append((self.view.lr * (change + self.updates.times(t, self._at_entry(r)))).double())
                back = self._transposed_step(r)
                lifted = self.view.sketches[t].lift(errors[t] - torch.cholesky_solve((back @ gain).T, factor).T)
                back.reshape(len(r), self.blocks, -1)[:, 0] += lifted
                r = back
                self._report(2 * self.total - t)
        return Smoothed(found[::-1], (self.scales.weight**2 * r[:, : self.view.dim]).double())

    def _start(self) -> tuple[Tensor, Tensor]:
        dim = self.view.dim
        state = torch.zeros(len(self.view.seen[0]), self.blocks * dim, dtype=self.dtype)
        covariance = torch.zeros(self.blocks * dim, self.blocks * dim, dtype=self.dtype)
        covariance[:dim, :dim].diagonal().fill_(self.scales.weight**2)
        return state, covariance

    def _gain(self, t: int, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return G and the Cholesky factor of F."""
        sketch = self.view.sketches[t]
        gain = _apply_to_rows(sketch, covariance[: sketch.dim]).T  # (blocks * dim, width): P is symmetric
        inner = _apply_to_rows(sketch, gain[: sketch.dim].contiguous())
        inner.diagonal().add_(self.scales.veil**2)
        return gain, cholesky(inner)

    def _innovation(self, t: int, state: Tensor) -> Tensor:
        sketch = self.view.sketches[t]
        return self.view.seen[t].to(self.dtype) - sketch.apply(state[:, : sketch.dim])

    def _forward(
        self, t: int, state: Tensor, covariance: Tensor, gain: Tensor, factor: Tensor, error: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = self.view.sketches[t].lift(self.view.own[t].to(self.dtype))
        parts = (state + error @ gain.T).reshape(len(state), self.blocks, -1)
        moved: Tensor = torch.einsum("ij,mjd->mid", self.step, parts) + self.enter[:, None] * own[:, None]
        for _ in range(self.view.gaps[t] - 1):
            moved = torch.einsum("ij,mjd->mid", self.step, moved)
        return moved.flatten(1), self._next_covariance(t, covariance, gain, factor)

    def _next_covariance(self, t: int, covariance: Tensor, gain: Tensor, factor: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(factor, gain.T, upper=False)
        covariance = self._predict(t, _minus_square(covariance, half, self.strip), self.updates.add)
        for _ in range(self.view.gaps[t] - 1):
            covariance = self._predict(t, covariance, self.updates.add_missed)
        return covariance

    def _predict(self, t: int, covariance: Tensor, add: Callable[[int, Tensor, float], None]) -> Tensor:
        """Return the covariance one round later."""
        if self.blocks == 1:
            add(t, covariance, self.view.lr**2)
            return covariance
        dim, step = self.view.dim, self.step
        parts: Tensor = torch.einsum("ij,jakb,lk->ialb", step, covariance.reshape(2, dim, 2, dim), step).contiguous()
        for i in range(2):
            for j in range(2):
                block = parts[i, :, j].contiguous()
                add(t, block, float(self.enter[i] * self.enter[j]))
                parts[i, :, j] = block
        return parts.reshape(2 * dim, 2 * dim)

    def _again(self, covariance: Tensor, start: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield G and the factor of F for the rounds of one segment, from the covariance at the
        start of the segment.
        """
        for t in range(start, end):
            gain, factor = self._gain(t, covariance)
            yield t, gain, factor
            if t + 1 < end:
                covariance = self._next_covariance(t, covariance, gain, factor)

    def _at_entry(self, r: Tensor) -> Tensor:
        """Return the adjoint state where an update enters: lr r_W + r_m."""
        entry: Tensor = torch.einsum("i,mid->md", self.enter, r.reshape(len(r), self.blocks, -1))
        return entry

    def _transposed_step(self, r: Tensor) -> Tensor:
        back: Tensor = torch.einsum("ij,mid->mjd", self.step, r.reshape(len(r), self.blocks, -1))
        return back.flatten(1)

    def _report(self, done: int) -> None:
        if self.on_step is not None:
            self.on_step(done, 2 * self.total)


def _apply_to_rows(sketch: Sketch, matrix: Tensor) -> Tensor:  # (dim, n) -> (width, n)
    """Return R^T M. In contrast to `apply` of the transpose, this accesses whole rows of memory."""
    if isinstance(sketch, Identity):
        return matrix.clone()
    if not isinstance(sketch, BucketSketch):
        return sketch.apply(matrix.T).T.contiguous()
    tables = sketch.tables(matrix)
    out = matrix.index_select(0, tables.layers[0]).mul_(tables.apply_weights[0][:, None])
    for layer, weight in zip(tables.layers[1:], tables.apply_weights[1:], strict=True):
        out[: len(layer)].addcmul_(matrix.index_select(0, layer), weight[:, None])
    return out


def _minus_square(matrix: Tensor, half: Tensor, strip: int) -> Tensor:
    """Subtract half^T half from a symmetric matrix, strip by strip below the diagonal, and mirror
    each strip.
    """
    less = matrix.clone()
    for start in range(0, len(less), strip):
        end = min(start + strip, len(less))
        less[start:, start:end].addmm_(half[:, start:].T, half[:, start:end], alpha=-1)
        less[start:end, end:] = less[end:, start:end].T
    return less
