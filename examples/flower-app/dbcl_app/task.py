"""The network, the data and the loop: ordinary PyTorch that knows nothing of sketches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbcl import data
from dbcl.model import networks

SPLIT = bytes(32)
"""The seed by which all nodes agree on who holds which examples; where each node has its own data there is none."""


def net() -> nn.Module:
    """Make the network. The server and every client make one; only its shape has to agree.

    Its weights come from PyTorch's generator. Only the server's matter, and it makes them in `secret_weights`: not with
    `networks.build`, whose weights follow from a seed that everybody knows.
    """
    return networks.mnist_mlp((1, 28, 28), 10)


def load_part(name: str, number: int, parts: int) -> tuple[Tensor, Tensor]:
    """Load the examples of one node."""
    dataset = data.load(name)
    part = torch.from_numpy(data.iid(dataset.y_train.numpy(), parts, seed=SPLIT)[number])
    return dataset.x_train[part], dataset.y_train[part]


def load_test(name: str) -> tuple[Tensor, Tensor]:
    """Load the examples that the server keeps to measure with."""
    dataset = data.load(name)
    return dataset.x_test, dataset.y_test


def train(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, batch_size: int, lr: float) -> float:
    """Train a model in place and give the mean loss."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(batch_size):
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def measure(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Give a model's loss and accuracy."""
    model.eval()
    outputs = model(x)
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(dim=1) == y).double().mean().item()
