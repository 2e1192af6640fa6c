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


def lost(attack: str, door: dbcl.Door) -> float:
    """What an attack costs mnist-mlp on the digits after 100 rounds, against the run of the nine others; mean of 3."""
    without, with_it = (sum(fleet.digits(which, seed, 100, door) for seed in range(3)) / 3 for which in (None, attack))
    assert without > 0.93
    return abs(without - with_it)


@pytest.mark.slow
def test_one_client_in_ten_that_shouts_does_not_cost_two_points() -> None:
    assert lost("x1e6", dbcl.Door()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["x-10", "examples 10^7", "ten copies"])
def test_one_client_in_ten_that_pulls_back_costs_two_points_where_it_is_held_tighter(attack: str) -> None:
    """With the door's default of 4 it costs 5 points and up to all of them: docs/protocol.md says so."""
    assert lost(attack, dbcl.Door(max_influence=1.5)) < 0.025
