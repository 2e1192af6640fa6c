"""Sketches of the other clients' updates in a round, as far as the clients of the round know
them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dbcl.round_plan import RoundPlan
from dbcl.sketch import Sketch

Lanes = tuple[tuple[Sketch, float], ...]
"""Sketches of the other clients' updates in one round, each with the fraction of the other clients
that use it.
"""


def lanes_of_others(plans: Sequence[RoundPlan], names: Sequence[str], cohort: int) -> dict[str, Lanes]:
    """Return for each sketched tensor the sketches of all lanes, with the expected fraction of the
    other clients in each lane.

    `plans` are the plans of the observing clients. The seed and the number of lanes are public, so
    that a client can compute the sketches of every lane. It does not know which clients are in
    which lane, only that all lanes have nearly equal sizes.

    >>> import dbcl, torch
    >>> plan = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all", lanes=2)).open_round().plan
    >>> lanes_of_others([plan], ["weight"], cohort=2)
    {'weight': ((LaneSketch(6 -> 3, lane 1 of 2), 1.0),)}
    >>> [share for _, share in lanes_of_others([plan], ["weight"], cohort=6)["weight"]]
    [0.4, 0.6]
    """
    others = max(cohort - len(plans), 1)
    known = plans_of_others(plans, cohort)
    found: dict[str, Lanes] = {}
    for name in names:
        if name in plans[0].sketches:
            lanes = [(plan.sketches[name], number / others) for plan, number in known if number > 0]
            found[name] = tuple(lanes) or ((plans[0].sketches[name], 1.0),)
    return found


def plans_of_others(plans: Sequence[RoundPlan], cohort: int) -> list[tuple[RoundPlan, float]]:
    """Return the plan of every lane, with the expected number of other clients in the lane.

    >>> import dbcl, torch
    >>> plan = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all", lanes=2)).open_round().plan
    >>> [(each.lane, number) for each, number in plans_of_others([plan], cohort=6)]
    [(0, 2.0), (1, 3.0)]
    """
    count = plans[0].lanes
    held, taken = {plan.digest: plan for plan in plans}, Counter(plan.lane for plan in plans)
    expected = expected_others([taken[lane] for lane in range(count)], cohort)
    return [(_lane(held, plans[0], lane), number) for lane, number in enumerate(expected)]


def expected_others(taken: Sequence[int], cohort: int) -> list[float]:
    """Return the expected number of other clients in each lane, given the number of known clients
    in each lane (`taken`).

    Lane sizes differ by at most one client. The remaining clients may be in any lane.

    >>> expected_others([1, 0], cohort=10), expected_others([1, 0], cohort=3), expected_others([1, 1], cohort=3)
    ([4.0, 5.0], [0.5, 1.5], [0.5, 0.5])
    """
    each = cohort // len(taken)
    sure = [max(each - number, 0) for number in taken]
    left = max(cohort - sum(taken) - sum(sure), 0)
    free = [number <= each for number in taken]  # one of the lanes that may have one client more
    return [number + left * is_free / max(sum(free), 1) for number, is_free in zip(sure, free, strict=True)]


def _lane(held: dict[str, RoundPlan], one: RoundPlan, lane: int) -> RoundPlan:
    """Return the plan of a lane. A received plan is preferred, because its sketches are already
    computed.
    """
    plan = one if one.lane == lane else replace(one, lane=lane)
    return held.get(plan.digest, plan)
