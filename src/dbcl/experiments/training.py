"""One training run of an experiment: until an accuracy, or for a number of rounds, with its curves."""

import math
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dbcl.engines import Engine, ServerSession, evaluate
from dbcl.errors import DbclError
from dbcl.experiments.experiment import Context
from dbcl.models import short
from dbcl.protocol import checkpoint
from dbcl.run.assemble import build_engine, build_session, new_seed
from dbcl.run.config import RunConfig
from dbcl.run.task import Task, task_of
from dbcl.state import State, join


@lru_cache(maxsize=4)
def task_on(device: str, data: str, model: str, data_dir: str | None = None) -> Task:
    """A dataset and a network, read and brought to the device once.

    >>> task_on("cpu", "digits", "mnist-mlp") is task_on("cpu", "digits", "mnist-mlp")
    True
    """
    task = task_of(RunConfig(data=data, model=model), data_dir)
    where = torch.device(device)
    return replace(task, train=task.train.to(where), held_out=task.held_out.to(where))


def train(config: RunConfig, context: Context, name: str = "", every: int = 1) -> dict[str, Any]:
    """Play a configuration's rounds until its target and give accuracy and loss after every round, or every few.

    A run that cannot go on, since no client's update is finite, ends there and says why in `error`. One that a time
    limit ends leaves its state in the context's `scratch`, and goes on from there when it is played again.

    >>> from dbcl.run import preset
    >>> run = train(preset("plain", clients=10, rounds=3, seed=0, target=0.3), Context())
    >>> run["reached"], run["rounds"] == len(run["accuracies"]) <= 3
    (True, True)
    """
    config = replace(config, device=context.device)
    task = task_on(context.device, config.data, config.model, context.data_dir)
    seed = new_seed(config)
    session = build_session(config, task, seed=seed)
    engine = build_engine(config, task, session, seed=seed)
    run = _begin(session, context.scratch)
    while run["rounds"] < config.rounds and not run["reached"] and not run["error"]:
        began = time.perf_counter()
        _play_round(run, engine, task, config, every)
        run["training_seconds"] = round(run["training_seconds"] + time.perf_counter() - began, 3)
        score = "" if run["accuracy"] is None else f", {run['accuracy']:.2%}"
        try:
            context.tell(f"{name}: round {run['rounds']}{score}", run["rounds"], config.rounds)
        except BaseException:  # the time is over
            if context.scratch is not None:
                state = join(run=State(run, {}), session=session.state())
                checkpoint.save(context.scratch, run["rounds"], state)
            raise
    return run


def _begin(session: ServerSession, scratch: Path | None) -> dict[str, Any]:
    """What a run has come to: nothing yet, or what was kept when its time was over."""
    if scratch is not None and checkpoint.newest(scratch) is not None:
        kept = checkpoint.load(scratch)
        session.load_state(kept.part("session"))
        return dict(kept.part("run").values)
    counts = {"rounds": 0, "reached": False, "accuracy": None, "bytes": 0, "refused": 0, "error": ""}
    return {**counts, "training_seconds": 0.0, "numbers": [], "accuracies": [], "losses": []}


def _play_round(run: dict[str, Any], engine: Engine, task: Task, config: RunConfig, every: int) -> None:
    """Play one round and write down what came of it."""
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
    measured = evaluate(engine.session.released, task.held_out)
    run["numbers"].append(run["rounds"])
    run["accuracies"].append(round(measured.score, 4))
    run["losses"].append(round(measured.loss, 5) if math.isfinite(measured.loss) else None)
    run["accuracy"] = run["accuracies"][-1]
    run["reached"] = config.target is not None and measured.score >= config.target
