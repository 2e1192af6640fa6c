"""Opacus on a client's model, in all its modes: clipped gradients of single examples against a loop over them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbcl

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
opacus = pytest.importorskip("opacus")

CLIP, EXAMPLES = 0.05, 8


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.norm, self.out = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.norm(self.hidden(self.embed(x).tanh()).tanh()).mean(dim=1))
        return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = opacus.layers.DPLSTM(6, 8, batch_first=True)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.hidden(self.body(x)[0][:, -1]).tanh())
        return made


MODELS = {
    "dense": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), (12,)),
    "sequences": (Sequences, (5, 6)),
    "recurrent": (Recurrent, (5, 6)),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)
        ),
        (1, 8, 8),
    ),
}
REFUSED = {("ew", "convolutional")}


def clipped_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The mean of the clipped gradients of single examples, into `grad`."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for one, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(one[None]), label[None]), parameters)
        length = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad += gradient * min(1.0, CLIP / (length + 1e-6)) / len(x)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("kind", MODELS)
def test_clipped_gradients_are_those_of_a_loop(kind: str, mode: str) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[kind]
    model, x, y = build(), torch.randn(EXAMPLES, *shape), torch.arange(EXAMPLES) % 2
    broadcast = dbcl.Server(model, dbcl.SketchConfig(veil=0)).open_round()
    local, plain = dbcl.blinded(model, broadcast), dbcl.blinded(model, broadcast)
    clipped_by_hand(plain, x, y)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = dbcl.make_update(plain, broadcast, examples=EXAMPLES)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=EXAMPLES)
    private = opacus.PrivacyEngine().make_private(
        module=local,
        optimizer=torch.optim.SGD(local.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    wrapped, optimizer = private[:2]
    criterion = private[2] if mode == "ghost" else nn.CrossEntropyLoss()
    if (mode, kind) in REFUSED:
        with pytest.raises(dbcl.errors.PlanError, match="cannot be sketched; use 'hooks', 'functorch' or 'ghost'"):
            wrapped(x)
        return
    for inputs, labels in private[-1]:
        optimizer.zero_grad()
        criterion(wrapped(inputs), labels).backward()
        optimizer.step()
    found = dbcl.make_update(wrapped, broadcast, examples=EXAMPLES)
    for name, change in expected.tensors.items():
        assert change.abs().max() > 0
        torch.testing.assert_close(found.tensors[name], change, rtol=1e-3, atol=1e-7, msg=name)
