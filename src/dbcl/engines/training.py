"""Local training of a client: distributed SGD, FedAvg and FedProx in one training loop."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from dbcl import seeds
from dbcl.data.examples import Batch, Examples, check_finite, examples_of
from dbcl.data.trees import Tree, call, join
from dbcl.errors import ConfigError, DataError
from dbcl.objective import CLASSIFICATION, Loss, Objective, cross_entropy, name_of
from dbcl.privacy import clipped_step, cyclic_batch
from dbcl.protocol import Broadcast, Update, clipped_update
from dbcl.user_code import out_of_memory

OptimizerFactory = Callable[..., Optimizer]
"""Function `(parameters, lr=...)` that makes an optimiser, such as a class of `torch.optim`."""
Schedule = Callable[[int], float]
"""Function of the round, starting at 0, that returns a factor of the learning rate."""


@dataclass(frozen=True)
class LocalTraining:
    """Configuration of a client's local training with SGD or another optimiser.

    Args:
        lr: Learning rate. Round r uses lr * lr_decay^r * schedule(r). An optimiser that normalises
            the gradient, such as Adam, needs sqrt(ratio) times the learning rate of the unsketched
            model.
        lr_decay: Decay factor of the learning rate per round.
        batch_size: Number of examples in a local step.
        epochs: Number of passes over the examples in a round, as in FedAvg.
        steps: Maximum number of local steps; one step gives distributed SGD.
        momentum: Momentum of local SGD.
        proximal: Weight of the proximal term of FedProx, (proximal / 2) |V - V_sent|^2.
        optimizer: Class or function that makes a new optimiser in every round; None selects SGD.
        schedule: Function of the round that returns a further factor of the learning rate.
        example_clip: Clipping norm of per-example gradients; see the attribute.
        separation: Number of rounds between two uses of an example, with `example_clip`.

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
    optimizer: OptimizerFactory = torch.optim.SGD
    schedule: Schedule | None = None
    example_clip: float | None = None
    """Clipping norm of per-example gradients for an example-level guarantee.

    A client then takes one step per round along the *sum* of the clipped gradients, using every
    `separation`-th example in turn. The server divides the sum by the planned number of examples.
    """
    separation: int = 1

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
        if self.example_clip is not None and not (self.example_clip > 0 and self.separation >= 1):
            raise ConfigError(
                f"clip must be above 0 and separation 1 or more, got {self.example_clip}, {self.separation}"
            )
        several = self.steps != 1 or self.momentum or self.proximal or not self.is_sgd
        if self.example_clip is not None and several:
            raise ConfigError(
                "where one example is the unit of a guarantee, clients take one step of plain SGD a round: in a second "
                "one an example would act beyond its own gradient"
            )
        if self.momentum and not self.is_sgd:
            raise ConfigError(f"momentum is that of SGD; set it where {name_of(self.optimizer)} is made")

    @property
    def is_sgd(self) -> bool:
        """Return whether the optimiser is SGD, which engines can run for many clients at once."""
        return self.optimizer is torch.optim.SGD

    def rate(self, round: int) -> float:
        """Return the learning rate of a round."""
        rate = self.lr * self.lr_decay**round * (1.0 if self.schedule is None else self.schedule(round))
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"the schedule gives round {round} the learning rate {rate}")
        return rate

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, with functions represented by their names.

        >>> LocalTraining(optimizer=torch.optim.Adam).settings()["optimizer"]
        'Adam'
        """
        named = {"optimizer": name_of(self.optimizer), "schedule": self.schedule and name_of(self.schedule)}
        return {**asdict(self), **named}

    def batches(self, examples: int, *, seed: bytes, round: int, client: int) -> Iterator[NDArray[np.int64]]:
        """Iterate over the example indices of each local step.

        The result depends only on the seed, the round and the client, and is the same on every
        engine.
        """
        if self.example_clip is not None:
            yield np.asarray(cyclic_batch(round, examples=examples, separation=self.separation), dtype=np.int64)
            return
        left = self.steps
        for epoch in range(self.epochs):
            order = np.argsort(self.keys(examples, seed=seed, round=round, client=client, epoch=epoch), kind="stable")
            for start in range(0, examples, self.batch_size):
                if left == 0:
                    return
                yield order[start : start + self.batch_size]
                left = None if left is None else left - 1

    def keys(self, examples: int, *, seed: bytes, round: int, client: int, epoch: int) -> NDArray[np.uint64]:
        """Return a random word for each example. Sorting by these words gives a client's example
        order.
        """
        return seeds.words(seed, "batches", round, client, epoch, n=examples)

    def counted(self, examples: int) -> int:
        """Return the number of different examples in a client's batches, which is the weight of its
        update.
        """
        if self.example_clip is not None:
            return -(-examples // self.separation)
        return examples if self.steps is None else min(examples, self.steps * self.batch_size)

    def train(
        self, model: nn.Module, examples: Any, *, seed: bytes, round: int, client: int, loss: Loss = cross_entropy
    ) -> dict[str, float]:
        """Train a client's model in place.

        Args:
            model: The client's model.
            examples: The client's examples, in any form that `dbcl.data.examples_of` accepts.
            seed: Seed of the batches.
            round: Number of the round.
            client: Number of the client.
            loss: Training loss.

        Returns:
            Metrics: the mean of the losses before each step.
        """
        examples = examples_of(examples)
        model.train()
        devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
        if self.example_clip is not None:
            batches = self._turn(examples, round)
            if not batches:  # none of a small client's examples has its turn
                return {"loss": 0.0}
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(dropout_seed(seed, round, client))
                mean = clipped_step(model, batches, loss, self.rate(round), self.example_clip)
            return {"loss": mean}
        sent = [parameter.detach().clone() for parameter in model.parameters()] if self.proximal else []
        optimizer = self._make_optimizer(model.parameters(), self.rate(round))
        losses = []
        with torch.random.fork_rng(devices=devices):
            # Dropout and the like follow from the round and the client, so that a resumed run repeats them.
            torch.manual_seed(dropout_seed(seed, round, client))
            for rows in self.batches(len(examples), seed=seed, round=round, client=client):
                batch = examples.take(rows)
                value = loss(call(model, batch.inputs), batch.targets)
                losses.append(value.detach())
                for parameter, start in zip(model.parameters(), sent, strict=False):
                    value = value + self.proximal / 2 * (parameter - start).square().sum()
                optimizer.zero_grad(set_to_none=True)
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {"loss": torch.stack(losses).mean().item()}

    def clipped_update(
        self, model: nn.Module, broadcast: Broadcast, examples: Any, *, seed: bytes, client: int, loss: Loss
    ) -> Update:
        """Return a client's update for per-example clipping: the float64 sum of its clipped
        gradients.

        The sum covers the examples whose turn it is in this round.
        """
        assert self.example_clip is not None
        round = broadcast.round
        batches = self._turn(examples_of(examples), round)
        if not batches:
            zeros = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in broadcast.tensors.items()}
            return Update(round, broadcast.plan.digest, zeros, examples=1)
        model.train()
        devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(dropout_seed(seed, round, client))
            return clipped_update(model, broadcast, batches, loss, clip=self.example_clip, rate=self.rate(round))

    def _turn(self, examples: Examples, round: int) -> list[Batch]:
        """Return the examples whose turn it is, each loaded independently of the others."""
        rows = np.asarray(cyclic_batch(round, examples=len(examples), separation=self.separation), dtype=np.int64)
        return examples.take_alone(rows) if len(rows) else []

    def _make_optimizer(self, parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
        # A layer that does not train is no business of an optimiser, some of which refuse it.
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        more = {"momentum": self.momentum} if self.momentum else {}
        return self.optimizer(trained, lr=rate, **more)


def dropout_seed(seed: bytes, round: int, client: int) -> int:
    """Return the seed of a client's dropout masks in a round, which is the same on every engine.

    >>> dropout_seed(bytes(32), 0, 0) == dropout_seed(bytes(32), 0, 1)
    False
    """
    return int(seeds.words(seed, "torch", round, client, n=1)[0] >> np.uint64(1))


@dataclass(frozen=True)
class Evaluation:
    """Metric and loss of a model on held-out examples."""

    score: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Any, objective: Objective = CLASSIFICATION, *, batch_size: int = 1000
) -> Evaluation:
    """Evaluate a model on examples. The server's model is evaluated without sketch and veil.

    Args:
        model: The model; its training mode is restored.
        examples: Examples in any form that `dbcl.data.examples_of` accepts.
        objective: Loss and metric.
        batch_size: Examples per forward pass.

    >>> evaluate(nn.Flatten(), (torch.eye(3), torch.tensor([0, 1, 1]))).score
    0.6666...
    """
    examples = examples_of(examples)
    training = model.training
    model.eval()
    total, seen, streaming = 0.0, list[Batch](), hasattr(objective.metric, "update")
    metric: Any = objective.metric
    if streaming:
        metric.reset()
    for start in range(0, len(examples), batch_size):
        rows = np.arange(start, min(start + batch_size, len(examples)))
        batch = examples.take(rows)
        outputs = call(model, batch.inputs)
        total += float(objective.loss(outputs, batch.targets)) * len(rows)
        if not math.isfinite(total):  # of a model that diverged, or of examples that no metric is right on
            check_finite("the held-out examples", examples)
        if streaming:
            metric.update(outputs, batch.targets)
        elif metric is not None:
            seen.append(Batch(outputs, batch.targets))
    model.train(training)
    loss = total / len(examples)
    if metric is None:
        return Evaluation(loss, loss)
    value = metric.compute() if streaming else metric(*_joined(seen))
    try:
        return Evaluation(float(value), loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the metric {objective.name} must give one number, got a {type(value).__name__}") from error


def _joined(batches: list[Batch]) -> tuple[Tree, Tree]:
    """Concatenate all outputs and all targets. Metrics such as R2 and AUC are not means over
    batches.
    """
    try:
        return join([batch.inputs for batch in batches]), join([batch.targets for batch in batches])
    except (RuntimeError, ValueError) as error:
        if out_of_memory(error):
            raise
        raise DataError(
            "the outputs or targets of different batches do not fit together, so that a metric of all of them cannot "
            f"be computed; use an object with reset, update and compute, as torchmetrics has ({error})"
        ) from error
