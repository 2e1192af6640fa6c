"""The count sketch: every input lands in one bucket, with a random sign."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl import seeds
from dbcl.sketch.operator import Sketch, check_width


class CountSketch(Sketch):
    """Balanced count sketch: a random permutation of the inputs, dealt into `width` buckets in turn, with random signs.

    The buckets' sizes differ by at most one and every input is covered. Column j of R is the signed indicator of bucket
    j divided by the square root of its size, and the gain is the size. With `hashed=True` each input goes to an
    independent uniform bucket instead, as in textbooks; empty buckets are left out, so `width` may come out smaller.

    >>> sketch = CountSketch(5, 2, seed=bytes(32), round=0, name="fc1.weight")
    >>> sketch.dense(torch.float32).round(decimals=2)
    tensor([[-0.5800,  0.0000],
            [ 0.0000, -0.7100],
            [ 0.5800,  0.0000],
            [ 0.0000,  0.7100],
            [ 0.5800,  0.0000]])
    >>> sketch.gain(torch.ones(1))
    tensor([3., 2.])
    """

    def __init__(
        self, dim: int, width: int, *, seed: bytes, round: int = 0, name: str = "", hashed: bool = False
    ) -> None:
        check_width(dim, width)
        self.scheme = "count-hashed-v1" if hashed else "count-v1"
        words = seeds.words(seed, self.scheme, round, name, dim, width, n=dim)
        signs = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        keys = words >> np.uint64(1)  # the sign's bit is kept out of the key
        if hashed:
            buckets = (keys % np.uint64(width)).astype(np.int64)
        else:
            buckets = np.empty(dim, dtype=np.int64)
            buckets[np.argsort(keys, kind="stable")] = np.arange(dim) % width
        self.dim = dim
        self._set_tables(buckets, signs)

    def _set_tables(self, buckets: NDArray[np.int64], signs: NDArray[np.float64]) -> None:
        sizes = np.bincount(buckets)
        # Number the buckets from the largest to the smallest and drop the empty ones. Then layer k, the k-th members of
        # all buckets that have one, fills the first len(layer k) columns, and `apply` is a few gathers without padding.
        order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
        rank = np.empty(len(sizes), dtype=np.int64)
        rank[order] = np.arange(len(order))
        buckets, sizes = rank[buckets], sizes[order]
        members = np.argsort(buckets, kind="stable")
        starts = np.cumsum(sizes) - sizes
        self.width = len(sizes)
        self._bucket = torch.from_numpy(buckets)  # (dim,)
        self._weight = torch.from_numpy(signs / np.sqrt(sizes[buckets]))  # (dim,), float64
        self._layers = [
            torch.from_numpy(members[starts[: np.count_nonzero(sizes > k)] + k]) for k in range(int(sizes.max()))
        ]
        self._gain = torch.from_numpy(sizes.astype(np.float64))  # (width,)
        self._tables: dict[tuple[torch.device, torch.dtype], _Tables] = {}

    def gain(self, like: Tensor) -> Tensor:
        return self._on(like).gain

    def project(self, x: Tensor) -> Tensor:
        return self._map(x, self.dim, self._project, self._expand)

    def expand(self, y: Tensor) -> Tensor:
        return self._map(y, self.width, self._expand, self._project)

    def _apply(self, x: Tensor) -> Tensor:
        tables = self._on(x)
        return _gather(x, tables.layers, tables.weights)

    def _lift(self, y: Tensor) -> Tensor:
        tables = self._on(y)
        return y.index_select(-1, tables.bucket).mul_(tables.weight)

    # The same two with the gain in the weights, which saves a pass over the activations.
    def _project(self, x: Tensor) -> Tensor:
        tables = self._on(x)
        return _gather(x, tables.layers, tables.gained_weights)

    def _expand(self, y: Tensor) -> Tensor:
        tables = self._on(y)
        return y.index_select(-1, tables.bucket).mul_(tables.gained_weight)

    def _table(self) -> bytes:
        negative = (self._weight < 0).numpy()
        return np.stack([self._bucket.numpy(), negative]).astype("<i8").tobytes()

    def _on(self, like: Tensor) -> "_Tables":
        key = (like.device, like.dtype)
        if key not in self._tables:
            self._tables[key] = _Tables(self, like)
        return self._tables[key]


class _Tables:
    """A count sketch's index tables on one device, with its weights in one dtype."""

    def __init__(self, sketch: CountSketch, like: Tensor) -> None:
        gained = sketch._weight * sketch._gain[sketch._bucket]
        self.bucket = sketch._bucket.to(like.device)
        self.weight = sketch._weight.to(like)
        self.gained_weight = gained.to(like)
        self.gain = sketch._gain.to(like)
        self.layers = [index.to(like.device) for index in sketch._layers]
        self.weights = [sketch._weight[index].to(like) for index in sketch._layers]
        self.gained_weights = [gained[index].to(like) for index in sketch._layers]


def _gather(x: Tensor, layers: list[Tensor], weights: list[Tensor]) -> Tensor:
    out = x.index_select(-1, layers[0]).mul_(weights[0])
    for index, weight in zip(layers[1:], weights[1:], strict=True):
        part = out if len(index) == out.shape[-1] else out[..., : len(index)]
        part.add_(x.index_select(-1, index).mul_(weight))
    return out
