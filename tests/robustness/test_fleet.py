"""Many clients, some of which drop out and some of which are hostile; see fleet.py."""

import pytest

import dbcl
from robustness import fleet

MB = 1 << 20


def test_a_small_fleet() -> None:
    made = fleet.play(clients=200, rounds=6, cohort=30, hostile=0.1)
    assert made.rounds == 6
    assert made.refused > 0
    assert made.accuracy > 0.4  # 0.25 is chance


@pytest.mark.slow
def test_ten_thousand_clients_for_two_hundred_rounds() -> None:
    honest = fleet.play(10_000, rounds=200, cohort=100, hostile=0.0)
    made = fleet.play(10_000, rounds=200, cohort=100, hostile=0.01)
    assert made.rounds == honest.rounds == 200
    assert honest.refused == 0
    assert made.refused > 20
    assert abs(made.accuracy - honest.accuracy) < 0.02
    assert honest.accuracy > 0.8
    early, late = made.resident  # of the second fleet, when everything has been loaded
    assert late - early < 8 * MB


def lost(attack: str, validator: dbcl.protocol.UpdateValidator) -> float:
    """What an attack costs mnist-mlp on the digits after 100 rounds, against the run of the nine others; mean of 3."""
    without, with_it = (
        sum(fleet.digits(which, seed, 100, validator) for seed in range(3)) / 3 for which in (None, attack)
    )
    assert without > 0.93
    return without - with_it


@pytest.mark.slow
@pytest.mark.parametrize("attack", fleet.ONE_IN_TEN)
def test_one_hostile_client_in_ten_does_not_cost_two_points(attack: str) -> None:
    assert lost(attack, dbcl.protocol.UpdateValidator()) < 0.02


@pytest.mark.slow
def test_without_the_bound_it_costs_everything() -> None:
    """A comparison that cannot fail proves nothing."""
    assert lost("x-10", dbcl.protocol.UpdateValidator(max_influence=4, outlier_factor=None)) > 0.05
