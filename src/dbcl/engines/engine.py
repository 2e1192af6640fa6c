"""Base class of the engines, which run rounds with simulated clients in one process."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.blinding import copied
from dbcl.data.examples import Examples, examples_of
from dbcl.data.trees import call, tensors
from dbcl.engines.cohort import cohort_size, draw_cohort, fixed_batch
from dbcl.engines.training import LocalTraining
from dbcl.engines.training_server import TrainingServer
from dbcl.errors import ConfigError, DbclError
from dbcl.objective import CLASSIFICATION, Objective
from dbcl.privacy import PrivacyPlan, UpdateNoise, check_alone, cyclic_cohort
from dbcl.protocol import Broadcast, RoundReport, Update, UpdateStack, encoded_size
from dbcl.user_code import out_of_memory

RoundObserver = Callable[[Mapping[int, Broadcast], Mapping[int, Update | bytes]], None]
"""Callback with the broadcast and the update of each client of the cohort, called after every
closed round.
"""


@dataclass(frozen=True)
class RoundResult:
    """Round report of the server, and the bytes of the round's messages down and up."""

    report: RoundReport
    bytes_down: int
    bytes_up: int


class Engine(ABC):
    """Base class that runs rounds with simulated clients in one process. Subclasses implement
    `train_cohort`.

    Args:
        server: The server, such as `dbcl.Server`.
        template: A client's copy of the network. The broadcast replaces its weights.
        clients: Examples of each client, in any form that `dbcl.data.examples_of` accepts.
        training: Configuration of local training.
        objective: Training loss and metric.
        fraction: Share of the clients in a round.
        seed: Seed of the cohorts and batches.
        noise: Clipping and noise applied by each client to its update.
        in_turns: Select clients in a fixed cyclic order, which a client-level guarantee assumes.
        in_batches: Select clients in fixed groups, which secure aggregation requires.

    Attributes:
        observer: Callback after every round, such as `dbcl.transcripts.Recorder`.
    """

    observer: RoundObserver | None = None

    def __init__(
        self,
        server: TrainingServer,
        template: nn.Module,
        clients: Sequence[Any],
        training: LocalTraining,
        *,
        objective: Objective = CLASSIFICATION,
        fraction: float = 1.0,
        seed: bytes,
        noise: UpdateNoise | None = None,
        in_turns: bool = False,
        in_batches: bool = False,
    ) -> None:
        self.in_turns, self.in_batches = in_turns, in_batches
        self.server, self.template, self.training = server, template, training
        self.clients: list[Examples] = [examples_of(client) for client in clients]
        self.objective, self.fraction, self.seed, self.noise = objective, fraction, seed, noise
        check_fit(template, self.clients[0], objective)
        if self.server.privacy is not None:
            check_training(training, self.server.privacy)
            if self.server.privacy.unit == "example":
                check_alone(template, self.clients[0], objective.loss)

    def play_round(self) -> RoundResult:
        """Run one round: broadcast, train the cohort, collect the updates, and step on them."""
        cohort = self.cohort(self.server.round)
        sent = {client: self.server.open_round(client_name(client)) for client in cohort}
        updates = self.train_cohort(sent)
        report = self.server.close_round(updates)
        if self.observer is not None:
            self.observer(sent, {client: updates[client_name(client)] for client in cohort})
        down = sum(len(clients) * encoded_size(broadcast) for broadcast, clients in by_broadcast(sent))
        up = encoded_size(updates) if isinstance(updates, UpdateStack) else sum(map(encoded_size, updates.values()))
        if self.server.privacy is not None and self.server.privacy.weight_cap:
            up = self._largest_up(sent, int(self.server.privacy.weight_cap))
        if self.server.traffic is not None:
            more, up = self.server.traffic
            down += more
        return RoundResult(report, down, up)

    @staticmethod
    def _largest_up(sent: Mapping[int, Broadcast], most: int) -> int:
        """Return the bytes of a round's updates if each client had `most` examples. True sizes
        would leak example counts.
        """
        size = 0
        for broadcast, clients in by_broadcast(sent):
            largest = Update(broadcast.round, broadcast.plan.digest, broadcast.tensors, most)
            size += len(clients) * encoded_size(largest)
        return size

    def cohort(self, round: int) -> list[int]:
        """Return the clients of a round: drawn at random, or in a fixed order if `in_turns` is set."""
        count = len(self.clients)
        if self.in_turns:
            return sorted(cyclic_cohort(round, clients=count, cohort=cohort_size(count, self.fraction)))
        if self.in_batches:
            return fixed_batch(count, self.fraction, seed=self.seed, round=round)
        return draw_cohort(count, self.fraction, seed=self.seed, round=round)

    @abstractmethod
    def train_cohort(self, sent: Mapping[int, Broadcast]) -> Mapping[str, Update | bytes]:
        """Train the clients of a cohort on their broadcasts; return their updates by `client_name`.

        Clients of one lane receive the same broadcast. Noise is added to the updates if `noise` is
        set.
        """

    def noise_of(self, client: int) -> UpdateNoise | None:
        """Return the update noise of one client. With an insecure seed, each client has a separate
        noise stream.
        """
        return None if self.noise is None else replace(self.noise, client=client)

    def close(self) -> None:  # noqa: B027
        """Release worker processes and memory. Most engines hold none."""


def reported(
    counted: int, metrics: Mapping[str, float], privacy: PrivacyPlan | None
) -> tuple[int, Mapping[str, float]]:
    """Return the number of examples and the metrics that a client reports with its update.

    Under a guarantee, a client must not report any data-dependent value that the guarantee does not
    cover. It therefore reports no metrics and no example count that has no effect, and all messages
    of a round have the same size.

    Args:
        counted: Number of examples that count for the update.
        metrics: Metrics of local training.
        privacy: Plan of the guarantee, or None.

    >>> reported(600, {"loss": 0.3}, None)
    (600, {'loss': 0.3})
    >>> reported(600, {"loss": 0.3}, PrivacyPlan(epsilon=8, delta=1e-5, clip=1, rounds=9, clients=100, cohort=10))
    (1, {})
    """
    if privacy is None:
        return counted, metrics
    return (1 if privacy.unit == "client" and not privacy.weight_cap else counted), {}


def check_training(training: LocalTraining, privacy: PrivacyPlan) -> None:
    """Raise `ConfigError` with all reasons if local training violates the plan of an example-level
    guarantee.

    Args:
        training: Configuration of local training.
        privacy: Plan of the guarantee.

    >>> plan = PrivacyPlan(
    ...     epsilon=8, delta=1e-5, clip=0.1, rounds=4, clients=2, cohort=2, unit="example", examples=50, batch=5,
    ...     separation=10,
    ... )
    >>> check_training(LocalTraining(lr=0.1, steps=1, example_clip=1.0, separation=10), plan)
    >>> check_training(LocalTraining(lr=0.2, steps=1, example_clip=1.0, separation=5), plan)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: these clients would not keep the guarantee for one example:
      - they take an example again after 5 rounds, and it was planned for 10
      - a gradient of norm 1, times the learning rate 0.2, is above the planned clip 0.1
    """
    if privacy.unit != "example":
        return
    problems = []
    if type(training) is not LocalTraining:
        problems.append(f"{type(training).__name__} may train in another way than LocalTraining, which clips")
    if training.example_clip is None:
        problems.append("they clip no gradients: give LocalTraining(example_clip=..., steps=1, separation=...)")
    else:
        if training.separation < privacy.separation:
            problems.append(
                f"they take an example again after {training.separation} rounds, and it was planned for "
                f"{privacy.separation}"
            )
        rate = max(training.rate(round) for round in range(privacy.rounds))
        if training.example_clip * rate > privacy.clip * (1 + 1e-9):
            problems.append(
                f"a gradient of norm {training.example_clip:g}, times the learning rate {rate:g}, is above the planned "
                f"clip {privacy.clip:g}"
            )
    if problems:
        raise ConfigError("\n  - ".join(["these clients would not keep the guarantee for one example:", *problems]))


def client_name(client: int) -> str:
    """Return the server's name for a client.

    >>> client_name(3)
    'client 3'
    """
    return f"client {client}"


def by_broadcast(sent: Mapping[int, Broadcast]) -> list[tuple[Broadcast, list[int]]]:
    """Group clients by their broadcast, one group per lane.

    >>> import dbcl
    >>> server = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all"))
    >>> [clients for _, clients in by_broadcast({client: server.open_round("one") for client in (4, 7)})]
    [[4, 7]]
    """
    lanes: dict[int, tuple[Broadcast, list[int]]] = {}
    for client, broadcast in sent.items():
        lanes.setdefault(id(broadcast), (broadcast, []))[1].append(client)
    return list(lanes.values())


@torch.no_grad()
def check_fit(template: nn.Module, examples: Examples, objective: Objective) -> None:
    """Raise `ConfigError` before the first round if network, examples and loss are incompatible.

    Args:
        template: The network.
        examples: Examples of a client.
        objective: Loss and metric.

    >>> from dbcl.data import examples_of
    >>> check_fit(nn.Linear(3, 1), examples_of((torch.zeros(5, 3), torch.zeros(5, 1))), CLASSIFICATION)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: the targets are torch.float32 and no classes: give the loss that they are for, such as ...
    """
    outputs: Any = None
    try:
        batch = examples.first(2)
        # A copy: what a pass leaves in the template would be in every client's model, without a clip.
        model = copied(template).eval()
        floating = [tensor.dtype for tensor in tensors(batch.targets) if tensor.is_floating_point()]
        if objective.classifies and floating:
            raise ConfigError(
                f"the targets are {floating[0]} and no classes: give the loss that they are for, such as "
                "`loss=torch.nn.functional.mse_loss`"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using a target size")  # refused below
            outputs = call(model, batch.inputs)
            value = objective.loss(outputs, batch.targets)
            _check_broadcasting(objective, outputs, batch.targets, value)
    except DbclError:
        raise
    except Exception as error:  # of the user's model, data and loss
        if out_of_memory(error):
            raise
        remedy = _remedy(template, batch.inputs, outputs)
        raise ConfigError(f"the network, these examples and the loss do not go together: {error}{remedy}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"the loss must give one number for a batch, as a tensor: its mean over the examples; got {got}"
        )


def _check_broadcasting(objective: Objective, outputs: Any, targets: Any, value: Any) -> None:
    """Raise `ConfigError` for outputs (n, 1) and targets (n,), which an elementwise loss would
    broadcast to (n, n).
    """
    if objective.classifies or not all(isinstance(each, Tensor) for each in (outputs, targets, value)):
        return
    if tuple(outputs.shape) == (*targets.shape, 1):
        same = _value_of(objective, outputs.squeeze(-1), targets)
    elif tuple(targets.shape) == (*outputs.shape, 1):
        same = _value_of(objective, outputs, targets.squeeze(-1))
    else:
        return
    if same is not None and not torch.allclose(same, value, rtol=1e-4, atol=1e-8, equal_nan=True):
        raise ConfigError(
            f"the outputs have the shape {tuple(outputs.shape)} and the targets {tuple(targets.shape)}, and the loss "
            "compares each output with every target; give both the same shape: targets[:, None] adds an axis"
        )


def _value_of(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the loss, or None if the loss does not accept these shapes."""
    try:
        return objective.loss(outputs, targets)
    except (RuntimeError, ValueError, IndexError):
        return None


def _remedy(template: nn.Module, inputs: Any, outputs: Any) -> str:
    """Return a hint for the most common reasons why a model, its inputs and a loss are
    incompatible, or an empty string.
    """
    if outputs is not None and isinstance(getattr(outputs, "logits", None), Tensor):
        return (
            f"; the network's output is a {type(outputs).__name__}, so give a loss and a metric that take it, such as "
            "loss=lambda outputs, targets: F.cross_entropy(outputs.logits, targets)"
        )
    weights = {each.dtype for each in template.parameters() if each.is_floating_point()}
    given = {each.dtype for each in tensors(inputs) if each.is_floating_point()}
    if outputs is None and given and weights and not given & weights:
        kind = str(next(iter(weights))).removeprefix("torch.")
        return (
            f"; the inputs are {next(iter(given))} and the weights {next(iter(weights))}: cast the inputs, "
            f"x.to(torch.{kind}) of a tensor and x.astype('{kind}') of an array"
        )
    return ""
