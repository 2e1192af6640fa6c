"""Whoever drops out, and when: the exact sum of those who counted, or a refusal."""

from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg import Total, WeightedMean
from dbcl.protocol.secagg.quantizer import LEVELS, Quantizer
from protocol.secagg.conftest import Fleet, easy_config, names

STAYS = 6


def expected(phases: tuple[int, ...]) -> list[int] | None:
    """Who is in the sum, by the rules alone: None where nothing may be shown."""
    members = [phase for phase in phases if phase > 1]
    fewest = max(len(members) // 2 + 1, 3)
    reached = [sum(phase > step for phase in phases) for step in (1, 2, 3, 4)]
    if len(members) < 3 or any(count < fewest for count in reached[1:3]) or reached[3] < len(members) // 2 + 1:
        return None
    return [number for number, phase in enumerate(phases) if phase > 3]


def check(phases: tuple[int, ...]) -> bool:
    """Play a round of five clients; whether there was a sum."""
    fleet = Fleet.made(5)
    own = names(5)
    counted = expected(phases)
    try:
        total = fleet.play(dict(zip(own, phases, strict=True)))
    except ProtocolError:
        assert counted is None
        return False
    assert counted is not None
    assert total.members == tuple(own[number] for number in counted)
    assert np.array_equal(total.values, fleet.clear_sum(total.members))
    assert total.weight == len(counted)
    return True


MULTISETS = list(combinations_with_replacement((1, 2, 3, 4, STAYS), 5))


def test_every_multiset_of_drops() -> None:
    assert len(MULTISETS) == 126
    sums = sum(check(phases) for phases in MULTISETS)
    assert sums == sum(expected(phases) is not None for phases in MULTISETS) == 16


@pytest.mark.slow
def test_every_combination_of_drops() -> None:
    every = list(product((1, 2, 3, 4, STAYS), repeat=5))
    assert len(every) == 3125
    # 1 + 5 * 4 + 10 * 16 in which 3 or more stay; and 30 of three clients, one of which leaves after its update.
    assert sum(check(phases) for phases in every) == 211


@pytest.mark.parametrize("count", range(6))
def test_drops_before_the_last_step(count: int) -> None:
    for some in combinations(names(5), count):
        fleet = Fleet.made(5)
        if count > 2:
            with pytest.raises(ProtocolError, match=f"{5 - count} clients have helped to take the masks off, and 3"):
                fleet.play(dict.fromkeys(some, 5))
        else:
            total = fleet.play(dict.fromkeys(some, 5))
            assert np.array_equal(total.values, fleet.clear_sum(names(5)))
            assert fleet.server.refused == dict.fromkeys(some, "did not answer")


def test_weights_are_inside_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any numbers of examples and values that must be rounded: the sum is that of the words that clients made."""
    made: list[np.ndarray] = []
    honest = WeightedMean.words

    def watched(*arguments: object) -> np.ndarray:
        made.append(honest(*arguments))  # type: ignore[arg-type]
        return made[-1].copy()

    monkeypatch.setattr(WeightedMean, "words", watched)
    fleet = Fleet.made(7, easy_config(weight_cap=600))
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(5) for name in fleet.clients}
    examples = dict(zip(fleet.clients, (1, 7, 150, 599, 600, 601, 10**6), strict=True))
    deliveries = fleet.deliveries()
    answers = {name: fleet.clients[name].mask(deliveries[name], values[name], examples[name]) for name in deliveries}
    survivors = fleet.server.survivors(answers)
    agreed = fleet.server.agreed(fleet.agree(survivors))
    total = fleet.server.total(fleet.reveal(agreed))
    words = sum(each.astype(np.int64) for each in made).astype(np.uint32)
    quantizer = Quantizer(fleet.server.config.clip, 7)
    assert np.array_equal(total.values, quantizer.values(words[:-1]))
    assert total.weight == int(words[-1]) / LEVELS
    weights = {name: min(1, each / 600) for name, each in examples.items()}
    assert total.weight == pytest.approx(sum(weights.values()), abs=7 / LEVELS)
    mean = sum(weights[name] * values[name] for name in values) / sum(weights.values())
    assert np.abs(total.values / total.weight - mean).max() < 7 * quantizer.step  # 7 roundings, and those of 7 weights


@pytest.mark.parametrize("count", [3, 8, 24, pytest.param(64, marks=pytest.mark.slow)])
def test_groups_of_every_size(count: int) -> None:
    fleet = Fleet.made(count, easy_config(colluding=1 / 3))
    config = fleet.server.config
    drops = dict.fromkeys(names(count)[::3][: count - config.threshold(count)], 3)
    total = fleet.play(drops)
    assert isinstance(total, Total)
    assert set(total.members) == set(names(count)) - set(drops)
    assert np.array_equal(total.values, fleet.clear_sum(total.members))
