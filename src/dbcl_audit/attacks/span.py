"""Membership inference from one update of several local steps, whose rows span the client's
examples.

Reads no transcript: one client's change of a dense first layer with a bias, which the server has
without secure aggregation. For any number of steps [dV, db] = sum_i delta_i (x_i R D, 1) over the
client's examples. So a candidate that lies in the row space is most likely a member.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dbcl.protocol import Broadcast
from dbcl.sketch import Identity
from dbcl_audit.attacks.first_layer import FirstLayer, dense_first_layer, metric_root
from dbcl_audit.attacks.membership import judge_members
from dbcl_audit.attacks.roc import Array
from dbcl_audit.findings import Finding


def first_layer_change(
    broadcast: Broadcast, tensors: Mapping[str, Tensor], shape: tuple[int, ...]
) -> FirstLayer | None:
    """Return an update's change of a dense first layer with a bias that takes whole images; None if
    there is none.

    >>> import dbcl
    >>> from torch import nn
    >>> broadcast = dbcl.Server(nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))).open_round()
    >>> first_layer_change(broadcast, broadcast.tensors, (1, 4, 4)).bias.shape
    torch.Size([4])
    """
    prefix = dense_first_layer(broadcast, shape)
    if prefix is None:
        return None
    sketch = broadcast.sketches().get(f"{prefix}weight") or Identity(math.prod(shape))
    return FirstLayer(tensors[f"{prefix}weight"], tensors[f"{prefix}bias"], sketch)


def span_scores(change: FirstLayer, candidates: Tensor) -> Array:
    """Score candidates by how well the rows Y = [dV, db] of an update make up c = (x R D, 1);
    higher for members.

    The score is -log of min_w (|c - w Y|^2 + s^2 tr(M) |w|^2) / |c|^2, in the metric M of the
    inverse covariance of all candidates: what is common to all images tells nothing. s is the
    rounding error of an entry in the update's dtype. With fewer examples than rows members are
    exact; with more they still stand out, the more so the more they changed the model. A larger s
    for updates with noise was tried and made the scores worse.

    >>> import dbcl
    >>> x = torch.rand(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> delta = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    >>> scores = span_scores(FirstLayer(delta @ x[:3], delta.sum(1), dbcl.sketch.Identity(8)), x)
    >>> sorted(np.argsort(-scores)[:3].tolist())
    [0, 1, 2]
    """
    rows, eps = change.rows(), torch.finfo(change.weight.dtype).eps
    c = change.sees(candidates)
    root = metric_root(c)
    c, y = c @ root, rows @ root
    _, s, basis = np.linalg.svd(y, full_matrices=False)
    floor = eps**2 * float(np.square(rows).mean()) * float(np.square(root).sum())
    inside = c @ basis.T
    # Both terms are sums of squares, so that a residual of 1e-14 is not lost in a difference.
    residual = np.square(c - inside @ basis).sum(axis=1) + np.square(inside) @ (floor / (np.square(s) + floor))
    scores: Array = np.log(np.square(c).sum(axis=1)) - np.log(np.maximum(residual, 1e-300))
    return scores


def span_membership_findings(
    broadcast: Broadcast, tensors: Mapping[str, Tensor], members: Tensor, others: Tensor
) -> list[Finding]:
    """Infer membership of a client's images from its update `tensors`, by `span_scores`.

    Args:
        broadcast: Broadcast that the client received.
        tensors: Update that the client sent.
        members: Images of the client.
        others: Images that no client has.

    Returns:
        AUC and true positive rates; nothing if the network has no dense first layer with a bias, or
        if that layer did not change.

    >>> import dbcl
    >>> from torch import nn
    >>> x = torch.rand(140, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    >>> broadcast = dbcl.Server(net, dbcl.SketchConfig(sketch="identity-v1")).open_round()
    >>> delta = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    >>> sent = {"1.weight": delta @ x[:4].flatten(1), "1.bias": delta.sum(1)}
    >>> [(found.measure, found.value) for found in span_membership_findings(broadcast, sent, x[:4], x[4:])]
    [('auc', 1.0), ('tpr at 1 % fpr', 1.0)]
    """
    change = first_layer_change(broadcast, tensors, tuple(members.shape[1:]))
    if change is None:
        return []
    if not change.bias.any():  # no unit was active, so that the update is independent of the examples
        return []
    result = judge_members(span_scores(change, torch.cat([members, others])), len(members))
    return result.findings("span of one update", "server", "adaptive")
