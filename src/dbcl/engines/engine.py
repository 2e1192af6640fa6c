"""What all engines in one process share: who takes part, and how a round is played."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import seeds
from dbcl.engines.training import LocalTraining, evaluate
from dbcl.errors import ConfigError
from dbcl.protocol import Broadcast, RoundReport, Server, Update, decode_update, encoded_size

RoundObserver = Callable[[Broadcast, Sequence[int], Sequence[Update | bytes]], None]
"""Is told of every closed round: what was sent, who took part, what they answered."""


@dataclass(frozen=True)
class UpdateNoise:
    """What a client may do to its update before it sends it: shorten it to `clip`, and add normal noise.

    Each number gets noise of the deviation `multiplier` * `clip`: the Gaussian mechanism of differential privacy.
    Nothing is accounted here, so this states no guarantee; it is there to be measured.

    >>> UpdateNoise(clip=1.0, multiplier=0.01)(Update(0, "ab", {"w": torch.ones(4)}, 1), seed=bytes(32)).tensors["w"]
    tensor([0.4968, 0.5031, 0.4780, 0.5274])
    """

    clip: float
    multiplier: float = 0.0

    def __post_init__(self) -> None:
        if not self.clip > 0 or not self.multiplier >= 0:
            raise ConfigError(f"update_clip must be above 0 and update_noise 0 or more, got {self}")

    def __call__(self, answer: Update | bytes, *, seed: bytes) -> Update:
        update = decode_update(answer) if isinstance(answer, bytes) else answer
        length = float(torch.stack([tensor.double().square().sum() for tensor in update.tensors.values()]).sum().sqrt())
        scale = min(1.0, self.clip / length) if length > 0 else 1.0
        tensors = {}
        for name, tensor in update.tensors.items():
            drawn = torch.from_numpy(seeds.normals(seed, "update-noise-v1", name, n=tensor.numel())).to(tensor)
            tensors[name] = tensor * scale + self.multiplier * self.clip * drawn.reshape(tensor.shape)
        return replace(update, tensors=tensors)


@dataclass(frozen=True)
class RoundResult:
    """A round's report and what it sent, in bytes: to all its clients, and back from them."""

    report: RoundReport
    bytes_down: int
    bytes_up: int


def draw_cohort(clients: int, fraction: float, *, seed: bytes, round: int) -> list[int]:
    """Choose a round's clients, uniformly and without replacement; at least one.

    >>> len(draw_cohort(100, 0.1, seed=bytes(32), round=0))
    10
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"the fraction of clients in a round must be above 0 and at most 1, got {fraction}")
    count = max(1, int(fraction * clients + 0.5))
    return sorted(seeds.permutation(seed, "participants", round, n=clients)[:count].tolist())


class Engine(ABC):
    """Runs rounds for a `Server` with clients that all live here.

    `template` is a client's own copy of the network; its weights are replaced by what the server sends. `shards` says
    which of the examples `x`, `y` each client holds. An engine decides only how the cohort are trained. `observer`
    may be set to something that records the rounds, such as `dbcl.transcripts.Recorder`, and `noise` to what
    clients do to their updates before they send them.
    """

    observer: RoundObserver | None = None
    noise: UpdateNoise | None = None

    def __init__(
        self,
        server: Server,
        template: nn.Module,
        x: Tensor,
        y: Tensor,
        shards: Sequence[NDArray[np.int64]],
        training: LocalTraining,
        *,
        fraction: float = 1.0,
        seed: bytes,
    ) -> None:
        try:
            evaluate(template, x[:1], y[:1])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(f"the network does not take these examples: {error}") from error
        self.server, self.template, self.training = server, template, training
        self.x, self.y = x, y
        self.shards, self.fraction, self.seed = shards, fraction, seed

    def play_round(self) -> RoundResult:
        """Play one round: broadcast, train the cohort, collect, step."""
        broadcast = self.server.open_round()
        cohort = draw_cohort(len(self.shards), self.fraction, seed=self.seed, round=broadcast.round)
        answers: Sequence[Update | bytes] = self.train_cohort(broadcast, cohort)
        if self.noise is not None:
            keys = [seeds.derive(self.seed, "noise", broadcast.round, client) for client in cohort]
            answers = [self.noise(answer, seed=key) for answer, key in zip(answers, keys, strict=True)]
        report = self.server.close_round(answers)
        if self.observer is not None:
            self.observer(broadcast, cohort, answers)
        return RoundResult(report, len(cohort) * encoded_size(broadcast), sum(map(encoded_size, answers)))

    @abstractmethod
    def train_cohort(self, broadcast: Broadcast, cohort: list[int]) -> Sequence[Update | bytes]:
        """Train the cohort and give their answers, in the same order."""

    def close(self) -> None:  # noqa: B027
        """Let go of what the engine has started elsewhere; most start nothing."""
