"""Small simulated runs for the examples in docstrings, cached until the process ends."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dbcl.simulation.presets import preset
from dbcl.simulation.task import task_of
from dbcl_audit.simulated_run import (
    VICTIM,
    ShardRun,
    SimulatedRun,
    draw_batches,
    shards_of,
    simulate_batches,
    simulate_run,
)

_folders: list[tempfile.TemporaryDirectory[str]] = []


@cache
def example_batches(
    name: str = "paper", *, rounds: int = 3, batch: int = 1, fixed: bool = False, **settings: Any
) -> SimulatedRun:
    """Simulate a preset with two clients on batches of the first 100 digits. With `fixed` the
    victim has the same batch in every round.

    >>> example_batches("paper", model="dlg-lenet").attacker.rounds
    [0, 1, 2]
    """
    config = preset(name, **settings)
    script = draw_batches(np.arange(100), (rounds, 2, batch), seed=0)
    if fixed:
        script[:, VICTIM] = script[0, VICTIM]
    return simulate_batches(config, task_of(config), script, _folder())


@cache
def example_run(name: str = "paper", *, rounds: int = 3, **settings: Any) -> ShardRun:
    """Simulate a preset with two clients and fixed shards.

    >>> [len(rows) for rows in example_run("plain").shards.of_clients]
    [40, 40]
    """
    config = preset(name, **settings)
    task = task_of(config)
    return simulate_run(config, task, shards_of(config, task, clients=2), _folder(), rounds=rounds)


def _folder() -> Path:
    _folders.append(tempfile.TemporaryDirectory())
    return Path(_folders[-1].name)
