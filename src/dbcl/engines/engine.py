"""What all engines in one process share: how a round is played."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.data.examples import Examples, examples_of
from dbcl.data.trees import call, tensors
from dbcl.engines.cohort import draw_cohort
from dbcl.engines.session import Session, session_of
from dbcl.engines.training import LocalTraining
from dbcl.errors import ConfigError, DbclError
from dbcl.objective import CLASSIFICATION, Objective
from dbcl.privacy import UpdateNoise
from dbcl.protocol import Broadcast, RoundReport, Server, Update, encoded_size

RoundObserver = Callable[[Broadcast, Sequence[int], Sequence[Update | bytes]], None]
"""Called after every closed round with what was sent, the cohort, and the cohort's updates."""


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

    def play_round(self) -> RoundResult:
        """Play one round: broadcast, train the cohort, collect, step."""
        broadcast = self.session.open()
        cohort = draw_cohort(len(self.clients), self.fraction, seed=self.seed, round=broadcast.round)
        updates = self.train_cohort(broadcast, cohort)
        by_client = {f"client {client}": update for client, update in zip(cohort, updates, strict=True)}
        report = self.session.close(by_client)
        if self.observer is not None:
            self.observer(broadcast, cohort, updates)
        return RoundResult(report, len(cohort) * encoded_size(broadcast), sum(map(encoded_size, updates)))

    @abstractmethod
    def train_cohort(self, broadcast: Broadcast, cohort: list[int]) -> Sequence[Update | bytes]:
        """Train the clients of a cohort and give their updates, in the same order, noised where `noise` is set."""

    def noise_of(self, client: int) -> UpdateNoise | None:
        """The noise of one client: fresh in every round, or its own stream where an experiment fixes it."""
        return None if self.noise is None else replace(self.noise, client=client)

    def close(self) -> None:  # noqa: B027
        """Release what the engine has started elsewhere; most start nothing."""


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
