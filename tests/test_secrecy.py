"""No client holds a covered weight or the veil: not in its model, not in a message, not in the bytes it saw."""

import copy

import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl.engines import LocalTraining
from dbcl.model import networks
from dbcl.plan import SketchPlan
from dbcl.testing.secrecy import leaks


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 16, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.squeeze(1))[0][:, -1])


NETS = {
    "mlp": lambda: networks.build("mnist-mlp"),
    "cnn": lambda: networks.build("dlg-lenet"),
    "lstm": Recurrent,
}


def play(server: dbcl.Server, template: nn.Module, rounds: int) -> list[object]:
    """What one client saw and still holds: the bytes it got and sent, the decoded messages, its trained models."""
    kept: list[object] = []
    training = LocalTraining(lr=0.001)
    for _ in range(rounds):
        wire = dbcl.encode(server.open_round())
        broadcast = dbcl.protocol.decode_broadcast(wire)
        local = dbcl.blinded(template, broadcast)
        x, y = torch.randn(20, 1, 28, 28), torch.arange(20) % 10
        training.train(local, (x, y), seed=bytes(32), round=broadcast.round, client=0)
        loss = local(x).sum()  # an open graph with saved tensors, too
        answer = dbcl.encode(dbcl.make_update(local, broadcast, examples=20))
        kept += [wire, broadcast, local, loss, answer]
        server.close_round([answer])
    return kept


def covered(model: nn.Module, plan: SketchPlan) -> dict[str, Tensor]:
    weights = dict(model.named_parameters())
    return {t.name: weights[t.name].detach().clone() for t in plan.tensors if t.sketched}


@pytest.mark.parametrize("veil", [0.0, 0.2])
@pytest.mark.parametrize("net", NETS)
def test_a_client_holds_no_covered_weight_and_no_veil(net: str, veil: float) -> None:
    torch.manual_seed(0)
    model = NETS[net]()
    server = dbcl.Server(
        model, dbcl.SketchConfig(veil=veil, coverage="hidden"), insecure_seed=0
    )  # ten numbers and their veil may be alike by chance
    secrets = {}
    kept = []
    # The template is a copy of the server's own model, the worst case: whatever blinding leaves behind is W.
    for round in range(2):
        before = covered(model, server.plan)
        broadcast = server.open_round()
        everything = {name: tensor.detach() for name, tensor in model.named_parameters()}
        for name, tensor in broadcast.tensors.items():
            W = everything[name].reshape(len(tensor), -1) if name in before else everything[name]
            noise = tensor - (broadcast.sketches()[name].apply(W) if name in before else W)
            if veil and noise.numel() >= 10:
                noise = noise.reshape(1, -1) if noise.ndim == 1 else noise
                secrets |= {f"veil of {name}, {round}": noise, f"unit veil of {name}, {round}": noise / noise.std()}
        secrets |= {f"{name} in round {round}": W for name, W in before.items()}
        kept += play(server, copy.deepcopy(model), rounds=1)
    assert len(secrets) >= 4
    assert leaks(kept, secrets) == []


@pytest.mark.parametrize("hide", ["attribute", "closure", "view", "half", "bytes", "scaled", "parameter"])
def test_the_walk_finds_a_weight_wherever_it_is_put(hide: str) -> None:
    model = networks.build("mnist-mlp")
    server = dbcl.Server(model, dbcl.SketchConfig(coverage="hidden"))
    local = dbcl.blinded(copy.deepcopy(model), server.open_round())
    W = model[1].weight.detach().clone()
    secrets = {"1.weight": W}
    assert leaks(local, secrets) == []
    if hide == "attribute":
        local[1].cache = {"old": [W]}
    elif hide == "closure":
        local[1].register_forward_hook(lambda module, inputs, output: output + 0 * W.sum())
    elif hide == "view":
        local[1].view = torch.cat([torch.zeros(5), W.flatten()])[:3]
    elif hide == "half":
        local[1].half = W.half()
    elif hide == "bytes":
        local[1].raw = b"head" + W.numpy().tobytes()
    elif hide == "scaled":
        local[1].scaled = 3 * W.T.clone().T + 1e-3
    else:
        local[1].register_parameter("again", nn.Parameter(W))
    assert leaks(local, secrets) != []


def test_a_covered_weight_does_not_fit_into_a_broadcast() -> None:
    model = networks.build("mnist-mlp")
    broadcast = dbcl.Server(model, dbcl.SketchConfig(coverage="hidden")).open_round()
    with pytest.raises(dbcl.errors.ProtocolError, match=r"1.weight has shape \(200, 784\) and must have \(200, 392\)"):
        dbcl.Broadcast(broadcast.plan, {**broadcast.tensors, "1.weight": model[1].weight})
