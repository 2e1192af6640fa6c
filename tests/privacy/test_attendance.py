"""Accounting of correlated noise by attendance: exact values, simulated shares, and what a log refuses."""

import itertools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbcl.errors import ConfigError, GuaranteeError, ProtocolError
from dbcl.privacy import NoiseShares, NoiseStream, PrivacyPlan, attendance
from dbcl.privacy.attendance import AttendanceLog, Rows, attendance_mu, covariance, packed, unpacked
from dbcl.privacy.distributed import MIN_SCALE
from dbcl.state import State

Matrix = NDArray[np.float64]
NAMES = "abcdefghij"


def plan_of(parties: int, colluders: int, fewest: int, **changes: Any) -> PrivacyPlan:
    facts: dict[str, Any] = {
        "epsilon": 8.0, "delta": 1e-5, "clip": 1.0, "unit": "example", "noise_by": "clients", "colluders": colluders,
        "fewest": fewest, "separation": 2, "rounds": 6, "clients": parties, "cohort": parties, "examples": 600,
        "batch": 300, "values": 10,
    }  # fmt: skip
    return PrivacyPlan(**{**facts, **changes})


def rows_of(*sums: str) -> Rows:
    return tuple((round, tuple(names)) for round, names in enumerate(sums) if names)


def drawn(parties: int, fewest: int, rounds: int, seed: int) -> Rows:
    """Random attendance, with some rounds that were not revealed."""
    rng = np.random.default_rng(seed)
    sums = []
    for _ in range(rounds):
        count = 0 if rng.random() < 0.1 else rng.integers(fewest, parties + 1)
        sums.append("".join(sorted(rng.permutation(list(NAMES[:parties]))[:count])))
    return rows_of(*sums)


def by_hand(shares: NoiseShares, rows: Rows, parties: int, *, absolute: bool = True) -> float:
    """The definition, with C itself, over every set of colluders, every victim and every turn."""
    mechanism, rounds = shares.mechanism, shares.mechanism.rounds
    c = mechanism.strategy.coefficients(rounds)
    C = np.array([[c[row - column] if row >= column else 0.0 for column in range(rounds)] for row in range(rounds)])
    G = np.linalg.inv(C.T @ C)
    told = [round for round, _ in rows]
    worst = 0.0
    for bad in itertools.combinations(NAMES[:parties], shares.colluders):
        honest = [name for name in NAMES[:parties] if name not in bad]
        there = {
            name: np.diag([float(name in dict(rows).get(round, ())) for round in range(rounds)]) for name in honest
        }
        cov = shares.scale**2 * np.sum([there[name] @ G @ there[name] for name in honest], axis=0)
        K = np.linalg.inv(cov[np.ix_(told, told)])
        for name, turn in itertools.product(honest, range(mechanism.separation)):
            own = [
                place
                for place, (round, names) in enumerate(rows)
                if round % mechanism.separation == turn and name in names
            ]
            part = K[np.ix_(own, own)]
            worst = max(worst, float((np.abs(part) if absolute else part).sum()))
    return shares.sensitivity * math.sqrt(worst)


# Exact values


@pytest.mark.parametrize(("momentum", "rounds", "separation"), [(0.0, 40, 4), (0.9, 60, 5), (0.5, 37, 10)])
@pytest.mark.parametrize(("parties", "colluders", "fewest"), [(5, 1, 4), (5, 2, 4), (10, 2, 8), (6, 0, 5)])
def test_if_all_attend_mu_is_that_of_the_closed_form(
    parties: int, colluders: int, fewest: int, momentum: float, rounds: int, separation: int
) -> None:
    plan = plan_of(parties, colluders, fewest, momentum=momentum, rounds=rounds, separation=separation)
    whole = rows_of(*[NAMES[:parties]] * rounds)
    part = plan.spent_by(whole[: rounds // 2]).mu
    closed = plan.mu * math.sqrt((fewest - colluders) / (parties - colluders))
    assert plan.spent_by(whole).mu == pytest.approx(closed, rel=1e-9)
    turns = math.ceil(rounds // 2 / separation)
    assert part == pytest.approx(closed / plan.mu * plan.spent(rounds=rounds // 2, participations=turns).mu, rel=1e-9)
    least = rows_of(*[NAMES[:fewest]] * rounds)
    assert plan.spent_by(least).mu == pytest.approx(plan.mu, rel=1e-9)


def test_mu_of_the_example_in_the_notes() -> None:
    """One round of five parties, planned 1.666; a second sum without another party, and one without the victim's."""
    strategy = plan_of(5, 0, 5).strategy

    def mu(*sums: str) -> float:
        inverse = np.linalg.inv(covariance(strategy, [(0, set(names)) for names in sums], "abcde"))
        victim = np.array([float("a" in names) for names in sums])
        return 1.666 * math.sqrt(5 * victim @ inverse @ victim)

    assert [mu("abcde"), mu("abcde", "abcd"), mu("abcde", "bcde")] == pytest.approx([1.666, 1.863, 3.725], abs=5e-4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("parties", "colluders", "fewest"), [(5, 2, 4), (5, 1, 4), (6, 0, 4), (7, 3, 6)])
def test_mu_is_that_of_the_definition(parties: int, colluders: int, fewest: int, seed: int) -> None:
    shares = plan_of(parties, colluders, fewest, rounds=9, separation=3).shares
    rows = drawn(parties, fewest, 9, seed)
    assert attendance_mu(shares, rows) == pytest.approx(by_hand(shares, rows, parties), rel=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_above_the_exact_value_and_equal_if_all_attend(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = plan_of(7, 2, 6, rounds=12, separation=3).shares
    rows, whole = drawn(7, 6, 12, seed), rows_of(*[NAMES[:7]] * 12)
    exact = [attendance_mu(shares, each) for each in (rows, whole)]
    attendance._worst.cache_clear()
    monkeypatch.setattr(attendance, "MAX_SUBSETS", 0)
    bounds = [attendance_mu(shares, each) for each in (rows, whole)]
    attendance._worst.cache_clear()
    assert exact[0] * (1 - 1e-9) <= bounds[0] < 3 * exact[0]
    assert bounds[1] == pytest.approx(exact[1], rel=1e-7)


def test_every_set_of_colluders_of_ten_parties_is_tried() -> None:
    assert attendance._count(np.ones(10, dtype=np.int64), 5) == 252 <= attendance.MAX_SUBSETS
    for counts, colluders in (([3, 1, 2], 2), ([1] * 6, 3), ([4], 2), ([2, 2], 0)):
        sets = list(attendance._subsets(np.array(counts), colluders))
        assert len(sets) == attendance._count(np.array(counts), colluders)
        assert {int(each.sum()) for each in sets} == {colluders}


@pytest.mark.parametrize("seed", range(5))
def test_fewer_honest_parties_give_a_larger_mu(seed: int) -> None:
    rows = drawn(6, 5, 8, seed)
    shares = plan_of(6, 0, 5, rounds=8).shares
    found = [attendance_mu(replace(shares, colluders=colluders), rows) for colluders in range(4)]
    # More colluders are planned for with more noise: compare at the same noise.
    scaled = [mu * replace(shares, colluders=colluders).scale for colluders, mu in enumerate(found)]
    assert scaled == sorted(scaled)
    assert all(one < other for one, other in itertools.pairwise(scaled))


def test_a_sum_that_is_not_revealed_costs_nothing_and_a_further_one_something() -> None:
    shares = plan_of(5, 1, 4, rounds=4).shares
    assert attendance_mu(shares, ()) == 0
    assert 0 < attendance_mu(shares, rows_of("abcde", "", "abcde")) < attendance_mu(shares, rows_of(*["abcde"] * 4))


# Simulated shares


class Silos:
    """Noise streams of some parties, and the noise of the sums that are revealed."""

    def __init__(self, shares: NoiseShares) -> None:
        self.shares = replace(shares, values=20_000)
        self.streams = {name: NoiseStream(self.shares, name.encode() * 32) for name in NAMES[: shares.largest]}

    def noise(self, rows: Rows, honest: Collection[str]) -> Matrix:
        """Return the honest parties' noise in each sum, in units of s; a party that is missing draws nothing then."""
        sums = [sum(self.streams[name].draw(round, b"") for name in names if name in honest) for round, names in rows]
        return np.array(sums, dtype=np.float64) / self.shares.scale


def test_the_covariance_is_that_of_simulated_shares() -> None:
    shares = plan_of(5, 1, 4, rounds=5).shares
    rows = rows_of("abcde", "bcde", "", "abcd", "abde")
    noise = Silos(shares).noise(rows, "abcd")
    expected = covariance(shares.mechanism.strategy, rows, "abcd")
    assert np.abs(noise @ noise.T / 20_000 - expected).max() < 6 * expected.max() / math.sqrt(20_000)


ALTERNATING = rows_of("abcde", "abde", "abcde", "abde")


def test_the_worst_signs_are_as_bad_as_stated_and_a_mutant_without_absolute_values_states_less() -> None:
    """A canary whose direction turns around, as broadcasts can make it, in simulated noise of the honest parties."""
    shares = plan_of(5, 1, 4, rounds=4).shares
    stated, mutant = attendance_mu(shares, ALTERNATING), by_hand(shares, ALTERNATING, 5, absolute=False)
    assert mutant < 0.93 * stated
    measured = []
    for bad, signs in itertools.product("abcde", ((1, 1), (1, -1))):
        honest = set("abcde") - {bad}
        inverse = np.linalg.inv(covariance(shares.mechanism.strategy, ALTERNATING, honest))
        for turn in range(2):
            canary = np.zeros(4)
            canary[turn::2] = shares.sensitivity / shares.scale * np.array(signs)
            if mutant < math.sqrt(canary @ inverse @ canary):
                measured.append((canary, inverse, honest))
    found = []
    for canary, inverse, honest in measured[:2]:
        scores = canary @ inverse @ Silos(shares).noise(ALTERNATING, honest)
        found.append(canary @ inverse @ canary / scores.std())
    error = 4 / math.sqrt(2 * 20_000)
    assert mutant < (1 - error) * max(found) < stated < (1 + error) * max(found)


def test_attendance_that_follows_what_was_revealed_tells_no_more_than_the_worst_path() -> None:
    """The best test of an adversary that chooses who attends by the sign of the first sum: mu of the worst choice."""
    plan, count = plan_of(5, 0, 4, rounds=4), 200_000
    strategy, rng = plan.strategy, np.random.default_rng(0)
    c = strategy.coefficients(4)
    C = np.array([[c[row - column] if row >= column else 0.0 for column in range(4)] for row in range(4)])
    noise = np.linalg.inv(C) @ rng.normal(size=(5, 4, count))
    data = np.where(np.arange(count) < count // 2, 2.0, 0.0)
    sums = {name: noise[place] for place, name in enumerate("abcde")}
    sums["a"] = sums["a"] + np.array([1, 0, -1, 0])[:, None] * data
    first, scores, budgets = sum(sums[name][0] for name in "abcde"), np.zeros(count), []
    for positive, rest in ((True, ("abde", "abcde", "abde")), (False, ("abcd", "abcd", "abcd"))):
        rows, taken = rows_of("abcde", *rest), (first > 0) == positive
        seen = np.array([sum(sums[name][round] for name in names) for round, names in rows])
        weights = 2.0 * np.linalg.solve(covariance(strategy, rows, "abcde"), np.array([1, 0, -1, 0]))
        budgets.append(2.0 * float(weights @ np.array([1, 0, -1, 0])))
        scores = np.where(taken, weights @ seen - budgets[-1] / 2, scores)
    assert budgets[1] > 1.05 * budgets[0]
    ranks = np.argsort(np.argsort(scores))
    half = count // 2
    auc = (ranks[:half].sum() - half * (half - 1) / 2) / half**2
    least, most = (0.5 * math.erfc(-math.sqrt(each) / 2) for each in sorted(budgets))
    assert least - 0.004 < auc < most + 0.004


# Plans


def test_the_scale_is_planned_for_the_fewest_honest_parties_and_the_rounding_for_all() -> None:
    some, whole = plan_of(10, 2, 8).shares, plan_of(10, 2, 0).shares
    assert some.scale / whole.scale == pytest.approx(math.sqrt(8 / 6))
    assert (whole.spread, some.spread) == (1.0, 1.5)  # of 1 and 1/2
    assert some.delta_of_rounding < 1e-50


def test_a_scale_below_three_times_the_sum_of_the_coefficients_is_refused() -> None:
    own = plan_of(10, 2, 8).shares
    steps = next(steps for steps in range(1, 1 << 16) if replace_steps(own, steps))
    with pytest.raises(ConfigError, match=f"and {MIN_SCALE * own.spread:.3g} are needed"):
        replace(own, steps=steps - 1)
    replace(own, steps=steps - 1, largest=8)  # it would do if all attended


def replace_steps(shares: NoiseShares, steps: int) -> bool:
    try:
        return replace(shares, steps=steps).scale > 0
    except ConfigError:
        return False


@pytest.mark.parametrize(
    ("parties", "colluders", "fewest", "least"),
    [(10, 2, 7, 8), (5, 1, 3, 4), (5, 0, 3, 4), (3, 1, 2, 3), (20, 4, 14, 15)],
)
def test_two_sums_must_share_an_honest_party(parties: int, colluders: int, fewest: int, least: int) -> None:
    with pytest.raises(GuaranteeError, match=f"must be {least} or more"):
        plan_of(parties, colluders, fewest)
    assert plan_of(parties, colluders, least).counts_attendance == (least < parties)
    plan_of(parties, colluders, fewest, correlation="independent")  # where mu does not depend on other rounds


def test_a_plan_in_which_all_attend_counts_no_attendance() -> None:
    assert not plan_of(5, 1, 5).counts_attendance
    assert not plan_of(5, 1, 4, correlation="independent").counts_attendance
    with pytest.raises(ConfigError, match="may be missing"):
        plan_of(5, 1, 5).spent_by(())
    with pytest.raises(ConfigError, match="covers 6 rounds"):
        plan_of(5, 1, 4).spent_by(((6, tuple("abcd")),))


# The log

TOO_MUCH = ("abcd", "bcde", "abcd", "bcde", "abcd", "abcd")
"""Attendance of five parties, none of whom colludes, that exceeds mu in its last round."""


def log_of(*sums: str) -> AttendanceLog:
    log = AttendanceLog(plan_of(5, 0, 4).shares)
    for round, names in rows_of(*sums):
        log.add(round, names)
    return log


def test_a_sum_with_which_mu_would_exceed_the_plan_is_refused() -> None:
    log = log_of(*TOO_MUCH[:-1])
    assert attendance_mu(log.shares, rows_of(*TOO_MUCH)) > 1.005 * log.shares.mu > log.mu
    with pytest.raises(ProtocolError, match="mu would be"):
        log.add(5, "abcd")
    assert len(log.rows) == 5
    log.add(5, "abcde")
    assert log.mu <= log.shares.mu


def test_a_round_has_one_sum() -> None:
    log = log_of("abcde")
    log.add(0, "edcba")
    with pytest.raises(ProtocolError, match="another list of survivors"):
        log.add(0, "abcd")


def test_a_client_that_was_missing_learns_what_it_missed_and_no_other_past() -> None:
    log = log_of("abcde")
    told = rows_of("abcde", "bcde", "bcde")
    log.learn(3, told)
    assert log.rows == told
    for wrong in (rows_of("abcd"), rows_of("", "abcde"), rows_of("abcde", "ab"), rows_of("abcde", "abcdf")):
        with pytest.raises(ProtocolError, match="round 3: the roster states"):
            log.learn(3, wrong)
    with pytest.raises(ProtocolError, match="cannot be"):
        log.learn(2, told)
    again = AttendanceLog(log.shares)
    again.load_state(log.state())
    assert again.rows == told
    with pytest.raises(ProtocolError, match="another attendance of round 0"):
        again.learn(3, rows_of("abcd", "bcde"))


@pytest.mark.parametrize("values", [{}, {"sums": {}, "own": []}, {"sums": packed(()), "own": [1]}])
def test_a_state_without_attendance_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="does not say who was in the sums"):
        log_of().load_state(State(values, {}))


@given(st.dictionaries(st.integers(0, 60), st.sets(st.sampled_from(NAMES), min_size=1), max_size=30))
def test_attendance_is_read_as_it_was_written(sums: dict[int, set[str]]) -> None:
    rows = tuple((round, tuple(sorted(names))) for round, names in sorted(sums.items()))
    assert unpacked(packed(rows)) == rows


@pytest.mark.parametrize(
    "values",
    [
        None, [], {}, {"parties": ["a"]}, {"parties": ["b", "a"], "spans": []}, {"parties": ["a"], "spans": []},
        {"parties": ["a"], "spans": [[0, 1, "2"]]}, {"parties": ["a"], "spans": [[0, 1, "0"]]},
        {"parties": ["a"], "spans": [[0, 1, "1"], [0, 1, "1"]]},
        {"parties": ["a"], "spans": [[0, 1, "1"], [1, 1, "1"]]}, {"parties": ["a"], "spans": [[-1, 1, "1"]]},
        {"parties": ["a"], "spans": [[0, 1 << 40, "1"]]}, {"parties": ["a"], "spans": [[0, 0, "1"]]},
        {"parties": ["a"], "spans": [[True, 1, "1"]]}, {"parties": ["a"], "spans": [[0, 1, 1]]},
        {"parties": ["a"], "spans": [[0, 1, "x"]]}, {"parties": ["a"], "spans": [[0, 1, "01"]]},
        {"parties": ["a"], "spans": [[0, 1]]}, {"parties": ["a"], "spans": {}},
        {"parties": [1], "spans": [[0, 1, "1"]]},
        {"parties": ["a"], "spans": [[0, 1, "1"]], "more": 1},
    ],
)  # fmt: skip
def test_other_values_are_no_attendance(values: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any
        unpacked(values)
