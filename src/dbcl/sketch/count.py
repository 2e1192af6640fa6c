"""Count sketch: every input is added to one bucket with a random sign."""

import numpy as np

from dbcl import seeds
from dbcl.sketch.buckets import BucketSketch
from dbcl.sketch.operator import check_width


class CountSketch(BucketSketch):
    """Balanced count sketch: a random permutation distributes the inputs over `width` buckets in
    turn.

    Bucket sizes differ by at most one, and each input gets a random sign. Column j of R is the
    signed indicator of bucket j divided by the square root of the bucket's size, and the gain is
    the size. With `hashed=True`, each input goes to an independent uniform bucket, as in the
    textbook count sketch. Empty buckets are then removed, so the width may be smaller than
    requested.

    >>> import torch
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
        self._fill(buckets, signs, gain_per_member=1.0)
