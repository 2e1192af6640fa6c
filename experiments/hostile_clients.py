"""`hostile-clients`: the test accuracy that hostile clients cost in runs of the preset `blind`.

Thirty of the 100 clients of the embedded digits are hostile, three of the ten in a round on average. They train on
flipped labels (9 - label) and send five times their update, or they know all honest updates of their lane and send
minus their mean. Under secure aggregation one of the 20 clients of every round sends minus its update, at five times
the public bound.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from dbcl.data import TensorExamples
from dbcl.engines import Engine, evaluate
from dbcl.protocol import Broadcast, Server, Update
from dbcl.protocol.secagg.encoding import WeightedMean
from dbcl.protocol.secagg.quantizer import Quantizer, Words
from dbcl.simulation import RunConfig, Task, preset
from dbcl.simulation.build import build_engine, build_run_server, new_seed
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown
from experiments.training import task_on

HOSTILE = 0.3
"""Share of the clients that are hostile."""
FACTOR = 5.0
"""Factor on the updates of label flippers, and on the bound under secure aggregation."""
SEEDS = (0, 1, 2, 3, 4)
VALIDATORS: dict[str, dict[str, Any]] = {
    "default": {},
    "accepts every update": {"max_influence": 0.0, "outlier_factor": 0.0},
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {},
    "Dirichlet 0.3": {"partition": "dirichlet", "alpha": 0.3},
    "two labels a client": {"partition": "shards"},
}

Updates = dict[str, Update]


def flip(sent: Mapping[int, Broadcast], updates: Updates, hostile: set[int]) -> None:
    """Scale the updates of hostile clients, which were trained on flipped labels."""
    for client in hostile & sent.keys():
        own = updates[f"client {client}"]
        tensors = {name: FACTOR * tensor for name, tensor in own.tensors.items()}
        updates[f"client {client}"] = replace(own, tensors=tensors)


def oppose(sent: Mapping[int, Broadcast], updates: Updates, hostile: set[int]) -> None:
    """Replace the updates of hostile clients by minus the mean of the honest ones of their lane."""
    for client in hostile & sent.keys():
        own = updates[f"client {client}"]
        honest = [updates[f"client {other}"] for other in sent.keys() - hostile if sent[other] is sent[client]]
        if honest:
            opposed = {name: -torch.stack([each.tensors[name] for each in honest]).mean(0) for name in own.tensors}
            updates[f"client {client}"] = replace(own, tensors=opposed)


FLIPPED = "flipped labels, times five"
BEYOND = "five times the bound"
ATTACKS = {FLIPPED: flip, "minus the honest mean": oppose}


def accuracy(attack: str | None, seed: int, context: Context | None = None, **settings: Any) -> float:
    """Return the test accuracy of a run of the preset `blind` in which some clients are hostile."""
    config, (task, server, engine) = preset("blind", seed=seed, **settings), _parts(seed, context, settings)
    hostile = set(range(int(HOSTILE * config.clients))) if attack else set[int]()
    if attack == FLIPPED:
        clients = [client for client in engine.clients if isinstance(client, TensorExamples)]
        targets = task.train.first(len(task.train)).targets.clone()
        for number in hostile:
            targets[clients[number].rows] = 9 - targets[clients[number].rows]
        for client in clients:
            client.targets = targets
    for round in range(config.rounds):
        sent = {client: server.open_round(f"client {client}") for client in engine.cohort(round)}
        trained = engine.train_cohort(sent)
        updates = {name: update for name, update in trained.items() if isinstance(update, Update)}
        if attack:
            ATTACKS[attack](sent, updates, hostile)
        server.close_round(updates)
        if context is not None:
            context.tell(f"round {round + 1}", round + 1, config.rounds)
    return evaluate(server.released, task.held_out, task.objective).score


def secure_accuracy(attacked: bool, seed: int, context: Context | None = None, **settings: Any) -> float:
    """Return the test accuracy under secure aggregation, with or without a client that ignores the bound."""
    settings = {"secure_aggregation": True, "fraction": 0.2, **settings}
    config, (task, server, engine) = preset("blind", seed=seed, **settings), _parts(seed, context, settings)
    for round in range(config.rounds):
        sent = {client: server.open_round(f"client {client}") for client in engine.cohort(round)}
        updates = engine.train_cohort(sent)
        if not attacked:
            server.close_round(updates)
        else:
            with patch.object(WeightedMean, "words", _one_beyond_the_bound()):
                server.close_round(updates)
        if context is not None:
            context.tell(f"round {round + 1}", round + 1, config.rounds)
    return evaluate(server.released, task.held_out, task.objective).score


def _parts(seed: int, context: Context | None, settings: Mapping[str, Any]) -> tuple[Task, Server, Engine]:
    """Make the server and the engine of a run of the preset blind."""
    config: RunConfig = preset("blind", seed=seed, device="cpu" if context is None else context.device, **settings)
    task = task_on(config.device, config.data, config.model, None if context is None else context.data_dir)
    own_seed = new_seed(config)
    server = build_run_server(config, task, seed=own_seed)
    return task, server, build_engine(config, task, server, seed=own_seed)


def _one_beyond_the_bound() -> Callable[..., Words]:
    """Return the clients' encoding of a round in which the first client sends minus its update, beyond the bound."""
    honest, first = WeightedMean.words, count()

    def words(encoding: WeightedMean, vector: NDArray[Any], examples: int, clients: int, rng: Any = None) -> Words:
        made = honest(encoding, vector, examples, clients, rng)
        if next(first) == 0:
            quantizer = Quantizer(encoding.config.clip, clients)
            size = FACTOR * quantizer.clip / quantizer.step
            steps = np.rint(-size * vector / np.linalg.norm(vector)).astype(np.int64)
            made[: len(steps)] = steps.astype(np.uint32) & quantizer.mask
        return made

    return words


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Return every attack on every division of the examples; the reduced setting has one seed and few rounds."""
    grid = product(PARTITIONS, VALIDATORS, (None, *ATTACKS), (False,))
    settings = [*grid, *(("iid", "default", attack, True) for attack in (None, BEYOND))]
    names = ("partition", "validator", "attack", "secure")
    more = {"rounds": 3} if quick else {"rounds": 200}
    kept = [each for each in settings if not quick or each[0] == "iid"]
    return [
        {**dict(zip(names, each, strict=True)), "seed": seed, **more}
        for seed in SEEDS[: 1 if quick else None]
        for each in kept
    ]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Play one run."""
    if job["secure"]:
        return {"accuracy": secure_accuracy(job["attack"] is not None, job["seed"], context, rounds=job["rounds"])}
    settings = {**PARTITIONS[job["partition"]], **VALIDATORS[job["validator"]], "rounds": job["rounds"]}
    return {"accuracy": accuracy(job["attack"], job["seed"], context, **settings)}


def table(found: Results) -> str:
    """Accuracy by division, validator and attack."""
    lines = []
    for partition, validator in product(PARTITIONS, VALIDATORS):
        own = {"partition": partition, "validator": validator, "secure": False}
        if found.jobs_of(**own):
            cells = [_cell(found, **own, attack=attack) for attack in (None, *ATTACKS)]
            lines.append([partition, validator, *cells])
    secure = [_cell(found, secure=True, attack=attack) for attack in (None, BEYOND)]
    text = (
        "Thirty of 100 clients are hostile, three of the ten in a round on average: test accuracy of the preset "
        f"`blind` on the embedded digits after {found.jobs[0]['rounds']} rounds, means over seeds, and the least and "
        "the greatest."
    )
    return "\n\n".join(
        [
            text,
            markdown(["clients' data", "validator", "no attack", *ATTACKS], lines),
            "Under secure aggregation, where one of 20 clients of every round adds five times the public bound:",
            markdown(["no attack", BEYOND], [secure]),
        ]
    )


def _cell(found: Results, **settings: Any) -> str:
    values = [run["accuracy"] for run in found.of(**settings)]
    return f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})" if values else NOT_RUN


def draw(found: Results) -> Mapping[str, Any]:
    """Accuracy by division, a bar for each attack, with the default limits and without limits."""
    figure, panels = figures.new(9, 3.6, 1, 2)
    for axes, validator in zip(panels[0], VALIDATORS, strict=True):
        for offset, (attack, colour) in enumerate(zip((None, *ATTACKS), figures.MORE, strict=False)):
            for place, partition in enumerate(PARTITIONS):
                runs = found.of(partition=partition, validator=validator, attack=attack, secure=False)
                if runs:
                    height = 100 * fmean(run["accuracy"] for run in runs)
                    label = "_" if place else attack or "no attack"
                    axes.bar(place + 0.25 * offset, height, 0.22, color=colour, label=label)
        axes.set_xticks([place + 0.25 for place in range(len(PARTITIONS))], PARTITIONS)
        figures.label(axes, "", "test accuracy, %", f"validator: {validator}")
    return {"hostile-clients": figure}


EXPERIMENT = Experiment(
    name="hostile-clients",
    title="Hostile clients",
    what="Three hostile clients of ten in a round, with and without the server's limits, and one beyond the bound of "
    "secure aggregation: the accuracy that they cost.",
    minutes="about 25 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
)
