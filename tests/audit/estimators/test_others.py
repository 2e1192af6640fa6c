"""Through which sketches the others' updates come, and what clients of several lanes see together."""

from dataclasses import replace

import pytest
import torch

from dbcl.round_plan import RoundPlan, RoundTensor
from dbcl.sketch import Identity, LaneSketch
from dbcl_audit.estimators.others import expected_others, lanes_of_others
from dbcl_audit.estimators.pooled import DenseSketch, Part, is_complete, pool

TENSORS = (RoundTensor("w", (3, 8), "lanes-v1", 4, 4), RoundTensor("b", (3,), "identity-v1", 3, 3))


def plan(lane: int = 0, lanes: int = 2, seed: int = 0) -> RoundPlan:
    return RoundPlan(5, bytes([seed] * 32), TENSORS, lane=lane, lanes=lanes)


def shares(*plans: RoundPlan, cohort: int) -> list[tuple[int | None, float]]:
    """The lane of each sketch (None: anywhere) and its share."""
    found = lanes_of_others(plans, ["w", "b"], cohort)
    assert list(found) == ["w"]
    return [(getattr(sketch, "lane", None), pytest.approx(share)) for sketch, share in found["w"]]


def test_with_one_lane_all_others_are_in_it() -> None:
    one = RoundPlan(5, bytes(32), (RoundTensor("w", (3, 8), "count-v1", 4, 4),))
    for cohort in (1, 2, 10):
        ((sketch, share),) = lanes_of_others([one], ["w"], cohort)["w"]
        assert sketch is one.sketches["w"]
        assert share == 1


def test_lanes_are_drawn_from_the_seed_with_what_is_expected_in_each() -> None:
    assert shares(plan(1), cohort=2) == [(0, 1.0)]
    assert shares(plan(1), cohort=10) == [(0, 5 / 9), (1, 4 / 9)]
    assert shares(plan(0), plan(1), cohort=10) == [(0, 1 / 2), (1, 1 / 2)]
    assert shares(plan(0), plan(0), cohort=3) == [(1, 1.0)]
    assert shares(plan(2, lanes=4), cohort=2) == [(lane, 1 / 3) for lane in (0, 1, 3)]
    drawn = lanes_of_others([plan(1)], ["w"], 10)["w"][0][0]
    assert drawn.fingerprint() == plan(0).sketches["w"].fingerprint()


@pytest.mark.parametrize("cohort", [3, 4, 7, 10])
@pytest.mark.parametrize("taken", [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
def test_nobody_is_counted_twice(cohort: int, taken: list[int]) -> None:
    assert sum(expected_others(taken, cohort)) == pytest.approx(cohort - sum(taken))


def parts(*plans: RoundPlan, W: torch.Tensor) -> list[Part]:
    sketches = [each.sketches["w"] for each in plans]
    return [Part(sketch, sketch.apply(W), torch.ones(3, sketch.width, dtype=W.dtype)) for sketch in sketches]


def test_pooled_lanes_show_what_they_show_and_no_more() -> None:
    W = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, seen, own = pool(parts(plan(0), plan(1), W=W))
    assert isinstance(whole, Identity)
    torch.testing.assert_close(seen, W)
    same, seen, own = pool(parts(plan(0), plan(0), W=W))
    assert isinstance(same, LaneSketch)
    torch.testing.assert_close(own, 2 * torch.ones_like(own))
    # Of different groups, or of some of four lanes: orthonormal columns that span both, so that the noise stays white.
    for pair in ((plan(0), plan(1, seed=1)), (plan(0, lanes=4), plan(1, lanes=4))):
        sketch, seen, own = pool(parts(*pair, W=W))
        if isinstance(sketch, DenseSketch):
            torch.testing.assert_close(sketch.matrix.T @ sketch.matrix, torch.eye(sketch.width, dtype=W.dtype))
        torch.testing.assert_close(seen, sketch.apply(W))
        for part in parts(*pair, W=W):
            torch.testing.assert_close(part.sketch.apply(sketch.lift(seen)), part.seen)
        lifted = sum(part.sketch.lift(part.own) for part in parts(*pair, W=W))
        torch.testing.assert_close(sketch.lift(own), lifted)


def test_lanes_of_uneven_buckets_are_not_complete() -> None:
    odd = (RoundTensor("w", (3, 9), "lanes-v1", 4, 4),)
    sketches = [replace(plan(lane), tensors=odd).sketches["w"] for lane in (0, 1)]
    assert not is_complete(sketches)
    W = torch.ones(3, 9, dtype=torch.float64)
    sketch, _, _ = pool([Part(each, each.apply(W), each.apply(W)) for each in sketches])
    assert sketch.width == 8
