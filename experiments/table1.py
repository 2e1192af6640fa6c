"""`table1`: rounds to an accuracy on MNIST by participation, with and without sketching."""

import math
import statistics
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dbcl.errors import ConfigError
from dbcl.simulation import presets
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results, Tuning
from experiments.tables import NOT_RUN, markdown, rounds_cell, until
from experiments.training import train

Runs = Sequence[dict[str, Any]]
RATES = "rates.toml"
PERCENTS = (1, 10, 20, 50, 100)
PAPER = {
    ("mlp", "plain"): (222, 96, 84, 83, 82),
    ("mlp", "paper"): (572, 322, 308, 298, 287),
    ("cnn", "plain"): (462, 309, 97, 91, 31),
    ("cnn", "paper"): (636, 176, 189, 170, 174),
}
"""The paper's rounds for each participation."""
NAMES = {
    "plain": "", "plain-adam": ", local Adam", "paper": "-Sketch", "paper-adam": "-Sketch, local Adam",
    "blind": ", our blind",
}  # fmt: skip
"""The presets, and two of them with the local optimiser of the authors' published code."""
VARIANTS = {"plain-adam": "plain", "paper-adam": "paper"}
"""Rows that are a preset with Adam. They have few cells: Adam is stepped for one client at a time."""
VARIED_CELLS = (("mlp", 1), ("mlp", 10))
TARGETS = {"mlp": 0.97, "cnn": 0.99}
EPOCHS = {"mlp": 1, "cnn": 5}
LIMITS = {
    "mlp": {1: 2000, 10: 800, 20: 800, 50: 800, 100: 800},
    "cnn": {1: 1500, 10: 400, 20: 300, 50: 200, 100: 200},
}
"""Largest number of rounds of a run: a target that is not reached by then is "not in N rounds"."""
SEEDS = {"mlp": {1: 3, 10: 3, 20: 3, 50: 3, 100: 3}, "cnn": {1: 1, 10: 3, 20: 1, 50: 1, 100: 1}}
"""Three seeds where a run takes seconds."""
ORDER = {"mlp": (10, 100, 20, 50, 1), "cnn": (10, 20, 1, 50, 100)}
"""The cheap cells first."""
GRIDS: dict[tuple[str, str], tuple[dict[str, float], ...]] = {
    ("mlp", "plain"): ({"lr": 0.1}, {"lr": 0.05}, {"lr": 0.2}),
    ("mlp", "paper"): ({"lr": 0.05}, {"lr": 0.1}, {"lr": 0.03}),
    ("mlp", "blind"): ({"lr": 0.05}, {"lr": 0.1}, {"lr": 0.03}, {"lr": 0.02}, {"lr": 0.01}),
    ("cnn", "plain"): ({"lr": 0.1}, {"lr": 0.05}, {"lr": 0.15}),
    ("cnn", "paper"): (
        {"lr": 0.02, "lr_decay": 0.99},
        {"lr": 0.02, "lr_decay": 0.995},
        {"lr": 0.015, "lr_decay": 0.99},
        {"lr": 0.02, "lr_decay": 0.98},
        {"lr": 0.01, "lr_decay": 0.995},
        {"lr": 0.01, "lr_decay": 0.99},
        {"lr": 0.002, "lr_decay": 0.99, "momentum": 0.9},
        {"lr": 0.02, "lr_decay": 0.998},
        {"lr": 0.01, "lr_decay": 0.998},
        {"lr": 0.02},
        {"lr": 0.01},
    ),
    ("cnn", "blind"): ({"lr": 0.02}, {"lr": 0.03}, {"lr": 0.01}),
}
"""Grid of `--tune` for each cell, with seed 100, which no run of the table has."""
TUNING_ROUNDS = {
    "mlp": {1: 600, 10: 200, 20: 200, 50: 150, 100: 150},
    "cnn": {1: 600, 10: 250, 20: 100, 50: 60, 100: 40},
}


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One run for each cell and seed: the first seed of all cells before the others, the cheap cells first."""
    if quick:
        return [
            {"network": network, "preset": preset, "percent": percent, "seed": 0, **_QUICK[network]}
            for network, preset, percent in _cells()
            if percent in (10, 100) and (network, percent) != ("cnn", 100) and preset not in VARIANTS
        ]
    rates = read_rates(folder)
    return [
        _job(network, preset, percent, rates[network][preset][str(percent)], LIMITS[network][percent], seed)
        for seed in range(3)
        for network, preset, percent in _cells()
        if seed < SEEDS[network][percent]
    ]


def tuning_jobs(folder: Path) -> list[ExperimentJob]:
    """Every rate of the grids for every cell, the cheap cells first."""
    return [
        _job(network, preset, percent, rate, TUNING_ROUNDS[network][percent], 100)
        for network, preset, percent in _cells()
        for rate in GRIDS.get((network, preset), ())
    ]


_QUICK: dict[str, ExperimentJob] = {
    "mlp": {"data": "digits", "clients": 20, "epochs": 1, "lr": 0.05, "target": 0.88, "rounds": 60},
    "cnn": {"data": "digits", "clients": 20, "epochs": 2, "lr": 0.02, "target": 0.92, "rounds": 12},
}
"""The embedded digits among 20 clients."""


def _cells() -> Iterator[tuple[str, str, int]]:
    for network in TARGETS:
        for percent in ORDER[network]:
            for preset in NAMES:
                if preset not in VARIANTS or (network, percent) in VARIED_CELLS:
                    yield network, preset, percent


def _job(network: str, preset: str, percent: int, rate: Mapping[str, float], rounds: int, seed: int) -> ExperimentJob:
    fixed = {"data": "mnist", "clients": 100, "epochs": EPOCHS[network], "target": TARGETS[network], "rounds": rounds}
    return {"network": network, "preset": preset, "percent": percent, "seed": seed, **fixed, **rate}


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """One run until its target."""
    own = {name: value for name, value in job.items() if name not in ("network", "preset", "percent")}
    own |= {"optimizer": "Adam"} if job["preset"] in VARIANTS else {}
    preset: str = VARIANTS.get(job["preset"]) or job["preset"]
    config = presets.preset(
        preset, model=f"mnist-{job['network']}", fraction=job["percent"] / 100, batch_size=10, **own
    )
    run = train(config, context, f"{job['network']} {job['preset']}, {job['percent']} %, seed {job['seed']}")
    return {name: value for name, value in run.items() if name not in ("losses", "numbers")}


def read_rates(folder: Path) -> dict[str, Any]:
    """The rates of the folder, where a tuning has written them, or those beside this module.

    >>> read_rates(Path("nowhere"))["mlp"]["plain"]["10"]
    {'lr': 0.1}
    """
    path = folder / RATES
    rates = tomllib.loads(Path(__file__).with_name(RATES).read_text("utf-8"))
    if path.exists():
        try:
            for network, by_preset in tomllib.loads(path.read_text("utf-8")).items():
                for preset, cells in by_preset.items():
                    rates[network][preset] |= cells
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path}: is no file of rates by network, preset and percent ({error})") from None
    return rates


def choose(found: Results) -> str:
    """The best rate of each cell, as the TOML of `rates.toml`: fewest rounds, or where none arrived, most accuracy."""
    lines = [
        "# Written by `python -m experiments table1 --tune`: of each cell's grid the rate with the fewest rounds to",
        "# the target, or where none reached it while tuning, the highest accuracy at the end; one seed.",
    ]
    for network in TARGETS:
        for preset in NAMES:
            chosen = {percent: best for percent in PERCENTS if (best := _best(found, network, preset, percent))}
            if chosen:
                lines.append(f"\n[{network}.{preset}]")
            for percent in PERCENTS:
                near = _nearest(percent, chosen)
                if near is not None:
                    rate = ", ".join(f"{name} = {value}" for name, value in chosen[near].items())
                    lines.append(f"{percent} = {{ {rate} }}{'' if near == percent else f'  # that of {near} %'}")
    return "\n".join(lines) + "\n"


def _nearest(percent: int, tuned: Collection[int]) -> int | None:
    """The tuned participation that a rate is taken from: the nearest from 10 % on; a single client is like no other.

    >>> _nearest(20, [10, 100]), _nearest(1, [10, 100]), _nearest(50, [])
    (10, None, None)
    """
    alike = [each for each in tuned if (each == 1) == (percent == 1)]
    return min(alike, key=lambda each: abs(math.log(each / percent)), default=None)


def _best(found: Results, network: str, preset: str, percent: int) -> dict[str, float] | None:
    tried = [
        ((not run["reached"], run["rounds"] if run["reached"] else -(run["accuracy"] or 0)), rate)
        for rate in GRIDS.get((network, preset), ())
        for run in found.of(
            network=network, preset=preset, percent=percent, lr=rate["lr"], lr_decay=rate.get("lr_decay")
        )
    ]
    return min(tried, key=lambda pair: pair[0])[1] if tried else None


def table(found: Results) -> str:
    """Rounds beside the paper's, then megabytes and rates."""
    shown = [percent for percent in PERCENTS if found.jobs_of(percent=percent)]
    heads = [f"{percent} %" for percent in shown]
    rounds, sent, rates = list[list[str]](), list[list[str]](), list[list[str]]()
    for network in TARGETS:
        target = next(job["target"] for job in found.jobs if job["network"] == network)
        for preset, name in NAMES.items():
            if not found.jobs_of(network=network, preset=preset):
                continue
            title = f"{network.upper()}{name}"
            cells = [_runs(found, network, preset, percent) for percent in shown]
            if (network, preset) in PAPER and not found.quick:
                said = dict(zip(PERCENTS, PAPER[network, preset], strict=True))
                rounds.append([f"{title}, the paper", f"{target:.0%}", *(str(said[percent]) for percent in shown)])
            planned = [bool(found.jobs_of(network=network, preset=preset, percent=percent)) for percent in shown]
            rounds.append([f"**{title}**", f"{target:.0%}", *_shown(rounds_cell, cells, planned)])
            sent.append([title, *_shown(_megabytes, cells, planned)])
            rates.append([title, *(_rate(found, network, preset, percent) for percent in shown)])
    parts = [
        _setting(found),
        markdown(["", "accuracy", *heads], rounds),
        "Megabytes of all messages, up and down, until then (median over the seeds that reached the target):",
        markdown(["", *heads], sent),
        "Learning rates:",
        markdown(["", *heads], rates),
    ]
    return "\n\n".join(parts)


def _runs(found: Results, network: str, preset: str, percent: int) -> Runs:
    """The runs of a cell, each up to the first round in which its curve is at the target.

    A run may have gone on: 97.00 % was no 0.97 on a GPU while an accuracy was a mean of single-precision numbers.
    """
    target = next(job["target"] for job in found.jobs if job["network"] == network)
    runs = []
    for run in found.of(network=network, preset=preset, percent=percent):
        first = until(run, target)
        played = max(len(run["accuracies"]), 1)
        runs.append(
            {**run, **first, "bytes": run["bytes"] * first["rounds"] / played if first["reached"] else run["bytes"]}
        )
    return runs


def _setting(found: Results) -> str:
    if found.quick:
        return (
            "Rounds to a test accuracy by the share of the clients in a round: the embedded digits, 20 clients, "
            "batches of 10."
        )
    return (
        "Rounds to a test accuracy by the share of the clients in a round: MNIST, 100 clients IID, batches of 10, one "
        "local epoch (MLP) or five (CNN). Of several seeds the median, and each. A run that had not reached the target "
        'by its last round is "not in N rounds"; nothing is extrapolated.'
    )


def _shown(cell: Callable[[Runs], str], cells: Sequence[Runs], planned: Sequence[bool]) -> list[str]:
    return [cell(runs) if part else "–" for runs, part in zip(cells, planned, strict=True)]


def _megabytes(runs: Runs) -> str:
    reached = [run["bytes"] / 1e6 for run in runs if run["reached"]]
    return f"{statistics.median(reached):,.0f}" if reached else (NOT_RUN if not runs else "–")


def _rate(found: Results, network: str, preset: str, percent: int) -> str:
    for job in found.jobs_of(network=network, preset=preset, percent=percent):
        return f"{job['lr']:g}" + (f", times {job['lr_decay']:g} a round" if "lr_decay" in job else "")
    return "–"


def draw(found: Results) -> Mapping[str, Any]:
    """Rounds against participation beside the paper's, and the accuracy by round at 10 %."""
    figure, panels = figures.new(10, 7, 2, 2)
    for (upper, lower), network in zip(panels.T, TARGETS, strict=True):
        for preset, name in NAMES.items():
            if not found.jobs_of(network=network, preset=preset):
                continue
            title, colour = f"{network.upper()}{name}", figures.COLOURS[preset]
            points = [
                (percent, statistics.median(reached))
                for percent in PERCENTS
                if (reached := [r["rounds"] for r in _runs(found, network, preset, percent) if r["reached"]])
            ]
            upper.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, label=title)
            if (network, preset) in PAPER and not found.quick:
                upper.plot(PERCENTS, PAPER[network, preset], "x:", color=colour, label=f"{title}, the paper")
            for run in found.of(network=network, preset=preset, percent=10)[:1]:
                curve = [100 * score for score in run["accuracies"]]
                lower.plot(range(1, len(curve) + 1), curve, color=colour, label=title)
        target = 100 * next(job["target"] for job in found.jobs if job["network"] == network)
        figures.log_scale(upper, "x", "y")
        upper.set_xticks(PERCENTS, [str(percent) for percent in PERCENTS])
        upper.set_xticks([], minor=True)
        figures.label(upper, "clients in a round, %", f"rounds to {target:g} %", f"{network.upper()}")
        lower.axhline(target, color=figures.MORE[-1], linewidth=0.8)
        lower.set_ylim(target - 8, 100)
        figures.log_scale(lower, "x")
        figures.label(lower, "round", "test accuracy, %, 10 % of the clients")
    return {"table1": figure}


EXPERIMENT = Experiment(
    name="table1",
    title="Table 1: rounds to an accuracy on MNIST",
    what="MNIST, 100 clients: rounds to 97 % (MLP) and 99 % (CNN) by participation, with and without sketching.",
    minutes="20 on one H200, in 12 processes",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist",),
    tuning=Tuning(tuning_jobs, choose, RATES),
)
