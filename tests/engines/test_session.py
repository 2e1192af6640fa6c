import pytest
import torch
from torch import nn

import dbcl
from dbcl.engines import ServerSession
from dbcl.errors import ConfigError, ProtocolError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2))


def moved(broadcast: dbcl.Broadcast) -> dbcl.Update:
    local = dbcl.blinded(net(), broadcast)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(1.0)
    return dbcl.update(local, broadcast, examples=1)


def test_a_moving_average_of_the_weights_is_kept_beside_them() -> None:
    def make() -> ServerSession:
        return ServerSession(dbcl.Server(net(), veil=0), ema_decay=0.5)

    session, other = make(), make()
    bias, mean = session.model[3].bias, session.released[3].bias.detach().clone()
    for round in range(1, 4):
        session.close([moved(session.open("a"))])
        keep = min(0.5, round / (round + 10))
        mean = keep * mean + (1 - keep) * bias.detach()
        torch.testing.assert_close(session.released[3].bias.detach(), mean)
    other.load_state(session.state())
    assert torch.equal(other.released[0].weight, session.released[0].weight)
    assert not torch.equal(other.released[0].weight, other.model[0].weight)
    assert torch.equal(session.open("a").tensors["3.bias"], session.model[3].bias)  # clients go on from W itself
    with pytest.raises(ProtocolError, match="only one of the two has an average"):
        ServerSession(dbcl.Server(net(), veil=0)).load_state(session.state())
    with pytest.raises(ConfigError, match="ema_decay must be at least 0 and below 1, got 1"):
        ServerSession(dbcl.Server(net()), ema_decay=1)


def test_without_an_average_the_weights_themselves_are_released() -> None:
    session = ServerSession(dbcl.Server(net()))
    assert session.released is session.model
    assert list(session.state().values) == ["server"]


def test_the_average_of_a_half_precision_model_moves() -> None:
    """A step of 0.001 of a bfloat16 weight is below its resolution; averaged in float32 it counts."""
    model = nn.Linear(6, 2).bfloat16()
    nn.init.ones_(model.weight)
    session = ServerSession(dbcl.Server(model, cover="all", veil=0), ema_decay=0.9)
    for _ in range(40):
        broadcast = session.open("a")
        step = {name: torch.full_like(tensor, 0.001) for name, tensor in broadcast.tensors.items()}
        session.close([dbcl.Update(broadcast.round, broadcast.plan.digest, step, examples=1)])
    master = session.server.weights()["bias"]
    mean = session.released.bias.detach().float()  # type: ignore[union-attr]
    assert (master - mean).abs().max() < 0.02
    other = ServerSession(dbcl.Server(nn.Linear(6, 2).bfloat16(), cover="all", veil=0), ema_decay=0.9)
    other.load_state(session.state())
    assert all(torch.equal(one, other._means[name]) for name, one in session._means.items())
