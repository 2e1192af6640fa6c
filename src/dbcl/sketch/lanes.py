"""Count sketches of several lanes, with shared buckets and complementary coefficients."""

import copy
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl import seeds
from dbcl.errors import SketchError
from dbcl.sketch.buckets import BucketSketch, Tables
from dbcl.sketch.operator import check_width


class LaneSketch(BucketSketch):
    """Balanced count sketch in which lane k uses the k-th vector of an orthogonal basis of every
    bucket.

    All lanes share the same random buckets and signs. Lane 0 adds the members of a bucket, as
    `CountSketch` does; for two members, lane 1 takes their difference. If every bucket has as many
    members as there are lanes, the lanes together are lossless: the sum of R_k R_k^T over the lanes
    is I. Each lane is unbiased for all bucket sizes. In a bucket with fewer members than lanes, the
    remaining lanes repeat its basis vectors, starting with the first.

    >>> import torch
    >>> lanes = [LaneSketch(4, 2, seed=bytes(32), lane=k, lanes=2) for k in (0, 1)]
    >>> lanes[1].dense(torch.float32).round(decimals=2)
    tensor([[ 0.7100,  0.0000],
            [ 0.0000,  0.7100],
            [ 0.0000,  0.7100],
            [-0.7100,  0.0000]])
    >>> sum(lane.dense() @ lane.dense().T for lane in lanes).round(decimals=6).equal(torch.eye(4).double())
    True
    """

    scheme = "lanes-v1"

    def __init__(
        self, dim: int, width: int, *, seed: bytes, round: int = 0, name: str = "", lane: int = 0, lanes: int = 2
    ) -> None:
        check_width(dim, width)
        if not 0 <= lane < lanes:
            raise SketchError(f"lane must be between 0 and {lanes - 1} (the lanes less one), got {lane}")
        self.lane, self.lanes = lane, lanes
        self._first: LaneSketch | None = None
        words = seeds.words(seed, self.scheme, round, name, dim, width, n=dim)
        signs = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        rank = np.empty(dim, dtype=np.int64)  # the sign's bit is kept out of the key
        rank[np.argsort(words >> np.uint64(1), kind="stable")] = np.arange(dim)
        buckets, places = rank % width, rank // width
        self._drawn = np.stack([buckets, places, signs.astype(np.int64)])
        self._fill(buckets, self._coefficients(width), gain_per_member=1.0)

    def _coefficients(self, width: int) -> NDArray[np.float64]:
        """Return the coefficient of every input in this lane."""
        buckets, places, signs = self._drawn
        small, larger = len(buckets) // width, buckets < len(buckets) % width
        vectors = [np.append(basis_vector(small, self.lane), 0.0), basis_vector(small + 1, self.lane)]
        coefficients: NDArray[np.float64] = signs * np.where(larger, vectors[1][places], vectors[0][places])
        return coefficients

    def in_lane(self, lane: int) -> "LaneSketch":
        """Return the sketch of another lane, derived from the same random draws.

        >>> first = LaneSketch(75, 37, seed=bytes(32))
        >>> first.in_lane(1).fingerprint() == LaneSketch(75, 37, seed=bytes(32), lane=1).fingerprint()
        True
        """
        if lane == self.lane:
            return self
        if not 0 <= lane < self.lanes:
            raise SketchError(f"lane must be between 0 and {self.lanes - 1} (the lanes less one), got {lane}")
        twin = copy.copy(self)
        twin.lane, twin._first, twin._tables = lane, self, {}
        sizes = self._gain.numpy()[self._bucket.numpy()]
        twin._unit = torch.from_numpy(twin._coefficients(self.width) / np.sqrt(sizes))
        return twin

    def tables(self, like: Tensor) -> Tables:
        if self._first is None:
            return super().tables(like)
        key = like.device, like.dtype
        if key not in self._tables:
            self._tables[key] = self._first.tables(like).reweighed(self._unit)
        return self._tables[key]

    def _table(self) -> bytes:
        lane = np.array([self.lane, self.lanes], dtype="<i8")
        return lane.tobytes() + self._drawn.astype("<i8").tobytes()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dim} -> {self.width}, lane {self.lane} of {self.lanes})"


def basis_vector(size: int, lane: int) -> NDArray[np.float64]:
    """Return one vector of an orthogonal basis, scaled to the norm of a vector of ones. Lanes
    beyond `size` repeat the basis.

    If the size is a power of two, the basis consists of the rows of Sylvester's Hadamard matrix,
    which weights all members equally; otherwise of the rows of the discrete cosine transform.

    Args:
        size: Number of members of the bucket.
        lane: Index of the lane.

    >>> [basis_vector(4, lane).astype(int).tolist() for lane in (0, 1, 2)]
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1]]
    >>> basis_vector(3, 1).round(3)
    array([ 1.225,  0.   , -1.225])
    """
    row = lane % size
    if size & (size - 1) == 0:
        return np.array([1.0 - 2.0 * ((row & place).bit_count() % 2) for place in range(size)])
    if row == 0:
        return np.ones(size)
    turns = [(2 * place + 1) * row for place in range(size)]  # of pi / (2 size)
    vector = [0.0 if turn % (2 * size) == size else math.cos(math.pi * turn / (2 * size)) for turn in turns]
    return math.sqrt(2.0) * np.array(vector)
