"""Best linear estimates of every update from all rounds, with known or fitted scales.

Reads: client-N.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from dbcl.sketch import Identity
from dbcl_audit.estimators.covariance import ShapedUpdates, WhiteUpdates
from dbcl_audit.estimators.kalman import KalmanSmoother, OnStep, Scales, Smoothed
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.others import Lanes
from dbcl_audit.estimators.pooled import is_complete

MAX_LOG_SCALE = 40.0
"""Bound on the logarithms of fitted scales, which keeps the squared scales finite and positive."""


def known_scales(view: TensorObservations, veil: float) -> Scales:
    """Return the scales of the model for a known relative veil size. The other scales are computed
    from the observations.

    >>> view = TensorObservations("w", (0,), (1,), (Identity(2),), (torch.ones(4, 2),), (torch.full((4, 2), 0.5),))
    >>> known_scales(view, 0.0)
    Scales(veil=1e-07, update=0.5, weight=1.0)
    """
    size = _rms(view.seen)
    weight = size / (1 + veil**2) ** 0.5
    return Scales(max(veil * weight, 1e-7 * size), max(_rms(view.own), 1e-9 * size), weight)


def fitted_scales(
    view: TensorObservations, start: Scales, *, rounds: int = 24, rows: int = 64, steps: int = 40
) -> Scales:
    """Return the maximum-likelihood scales, fitted to the first rounds, for unknown sizes of veil
    and updates.

    >>> rng = torch.Generator().manual_seed(0)
    >>> seen = tuple(torch.randn(30, 1, generator=rng).double().cumsum(0) for _ in range(3))
    >>> own = (torch.zeros(30, 1).double(),) * 3
    >>> view = TensorObservations("w", (0, 1, 2), (1,) * 3, (Identity(1),) * 3, seen, own)
    >>> fitted_scales(view, Scales(1.0, 1.0, 3.0), steps=5).weight
    3.0
    """
    few = view.first(rounds).rows(slice(0, rows))

    def unlikely(logs: NDArray[np.float64]) -> float:
        veil, update = np.exp(np.clip(logs, -MAX_LOG_SCALE, MAX_LOG_SCALE))
        return -KalmanSmoother(few, Scales(veil, update, start.weight), WhiteUpdates(few, update)).likelihood()

    begin = np.log(np.maximum([start.veil, start.update], math.exp(-MAX_LOG_SCALE)))
    best = minimize(unlikely, begin, method="Nelder-Mead", options={"maxfev": steps})
    veil, update = np.exp(np.clip(best.x, -MAX_LOG_SCALE, MAX_LOG_SCALE))
    return Scales(float(veil), float(update), start.weight)


def smoother(
    view: TensorObservations, scales: Scales, *, known_range: bool = True, on_step: OnStep | None = None
) -> Smoothed:
    """Return the best linear estimate of every change given all rounds, by a Kalman filter and a
    backward pass.

    Updates are modelled as white in the space of V with variance `scales.update`^2, in the range of
    R_t of every lane that contains other clients. Without `known_range` they are white in the space
    of W.

    >>> seen, own = tuple(torch.full((1, 1), float(t)).double() for t in range(4)), (torch.zeros(1, 1).double(),) * 4
    >>> view = TensorObservations("w", (0, 1, 2, 3), (1,) * 4, (Identity(1),) * 4, seen, own)
    >>> [round(float(change), 3) for change in smoother(view, Scales(veil=1e-6, update=1.0, weight=1.0))]
    [1.0, 1.0, 1.0]
    """
    whole = all(isinstance(sketch, Identity) for sketch in view.sketches)
    shares = [_isotropic(view.lanes(t)) if whole else None for t in range(len(view.rounds))]
    if all(share is not None for share in shares):
        shape = view.seen[0].shape
        entries = replace(  # every entry is a random walk of its own
            view,
            sketches=(Identity(1),) * len(view.sketches),
            seen=tuple(v.reshape(-1, 1) for v in view.seen),
            own=tuple(u.reshape(-1, 1) for u in view.own),
            others=tuple(((Identity(1), float(share or 0.0)),) for share in shares),
        )
        found = KalmanSmoother(entries, scales, WhiteUpdates(entries, scales.update)).smooth()
        return Smoothed([change.reshape(shape) for change in found], found.start.reshape(shape))
    return KalmanSmoother(view, scales, WhiteUpdates(view, scales.update, known_range=known_range), on_step).smooth()


def shaped_smoother(
    view: TensorObservations, scales: Scales, *, groups: int = 4, on_step: OnStep | None = None
) -> Smoothed:
    """Return the smoother's estimates for updates whose row and column covariances equal those of
    the client's own: vec(U) ~ N(0, A x C).

    In the eigenbasis of A the rows are independent, their variances are the eigenvalues of A, and
    the veil remains white. The rows are divided into `groups` of similar variance, with one filter
    per group.

    >>> seen = tuple(torch.full((1, 1), float(t)).double() for t in range(4))
    >>> own = (torch.full((1, 1), 0.5).double(),) * 4
    >>> view = TensorObservations("w", (0, 1, 2, 3), (1,) * 4, (Identity(1),) * 4, seen, own)
    >>> [round(float(change), 3) for change in shaped_smoother(view, Scales(veil=1e-6, update=1.0, weight=1.0))]
    [0.5, 0.5, 0.5]
    """
    lifted = [sketch.lift(own) for sketch, own in zip(view.sketches, view.own, strict=True)]
    columns = sum((each.T @ each for each in lifted), torch.zeros(view.dim, view.dim, dtype=torch.float64))
    rows = sum(
        (each @ each.T for each in view.own), torch.zeros(len(view.own[0]), len(view.own[0]), dtype=torch.float64)
    )
    columns, rows = _shrunk(columns), _shrunk(rows)
    variances, axes = torch.linalg.eigh(rows)
    turned = replace(view, seen=tuple(axes.T @ v for v in view.seen), own=tuple(axes.T @ u for u in view.own))
    changes = [torch.zeros(len(axes), view.dim, dtype=torch.float64) for _ in view.rounds[:-1]]
    start = torch.zeros(len(axes), view.dim, dtype=torch.float64)
    parts = torch.tensor_split(torch.arange(len(axes)), min(groups, len(axes)))
    for number, part in enumerate(parts):
        update = scales.update * float(variances[part].mean()) ** 0.5
        some = KalmanSmoother(turned.rows(part), scales, ShapedUpdates(view, update, columns)).smooth()
        for change, found in zip(changes, some, strict=True):
            change[part] = found
        start[part] = some.start
        if on_step is not None:
            on_step(number + 1, len(parts))
    return Smoothed([axes @ change for change in changes], axes @ start)


def _isotropic(lanes: Lanes) -> float | None:
    """Return the factor s for which the mean of R_k R_k^T over the other clients is s I, or None if
    it is not a multiple of I.
    """
    if all(isinstance(sketch, Identity) for sketch, _ in lanes):
        return sum(share for _, share in lanes)
    shares = [share for _, share in lanes]
    whole = sum(sketch.width for sketch, _ in lanes) == lanes[0][0].dim and max(shares) - min(shares) < 1e-9
    return shares[0] if whole and is_complete([sketch for sketch, _ in lanes]) else None


def _shrunk(matrix: Tensor, weight: float = 0.1) -> Tensor:
    """Return a covariance with mean variance 1, shrunk by `weight` towards the identity."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    size = float(matrix.diagonal().mean())
    return torch.lerp(matrix / size, eye, weight) if size > 0 else eye


def _rms(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt())
