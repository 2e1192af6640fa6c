"""Estimators of the paper, options I and II: differences of two broadcasts.

Reads: client-N.
"""

from collections.abc import Callable

from torch import Tensor

from dbcl.sketch import Sketch
from dbcl_audit.estimators.observations import TensorObservations


def option_1(view: TensorObservations) -> list[Tensor]:
    """Estimate a change with option I of the paper: the difference of two effective weights, V_new
    D R^T - V_old D R^T.

    >>> import torch
    >>> from dbcl.sketch import Identity
    >>> seen, own = (torch.zeros(1, 2), torch.full((1, 2), 3.0)), torch.ones(1, 2)
    >>> option_1(TensorObservations("w", (0, 1), (1, 1), (Identity(2), Identity(2)), seen, (own, own)))
    [tensor([[2., 2.]])]
    """
    return _difference(view, lambda sketch, seen: sketch.expand(seen))


def option_2(view: TensorObservations) -> list[Tensor]:
    """Estimate a change with option II of the paper, which omits the gain: V_new R^T - V_old R^T.

    >>> import torch
    >>> from dbcl.sketch import Identity
    >>> seen, own = (torch.zeros(1, 2), torch.full((1, 2), 3.0)), torch.ones(1, 2)
    >>> option_2(TensorObservations("w", (0, 1), (1, 1), (Identity(2), Identity(2)), seen, (own, own)))
    [tensor([[2., 2.]])]
    """
    return _difference(view, lambda sketch, seen: sketch.lift(seen))


def _difference(view: TensorObservations, to_weights: Callable[[Sketch, Tensor], Tensor]) -> list[Tensor]:
    changes = []
    for t in range(len(view.rounds) - 1):
        new, old = (to_weights(view.sketches[k], view.seen[k]) for k in (t + 1, t))
        changes.append(new - old - view.lr * view.sketches[t].lift(view.own[t]))
    return changes
