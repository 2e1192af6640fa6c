"""Bucket sketches, implemented as index tables on a device."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.sketch.operator import Sketch, linear_map


class Tables:
    """Index tables of a bucket sketch for one device and dtype. Both directions use only gathers.

    Layer k holds the k-th member of every bucket with more than k members. Buckets are numbered by
    decreasing size, so layer k fills the first columns, and a sketch is a sum of a few gathers
    without padding.
    """

    def __init__(self, bucket: Tensor, layers: list[Tensor], unit: Tensor, gain: Tensor, like: Tensor) -> None:
        self.bucket = bucket.to(like.device)  # (dim,) where each input goes
        self.layers = [layer.to(like.device) for layer in layers]  # (at most width,) which inputs each layer takes
        self.gain = gain.to(like)  # (width,)
        self.pairs = len(layers) == 2 and len(bucket) == 2 * len(gain)
        self._weigh(unit)

    def _weigh(self, unit: Tensor) -> None:
        unit = unit.to(self.bucket.device)
        gained = unit * self.gain.double()[self.bucket]
        self.lift_weight = unit.to(self.gain)  # (dim,)
        self.expand_weight = gained.to(self.gain)
        self.apply_weights = [self.lift_weight[layer] for layer in self.layers]
        self.project_weights = [self.expand_weight[layer] for layer in self.layers]
        even = len(self.bucket) == len(self.layers) * len(self.gain)  # one bucket size
        self.even = torch.stack(self.project_weights) if even else self.gain.new_empty(0)  # (layers, width)

    def reweighed(self, unit: Tensor) -> "Tables":
        """Return tables with the same buckets and other coefficients."""
        twin = copy.copy(self)
        twin._weigh(unit)
        return twin

    @classmethod
    def of_clients(cls, lanes: "Sequence[Tables]", lane_of: Tensor) -> "Tables":
        """Return the combined tables of several clients, each in one of several lanes with shared
        buckets.

        The weights get a leading client axis, (clients, 1, ...), to match tensors with a client
        axis.
        """
        merged = copy.copy(lanes[0])
        for name in ("lift_weight", "expand_weight", "even"):
            setattr(merged, name, _of_clients([getattr(lane, name) for lane in lanes], lane_of))
        for name in ("apply_weights", "project_weights"):
            each_layer = zip(*(getattr(lane, name) for lane in lanes), strict=True)
            setattr(merged, name, [_of_clients(list(layer), lane_of) for layer in each_layer])
        return merged

    def tensors(self) -> list[Tensor]:
        """Return all tables as tensors, in a fixed order."""
        fixed = [self.bucket, self.lift_weight, self.expand_weight, self.gain, self.even]
        return fixed + self.layers + self.apply_weights + self.project_weights

    def clone(self) -> "Tables":
        """Return a copy with separate memory."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(twin, name, [each.clone() for each in value])
            elif isinstance(value, Tensor):
                setattr(twin, name, value.clone())
        return twin

    def copy_(self, other: "Tables") -> bool:
        """Copy the values of other tables if all shapes are equal. Return whether the copy was
        made.
        """
        mine, theirs = self.tensors(), other.tensors()
        if [table.shape for table in mine] != [table.shape for table in theirs]:
            return False
        for table, value in zip(mine, theirs, strict=True):
            table.copy_(value)
        return True

    def apply(self, x: Tensor) -> Tensor:
        """Return x R."""
        return self._gather(x, self.apply_weights)

    def lift(self, y: Tensor) -> Tensor:
        """Return y R^T."""
        return y.index_select(-1, self.bucket).mul_(self.lift_weight)

    def project(self, x: Tensor) -> Tensor:
        """Return x R D."""
        return self._gather(x, self.project_weights)

    def project_into(self, out: Tensor, x: Tensor, clients: Tensor | None = None) -> None:
        """Write `project` of each row into existing memory, with the tables of the row's client.

        Does not support autograd or `torch.func`.
        """
        weights = self.project_weights
        if clients is not None:
            weights = [weight[:, 0].index_select(0, clients) for weight in weights]
        torch.index_select(x, -1, self.layers[0], out=out).mul_(weights[0])
        for layer, weight in zip(self.layers[1:], weights[1:], strict=True):
            out[..., : len(layer)].addcmul_(x.index_select(-1, layer), weight)

    def expand(self, y: Tensor) -> Tensor:
        """Return y D R^T."""
        return y.index_select(-1, self.bucket).mul_(self.expand_weight)

    def _gather(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        out = x.index_select(-1, self.layers[0]).mul_(weights[0])
        if self.pairs:  # ratio 2, without the overhead of a loop
            return torch.addcmul(out, x.index_select(-1, self.layers[1]), weights[1])
        for index, weight in zip(self.layers[1:], weights[1:], strict=True):
            if len(index) == out.shape[-1]:
                out = torch.addcmul(out, x.index_select(-1, index), weight)
            else:
                out[..., : len(index)].add_(x.index_select(-1, index).mul_(weight))
        return out


def _of_clients(lanes: list[Tensor], lane_of: Tensor) -> Tensor:
    return torch.stack(lanes).index_select(0, lane_of).unsqueeze(1)


class BucketSketch(Sketch):
    """Sketch that adds every input to at most one bucket, multiplied by a sign or another
    coefficient.

    Column j of R holds the coefficients of bucket j divided by the square root of its size. The
    mean squared coefficient of a bucket is 1.
    """

    def _fill(self, buckets: NDArray[np.int64], coefficients: NDArray[np.float64], gain_per_member: float) -> None:
        """Set the bucket (-1 for none) and the coefficient of each input. Empty buckets are
        removed.
        """
        inside = buckets >= 0
        sizes = np.bincount(buckets[inside])
        order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
        rank = np.zeros(len(sizes), dtype=np.int64)
        rank[order] = np.arange(len(order))
        sizes = sizes[order]
        buckets = np.where(inside, rank[buckets], 0)
        members = np.flatnonzero(inside)[np.argsort(buckets[inside], kind="stable")]
        starts = np.cumsum(sizes) - sizes
        self.dim, self.width = len(buckets), len(sizes)
        self._bucket = torch.from_numpy(buckets)
        self._unit = torch.from_numpy(np.where(inside, coefficients / np.sqrt(sizes[buckets]), 0.0))
        self._layers = [
            torch.from_numpy(members[starts[: np.count_nonzero(sizes > k)] + k]) for k in range(int(sizes.max()))
        ]
        self._gain = torch.from_numpy(sizes * gain_per_member)
        self._tables: dict[tuple[torch.device, torch.dtype], Tables] = {}

    def tables(self, like: Tensor) -> Tables:
        """Return the cached index tables for the device and dtype of a tensor."""
        key = like.device, like.dtype
        tables = self._tables.get(key)
        if tables is None:
            if not like.is_floating_point():
                self._check(like, self.dim)
            tables = self._tables[key] = Tables(self._bucket, self._layers, self._unit, self._gain, like)
        return tables

    def gain(self, like: Tensor) -> Tensor:
        return self.tables(like).gain

    def project(self, x: Tensor) -> Tensor:
        tables = self.tables(x)
        if x.shape[-1:] != tables.bucket.shape:
            self._check(x, self.dim)
        return linear_map(x, tables.project, tables.expand)

    def expand(self, y: Tensor) -> Tensor:
        self._check(y, self.width)
        tables = self.tables(y)
        return linear_map(y, tables.expand, tables.project)

    def _apply(self, x: Tensor) -> Tensor:
        return self.tables(x).apply(x)

    def _lift(self, y: Tensor) -> Tensor:
        return self.tables(y).lift(y)

    def _table(self) -> bytes:
        drawn: list[NDArray[Any]] = [self._bucket.numpy(), self._unit.sign().numpy()]
        return np.stack(drawn).astype("<i8").tobytes()
