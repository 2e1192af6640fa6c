"""Comparison of estimates with the ground truth. No other module reads the folder `truth/`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dbcl.transcripts import Truth
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.smoother import known_scales
from dbcl_audit.numerics import cosine
from dbcl_audit.theory import veil_cosine


@dataclass(frozen=True)
class Scores:
    """Cosines and errors of the estimated changes of one tensor, by round.

    Args:
        name: name of the tensor.
        rounds: scored rounds.
        lags: number of rounds observed after each scored round. Backward estimators are most
            accurate for early rounds.
        cosines: cosine similarities of the estimated and the true changes.
        errors: relative errors |estimate - truth| / |truth|.

    >>> Scores("w", (0, 1), (2, 1), (1.0, 0.0), (0.0, 1.0)).median_cosine(min_lag=2)
    1.0
    """

    name: str
    rounds: tuple[int, ...]
    lags: tuple[int, ...]
    cosines: tuple[float, ...]
    errors: tuple[float, ...]

    def median_cosine(self, min_lag: int = 0) -> float:
        """Return the median cosine over the rounds with at least `min_lag` later observed
        rounds.
        """
        return self._median(self.cosines, min_lag)

    def median_error(self, min_lag: int = 0) -> float:
        """Return the median relative error over the rounds with at least `min_lag` later observed
        rounds.
        """
        return self._median(self.errors, min_lag)

    def _median(self, values: Sequence[float], min_lag: int) -> float:
        picked = [value for value, lag in zip(values, self.lags, strict=True) if lag >= min_lag]
        return float(np.median(picked)) if picked else float("nan")


def true_change(truth: Truth, view: TensorObservations, index: int) -> Tensor:
    """Return the true change of a tensor between successive observed rounds as a matrix, without
    the client's own part.

    `index` counts the observed rounds. With server momentum, the result is the contribution of this
    round's updates alone.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl_audit.estimators.observations import tensor_observations
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> true_change(played.truth, tensor_observations(played.attacker)["1.bias"], index=0).shape
    torch.Size([1, 10])
    """
    start, end = view.rounds[index], view.rounds[index] + view.gaps[index]
    change = truth.change(start, end)[view.name].double()
    if view.momentum and start > 0:
        change = change - view.momentum * truth.change(start - 1, end - 1)[view.name].double()
    return view.matrix(change) - view.lr * view.sketches[index].lift(view.own[index])


def score(truth: Truth, view: TensorObservations, changes: Iterable[Tensor]) -> Scores:
    """Compare an estimator's changes of one tensor with the true changes.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl_audit.estimators.observations import tensor_observations
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> view = tensor_observations(played.attacker)["1.bias"]
    >>> [round(cosine, 3) for cosine in score(played.truth, view, [true_change(played.truth, view, 0)]).cosines]
    [1.0]
    """
    cosines, errors = [], []
    for index, guess in enumerate(changes):
        real = true_change(truth, view, index)
        length = float(torch.linalg.vector_norm(real))
        cosines.append(cosine(guess, real))
        errors.append(float(torch.linalg.vector_norm(guess - real)) / length if length else float("nan"))
    count = len(cosines)
    lags = tuple(len(view.rounds) - 1 - index for index in range(count))
    return Scores(view.name, view.rounds[:count], lags, tuple(cosines), tuple(errors))


def predicted_cosine(truth: Truth, view: TensorObservations, veil: float) -> float:
    """Return the predicted cosine of the isotropic formula, (1 + 4 kappa^2)^(-1/4), computed with
    the true size of the other clients' updates.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl_audit.estimators.observations import tensor_observations
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> round(predicted_cosine(played.truth, tensor_observations(played.attacker)["1.bias"], veil=0.0), 3)
    1.0
    """
    rows = len(view.seen[0])
    sizes = [
        float(true_change(truth, view, index).square().sum()) / (rows * view.update_width(index))
        for index in range(len(view.rounds) - 1)
    ]
    size = float(np.mean(sizes)) ** 0.5
    return float(veil_cosine(known_scales(view, veil).veil / size)) if size > 0 else 0.0
