"""`rounds`: rounds and bytes to an accuracy, each preset at its best rate and server momentum, beside `plain`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dbcl.simulation import RunConfig, presets
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown, rounds_cell
from experiments.training import train

Runs = list[dict[str, Any]]

MLP: ExperimentJob = {"model": "mnist-mlp", "data": "mnist", "clients": 100, "epochs": 1, "batch_size": 10}
CNN: ExperimentJob = {"model": "mnist-cnn", "data": "mnist", "clients": 100, "epochs": 5, "batch_size": 10}
CIFAR: ExperimentJob = {
    "model": "cifar-cnn",
    "data": "cifar10",
    "clients": 100,
    "epochs": 5,
    "batch_size": 50,
    "every": 10,
}
MLP_SEEDS, CNN_SEEDS, UNEQUAL_SEEDS = (0, 1, 2, 3, 4, 11, 12, 13), (0, 1, 2), (0, 1, 2)
MOMENTA = (0.0, 0.5, 0.7, 0.9)
MEANS = (0.0, 0.8)
"""Decays of the running mean of the weights, which is what is evaluated: none, and about five rounds."""
VALIDATED = {"max_influence": 1.5, "outlier_factor": 10.0}
"""The limits of the other presets, for `plain` where its clients diverge without them."""
SCAN: dict[str, dict[str, tuple[dict[str, Any], Sequence[float], Sequence[float], Sequence[float]]]] = {
    "mlp": {
        "plain": ({}, (0.05, 0.1, 0.2), MOMENTA, MEANS),
        "blind": ({}, (0.05, 0.1), (0.5, 0.7, 0.9), MEANS),
        "veil": ({}, (0.05, 0.1), (0.5, 0.7), MEANS),
        "paper": ({}, (0.05, 0.1), (0.0, 0.7), (0.0,)),
        "blind, one lane": ({"lanes": 1}, (0.05,), (0.5, 0.7), (0.8,)),
    },
    "cnn": {
        "plain": ({}, (0.02, 0.05, 0.1), MOMENTA, MEANS),
        "blind": ({}, (0.02, 0.03), (0.5, 0.7, 0.9), MEANS),
        "veil": ({}, (0.05, 0.1), (0.5, 0.7), (0.8,)),
        "paper": ({"lr_decay": 0.995}, (0.02,), (0.0,), (0.0,)),
    },
}
"""Changed settings, client rates, server momenta and decays of the running mean that are tried for each."""
UNEQUAL: dict[str, tuple[dict[str, Any], float]] = {
    "dirichlet": ({"partition": "dirichlet", "alpha": 0.3}, 0.95),
    "shards": ({"partition": "shards"}, 0.93),
}
"""Divisions of the examples, each with its target."""
TITLES = {
    "mlp": "The MLP, examples divided evenly",
    "cnn": "The CNN, examples divided evenly",
    "dirichlet": "The MLP, labels divided by Dirichlet 0.3",
    "shards": "The MLP, two shards of labels a client",
    "secure": "The MLP with and without secure aggregation, 20 clients a round",
    "cifar": "CIFAR-10, no augmentation: accuracy after 300 rounds",
    "diverging": "The CNN at a rate at which clients diverge, with and without the server's limits",
}
COLOURS = {**figures.COLOURS, "veil": "#2d6a3e", "blind, one lane": "#6fb3cf"}


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """List the runs, the first seed of every setting before the second."""
    if quick:
        return list(_quick())
    found = list(_scan("mlp", {**MLP, "target": 0.97, "rounds": 200}, MLP_SEEDS))
    found += _scan("cnn", {**CNN, "target": 0.99, "rounds": 110}, CNN_SEEDS)
    found += [*_unequal(), *_secure(), *_cifar(), *_diverging()]
    return sorted(found, key=lambda job: MLP_SEEDS.index(job["seed"]))


def _job(
    part: str, way: str, lr: float, momentum: float, mean: float, seed: int, fixed: Mapping[str, Any], **more: Any
) -> ExperimentJob:
    """Return a job; `way` is a preset, or one with a name for what is changed."""
    pace = {"lr": lr, "server_momentum": momentum, "ema_decay": mean, "seed": seed}
    return {"part": part, "way": way, "preset": way.partition(",")[0], **fixed, **pace, **more}


def _scan(part: str, fixed: ExperimentJob, seeds: Sequence[int]) -> Iterator[ExperimentJob]:
    for way, (more, *grid) in SCAN[part].items():
        for (lr, momentum, mean), seed in product(product(*grid), seeds):
            yield _job(part, way, lr, momentum, mean, seed, fixed, **more)


def _unequal() -> Iterator[ExperimentJob]:
    grid = [("plain", *pace) for pace in product((0.05, 0.1), MOMENTA, MEANS)]
    grid += [("blind", *pace) for pace in product((0.05, 0.1), (0.5, 0.7), MEANS)]
    grid += [("veil", 0.05, 0.5, 0.8), ("paper", 0.05, 0.0, 0.0), ("blind, one lane", 0.05, 0.5, 0.8)]
    for (part, (split, target)), (way, lr, momentum, mean) in product(UNEQUAL.items(), grid):
        fixed = {**MLP, **split, "target": target, "rounds": 150, **SCAN["mlp"][way][0]}
        for seed in UNEQUAL_SEEDS:
            yield _job(part, way, lr, momentum, mean, seed, fixed)


def _secure() -> Iterator[ExperimentJob]:
    """20 clients a round are 10 in each of two lanes; sums have the quantizer's rounding, without the masks."""
    fixed = {**MLP, "target": 0.97, "rounds": 200, "fraction": 0.2}
    for seed in MLP_SEEDS[:5]:
        for lr, (momentum, mean) in product((0.05, 0.1), ((0.0, 0.0), (0.7, 0.8))):
            yield _job("secure", "plain", lr, momentum, mean, seed, fixed)
        yield _job("secure", "blind", 0.05, 0.5, 0.8, seed, fixed)
        yield _job("secure", "blind, secure aggregation", 0.05, 0.5, 0.8, seed, fixed, secure_aggregation=True)


def _cifar() -> Iterator[ExperimentJob]:
    fixed = {**CIFAR, "rounds": 300}
    for lr, (momentum, mean) in product((0.02, 0.05), ((0.0, 0.0), (0.5, 0.8), (0.7, 0.8), (0.9, 0.8))):
        yield _job("cifar", "plain", lr, momentum, mean, 0, fixed, **VALIDATED)
    for lr, momentum in ((0.02, 0.7), (0.02, 0.5), (0.01, 0.7)):
        yield _job("cifar", "blind", lr, momentum, 0.8, 0, fixed)


def _diverging() -> Iterator[ExperimentJob]:
    fixed = {**CNN, "target": 0.99, "rounds": 50}
    yield _job("diverging", "blind", 0.04, 0.5, 0.8, 0, fixed)
    yield _job("diverging", "blind, no limits", 0.04, 0.5, 0.8, 0, fixed, max_influence=0.0, outlier_factor=0.0)


def _quick() -> Iterator[ExperimentJob]:
    fixed = {**MLP, "data": "digits", "clients": 20, "target": 0.88, "rounds": 60}
    grid = [("plain", 0.0, 0.0), ("plain", 0.7, 0.8), ("blind", 0.5, 0.8), ("veil", 0.5, 0.8), ("paper", 0.0, 0.0)]
    for way, momentum, mean in [*grid, ("blind, one lane", 0.5, 0.8)]:
        yield _job("mlp", way, 0.05, momentum, mean, 0, fixed, **SCAN["mlp"][way][0])


def config_of(job: ExperimentJob) -> RunConfig:
    """Return the settings of a job.

    >>> config_of(next(_quick())).server_optimizer
    'fedavg'
    """
    own = {name: value for name, value in job.items() if name not in ("part", "way", "preset", "every")}
    own["server_optimizer"] = "momentum" if job["server_momentum"] else "fedavg"
    return presets.preset(job["preset"], **{"fraction": 0.1, **own})


def title_of(job: ExperimentJob) -> str:
    """Name a job.

    >>> title_of(next(_quick()))
    'mlp, plain, rate 0.05, momentum 0, mean 0, seed 0'
    """
    pace = f"rate {job['lr']:g}, momentum {job['server_momentum']:g}, mean {job['ema_decay']:g}"
    return f"{job['part']}, {job['way']}, {pace}, seed {job['seed']}"


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train until the target, or for all rounds where there is none."""
    run = train(config_of(job), context, title_of(job), job.get("every", 1))
    return {name: value for name, value in run.items() if name not in ("losses", "numbers")}


def median_rounds(runs: Runs) -> float:
    """Return the median of the rounds to the target, where a run that did not reach it counts as infinite.

    >>> median_rounds([{"reached": True, "rounds": 4}, {"reached": False, "rounds": 9}, {"reached": True, "rounds": 6}])
    6
    """
    return statistics.median([run["rounds"] if run["reached"] else float("inf") for run in runs])


def _groups(found: Results, part: str) -> list[tuple[ExperimentJob, Runs]]:
    """Return the jobs of a part that differ in more than their seed, with the played runs of each."""
    groups: dict[tuple[Any, ...], ExperimentJob] = {}
    for job in found.jobs_of(part=part):
        groups.setdefault((job["way"], job["lr"], job["server_momentum"], job["ema_decay"]), job)
    return [
        (job, found.of(part=part, **dict(zip(("way", "lr", "server_momentum", "ema_decay"), settings, strict=True))))
        for settings, job in groups.items()
    ]


def _cost(runs: Runs) -> tuple[float, float]:
    """Order runs of one setting: fewest rounds to the target, then the highest accuracy."""
    return median_rounds(runs), -_accuracy(runs)


def _accuracy(runs: Runs) -> float:
    return statistics.median([run["accuracy"] or 0.0 for run in runs])


def best(found: Results, part: str, way: str) -> tuple[ExperimentJob, Runs] | None:
    """Return the setting of a way with the fewest rounds, median over its seeds, or None before any was played."""
    played = [(job, runs) for job, runs in _groups(found, part) if job["way"] == way and runs]
    return min(played, key=lambda group: _cost(group[1]), default=None)


def table(found: Results) -> str:
    """Compare the best setting of each way with the best plain one, then list every setting."""
    who = "The embedded digits, 20 clients" if found.quick else "100 clients"
    parts = [
        f"{who}, 10 % of them in a round unless a title says otherwise. Bytes are those of all messages, up and down, "
        "until the target. Medians over the seeds; a run that did not reach its target counts as infinite. Each way "
        "has the client rate, server momentum and running mean with the fewest rounds of those that were tried, "
        "`plain` too, and is compared with that `plain`.",
    ]
    shown = [part for part in TITLES if found.jobs_of(part=part)]
    for part in shown:
        parts += [f"## {_titled(found, part)}", markdown(HEADS, _best_lines(found, part))]
    parts.append("## All settings that were played")
    for part in [part for part in shown if found.of(part=part)]:
        lines = [_line(found, part, job, runs) for job, runs in _groups(found, part) if runs]
        parts += [f"### {_titled(found, part)}", markdown(HEADS, lines)]
    return "\n\n".join(parts)


HEADS = [
    "", "rate", "server momentum", "running mean", "seeds", "rounds", "MB", "rounds / plain", "bytes / plain",
    "accuracy at the end", "rejected updates",
]  # fmt: skip


def _titled(found: Results, part: str) -> str:
    target = found.jobs_of(part=part)[0].get("target")
    return TITLES[part] + (f", to {target:.0%}" if target else "")


def _best_lines(found: Results, part: str) -> Iterator[list[str]]:
    for way in dict.fromkeys(job["way"] for job in found.jobs_of(part=part)):
        group = best(found, part, way)
        yield [f"`{way}`", *[NOT_RUN] * (len(HEADS) - 1)] if group is None else _line(found, part, *group)


def _line(found: Results, part: str, job: ExperimentJob, runs: Runs) -> list[str]:
    pace = [f"{job['lr']:g}", f"{job['server_momentum']:g}", f"{job['ema_decay']:g}"]
    plain = best(found, part, "plain")
    return [
        f"`{job['way']}`",
        *pace,
        str(len(runs)),
        rounds_cell(runs) if job.get("target") else str(runs[0]["rounds"]),
        f"{_sent(job, runs) / 1e6:,.0f}" if _sent(job, runs) < float("inf") else "–",
        _ratio(median_rounds(runs), median_rounds(plain[1])) if plain and job.get("target") else "–",
        _ratio(_sent(job, runs), _sent(*plain)) if plain else "–",
        f"{_accuracy(runs):.2%}",
        str(sum(run["refused"] for run in runs)),
    ]


def _sent(job: ExperimentJob, runs: Runs) -> float:
    """Return the median of the bytes to the target, where a run that did not reach it counts as infinite."""
    every = job.get("target") is None
    return statistics.median([run["bytes"] if run["reached"] or every else float("inf") for run in runs])


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if value < float("inf") and 0 < reference < float("inf") else "–"


def draw(found: Results) -> Mapping[str, Any]:
    """Draw accuracy by round and by bytes: of each way the best setting's median run."""
    shown = [part for part in ("mlp", "cnn", "cifar") if any(runs for _, runs in _groups(found, part))]
    if not shown:
        return {}
    figure, panels = figures.new(10, 3.4 * len(shown), len(shown), 2)
    for part, (left, right) in zip(shown, panels, strict=True):
        for way in dict.fromkeys(job["way"] for job in found.jobs_of(part=part)):
            group = best(found, part, way)
            if group is None:
                continue
            job, runs = group
            run = sorted(runs, key=lambda run: run["rounds"])[len(runs) // 2]
            numbers = [job.get("every", 1) * number for number in range(1, len(run["accuracies"]) + 1)]
            a_round = run["bytes"] / max(run["rounds"], 1) / 1e6
            scores = [100 * score for score in run["accuracies"]]
            label = f"{way}: rate {job['lr']:g}, momentum {job['server_momentum']:g}, mean {job['ema_decay']:g}"
            left.plot(numbers, scores, color=COLOURS[way], label=label)
            right.plot([number * a_round for number in numbers], scores, color=COLOURS[way])
        target = found.jobs_of(part=part)[0].get("target")
        for axes, what in ((left, "round"), (right, "MB of all messages, up and down")):
            if target:
                axes.axhline(100 * target, color=figures.MORE[-1], linewidth=0.8)
                axes.set_ylim(100 * target - 5, 100)
            figures.label(axes, what, "test accuracy, %", _titled(found, part))
    return {"rounds": figure}


EXPERIMENT = Experiment(
    name="rounds",
    title="Rounds and bytes to an accuracy",
    what="MNIST to 97 % (MLP) and 99 % (CNN), unequal data and CIFAR-10: each preset at its best client rate, server "
    "momentum and running mean, beside the best plain setting.",
    minutes="about 40 on one H200, in 12 processes",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist", "cifar10"),
)
