"""What one update of several local steps shows the server: its rows span the client's own examples.

Reads no transcript: one client's change of a dense first layer with a bias, which the server has without secure
aggregation. However many steps a client takes, [dV, db] = sum_i delta_i (x_i R D, 1) over its examples. So a candidate
that lies in the row space was most likely trained on, and the sparse vectors of that space are single pictures.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

from dbcl.errors import ConfigError
from dbcl.protocol import Broadcast
from dbcl.sketch import Identity
from dbcl_audit import picture_quality as pictures
from dbcl_audit.attacks.first_layer import FirstLayer, dense_first_layer, metric_root, solve_inputs
from dbcl_audit.attacks.membership import judge
from dbcl_audit.attacks.roc import Array
from dbcl_audit.findings import Curve, Finding

CLEAR = 3000  # times the rounding noise: weaker directions are too inexact to look for zeros in
ZERO = 2e-3  # of a pixel's range
MORE_ZEROS = 0.2  # a picture has so large a share of zeros beyond those that any solution has
SHOWN = 8  # pictures in a grid
REWEIGHTED = 3  # times at most, for each start


def first_layer_change(
    broadcast: Broadcast, tensors: Mapping[str, Tensor], shape: tuple[int, ...]
) -> FirstLayer | None:
    """What an update says of a dense first layer with a bias that takes whole pictures; None where there is none.

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
    """Score candidates by how well the rows Y = [dV, db] of an update make up c = (x R D, 1); higher for members.

    The score is -log of min_w (|c - w Y|^2 + s^2 tr(M) |w|^2) / |c|^2, in the metric M of the inverse covariance of all
    candidates: what is common to all pictures tells nothing. s is the rounding error of an entry in the update's dtype.
    With fewer examples than rows members are exact; with more they still stand out, the more so the more they changed
    the model. A larger s for updates with noise was tried and made the scores worse.

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


@dataclass(frozen=True, eq=False)
class Unmixed:
    """The pictures that were found in an update, how many vectors it spans, and the linear programmes it took.

    `sketched` holds x R of every picture, before the sketch was undone.

    >>> Unmixed(torch.zeros(2, 1, 4, 4), torch.zeros(2, 8), rank=3, programmes=10, seconds=0.5).images.shape
    torch.Size([2, 1, 4, 4])
    """

    images: Tensor
    sketched: Tensor
    rank: int
    programmes: int
    seconds: float


def unmix(
    change: FirstLayer,
    shape: tuple[int, ...],
    box: tuple[float, float],
    *,
    limit: int = 2000,
    step: Callable[[int, int], None] | None = None,
    solver_steps: int = 300,
    seed: int = 0,
) -> Unmixed:
    """Find single pictures in the mixtures of an update: min sum_j a_j |(w Z)_j| subject to r w = 1, for many r and a.

    The rows of Z span those of the update in coordinates in which black pixels are 0: dV D^-1 - db (low R). Where all
    inputs of a bucket have one sign, w Z must have it too. The functional r is a column of Z or that of the bias, made
    orthogonal to what was found before; the weights a are equal or random and then follow the solution, so that what is
    small becomes zero. What has many zeros and fits the box is a picture; its sketch is undone by `solve_inputs`.
    `limit` is the number of linear programmes; after each `step` is called with their number and the limit.

    >>> import dbcl
    >>> x = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
    >>> x[0, :, 1:7, 2], x[1, :, 3, 1:7] = 0.5, 1.0
    >>> delta = torch.tensor([[1.0, 2.0], [3.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    >>> change = FirstLayer(delta @ x.flatten(1), delta.sum(1), dbcl.sketch.Identity(64))
    >>> found = unmix(change, (1, 8, 8), (0, 1), limit=20)
    >>> pictures.psnr(found.images, x).min().item() > 60
    True
    """
    began = perf_counter()
    low, high = box
    sketch, rows = change.sketch, change.rows()
    like = torch.ones(sketch.dim, dtype=torch.float64)
    black, gain = sketch.apply(low * like).numpy(), sketch.gain(like).numpy()
    coefficients = sketch.dense().numpy() * (high - low)
    lowest, highest = np.minimum(coefficients, 0).sum(axis=0), np.maximum(coefficients, 0).sum(axis=0)
    unit = highest - lowest  # so that every column has range 1
    bias = rows[:, -1:]
    mixed = np.concatenate([(rows[:, :-1] / gain - bias * black) / unit, bias], axis=1)
    _, s, basis = np.linalg.svd(mixed, full_matrices=False)
    noise = torch.finfo(change.weight.dtype).eps * math.sqrt(float(np.square(mixed).mean()))
    clear = basis[s > CLEAR * noise * (math.sqrt(mixed.shape[0]) + math.sqrt(mixed.shape[1])) / 4]
    search = _Search(clear, lowest / unit, highest / unit, np.random.default_rng(seed))
    done = 0
    while done < limit and len(search.found) < len(clear):
        search.begin()
        for _ in range(min(REWEIGHTED + 1, limit - done)):
            ended = search.programme()
            done += 1
            if step is not None:
                step(done, limit)
            if ended:
                break
    sketched = torch.from_numpy(np.array(search.found).reshape(-1, len(unit)) * unit + black)
    if isinstance(sketch, Identity):
        images = [one.clamp(low, high).reshape(shape) for one in sketched]
    else:
        images = [solve_inputs([(sketch, one)], shape, box=box, steps=solver_steps) for one in sketched]
    stacked = torch.stack(images) if images else torch.zeros(0, *shape, dtype=torch.float64)
    return Unmixed(stacked, sketched, len(clear), done, perf_counter() - began)


def span_membership_findings(
    broadcast: Broadcast, tensors: Mapping[str, Tensor], members: Tensor, others: Tensor
) -> list[Finding]:
    """How well the server tells a client's pictures from others by `span_scores` of its update `tensors`.

    Nothing is found where the network has no dense first layer with a bias, or where that did not change.

    >>> import dbcl
    >>> from torch import nn
    >>> x = torch.rand(140, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
    >>> broadcast = dbcl.Server(net, dbcl.SketchConfig(sketch="identity-v1")).open_round()
    >>> delta = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    >>> sent = {"1.weight": delta @ x[:4].flatten(1), "1.bias": delta.sum(1)}
    >>> [(found.measure, found.value) for found in span_membership_findings(broadcast, sent, x[:4], x[4:])]
    [('membership auc', 1.0), ('tpr at 1 % fpr', 1.0)]
    """
    change = first_layer_change(broadcast, tensors, tuple(members.shape[1:]))
    if change is None:
        return []
    if not change.bias.any():  # no unit was active, and the update says nothing of anybody
        return []
    truth = np.arange(len(members) + len(others)) < len(members)
    result = judge(span_scores(change, torch.cat([members, others])), truth)
    named: dict[str, Any] = {
        "attack": "span of one update", "seat": "server", "attacker": "adaptive", "target": "membership",
        "budget": {"members": len(members), "non-members": len(others)},
    }  # fmt: skip
    axes = ("false positive rate", "true positive rate")
    curve = Curve("", *result.roc)
    found = [
        Finding(**named, measure="membership auc", value=result.auc, chance=0.5, curves=(curve,), axes=axes),
        Finding(**named, measure="tpr at 1 % fpr", value=result.tpr_at_1_percent, chance=0.01),
        Finding(**named, measure="tpr at 0.1 % fpr", value=result.tpr_at_01_percent, chance=0.001),
    ]
    # Of fewer than 1,000 others one in a thousand cannot be told: no attack has failed, so nothing is said.
    return [finding for finding in found if not math.isnan(finding.value)]


def unmixed_findings(
    broadcast: Broadcast,
    tensors: Mapping[str, Tensor],
    truth: Tensor,
    box: tuple[float, float],
    *,
    limit: int = 2000,
    step: Callable[[int, int], None] | None = None,
    solver_steps: int = 300,
) -> list[Finding]:
    """Recover a client's pictures by `unmix` of its update `tensors`, measured over all pictures that it trained on.

    A picture that was not recovered counts as the mean of all, which is also what guessing gives. Nothing is found
    where the network has no dense first layer with a bias.

    >>> import dbcl
    >>> from torch import nn
    >>> x = torch.zeros(2, 1, 12, 12)
    >>> x[0, :, 1:7, 2], x[1, :, 3, 1:7] = 0.5, 1.0
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    >>> broadcast = dbcl.Server(net, dbcl.SketchConfig(sketch="identity-v1")).open_round()
    >>> delta = torch.tensor([[1.0, 2.0], [3.0, 1.0], [1.0, -1.0]])
    >>> sent = {"1.weight": delta @ x.flatten(1), "1.bias": delta.sum(1)}
    >>> found = unmixed_findings(broadcast, sent, x, (0, 1), limit=20)
    >>> [one.measure for one in found], found[2].value
    (['psnr', 'ssim', 'share above 20 dB'], 1.0)
    """
    change = first_layer_change(broadcast, tensors, tuple(truth.shape[1:]))
    if change is None:
        return []
    failures: tuple[str, ...] = ()
    try:
        result = unmix(change, tuple(truth.shape[1:]), box, limit=limit, step=step, solver_steps=solver_steps)
    except ConfigError as error:
        nothing = torch.zeros(0, *truth.shape[1:], dtype=torch.float64)
        result, failures = Unmixed(nothing, torch.zeros(0, change.sketch.width), 0, 0, 0.0), (str(error),)
    truth = truth.detach().cpu().double()
    mean = truth.mean(dim=0, keepdim=True).expand_as(truth)
    # As many means as pictures: pairing takes a recovered one only where it is nearer.
    got = pictures.pair(torch.cat([result.images, mean]), truth, box)
    values, guessed = (pictures.psnr(each, truth, box, ordered=True) for each in (got, mean))
    best = values.argsort(descending=True, stable=True)[:SHOWN]
    grid = pictures.grid_png([("truth", truth[best]), ("rebuilt", got[best])], box)
    named: dict[str, Any] = {
        "attack": "unmixing one update", "seat": "server", "attacker": "adaptive", "target": "image",
        "budget": {"pictures": len(truth), "recovered": len(result.images), "spanned": result.rank,
                   "linear programmes": result.programmes, "seconds": round(result.seconds, 1)},
        "failures": failures,
    }  # fmt: skip
    low, high, similar = float(values.min()), float(values.max()), pictures.ssim(got, truth, box, ordered=True)
    note = "median over all its pictures, those not recovered as the mean; interval: worst and best picture"
    shown = (("the true pictures that were rebuilt best, and below them what the server rebuilt", grid),)
    return [
        Finding(**named, measure="psnr", value=float(np.median(values)), low=low, high=high,
                chance=float(np.median(guessed)), note=note, images=shown),
        Finding(**named, measure="ssim", value=float(np.median(similar)), note="median over all its pictures"),
        Finding(**named, measure="share above 20 dB", value=pictures.share_above(values),
                chance=pictures.share_above(guessed)),
    ]  # fmt: skip


class _Search:
    """Sparse vectors of a row space, one start after another; `found` holds them, scaled so that the bias is 1."""

    def __init__(self, basis: Array, lowest: Array, highest: Array, rng: np.random.Generator) -> None:
        self.z, self.bias = basis[:, :-1], basis[:, -1]
        self.lowest, self.highest, self.rng = lowest, highest, rng
        self.live = np.flatnonzero(np.abs(self.z).max(axis=0, initial=0) > ZERO * 1e-2)
        self.found: list[Array] = []
        self.ways = np.zeros((len(basis), 0))  # an orthonormal basis of the w that were found
        self.columns: list[int] = []
        self.starts = 0

    def begin(self) -> None:
        """Choose a functional and weights that no start had before."""
        self.starts += 1
        self.weights = np.ones(len(self.live))
        if self.starts % 3 == 0 or not len(self.live):
            self.functional = self.bias
            self.weights = self.rng.exponential(size=len(self.live))
        else:
            self.columns = self.columns or self.rng.permutation(self.live).tolist()
            column = self.columns.pop()
            sign = _sign(self.lowest[column], self.highest[column]) or self.rng.choice([-1, 1])
            self.functional = sign * self.z[:, column]
        self.functional = self.functional - self.ways @ (self.ways.T @ self.functional)

    def programme(self) -> bool:
        """Solve one linear programme and keep a picture if it gave one; true where this start is at its end.

        It is solved as its dual: max t subject to Z u = t r and |u_j| <= a_j, one-sided where the sign is known. That
        has as many equations as the row space has dimensions; w are their multipliers.
        """
        if np.linalg.norm(self.functional) < 1e-9:
            return True
        z, signs = self.z[:, self.live], _sign(self.lowest[self.live], self.highest[self.live])
        weights = self.weights / self.weights.max(initial=1e-9)
        bounds = np.stack([np.where(signs > 0, -np.inf, -weights), np.where(signs < 0, np.inf, weights)], axis=1)
        solved = linprog(
            np.append(np.zeros(len(self.live)), -1.0),
            A_eq=np.concatenate([z, -self.functional[:, None]], axis=1),
            b_eq=np.zeros(len(z)),
            bounds=np.concatenate([bounds, [[0.0, np.inf]]]),
            method="highs-ds",
        )
        if solved.status != 0:
            return True
        w = np.asarray(solved.eqlin.marginals)
        scale = w @ self.bias
        if abs(scale) < 1e-6 * np.linalg.norm(w):
            return True
        values = w @ z / scale
        self.weights = 1 / (np.abs(values) + 0.1)
        zeros = np.abs(values) < ZERO
        if len(z) == 1 or zeros.sum() > len(z) + MORE_ZEROS * (len(self.live) - len(z)):
            return self.keep(self.live[zeros])
        return False

    def keep(self, zeros: NDArray[np.int64]) -> bool:
        """Keep the vector with these zeros if it is the only one, is new and fits the box; false where it does not."""
        z = self.z[:, zeros]
        squares, vectors = np.linalg.eigh(z @ z.T)  # from the smallest
        w, scale = vectors[:, 0], vectors[:, 0] @ self.bias
        if np.linalg.norm(w - self.ways @ (self.ways.T @ w)) < 1e-3:
            return True  # what was found before: this start leads nowhere else
        if abs(scale) < 1e-6 or (len(w) > 1 and squares[1] < 100 * max(squares[0], 1e-14)):
            return False
        # Halves of two pictures that cancel somewhere are a corner as well. In buckets with one sign nothing cancels,
        # so these must hold a picture by themselves; and no single place alone may.
        sure = z[:, _sign(self.lowest[zeros], self.highest[zeros]) != 0]
        if len(w) > 1 and np.linalg.eigvalsh(sure @ sure.T)[1] < 1e-10:
            return False
        leverage = (np.square(vectors[:, 1:].T @ z) / squares[1:, None]).sum(axis=0)
        if leverage.max(initial=0) > 1 - 1e-6:
            return False
        found = w @ self.z / scale
        if (found < self.lowest - 10 * ZERO).any() or (found > self.highest + 10 * ZERO).any():
            return False
        self.found.append(found)
        self.ways = np.linalg.qr(np.concatenate([self.ways, w[:, None]], axis=1))[0]
        return True


def _sign(lowest: Any, highest: Any) -> Any:
    """1 and -1 where a bucket's values cannot be negative or positive, else 0."""
    return np.where(lowest > -1e-9, 1, np.where(highest < 1e-9, -1, 0))
