"""`guaranteed`: accuracy of a guarantee for every example or client, against everyone and with a trusted server."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dbcl.privacy.planning import expected_loss, suggest_server_rate
from dbcl.simulation import RunConfig, Task, presets
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.planning import parameter_count, planned_for
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown
from experiments.training import task_on, train

SILOS = {"mnist": (0.5, 1.0, 2.0, 4.0, 8.0), "digits": (1.0, 2.0, 4.0, 8.0), "cifar10": (3.0, 8.0), "lfw": (8.0,)}
"""Epsilons by data set, with ten parties of whom two may collude."""
FLEETS = (1.0, 2.0, 4.0, 8.0)
"""Epsilons for one of 1,000 clients, 100 in a round."""
MAX_RATE = 12.0
"""Largest learning rate of the server for fleets."""
NO_NOISE = 1e6
"""An epsilon at which there is practically no noise: the same training, to compare with."""
NO_NOISE_ROUNDS = {"mnist": 800, "cifar10": 800}
"""Rounds without noise, as many as at the largest epsilon; 200 for smaller data sets."""
FEWER = "fewer"
"""Unit of jobs with a part of the examples; it is one example, too."""
SIZES, SIZE_EPSILONS = (250, 500, 1000, 2000), (0.5, 1.0, 2.0, 4.0, 8.0)
"""Numbers of examples of the digits, from which the loss of accuracy of a plan is estimated."""
LEAST_LEARNED = 500
"""Examples times epsilon, below which a plan is refused: nothing could be learned."""
TRUST = {"nobody": "guaranteed", "server": "private-example"}
HEAD = "scatter-linear"


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Silos by data set, then fleets; the reduced setting has the embedded digits alone."""
    seeds, found = ((10,) if quick else (0, 1, 2)), list[ExperimentJob]()
    data = {"digits": (2.0,)} if quick else SILOS
    for name, epsilons in data.items():
        for epsilon in (*epsilons, NO_NOISE):
            for trust in TRUST if epsilon != NO_NOISE else ("server",):
                found += [
                    {"unit": "example", "data": name, "model": HEAD, "epsilon": epsilon, "trust": trust, "seed": seed}
                    for seed in (seeds if name in ("mnist", "digits") else seeds[:1])
                ]
    if not quick:
        found += [
            {
                "unit": FEWER,
                "data": "digits",
                "model": HEAD,
                "examples": size,
                "epsilon": epsilon,
                "trust": "nobody" if epsilon != NO_NOISE else "server",
                "seed": seed,
            }
            for size in SIZES
            for epsilon in (*SIZE_EPSILONS, NO_NOISE)
            if size * epsilon >= LEAST_LEARNED
            for seed in seeds
        ]
        found += [
            {
                "unit": "example",
                "data": "cifar10",
                "model": "scatter-cnn",
                "epsilon": epsilon,
                "trust": "nobody",
                "seed": 0,
            }
            for epsilon in SILOS["cifar10"]
        ]
        found += [
            {"unit": "client", "data": "mnist", "model": HEAD, "epsilon": epsilon, "trust": trust, "seed": 0}
            for epsilon in (*FLEETS, NO_NOISE)
            for trust in (("server", "nobody") if epsilon not in (1.0, NO_NOISE) else ("server",))
        ]
    return found


def config_of(job: ExperimentJob) -> RunConfig:
    """Return the settings of a job: the preset's own, and for fleets a rate that suits updates of features."""
    own = {"data": job["data"], "model": job["model"], "epsilon": job["epsilon"], "seed": job["seed"]}
    if job["unit"] != "client":
        return presets.preset(TRUST[job["trust"]], **own, **_pace(job))
    own |= {"clip": 0.03, "lr": 0.01, "batch_size": 20, "rounds": 200}
    if job["trust"] == "nobody":
        own |= {"noise_by": "clients", "secure_aggregation": True, "colluders": 10, "rounds": 100}
    return presets.preset("private", **own)


def _pace(job: ExperimentJob) -> dict[str, Any]:
    """Return rounds and rate for a run without noise: the largest that are planned with noise."""
    return {"rounds": NO_NOISE_ROUNDS.get(job["data"], 200), "lr": 40.0} if job["epsilon"] == NO_NOISE else {}


def _task(job: ExperimentJob, context: Context) -> Task:
    """Return the task of a job, with a random part of the training examples if it says how many."""
    task = task_on(context.device, job["data"], job["model"], context.data_dir)
    if "examples" not in job:
        return task
    rows = np.random.default_rng(job["seed"]).permutation(len(task.train))[: job["examples"]]
    return replace(task, train=task.train.subset(np.sort(rows)))


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train, and score the released model on held-out examples."""
    config, task = config_of(job), _task(job, context)
    values = parameter_count(task.make_model(0))
    if config.privacy is not None and config.privacy.unit == "client":
        plan = privacy_plan(config, values=values)
        assert plan is not None
        config = replace(config, server_lr=float(f"{min(MAX_RATE, suggest_server_rate(plan, values)):.2g}"))
    config = planned_for(config, task)
    run = train(config, context, title_of(job), every=10, task=task, final=_auc if config.data == "lfw" else _nothing)
    assert config.privacy is not None
    kept = {name: run[name] for name in ("accuracy", "accuracies", "numbers", "rounds", "bytes", "error", "auc")}
    pace: dict[str, Any] = {"separation": config.privacy.separation, "step": round(config.lr * config.privacy.clip, 3)}
    made = privacy_plan(config, len(task.train), values)
    pace["noise_to_signal"] = None if made is None else round(made.noise_to_signal(values), 5)
    return {**kept, **pace, "server_lr": config.server_lr, "clients": config.clients, "examples": len(task.train)}


def _nothing(model: nn.Module, task: Task) -> dict[str, Any]:
    return {"auc": None}


@torch.no_grad()
def _auc(model: nn.Module, task: Task) -> dict[str, Any]:
    """Return the area under the ROC curve of a task with one logit."""
    from sklearn.metrics import roc_auc_score  # the other datasets are played without it

    batch = task.held_out.first(len(task.held_out))
    scores = model(batch.inputs)[:, 0]
    return {"auc": round(float(roc_auc_score(batch.targets.cpu().numpy(), scores.cpu().numpy())), 5)}


def title_of(job: ExperimentJob) -> str:
    """Name a job.

    >>> title_of({"unit": "example", "data": "mnist", "model": "m", "epsilon": 2.0, "trust": "nobody", "seed": 1})
    'mnist, m, example, epsilon 2, trusting nobody, seed 1'
    """
    size = f" ({job['examples']} examples)" if "examples" in job else ""
    return (
        f"{job['data']}{size}, {job['model']}, {job['unit']}, epsilon {job['epsilon']:g}, trusting {job['trust']}, "
        f"seed {job['seed']}"
    )


def table(found: Results) -> str:
    """Accuracy by data set and epsilon, with nobody trusted and with a trusted server."""
    parts = []
    for unit, who in (("example", "example of 10 parties, of whom 2 may collude"), ("client", "of 1,000 clients")):
        lines = []
        for data, model, epsilon in _settings(found, unit):
            cells = [_cell(found, unit=unit, data=data, model=model, epsilon=epsilon, trust=trust) for trust in TRUST]
            noise = _cell(found, unit=unit, data=data, model=model, epsilon=NO_NOISE, trust="server")
            lines.append([data, model, f"{epsilon:g}", *cells, noise])
        if lines:
            heads = ["data", "network", "epsilon", "trusting nobody", "trusted server", "without noise"]
            parts += [f"The privacy unit is one {who}; delta is 1e-5.", markdown(heads, lines)]
    pace = {
        (row["job"]["data"], row["job"]["epsilon"]): row["result"]
        for row in found.rows
        if row["job"]["unit"] == "example" and row["job"]["trust"] == "nobody" and row["job"]["model"] == HEAD
    }
    lines = [
        [data, f"{epsilon:g}", run["rounds"], run["separation"], f"{run['step']:g}", f"{run['bytes'] / 1e6:,.0f}"]
        for (data, epsilon), run in pace.items()
    ]
    if lines:
        heads = ["data", "epsilon", "rounds", "separation", "rate times clip", "MB of the whole run"]
        parts += ["What was planned from the number of examples, before any training:", markdown(heads, lines)]
    if lines := [*_fewer(found)]:
        heads = ["examples", "epsilon", "noise to signal", "accuracy", "without noise", "points lost", "points / noise"]
        parts += [
            "The digits with fewer examples, nobody trusted. `dbcl.privacy.planning.expected_loss` is the last column, "
            "rounded:",
            markdown(heads, lines),
        ]
    return "\n\n".join(parts)


def _fewer(found: Results) -> Iterator[list[str]]:
    """Yield accuracy and loss by the number of examples and epsilon."""
    for size, epsilon in product(SIZES, SIZE_EPSILONS):
        runs = found.of(unit=FEWER, examples=size, epsilon=epsilon)
        without = found.of(unit=FEWER, examples=size, epsilon=NO_NOISE)
        if runs and without:
            reached, free = (statistics.fmean(run["accuracy"] for run in group) for group in (runs, without))
            noise, lost = runs[0]["noise_to_signal"], 100 * (free - reached)
            yield [
                f"{size}", f"{epsilon:g}", f"{noise:.2g}", f"{reached:.1%}", f"{free:.1%}", f"{lost:.1f}",
                f"{lost / noise:.0f}",
            ]  # fmt: skip


def _settings(found: Results, unit: str) -> list[tuple[str, str, float]]:
    every = [
        (job["data"], job["model"], job["epsilon"]) for job in found.jobs_of(unit=unit) if job["epsilon"] != NO_NOISE
    ]
    return list(dict.fromkeys(every))


def _cell(found: Results, **settings: Any) -> str:
    runs = found.of(**settings)
    if not runs:
        return NOT_RUN if found.jobs_of(**settings) else "–"
    score = "auc" if runs[0].get("auc") is not None else "accuracy"
    values = [run[score] for run in runs]
    shown = f"{statistics.fmean(values):.4f} AUC" if score == "auc" else f"{statistics.fmean(values):.1%}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.1%} to {max(values):.1%})"


def draw(found: Results) -> Mapping[str, Any]:
    """Draw accuracy against epsilon by data set, and the loss of accuracy against the noise."""
    names = [
        (unit, data)
        for unit, data in dict.fromkeys((job["unit"], job["data"]) for job in found.jobs)
        if unit != FEWER and len(_drawn(found, unit, data)) > 1
    ]
    fewer = list(_fewer(found))
    count = len(names) + bool(fewer)
    if not count:
        return {}
    columns = min(count, 3)
    figure, panels = figures.new(4.2 * columns, 3.4 * -(-count // columns), -(-count // columns), columns)
    every = [axes for row in panels for axes in row]
    for axes, (unit, data) in zip(every, names, strict=False):
        _draw_accuracy(axes, found, unit, data)
    if fewer:
        axes = every[len(names)]
        noise, lost = ([float(row[column]) for row in fewer] for column in (2, 5))
        axes.plot(noise, lost, "o", color=figures.MORE[0], label="measured")
        line = [min(noise), max(noise)]
        axes.plot(line, [expected_loss(each) for each in line], ":", color=figures.MORE[-1], label="expected loss")
        figures.log_scale(axes, "x")
        figures.log_scale(axes, "y")
        figures.label(axes, "noise to signal", "points of accuracy lost", "digits, 250 to 2,000 examples")
    for axes in every[count:]:
        axes.set_visible(False)
    return {"guaranteed": figure}


def _draw_accuracy(axes: Any, found: Results, unit: str, data: str) -> None:
    for (trust, words), colour, style in zip(
        {"server": "trusted server", "nobody": "nobody trusted"}.items(), figures.MORE, ("--", "-"), strict=False
    ):
        points = [
            (epsilon, found.of(unit=unit, data=data, model=HEAD, epsilon=epsilon, trust=trust))
            for epsilon in _drawn(found, unit, data)
        ]
        means = {epsilon: 100 * statistics.fmean(run["accuracy"] for run in runs) for epsilon, runs in points if runs}
        axes.plot(list(means), list(means.values()), style, marker="o", color=colour, label=words)
    without = [run["accuracy"] for run in found.of(unit=unit, data=data, model=HEAD, epsilon=NO_NOISE)]
    if without:
        axes.axhline(100 * statistics.fmean(without), linestyle=":", color=figures.MORE[-1], label="without noise")
    figures.log_scale(axes, "x", base=2)
    figures.label(axes, "epsilon", "test accuracy, %", f"{data}, for one {unit}")


def _drawn(found: Results, unit: str, data: str) -> Sequence[float]:
    return sorted({job["epsilon"] for job in found.jobs_of(unit=unit, data=data, model=HEAD)} - {NO_NOISE})


EXPERIMENT = Experiment(
    name="guaranteed",
    title="A guarantee against everyone",
    what="Accuracy of (epsilon, 1e-5) differential privacy for every example of ten parties, trusting nobody or the "
    "server, with a linear head on scattering features; and for every one of 1,000 clients.",
    minutes="about 150 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist", "cifar10", "lfw"),
    extras={"sklearn": "audit"},
)
