"""A short run under the settings of a real one, in which the auditor decides what the victim trains on.

Client 0 is the attacker, client 1 the victim, the others are bystanders. Everybody takes one step of plain SGD a round,
which is what shows a single batch most clearly: the worst case for the victim, and the setting of the paper.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import models, seeds
from dbcl.data import Dataset
from dbcl.engines import LocalTraining, StackedEngine
from dbcl.protocol import Server
from dbcl.run.config import RunConfig
from dbcl.transcripts import Recorder, Setting, Transcript, Truth

ATTACKER, VICTIM = 0, 1
Script = NDArray[np.int64]
"""Which examples each client takes in each round, (rounds, clients, batch)."""


@dataclass(frozen=True)
class Scripted(LocalTraining):
    """One step a round, on the examples that a script names."""

    script: Any = field(default=None, compare=False, repr=False)

    def batches(self, examples: int, *, seed: bytes, round: int, client: int) -> Iterator[NDArray[np.int64]]:
        yield self.script[round, client]


@dataclass(frozen=True)
class Rehearsal:
    """A finished rehearsal: what each party saw, and what really happened."""

    folder: Path
    script: Script

    @property
    def attacker(self) -> Transcript:
        return Transcript(self.folder / f"client-{ATTACKER}")

    @property
    def server(self) -> Transcript:
        return Transcript(self.folder / "server")

    @property
    def truth(self) -> Truth:
        return Truth(self.folder)


def rehearse(
    config: RunConfig,
    dataset: Dataset,
    script: Script,
    folder: Path,
    *,
    seed: int = 0,
    weights: dict[str, Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rehearsal:
    """Play a script under a run's network, cover, ratio, sketch, veil and wire, and record attacker and server.

    It starts from the run's initial weights, or from `weights`. All its secrets come from `seed`, so that it can be
    repeated: nobody but the auditor takes part.
    """
    rounds, clients, batch = script.shape
    model = models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=config.seed)
    if weights is not None:
        model.load_state_dict(weights)
    template = models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=config.seed + 1)
    server = Server(
        model,
        ratio=config.ratio,
        cover=config.cover,
        veil=config.veil,
        sketch=config.sketch,
        wire=config.wire,
        insecure_seed=seed,
    )
    training = LocalTraining(lr=config.lr, batch_size=batch, steps=1)
    known = Setting(config.model, dataset.shape, dataset.outputs, asdict(training), clients, clients, veil=config.veil)
    everything = np.arange(len(dataset.y_train))
    engine = StackedEngine(
        server,
        template,
        dataset.x_train,
        dataset.y_train,
        [everything] * clients,
        Scripted(lr=config.lr, batch_size=batch, steps=1, script=script),
        seed=seeds.derive(bytes(32), "rehearsal", seed),
    )
    engine.noise = config.noise()
    engine.observer = Recorder(folder, [str(ATTACKER), "server"], server, known)
    for number in range(rounds):
        engine.play_round()
        if progress is not None:
            progress(number + 1, rounds)
    return Rehearsal(folder, script)


def drawn(examples: NDArray[np.int64], shape: tuple[int, ...], seed: int) -> Script:
    """Examples drawn at random, one batch without repetition where there are enough.

    >>> drawn(np.arange(100), (3, 2, 8), seed=0).shape
    (3, 2, 8)
    """
    rng = np.random.default_rng(seed)
    batches = [
        rng.choice(examples, size=shape[-1], replace=shape[-1] > len(examples)) for _ in range(int(np.prod(shape[:-1])))
    ]
    return np.stack(batches).reshape(shape).astype(np.int64)


def guess(template: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A plain model that holds these weights, in double precision."""
    model = copy.deepcopy(template).double()
    with torch.no_grad():
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in weights.items():
            own[name].copy_(tensor.reshape(own[name].shape))
    return model
