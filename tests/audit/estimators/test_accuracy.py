"""What each estimator reaches, on systems where the answer is known."""

from typing import Any

import pytest

from audit.estimators.systems import cosine, every, lane_system, median_cosine, system
from dbcl_audit.estimators.kalman import Scales
from dbcl_audit.estimators.paper_estimators import option_1, option_2
from dbcl_audit.estimators.rewind import rewind
from dbcl_audit.estimators.smoother import known_scales, smoother
from dbcl_audit.theory import veil_cosine

LONG: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven buckets": {"dim": 41, "width": 17},
    "hashed": {"scheme": "count-hashed-v1"},
    "sampling": {"scheme": "sampling-v1"},
    "ratio 4": {"width": 10},
    "server's step": {"lr": 0.5},
}
OLD = slice(0, 20)
"""Rounds with at least 70 after them; at ratio 4 the error of a first guess has shrunk by 0.75^35 by then."""


@pytest.mark.parametrize("case", LONG)
def test_without_a_veil_old_updates_are_known_exactly(case: str) -> None:
    made = system(**{"dim": 40, "width": 20, "rows": 12, "seen": every(90), **LONG[case]})
    for found in (rewind(made.view), smoother(made.view, known_scales(made.view, 0.0))):
        assert min(cosine(a, b) for a, b in zip(found[OLD], made.changes[OLD], strict=True)) > 0.999
        for a, b in zip(found[OLD], made.changes[OLD], strict=True):
            assert float((a - b).norm() / b.norm()) < 0.05  # in size, too: the client's own part is out


@pytest.mark.parametrize("case", ["even", "uneven buckets", "hashed", "sampling", "ratio 4"])
def test_the_papers_estimates_are_near_zero(case: str) -> None:
    """A cosine of 480 numbers with scales a hundred times as large has size 1/sqrt(480); 0.1 is twice that."""
    made = system(**{"dim": 40, "width": 20, "rows": 12, "seen": every(90), **LONG[case]})
    for option in (option_1, option_2):
        found = list(option(made.view))
        assert abs(median_cosine(found, made.changes)) < 0.1
        assert float((found[0] - made.changes[0]).norm() / made.changes[0].norm()) > 20


def test_without_a_sketch_all_are_exact() -> None:
    made = system(dim=8, width=8, rows=4, seen=every(6), scheme="identity-v1")
    scales = known_scales(made.view, 0.0)
    for found in (
        list(option_1(made.view)),
        list(option_2(made.view)),
        rewind(made.view),
        smoother(made.view, scales),
    ):
        assert min(cosine(a, b) for a, b in zip(found, made.changes, strict=True)) > 0.999


def test_with_momentum_the_smoother_is_exact_and_rewind_is_not() -> None:
    made = system(dim=24, width=12, rows=8, seen=every(90), momentum=0.5)
    assert median_cosine(smoother(made.view, known_scales(made.view, 0.0)), made.changes, OLD) > 0.999
    assert median_cosine(rewind(made.view), made.changes, OLD) < 0.95


def test_the_range_of_the_sketch_is_what_tells() -> None:
    made = system(dim=40, width=20, rows=12, seen=every(90))
    scales = known_scales(made.view, 0.0)
    assert median_cosine(smoother(made.view, scales, known_range=False), made.changes, OLD) < 0.95


@pytest.mark.parametrize("kappa", [0.5, 3.0, 10.0])
def test_with_a_veil_and_no_sketch_the_smoother_reaches_what_the_formula_says(kappa: float) -> None:
    """The formula is for an endless walk, so only the rounds in the middle of this one are looked at."""
    made = system(dim=60, width=60, rows=20, seen=every(120), scheme="identity-v1", update=0.01, veil=0.01 * kappa)
    scales = Scales(veil=0.01 * kappa, update=0.01, weight=1.0)
    reached = median_cosine(smoother(made.view, scales), made.changes, slice(45, 75))
    assert reached == pytest.approx(veil_cosine(kappa), abs=0.1)


def test_a_veil_hides_most_of_a_sketched_walk() -> None:
    made = system(dim=40, width=20, rows=12, seen=every(60), update=0.01, veil=0.2)
    assert median_cosine(smoother(made.view, known_scales(made.view, 0.2)), made.changes) < 0.4


# --- lanes ----------------------------------------------------------------------------------------------------------


def test_two_parties_in_two_lanes_hide_nothing_without_a_veil() -> None:
    """The victim moves only its own lane, so two rounds show W but for a few directions in which their pairs agree."""
    made = lane_system(dim=200, rows=6, rounds=50, others=(0, 1))
    assert median_cosine(smoother(made.view, known_scales(made.view, 0.0)), made.changes, OLD) > 0.98
    assert median_cosine(rewind(made.view), made.changes, OLD) < 0.5


def test_several_in_every_lane_hide_some_from_a_client_and_nothing_from_one_of_each_lane() -> None:
    alone = lane_system(dim=60, rows=6, rounds=60, others=(4, 5))
    assert median_cosine(smoother(alone.view, known_scales(alone.view, 0.0)), alone.changes, OLD) < 0.9
    together = lane_system(dim=60, rows=6, rounds=60, others=(4, 4), watched=(0, 1))
    assert median_cosine(smoother(together.view, known_scales(together.view, 0.0)), together.changes, OLD) > 0.999


def test_a_veil_is_the_same_in_all_lanes_so_that_pooling_does_not_average_it_away() -> None:
    scales = Scales(veil=0.1, update=0.01, weight=1.0)
    made = lane_system(dim=60, rows=20, rounds=60, others=(1, 1), watched=(0, 1), veil=0.1)
    kappa = 0.1 / 0.01  # an entry of W moves by 0.01: one client of each lane, together in every direction
    reached = median_cosine(smoother(made.view, scales), made.changes)
    assert reached == pytest.approx(veil_cosine(kappa), abs=0.1)
