"""A rehearsal of a run as it is: clients with fixed shards, its own local steps, cohort, participation and server.

Where a client trains on the same examples in every round, each round is another look at them. That is what FedAvg is,
and what the rehearsals of single steps on fresh batches (rehearsal.py) do not have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from dbcl import seeds
from dbcl.data import Examples
from dbcl.data.examples import Rows
from dbcl.errors import DataError
from dbcl.model.tensors import named_tensors
from dbcl.simulation.build import build_engine, build_run_server, divide, public_setting
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task, pooled
from dbcl.transcripts import Recorder
from dbcl_audit.rehearsal import Rehearsal

NO_SCRIPT = np.zeros((0, 0, 0), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Shards:
    """Who has which examples in a rehearsal of a run, as rows of `examples`.

    `own` are what the attacker has besides its shard: examples like everybody's, in which nobody trains. `others` are
    such examples too, which nobody has: non-members.

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
        """The examples of all clients but some."""
        return np.concatenate([rows for client, rows in enumerate(self.of_clients) if client not in without])


def shards_of(
    config: RunConfig, task: Task, *, clients: int | None = None, own: int = 2000, others: int = 1000, seed: int = 0
) -> Shards:
    """The shards that clients of a run have, of so many of them or of all, and examples that none of them has.

    Of what is left, the attacker has half, at most `own`, and at most `others` are non-members.

    >>> from dbcl.simulation import task_of
    >>> len(shards_of(RunConfig(), task_of(RunConfig())).of_clients)
    100
    """
    everything = pooled([task.train, task.held_out])
    rng = np.random.default_rng(seed)
    every = divide(config, task, seed=seeds.derive(bytes(seeds.SEED_BYTES), "shards", seed))
    picked = range(len(every)) if clients is None else rng.permutation(len(every))[:clients].tolist()
    if len(picked) < (clients or 2):
        raise DataError(f"the run has {len(every)} clients, and {clients or 2} are to be rehearsed")
    shards = tuple(np.asarray(every[number]) for number in picked)
    left = rng.permutation(np.setdiff1d(np.arange(len(everything)), np.concatenate(shards)))
    most = min(others, len(left) // 2)
    if most < 10:
        raise DataError(f"only {len(left)} examples are left that no client has: too few to tell members from")
    return Shards(everything, shards, left[most : most + own], left[:most])


@dataclass(frozen=True, eq=False)
class RunRehearsal:
    """A finished rehearsal of a run: what was recorded, who had which examples, and the model that it releases.

    >>> RunRehearsal(RunConfig(), None, Rehearsal(Path("somewhere"), NO_SCRIPT), {}).config.sketch.veil
    0.2
    """

    config: RunConfig
    shards: Shards
    recorded: Rehearsal
    released: Mapping[str, Tensor]

    @property
    def known(self) -> tuple[int, ...]:
        """The attacker, and those who are with it."""
        return self.recorded.colluders


def rehearse_run(
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
) -> RunRehearsal:
    """Play a run's settings with these shards; record the server and the client that takes part most often.

    `cohort` clients take part in a round, all of them where it is not given. With `allies` so many more clients are
    recorded, those that take part most often with it.

    >>> import tempfile
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("blind", model="dlg-lenet")
    >>> made = shards_of(config, task_of(config), clients=2)
    >>> played = rehearse_run(config, task_of(config), made, Path(tempfile.mkdtemp()), rounds=3)
    >>> played.recorded.attacker.rounds, played.recorded.attacker.setting.momentum
    ([0, 1, 2], 0.5)
    """
    count = len(shards.of_clients)
    ends = np.cumsum([len(rows) for rows in shards.of_clients])
    train = shards.examples.subset(np.concatenate(shards.of_clients))
    division = np.split(np.arange(len(train)), ends[:-1])
    task = replace(task, train=train, division=division)
    fraction = (cohort or count) / count
    config = replace(config, clients=count, fraction=fraction, seed=seed, engine="stacked", device="cpu")
    derived = seeds.derive(bytes(seeds.SEED_BYTES), "rehearsal", seed)
    server = build_run_server(config, task, seed=derived)
    engine = build_engine(config, task, server, seed=derived)
    turns = np.zeros(count, dtype=np.int64)
    for number in range(rounds):
        turns[engine.cohort(number)] += 1
    often = np.argsort(-turns, kind="stable")[: 1 + allies].tolist()
    known = public_setting(config, task, server.plan)
    engine.observer = Recorder(folder, [*map(str, often), "server"], server, known)
    for number in range(rounds):
        engine.play_round()
        if progress is not None:
            progress(number + 1, rounds)
    engine.close()
    bound = config.secagg.clip if config.secure_aggregation else None
    recorded = Rehearsal(folder, NO_SCRIPT, task.make_model, tuple(often), bound)
    released = {name: tensor.detach().clone() for name, tensor in named_tensors(server.released).items()}
    return RunRehearsal(config, shards, recorded, released)
