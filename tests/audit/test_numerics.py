"""What rounding must not decide: a spread of rounding errors is none, and small tensors have directions."""

import numpy as np
import pytest
import torch

from dbcl_audit.attacks.members import RoundScores, loss_scores
from dbcl_audit.attacks.update_labels import _regressed
from dbcl_audit.numerics import cosine, standardized

EPS = float(np.finfo(np.float32).eps)


def rounded(value: float, count: int, seed: int) -> np.ndarray:
    """Equal values, as two CPUs may round them in float32."""
    return value * (1 + EPS * np.random.default_rng(seed).uniform(-1, 1, count))


@pytest.mark.parametrize("value", [1e-20, 1.0, -1e20])
def test_values_that_differ_by_rounding_are_all_at_the_mean(value: float) -> None:
    values = rounded(value, 100, 0)
    assert np.abs(standardized(values, values[:50])).max() < 0.1
    spread = value * np.linspace(0.9, 1.1, 100)
    np.testing.assert_allclose(np.std(standardized(spread, spread)), 1)


def test_losses_that_differ_by_rounding_tell_nothing() -> None:
    losses = rounded(2.3, 100, 0)
    found = loss_scores([[RoundScores("a", 1.0, np.zeros(50), losses)]], np.zeros(100), slice(50, None))
    assert np.abs(found).max() < 0.1


def test_label_counts_do_not_follow_features_that_differ_by_rounding() -> None:
    """One group of features tells the counts, the other is the same in all simulations but for rounding."""
    rng = np.random.default_rng(0)
    known = [rng.multinomial(10, [0.5, 0.5]) for _ in range(40)]
    for seed in (1, 2):
        still = rounded(1.0, 41 * 6, seed).reshape(41, 6)
        simulated = [[counts / 10, each] for counts, each in zip(known, still, strict=False)]
        found = _regressed(simulated, known, [np.array([0.3, 0.7]), still[-1] + 0.1])  # as no simulation did
        np.testing.assert_allclose(found, [3, 7], atol=0.1)
    nothing = _regressed([[each] for each in still], known, [still[-1]])
    np.testing.assert_allclose(nothing, np.mean(known, axis=0))


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e30])
def test_the_cosine_does_not_depend_on_the_length(size: float) -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
    assert cosine(size * x, size * y) == pytest.approx(0.96, rel=1e-6)
    assert cosine(size * x, -size * x) == pytest.approx(-1, rel=1e-6)
