"""Exact conversion between a Gaussian mechanism and (epsilon, delta) (Balle and Wang 2018, theorem
8).

A Gaussian mechanism with sensitivity / sigma = mu is (epsilon, delta)-differentially private for
delta(epsilon) = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu), and for no
smaller delta.
"""

import math
from collections.abc import Callable

import torch

from dbcl.errors import ConfigError

MAX_MU = 1e6
"""Upper limit of the search for mu. A guarantee with this mu is vacuous."""


def log_delta_of(mu: float, epsilon: float) -> float:
    """Return log(delta) of a Gaussian mechanism at the given epsilon.

    Args:
        mu: Sensitivity divided by the standard deviation of the noise.
        epsilon: Epsilon of the guarantee.

    >>> round(math.exp(log_delta_of(1.0, 4.377178)), 10)
    1e-05
    """
    if mu <= 0:
        return -math.inf
    first, second = _log_cdf(mu / 2 - epsilon / mu), _log_cdf(-mu / 2 - epsilon / mu)
    ratio = epsilon + second - first  # of the second term to the first, below 0
    return first + math.log(-math.expm1(min(ratio, -1e-300)))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism at the given delta.

    Args:
        mu: Sensitivity divided by the standard deviation of the noise.
        delta: Delta of the guarantee.

    >>> round(epsilon_of(1.0, 1e-5), 3)
    4.377
    """
    goal = _log(delta)
    if mu <= 0 or log_delta_of(mu, 0.0) <= goal:
        return 0.0
    above = 1.0
    while log_delta_of(mu, above) > goal:
        above *= 2
    return _smallest(lambda epsilon: log_delta_of(mu, epsilon) <= goal, 0.0, above)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta)-differentially private.

    Args:
        epsilon: Epsilon of the guarantee.
        delta: Delta of the guarantee.

    >>> round(mu_of(8.0, 1e-5), 3)
    1.666
    """
    goal = _log(delta)
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon must be 0 or more and finite, got {epsilon}")
    # The largest mu that keeps it is just below the smallest that does not.
    return math.nextafter(_smallest(lambda mu: log_delta_of(mu, epsilon) > goal, 0.0, MAX_MU), 0.0)


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest value that satisfies a monotone condition, by bisection.

    The condition must be false at `low` and true at `high`.
    """
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        low, high = (low, middle) if holds(middle) else (middle, high)


def _log(delta: float) -> float:
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be above 0 and below 1, got {delta}")
    return math.log(delta)


def _log_cdf(x: float) -> float:
    """Return log Phi(x)."""
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))
