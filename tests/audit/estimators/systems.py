"""Systems that are drawn here: what a client sees of a random walk, and the true changes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbcl.sketch import LaneSketch, draw
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.pooled import Part, pool


@dataclass(frozen=True)
class System:
    """What a client saw, and the true changes from each seen round to the next, less its own part."""

    view: TensorObservations
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
    return System(TensorObservations("w", seen, gaps, tuple(sketches), tuple(views), tuple(own), momentum, lr), changes)


def lane_system(
    *,
    dim: int,
    rows: int,
    rounds: int,
    others: tuple[int, ...],
    watched: tuple[int, ...] = (0,),
    width: int | None = None,
    update: float = 0.01,
    veil: float = 0.0,
    seed: int = 0,
) -> System:
    """The same with lanes: `others` says how many other clients are in each, `watched` which of them the attackers see.

    Which lane is the first one changes from round to round; all show the same noise.
    """
    rng = torch.Generator().manual_seed(seed)
    count = len(others)

    def normal(columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=rng, dtype=torch.float64)

    W = normal(dim)
    sketches, seen, own, changes, lanes = [], [], [], [], []
    for round in range(rounds):
        labels = {"seed": bytes(32), "round": round, "name": f"{seed}", "lanes": count}
        drawn = [LaneSketch(dim, width or dim // count, lane=(k + round) % count, **labels) for k in range(count)]  # type: ignore[arg-type]
        hidden = W + veil * normal(dim)
        parts = [Part(drawn[k], drawn[k].apply(hidden), update * normal(drawn[k].width)) for k in watched]
        together = pool(parts)
        for place, kept in zip(together, (sketches, seen, own), strict=True):
            kept.append(place)  # type: ignore[attr-defined]
        lanes.append(
            tuple((sketch, number / sum(others)) for sketch, number in zip(drawn, others, strict=True) if number)
        )
        moved = [drawn[k].lift(update * number**0.5 * normal(drawn[k].width)) for k, number in enumerate(others)]
        changes.append(sum(moved, torch.zeros(rows, dim, dtype=torch.float64)))
        W = W + changes[-1] + together[0].lift(together[2])
    numbers = tuple(range(rounds))
    view = TensorObservations(
        "w", numbers, (1,) * rounds, tuple(sketches), tuple(seen), tuple(own), others=tuple(lanes)
    )
    return System(view, changes[:-1])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def median_cosine(found: list[Tensor], changes: list[Tensor], part: slice = slice(None)) -> float:
    return float(np.median([cosine(a, b) for a, b in zip(found, changes, strict=True)][part]))


def every(rounds: int) -> tuple[int, ...]:
    """The numbers of all rounds."""
    return tuple(range(rounds))
