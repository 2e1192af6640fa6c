"""Short runs simulated by the auditor, with known training examples of every client.

`simulate_batches` simulates single steps of plain SGD on scripted batches. This is the setting of
the paper, and reveals a single batch most clearly. Client 0 is the attacker, client 1 the victim,
and the other clients are bystanders. Alternatively, one client of every lane attacks
(`colluders_of`) and client 0 is a bystander. `simulate_run` simulates the settings of the audited
run: fixed shards, local steps, momentum, cohort, participation and server. Each client then trains
on the same examples in every round.

Longer than 350 lines, because both kinds of runs share recorded transcripts and their types.
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
from dbcl.data import Examples
from dbcl.data.examples import Rows
from dbcl.engines import Engine, LocalTraining, StackedEngine
from dbcl.errors import DataError
from dbcl.model.tensors import named_tensors
from dbcl.optim import fedavg
from dbcl.protocol import Broadcast, UpdateValidator
from dbcl.simulation.build import build_engine, build_run_server, build_server, calibration, divide, public_setting
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task, pooled
from dbcl.simulation.training import update_noise
from dbcl.transcripts import Recorder, RoundRecord, Setting, Transcript, Truth

ATTACKER, VICTIM = 0, 1
MIN_NON_MEMBERS = 10
"""Minimum number of examples that no client has, needed as non-members."""
SEED_LABEL = "rehearsal"  # the label of versions up to 0.2, so that recorded figures can be repeated
Script = NDArray[np.int64]
"""Example indices of each batch, shape (rounds, clients, batch)."""
NO_SCRIPT = np.zeros((0, 0, 0), dtype=np.int64)


@dataclass(frozen=True)
class ScriptedTraining(LocalTraining):
    """Local training with one step per round, on the batch given by `script`.

    >>> training = ScriptedTraining(steps=1, script=np.array([[[4, 2], [7, 7]]]))
    >>> [batch.tolist() for batch in training.batches(10, seed=bytes(32), round=0, client=1)]
    [[7, 7]]
    """

    script: Any = field(default=None, compare=False, repr=False)

    def batches(self, examples: int, *, seed: bytes, round: int, client: int) -> Iterator[NDArray[np.int64]]:
        yield self.script[round, client]


class ServerObservation(NamedTuple):
    """The server's observation of the victim's update: the update itself, or the mean of several
    clients' updates.

    Attributes:
        seen: record of the round.
        broadcast: broadcast of the victim's lane.
        tensors: the update, or the mean of the updates.
        clients: clients whose updates are included, the victim first.
    """

    seen: RoundRecord
    broadcast: Broadcast
    tensors: Mapping[str, Tensor]
    clients: tuple[int, ...]


@dataclass(frozen=True)
class SimulatedRun:
    """A completed simulated run: the transcripts of the attacker and the server, and the ground
    truth.

    >>> SimulatedRun(Path("somewhere"), np.zeros((3, 2, 1), dtype=np.int64)).truth.folder.name
    'truth'
    """

    folder: Path
    script: Script
    make_model: Callable[[int], nn.Module] | None = None
    """Builds the network, if the network's name in the transcripts is not sufficient."""
    colluders: tuple[int, ...] = ()
    """The attacker and its allies; empty if client 0 attacks alone."""
    bound: float | None = None
    """Norm to which updates are clipped under secure aggregation; None without secure
    aggregation.
    """

    @property
    def adversary(self) -> str:
        """Name of the adversary in findings."""
        return "colluders" if len(self.colluders) > 1 else "client"

    @property
    def attacker(self) -> Transcript:
        return self._transcript(f"client-{self.colluders[0] if self.colluders else ATTACKER}")

    @property
    def allies(self) -> list[Transcript]:
        """Transcripts of the other colluders."""
        return [self._transcript(f"client-{number}") for number in self.colluders[1:]]

    @property
    def server(self) -> Transcript:
        return self._transcript("server")

    @property
    def truth(self) -> Truth:
        return Truth(self.folder)

    def server_observation(self, round: int, victim: int = VICTIM) -> ServerObservation:
        """Return the server's observation of a client's update in a round.

        Under secure aggregation, the observation is the mean of the clipped and quantized updates
        of the client's lane.
        """
        seen = self.server[round]
        plan, together = self.lane_of(round, victim)
        together.sort(key=lambda client: client != victim)
        broadcast = next(each for each in seen.broadcasts if each.plan.digest == plan)
        if str(victim) not in seen.updates:  # the server of a run with secure aggregation
            mean = next(update for update in seen.updates.values() if update.plan == plan)
            return ServerObservation(seen, broadcast, mean.tensors, tuple(together))
        sent = seen.updates[str(victim)]
        if self.bound is None:
            return ServerObservation(seen, broadcast, sent.tensors, (victim,))
        from dbcl.protocol.secagg.quantizer import Quantizer
        from dbcl.protocol.secagg.vectors import shaped, update_vector

        quantizer, rng = Quantizer(self.bound, max(2, len(together))), np.random.default_rng(round)
        each = [update_vector(seen.updates[str(client)], broadcast, self.bound)[0] for client in together]
        mean_values = np.mean([quantizer.values(quantizer.quantized(values, rng)) for values in each], axis=0)
        tensors = {name: tensor.to(sent.tensors[name]) for name, tensor in shaped(broadcast.plan, mean_values).items()}
        return ServerObservation(seen, broadcast, tensors, tuple(together))

    def lane_of(self, round: int, client: int) -> tuple[str, list[int]]:
        """Return the digest of the plan that a client answered in a round, and all clients that
        answered the same plan.

        The auditor gives both to attackers. If the server's transcript contains only sums, both
        come from the ground truth.
        """
        updates = self.server[round].updates
        if str(client) not in updates:
            return self.truth.lane_of(round, client)
        plan = updates[str(client)].plan
        return plan, [int(sender) for sender, update in updates.items() if update.plan == plan]

    def _transcript(self, party: str) -> Transcript:
        template = None if self.make_model is None else partial(self.make_model, 1)
        return Transcript(self.folder / party, template)


def simulate_batches(
    config: RunConfig,
    task: Task,
    script: Script,
    folder: Path,
    *,
    seed: int = 0,
    weights: dict[str, Tensor] | None = None,
    colluders: tuple[int, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> SimulatedRun:
    """Simulate single steps on scripted batches with a run's plan, veil and wire format, and record
    the attacker and the server.

    All secrets are derived from `seed` to make the run reproducible. This is safe because the
    auditor controls every party.

    Args:
        config: Settings of the run. Only the network, sketch, veil, lanes and learning rate are
            used.
        task: Data and network.
        script: Example indices of each batch.
        folder: Destination of the transcripts.
        seed: Seed of all random draws.
        weights: Initial weights. Default: the initial weights of a run with these settings.
        colluders: Clients that attack together instead of client 0.
        progress: Called after each round with the number of completed rounds and the total number.

    Returns:
        The completed run.

    >>> import tempfile
    >>> from dbcl.simulation import task_of
    >>> script = draw_batches(np.arange(100), (3, 2, 1), seed=0)
    >>> config = RunConfig.from_options(model="dlg-lenet", veil=0.0)
    >>> played = simulate_batches(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> played.attacker.rounds, sorted(played.server[0].updates)
    ([0, 1, 2], ['0', '1'])
    """
    rounds, clients, batch = script.shape
    weight_seed = seed if config.seed is None else config.seed
    model, template = (task.make_model(weight_seed + number) for number in range(2))
    if weights is not None:
        model.load_state_dict(weights)
    # Unbounded influence is the worst case: bounding single examples would make attacks harder.
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
    known = Setting(config.model, shape, outputs, training.settings(), clients, clients, veil=config.sketch.veil)
    engine = StackedEngine(
        server,
        template,
        [task.train] * clients,
        ScriptedTraining(lr=config.lr, batch_size=batch, steps=1, script=script),
        objective=task.objective,
        seed=seeds.derive(bytes(32), SEED_LABEL, seed),
        noise=None if noise is None else replace(noise, insecure_seed=seed),
    )
    attackers = map(str, colluders or [ATTACKER])
    engine.observer = Recorder(folder, [*attackers, "server"], server, known)
    _play(engine, rounds, progress)
    bound = config.secagg.clip if config.secure_aggregation else None
    return SimulatedRun(folder, script, task.make_model, colluders, bound)


def colluders_of(lanes: int) -> tuple[int, ...]:
    """Return clients that cover all lanes and exclude the victim, for runs with at least 2 x lanes
    parties.

    The server assigns clients to lanes in blocks whose size is the number of lanes. The colluders
    are the second block.

    >>> colluders_of(2)
    (2, 3)
    """
    return tuple(range(lanes, 2 * lanes))


def draw_batches(examples: NDArray[np.int64], shape: tuple[int, ...], seed: int) -> Script:
    """Draw batches of random examples, without replacement within a batch if there are enough
    examples. The last axis is one batch.

    >>> draw_batches(np.arange(100), (3, 2, 8), seed=0).shape
    (3, 2, 8)
    """
    rng = np.random.default_rng(seed)
    batches = [
        rng.choice(examples, size=shape[-1], replace=shape[-1] > len(examples)) for _ in range(int(np.prod(shape[:-1])))
    ]
    return np.stack(batches).reshape(shape).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Shards:
    """Fixed shards of a simulated run, as indices of `examples`.

    Args:
        examples: all examples of the simulated run.
        of_clients: shard of each client.
        own: the attacker's examples outside its shard, on which no client trains.
        others: non-members, examples that no client has.

    >>> from dbcl.simulation import task_of
    >>> made = shards_of(RunConfig(), task_of(RunConfig()), clients=2)
    >>> [len(rows) for rows in made.of_clients], len(made.own), len(made.others)
    ([40, 40], 2000, 1000)
    """

    examples: Examples
    of_clients: tuple[Rows, ...]
    own: Rows
    others: Rows

    def members(self, without: tuple[int, ...] = (0,)) -> Rows:
        """Return the indices of all clients' examples, except for the clients in `without`."""
        return np.concatenate([rows for client, rows in enumerate(self.of_clients) if client not in without])


def shards_of(
    config: RunConfig, task: Task, *, clients: int | None = None, own: int = 2000, others: int = 1000, seed: int = 0
) -> Shards:
    """Return the shards of `clients` clients of a run (default: all), and examples that no client
    has.

    Among the remaining examples, up to `others`, but at most half, are non-members, and up to `own`
    belong to the attacker.

    >>> from dbcl.simulation import task_of
    >>> len(shards_of(RunConfig(), task_of(RunConfig())).of_clients)
    100
    """
    everything = pooled([task.train, task.held_out])
    rng = np.random.default_rng(seed)
    every = divide(config, task, seed=seeds.derive(bytes(seeds.SEED_BYTES), "shards", seed))
    picked = range(len(every)) if clients is None else rng.permutation(len(every))[:clients].tolist()
    if len(picked) < (clients or 2):
        raise DataError(f"the run has {len(every)} clients, and {clients or 2} are to be simulated")
    shards = tuple(np.asarray(every[number]) for number in picked)
    left = rng.permutation(np.setdiff1d(np.arange(len(everything)), np.concatenate(shards)))
    count = min(others, len(left) // 2)
    if count < MIN_NON_MEMBERS:
        raise DataError(f"only {len(left)} examples are left that no client has: too few to tell members from")
    return Shards(everything, shards, left[count : count + own], left[:count])


@dataclass(frozen=True, eq=False)
class ShardRun:
    """A completed run with fixed shards: its records, its shards, and the released model.

    >>> ShardRun(RunConfig(), None, SimulatedRun(Path("somewhere"), NO_SCRIPT), {}).config.sketch.veil
    0.2
    """

    config: RunConfig
    shards: Shards
    recorded: SimulatedRun
    released: Mapping[str, Tensor]

    @property
    def known(self) -> tuple[int, ...]:
        """The attacker and its allies, by client number."""
        return self.recorded.colluders


def simulate_run(
    config: RunConfig,
    task: Task,
    shards: Shards,
    folder: Path,
    *,
    rounds: int,
    cohort: int | None = None,
    allies: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ShardRun:
    """Simulate a run's settings with fixed shards, and record the server and the client that takes
    part most often.

    Args:
        config: Settings of the run.
        task: Data and network.
        shards: Examples of each client.
        folder: Destination of the transcripts.
        rounds: Number of rounds.
        cohort: Number of clients in a round. Default: all.
        allies: Number of additional recorded clients, chosen by how often they take part.
        seed: Seed of all random draws.
        progress: Called after each round with the number of completed rounds and the total number.

    Returns:
        The completed run.

    >>> import tempfile
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("blind", model="dlg-lenet")
    >>> made = shards_of(config, task_of(config), clients=2)
    >>> played = simulate_run(config, task_of(config), made, Path(tempfile.mkdtemp()), rounds=3)
    >>> played.recorded.attacker.rounds, played.recorded.attacker.setting.momentum
    ([0, 1, 2], 0.5)
    """
    count = len(shards.of_clients)
    ends = np.cumsum([len(rows) for rows in shards.of_clients])
    train = shards.examples.subset(np.concatenate(shards.of_clients))
    task = replace(task, train=train, division=np.split(np.arange(len(train)), ends[:-1]))
    fraction = (cohort or count) / count
    config = replace(config, clients=count, fraction=fraction, seed=seed, engine="stacked", device="cpu")
    derived = seeds.derive(bytes(seeds.SEED_BYTES), SEED_LABEL, seed)
    server = build_run_server(config, task, seed=derived)
    engine = build_engine(config, task, server, seed=derived)
    turns = np.zeros(count, dtype=np.int64)
    for number in range(rounds):
        turns[engine.cohort(number)] += 1
    often = np.argsort(-turns, kind="stable")[: 1 + allies].tolist()
    engine.observer = Recorder(folder, [*map(str, often), "server"], server, public_setting(config, task, server.plan))
    _play(engine, rounds, progress)
    engine.close()
    bound = config.secagg.clip if config.secure_aggregation else None
    recorded = SimulatedRun(folder, NO_SCRIPT, task.make_model, tuple(often), bound)
    released = {name: tensor.detach().clone() for name, tensor in named_tensors(server.released).items()}
    return ShardRun(config, shards, recorded, released)


def _play(engine: Engine, rounds: int, progress: Callable[[int, int], None] | None) -> None:
    for number in range(rounds):
        engine.play_round()
        if progress is not None:
            progress(number + 1, rounds)
