"""`cifar10`: test loss and accuracy of the paper's CIFAR-10 network by round, with and without sketching."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbcl.experiments import figures
from dbcl.experiments.experiment import Context, Experiment, Job, Results
from dbcl.experiments.tables import NOT_RUN, markdown
from dbcl.experiments.training import train
from dbcl.run import presets

RUNS: dict[str, Job] = {
    "plain": {"lr": 0.02, "rounds": 300},
    "paper": {"lr": 0.01, "rounds": 300},
    "blind": {"lr": 0.02, "rounds": 300},
    "paper-adam": {"lr": 0.0007, "rounds": 40},
}
"""One rate for each preset. The last is the paper's with what its authors' published code has: Adam, the first
convolution left out and the output layer sketched. Its rounds are few: Adam is stepped for one client at a time."""
AUTHORS: Job = {"optimizer": "Adam", "cover": ("all", "!0.0.weight")}
TITLES = {"paper-adam": "`paper`, as in the authors' code"}


def jobs(quick: bool, folder: Path) -> list[Job]:
    """One run for each preset; in the reduced setting with the embedded digits."""
    if quick:
        fixed: Job = {"data": "digits", "clients": 20, "epochs": 1, "rounds": 8, "every": 1, "lr": 0.01, "seed": 0}
        return [{"preset": preset, **fixed} for preset in RUNS if preset != "paper-adam"]
    fixed = {"data": "cifar10", "clients": 100, "epochs": 5, "every": 5, "seed": 0}
    return [{"preset": preset, **own, **fixed} for preset, own in RUNS.items()]


def play(job: Job, context: Context) -> dict[str, Any]:
    """One run over all its rounds."""
    own = {name: value for name, value in job.items() if name not in ("preset", "every")}
    preset, more = ("paper", AUTHORS) if job["preset"] == "paper-adam" else (job["preset"], {})
    config = presets.preset(preset, model="cifar-cnn", fraction=0.1, batch_size=50, **more, **own)
    return train(config, context, f"{job['preset']}, rate {job['lr']:g}", job["every"])


def table(found: Results) -> str:
    """Accuracy and loss at the end and at their best, by preset."""
    lines = []
    for job in found.jobs:
        runs, title = found.of(preset=job["preset"]), TITLES.get(job["preset"], f"`{job['preset']}`")
        lines.append([title, f"{job['lr']:g}", str(job["rounds"]), *(_facts(runs[0]) if runs else [NOT_RUN] * 6)])
    who = "The embedded digits, 20 clients, one local epoch" if found.quick else "CIFAR-10, 100 clients, 5 local epochs"
    text = (
        f"{who}, 10 % a round, batches of 50, no augmentation. The paper: sketching does not hinder test accuracy, and "
        "marginally improves it; it prints no numbers. Losses are those of W itself."
    )
    heads = ["preset", "rate", "rounds", "accuracy at the end", "best accuracy", "loss at the end", "least loss", "MB"]
    return "\n\n".join([text, markdown([*heads, "refused"], lines)])


def _facts(run: Mapping[str, Any]) -> list[str]:
    """What a run came to; one that diverged has no curve to its end."""
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
    for preset in RUNS:
        for run in found.of(preset=preset):
            colour, name = figures.COLOURS[preset], TITLES.get(preset, preset).replace("`", "")
            losses = [float("nan") if loss is None else loss for loss in run["losses"]]
            left.plot(run["numbers"], losses, color=colour, label=name)
            right.plot(run["numbers"], [100 * score for score in run["accuracies"]], color=colour, label=name)
    figures.label(left, "round", "test loss")
    figures.label(right, "round", "test accuracy, %")
    return {"cifar10": figure}


EXPERIMENT = Experiment(
    name="cifar10",
    title="CIFAR-10: loss and accuracy by round",
    what="CIFAR-10, 100 clients, 10 % a round: test loss and accuracy by round without sketching, with it, and blind.",
    minutes="12 on one H200",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("cifar10",),
)
