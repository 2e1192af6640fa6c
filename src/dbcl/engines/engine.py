"""What all engines in one process share: how a round is played."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl.engines.cohort import draw_cohort
from dbcl.engines.session import Session, session_of
from dbcl.engines.training import LocalTraining, evaluate
from dbcl.errors import ConfigError
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

    `template` is a client's own copy of the network; its weights are replaced by what the server sends. `shards` says
    which of the examples `x`, `y` each client holds. An engine decides only how a cohort is trained. `noise` is what
    clients do to their updates before they are encoded. `observer` may be set to something that records the rounds,
    such as `dbcl.transcripts.Recorder`.
    """

    observer: RoundObserver | None = None

    def __init__(
        self,
        holder: Server | Session,
        template: nn.Module,
        x: Tensor,
        y: Tensor,
        shards: Sequence[NDArray[np.int64]],
        training: LocalTraining,
        *,
        fraction: float = 1.0,
        seed: bytes,
        noise: UpdateNoise | None = None,
    ) -> None:
        if y.is_floating_point():
            raise ConfigError(
                f"the targets are {y.dtype}, and the engines train classifiers: give classes as whole numbers, or play "
                "the rounds with a loop and a loss of your own (dbcl.blinded, dbcl.update)"
            )
        try:
            evaluate(template, x[:1], y[:1])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(f"the network does not take these examples: {error}") from error
        self.session, self.template, self.training = session_of(holder), template, training
        self.x, self.y = x, y
        self.shards, self.fraction, self.seed, self.noise = shards, fraction, seed, noise

    def play_round(self) -> RoundResult:
        """Play one round: broadcast, train the cohort, collect, step."""
        broadcast = self.session.open()
        cohort = draw_cohort(len(self.shards), self.fraction, seed=self.seed, round=broadcast.round)
        updates = self.train_cohort(broadcast, cohort)
        report = self.session.close(updates)
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
