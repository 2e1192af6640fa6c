"""Through which sketches the others' updates of a round come, as far as clients of it can know."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dbcl.round_plan import RoundPlan
from dbcl.sketch import Identity, Sketch

Lanes = tuple[tuple[Sketch, float], ...]
"""The sketches that the others' updates of one round come through, each with the share of the others in it."""


def lanes_of_others(
    plans: Sequence[RoundPlan], names: Sequence[str], cohort: int, *, grouped: bool
) -> dict[str, Lanes]:
    """For each sketched tensor the sketches of all lanes, with the share of the others that is expected in each.

    `plans` are those that the clients were sent who look. Seed and number of lanes are public, so a client can draw the
    sketches of every lane; it does not know who is in which, but that all lanes have as many clients. Where every
    group of clients has buckets of its own (`grouped`), those of other groups are unknown: there the update may lie
    anywhere, and `Identity` stands for it with a share that leaves its length as it is.

    >>> import dbcl, torch
    >>> plan = dbcl.Server(torch.nn.Linear(6, 2), cover="all", lanes=2).open_round().plan
    >>> lanes_of_others([plan], ["weight"], cohort=2, grouped=False)
    {'weight': ((LaneSketch(6 -> 3, lane 1 of 2), 1.0),)}
    >>> [share for _, share in lanes_of_others([plan], ["weight"], cohort=6, grouped=False)["weight"]]
    [0.4, 0.6]
    """
    others = max(cohort - len(plans), 1)
    known, elsewhere = plans_of_others(plans, cohort, grouped=grouped)
    found: dict[str, Lanes] = {}
    for name in names:
        if name in plans[0].sketches:
            lanes = [(plan.sketches[name], number / others) for plan, number in known if number > 0]
            if elsewhere:
                own = plans[0].sketches[name]
                lanes.append((Identity(own.dim), elsewhere / others * own.width / own.dim))
            found[name] = tuple(lanes) or ((plans[0].sketches[name], 1.0),)
    return found


def plans_of_others(
    plans: Sequence[RoundPlan], cohort: int, *, grouped: bool
) -> tuple[list[tuple[RoundPlan, float]], float]:
    """The plan of every lane with how many others are expected in it, and how many are in groups that are unknown.

    >>> import dbcl, torch
    >>> plan = dbcl.Server(torch.nn.Linear(6, 2), cover="all", lanes=2).open_round().plan
    >>> [(each.lane, number) for each, number in plans_of_others([plan], cohort=6, grouped=False)[0]]
    [(0, 2.0), (1, 3.0)]
    """
    count = plans[0].lanes
    if grouped:
        return _of_groups(list(plans), count, max(cohort - len(plans), 1))
    held, taken = {plan.digest: plan for plan in plans}, Counter(plan.lane for plan in plans)
    expected = expected_others([taken[lane] for lane in range(count)], cohort)
    return [(_lane(held, plans[0], lane), number) for lane, number in enumerate(expected)], 0.0


def expected_others(taken: Sequence[int], cohort: int) -> list[float]:
    """How many others are in each lane, where `taken` says how many clients of each lane one knows.

    Lanes differ by one client at most; those that are left over may be in any lane.

    >>> expected_others([1, 0], cohort=10), expected_others([1, 0], cohort=3), expected_others([1, 1], cohort=3)
    ([4.0, 5.0], [0.5, 1.5], [0.5, 0.5])
    """
    each = cohort // len(taken)
    sure = [max(each - number, 0) for number in taken]
    left = max(cohort - sum(taken) - sum(sure), 0)
    free = [number <= each for number in taken]  # one of the lanes that may have one client more
    return [number + left * is_free / max(sum(free), 1) for number, is_free in zip(sure, free, strict=True)]


def _of_groups(plans: Sequence[RoundPlan], lanes: int, others: int) -> tuple[list[tuple[RoundPlan, float]], float]:
    """One client in every lane of the groups that are known, as far as there are so many; and how many elsewhere."""
    free = []
    for seed in dict.fromkeys(plan.seed for plan in plans):
        mine = {plan.lane: plan for plan in plans if plan.seed == seed}
        first = next(iter(mine.values()))
        free += [replace(first, lane=lane) for lane in range(lanes) if lane not in mine]
    each = min(1.0, others / len(free)) if free else 0.0
    return [(plan, each) for plan in free], max(others - each * len(free), 0.0)


def _lane(held: dict[str, RoundPlan], one: RoundPlan, lane: int) -> RoundPlan:
    """The plan of a lane; one that was received has drawn its sketches already."""
    plan = one if one.lane == lane else replace(one, lane=lane)
    return held.get(plan.digest, plan)
