"""The forest and the matched filter, on updates where the answer is known."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from dbcl import data
from dbcl.data.traits import properties_of
from dbcl.errors import DataError
from dbcl.model import networks
from dbcl.objective import cross_entropy
from dbcl_audit.attacks.learners import MatchedFilter, Samples, flatten, forest, melis_features
from dbcl_audit.attacks.roc import measure_auc


def filtered(train: Samples, test_x: np.ndarray, noise: float) -> np.ndarray:
    """What the filter makes of updates with the same noise in every feature."""
    return MatchedFilter(train, np.zeros(train.x.shape[1], dtype=np.int64))(test_x, np.array([noise]))


def dense_filter(train: Samples, noise: np.ndarray, penalty: float, batch: int) -> np.ndarray:
    with_, without = train.x[train.y], train.x[~train.y]
    centred = np.concatenate([with_ - with_.mean(0), without - without.mean(0)])
    covariance = centred.T @ centred / (len(centred) - 2) / batch + np.diag(noise) + penalty * np.eye(len(noise))
    return np.linalg.solve(covariance, with_.mean(0) - without.mean(0))


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("noise", [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [0.0, 0.1, 2.0]])
def test_the_dual_form_is_the_formula(noise: list[float], batch: int) -> None:
    rng = np.random.default_rng(0)
    y, group = np.arange(30) % 3 == 0, np.repeat(np.arange(3), 5)
    train = Samples(rng.normal(size=(30, 15)) + 5 + y[:, None], y)
    test = rng.normal(size=(20, 15))
    with_, without = train.x[train.y], train.x[~train.y]
    total = (np.square(with_ - with_.mean(0)).sum() + np.square(without - without.mean(0)).sum()) / 28 / batch
    expected = (test - (with_.mean(0) + without.mean(0)) / 2) @ dense_filter(
        train, np.array(noise)[group], 0.3 * total, batch
    )
    scores = MatchedFilter(train, group, batch, penalties=np.array([0.3]))(test, np.array(noise))
    slope = scores[0] / expected[0]
    assert slope > 0
    np.testing.assert_allclose(scores, slope * expected, rtol=1e-9, atol=1e-12)
    fixed = MatchedFilter(train, group, batch, penalty=0.3 * total)
    np.testing.assert_allclose(fixed(test, np.array(noise)), scores, rtol=1e-9)


def test_scores_are_the_log_odds_of_a_mean_of_examples() -> None:
    """Two normal clouds whose means are 0.5 apart: the log odds of a mean of 16 are 16 * 0.5 * (x - 0.25)."""
    cloud = np.random.default_rng(0).permutation(norm.ppf((np.arange(200) + 0.5) / 200))
    y = np.arange(400) < 200
    x = np.concatenate([cloud + 0.5, cloud])[:, None]
    told = MatchedFilter(Samples(x, y), np.zeros(1, dtype=np.int64), batch=16)
    np.testing.assert_allclose(
        told(np.array([[0.0], [0.25], [1.0]]), np.zeros(1)), [-2.0, 0.0, 6.0], rtol=0.1, atol=0.1
    )


@pytest.mark.parametrize("gap", [1e-30, 1.0, 1e30])
def test_updates_that_are_all_alike_have_finite_scores(gap: float) -> None:
    """Within each kind nothing varies: the spread is a rounding error, or 0."""
    y = np.arange(20) % 2 == 0
    scores = filtered(Samples(gap * (y[:, None] + np.ones(3)), y), gap * np.array([[1.0] * 3, [2.0] * 3]), 0.0)
    assert np.isfinite(scores).all()
    assert scores[1] > scores[0]


def spread_signal(seed: int, shift: float = 0.05) -> tuple[Samples, np.ndarray, np.ndarray]:
    """Clean training updates, and test updates with noise 20 times as large as the shift of each of 20,000 features."""
    rng = np.random.default_rng(seed)
    direction = rng.choice([-shift, shift], size=20_000)
    y = np.arange(400) % 2 == 0
    x = rng.normal(scale=0.2, size=(400, 20_000)) + y[:, None] * direction
    return Samples(x[:200], y[:200]), x[200:] + rng.normal(size=(200, 20_000)), y[200:]


def test_the_filter_finds_what_is_spread_far_below_the_noise_and_the_forest_does_not() -> None:
    train, test_x, truth = spread_signal(seed=1)
    matched = measure_auc(filtered(train, test_x, noise=1.0), truth, seed=0)
    unaware = measure_auc(forest(train, test_x, seed=0), truth, seed=0)
    rng = np.random.default_rng(2)
    noisy = Samples(train.x + rng.normal(size=train.x.shape), train.y)  # a forest that knows of the noise, too
    aware = measure_auc(forest(noisy, test_x, seed=0), truth, seed=0)
    assert matched.low > 0.97
    assert unaware.auc < 0.8
    assert aware.auc < 0.8


def test_the_filter_prefers_the_features_that_carry_no_noise() -> None:
    rng = np.random.default_rng(3)
    y = np.arange(300) % 2 == 0
    x = rng.normal(size=(300, 500))
    x[:, :5] += y[:, None] * 1.5
    x[:, 5:] += y[:, None] * 0.5
    group, noise = np.where(np.arange(500) < 5, 0, 1), np.array([0.0, 100.0])
    test = x[200:] + rng.normal(size=(100, 500)) * np.sqrt(noise[group])
    told_by = MatchedFilter(Samples(x[:200], y[:200]), group)
    told = measure_auc(told_by(test, noise), y[200:], seed=0)
    untold = measure_auc(told_by(test, np.zeros(2)), y[200:], seed=0)
    assert told.auc > 0.95
    assert untold.auc < told.auc - 0.1


def test_no_attack_finds_anything_in_pure_noise() -> None:
    train, test_x, truth = spread_signal(seed=4, shift=0.0)
    for scores in (
        filtered(train, test_x, noise=1.0),
        filtered(train, test_x, noise=0.0),
        forest(train, test_x, seed=0),
    ):
        found = measure_auc(scores, truth, seed=0)
        assert abs(found.auc - 0.5) < 0.12  # three standard errors of 100 against 100


def test_a_forest_and_a_filter_find_thick_strokes_in_gradients() -> None:
    digits = data.load("digits")
    thick = properties_of("digits")
    model = networks.build("mnist-mlp", shape=digits.shape)
    rng = np.random.default_rng(0)
    halves = np.arange(len(thick)) % 2 == 0  # the attacker's digits and the victim's

    def gradients(own: np.ndarray, count: int) -> Samples:
        rows, kinds = [], np.arange(count) % 2 == 0
        for kind in kinds:
            batch = torch.from_numpy(rng.choice(np.flatnonzero(own & (thick == kind)), 32, replace=False))
            model.zero_grad()
            cross_entropy(model(digits.x_train[batch]), digits.y_train[batch]).backward()
            update = {name: parameter.grad for name, parameter in model.named_parameters()}
            rows.append(melis_features(update, vectors=True))
        return Samples(np.stack(rows), kinds)

    train, test = gradients(halves, 100), gradients(~halves, 60)
    trees = measure_auc(forest(train, test.x, seed=0), test.y, seed=0)
    matched = measure_auc(filtered(train, test.x, noise=0.0), test.y, seed=0)
    assert trees.low > 0.9
    assert matched.low > 0.9


def test_melis_pools_kernels_and_long_rows_and_leaves_vectors_out() -> None:
    update = {"conv": torch.randn(4, 3, 5, 5), "wide": torch.randn(10, 600), "small": torch.randn(2, 3)}
    update["bias"] = torch.randn(7)
    row = melis_features(update, vectors=False)
    assert len(row) == 4 * 3 + 10 + 6
    assert len(melis_features(update, vectors=True)) == len(row) + 7
    assert np.linalg.norm(row) == pytest.approx(1.0)
    assert row[1] / row[0] == pytest.approx(float(update["conv"][0, 1].abs().max() / update["conv"][0, 0].abs().max()))
    assert np.array_equal(melis_features({"w": torch.zeros(2, 2)}, vectors=False), np.zeros(4))


def test_flatten_takes_the_names_in_order() -> None:
    update = {"a": torch.tensor([1.0]), "b": torch.tensor([[2.0, 3.0]])}
    assert flatten(update, ["b", "a"]).tolist() == [2.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((4, 2)), np.zeros(3, dtype=bool), "a matrix and a bool"),
        (np.zeros((4, 2)), np.zeros(4), "a matrix and a bool"),
        (np.zeros((4, 2)), np.arange(4) == 0, "2 or more with"),
        (np.full((4, 2), np.nan), np.arange(4) < 2, "must be finite"),
    ],
)
def test_samples_are_checked(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Samples(x, y)


def test_noise_is_a_variance_for_each_group() -> None:
    train = Samples(np.eye(4), np.arange(4) < 2)
    told = MatchedFilter(train, np.arange(4) // 2)
    for noise in (np.ones(3), np.array([1.0, -1.0])):
        with pytest.raises(ValueError, match="0 or more for each of 2 groups"):
            told(np.eye(4), noise)
