"""Two classifiers that detect a property from an update: a random forest and a matched filter.

The attacker computes updates from batches with and without the property, trains a classifier on
these updates, and scores the victim's updates (Melis et al. 2019). The random forest is the
published classifier. The matched filter additionally uses the known variance of the defence's
noise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from dbcl.errors import DataError
from dbcl_audit.attacks.roc import Array, Flags
from dbcl_audit.estimators.covariance import solve

Features = NDArray[np.floating[Any]]

MAX_ENTRIES_OF_WHOLE_MATRIX = 5000  # of larger matrices only row maxima are kept, as in the original
COLUMNS_PER_BLOCK = 4096  # features at a time: products in their own precision, sums of them in float64
FOLDS = 5
PRECISION = 1e-7  # of features in float32: no spread is known to be smaller, relative to the features or scores
PENALTIES = 10.0 ** np.arange(-6.0, 2.0)  # lambda, in units of the features' total variance


@dataclass(frozen=True, eq=False)
class Samples:
    """Feature rows of updates `x`, and for each row a flag in `y`: True if the batch had the
    property.

    >>> Samples(np.eye(4), np.array([True, True, False, False])).x.shape
    (4, 4)
    """

    x: Features
    y: Flags

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1] or self.y.dtype != np.bool_:
            raise DataError(f"samples are a matrix and a bool for each row, got {self.x.shape} and {self.y.shape}")
        if min(self.y.sum(), (~self.y).sum()) < 2:
            raise DataError(
                f"samples need 2 or more with and 2 without the property, got {self.y.sum()} of {len(self.y)}"
            )
        if not np.isfinite(self.x).all():
            raise DataError("samples must be finite; leave out the updates that diverged")


def flatten(update: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Features:
    """Concatenate the entries of an update's tensors: all tensors, or those listed in `names`, in
    the given order.

    >>> import torch
    >>> flatten({"weight": torch.eye(2), "bias": torch.tensor([3.0, 4.0])}).tolist()
    [1.0, 0.0, 0.0, 1.0, 3.0, 4.0]
    """
    chosen = update if names is None else names
    return np.concatenate([update[name].detach().cpu().numpy().ravel() for name in chosen])


def melis_features(update: Mapping[str, Tensor], *, vectors: bool) -> Features:
    """Compute the features of Melis et al.: |u|, max-pooled over kernels and long rows, scaled to
    unit norm.

    The published features omit 1-D tensors. `vectors` includes these tensors, and thereby the
    biases, which leak first.

    >>> import torch
    >>> update = {"weight": torch.tensor([[3.0, -4.0]]), "bias": torch.tensor([12.0])}
    >>> melis_features(update, vectors=False).tolist(), (13 * melis_features(update, vectors=True)).round().tolist()
    ([0.6..., 0.8...], [3.0, 4.0, 12.0])
    """
    kept = {name: tensor.detach().abs() for name, tensor in update.items() if vectors or tensor.dim() > 1}
    for name, tensor in kept.items():
        if tensor.dim() > 2:
            kept[name] = tensor.flatten(2).amax(-1)
        elif tensor.dim() == 2 and tensor.numel() > MAX_ENTRIES_OF_WHOLE_MATRIX:
            kept[name] = tensor.amax(-1)
    row = flatten(kept)
    return row / (float(np.linalg.norm(row)) or 1.0)


def forest(train: Samples, test_x: Features, seed: int) -> Array:
    """Score updates with the published classifier: standard scaling, then 100 trees with at least 5
    samples per leaf.

    >>> y = np.arange(40) % 2 == 0
    >>> scores = forest(Samples(y[:, None] + np.zeros((40, 3)), y), np.array([[0.0] * 3, [1.0] * 3]), seed=0)
    >>> bool(scores[1] > scores[0])
    True
    """
    trees = RandomForestClassifier(100, min_samples_leaf=5, n_jobs=1, random_state=seed)
    learner = make_pipeline(StandardScaler(), trees).fit(train.x, train.y)
    return np.asarray(learner.predict_proba(test_x)[:, 1], dtype=np.float64)


class MatchedFilter:
    """Linear discriminant for two classes of updates under noise of known variance.

    w = (Sigma / batch + diag(noise) + lambda I)^-1 (mu_1 - mu_0), with the class means and the
    common covariance of the noiseless training rows. A tested update is a mean over `batch` such
    rows, plus noise with one variance per group of features. With u = 1 / (noise + lambda), w = u
    X^T alpha; only matrices with as many rows as there are samples are inverted.

    lambda is `penalty`, or the entry of `penalties` (in units of the features' total variance) that
    best separates held-out rows under noise. The noise is not sampled: it adds w^T diag(noise) w to
    the variance of the scores. The scores are log odds and can be compared between filters.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(100) % 2 == 0
    >>> score = MatchedFilter(Samples(rng.normal(size=(100, 2)) + 2 * y[:, None], y), np.zeros(2, dtype=np.int64))
    >>> score(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), np.zeros(1)).round()
    array([-4., -0.,  4.])
    """

    def __init__(
        self,
        train: Samples,
        group: NDArray[np.integer[Any]],
        batch: int = 1,
        *,
        penalty: float | None = None,
        penalties: Array = PENALTIES,
    ) -> None:
        self.x, self.y, self.batch, self.penalty, self.penalties = train.x, train.y, batch, penalty, penalties
        self.mean = train.x.mean(axis=0, dtype=np.float64).astype(train.x.dtype)
        self.fold, self.blocks = _folds(train.y), _blocks(group)
        self.grams = np.zeros((group.max() + 1, len(train.y), len(train.y)))
        for number, part in self.blocks:
            block = self._centred(part)
            self.grams[number] += block @ block.T

    def __call__(self, test_x: Features, noise: Array) -> Array:
        """Return the log odds that each update has the property. `noise` holds the noise variance
        of each group of features.
        """
        if noise.shape != (len(self.grams),) or not (noise >= 0).all():
            raise ValueError(f"noise must be a variance of 0 or more for each of {len(self.grams)} groups of features")
        y, batch = self.y, self.batch
        gram = self.grams.sum(axis=0)
        total = max(float(np.trace(_within(gram, y))), PRECISION * float(np.trace(gram))) / batch or 1.0
        best, alpha, scale, odds, middle = -np.inf, np.zeros(len(y)), noise, 0.0, 0.0
        for penalty in total * self.penalties if self.penalty is None else [self.penalty]:
            u = 1 / (noise + penalty)
            gram = np.tensordot(u, self.grams, 1)
            gap, spread = _separation(gram, np.tensordot(noise * u * u, self.grams, 1), y, self.fold, batch)
            if gap / np.sqrt(spread) > best:
                best, alpha, scale = gap / np.sqrt(spread), _dual(gram, y, batch), u
                odds, middle = max(gap, 0.0) / spread, float(_middle(y) @ gram @ alpha)
        scores = np.zeros(len(test_x))
        for number, part in self.blocks:
            w = scale[number] * (alpha @ self._centred(part).astype(np.float64))
            scores += (test_x[:, part] - self.mean[part]).astype(np.float64) @ w
        return np.asarray(odds * (scores - middle), dtype=np.float64)

    def _centred(self, part: slice) -> Features:
        """Return some columns with their mean subtracted. A centred copy of all columns would
        double the memory use.
        """
        return np.asarray(self.x[:, part] - self.mean[part])


def _blocks(group: NDArray[np.integer[Any]]) -> list[tuple[int, slice]]:
    """Split the columns into blocks of adjacent columns of one group."""
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
    return [
        (int(group[first]), slice(start, min(start + COLUMNS_PER_BLOCK, end)))
        for first, end in pairwise(edges)
        for start in range(first, end, COLUMNS_PER_BLOCK)
    ]


def _less_mean(rows: Array, y: Flags) -> Array:
    """Return H X: each row minus the mean of its class, scaled so that Sigma = (H X)^T H X. H is
    symmetric.
    """
    out = rows.copy()
    for kind in (y, ~y):
        out[kind] -= rows[kind].mean(axis=0)
    return np.asarray(out / np.sqrt(max(len(y) - 2, 1)), dtype=np.float64)


def _within(gram: Array, y: Flags) -> Array:
    """Return H G H, the inner products of the rows of H X."""
    return _less_mean(_less_mean(gram, y).T, y)


def _dual(gram: Array, y: Flags, batch: int) -> Array:
    """Return alpha = c - H (I + H G H)^-1 H G c, with mu_1 - mu_0 = X^T c (Woodbury identity for w
    = u X^T alpha).

    Here H is the matrix of `_less_mean` divided by sqrt(batch).
    """
    c = y / y.sum() - ~y / (~y).sum()
    target: Array = gram @ c
    within = torch.from_numpy(np.eye(len(y)) + _within(gram, y) / batch)
    inner = solve(within, torch.from_numpy(_less_mean(target, y))[:, None])[:, 0].numpy()
    return np.asarray(c - _less_mean(inner, y) / batch, dtype=np.float64)


def _middle(y: Flags) -> Array:
    """Return row weights whose weighted sum is the midpoint of the two class means."""
    return np.asarray((y / y.sum() + ~y / (~y).sum()) / 2, dtype=np.float64)


def _folds(y: Flags) -> NDArray[np.int64]:
    """Assign each update to a fold, stratified by class."""
    fold = np.empty(len(y), dtype=np.int64)
    for kind in (y, ~y):
        fold[kind] = np.arange(kind.sum()) % min(FOLDS, y.sum(), (~y).sum())
    return fold


def _separation(gram: Array, noise: Array, y: Flags, fold: NDArray[np.int64], batch: int) -> tuple[float, float]:
    """Return m_1 - m_0 and v / batch + w^T diag(noise) w of the cross-validated scores.

    `gram` is X diag(u) X^T, which gives x_i^T w = (G alpha)_i. `noise` is X diag(u noise u) X^T.
    """
    scores, spread = np.empty(len(y)), 0.0
    for number in range(fold.max() + 1):
        kept, out = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        inner = gram[np.ix_(kept, kept)]
        alpha = _dual(inner, y[kept], batch)
        scores[out] = (gram[np.ix_(out, kept)] - _middle(y[kept]) @ inner) @ alpha
        spread += float(alpha @ noise[np.ix_(kept, kept)] @ alpha) * len(out) / len(y)
    within = (scores[y].var() + scores[~y].var()) / 2 / batch + spread
    # Rows that are all alike have no spread but rounding errors, which differ from one BLAS to another.
    floor = (PRECISION * float(np.abs(scores).max())) ** 2 + float(np.finfo(np.float64).tiny)
    return float(scores[y].mean() - scores[~y].mean()), max(within, floor)
