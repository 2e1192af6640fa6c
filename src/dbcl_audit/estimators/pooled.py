"""Pooled observation of several lanes in one round: a single sketch whose range is the sum of all
their ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbcl.sketch import Identity, LaneSketch, Sketch


@dataclass(frozen=True, eq=False)
class Part:
    """One client's sketch and broadcast of a tensor in a round, and the client's own part of the
    round's change.

    >>> Part(Identity(2), torch.zeros(1, 2), torch.zeros(1, 2)).sketch
    Identity(2 -> 2)
    """

    sketch: Sketch
    seen: Tensor  # (rows, width)
    own: Tensor


class DenseSketch(Sketch):
    """Sketch given by a matrix with orthonormal columns.

    >>> DenseSketch(torch.eye(3)[:, :2]).lift(torch.ones(1, 2))
    tensor([[1., 1., 0.]])
    """

    scheme = "dense"

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.dim, self.width = matrix.shape

    def gain(self, like: Tensor) -> Tensor:
        return like.new_full((self.width,), self.dim / self.width)

    def _apply(self, x: Tensor) -> Tensor:
        return x @ self.matrix.to(x)

    def _lift(self, y: Tensor) -> Tensor:
        return y @ self.matrix.to(y).T

    def _table(self) -> bytes:
        return self.matrix.double().numpy().tobytes()


def pool(parts: Sequence[Part]) -> tuple[Sketch, Tensor, Tensor]:
    """Return one sketch Q for all parts, with (W + N) Q and the sum of the clients' own parts in
    the same space.

    All lanes of a round share the same noise N. Clients of one lane therefore have the same
    observation, and the noise is white in the space of an orthonormal Q. If the lanes together are
    complete, they reveal W + N, and Q is the identity.

    >>> W = torch.arange(8.0).reshape(1, 8).double()
    >>> lanes = [LaneSketch(8, 4, seed=bytes(32), lane=lane) for lane in (0, 1)]
    >>> pool([Part(lane, lane.apply(W), 0 * lane.apply(W)) for lane in lanes])[1].round(decimals=6).equal(W)
    True
    """
    distinct = list({part.sketch.fingerprint(): part for part in parts}.values())
    own = sum((part.sketch.lift(part.own) for part in parts[1:]), parts[0].sketch.lift(parts[0].own))
    if len(distinct) == 1:
        sketch = distinct[0].sketch
        return sketch, distinct[0].seen, sketch.apply(own)
    if is_complete([part.sketch for part in distinct]):
        whole = sum((part.sketch.lift(part.seen) for part in distinct[1:]), distinct[0].sketch.lift(distinct[0].seen))
        return Identity(distinct[0].sketch.dim), whole, own
    joined = torch.cat([part.sketch.dense(part.seen.dtype) for part in distinct], dim=1)  # (dim, all widths)
    basis, sizes, turn = torch.linalg.svd(joined, full_matrices=False)
    kept = sizes > 1e-6 * sizes[0]
    basis, back = basis[:, kept], turn[kept].T / sizes[kept]  # [R_1 R_2 ...] back = basis
    sketch = DenseSketch(basis)
    return sketch, torch.cat([part.seen for part in distinct], dim=1) @ back, sketch.apply(own)


def is_complete(sketches: Sequence[Sketch]) -> bool:
    """Return True if the sketches together lose no information: the sum of R_k R_k^T is I, as for
    all lanes of one bucketing.

    >>> lanes = [LaneSketch(8, 4, seed=bytes(32), lane=lane) for lane in (0, 1)]
    >>> is_complete(lanes), is_complete(lanes[:1])
    (True, False)
    """
    if not all(isinstance(sketch, LaneSketch) for sketch in sketches):
        return False
    if sum(sketch.width for sketch in sketches) != sketches[0].dim:
        return False
    probe = torch.ones(1, sketches[0].dim, dtype=torch.float64)
    probe = probe + torch.arange(sketches[0].dim, dtype=torch.float64) / sketches[0].dim
    back = sum((sketch.lift(sketch.apply(probe)) for sketch in sketches), torch.zeros_like(probe))
    return bool(torch.allclose(back, probe, atol=1e-9))
