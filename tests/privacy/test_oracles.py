"""The mechanism against jax-privacy: what it gave, kept here, and computed anew where it is installed."""

from typing import Any

import numpy as np
import pytest

from dbcl.privacy import Mechanism, Strategy, Workload, banded, epsilon_of

Setting = tuple[int, int, int]
MIXED = Strategy("mixed", numerator=(1.0, -0.25), denominator=(1.0, -0.85))
"""A strategy with both polynomials."""
RECORDED: dict[Setting, list[tuple[float, float]]] = {
    (150, 10, 15): [
        (5.183643421744148, 2.677712242471868),
        (12.744463204085745, 1.5321015346305136),
        (6.918107642742609, 2.0317681407527237),
    ],
    (600, 10, 60): [
        (10.367286843488296, 5.028857401376202),
        (48.6946765712978, 1.668971107724621),
        (13.97973852121662, 3.6233990181105438),
    ],
    (200, 50, 4): [
        (3.0396863500332714, 1.7901825943782859),
        (4.14290950018564, 1.561381825604028),
        (3.031953916468662, 2.2645959168616967),
    ],
    (47, 5, 3): [
        (2.1654440535877972, 2.1916781631334925),
        (3.606841189524822, 1.4091440074286379),
        (3.351999162239669, 1.4371287371325503),
    ],
    (400, 10, 40): [
        (8.464854261205192, 4.151695784530264),
        (32.72702952917648, 1.6300204345053586),
        (11.39496135742112, 3.0214009995364743),
    ],
}
"""Of jax-privacy 2.0.0, by (rounds, separation, participations): sensitivity and noise on W of the strategies below."""


def strategies(setting: Setting) -> list[Strategy]:
    rounds, separation, _ = setting
    return [banded(separation), banded(rounds), MIXED]


@pytest.mark.parametrize("setting", RECORDED)
def test_sensitivity_noise_and_mu_are_those_of_jax_privacy(setting: Setting) -> None:
    for strategy, (sensitivity, growth) in zip(strategies(setting), RECORDED[setting], strict=True):
        own = Mechanism(Workload(), strategy, *setting)
        assert own.sensitivity == pytest.approx(sensitivity, rel=1e-6)
        assert own.growth == pytest.approx(growth, rel=1e-6)
        mu = own.mu(sigma=0.01, clip=0.2, per_round=100)
        assert mu == pytest.approx(sensitivity * 0.2, rel=1e-6)
        assert epsilon_of(mu, 1e-5) == pytest.approx(epsilon_of(sensitivity * 0.2, 1e-5), rel=1e-6)


@pytest.fixture(scope="module")
def jax_privacy() -> Any:
    reason = "jax-privacy is not installed: pip install jax-privacy"
    jax = pytest.importorskip("jax", reason=reason)
    pytest.importorskip("jax_privacy", reason=reason)
    from jax_privacy import matrix_factorization

    with jax.enable_x64():
        yield matrix_factorization


GRID = [(n, b, k) for n in (1, 12, 47, 150) for b in (1, 3, 10) for k in (1, 2, 5, 15)]


def test_sensitivity_over_a_grid(jax_privacy: Any) -> None:
    for n, b, k in [*GRID, *RECORDED]:
        for strategy in (banded(b), banded(b, 0.5), banded(n), MIXED):
            coefficients = jax_privacy.toeplitz.pad_coefs_to_n(np.array(strategy.coefficients(n)), n)
            squared = jax_privacy.toeplitz.minsep_sensitivity_squared(coefficients, b, k, n)
            assert Mechanism(Workload(), strategy, n, b, k).sensitivity == pytest.approx(
                float(squared) ** 0.5, rel=1e-6
            )


def test_what_was_recorded_is_what_it_gives(jax_privacy: Any) -> None:
    for setting, recorded in RECORDED.items():
        rounds, separation, participations = setting
        for strategy, (sensitivity, growth) in zip(strategies(setting), recorded, strict=True):
            c = np.array(strategy.coefficients(rounds))
            squared = jax_privacy.toeplitz.minsep_sensitivity_squared(c, separation, participations, rounds)
            errors = jax_privacy.toeplitz.per_query_error(strategy_coef=c, n=rounds)
            assert float(squared) ** 0.5 == pytest.approx(sensitivity, rel=1e-9)
            assert float(np.mean(errors)) ** 0.5 == pytest.approx(growth, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_the_workload_is_its_momentum_matrix(jax_privacy: Any, momentum: float) -> None:
    theirs = np.asarray(jax_privacy.streaming_matrix.momentum_sgd_matrix(momentum).materialize(12))
    np.testing.assert_allclose(theirs[:, 0], Workload(momentum).coefficients(12), rtol=1e-9)
