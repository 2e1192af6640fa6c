"""What all engines in one process share: how a round is played."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.data.examples import Examples, examples_of
from dbcl.data.trees import call, tensors
from dbcl.engines.cohort import cohort_size, draw_cohort, fixed_batch
from dbcl.engines.session import Session, session_of
from dbcl.engines.training import LocalTraining
from dbcl.errors import ConfigError, DbclError
from dbcl.objective import CLASSIFICATION, Objective
from dbcl.privacy import PrivacyPlan, UpdateNoise, cyclic_cohort
from dbcl.protocol import Broadcast, RoundReport, Server, Update, UpdateStack, encoded_size

RoundObserver = Callable[[Mapping[int, Broadcast], Mapping[int, Update | bytes]], None]
"""Called after every closed round with what each client of the cohort was sent, and what it answered."""


@dataclass(frozen=True)
class RoundResult:
    """A round's report and what it sent, in bytes: to all its clients, and back from them."""

    report: RoundReport
    bytes_down: int
    bytes_up: int


class Engine(ABC):
    """Plays rounds with clients that all live here, for a `Server` or another `Session`.

    `template` is a client's own copy of the network; its weights are replaced by what the server sends. `clients` are
    the examples of each client, as `dbcl.data.examples_of` takes them, and `objective` what they learn. An engine
    decides only how a cohort is trained. `noise` is what clients do to their updates before they are encoded.
    `observer` may be set to something that records the rounds, such as `dbcl.transcripts.Recorder`.
    """

    observer: RoundObserver | None = None
    in_turns: bool = False
    """Whether all clients take turns, as a guarantee needs it."""
    in_batches: bool = False
    """Whether clients take part in fixed batches, as secure aggregation needs it."""

    def __init__(
        self,
        holder: Server | Session,
        template: nn.Module,
        clients: Sequence[Any],
        training: LocalTraining,
        *,
        objective: Objective = CLASSIFICATION,
        fraction: float = 1.0,
        seed: bytes,
        noise: UpdateNoise | None = None,
    ) -> None:
        self.session, self.template, self.training = session_of(holder), template, training
        self.clients: list[Examples] = [examples_of(client) for client in clients]
        self.objective, self.fraction, self.seed, self.noise = objective, fraction, seed, noise
        check_fit(template, self.clients[0], objective)
        if self.session.privacy is not None:
            check_training(training, self.session.privacy)

    def play_round(self) -> RoundResult:
        """Play one round: broadcast, train the cohort, collect, step."""
        cohort = self.cohort(self.session.round)
        sent = {client: self.session.open(client_name(client)) for client in cohort}
        updates = self.train_cohort(sent)
        report = self.session.close(updates)
        if self.observer is not None:
            self.observer(sent, {client: updates[client_name(client)] for client in cohort})
        down = sum(len(clients) * encoded_size(broadcast) for broadcast, clients in by_broadcast(sent))
        up = encoded_size(updates) if isinstance(updates, UpdateStack) else sum(map(encoded_size, updates.values()))
        if self.session.privacy is not None and self.session.privacy.most:
            up = self._largest_up(sent, int(self.session.privacy.most))
        if self.session.traffic is not None:
            more, up = self.session.traffic
            down += more
        return RoundResult(report, down, up)

    @staticmethod
    def _largest_up(sent: Mapping[int, Broadcast], most: int) -> int:
        """Return the size of a round's updates if all counted for `most` examples: true sizes tell of true numbers."""
        size = 0
        for broadcast, clients in by_broadcast(sent):
            largest = Update(broadcast.round, broadcast.plan.digest, broadcast.tensors, most)
            size += len(clients) * encoded_size(largest)
        return size

    def cohort(self, round: int) -> list[int]:
        """Who takes part in a round: drawn anew, or where `in_turns` is set, the next ones in a fixed order."""
        count = len(self.clients)
        if self.in_turns:
            return sorted(cyclic_cohort(round, clients=count, cohort=cohort_size(count, self.fraction)))
        if self.in_batches:
            return fixed_batch(count, self.fraction, seed=self.seed, round=round)
        return draw_cohort(count, self.fraction, seed=self.seed, round=round)

    @abstractmethod
    def train_cohort(self, sent: Mapping[int, Broadcast]) -> Mapping[str, Update | bytes]:
        """Train the clients of a cohort, each with what it was sent, and give their updates by `client_name`.

        Clients of one lane were sent one and the same broadcast. Updates are noised where `noise` is set.
        """

    def noise_of(self, client: int) -> UpdateNoise | None:
        """The noise of one client: fresh in every round, or its own stream where an experiment fixes it."""
        return None if self.noise is None else replace(self.noise, client=client)

    def close(self) -> None:  # noqa: B027
        """Release what the engine has started elsewhere; most start nothing."""


def reported(
    counted: int, metrics: Mapping[str, float], privacy: PrivacyPlan | None
) -> tuple[int, Mapping[str, float]]:
    """Return the number of examples and the metrics that a client sends with its update.

    Under a guarantee nothing leaves a client that follows from its data and is not covered: no metrics, and no number
    of examples that does not count. So all messages of a round have the same size.

    >>> reported(600, {"loss": 0.3}, None)
    (600, {'loss': 0.3})
    >>> reported(600, {"loss": 0.3}, PrivacyPlan(epsilon=8, delta=1e-5, clip=1, rounds=9, clients=100, cohort=10))
    (1, {})
    """
    if privacy is None:
        return counted, metrics
    return (1 if privacy.unit == "client" and not privacy.most else counted), {}


def check_training(training: LocalTraining, privacy: PrivacyPlan) -> None:
    """Refuse clients that would not keep their part of a guarantee for one example, with all that is wrong.

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
    """What a client is called towards the server.

    >>> client_name(3)
    'client 3'
    """
    return f"client {client}"


def by_broadcast(sent: Mapping[int, Broadcast]) -> list[tuple[Broadcast, list[int]]]:
    """The clients of each lane, with what they were sent.

    >>> import dbcl
    >>> server = dbcl.Server(nn.Linear(6, 2), cover="all")
    >>> [clients for _, clients in by_broadcast({client: server.open_round("one") for client in (4, 7)})]
    [[4, 7]]
    """
    lanes: dict[int, tuple[Broadcast, list[int]]] = {}
    for client, broadcast in sent.items():
        lanes.setdefault(id(broadcast), (broadcast, []))[1].append(client)
    return list(lanes.values())


@torch.no_grad()
def check_fit(template: nn.Module, examples: Examples, objective: Objective) -> None:
    """Refuse a network, examples and a loss that do not go together, before any round is played.

    >>> from dbcl.data import examples_of
    >>> check_fit(nn.Linear(3, 1), examples_of((torch.zeros(5, 3), torch.zeros(5, 1))), CLASSIFICATION)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: the targets are torch.float32 and no classes: give the loss that they are for, such as ...
    """
    mode = template.training
    template.eval()
    try:
        batch = examples.first(2)
        floating = [tensor.dtype for tensor in tensors(batch.targets) if tensor.is_floating_point()]
        if objective.classifies and floating:
            raise ConfigError(
                f"the targets are {floating[0]} and no classes: give the loss that they are for, such as "
                "torch.nn.functional.mse_loss (--loss torch.nn.functional:mse_loss)"
            )
        value = objective.loss(call(template, batch.inputs), batch.targets)
    except DbclError:
        raise
    except Exception as error:  # of the user's model, data and loss
        raise ConfigError(f"the network, these examples and the loss do not go together: {error}") from error
    finally:
        template.train(mode)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"the loss must give one number for a batch, as a tensor: its mean over the examples; got {got}"
        )
