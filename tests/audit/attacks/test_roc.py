"""ROC curves and their areas, against scikit-learn and against known distributions."""

import numpy as np
import pytest
from sklearn.metrics import auc, roc_auc_score

from dbcl_audit.attacks.roc import measure_auc


def test_auc_agrees_with_sklearn_ties_included() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(300) < 0.3
    scores = (rng.normal(size=300) + truth).round(0)
    found = measure_auc(scores, truth, seed=0)
    assert found.auc == pytest.approx(roc_auc_score(truth, scores))
    assert found.auc == pytest.approx(auc(*found.roc))
    assert measure_auc(-scores, truth, seed=0).auc == pytest.approx(1 - found.auc)  # never turned round


def test_the_interval_covers_the_truth_and_comes_from_the_seed() -> None:
    rng = np.random.default_rng(0)
    truth = np.arange(200) % 2 == 0
    drawn = [rng.normal(size=200) + truth for _ in range(40)]
    found = [measure_auc(scores, truth, seed=0) for scores in drawn]
    covered = sum(one.low < 0.7602 < one.high for one in found)  # Phi(1 / sqrt 2)
    assert covered >= 34  # 95 % of 40 is 38; fewer than 34 has probability 0.003
    again = measure_auc(drawn[0], truth, seed=0)
    assert again == found[0]
    assert measure_auc(drawn[0], truth, seed=1) != found[0]


def test_scores_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="both kinds"):
        measure_auc(np.zeros(3), np.zeros(3, dtype=bool), seed=0)
