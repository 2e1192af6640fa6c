"""`veil`: what attackers that take one round at a time get, and what training costs, against the size of the veil."""

import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dbcl import data
from dbcl.simulation import presets
from dbcl.simulation.plots import INK
from dbcl.simulation.task import of_pictures
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.gradient_matching import LATER, target
from experiments.property_inference import infer
from experiments.tables import NOT_RUN, markdown
from experiments.training import task_on, train

VEILS, QUICK_VEILS = (0.0, 0.05, 0.2, 0.5), (0.0, 0.2)
"""Relative to the weights."""
SMOOTHERS = ("smoother", "shaped smoother")
"""Estimates of the one other client's update."""
LEARNERS = ("matched filter", "random forest")
"""Learners that infer a property of a batch from an estimate of its update."""
LAYER = "1.weight"
"""Cosines are of the first layer's update."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """For each size the attacks with two and with ten clients, the pictures, and a run."""
    attacked: ExperimentJob = {"rounds": 120, "batch": 32, "own_batches": 3, "own_examples": 100}
    pictured: ExperimentJob = {"pictures": 3, "steps": 600}
    if quick:
        attacked |= {"rounds": 40, "batch": 16, "own_batches": 1, "own_examples": 20}
        pictured = {"pictures": 1, "steps": 100}
    found: list[ExperimentJob] = []
    for veil in QUICK_VEILS if quick else VEILS:
        found += [{"veil": veil, "part": "updates", "clients": clients, **attacked, "seed": 0} for clients in (2, 10)]
        found += [{"veil": veil, "part": "pictures", **pictured, "seed": 0}]
        found += [{"veil": veil, "part": "accuracy", "rounds": 20 if quick else 200, "seed": 0}]
    return found


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """One part of the table, for one size of the veil."""
    if job["part"] == "accuracy":
        config = presets.preset("paper", veil=job["veil"], rounds=job["rounds"], seed=job["seed"])
        return {"accuracy": train(config, context, _name(job))["accuracy"]}
    with tempfile.TemporaryDirectory() as scratch:
        return (_pictures if job["part"] == "pictures" else _updates)(job, context, Path(scratch))


def _updates(job: ExperimentJob, context: Context, folder: Path) -> dict[str, Any]:
    """A property of the victim's batches and, where there is one other client, the cosine with its update."""
    from dbcl_audit.estimators.observations import tensor_observations  # needs SciPy, which is an extra
    from dbcl_audit.scoring import predicted_cosine, score

    config = presets.preset("paper", lr=0.01, veil=job["veil"])
    names = SMOOTHERS if job["clients"] == 2 else SMOOTHERS[:1]
    task = task_on("cpu", "digits", config.model)
    told = infer(job, config, task, names, folder, partial(_tell, context, job), job["clients"])
    if job["clients"] > 2:
        return {"scores": told.scores}
    view, truth = tensor_observations(told.simulated.attacker)[LAYER], told.simulated.truth
    cosines = {name: score(truth, view, told.found[name][LAYER]).median_cosine(job["rounds"] // 3) for name in names}
    cosines["formula"] = predicted_cosine(truth, view, job["veil"])
    return {"scores": told.scores, "cosines": {name: round(value, 4) for name, value in cosines.items()}}


def _pictures(job: ExperimentJob, context: Context, folder: Path) -> dict[str, Any]:
    """A victim's single images as a client, by gradient matching on an estimate of its update."""
    from dbcl_audit import image_quality as quality
    from dbcl_audit.attacks.matching import Matching, recover
    from dbcl_audit.simulated_run import draw_batches, simulate_batches

    config = presets.preset("paper", model="dlg-lenet", lr=0.1, veil=job["veil"])
    dataset, noisy = data.load("digits"), job["veil"] > 0
    script = draw_batches(np.arange(len(dataset.y_train)), (LATER + job["pictures"], 2, 1), job["seed"] + 5)
    simulated = simulate_batches(config, of_pictures(config, dataset), script, folder, seed=job["seed"])
    box = quality.span(dataset)
    # A prior helps where the gradient is noisy, and stays to the end; without noise several starts do.
    tricks: dict[str, Any] = {"tv": 0.1, "anneal_tv": False, "restarts": 1} if noisy else {"restarts": 3}
    settings, values = Matching(steps=job["steps"], box=box, **tricks), list[float]()
    for number in range(job["pictures"]):
        model, gradient = target(simulated, "client", "adaptive", number, "smoother" if noisy else "rewind")
        rebuilt = recover(model, gradient, dataset.shape, None, 1, settings, seed=number)
        truth = dataset.x_train[script[number, 1]].double()
        values.append(round(float(quality.psnr(rebuilt.images, truth, box)[0]), 2))
        _tell(context, job, "matching", number + 1, job["pictures"])
    return {"psnr": values}


def table(found: Results) -> str:
    """A line for each size of the veil."""
    lines = [
        [f"{veil:g}", *_cosines(found, veil), _psnr(found, veil), _told(found, veil, 2), _told(found, veil, 10),
         _accuracy(found, veil)]
        for veil in _veils(found)
    ]  # fmt: skip
    heads = ["veil", "smoother's cosine", "formula", "shaped smoother's", "client's picture, dB"]
    heads += ["property AUC, 2 clients: filter / forest", "10 clients"]
    heads += [f"accuracy after {found.jobs_of(part='accuracy')[0]['rounds']} rounds"]
    text = (
        "The embedded digits, preset `paper` with a veil of a size relative to the weights: the paper's cover and "
        "ratio, one sketch for all, the MLP 784-200-200-10 (pictures: DLG's network). Attackers are clients that take "
        "one round at a time; those that take all rounds together are in `frontier`. Cosines are of the first layer "
        "with the one other client's update, medians over the first two thirds of the rounds, which have enough after "
        "them; the formula is 1/(1 + 4 kappa^2)^(1/4), with kappa the veil relative to the update. A picture is the "
        "victim's batch of one round, the median of several and each; about 13 dB is what the mean picture of a class "
        "has. AUCs are the highest that any filter or forest of the client has. The paper has no veil."
    )
    return "\n\n".join([text, markdown(heads, lines)])


def _veils(found: Results) -> list[float]:
    return sorted({job["veil"] for job in found.jobs})


def _cosines(found: Results, veil: float) -> list[str]:
    for run in found.of(veil=veil, part="updates", clients=2):
        return [f"{run['cosines'][name]:.2f}" for name in ("smoother", "formula", "shaped smoother")]
    return [NOT_RUN] * 3


def _psnr(found: Results, veil: float) -> str:
    for run in found.of(veil=veil, part="pictures"):
        return f"{statistics.median(run['psnr']):.1f} ({', '.join(f'{value:.1f}' for value in run['psnr'])})"
    return NOT_RUN


def _told(found: Results, veil: float, clients: int) -> str:
    for run in found.of(veil=veil, part="updates", clients=clients):
        return " / ".join(f"{best(run, learner):.2f}" for learner in LEARNERS)
    return NOT_RUN


def _accuracy(found: Results, veil: float) -> str:
    return next((f"{run['accuracy']:.1%}" for run in found.of(veil=veil, part="accuracy")), NOT_RUN)


def best(run: Mapping[str, Any], learner: str) -> float:
    """The highest AUC of a learner of the client, whatever it was given.

    >>> forest = {"attack": "random forest on the smoother's estimate", "adversary": "client", "auc": 0.6}
    >>> best({"scores": [forest, {**forest, "adversary": "server", "auc": 1.0}]}, "random forest")
    0.6
    """
    scores = [each["auc"] for each in run["scores"] if learner in each["attack"] and each["adversary"] == "client"]
    return float(max(scores))


def draw(found: Results) -> Mapping[str, Any]:
    """Cosines against the size of the veil, and beside them AUCs and accuracy."""
    figure, panels = figures.new(10, 4, 1, 2)
    left, right = panels[0]
    pairs = [(veil, run) for veil in _veils(found) for run in found.of(veil=veil, part="updates", clients=2)]
    for (name, style), colour in zip(
        (*((each, "o-") for each in SMOOTHERS), ("formula", "o:")), figures.MORE, strict=False
    ):
        points = [run["cosines"][name] for _, run in pairs]
        left.plot([veil for veil, _ in pairs], points, style, color=colour, label=name)
    left.set_ylim(0, 1.03)
    for clients, colour in zip((2, 10), figures.MORE, strict=False):
        pairs = [(veil, run) for veil in _veils(found) for run in found.of(veil=veil, part="updates", clients=clients)]
        for learner, style in zip(LEARNERS, ("o-", "o:"), strict=True):
            points = [best(run, learner) for _, run in pairs]
            right.plot([veil for veil, _ in pairs], points, style, color=colour, label=f"{learner}, {clients} clients")
    runs = [(veil, run["accuracy"]) for veil in _veils(found) for run in found.of(veil=veil, part="accuracy")]
    right.plot([veil for veil, _ in runs], [score for _, score in runs], ".-", color=INK, label="accuracy")
    right.set_ylim(0.4, 1.03)
    figures.label(left, "veil, relative to the weights", "cosine with the other's update, first layer")
    figures.label(right, "veil, relative to the weights", "AUC of a property; accuracy")
    right.get_legend().set_loc("center right")
    return {"veil": figure}


def _name(job: ExperimentJob) -> str:
    whose = f", {job['clients']} clients" if "clients" in job else ""
    return f"veil {job['veil']:g}, {job['part']}{whose}"


def _tell(context: Context, job: ExperimentJob, text: str, done: int, total: int) -> None:
    context.tell(f"{_name(job)}: {text}", done, total)


EXPERIMENT = Experiment(
    name="veil",
    title="What leaks against the size of the veil",
    what="Cosines, pictures, properties and accuracy against the size of the veil; attackers of one round at a time.",
    minutes="12 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"scipy": "audit", "sklearn": "audit"},
)
