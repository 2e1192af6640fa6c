"""Who takes part when, and the tracker."""

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import ParticipationTracker, PrivacyPlan, cyclic_batch, cyclic_cohort, epsilon_of, share
from dbcl.simulation import RunConfig
from dbcl.simulation.build import privacy_plan
from dbcl.state import State


@given(clients=st.integers(1, 40), cohort=st.integers(1, 40), rounds=st.integers(1, 60))
def test_turns_keep_the_rule_that_a_plan_assumes(clients: int, cohort: int, rounds: int) -> None:
    cohort = min(cohort, clients)
    plan = PrivacyPlan(epsilon=1, delta=1e-5, clip=1, rounds=rounds, clients=clients, cohort=cohort)
    rule = {"separation": plan.separation, "participations": plan.participations, "clients": clients}
    tracker = ParticipationTracker(rounds=rounds, **rule)
    turns = Counter[int]()
    for round in range(rounds):
        members = cyclic_cohort(round, clients=clients, cohort=cohort)
        assert len(set(members)) == cohort
        tracker.use(round, members)  # an error where somebody comes too early or too often
        turns.update(members)
    assert max(turns.values()) == tracker.most_uses == plan.participations
    assert max(turns.values()) - min(turns[client] for client in range(clients)) <= 1


@given(examples=st.integers(1, 50), separation=st.integers(1, 12), rounds=st.integers(1, 40))
def test_an_example_comes_back_after_exactly_the_separation(examples: int, separation: int, rounds: int) -> None:
    seen: dict[int, list[int]] = {}
    for round in range(rounds):
        for example in cyclic_batch(round, examples=examples, separation=separation):
            seen.setdefault(example, []).append(round)
    for rounds_of_it in seen.values():
        assert {later - earlier for earlier, later in itertools.pairwise(rounds_of_it)} <= {separation}
        assert len(rounds_of_it) <= math.ceil(rounds / separation)
    if rounds >= separation:
        assert len(seen) == examples


@pytest.mark.parametrize(
    ("examples", "separation", "rounds"), [(4000, 130, 532), (4000, 900, 2000), (1000, 400, 2000), (199, 100, 398)]
)
def test_the_epsilon_of_a_run_is_that_of_the_turns_its_examples_take(
    examples: int, separation: int, rounds: int
) -> None:
    """Worked out here from each example's turns and the matrix C alone, for a `RunConfig` with a separation."""
    config = RunConfig.from_options(
        epsilon=8, clip=1.0, privacy_unit="example", algorithm="sgd", fraction=1.0, clients=1, separation=separation,
        rounds=rounds, server_momentum=0.0,
    )  # fmt: skip
    plan = privacy_plan(config, examples)
    assert plan is not None
    turns = np.zeros((rounds, examples))
    for round in range(rounds):
        turns[round, list(cyclic_batch(round, examples=examples, separation=separation))] = 1
    matrix = scipy.linalg.toeplitz(plan.strategy.coefficients(rounds), np.zeros(rounds))
    moved = np.linalg.norm(matrix @ np.unique(turns, axis=1), axis=0).max() * plan.clip / plan.batch
    assert epsilon_of(moved / plan.sigma, plan.delta) == pytest.approx(8, rel=1e-6)


def test_a_client_that_comes_back_early_or_too_often_is_refused() -> None:
    tracker = ParticipationTracker(rounds=100, separation=10, participations=2, clients=3)
    tracker.use(5, ["alice"])
    assert tracker.refusal(14, "alice") == "took part in round 5, and may again from round 15 on"
    assert tracker.refusal(15, "alice") is None
    with pytest.raises(ProtocolError, match=r"round 14: 'alice': took part in round 5"):
        tracker.use(14, ["bob", "alice"])
    assert tracker.uses("bob") == 0  # one of them may not, so none is counted
    tracker.use(15, ["alice"])
    assert tracker.refusal(99, "alice") == "took part 2 times, which is all that its budget allows"
    assert tracker.refusal(100, "bob") == "the budget of 100 rounds is spent"
    assert tracker.allowed(30, ["alice", "bob", "carol"]) == ["bob", "carol"]
    assert tracker.most_uses == 2


def test_a_client_counts_once_a_round_whatever_its_name_is() -> None:
    tracker = ParticipationTracker(rounds=10, separation=1, participations=5, clients=2)
    with pytest.raises(ProtocolError, match="counts once a round"):
        tracker.use(0, ["7", 7])
    tracker.use(0, [7])
    with pytest.raises(ProtocolError, match="may again from round 1 on"):
        tracker.use(0, ["7"])


def test_no_more_names_are_known_than_clients_were_planned() -> None:
    tracker = ParticipationTracker(rounds=10, separation=1, participations=5, clients=3)
    tracker.use(0, ["alice"])
    assert tracker.allowed(1, ["alice", "bob", "carol", "dan", "bob"]) == ["alice", "bob", "carol", "bob"]
    with pytest.raises(ProtocolError, match="'dan': is unknown, and all 3 clients of the plan have taken part"):
        tracker.use(1, ["bob", "carol", "dan"])
    tracker.use(1, ["bob", "carol"])
    assert tracker.refusal(2, "dan") == "is unknown, and all 3 clients of the plan have taken part"
    assert tracker.refusal(2, "alice") is None


def test_a_tracker_goes_through_a_checkpoint_and_its_rule_cannot_be_changed() -> None:
    tracker = ParticipationTracker(rounds=100, separation=10, participations=2, clients=3)
    tracker.use(5, ["alice", 3])
    state = State(json.loads(json.dumps(tracker.state().values)), {})
    revived = ParticipationTracker(rounds=100, separation=10, participations=2, clients=3)
    revived.load_state(state)
    assert revived.state() == tracker.state()
    assert revived.refusal(14, "alice") == tracker.refusal(14, "alice") is not None
    for changed in ({"rounds": 200}, {"separation": 9}, {"participations": 3}, {"clients": 4}):
        other = ParticipationTracker(**{"rounds": 100, "separation": 10, "participations": 2, "clients": 3, **changed})
        with pytest.raises(ProtocolError, match="the checkpoint counts participations by"):
            other.load_state(state)
        assert other.uses("alice") == 0


def test_a_weight_counts_up_to_the_cap_and_the_denominator_is_fixed() -> None:
    assert share(1, weight_cap=1, per_round=100) == 0.01
    assert share(1e9, weight_cap=60, per_round=100) == 0.01
    assert share(0, weight_cap=60, per_round=100) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cyclic_cohort(0, clients=3, cohort=4), "cohort must be between 1 and the number of clients, 3"),
        (lambda: cyclic_batch(0, examples=3, separation=0), "separation must be 1 or more"),
        (lambda: share(1, weight_cap=0, per_round=1), "weight_cap above 0"),
        (lambda: share(math.nan, weight_cap=1, per_round=1), "weight must be 0 or more"),
        (lambda: ParticipationTracker(rounds=0, separation=1, participations=1, clients=1), "must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
