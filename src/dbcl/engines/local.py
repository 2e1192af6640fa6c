"""The reference engine: one client after another, in one process, over real bytes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import seeds
from dbcl.engines.training import LocalTraining
from dbcl.errors import ConfigError
from dbcl.protocol import RoundReport, Server, blinded, decode_broadcast, encode, update


@dataclass(frozen=True)
class RoundResult:
    """A round's report and what it sent, in bytes: to all its clients, and back from them."""

    report: RoundReport
    bytes_down: int
    bytes_up: int


def participants(clients: int, fraction: float, *, seed: bytes, round: int) -> list[int]:
    """Choose a round's clients, uniformly and without replacement; at least one.

    >>> len(participants(100, 0.1, seed=bytes(32), round=0))
    10
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"the fraction of clients in a round must be above 0 and at most 1, got {fraction}")
    count = max(1, round_half_up(fraction * clients))
    return sorted(seeds.permutation(seed, "participants", round, n=clients)[:count].tolist())


def round_half_up(value: float) -> int:
    return int(value + 0.5)


class LocalEngine:
    """Runs rounds for a `Server` with clients that all live here.

    `template` is a client's own copy of the network; its weights are replaced by what the server sends. `shards` says
    which of the examples `x`, `y` each client holds.

    >>> import dbcl
    >>> x, y = torch.randn(40, 8), torch.arange(40) % 2
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> shards = np.array_split(np.arange(40), 4)
    >>> engine = LocalEngine(dbcl.Server(net), copy.deepcopy(net), x, y, shards, LocalTraining(), seed=bytes(32))
    >>> engine.play_round().report.accepted
    4
    """

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
        self.server, self.template, self.training = server, template, training
        self.x, self.y = x, y
        self.shards, self.fraction, self.seed = shards, fraction, seed

    def play_round(self) -> RoundResult:
        """Play one round: broadcast, train the chosen clients, collect, step."""
        chosen = participants(len(self.shards), self.fraction, seed=self.seed, round=self.server.round)
        wire = encode(self.server.open_round())
        answers = self._answers(wire, chosen)
        report = self.server.close_round(answers)
        return RoundResult(report, len(wire) * len(chosen), sum(map(len, answers)))

    def _answers(self, wire: bytes, chosen: list[int]) -> list[bytes]:
        # Every client receives the same bytes, so they are read once and each client trains a copy of what they make.
        broadcast = decode_broadcast(wire)
        received = blinded(self.template, broadcast)
        answers = []
        for client in chosen:
            local = copy.deepcopy(received)
            index = torch.from_numpy(self.shards[client]).to(self.x.device)
            metrics = self.training.train(
                local, self.x[index], self.y[index], seed=self.seed, round=broadcast.round, client=client
            )
            counted = self.training.counted(len(index))
            answers.append(encode(update(local, broadcast, examples=counted, metrics=metrics)))
        return answers
