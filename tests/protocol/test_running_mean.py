"""The running mean of a server's weights, which is evaluated and released."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import dbcl
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import PrivacyPlan
from dbcl.testing.nested import nested


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2))


def moved(broadcast: dbcl.Broadcast) -> dbcl.Update:
    local = dbcl.blinded(net(), broadcast)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(1.0)
    return dbcl.make_update(local, broadcast, examples=1)


INPUTS = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))


def server_of(model: nn.Module | None = None, **settings: Any) -> dbcl.Server:
    return dbcl.Server(model or net(), **nested({"veil": 0, "coverage": "hidden", "calibration": INPUTS, **settings}))


def test_a_moving_average_of_the_weights_is_kept_beside_them() -> None:
    server, other = (server_of(ema_decay=0.5) for _ in range(2))
    assert server.released is server.model  # nobody has trained yet
    bias, mean = server.model[3].bias, torch.zeros(2)
    for round in range(1, 4):
        server.close_round([moved(server.open_round("a"))])
        keep = min(0.5, (round - 1) / (round + 9))  # the initial weights have no part in it
        mean = keep * mean + (1 - keep) * bias.detach()
        torch.testing.assert_close(server.released[3].bias.detach(), mean)
    hidden = server.released[:2](INPUTS).detach()
    torch.testing.assert_close(server.released[2].running_mean, hidden.mean(dim=0))
    other.load_state(server.state())
    assert torch.equal(other.released[0].weight, server.released[0].weight)
    assert not torch.equal(other.released[0].weight, other.model[0].weight)
    assert torch.equal(server.open_round("a").tensors["3.bias"], server.model[3].bias)  # clients go on from W itself
    with pytest.raises(ProtocolError, match="only one of the two has an average"):
        server_of(ema_decay=0.0).load_state(server.state())
    with pytest.raises(ProtocolError, match="only one of the two has an average"):
        server.load_state(server_of(ema_decay=0.0).state())


@pytest.mark.parametrize("decay", [1, -0.1, 1.5, math.nan])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match="ema_decay must be at least 0 and below 1, got"):
        server_of(ema_decay=decay)


def test_without_an_average_the_weights_themselves_are_released() -> None:
    server = server_of(ema_decay=0.0)
    server.close_round([moved(server.open_round("a"))])
    assert server.released is server.model
    assert "mean" not in server.state().values


def test_the_average_of_a_half_precision_model_moves() -> None:
    """A step of 0.001 of a bfloat16 weight is below its resolution; averaged in float32 it counts."""

    def half() -> dbcl.Server:
        return server_of(nn.Linear(6, 2).bfloat16(), coverage="all", ema_decay=0.9, optimizer=dbcl.optim.fedavg())

    server, other = half(), half()
    with torch.no_grad():
        server.model.weight.fill_(1)
    for _ in range(40):
        broadcast = server.open_round("a")
        step = {name: torch.full_like(tensor, 0.001) for name, tensor in broadcast.tensors.items()}
        server.close_round([dbcl.Update(broadcast.round, broadcast.plan.digest, step, examples=1)])
    master = server.weights()["bias"]
    mean = server.released.bias.detach().float()  # type: ignore[union-attr]
    assert 0 < (master - mean).abs().max() < 0.02
    other.load_state(server.state())
    kept = server.state().part("mean").tensors
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    for name, tensor in other.state().part("mean").tensors.items():
        assert torch.equal(tensor, kept[name])


def test_an_average_takes_every_round_in_once() -> None:
    """With a guarantee it takes in what a round shows, however often the round is opened, saved and restored."""
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4)

    def private() -> dbcl.Server:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
        return server_of(model, calibration=None, privacy=plan, insecure_seed=0, ema_decay=0.5)

    def played(*, restored: bool) -> torch.Tensor:
        server = private()
        for clients in ("abcd", "efgh"):
            sent = {client: server.open_round(client) for client in clients}
            still = {client: {n: torch.zeros_like(t) for n, t in each.tensors.items()} for client, each in sent.items()}
            server.close_round({c: dbcl.Update(server.round, sent[c].plan.digest, still[c], 1) for c in clients})
            if restored:
                for _ in range(2):
                    other = private()
                    other.load_state(server.state())
                    server = other
                    assert server.released is server.released
        return server.released[0].weight.detach().clone()

    assert torch.equal(played(restored=True), played(restored=False))


def test_with_a_guarantee_the_weights_of_the_server_are_never_released() -> None:
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4)
    server = server_of(nn.Sequential(nn.Linear(8, 2)), coverage="all", calibration=None, privacy=plan, ema_decay=0.0)
    first, start = server.released, server.model[0].weight.detach().clone()
    assert first is not server.model  # whoever keeps it has no more than the weights that nobody has trained
    sent = {client: server.open_round(client) for client in "abcd"}
    ones = {client: {n: torch.ones_like(t) for n, t in each.tensors.items()} for client, each in sent.items()}
    server.close_round({c: dbcl.Update(server.round, sent[c].plan.digest, ones[c], 1) for c in sent})
    assert torch.equal(first[0].weight, start)
    assert not torch.equal(server.released[0].weight, server.model[0].weight)
    assert torch.equal(server.released[0].weight, server.noisy_weights()["0.weight"])
