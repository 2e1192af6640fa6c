"""`cifar10`: test loss and accuracy of the paper's CIFAR-10 network by round, with and without sketching."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbcl.simulation import presets
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown
from experiments.training import train

RATES = {"plain": 0.02, "paper": 0.01, "blind": 0.02}
"""Learning rates. The experiment `rounds` plays `plain` and `blind` at others, too."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One run for each preset; in the reduced setting with the embedded digits."""
    if quick:
        fixed: ExperimentJob = {
            "data": "digits",
            "clients": 20,
            "epochs": 1,
            "rounds": 8,
            "every": 1,
            "lr": 0.01,
            "seed": 0,
        }
        return [{"preset": preset, **fixed} for preset in RATES]
    fixed = {"data": "cifar10", "clients": 100, "epochs": 5, "rounds": 300, "every": 5, "seed": 0}
    return [{"preset": preset, "lr": lr, **fixed} for preset, lr in RATES.items()]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """One run over all its rounds."""
    own = {name: value for name, value in job.items() if name not in ("preset", "every")}
    config = presets.preset(job["preset"], model="cifar-cnn", fraction=0.1, batch_size=50, **own)
    return train(config, context, f"{job['preset']}, rate {job['lr']:g}", job["every"])


def table(found: Results) -> str:
    """Accuracy and loss at the end and at their best, by preset."""
    lines = []
    for job in found.jobs:
        runs = found.of(preset=job["preset"])
        lines.append([f"`{job['preset']}`", f"{job['lr']:g}", *(_facts(runs[0]) if runs else [NOT_RUN] * 6)])
    rounds = found.jobs[0]["rounds"]
    who = "The embedded digits, 20 clients, one local epoch" if found.quick else "CIFAR-10, 100 clients, 5 local epochs"
    text = (
        f"{who}, 10 % a round, batches of 50, no augmentation, {rounds} rounds. The paper: sketching does not hinder "
        "test accuracy, and marginally improves it; it prints no numbers. Losses are those of W itself."
    )
    heads = ["preset", "rate", "accuracy at the end", "best accuracy", "loss at the end", "least loss", "MB", "refused"]
    return "\n\n".join([text, markdown(heads, lines)])


def _facts(run: Mapping[str, Any]) -> list[str]:
    """Return the cells of a run; one that diverged has no curve to its end."""
    if not run["accuracies"]:
        return [f"diverged in round {run['rounds'] + 1}", *["–"] * 5]
    losses = [loss for loss in run["losses"] if loss is not None]
    last = f"{run['accuracy']:.2%}" + (f", diverged in round {run['rounds'] + 1}" if run["error"] else "")
    end = run["losses"][-1]
    return [
        last,
        f"{max(run['accuracies']):.2%}",
        "infinite" if end is None else f"{end:.4g}",
        f"{min(losses):.4g}" if losses else "–",
        f"{run['bytes'] / 1e6:,.0f}",
        str(run["refused"]),
    ]


def draw(found: Results) -> Mapping[str, Any]:
    """The two panels of the paper's figure: test loss and test accuracy by round."""
    figure, panels = figures.new(10, 3.8, 1, 2)
    left, right = panels[0]
    for preset in RATES:
        for run in found.of(preset=preset):
            colour = figures.COLOURS[preset]
            losses = [float("nan") if loss is None else loss for loss in run["losses"]]
            left.plot(run["numbers"], losses, color=colour, label=preset)
            right.plot(run["numbers"], [100 * score for score in run["accuracies"]], color=colour, label=preset)
    figures.label(left, "round", "test loss")
    figures.label(right, "round", "test accuracy, %")
    return {"cifar10": figure}


EXPERIMENT = Experiment(
    name="cifar10",
    title="CIFAR-10: loss and accuracy by round",
    what="CIFAR-10, 100 clients, 10 % a round: test loss and accuracy by round without sketching, with it, and blind.",
    minutes="18 on one H200",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("cifar10",),
)
