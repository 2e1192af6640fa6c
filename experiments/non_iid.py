"""`non-iid`: the MLP of `table1` at 10 % participation where clients have unequal data."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dbcl.simulation import presets
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import markdown, rounds_cell, until
from experiments.training import train

SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid"},
    "dirichlet": {"partition": "dirichlet", "alpha": 0.3},
    "shards": {"partition": "shards"},
}
TITLES = {"iid": "IID", "dirichlet": "Dirichlet 0.3", "shards": "two shards a client"}
PRESETS = ("plain", "paper", "blind")
TARGETS, QUICK_TARGETS = (0.93, 0.95, 0.97), (0.8, 0.84, 0.88)
"""A run ends at the last; when it passed the others, its curve says."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Three seeds of each preset on each split; one, and the embedded digits, in the reduced setting."""
    fixed: ExperimentJob = (
        {"data": "digits", "clients": 20, "target": QUICK_TARGETS[-1], "rounds": 60}
        if quick
        else {"data": "mnist", "clients": 100, "target": TARGETS[-1], "rounds": 600}
    )
    return [
        {"split": split, "preset": preset, "seed": seed, "lr": 0.05, **fixed}
        for seed in range(1 if quick else 3)
        for split in SPLITS
        for preset in PRESETS
    ]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """One run until the highest target."""
    own = {name: value for name, value in job.items() if name not in ("split", "preset")}
    config = presets.preset(job["preset"], model="mnist-mlp", fraction=0.1, **SPLITS[job["split"]], **own)
    run = train(config, context, f"{job['preset']}, {TITLES[job['split']]}, seed {job['seed']}")
    return {name: value for name, value in run.items() if name not in ("losses", "numbers")}


def table(found: Results) -> str:
    """Rounds to three accuracies by split and preset."""
    targets = QUICK_TARGETS if found.quick else TARGETS
    lines = []
    for split, title in TITLES.items():
        for preset in PRESETS:
            runs = found.of(split=split, preset=preset)
            cells = [rounds_cell([until(run, target) for run in runs]) for target in targets]
            sent = [run["bytes"] / 1e6 for run in runs if run["reached"]]
            lines.append([title, f"`{preset}`", *cells, f"{statistics.median(sent):,.0f}" if sent else "–"])
    heads = ["clients' data", "preset", *(f"to {target:.0%}" for target in targets), f"MB to {targets[-1]:.0%}"]
    who = "the embedded digits, 20 clients" if found.quick else "MNIST, 100 clients"
    text = (
        f"Rounds of the MLP to an accuracy: {who}, 10 % of them a round, one local epoch, batches of 10, learning rate "
        "0.05 everywhere. Of several seeds the median, and each. The paper has no such table."
    )
    return "\n\n".join([text, markdown(heads, lines)])


def draw(found: Results) -> Mapping[str, Any]:
    """Accuracy by round of the first seed, a panel for each split."""
    figure, panels = figures.new(11, 3.4, 1, 3)
    top: Sequence[float] = QUICK_TARGETS if found.quick else TARGETS
    for axes, (split, title) in zip(panels[0], TITLES.items(), strict=True):
        for preset in PRESETS:
            for run in found.of(split=split, preset=preset)[:1]:
                curve = [100 * score for score in run["accuracies"]]
                axes.plot(range(1, len(curve) + 1), curve, color=figures.COLOURS[preset], label=preset)
        axes.axhline(100 * top[-1], color=figures.MORE[-1], linewidth=0.8)
        axes.set_ylim(100 * top[0] - 20, 100)
        figures.log_scale(axes, "x")
        figures.label(axes, "round", "test accuracy, %", title)
    return {"non-iid": figure}


EXPERIMENT = Experiment(
    name="non-iid",
    title="Clients with unequal data",
    what="The MLP of table 1 at 10 % participation, with labels divided by Dirichlet 0.3 or in two shards a client.",
    minutes="9 on one H200, about 15 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist",),
)
