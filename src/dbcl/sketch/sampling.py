"""Uniform sampling sketch: keeps the same `width` inputs for every client."""

import numpy as np

from dbcl import seeds
from dbcl.sketch.buckets import BucketSketch
from dbcl.sketch.operator import check_width


class UniformSampling(BucketSketch):
    """Uniform sampling of `width` inputs without replacement. The gain is dim / width.

    Sampling a layer's input is equivalent to dropout with a mask that all clients of a round share.

    >>> import torch
    >>> UniformSampling(4, 2, seed=bytes(32)).apply(torch.arange(4.0))
    tensor([1., 2.])
    """

    scheme = "sampling-v1"

    def __init__(self, dim: int, width: int, *, seed: bytes, round: int = 0, name: str = "") -> None:
        check_width(dim, width)
        chosen = seeds.permutation(seed, self.scheme, round, name, dim, width, n=dim)[:width]
        buckets = np.full(dim, -1, dtype=np.int64)
        buckets[np.sort(chosen)] = np.arange(width)
        self._fill(buckets, np.ones(dim), gain_per_member=dim / width)
