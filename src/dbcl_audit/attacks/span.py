"""Membership inference from one update of several local steps: the rows of the update lie in the
span of the client's examples.

Reads no transcript. The input is one client's change of a dense first layer with a bias; without
secure aggregation the server receives this change. For any number of local steps, [dV, db] = sum_i
delta_i (x_i R D, 1) over the client's examples. A candidate in the row space is therefore most
likely a member.
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
    """Return an update's change of a dense first layer that has a bias and takes whole images, or
    None without such a layer.

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
    """Score candidates by the error of expressing c = (x R D, 1) by the rows Y = [dV, db] of an
    update; members score higher.

    The score is -log of min_w (|c - w Y|^2 + s^2 tr(M) |w|^2) / |c|^2. The metric M is the inverse
    covariance of all candidates, which suppresses components common to all images. s is the
    rounding error of an entry in the update's dtype. With fewer examples than rows, the
    representation of members is exact. With more examples, members still score higher on average,
    most clearly those that changed the model most. A larger s for noisy updates was tested and gave
    worse scores.

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
    """Infer membership of a client's images from its update `tensors` with `span_scores`.

    Args:
        broadcast: Broadcast that the client received.
        tensors: Update that the client sent.
        members: Images of the client.
        others: Images that no client has.

    Returns:
        AUC and true positive rates. The list is empty if the network has no dense first layer with
            a bias, or if this layer did not change.

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
