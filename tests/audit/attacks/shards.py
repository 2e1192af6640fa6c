"""Rehearsals with fixed shards, and what an attacker makes of them."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dbcl.simulation import preset, task_of
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.simulated_run import ShardRun, shards_of, simulate_run


@cache
def played(
    name: str = "blind",
    *,
    clients: int = 2,
    rounds: int = 5,
    allies: int = 0,
    others: int = 300,
    division: int = 0,
    **settings: Any,
) -> ShardRun:
    """Simulate parties with fixed shards of 40 digits, all in every round; `division` seeds who has which."""
    config = preset(name, **{"model": "audit.networks:twelve", **settings})
    task = task_of(config)
    shards = shards_of(config, task, clients=clients, others=others, seed=division)
    return simulate_run(config, task, shards, Path(tempfile.mkdtemp()), rounds=rounds, allies=allies)


def trajectory_of(found: ShardRun, **knowledge: Any) -> Trajectory:
    """What client 0 and its allies know, with the examples that the attacker has beside its shard."""
    own = Knowledge(found.shards.examples.subset(found.shards.own), examples=200)
    return Trajectory(found.recorded.attacker, replace(own, **knowledge), allies=found.recorded.allies)
