"""Scoring: the only room in which estimates meet the truth."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dbcl.audit.estimators.smoother import View
from dbcl.transcripts import Truth


@dataclass(frozen=True)
class Scores:
    """How well the changes of one tensor were estimated, round by round.

    `cosines` are with the true change, `errors` are |estimate - truth| / |truth|. `lags` counts the seen rounds that
    came after each one: an attacker that goes backward knows old rounds best.

    >>> Scores("w", (0, 1), (2, 1), (1.0, 0.0), (0.0, 1.0)).typical(oldest=2)
    1.0
    """

    name: str
    rounds: tuple[int, ...]
    lags: tuple[int, ...]
    cosines: tuple[float, ...]
    errors: tuple[float, ...]

    def typical(self, oldest: int = 0) -> float:
        """The median cosine of the rounds with at least so many seen rounds after them."""
        picked = [cosine for cosine, lag in zip(self.cosines, self.lags, strict=True) if lag >= oldest]
        return float(np.median(picked)) if picked else float("nan")

    def typical_error(self, oldest: int = 0) -> float:
        """The median relative error of the same rounds."""
        picked = [error for error, lag in zip(self.errors, self.lags, strict=True) if lag >= oldest]
        return float(np.median(picked)) if picked else float("nan")


def others(truth: Truth, view: View, place: int) -> Tensor:
    """The true change of a tensor from a seen round to the next one, as a matrix, less the client's own part.

    With momentum on the server it is what the round's updates put in, not what older ones still moved.
    """
    start, end = view.rounds[place], view.rounds[place] + view.gaps[place]
    change = truth.change(start, end)[view.name].double()
    if view.momentum and start > 0:
        change = change - view.momentum * truth.change(start - 1, end - 1)[view.name].double()
    return change.reshape(-1, view.dim) - view.lr * view.sketches[place].lift(view.own[place])


def score(truth: Truth, view: View, changes: Iterable[Tensor]) -> Scores:
    """Compare an estimator's changes of one tensor with what really happened."""
    cosines, errors = [], []
    for place, guess in enumerate(changes):
        real = others(truth, view, place)
        length = float(torch.linalg.vector_norm(real))
        cosines.append(_cosine(guess, real))
        errors.append(float(torch.linalg.vector_norm(guess - real)) / length if length else float("nan"))
    count = len(cosines)
    lags = tuple(len(view.rounds) - 1 - place for place in range(count))
    return Scores(view.name, view.rounds[:count], lags, tuple(cosines), tuple(errors))


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
