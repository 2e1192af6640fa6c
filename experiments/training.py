"""Training run of an experiment: until an accuracy, or for a number of rounds, with its curves."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dbcl.engines import Engine, evaluate
from dbcl.errors import DbclError
from dbcl.protocol import Server, checkpoint
from dbcl.simulation.build import build_engine, build_run_server, new_seed
from dbcl.simulation.config import RunConfig
from dbcl.simulation.planning import planned_for
from dbcl.simulation.task import Task, task_of
from dbcl.state import State, join
from dbcl.user_code import short
from experiments.experiment import Context

Final = Callable[[nn.Module, Task], dict[str, Any]]


@lru_cache(maxsize=2)
def task_on(device: str, data: str, model: str, data_dir: str | None = None) -> Task:
    """Return a dataset and a network, read and brought to the device once.

    >>> task_on("cpu", "digits", "mnist-mlp") is task_on("cpu", "digits", "mnist-mlp")
    True
    """
    task = task_of(RunConfig(data=data, model=model), data_dir)
    where = torch.device(device)
    return replace(task, train=task.train.to(where), held_out=task.held_out.to(where))


def train(
    config: RunConfig,
    context: Context,
    name: str = "",
    every: int = 1,
    final: Final = lambda model, task: {},
    task: Task | None = None,
) -> dict[str, Any]:
    """Play a configuration's rounds until its target; return accuracy and loss after every round, or every few.

    A run that cannot go on, since no client's update is finite, ends there and says why in `error`. One that a time
    limit ends leaves its state in the context's `scratch`, and goes on from there when it is played again. What `final`
    returns of the released model is added.

    >>> from dbcl.simulation import preset
    >>> run = train(preset("plain", clients=10, rounds=3, seed=0, target=0.3), Context())
    >>> run["reached"], run["rounds"] == len(run["accuracies"]) <= 3
    (True, True)
    """
    config = replace(config, device=context.device)
    task = task or task_on(context.device, config.data, config.model, context.data_dir)
    config = planned_for(config, task)
    seed = new_seed(config)
    server = build_run_server(config, task, seed=seed)
    engine = build_engine(config, task, server, seed=seed)
    run = _begin(server, context.scratch)
    while run["rounds"] < config.rounds and not run["reached"] and not run["error"]:
        began = time.perf_counter()
        _play_round(run, engine, server, task, config, every)
        run["training_seconds"] = round(run["training_seconds"] + time.perf_counter() - began, 3)
        score = "" if run["accuracy"] is None else f", {run['accuracy']:.2%}"
        try:
            context.tell(f"{name}: round {run['rounds']}{score}", run["rounds"], config.rounds)
        except BaseException:  # the time is over
            if context.scratch is not None:
                state = join(run=State(run, {}), server=server.state())
                checkpoint.save(context.scratch, run["rounds"], state)
            raise
    return {**run, **final(server.released, task)}


def _begin(server: Server, scratch: Path | None) -> dict[str, Any]:
    """Return the record of a run: an empty one, or the one that was kept when its time was over."""
    if scratch is not None and checkpoint.newest(scratch) is not None:
        kept = checkpoint.load(scratch)
        server.load_state(kept.part("server"))
        return dict(kept.part("run").values)
    counts = {"rounds": 0, "reached": False, "accuracy": None, "bytes": 0, "refused": 0, "error": ""}
    return {**counts, "training_seconds": 0.0, "numbers": [], "accuracies": [], "losses": []}


def _play_round(run: dict[str, Any], engine: Engine, server: Server, task: Task, config: RunConfig, every: int) -> None:
    """Play one round and add its results to the record."""
    try:
        result = engine.play_round()
    except DbclError as problem:  # no update is left, or too few: every client has diverged
        run["error"] = short(problem)
        return
    run["rounds"] += 1
    run["bytes"] += result.bytes_down + result.bytes_up
    run["refused"] += len(result.report.refused)
    if run["rounds"] % every and run["rounds"] < config.rounds:
        return
    measured = evaluate(server.released, task.held_out)
    run["numbers"].append(run["rounds"])
    run["accuracies"].append(round(measured.score, 4))
    run["losses"].append(round(measured.loss, 5) if math.isfinite(measured.loss) else None)
    run["accuracy"] = run["accuracies"][-1]
    run["reached"] = config.target is not None and measured.score >= config.target
