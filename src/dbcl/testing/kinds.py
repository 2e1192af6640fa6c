"""Types of models that an engine must train exactly, and inputs for each."""

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
    """Model with a recurrent layer, which `torch.func` cannot vectorise."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cell(x.reshape(len(x), 3, 2))[0][:, -1])
        return out


class TwoInputs(nn.Module):
    """Model that takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2 * FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(torch.cat([left, right], dim=1))))
        return out


class Listed(nn.Module):
    """Model with an unused layer and a call order that differs from the definition order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, CLASSES), *(nn.Linear(FEATURES, FEATURES) for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        last, _, second, first = self.layers
        out: Tensor = last(torch.relu(second(torch.relu(first(x)))))
        return out


class Centred(nn.Module):
    """Model with a layer that mixes the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(torch.relu(hidden - hidden.mean(dim=0)) / len(x))
        return out


class Averaging(nn.Module):
    """Model with a running mean in a buffer, replaced in every forward pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(dim=0)
        out: Tensor = self.last(torch.relu(hidden - self.mean))
        return out


class Counting(Averaging):
    """Model that counts its forward passes in training mode, in an attribute."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + self.training
        out: Tensor = self.last(torch.relu(self.first(x)) / max(self.passes, 1))
        return out


class Remembering(Averaging):
    """Model that stores a value of its last inputs in an attribute."""

    level = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level = 0.5 * self.level + float(x.mean())
        out: Tensor = self.last(torch.relu(self.first(x) - self.level))
        return out


class KeptInList(Averaging):
    """Model that reads a weight from a Python list, which `torch.func` cannot replace."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(x @ self.weights[0].t()))
        return out


def normalised() -> nn.Sequential:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5)), nn.ReLU(), nn.Linear(5, CLASSES)
    )


class Scaled(nn.Module):
    """Model with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.scale * torch.relu(self.first(x)))
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
    "list out of order": (Listed, rows),
    "weight norm": (normalised, rows),
    "single number": (Scaled, rows),
    "dictionary": (TwoInputs, lambda x: {"left": x, "right": x.flip(1)}),
}
"""Model factories by name, each with a function that builds the model's inputs.

The function takes a tensor of shape (examples, FEATURES).
"""


MIXING: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any]]] = {
    "centred batch": (Centred, rows),
    "batch norm without statistics": (
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, CLASSES)
        ),
        rows,
    ),
    "frequent words": (
        lambda: nn.Sequential(nn.Embedding(7, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, CLASSES)),
        words,
    ),
    "running mean": (Averaging, rows),
    "counter": (Counting, rows),
    "memory": (Remembering, rows),
    "weight in a list": (KeptInList, rows),
    "renormalised embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 3, max_norm=1.0), nn.Flatten(), nn.Linear(12, CLASSES)),
        words,
    ),
}
"""Further models in the same format. They mix the examples of a batch or change when called."""

PLAIN = ("embedding", "reused module", "tied weights", "weight norm")
"""Model types without a hidden layer that can be sketched."""
