"""One training run of an experiment: until an accuracy, or for a number of rounds, with its curves."""

import math
import time
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from dbcl.engines import evaluate
from dbcl.errors import DbclError
from dbcl.experiments.experiment import Context
from dbcl.models import short
from dbcl.run.assemble import build_engine, build_session, new_seed
from dbcl.run.config import RunConfig
from dbcl.run.task import Task, task_of


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

    A run that cannot go on, since no client's update is finite, ends there and says why in `error`.

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
    sent, refused, error, number = 0, 0, "", 0
    numbers, accuracies, losses, reached = list[int](), list[float](), list[float | None](), False
    began = time.perf_counter()
    for number in range(1, config.rounds + 1):
        try:
            result = engine.play_round()
        except DbclError as problem:  # no update is left, or too few: every client has diverged
            number, error = number - 1, short(problem)
            break
        sent += result.bytes_down + result.bytes_up
        refused += len(result.report.refused)
        if number % every and number < config.rounds:
            context.tell(f"{name}: round {number}", number, config.rounds)
            continue
        measured = evaluate(session.released, task.held_out)
        numbers.append(number)
        accuracies.append(round(measured.score, 4))
        losses.append(round(measured.loss, 5) if math.isfinite(measured.loss) else None)
        context.tell(f"{name}: round {number}, {measured.score:.2%}", number, config.rounds)
        reached = config.target is not None and measured.score >= config.target
        if reached:
            break
    return {
        "rounds": number,
        "reached": reached,
        "accuracy": accuracies[-1] if accuracies else None,
        "bytes": sent,
        "refused": refused,
        "error": error,
        "training_seconds": round(time.perf_counter() - began, 2),
        "numbers": numbers if every > 1 else [],
        "accuracies": accuracies,
        "losses": losses,
    }
