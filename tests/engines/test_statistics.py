"""Normalisation statistics under a veil, in every engine: trained with noise, the network must still be itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dbcl
from dbcl import data
from dbcl.engines import LocalEngine, LocalTraining, StackedEngine, evaluate
from dbcl.errors import PlanError
from dbcl.model.norm_stats import calibrate
from dbcl.testing.nested import nested


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 40, bias=False), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10))


def accuracy(kind: type, rounds: int = 15, calibrated: bool = True, **settings: Any) -> float:
    digits = data.load("digits")
    clients = data.examples_of((digits.x_train, digits.y_train)).divide(data.iid(np.zeros(4000), 10, seed=bytes(32)))
    inputs = digits.x_test[:500] if calibrated else None
    server = dbcl.Server(net(), insecure_seed=0, calibration=inputs, **nested(settings))
    training = LocalTraining(lr=0.1, batch_size=20)
    engine = kind(server, net(), clients, training, fraction=0.5, seed=bytes(32))
    for _ in range(rounds):
        engine.play_round()
    return evaluate(server.model, (digits.x_test, digits.y_test)).score


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
def test_a_veil_does_not_ruin_batch_norm(kind: type) -> None:
    """In 0.1 the server added the veil's noise to its statistics, round after round."""
    plain = accuracy(kind, sketch="identity-v1", veil=0.0)
    veiled = accuracy(kind, sketch="identity-v1", veil=0.2)
    assert plain > 0.9
    assert veiled > plain - 0.02


def test_without_inputs_of_its_own_the_server_has_the_clients_values() -> None:
    assert accuracy(StackedEngine, calibrated=False, sketch="identity-v1", veil=0.0) > 0.9
    with pytest.raises(PlanError, match=r"running statistic.*calibration=inputs"):
        accuracy(StackedEngine, calibrated=False, sketch="identity-v1", veil=0.2)
    with pytest.raises(PlanError, match=r"running statistic.*calibration=inputs"):
        accuracy(StackedEngine, calibrated=False, coverage="hidden", veil=0.0)


def test_calibration_changes_nothing_but_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5)).train()
    x = torch.randn(50, 4)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    calibrate(model, x)
    z = model[0](x)
    torch.testing.assert_close(model[1].running_mean, z.mean(dim=0).detach())
    torch.testing.assert_close(model[1].running_var, z.var(dim=0).detach())
    assert model.training
    assert model[1].training
    assert model[1].momentum == 0.3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
