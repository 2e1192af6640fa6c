"""Three hostile clients in ten under the default settings: what docs/threat-model.md says that they cost."""

from statistics import fmean
from typing import Any

import pytest

from experiments.hostile_clients import ATTACKS, PARTITIONS, VALIDATORS, accuracy

SEEDS = (0, 1, 2)
OPEN = VALIDATORS["accepts every update"]


def mean(attack: str | None, **settings: Any) -> float:
    return fmean(accuracy(attack, seed, **settings) for seed in SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["iid", "Dirichlet 0.3"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_three_in_ten_do_not_cost_five_points(attack: str, data: str) -> None:
    assert mean(attack, **PARTITIONS[data]) > mean(None, **PARTITIONS[data], **OPEN) - 0.05


@pytest.mark.slow
def test_where_every_update_counts_they_cost_everything() -> None:
    assert mean("flipped labels, times five", **OPEN) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("data", PARTITIONS)
def test_the_validator_costs_honest_clients_half_a_point_at_most(data: str) -> None:
    assert mean(None, **PARTITIONS[data]) > mean(None, **PARTITIONS[data], **OPEN) - 0.005
