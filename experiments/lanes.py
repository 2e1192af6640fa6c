"""`lanes`: one sketch for all clients against two lanes, for one client and for clients of both lanes together."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dbcl.engines.stacked.engine import one_thread
from dbcl.simulation import RunConfig, task_of
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown

FIRST_LAYER = "1.weight"
VEILS, LANES = (0.0, 0.2), (1, 2)
MIN_LATER_ROUNDS = 40
"""Observed rounds that must follow a round for its estimate to count."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Return the cases: attacks by veil, lanes, parties and seed."""
    if quick:
        return [_job("updates", 0.0, lanes, 2, False, 0, rounds=50) for lanes in LANES]
    return list(_jobs())


def _job(part: str, veil: float, lanes: int, parties: int, together: bool, seed: int, **more: Any) -> ExperimentJob:
    own = {"part": part, "veil": veil, "lanes": lanes, "parties": parties, "together": together, "seed": seed}
    return {**own, "model": "mnist-mlp", **more}


def _jobs() -> Iterator[ExperimentJob]:
    for veil in VEILS:
        for lanes in LANES:
            for seed in (0, 1):
                for parties in (2, 4, 10):
                    yield _job("updates", veil, lanes, parties, False, seed)
                for parties in (4, 10) if lanes == 2 else ():
                    yield _job("updates", veil, lanes, parties, True, seed)
                yield _job("properties", veil, lanes, 2, False, seed)
                if lanes == 2:
                    yield _job("properties", veil, lanes, 4, True, seed)
            for model in ("mnist-mlp", "dlg-lenet"):
                yield _job("images", veil, lanes, 2, False, 0, model=model)


def config_of(job: ExperimentJob) -> RunConfig:
    """Return the settings of a case, each by its name, so that presets may change."""
    return RunConfig.from_options(
        data="digits", model=job["model"], coverage="hidden", sketch="count-v1", ratio=2.0, lanes=job["lanes"],
        veil=job["veil"], lr=0.1 if job["model"] == "dlg-lenet" else 0.01, seed=job["seed"],
    )  # fmt: skip


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Simulate a run and attack it."""
    context.tell(f"{job['part']}, {row_of(job)}, {column_of(job)}, seed {job['seed']}", 0, 1)
    with tempfile.TemporaryDirectory() as scratch, one_thread(True):
        found = {"updates": _updates, "properties": _properties, "images": _images}[job["part"]](job, Path(scratch))
    return {name: round(value, 3) for name, value in found.items()}


def _updates(job: ExperimentJob, scratch: Path) -> dict[str, float]:
    from dbcl_audit.effort import FULL
    from dbcl_audit.estimators.observations import tensor_observations
    from dbcl_audit.estimators.smoother import known_scales, smoother
    from dbcl_audit.scoring import score
    from dbcl_audit.simulated_run import colluders_of, simulate_batches
    from dbcl_audit.single_steps import property_script

    config = config_of(job)
    task, effort = task_of(config), replace(FULL, rounds=job.get("rounds", 90), batch=32)
    _, script = property_script(task, effort, job["parties"], job["seed"])
    colluders = colluders_of(job["lanes"]) if job["together"] else ()
    run = simulate_batches(config, task, script, scratch, seed=job["seed"], colluders=colluders)
    seen = tensor_observations(run.attacker, [FIRST_LAYER], allies=run.allies)[FIRST_LAYER]
    scores = score(run.truth, seen, smoother(seen, known_scales(seen, job["veil"])))
    return {"cosine": scores.median_cosine(MIN_LATER_ROUNDS)}


def _properties(job: ExperimentJob, scratch: Path) -> dict[str, float]:
    from dbcl_audit.attacks.properties import property_findings
    from dbcl_audit.attacks.updates import estimates
    from dbcl_audit.effort import QUICK
    from dbcl_audit.simulated_run import colluders_of, simulate_batches
    from dbcl_audit.single_steps import property_script

    config = config_of(job)
    task = task_of(config)
    own, script = property_script(task, QUICK, job["parties"], job["seed"])
    colluders = colluders_of(job["lanes"]) if job["together"] else ()
    run = simulate_batches(config, task, script, scratch, seed=job["seed"], colluders=colluders)
    assert task.holds is not None
    findings = property_findings(
        run, task, task.holds, own, estimates(run.attacker, ["smoother"], allies=run.allies),
        batches=QUICK.own_batches, examples=QUICK.own_examples, seed=job["seed"], tell=lambda text: None,
    )  # fmt: skip
    return {"auc": max(each.value for each in findings if each.attack.endswith("on smoother"))}


def _images(job: ExperimentJob, scratch: Path) -> dict[str, float]:
    from dbcl_audit.attacks.images import image_findings
    from dbcl_audit.attacks.matching import Matching
    from dbcl_audit.attacks.updates import estimates
    from dbcl_audit.simulated_run import draw_batches, simulate_batches

    config = config_of(job)
    task = task_of(config)
    assert task.pictures is not None
    script = draw_batches(np.arange(len(task.pictures.y_train)), (56, 2, 1), job["seed"] + 17)
    run = simulate_batches(config, task, script, scratch, seed=job["seed"])
    settings = Matching(steps=600, restarts=1, tv=1e-3 if job["veil"] else 0.0)
    seen = estimates(run.attacker, ["smoother"])
    findings = image_findings(run, task.pictures, seen, [4, 5, 6, 7], settings, tell=lambda text: None)
    own = [each for each in findings if each.measure == "psnr" and each.adversary == "client"]
    guessing = next(each.chance for each in own if each.chance is not None)
    return {**{each.attack: each.value for each in own}, "guessing": guessing}


def row_of(job: ExperimentJob) -> str:
    """Name the row of a case.

    >>> row_of(_job("updates", 0.2, 2, 4, True, 0))
    'veil 0.2, 4 parties, one of each lane together'
    """
    who = "one of each lane together" if job["together"] else "one client"
    return f"veil {job['veil']:g}, {job['parties']} parties, {who}"


def column_of(job: ExperimentJob) -> str:
    """Name the column of a case."""
    return "one sketch" if job["lanes"] == 1 else f"{job['lanes']} lanes"


def table(found: Results) -> str:
    """Return a table for each part: one sketch and two lanes side by side."""
    parts = [
        "The embedded digits, ratio 2, hidden layers sketched; every client takes one step of SGD a round. A cosine is "
        f"the median over rounds with {MIN_LATER_ROUNDS} or more after them, of the smoother on the first layer (784 "
        "inputs), in 90 rounds of 32 examples; an AUC the highest of the detectors on the smoother (40 rounds of 16 "
        "examples); each for every seed. Images are four of one example each, in decibels."
    ]
    for part in dict.fromkeys(job["part"] for job in found.jobs):
        own = found.jobs_of(part=part)
        lines = []
        for row in dict.fromkeys((row_of(job), job["model"]) for job in own):
            cells = [_cell(found, [job for job in own if (row_of(job), job["model"]) == row and job["lanes"] == lanes])
                     for lanes in LANES]  # fmt: skip
            lines.append([f"{row[0]}, {row[1]}" if part == "images" else row[0], *cells])
        parts += [f"## {part}", markdown(["", "one sketch", "2 lanes"], lines)]
    return "\n\n".join(parts)


def _cell(found: Results, jobs: list[ExperimentJob]) -> str:
    runs = [run for job in jobs for run in found.of(**job)]
    if not runs:
        return NOT_RUN if jobs else ""
    names = dict.fromkeys(name for run in runs for name in run)
    text = {name: ", ".join(f"{run[name]:.3g}" for run in runs if name in run) for name in names}
    return text[next(iter(names))] if len(names) == 1 else "; ".join(f"{name} {each}" for name, each in text.items())


def draw(found: Results) -> Mapping[str, Any]:
    """Draw the cosines by the number of parties, without a veil and with one."""
    figure, panels = figures.new(9, 3.4, 1, len(VEILS))
    looks = (
        ("one sketch", 1, False),
        ("two lanes, one client", 2, False),
        ("two lanes, one of each together", 2, True),
    )
    for axes, veil in zip(panels[0], VEILS, strict=True):
        for (label, lanes, together), colour in zip(looks, figures.MORE, strict=False):
            own = found.jobs_of(part="updates", veil=veil, lanes=lanes, together=together)
            points = [(job["parties"], run["cosine"]) for job in own for run in found.of(**job)]
            axes.plot([x for x, _ in points], [y for _, y in points], "o", color=colour, label=label)
        figures.label(axes, "parties", "cosine with the others' update", f"veil {veil:g}")
    return {"lanes": figure}


EXPERIMENT = Experiment(
    name="lanes",
    title="Lanes, for one client and for colluders",
    what="One sketch for all clients against two complementary lanes: updates, properties and images, for one client "
    "and for one of each lane together.",
    minutes="about 25 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"scipy": "audit", "sklearn": "audit"},
)
