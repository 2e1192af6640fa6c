"""`lfw-roc`: gender on LFW by distributed SGD between two clients; ROC curves with and without sketching."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dbcl import data
from dbcl.data import Dataset
from dbcl.protocol import Server
from dbcl.simulation import RunConfig, Task, presets
from dbcl.simulation.build import build_engine, build_run_server, new_seed
from dbcl.simulation.task import of_pictures
from dbcl_audit.attacks.roc import measure_auc, roc
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown

PRESETS = ("plain", "paper", "blind")
POINTS = 200
"""Number of points of a curve that a row keeps."""


LONG = 20_000
"""The paper's number of steps, where it attacks this very training; it names none for its figure."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One run for each preset, and a longer one of the paper's; reduced, zeros and ones against the other digits."""
    fixed: ExperimentJob = {"data": "lfw", "rounds": 8000, "lr": 0.01, "batch_size": 32, "seed": 0}
    if quick:
        fixed |= {"data": "digits", "rounds": 80}
    found = [{"preset": preset, **fixed} for preset in PRESETS]
    return found if quick else [*found, {"preset": "paper", **fixed, "rounds": LONG}]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train one step a round, and score the held-out pictures with W itself."""
    own = {name: value for name, value in job.items() if name != "preset"}
    config = presets.preset(
        job["preset"], model="lfw-cnn", clients=2, fraction=1.0, algorithm="sgd", device=context.device, **own
    )
    task = _task(config, context)
    seed = new_seed(config)
    server = build_run_server(config, task, seed=seed)
    engine = build_engine(config, task, server, seed=seed)
    every, numbers, areas = max(1, job["rounds"] // 10), list[int](), list[float]()
    for number in range(1, job["rounds"] + 1):
        engine.play_round()
        if number % every == 0:
            numbers.append(number)
            areas.append(round(area(*roc(*_scores(server, task))), 5))
        context.tell(f"{job['preset']}: step {number} of {job['rounds']}", number, job["rounds"])
    scores, truth = _scores(server, task)
    found = measure_auc(scores, truth, seed=0)
    kept = np.unique(np.linspace(0, len(found.roc[0]) - 1, POINTS).astype(int))
    return {
        "auc": round(found.auc, 5),
        "low": round(found.low, 5),
        "high": round(found.high, 5),
        "positives": int(truth.sum()),
        "negatives": int((~truth).sum()),
        "numbers": numbers,
        "areas": areas,
        "false": [round(found.roc[0][place], 5) for place in kept],
        "true": [round(found.roc[1][place], 5) for place in kept],
    }


def area(false: Sequence[float], true: Sequence[float]) -> float:
    """The area under a ROC curve, of its false and true positive rates.

    >>> area([0.0, 0.5, 1.0], [0.0, 1.0, 1.0])
    0.75
    """
    return float((np.diff(false) * (np.add(true[1:], true[:-1]) / 2)).sum())


def _task(config: RunConfig, context: Context) -> Task:
    dataset = data.load(config.data, context.data_dir)
    if config.data == "digits":
        dataset = _zeros_and_ones(dataset)
    task, where = of_pictures(config, dataset), torch.device(context.device)
    return replace(task, train=task.train.to(where), held_out=task.held_out.to(where))


def _zeros_and_ones(digits: Dataset) -> Dataset:
    """A yes-or-no task with a fifth of yes, about as uneven as gender in LFW."""
    labels = [(each < 2).long() for each in (digits.y_train, digits.y_test)]
    return replace(digits, y_train=labels[0], y_test=labels[1], outputs=1)


@torch.no_grad()
def _scores(server: Server, task: Task) -> tuple[Any, Any]:
    """The logits of the held-out examples, and which of them are of class 1."""
    model = server.released.eval()
    batches = np.array_split(np.arange(len(task.held_out)), max(1, len(task.held_out) // 500))
    taken = [task.held_out.take(rows) for rows in batches]
    scores = torch.cat([model(batch.inputs)[:, 0] for batch in taken]).double().cpu().numpy()
    return scores, torch.cat([batch.targets for batch in taken]).cpu().numpy() == 1


def table(found: Results) -> str:
    """The area under each curve."""
    lines = []
    for job in found.jobs:
        cells = [NOT_RUN, NOT_RUN]
        for run in found.of(**job):
            middle = len(run["areas"]) // 2 - 1
            cells = [f"{run['auc']:.4f} ({run['low']:.4f} to {run['high']:.4f})", f"{run['areas'][middle]:.4f}"]
        lines.append([f"`{job['preset']}`", f"{job['rounds']:,}", *cells])
    what = "zeros and ones against the other embedded digits" if found.quick else "gender on LFW"
    runs = found.of()
    cases = f", {runs[0]['positives']} positives and {runs[0]['negatives']} negatives held out" if runs else ""
    first = found.jobs[0]
    text = (
        f"Area under the ROC curve: {what}{cases}, the paper's CNN, two clients, distributed SGD, rate {first['lr']}, "
        f"batches of {first['batch_size']}; in brackets a 95 % bootstrap interval. The paper: the two curves are "
        "almost the same; it prints neither areas nor the number of steps."
    )
    return "\n\n".join([text, markdown(["preset", "steps", "AUC", "AUC after half of the steps"], lines)])


def draw(found: Results) -> Mapping[str, Any]:
    """ROC curves at the end, and their areas by step."""
    figure, panels = figures.new(10, 4, 1, 2)
    left, right = panels[0]
    left.plot([0, 1], [0, 1], ":", color=figures.MORE[-1])
    for job in found.jobs:
        for run in found.of(**job):
            colour, style = figures.COLOURS[job["preset"]], "--" if job["rounds"] == LONG else "-"
            name = f"{job['preset']}, {job['rounds']:,} steps"
            left.plot(run["false"], run["true"], style, color=colour, label=f"{name}: area {run['auc']:.4f}")
            right.plot(run["numbers"], run["areas"], style, color=colour, label=name)
    figures.label(left, "false positive rate", "true positive rate")
    figures.label(right, "step", "area under the curve")
    return {"lfw-roc": figure}


EXPERIMENT = Experiment(
    name="lfw-roc",
    title="Gender on LFW: ROC with and without sketching",
    what="LFW, gender by the paper's CNN, distributed SGD between two clients: ROC curves with and without sketching.",
    minutes="about 150 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("lfw",),
)
