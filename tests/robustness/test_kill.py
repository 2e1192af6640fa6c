"""Processes that are killed at random moments, and two at once on one folder; see kill.py."""

import random

import pytest

from robustness import kill


def test_three_kills() -> None:
    assert kill.kills(3, seed=1) == (3, [])


@pytest.mark.parametrize("rounds", [[4], pytest.param(range(kill.ROUNDS), marks=pytest.mark.slow)])
def test_a_run_with_a_guarantee_that_is_killed_sends_the_same_and_counts_once(rounds: list[int]) -> None:
    sent, uses = kill.private_kill(rounds)
    assert {round: len(each) for round, each in sent.items()} == {n: 1 + (n in rounds) for n in range(kill.ROUNDS)}
    assert {len(set(each)) for each in sent.values()} == {1}
    assert len({data for each in sent.values() for data in each}) == kill.ROUNDS
    assert uses == {f"client {number}": kill.ROUNDS // 3 for number in range(3)}


def test_two_processes_do_not_share_a_folder() -> None:
    ends, wrong = kill.pair("both resume", random.Random(1))
    assert wrong == ""
    assert len(ends) == 2


@pytest.mark.slow
def test_two_hundred_kills() -> None:
    assert kill.kills(200, seed=2) == (200, [])


@pytest.mark.slow
@pytest.mark.parametrize("mode", kill.MODES)
def test_two_processes_in_many_interleavings(mode: str) -> None:
    rng, ends, wrong = random.Random(2), [], []
    for _ in range(17):
        said, problem = kill.pair(mode, rng)
        ends += said
        wrong += [problem] if problem else []
    assert wrong == []
    assert any("is in use by process" in end for end in ends)  # they did meet
