from typing import Any

import pytest
import torch
from torch import nn

from dbcl.engines import LocalEngine, LocalTraining, draw_cohort, evaluate
from dbcl.errors import ConfigError
from dbcl.testing.clipping import SharedNoiseContract
from dbcl.testing.engine import EngineContract


class TestLocalEngine(EngineContract, SharedNoiseContract):
    def engine(self, *arguments: Any, **more: Any) -> LocalEngine:
        return LocalEngine(*arguments, **more)


def test_cohorts_are_uniform_and_change_from_round_to_round() -> None:
    counts = torch.zeros(20)
    for round in range(2000):
        cohort = draw_cohort(20, 0.25, seed=bytes(32), round=round)
        assert len(cohort) == len(set(cohort)) == 5
        counts[cohort] += 1
    # Each is chosen with probability 1/4: 500 times, standard deviation 19.4; the bound is five of them.
    assert (counts - 500).abs().max() < 97
    assert draw_cohort(3, 0.01, seed=bytes(32), round=0) != []
    with pytest.raises(ConfigError, match="above 0 and at most 1, got 0"):
        draw_cohort(3, 0, seed=bytes(32), round=0)


def test_batches_cover_every_example_once_an_epoch() -> None:
    training = LocalTraining(batch_size=7, epochs=3)
    batches = list(training.batches(20, seed=bytes(32), round=4, client=2))
    assert [len(batch) for batch in batches] == [7, 7, 6] * 3
    for epoch in range(3):
        assert sorted(torch.cat([torch.from_numpy(b) for b in batches[3 * epoch : 3 * epoch + 3]]).tolist()) == list(
            range(20)
        )
    other = list(training.batches(20, seed=bytes(32), round=5, client=2))
    assert any((one != two).any() for one, two in zip(batches, other, strict=True))


def test_dropout_follows_from_round_and_client_and_leaves_torchs_generator_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    x, y = torch.randn(10, 4), torch.arange(10) % 2

    def trained(round: int) -> torch.Tensor:
        import copy

        local = copy.deepcopy(model)
        LocalTraining().train(local, (x, y), seed=bytes(32), round=round, client=0)
        return local[0].weight.detach()

    torch.manual_seed(3)
    first = trained(0)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(first, trained(0))
    assert not torch.equal(first, trained(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"epochs": 0}, "epochs must be 1 or more, got 0"),
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"momentum": 1.0}, "momentum must be between 0 and 1, got 1.0"),
        ({"proximal": -1}, "proximal must be 0 or more, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**settings)


def test_evaluation_leaves_the_mode_alone() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Flatten())
    model.train()
    assert evaluate(model, (torch.eye(4), torch.arange(4))).score == 1.0
    assert model.training
