"""Partition of examples among clients."""

import numpy as np
from numpy.typing import NDArray

from dbcl import seeds
from dbcl.errors import DataError

Indices = NDArray[np.int64]


def iid(labels: Indices, clients: int, *, seed: bytes) -> list[Indices]:
    """Partition the examples at random into parts whose sizes differ by at most one.

    Args:
        labels: Label of each example.
        clients: Number of clients.
        seed: Seed of the partition.

    Returns:
        Example indices of each client.

    >>> [len(part) for part in iid(np.zeros(7, dtype=int), 3, seed=bytes(32))]
    [3, 2, 2]
    """
    _check(labels, clients)
    return list(np.array_split(seeds.permutation(seed, "iid", n=len(labels)), clients))


def dirichlet(labels: Indices, clients: int, *, alpha: float, seed: bytes) -> list[Indices]:
    """Partition the examples with class proportions from Dirichlet(alpha). A smaller alpha gives
    more skewed classes.

    A client without examples receives one example from the largest client.

    Args:
        labels: Label of each example.
        clients: Number of clients.
        alpha: Concentration parameter.
        seed: Seed of the partition.

    Returns:
        Example indices of each client.

    >>> sum(len(part) for part in dirichlet(np.arange(100) % 10, 5, alpha=0.5, seed=bytes(32)))
    100
    """
    _check(labels, clients)
    if not alpha > 0:
        raise DataError(f"alpha must be above 0, got {alpha}")
    rng = np.random.default_rng(seeds.words(seed, "dirichlet", n=4))
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(members)
        for part, chosen in zip(parts, np.split(members, cuts.astype(int)), strict=True):
            part.extend(chosen.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.array(part, dtype=np.int64) for part in parts]


def shards(labels: Indices, clients: int, *, per_client: int = 2, seed: bytes) -> list[Indices]:
    """Sort the examples by label, split them into equal shards, and assign shards to clients at
    random.

    Args:
        labels: Label of each example.
        clients: Number of clients.
        per_client: Number of shards of each client.
        seed: Seed of the partition.

    Returns:
        Example indices of each client.

    >>> parts = shards(np.arange(100) // 10, 5, seed=bytes(32))
    >>> [len(set((part // 10).tolist())) for part in parts]
    [2, 2, 2, 2, 2]
    """
    count = clients * per_client
    _check(labels, count)
    cut = np.array_split(np.argsort(labels, kind="stable"), count)
    dealt = seeds.permutation(seed, "shards", n=count).reshape(clients, per_client)
    return [np.concatenate([cut[number] for number in row]) for row in dealt]


def _check(labels: Indices, parts: int) -> None:
    if not 1 <= parts <= len(labels):
        raise DataError(f"{len(labels)} examples cannot be divided into {parts} parts; set `clients` lower")
