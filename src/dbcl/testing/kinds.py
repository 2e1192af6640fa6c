"""Models of all kinds that an engine must train exactly, and inputs for each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, FEATURES = 3, 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x + torch.relu(self.first(x)))
        return out


class Recurrent(nn.Module):
    """A layer that `torch.func` cannot batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cell(x.reshape(len(x), 3, 2))[0][:, -1])
        return out


class TwoInputs(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2 * FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(torch.cat([left, right], dim=1))))
        return out


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def reused() -> nn.Sequential:
    layer, relu = nn.Linear(FEATURES, FEATURES), nn.ReLU()
    return nn.Sequential(layer, relu, layer, relu, nn.Linear(FEATURES, CLASSES))


def tied() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES))
    made[2].weight = made[0].weight
    return made.append(nn.Linear(FEATURES, CLASSES))


def frozen(*names: str) -> nn.Sequential:
    made = dense()
    for name in names:
        made.get_parameter(name).requires_grad_(False)
    return made


def rows(x: Tensor) -> Tensor:
    return x


def words(x: Tensor) -> Tensor:
    return (x[:, :4] * 10).long() % 7


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any]]] = {
    "dense": (dense, rows),
    "frozen first layer": (lambda: frozen("0.weight", "0.bias"), rows),
    "frozen last bias": (lambda: frozen("4.bias"), rows),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)),
        lambda x: x.view(-1, 1, 2, 3),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, CLASSES)),
        rows,
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, CLASSES)), words),
    "residual": (Residual, rows),
    "recurrent": (Recurrent, rows),
    "reused module": (reused, rows),
    "tied weights": (tied, rows),
    "dictionary": (TwoInputs, lambda x: {"left": x, "right": x.flip(1)}),
}
"""By name: makes a model, and makes its inputs of (examples, FEATURES) values."""


PLAIN = ("embedding", "reused module", "tied weights")
"""Kinds with no hidden layer that can be sketched."""
