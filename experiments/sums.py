"""`sums`: what the server gets of one client from sums of 1 to 32 updates, as under secure aggregation."""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dbcl.engines.stacked.engine import one_thread
from dbcl.simulation import RunConfig, task_of
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown

if TYPE_CHECKING:
    from dbcl_audit.simulated_run import SimulatedRun

SIZES = (1, 2, 4, 8, 16, 32)
SEEDS = {"images": (0,), "properties": (0, 1, 2)}
CLIP = 4.0
"""Public bound on the norm of an update in a sum."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Return a job for each size of a sum, target and seed."""
    if quick:
        return [{"part": "images", "size": size, "seed": 0, "steps": 100} for size in (1, 8)]
    return [{"part": part, "size": size, "seed": seed} for part in SEEDS for seed in SEEDS[part] for size in SIZES]


def config_of(job: ExperimentJob) -> RunConfig:
    """Return the settings of a run, each by its name, so that presets may change."""
    images = job["part"] == "images"
    return RunConfig.from_options(
        data="digits", model="dlg-lenet" if images else "mnist-mlp", coverage="hidden", sketch="count-v1", ratio=2.0,
        lanes=1, veil=0.2, lr=0.1 if images else 0.01, seed=job["seed"],
    )  # fmt: skip


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Attack the sums of a run as the server."""
    context.tell(f"{job['part']}, {job['size']} in a sum, seed {job['seed']}", 0, 1)
    with tempfile.TemporaryDirectory() as scratch, one_thread(True):
        found = (_images if job["part"] == "images" else _properties)(job, Path(scratch))
    return {name: round(value, 3) for name, value in found.items()}


def _summed(run: "SimulatedRun", size: int) -> "SimulatedRun":
    """Return the run as a server has it that sees the sum of all its clients."""
    return run if size == 1 else replace(run, bound=CLIP)


def _images(job: ExperimentJob, scratch: Path) -> dict[str, float]:
    from dbcl_audit.attacks.images import image_findings
    from dbcl_audit.attacks.matching import Matching
    from dbcl_audit.simulated_run import draw_batches, simulate_batches

    config, size, seed = config_of(job), job["size"], job["seed"]
    task = task_of(config)
    assert task.pictures is not None
    script = draw_batches(np.arange(len(task.pictures.y_train)), (6, max(2, size), 1), seed + 17)
    run = _summed(simulate_batches(config, task, script, scratch, seed=seed), size)
    settings = Matching(steps=job.get("steps", 1200 if size <= 8 else 300), restarts=1)
    findings = image_findings(run, task.pictures, {}, [1, 2, 3, 4], settings, tell=lambda text: None)
    best = max((each for each in findings if each.measure == "psnr"), key=lambda each: each.value)
    assert best.chance is not None
    return {"decibels": best.value, "best image": best.high or best.value, "the mean image": best.chance}


def _properties(job: ExperimentJob, scratch: Path) -> dict[str, float]:
    from dbcl_audit.attacks.properties import property_findings
    from dbcl_audit.effort import QUICK
    from dbcl_audit.simulated_run import simulate_batches
    from dbcl_audit.single_steps import property_script

    config, size, seed = config_of(job), job["size"], job["seed"]
    task = task_of(config)
    own, script = property_script(task, QUICK, max(2, size), seed)
    run = _summed(simulate_batches(config, task, script, scratch, seed=seed), size)
    assert task.holds is not None
    findings = property_findings(
        run, task, task.holds, own, {}, batches=QUICK.own_batches, examples=QUICK.own_examples, seed=seed,
        tell=lambda text: None,
    )  # fmt: skip
    return {"AUC": max(each.value for each in findings if each.adversary == "server")}


def table(found: Results) -> str:
    """Return the attacks' success by the number of clients in a sum."""
    lines = []
    for size in dict.fromkeys(job["size"] for job in found.jobs):
        images, properties = (found.of(part=part, size=size) for part in ("images", "properties"))
        cells = [
            f"{images[0][name]:.1f}" if images else NOT_RUN for name in ("decibels", "best image", "the mean image")
        ]
        lines.append([size, *cells, ", ".join(f"{run['AUC']:.2f}" for run in properties) or NOT_RUN])
    text = (
        "The embedded digits, one sketch of ratio 2, one lane, veil 0.2; every client takes one step a round, on "
        "one image (dlg-lenet) or on 16 (mnist-mlp). The server holds W and the sketch. A sum is that of secure "
        f"aggregation: updates clipped to {CLIP:g}, rounded to 16 bits, added. Images are matched through the sketch, "
        "as many at once as are in the sum, and paired with the true ones: the median of four of the victim's, in "
        "decibels. An AUC is the highest of the detectors of the server, for each seed; guessing has 0.5."
    )
    heads = ["clients in a sum", "image, dB", "best image, dB", "the mean image, dB", "property AUC"]
    return "\n\n".join([text, markdown(heads, lines)])


def draw(found: Results) -> Mapping[str, Any]:
    """Draw decibels and AUCs by the number of clients in a sum."""
    figure, panels = figures.new(9, 3.4, 1, 2)
    for axes, (part, name, label) in zip(
        panels[0], (("images", "decibels", "PSNR, dB"), ("properties", "AUC", "property AUC")), strict=True
    ):
        points = [(size, [run[name] for run in found.of(part=part, size=size)]) for size in SIZES]
        points = [(size, values) for size, values in points if values]
        middle = [statistics.median(values) for _, values in points]
        axes.plot([size for size, _ in points], middle, "o-", color=figures.MORE[0])
        figures.log_scale(axes, "x", base=2)
        figures.label(axes, "clients in a sum", label)
    return {"sums": figure}


EXPERIMENT = Experiment(
    name="sums",
    title="Sums of updates, as the server sees them",
    what="Images and properties of one client, as the server gets them from sums of 1 to 32 updates, as under secure "
    "aggregation.",
    minutes="about 10 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"scipy": "audit", "sklearn": "audit"},
)
