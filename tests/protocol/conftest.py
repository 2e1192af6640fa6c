import pytest
import torch
from torch import nn

import dbcl


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.fixture
def server() -> dbcl.Server:
    torch.manual_seed(0)
    return dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)


def answer(broadcast: dbcl.Broadcast, scale: float = 1.0, examples: int = 10) -> dbcl.Update:
    """An honest update: every number moved by `scale`."""
    local = dbcl.blinded(net(), broadcast)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(scale)
    return dbcl.make_update(local, broadcast, examples=examples, metrics={"loss": scale})


def weights(server: dbcl.Server) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in server.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
