"""Rewind: undo the rounds one by one, backward from a guess of the last W. Reads: client-N."""

from torch import Tensor

from dbcl_audit.estimators.observations import TensorObservations


def rewind(view: TensorObservations) -> list[Tensor]:
    """Estimate W backward from a guess: W_t = W_(t+1) + (V_t - W_(t+1) R_t) R_t^T. Exact after
    enough rounds without a veil.

    Outside the range of R_t, round t changes nothing and W_t equals W_(t+1). Inside the range, V_t
    determines W_t. Both hold only if all clients share one sketch. Clients of other lanes also
    change W outside the range; the exact attack is then the smoother, which models all lanes.

    >>> import torch
    >>> from dbcl.sketch import Identity
    >>> seen, own = (torch.zeros(1, 2), torch.full((1, 2), 3.0)), torch.ones(1, 2)
    >>> rewind(TensorObservations("w", (0, 1), (1, 1), (Identity(2), Identity(2)), seen, (own, own)))
    [tensor([[2., 2.]])]
    """
    weights = view.sketches[-1].expand(view.seen[-1])
    changes = []
    for t in range(len(view.rounds) - 2, -1, -1):
        sketch = view.sketches[t]
        moved = sketch.apply(weights) - view.seen[t]
        changes.append(sketch.lift(moved - view.lr * view.own[t]))
        weights = weights - sketch.lift(moved)
    return changes[::-1]
