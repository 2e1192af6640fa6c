"""Systems that are drawn here: what a client sees of a random walk, and the true changes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbcl.audit.estimators.view import View
from dbcl.sketch import draw


@dataclass(frozen=True)
class System:
    """What a client saw, and the true changes from each seen round to the next, less its own part."""

    view: View
    changes: list[Tensor]


def system(
    *,
    dim: int,
    width: int,
    rows: int,
    seen: tuple[int, ...],
    scheme: str = "count-v1",
    weight: float = 1.0,
    update: float = 0.01,
    veil: float = 0.0,
    momentum: float = 0.0,
    lr: float = 1.0,
    columns: Tensor | None = None,
    seed: int = 0,
) -> System:
    """Draw W_0 and every round's update, and let a client see the rounds `seen`; its own part is as large as the rest.

    `columns` multiplies updates from the right before they are sketched: it shapes them.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    W, m = weight * normal(rows, dim), torch.zeros(rows, dim, dtype=torch.float64)
    sketches, views, own, put_in = [], [], [], []
    for round in range(seen[-1] + 1):
        sketch = draw(scheme, dim, width, seed=bytes(32), round=round, name=f"{seed}")

        def compact(sketch: Any = sketch) -> Tensor:
            if columns is None:
                return update * normal(rows, sketch.width)
            return update * sketch.apply(normal(rows, dim) @ columns)

        u = sketch.lift(compact())
        put_in.append(lr * u)
        if round in seen:
            mine = compact()
            sketches.append(sketch)
            views.append(sketch.apply(W) + veil * normal(rows, sketch.width))
            own.append(mine)
            u = u + sketch.lift(mine)
        m = momentum * m + u
        W = W + lr * m
    gaps = (*(b - a for a, b in pairwise(seen)), 1)
    changes = [sum(put_in[a:b], torch.zeros(rows, dim, dtype=torch.float64)) for a, b in pairwise(seen)]
    return System(View("w", seen, gaps, tuple(sketches), tuple(views), tuple(own), momentum, lr), changes)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def median_cosine(found: list[Tensor], changes: list[Tensor], part: slice = slice(None)) -> float:
    return float(np.median([cosine(a, b) for a, b in zip(found, changes, strict=True)][part]))


def every(rounds: int) -> tuple[int, ...]:
    """The numbers of all rounds."""
    return tuple(range(rounds))
