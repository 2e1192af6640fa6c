"""(epsilon, delta), and the plan of a run."""

import dataclasses
import math
from typing import Any

import dp_accounting
import pytest

from dbcl.config import CORRELATIONS as KINDS
from dbcl.errors import ConfigError
from dbcl.privacy import PrivacyPlan, epsilon_of, mu_of

RUN: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "clip": 0.2, "rounds": 400, "clients": 1000, "cohort": 100}


def normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def delta_of(mu: float, epsilon: float) -> float:
    """The exact delta of the Gaussian mechanism (Balle and Wang 2018), for the test only."""
    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("epsilon", [0.5, 1, 2, 4, 8])
@pytest.mark.parametrize("delta", [1e-7, 1e-5, 1e-3])
def test_mu_and_epsilon_are_those_of_the_gaussian_mechanism(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert delta_of(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-9)
    assert epsilon_of(0.0, delta) == 0.0


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2, 8, 60])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-3])
def test_mu_and_epsilon_are_those_of_dp_accounting(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert mu == pytest.approx(1 / dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-9)
    assert epsilon_of(mu, delta) == pytest.approx(dp_accounting.get_epsilon_gaussian(1 / mu, delta), rel=1e-9)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1, 1e-5), (math.nan, 1e-5), (math.inf, 1e-5), (1, 0.0), (1, 1.0)])
def test_what_is_no_target_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        mu_of(epsilon, delta)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_sigma_gives_the_target_back(kind: str, momentum: float) -> None:
    plan = PrivacyPlan(**RUN, correlation=kind, momentum=momentum)
    mu = plan.mechanism.mu(sigma=plan.sigma, clip=0.2, per_round=100)
    assert mu == pytest.approx(plan.mu, rel=1e-12)
    assert epsilon_of(mu, 1e-5) == pytest.approx(8, rel=1e-9)
    assert plan.noise == pytest.approx(plan.sigma * plan.mechanism.growth)


def test_banded_is_quieter_than_the_others_at_the_same_epsilon() -> None:
    banded, independent, white = (
        PrivacyPlan(**RUN, correlation=kind).noise for kind in ("banded", "independent", "white")
    )
    assert banded < independent / 2.4 < white / 8


def test_a_plan_of_examples_does_not_depend_on_the_number_of_clients() -> None:
    run = {**RUN, "clip": 1.0, "rounds": 600, "unit": "example", "examples": 60000, "batch": 6000, "separation": 10}
    two, thousand = (PrivacyPlan(**{**run, "clients": clients, "cohort": clients}) for clients in (2, 1000))
    assert (two.separation, two.participations) == (10, 60)
    assert two.sigma == thousand.sigma
    two.require_useful(rms=0.026, parameters=199_210)
    assert "for one example" in two.promise


def test_the_rule_may_be_stricter_than_turns_and_not_looser() -> None:
    assert PrivacyPlan(**RUN, separation=5, participations=60).sigma > PrivacyPlan(**RUN).sigma
    with pytest.raises(ConfigError, match="separation can be 10 at most"):
        PrivacyPlan(**RUN, separation=11)
    with pytest.raises(
        ConfigError, match="400 rounds with 100 clients each are more than 1000 can fill, 39 times each"
    ):
        PrivacyPlan(**RUN, participations=39)


def test_a_target_that_ten_clients_cannot_meet_names_the_other_unit() -> None:
    few = PrivacyPlan(**{**RUN, "clients": 10, "cohort": 10})
    with pytest.raises(ConfigError, match=r"10 clients in a round are too few to hide one .* one example as the unit"):
        few.require_useful(rms=0.026, parameters=199_210)
    PrivacyPlan(**RUN).require_useful(rms=0.026, parameters=199_210)
    examples = PrivacyPlan(**{**RUN, "rounds": 40, "clip": 9.0}, unit="example", examples=50, batch=5, separation=10)
    with pytest.raises(ConfigError, match=r"5 examples in a round .* The remedy: a larger epsilon"):
        examples.require_useful(rms=0.026, parameters=199_210)


def test_weights_that_begin_at_zero_are_measured_by_what_they_can_become() -> None:
    PrivacyPlan(**RUN).require_useful(rms=0.0, parameters=199_210)
    few = PrivacyPlan(**{**RUN, "clients": 10, "cohort": 10})
    with pytest.raises(ConfigError, match="times the largest change that all updates together can make, and nothing"):
        few.require_useful(rms=0.0, parameters=199_210)


def test_the_promise_for_examples_is_made_to_clients_that_clip() -> None:
    """No server sees whether a client clips its examples."""
    plan = PrivacyPlan(**RUN, unit="example", examples=4000, batch=400, separation=10)
    assert "for one example of a client that clips each example's gradient, and keeps their turns, by itself" in (
        plan.promise
    )


@pytest.mark.parametrize("wrong", [{"separation": 0}, {"separation": 10, "participations": 3}])
def test_a_plan_of_examples_says_when_they_come_back(wrong: dict[str, int]) -> None:
    """Only the clients know: a rule that is derived from batch sizes may be another than theirs."""
    with pytest.raises(ConfigError, match=r"separation|participations"):
        PrivacyPlan(**RUN, unit="example", examples=4000, batch=400, **wrong)


def test_what_is_spent_grows_to_the_target_and_not_beyond() -> None:
    plan = PrivacyPlan(**RUN)
    spent = [plan.spent(rounds=rounds, participations=rounds // 10) for rounds in (0, 100, 200, 300, 400)]
    assert [each.epsilon for each in spent] == sorted(each.epsilon for each in spent)
    assert spent[0] == (0.0, 0.0, 1e-5)
    assert spent[-1].epsilon == pytest.approx(8, rel=1e-9)
    with pytest.raises(ConfigError, match="there is no guarantee"):
        plan.spent(rounds=401, participations=40)
    with pytest.raises(ConfigError, match="there is no guarantee"):
        plan.spent(rounds=400, participations=41)


def test_the_promise_has_every_number_that_it_rests_on() -> None:
    promise = PrivacyPlan(**RUN).promise
    for part in (
        "epsilon 8",
        "delta 1e-05",
        "mu 1.666",
        "one client",
        "trusted server",
        "zero in one of them",
        "clipped to 0.2",
        "divided by 100",
        "twice within 10 rounds",
        "more than 40 times in 400",
    ):
        assert part in promise


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "hospital"}, "privacy_unit must be one of client, example"),
        ({"correlation": "pink"}, "correlation must be one of banded, independent, white"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"epsilon": math.inf}, "epsilon must be finite"),
        ({"delta": 0.0}, "delta must be above 0 and below 1"),
        ({"delta": 1e-3}, "revealing one of them entirely would be allowed"),
        ({"clip": -1.0}, "clip must be above 0"),
        ({"rounds": 0}, "rounds must be 1 or more"),
        ({"cohort": 1001}, "cohort must be between 1 and the number of clients, 1000"),
        ({"unit": "example"}, "needs examples"),
        ({"separation": -1}, "must not be negative"),
        ({"momentum": 1.0}, "momentum must be in"),
    ],
)
def test_what_makes_no_plan_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrivacyPlan(**{**RUN, **change})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)epsilon must be.*clip must be"):
        PrivacyPlan(**{**RUN, "epsilon": -1.0, "clip": 0.0})
    with pytest.raises(ConfigError, match=r"(?s)rounds must be.*cohort must be"):
        PrivacyPlan(**{**RUN, "rounds": 0, "cohort": 0})


def test_a_plan_is_plain_values_and_comes_back_from_them() -> None:
    plan = PrivacyPlan(**RUN)
    assert PrivacyPlan(**dataclasses.asdict(plan)) == plan
