import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dbcl.engines.training import LocalTraining
from dbcl_audit.attacks import membership

TRAINING = LocalTraining(lr=0.1, batch_size=32, epochs=25, momentum=0.9)


def small_mlp(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 4))


def noisy_examples(seed: int, count: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of which many have labels that only a model that saw them can know."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 30, generator=rng)
    clear, random = x[:, :4].argmax(dim=1), torch.randint(4, (count,), generator=rng)
    return x, torch.where(torch.rand(count, generator=rng) < 0.5, clear, random)


@pytest.fixture(scope="module")
def overfitted() -> membership.Shadows:
    return membership.shadows(small_mlp, noisy_examples(0), count=18, training=TRAINING, seed=0)


def target_and_shadows(trained: membership.Shadows) -> tuple[np.ndarray, np.ndarray, membership.Shadows]:
    """The first model is the victim's; its twin on the other half is left out, too."""
    rest = membership.Shadows(trained.confidences[2:], trained.members[2:])
    return trained.confidences[0], trained.members[0], rest


def test_an_overfitted_model_gives_its_members_away(overfitted: membership.Shadows) -> None:
    target, members, shadows = target_and_shadows(overfitted)
    loss = membership.judge(membership.loss_threshold(target), members)
    offline = membership.judge(membership.lira(target, None, shadows.outside), members)
    online = membership.judge(membership.lira(target, shadows.inside, shadows.outside), members)
    assert loss.auc > 0.8
    assert offline.tpr_at_1_percent > 0.1
    assert online.tpr_at_1_percent > 0.2
    assert online.auc > loss.auc
    assert math.isnan(online.tpr_at_01_percent)  # 300 others are too few to see 0.1 %


def test_a_model_that_never_saw_the_examples_gives_nothing_away(overfitted: membership.Shadows) -> None:
    x, y = noisy_examples(0)
    stranger = small_mlp(9)
    TRAINING.train(stranger, noisy_examples(1, 300), seed=bytes(32), round=0, client=0)
    target = membership.confidences(stranger, (x, y))
    _, members, shadows = target_and_shadows(overfitted)
    for scores in (
        membership.loss_threshold(target),
        membership.lira(target, None, shadows.outside),
        membership.lira(target, shadows.inside, shadows.outside),
    ):
        found = membership.judge(scores, members)
        assert abs(found.auc - 0.5) < 0.08  # three standard errors of 300 against 300
        assert found.tpr_at_1_percent < 0.05


def test_shadows_are_halves_and_come_from_the_seed() -> None:
    x, y = noisy_examples(0, 41)
    short = LocalTraining(epochs=1)
    first, again = (membership.shadows(small_mlp, (x, y), 4, short, seed=5) for _ in range(2))
    assert np.array_equal(first.confidences, again.confidences)
    assert np.array_equal(first.members.sum(axis=0), np.full(41, 2))
    assert first.members.sum(axis=1).tolist() == [21, 20, 21, 20]
    assert not np.array_equal(first.members[0], first.members[2])
    other = membership.shadows(small_mlp, (x, y), 4, short, seed=6)
    assert not np.array_equal(first.members, other.members)
    with pytest.raises(ValueError, match="even"):
        membership.shadows(small_mlp, (x, y), 3, short, seed=0)


def test_confidences_are_the_logit_of_the_probability_and_never_saturate() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50) % 7
    p = logits.double().softmax(-1)[torch.arange(50), y].numpy()
    found = membership.confidences(nn.Identity(), (logits, y), batch_size=8)
    np.testing.assert_allclose(found, np.log(p / (1 - p)), rtol=1e-10)
    np.testing.assert_allclose(membership.loss_threshold(found), np.log(p), rtol=1e-10)
    extreme = membership.confidences(nn.Identity(), (torch.tensor([[500.0, 0.0], [500.0, 0.0]]), torch.tensor([0, 1])))
    assert extreme.tolist() == [500.0, -500.0]


def test_confidences_leave_the_model_in_its_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(3, 2)).train()
    x, y = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    assert np.array_equal(membership.confidences(model, (x, y)), membership.confidences(model, (x, y)))
    assert model.training


@pytest.mark.parametrize("models", [10, 200])
def test_lira_is_the_ratio_of_two_normal_densities(models: int) -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(3, 2, size=(models, 8)), rng.normal(size=(models, 8))
    target = rng.normal(size=8)
    if models < membership.MIN_VALUES_FOR_OWN_VARIANCE:  # one variance for all examples
        spread_in, spread_out = (np.sqrt(values.var(axis=0, ddof=1).mean()) for values in (inside, outside))
    else:
        spread_in, spread_out = inside.std(axis=0, ddof=1), outside.std(axis=0, ddof=1)
    expected = stats.norm.logpdf(target, inside.mean(0), spread_in) - stats.norm.logpdf(
        target, outside.mean(0), spread_out
    )
    np.testing.assert_allclose(membership.lira(target, inside, outside), expected, rtol=1e-9)
    offline = stats.norm.logcdf(target, outside.mean(0), spread_out)
    assert np.array_equal(np.argsort(membership.lira(target, None, outside)), np.argsort(offline))


def test_lira_skips_what_is_nan_and_says_when_nothing_is_left() -> None:
    outside = np.array([[0.0, np.nan], [2.0, 5.0], [np.nan, 7.0]])
    scores = membership.lira(np.array([1.0, 6.0]), None, outside)
    np.testing.assert_allclose(scores, 0.0)
    with pytest.raises(ValueError, match="needs a shadow model"):
        membership.lira(np.zeros(2), None, np.array([[0.0, np.nan], [1.0, np.nan]]))


def test_low_rates_are_exact() -> None:
    others = np.arange(1000.0)  # 1 of them may pass at 0.1 %, 10 at 1 %
    members = np.array([998.5, 998.0, 989.5, 989.0, 5.0])
    scores = np.concatenate([others, members])
    found = membership.judge(scores, np.arange(1005) >= 1000)
    assert found.tpr_at_01_percent == 1 / 5  # 998.0 ties with an other who may not pass
    assert found.tpr_at_1_percent == 3 / 5
    assert found.auc == pytest.approx(stats.mannwhitneyu(members, others).statistic / 5000)


@pytest.mark.parametrize(("others", "at_1", "at_01"), [(99, False, False), (100, True, False), (1000, True, True)])
def test_too_few_others_give_nan(others: int, at_1: bool, at_01: bool) -> None:
    found = membership.judge(np.arange(others + 10.0), np.arange(others + 10) >= others)
    assert (found.tpr_at_1_percent == 1.0) == at_1
    assert math.isnan(found.tpr_at_1_percent) != at_1
    assert math.isnan(found.tpr_at_01_percent) != at_01


def test_random_scores_are_chance() -> None:
    rng = np.random.default_rng(0)
    found = membership.judge(rng.normal(size=20_000), rng.random(20_000) < 0.5)
    assert abs(found.auc - 0.5) < 0.015
    assert abs(found.tpr_at_1_percent - 0.01) < 0.005
    assert abs(found.tpr_at_01_percent - 0.001) < 0.002
    with pytest.raises(ValueError, match="members and of others"):
        membership.judge(np.zeros(3), np.ones(3, dtype=bool))
