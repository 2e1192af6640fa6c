"""The preset `plain` is federated averaging, computed a second time by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbcl
from dbcl.protocol import UpdateValidator

SIZES = (20, 40, 80, 160)
"""Examples of each client; the last has far more than 1.5 times the median of 60."""
ROUNDS, EPOCHS, LR = 3, 2, 0.3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def clients() -> list[tuple[Tensor, Tensor]]:
    """Clients of different sizes whose examples differ, so that it matters how they are weighted."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(size, 4, generator=generator) + number for number, size in enumerate(SIZES)]
    return [(x, (x[:, 0] > number).long()) for number, x in enumerate(made)]


def train(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """Train a copy of a model on all examples at once, so that their order does not matter."""
    local = copy.deepcopy(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        F.cross_entropy(local(x), y).backward()
        optimizer.step()
    return local


def federated_average(rounds: int) -> dict[str, Tensor]:
    """Weights after some rounds of FedAvg, each the mean of the clients' weights by their examples."""
    model = net()
    for _ in range(rounds):
        trained = [train(model, x, y).state_dict() for x, y in clients()]
        mean = {
            name: sum(size * own[name].double() for size, own in zip(SIZES, trained, strict=True)) / sum(SIZES)
            for name in model.state_dict()
        }
        model.load_state_dict(mean)
    return model.state_dict()


def simulated(**more: Any) -> dict[str, Tensor]:
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "epochs": EPOCHS,
        "batch_size": max(SIZES),
        "lr": LR,
        "seed": 0,
        **more,
    }
    return dbcl.simulate(net(), clients(), clients()[0], **settings).model.state_dict()


@pytest.mark.parametrize("engine", ["stacked", "local"])
def test_the_preset_plain_is_federated_averaging(engine: str) -> None:
    torch.testing.assert_close(simulated(settings="plain", engine=engine), federated_average(ROUNDS))


def test_with_a_bound_on_influence_it_is_not() -> None:
    """The comparison above can fail: with the default bound of 1.5 the largest client counts for less."""
    bounded = simulated(settings="plain", max_influence=1.5)
    expected = federated_average(ROUNDS)
    assert max(float((bounded[name] - W).abs().max()) for name, W in expected.items()) > 0.005


def test_a_server_without_limits_averages_by_examples() -> None:
    """The remedy that the documentation names, for the five verbs."""
    server = dbcl.Server(
        net(),
        dbcl.SketchConfig(veil=0, sketch="identity-v1"),
        validator=UpdateValidator(max_influence=None, outlier_factor=None),
        optimizer=dbcl.optim.fedavg(),
        ema_decay=0.0,
    )
    for _ in range(ROUNDS):
        updates = {}
        for number, (x, y) in enumerate(clients()):
            broadcast = server.open_round(f"client {number}")
            local = train(dbcl.blinded(net(), broadcast), x, y)
            updates[f"client {number}"] = dbcl.make_update(local, broadcast, examples=len(x))
        server.close_round(updates)
    torch.testing.assert_close(server.released.state_dict(), federated_average(ROUNDS))
