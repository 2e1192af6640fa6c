"""`property-inference`: whether a batch of the victim's has a property that is not learned, by either adversary.

The published attacker is a random forest on the update (server) or on the paper's estimate of it (client). The adaptive
ones filter gradients at the very model that the victim received, and a client rewinds the rounds that it saw.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dbcl.simulation import RunConfig, Task, presets
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results, Tell
from experiments.tables import NOT_RUN, markdown
from experiments.training import task_on

if TYPE_CHECKING:
    from dbcl_audit.attacks.victim import Changes
    from dbcl_audit.simulated_run import SimulatedRun

ESTIMATORS = {"plain": ["option I"], "paper": ["option I", "rewind"]}
"""Estimators of a client by preset; without a sketch the difference of two broadcasts is the update itself."""
PUBLISHED = {
    ("client", "random forest on option I"): ("1.0", "0.5"),
    ("server", "random forest on the update itself"): ("1.0", "0.726"),
}
"""By adversary and attack: what the paper prints without and with sketching."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One simulated run for each preset, with all attackers."""
    fixed: ExperimentJob = {"data": "lfw", "model": "lfw-cnn", "lr": 0.01, "rounds": 120, "batch": 32, "own_batches": 6}
    fixed |= {"own_examples": 200, "seed": 0}
    if quick:
        fixed |= {"data": "digits", "model": "mnist-mlp", "rounds": 60, "batch": 16, "own_batches": 2}
        fixed |= {"own_examples": 40}
    return [{"preset": preset, **fixed} for preset in ESTIMATORS]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Simulate a victim whose batches all have the property or all lack it, and tell them apart."""
    config = presets.preset(job["preset"], data=job["data"], model=job["model"], lr=job["lr"])
    task = task_on("cpu", job["data"], job["model"], context.data_dir)
    with tempfile.TemporaryDirectory() as scratch:
        told = infer(job, config, task, ESTIMATORS[job["preset"]], Path(scratch), partial(_tell, context, job))
    facts = {"property": task.property_name, "tested": told.tested, "trained": len(task.train)}
    return {**facts, "scores": told.scores}


class Told(NamedTuple):
    """Result of an attack on the batches' property, with the simulated run and the estimates that it used.

    >>> Told._fields
    ('simulated', 'found', 'tested', 'scores')
    """

    simulated: "SimulatedRun"
    found: "Mapping[str, Changes]"
    tested: int
    scores: list[dict[str, Any]]


def infer(
    job: ExperimentJob,
    config: RunConfig,
    task: Task,
    names: Sequence[str],
    folder: Path,
    tell: Tell,
    clients: int = 2,
) -> Told:
    """Simulate a run of `clients` clients and infer the property of the victim's batches, by the named estimates.

    A job has the `rounds`, the size of a `batch`, the attacker's `own_batches` and `own_examples`, and a `seed`.

    >>> job = {"rounds": 24, "batch": 4, "own_batches": 1, "own_examples": 4, "seed": 0}
    >>> config = presets.preset("plain", model="dlg-lenet")
    >>> told = infer(job, config, task_on("cpu", "digits", "dlg-lenet"), [], Path(tempfile.mkdtemp()), Context().tell)
    >>> sorted({each["adversary"] for each in told.scores})
    ['client', 'server']
    """
    from dbcl_audit.attacks.properties import property_findings  # needs scikit-learn, which is an extra
    from dbcl_audit.attacks.updates import estimates
    from dbcl_audit.effort import FULL
    from dbcl_audit.simulated_run import simulate_batches
    from dbcl_audit.single_steps import property_script

    def step(text: str) -> None:
        tell(text, 0, 1)

    assert task.holds is not None
    own, script = property_script(task, replace(FULL, rounds=job["rounds"], batch=job["batch"]), clients, job["seed"])
    simulated = simulate_batches(
        config, task, script, folder, seed=job["seed"], progress=partial(tell, "simulated run")
    )
    found = estimates(simulated.attacker, names, step)
    findings = property_findings(
        simulated,
        task,
        task.holds,
        own,
        found,
        batches=job["own_batches"],
        examples=job["own_examples"],
        seed=job["seed"],
        tell=step,
    )
    scores = [
        {"attack": each.attack, "adversary": each.adversary, "auc": each.value, "low": each.low, "high": each.high}
        for each in findings
    ]
    return Told(simulated, found, findings[0].budget["tested rounds"], scores)


def _tell(context: Context, job: ExperimentJob, text: str, done: int, total: int) -> None:
    context.tell(f"{job['preset']}: {text}", done, total)


def table(found: Results) -> str:
    """AUCs by adversary and attack, without and with sketching, and the paper's beside them."""
    cells = {preset: _cells(found, preset) for preset in ESTIMATORS}
    lines = []
    for place in sorted({**cells["plain"], **cells["paper"]}, key=_order):
        ours = [_cell(cells[preset], place, found.of(preset=preset)) for preset in ESTIMATORS]
        kind = "published" if place in PUBLISHED else "adaptive" if _adaptive(place) else "published learner"
        lines.append([*place, kind, *ours, *PUBLISHED.get(place, ("", ""))])
    heads = [
        "adversary",
        "attack",
        "attacker",
        "AUC, `plain`",
        "AUC, `paper`",
        "the paper, no sketch",
        "the paper, sketched",
    ]
    runs, first = found.of(), found.jobs[0]
    what = f"{runs[0]['property']}, {runs[0]['tested']} batches of {first['batch']}" if runs else ""
    text = (
        f"AUC of telling whether a batch of the victim's has the property ({what}), with a 95 % bootstrap interval; "
        f"two clients, {first['rounds']} rounds of one SGD step of rate {first['lr']}, half of the examples the "
        "attacker's. Scaled: the paper attacks iterations 1,000 to 20,000, with 190,000 gradients of its own to learn "
        f"from and 19,000 to test; here it is the first rounds, with {2 * first['own_batches']} gradients of batches "
        f"of its own for each tested round and, for the filters, those of {2 * first['own_examples']} single examples. "
        "A fifth of the paper's test batches have the property, half of ours, which does not change what an AUC is. "
        "The last third of the rounds is not tested: rewind goes back through it."
    )
    return "\n\n".join([text, markdown(heads, lines)])


def _cells(found: Results, preset: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["adversary"], each["attack"]): each for run in found.of(preset=preset) for each in run["scores"]}


def _cell(cells: Mapping[tuple[str, str], Mapping[str, Any]], place: tuple[str, str], runs: list[Any]) -> str:
    if place in cells:
        each = cells[place]
        return f"{each['auc']:.3f} ({each['low']:.2f} to {each['high']:.2f})"
    return "" if runs else NOT_RUN  # rewind has no place where nothing is sketched


def _adaptive(place: tuple[str, str]) -> bool:
    """Return whether an attack knows the sketch, by its learner or by its estimate; reading plain tensors takes
    neither.
    """
    return "filter" in place[1] or "rewind" in place[1]


def _order(place: tuple[str, str]) -> tuple[bool, str, bool, str]:
    """The paper's own attacks first, then by adversary."""
    adversary, attack = place
    return place not in PUBLISHED, adversary, "forest" not in attack, attack


def draw(found: Results) -> Mapping[str, Any]:
    """A line for each adversary and attack: AUC and interval of both presets, and the paper's numbers as crosses."""
    cells = {preset: _cells(found, preset) for preset in ESTIMATORS}
    places = sorted({**cells["plain"], **cells["paper"]}, key=_order)[::-1]
    figure, panels = figures.new(9, 1.2 + 0.36 * len(places))
    axes = panels[0, 0]
    axes.axvline(0.5, color=figures.MORE[-1], linestyle=":", linewidth=1)
    for side, (preset, shift) in enumerate((("plain", 0.12), ("paper", -0.12))):
        shown = [(y, cells[preset][place]) for y, place in enumerate(places) if place in cells[preset]]
        heights, values = [y + shift for y, _ in shown], [each["auc"] for _, each in shown]
        errors = [[each["auc"] - each["low"] for _, each in shown], [each["high"] - each["auc"] for _, each in shown]]
        colour = figures.COLOURS[preset]
        axes.errorbar(values, heights, xerr=errors, fmt="o", color=colour, markersize=5, capsize=2, label=preset)
        printed = [(float(PUBLISHED[p][side]), y + shift) for y, p in enumerate(places) if p in PUBLISHED]
        axes.plot(*zip(*printed, strict=True), "x", color=colour, markersize=9, label=f"{preset}, the paper's number")
    axes.set_yticks(range(len(places)), [f"{adversary}: {attack}" for adversary, attack in places], fontsize=8)
    figures.label(axes, "AUC; 0.5 is guessing", "")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return {"property-inference": figure}


EXPERIMENT = Experiment(
    name="property-inference",
    title="Property inference, with and without sketching",
    what="LFW, gender between two clients: is a property in the other's batch? By forest and by adaptive filters.",
    minutes="20 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("lfw",),
    extras={"scipy": "audit", "sklearn": "audit"},
)
