"""The formulas against simulations: 4 standard errors, fixed seeds, and standard errors small enough to tell."""

import numpy as np
import pytest
import torch

from dbcl.errors import SketchError
from dbcl.sketch import draw
from dbcl_audit import theory, theory_checks

SKETCHES = ("count-v1", "count-hashed-v1", "sampling-v1")


def sketch(scheme, dim, width, index=0):
    return draw(scheme, dim, width, seed=bytes(32), round=index, name="test")


def weights(dout=3, dim=24, rows=2):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in (dout, dout, rows)]


@pytest.mark.parametrize("scheme", SKETCHES)
@pytest.mark.parametrize("width", [12, 7, 23])
def test_theorem_1(scheme, width):
    check = theory_checks.simulate_option_one(scheme, dim=24, width=width, draws=500, seed=1)
    assert abs(check.deviation) < 4
    assert check.error < 0.1 * check.predicted


@pytest.mark.parametrize("scheme", SKETCHES)
@pytest.mark.parametrize("width", [12, 7])
def test_theorem_2(scheme, width):
    check = theory_checks.simulate_linear(scheme, dim=24, width=width, draws=800, seed=2)
    assert abs(check.deviation) < 4
    assert check.error < 0.1 * check.predicted


@pytest.mark.parametrize("scheme", SKETCHES)
def test_sketches_are_unbiased(scheme):
    for check in theory_checks.simulate_unbiased(scheme, draws=500, seed=3):
        assert abs(check.deviation) < 4


def test_simulation_notices_a_missing_gain(monkeypatch):
    monkeypatch.setattr("dbcl.sketch.buckets.BucketSketch.expand", lambda self, y: self.lift(y))
    assert max(abs(check.deviation) for check in theory_checks.simulate_unbiased("sampling-v1", draws=500, seed=3)) > 10
    assert abs(theory_checks.simulate_option_one("sampling-v1", seed=1).deviation) > 10


def test_theorem_2_as_printed_holds_for_hashed_buckets():
    old, new, V = weights()
    printed = theory.printed_linear_error(old, new, V, 12)
    assert theory.linear_error("count-hashed-v1", old, new, V, 12) == pytest.approx(printed)


def test_theorem_2_as_printed_is_twice_too_large_for_the_papers_own_buckets():
    """Balanced buckets at ratio 2: two inputs share one with chance 1 / (dim - 1), not 2 / dim."""
    dim, width = 24, 12
    check = theory_checks.simulate_linear("count-v1", dim=dim, width=width, draws=1500, seed=4)
    printed = check.predicted * (1 / width) / theory.collision("count-v1", dim, width)
    assert printed == pytest.approx(check.predicted * 23 / 12)
    assert printed - check.measured > 10 * check.error


def test_theorem_1_is_no_lower_bound_in_dim_over_s_for_balanced_buckets():
    """With s = dim - 1 the factor is 2 / dim, although dim / s is more than 1; hashed buckets keep (dim - 1) / s."""
    W = torch.ones(1, 100, dtype=torch.float64)
    assert theory.option_one_error("count-v1", W, W, 99) / 200 == pytest.approx(2 / 100)
    assert theory.option_one_error("count-hashed-v1", W, W, 99) / 200 == pytest.approx(1.0)


@pytest.mark.parametrize("scheme", SKETCHES)
def test_theorem_1_is_theorem_2_with_the_identity(scheme):
    old, new, _ = weights()
    whole = theory.linear_error(scheme, old, new, torch.eye(24, dtype=torch.float64), 12)
    assert theory.option_one_error(scheme, old, new, 12) == pytest.approx(whole)


def test_theorem_1_holds_when_the_new_weights_follow_from_the_old_sketch():
    """In a run W_new = W_old + U R_old^T is not fixed, as the proof assumes; the cross term vanishes all the same."""
    generator = torch.Generator().manual_seed(6)
    W = torch.randn(3, 24, generator=generator, dtype=torch.float64)
    gaps = []
    for index in range(800):
        old, new = sketch("count-v1", 24, 12, 2 * index), sketch("count-v1", 24, 12, 2 * index + 1)
        W_new = W + old.lift(0.5 * old.apply(W))
        error = (theory.option_one(W, W_new, old, new) - (W - W_new)).square().sum()
        gaps.append(float(error) - theory.option_one_error("count-v1", W, W_new, 12))
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / len(gaps) ** 0.5


def test_listing_of_the_paper_is_biased():
    check = theory_checks.simulate_listing(dim=5, ratio=2, draws=4000, seed=7)
    assert check.predicted == 0.8
    assert abs(check.deviation) < 4
    assert (1 - check.measured) > 10 * check.error


def test_corollary_needs_a_mean_of_zero():
    centred = [theory.corollary_factor(0.0, dim) for dim in (16, 128, 1024)]
    shifted = [theory.corollary_factor(1.0, dim) for dim in (16, 128, 1024)]
    assert min(centred) > 0.8
    assert shifted[1] / shifted[0] < 0.2
    assert shifted[2] / shifted[1] < 0.2


@pytest.mark.parametrize(("dout", "left"), [(8, 0.0), (24, 0.0), (40, 0.4)])
def test_bound_of_the_remark_is_zero_when_there_are_few_outputs(dout, left):
    """Width 12: two rounds give 24 columns. They span all of 8 or 24 outputs, and 24 of 40 dimensions otherwise."""
    old, new, _ = weights(dout=dout)
    residual = theory.remark_residual(old, new, sketch("count-v1", 24, 12, 0), sketch("count-v1", 24, 12, 1))
    if left:
        assert 0.1 < residual < left
    else:
        assert residual < 1e-18


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_veil(kappa):
    check = theory_checks.simulate_veil(kappa, seed=8)
    assert abs(check.deviation) < 4
    assert check.error < 0.03


def test_veil_simulation_can_tell_neighbouring_formulas_apart():
    check = theory_checks.simulate_veil(1.0, rounds=200_000, seed=8)
    assert abs(check.deviation) < 4
    for wrong in ((1 + 2) ** -0.25, (1 + 4) ** -0.5, (1 + 1) ** -0.5):
        assert abs(check.measured - wrong) > 10 * check.error


def test_smoother_is_the_posterior_mean():
    """Far from both ends it equals the least-squares solution over all rounds, which knows nothing of kernels."""
    kappa, rounds = 2.0, 400
    numbers = np.random.default_rng(9)
    walk = np.cumsum(numbers.standard_normal(rounds))
    seen = walk + kappa * numbers.standard_normal(rounds)
    differences = np.diff(np.eye(rounds), axis=0)
    solved = np.linalg.solve(np.eye(rounds) / kappa**2 + differences.T @ differences, seen / kappa**2)
    middle = slice(150, 250)
    assert np.diff(solved)[middle] == pytest.approx(theory.smooth(seen, kappa)[middle], abs=1e-9)


def test_only_count_sketches_collide():
    with pytest.raises(SketchError, match="only count sketches have buckets"):
        theory.collision("sampling-v1", 4, 2)
