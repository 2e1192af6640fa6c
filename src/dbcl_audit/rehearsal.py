"""A short run under the settings of a real one, in which the auditor decides what the victim trains on.

Client 0 is the attacker, client 1 the victim, the others are bystanders; or some of them, one in every lane, are
attackers together (`colluders_of`), and client 0 is a bystander. Everybody takes one step of plain SGD a round,
which shows a single batch most clearly, and is the setting of the paper. run_rehearsal.py plays settings as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import seeds
from dbcl.engines import LocalTraining, StackedEngine
from dbcl.optim import fedavg
from dbcl.protocol import Broadcast, UpdateValidator
from dbcl.simulation.build import build_server, calibration
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from dbcl.simulation.training import update_noise
from dbcl.transcripts import Recorder, Seen, Setting, Transcript, Truth

ATTACKER, VICTIM = 0, 1
Script = NDArray[np.int64]
"""Which examples each client takes in each round, (rounds, clients, batch)."""


@dataclass(frozen=True)
class ScriptedTraining(LocalTraining):
    """One step a round, on the examples that a script names.

    >>> training = ScriptedTraining(steps=1, script=np.array([[[4, 2], [7, 7]]]))
    >>> [batch.tolist() for batch in training.batches(10, seed=bytes(32), round=0, client=1)]
    [[7, 7]]
    """

    script: Any = field(default=None, compare=False, repr=False)

    def batches(self, examples: int, *, seed: bytes, round: int, client: int) -> Iterator[NDArray[np.int64]]:
        yield self.script[round, client]


@dataclass(frozen=True)
class Rehearsal:
    """A finished rehearsal: the transcripts of attacker and server, and the truth.

    >>> Rehearsal(Path("somewhere"), np.zeros((3, 2, 1), dtype=np.int64)).truth.folder.name
    'truth'
    """

    folder: Path
    script: Script
    make_model: Callable[[int], nn.Module] | None = None
    """Makes the network, where its name in the transcripts does not say how."""
    colluders: tuple[int, ...] = ()
    """The attacker and those who show it what they saw; empty where client 0 attacks alone."""
    bound: float | None = None
    """The length to which updates are clipped under secure aggregation; None where the server sees each by itself."""

    @property
    def seat(self) -> str:
        """Where the attacker sits, as findings name it."""
        return "colluders" if len(self.colluders) > 1 else "client"

    @property
    def attacker(self) -> Transcript:
        return self._transcript(f"client-{self.colluders[0] if self.colluders else ATTACKER}")

    @property
    def allies(self) -> list[Transcript]:
        """The transcripts of those who share what they saw with the attacker."""
        return [self._transcript(f"client-{number}") for number in self.colluders[1:]]

    @property
    def server(self) -> Transcript:
        return self._transcript("server")

    def server_saw(self, round: int, victim: int = VICTIM) -> "ServerSaw":
        """What the server has of a client's update in a round.

        Under secure aggregation it is the mean over the client's lane, of updates that are clipped and rounded.
        """
        seen = self.server[round]
        plan, together = self.lane_of(round, victim)
        together.sort(key=lambda client: client != victim)
        broadcast = next(each for each in seen.broadcasts if each.plan.digest == plan)
        if str(victim) not in seen.updates:  # the server of a run with secure aggregation
            mean = next(update for update in seen.updates.values() if update.plan == plan)
            return ServerSaw(seen, broadcast, mean.tensors, tuple(together))
        sent = seen.updates[str(victim)]
        if self.bound is None:
            return ServerSaw(seen, broadcast, sent.tensors, (victim,))
        from dbcl.protocol.secagg.quantizer import Quantizer
        from dbcl.protocol.secagg.vectors import shaped, update_vector

        quantizer, rng = Quantizer(self.bound, max(2, len(together))), np.random.default_rng(round)
        each = [update_vector(seen.updates[str(client)], broadcast, self.bound)[0] for client in together]
        mean_values = np.mean([quantizer.values(quantizer.quantized(values, rng)) for values in each], axis=0)
        tensors = {name: tensor.to(sent.tensors[name]) for name, tensor in shaped(broadcast.plan, mean_values).items()}
        return ServerSaw(seen, broadcast, tensors, tuple(together))

    def lane_of(self, round: int, client: int) -> tuple[str, list[int]]:
        """Return the digest of the plan that a client answered in a round, and all clients that answered it.

        The auditor tells it to attackers. The server's transcript has it, but not where it saw sums alone.
        """
        updates = self.server[round].updates
        if str(client) not in updates:
            return self.truth.lane_of(round, client)
        plan = updates[str(client)].plan
        return plan, [int(sender) for sender, update in updates.items() if update.plan == plan]

    def _transcript(self, party: str) -> Transcript:
        template = None if self.make_model is None else partial(self.make_model, 1)
        return Transcript(self.folder / party, template)

    @property
    def truth(self) -> Truth:
        return Truth(self.folder)


class ServerSaw(NamedTuple):
    """The victim's update in a round as the server has it: alone, or as the mean of several clients', it first."""

    seen: Seen
    broadcast: Broadcast
    tensors: Mapping[str, Tensor]
    clients: tuple[int, ...]


def rehearse(
    config: RunConfig,
    task: Task,
    script: Script,
    folder: Path,
    *,
    seed: int = 0,
    weights: dict[str, Tensor] | None = None,
    colluders: tuple[int, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Rehearsal:
    """Play a script under a run's network, cover, ratio, sketch, lanes, veil and wire; record attacker and server.

    `colluders` are the clients that attack together in place of client 0. It starts from `weights`, or from initial
    weights as a run of that configuration has them. All secrets come from `seed`, so that it can be repeated; that is
    safe, since all parties are the auditor's.

    >>> import tempfile
    >>> from dbcl.simulation import task_of
    >>> script = draw_batches(np.arange(100), (3, 2, 1), seed=0)
    >>> config = RunConfig.from_options(model="dlg-lenet", veil=0.0)
    >>> played = rehearse(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> played.attacker.rounds, sorted(played.server[0].updates)
    ([0, 1, 2], ['0', '1'])
    """
    rounds, clients, batch = script.shape
    weight_seed = seed if config.seed is None else config.seed
    model, template = (task.make_model(weight_seed + number) for number in range(2))
    if weights is not None:
        model.load_state_dict(weights)
    # Single examples pull as hard as they like: bounding them would make the attackers' work harder.
    validator = UpdateValidator(max_influence=None, outlier_factor=None)
    server = build_server(
        config,
        model,
        layers=task.layers,
        insecure_seed=seed,
        validator=validator,
        optimizer=fedavg(),
        ema_decay=0.0,
        calibration=calibration(config, task),
    )
    noise = update_noise(config)
    training = LocalTraining(lr=config.lr, batch_size=batch, steps=1)
    shape, outputs = (task.pictures.shape, task.pictures.outputs) if task.pictures else ((), 0)
    known = Setting(
        config.model,
        shape,
        outputs,
        training.settings(),
        clients,
        clients,
        veil=config.sketch.veil,
    )
    engine = StackedEngine(
        server,
        template,
        [task.train] * clients,
        ScriptedTraining(lr=config.lr, batch_size=batch, steps=1, script=script),
        objective=task.objective,
        seed=seeds.derive(bytes(32), "rehearsal", seed),
        noise=None if noise is None else replace(noise, insecure_seed=seed),
    )
    attackers = map(str, colluders or [ATTACKER])
    engine.observer = Recorder(folder, [*attackers, "server"], server, known)
    for number in range(rounds):
        engine.play_round()
        if progress is not None:
            progress(number + 1, rounds)
    bound = config.secagg.clip if config.secure_aggregation else None
    return Rehearsal(folder, script, task.make_model, colluders, bound)


def colluders_of(lanes: int) -> tuple[int, ...]:
    """Clients of a rehearsal with 2 x lanes parties or more that are in all lanes together, the victim not among them.

    The server spreads clients over the lanes in blocks of as many as there are lanes; these are the second block.

    >>> colluders_of(2)
    (2, 3)
    """
    return tuple(range(lanes, 2 * lanes))


def draw_batches(examples: NDArray[np.int64], shape: tuple[int, ...], seed: int) -> Script:
    """Batches of random examples; the last axis is one batch, without repetition where there are enough examples.

    >>> draw_batches(np.arange(100), (3, 2, 8), seed=0).shape
    (3, 2, 8)
    """
    rng = np.random.default_rng(seed)
    batches = [
        rng.choice(examples, size=shape[-1], replace=shape[-1] > len(examples)) for _ in range(int(np.prod(shape[:-1])))
    ]
    return np.stack(batches).reshape(shape).astype(np.int64)
