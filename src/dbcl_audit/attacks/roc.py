"""ROC curves of scores, the area under a curve, and its bootstrap interval."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

RESAMPLES = 1000
RESAMPLES_PER_BATCH = 50


@dataclass(frozen=True)
class Auc:
    """Area under a ROC curve; 0.5 is guessing.

    `low` and `high` are a 95 % bootstrap interval. If every pair is ranked correctly, the interval
    has zero width and the number of cases limits the accuracy. `roc` holds the false and the true
    positive rates, both ascending.

    >>> Auc(0.75, 0.5, 1.0, ((0.0, 1.0), (0.0, 1.0))).auc
    0.75
    """

    auc: float
    low: float
    high: float
    roc: tuple[tuple[float, ...], tuple[float, ...]]


def measure_auc(scores: Array, truth: Flags, seed: int) -> Auc:
    """Measure AUC = P(score with > score without) + P(equal) / 2. Values below 0.5 are not
    reflected to above 0.5.

    >>> found = measure_auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), seed=0)
    >>> found.auc, found.low <= found.auc <= found.high
    (0.75, True)
    """
    with_, without = np.sort(scores[truth]), np.sort(scores[~truth])
    if not len(with_) or not len(without) or np.isnan(scores).any():
        raise ValueError(f"need scores of both kinds and no NaN, got {len(with_)} with and {len(without)} without")
    below, upto = (np.searchsorted(without, with_, side=side) for side in ("left", "right"))
    aucs = []
    rng = np.random.default_rng(seed)
    for _ in range(RESAMPLES // RESAMPLES_PER_BATCH):
        cumulated = np.zeros((RESAMPLES_PER_BATCH, len(without) + 1))
        np.cumsum(_resample(rng, len(without)), axis=1, out=cumulated[:, 1:])
        beaten = (cumulated[:, below] + cumulated[:, upto]) / 2
        aucs.append((_resample(rng, len(with_)) * beaten).sum(axis=1))
    pairs = len(with_) * len(without)
    low, high = np.quantile(np.concatenate(aucs) / pairs, [0.025, 0.975])
    return Auc(float((below + upto).sum() / 2 / pairs), float(low), float(high), roc(scores, truth))


def _resample(rng: np.random.Generator, size: int) -> NDArray[np.int64]:
    """Count how often each of `size` samples is drawn with replacement; one row per resample."""
    drawn = rng.integers(size, size=(RESAMPLES_PER_BATCH, size)) + size * np.arange(RESAMPLES_PER_BATCH)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES_PER_BATCH * size).reshape(RESAMPLES_PER_BATCH, size)


def roc(scores: Array, truth: Flags) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """List the false and the true positive rates at every threshold where the slope of the curve
    changes.

    >>> roc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    ((0.0, 0.0, 0.5, 0.5, 1.0), (0.0, 0.5, 0.5, 1.0, 1.0))
    """
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # equal scores pass a threshold together
    hits, alarms = (np.append(0, np.cumsum(kind[order])[last]) for kind in (truth, ~truth))
    bend = np.diff(hits[:-1]) * np.diff(alarms[1:]) != np.diff(hits[1:]) * np.diff(alarms[:-1])
    bend = np.concatenate([[True], bend, [True]])
    return tuple((alarms[bend] / (~truth).sum()).tolist()), tuple((hits[bend] / truth.sum()).tolist())
