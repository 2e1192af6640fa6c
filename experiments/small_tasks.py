"""Ten small tasks on which ordinary networks are trained: their data, their models and their settings."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbcl.data import load

Example = tuple[Any, Any]


@dataclass(frozen=True)
class OrdinaryTask:
    """A model, data and the way federated averaging trains it; `metric` takes outputs and targets, larger is better."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Example, Example]]
    loss: Callable[[Any, Any], Tensor]
    metric: Callable[[Any, Any], float]
    measure: str = "accuracy"
    rounds: int = 60
    lr: float = 0.1
    batch_size: int = 20
    epochs: int = 1
    optimizer: Any = torch.optim.SGD


def accuracy(outputs: Any, targets: Tensor) -> float:
    """Share of the outputs whose largest value is at the target."""
    return float((outputs.argmax(1) == targets).double().mean())


def r2(outputs: Tensor, targets: Tensor) -> float:
    """Coefficient of determination."""
    return float(1 - (outputs - targets).square().sum() / (targets - targets.mean(0)).square().sum())


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of classes, as a function that dbcl does not know."""
    return F.cross_entropy(outputs, targets)


def split(inputs: Any, targets: Tensor, held_out: int) -> tuple[Example, Example]:
    """Divide examples into training and held-out ones."""

    def part(rows: slice) -> Example:
        own = {name: each[rows] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
        return own, targets[rows]

    return part(slice(0, -held_out)), part(slice(-held_out, None))


@cache
def friedman() -> tuple[Example, Example]:
    """Friedman's regression problem, standardised."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4000, 10, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + torch.randn(4000, generator=generator)
    return split(x, ((y - y.mean()) / y.std())[:, None], 1000)


@cache
def tabular_classes() -> tuple[Example, Example]:
    """Classes that a random network assigns to normal inputs."""
    generator = torch.Generator().manual_seed(0)
    teacher = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(5000, 20, generator=generator)
        return split(x, teacher(x).argmax(1), 1000)


@cache
def digits() -> tuple[Example, Example]:
    """The embedded digits."""
    data = load("digits")
    return (data.x_train, data.y_train), (data.x_test, data.y_test)


@cache
def sequences() -> tuple[Example, Example]:
    """Token sequences whose class is the token that follows the marker 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(5, 20, (5000, 12), generator=generator)
    y, place = torch.randint(0, 4, (5000,), generator=generator), torch.randint(0, 11, (5000,), generator=generator)
    rows = torch.arange(5000)
    x[rows, place], x[rows, place + 1] = 0, y + 1
    return split(x, y, 1000)


@cache
def other_sequences() -> tuple[Example, Example]:
    """The same with other classes: which pair of tokens follows, for fine-tuning."""
    (x, y), (x_test, y_test) = sequences()
    order = torch.tensor([2, 3, 0, 1])
    return (x, order[y]), (x_test, order[y_test])


@cache
def signals() -> tuple[Example, Example]:
    """Noisy sines of three frequencies."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (4000,), generator=generator)
    phase = torch.rand(4000, 1, generator=generator) * 6.28
    t = torch.linspace(0, 6.28, 24)[None]
    x = torch.sin((1 + y[:, None]) * t + phase) + 0.3 * torch.randn(4000, 24, generator=generator)
    return split(x[..., None], y, 1000)


@cache
def discs() -> tuple[Example, Example]:
    """Images with a disc, and which pixels belong to it."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.rand(1500, 2, generator=generator) * 12 + 2
    radius = torch.rand(1500, generator=generator) * 3 + 2
    axis = torch.arange(16).float()
    distance = ((axis[None, :, None] - centre[:, :1, None]) ** 2 + (axis[None, None] - centre[:, 1:, None]) ** 2).sqrt()
    mask = (distance < radius[:, None, None]).long()
    x = mask[:, None].float() + 0.7 * torch.randn(1500, 1, 16, 16, generator=generator)
    return split({"image": x}, mask, 300)


@cache
def bags() -> tuple[Example, Example]:
    """Bags of words, each class with words of its own among common ones."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (5000,), generator=generator)
    own = 50 * y[:, None] + torch.randint(0, 50, (5000, 20), generator=generator)
    common = torch.randint(200, 400, (5000, 20), generator=generator)
    return split(torch.where(torch.rand(5000, 20, generator=generator) < 0.3, own, common), y, 1000)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(hidden)))


def resnet() -> nn.Module:
    """Two residual blocks with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16),
        nn.MaxPool2d(2),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Attention(nn.Module):
    """A transformer's block, normalised before each part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide: nn.Module = nn.Linear(width, 2 * width)
        self.narrow: nn.Module = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        own = self.norms[0](x)
        x = x + self.attend(own, own, own, need_weights=False)[0]
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return out


class TinyTransformer(nn.Module):
    """Two transformer blocks over token embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 32), nn.Parameter(torch.randn(12, 32) * 0.02)
        self.blocks = nn.Sequential(Attention(32), Attention(32))
        self.head: nn.Module = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embed(x) + self.place).mean(1))
        return out


class LoRA(nn.Module):
    """A frozen dense layer with a trained low-rank change."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def fine_tuned() -> nn.Module:
    """A transformer that was trained on the first task, frozen, with adapters for the second one."""
    torch.manual_seed(0)
    model = TinyTransformer()
    (x, y), _ = sequences()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(300):
        rows = torch.arange(50) + 50 * step % 4000
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.requires_grad_(False)
    for part in (*model.blocks, model):
        for name, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(part, name, LoRA(layer))
    return model


class Recurrent(nn.Module):
    """An LSTM over a series."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 48, batch_first=True), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0][:, -1])
        return out


class UNet(nn.Module):
    """Takes and gives dictionaries, as segmentation libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        wide = F.relu(self.down(image))
        deep = F.relu(self.middle(F.max_pool2d(wide, 2)))
        return {"logits": self.head(torch.cat([wide, F.relu(self.up(deep))], 1))}


def segmentation_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Cross entropy of every pixel."""
    return F.cross_entropy(outputs["logits"], targets)


def overlap(outputs: dict[str, Tensor], targets: Tensor) -> float:
    """Intersection over union of the disc."""
    found, there = outputs["logits"].argmax(1) == 1, targets == 1
    return float((found & there).sum() / (found | there).sum().clamp(min=1))


class Bag(nn.Module):
    """The mean of word embeddings and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(400, 32, mode="mean"), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(x))
        return out


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    """A network of three dense layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def cnn() -> nn.Module:
    """Two convolutions and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


TASKS = (
    OrdinaryTask("tabular regression", lambda: mlp(10, 1), friedman, F.mse_loss, r2, "R2", lr=0.1, rounds=100),
    OrdinaryTask(
        "tabular classification", lambda: mlp(20, 4), tabular_classes, cross_entropy, accuracy, lr=0.2, rounds=100
    ),
    OrdinaryTask("small CNN", cnn, digits, cross_entropy, accuracy, rounds=30, lr=0.1),
    OrdinaryTask("ResNet with BatchNorm", resnet, digits, cross_entropy, accuracy, rounds=20, lr=0.1),
    OrdinaryTask("tiny transformer", TinyTransformer, sequences, cross_entropy, accuracy, lr=0.1),
    OrdinaryTask("LoRA on it", fine_tuned, other_sequences, cross_entropy, accuracy, lr=0.1, rounds=30),
    OrdinaryTask("LSTM", Recurrent, signals, cross_entropy, accuracy, lr=0.2, rounds=80),
    OrdinaryTask("U-Net with dictionaries", UNet, discs, segmentation_loss, overlap, "IoU", rounds=30),
    OrdinaryTask("embedding bag", Bag, bags, cross_entropy, accuracy, lr=3.0),
    OrdinaryTask("linear model", lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), digits, cross_entropy,
                 accuracy, lr=0.05, rounds=30),
)  # fmt: skip
