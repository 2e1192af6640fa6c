"""What a client does between a broadcast and its update: distributed SGD, FedAvg and FedProx are one loop."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import models, seeds
from dbcl.errors import ConfigError


@dataclass(frozen=True)
class LocalTraining:
    """SGD on a client's own examples.

    The learning rate of round r is lr * lr_decay^r. `epochs` passes over the examples make it FedAvg; `proximal` above
    0 adds (proximal / 2) |V - V_sent|^2 to the loss, which makes it FedProx; `steps=1` takes a single batch, whose
    change is the learning rate times the plain gradient, which makes it distributed SGD.

    >>> fedavg, fedprox = LocalTraining(lr=0.05, epochs=5), LocalTraining(lr=0.05, proximal=0.1)
    >>> sgd = LocalTraining(lr=0.01, batch_size=32, steps=1)
    >>> [len(batch) for batch in fedavg.batches(25, seed=bytes(32), round=0, client=0)][:3]
    [10, 10, 5]
    """

    lr: float = 0.05
    lr_decay: float = 1.0
    batch_size: int = 10
    epochs: int = 1
    steps: int | None = None
    momentum: float = 0.0
    proximal: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr must be above 0, got {self.lr}")
        if not 0 < self.lr_decay <= 1:
            raise ConfigError(f"lr_decay must be above 0 and at most 1, got {self.lr_decay}")
        for name in ("batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be 1 or more, got {self.steps}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be between 0 and 1, got {self.momentum}")
        if self.proximal < 0:
            raise ConfigError(f"proximal must be 0 or more, got {self.proximal}")

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return self.lr * self.lr_decay**round

    def batches(self, examples: int, *, seed: bytes, round: int, client: int) -> Iterator[NDArray[np.int64]]:
        """The examples of each local step: a function of the seed, the round and the client, on every engine."""
        left = self.steps
        for epoch in range(self.epochs):
            order = seeds.permutation(seed, "batches", round, client, epoch, n=examples)
            for start in range(0, examples, self.batch_size):
                if left == 0:
                    return
                yield order[start : start + self.batch_size]
                left = None if left is None else left - 1

    def counted(self, examples: int) -> int:
        """How many examples an update counts for: those of its batches, each once."""
        return examples if self.steps is None else min(examples, self.steps * self.batch_size)

    def train(
        self, model: nn.Module, x: Tensor, y: Tensor, *, seed: bytes, round: int, client: int
    ) -> dict[str, float]:
        """Train a client's model in place and give its metrics: the mean loss over the steps, before each of them."""
        model.train()
        sent = [parameter.detach().clone() for parameter in model.parameters()] if self.proximal else []
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate(round), momentum=self.momentum)
        losses = []
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            # Dropout and the like follow from the round and the client, so that a resumed run repeats them.
            torch.manual_seed(dropout_seed(seed, round, client))
            for batch in self.batches(len(x), seed=seed, round=round, client=client):
                index = torch.from_numpy(batch).to(x.device)
                loss = models.loss(model(x[index]), y[index])
                losses.append(loss.detach())
                for parameter, start in zip(model.parameters(), sent, strict=False):
                    loss = loss + self.proximal / 2 * (parameter - start).square().sum()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {"loss": torch.stack(losses).mean().item()}


def dropout_seed(seed: bytes, round: int, client: int) -> int:
    """What a client's dropout masks of a round are drawn from, on every engine.

    >>> dropout_seed(bytes(32), 0, 0) == dropout_seed(bytes(32), 0, 1)
    False
    """
    return int(seeds.words(seed, "torch", round, client, n=1)[0] >> np.uint64(1))


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on held-out examples."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = 1000) -> Evaluation:
    """Evaluate a model as it is; called with the server's model this is W itself, without sketch or veil.

    >>> evaluate(nn.Flatten(), torch.eye(3), torch.tensor([0, 1, 1])).accuracy
    0.6666...
    """
    training = model.training
    model.eval()
    correct, total = 0, 0.0
    for start in range(0, len(y), batch_size):
        inputs, labels = x[start : start + batch_size], y[start : start + batch_size]
        logits = model(inputs)
        correct += int((models.predict(logits) == labels).sum())
        total += float(models.loss(logits, labels)) * len(labels)
    model.train(training)
    return Evaluation(correct / len(y), total / len(y))
