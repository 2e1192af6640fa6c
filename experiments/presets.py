"""`presets`: every preset against every attack of every adversary, beside its accuracy and its bytes."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dbcl.simulation import Run, preset
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown

Row = Mapping[str, Any]

PRESETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paper": {},
    "veil": {},
    "blind": {},
    "blind, secure aggregation": {"fraction": 0.2, "secure_aggregation": True},
    "private": {},
    "private-example": {},
}
"""Changed settings of each column."""
MEASURES = ("cosine", "psnr", "accuracy", "auc", "tpr at 0.1 % fpr", "epsilon")
ADVERSARIES = ("client", "colluders", "server", "anyone")
FIELDS = (
    "simulated_run", "attack", "adversary", "attacker", "target", "measure", "value", "low", "high", "chance", "note",
)  # fmt: skip
LEAK_RANK = 4
"""Rank of a rating from which on a cell is printed in bold."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Return a run for each preset; the reduced setting has one short run and a small audit."""
    if quick:
        return [{"preset": "plain", "rounds": 20, "seed": 0}]
    return [{"preset": name, "seed": 0} for name in PRESETS]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train for the rounds of the preset, and audit the run."""
    from dbcl_audit.audit import audit
    from dbcl_audit.effort import QUICK

    effort = replace(QUICK, run_rounds=60, whole_cohort=True, fixed_images=3, fixed_rounds=60, all_rounds=100)
    own = dict(PRESETS[job["preset"]])
    if "rounds" in job:
        own["rounds"] = job["rounds"]
        effort = replace(QUICK, images=1, steps=50, run_rounds=10, all_rounds=10, fixed_images=1, fixed_rounds=10)
    config = preset(job["preset"].partition(",")[0], seed=job["seed"], **own)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run.start(config, Path(scratch) / "run")
        for metrics in run.play():
            context.tell(f"{job['preset']}: round {metrics.round}", metrics.round, config.rounds)
        found = audit(run.folder, effort=effort, tell=lambda text: context.tell(f"{job['preset']}: {text}", 0, 0))
    findings = json.loads(found.json())["findings"]
    kept = [{name: each[name] for name in FIELDS} | {"failures": each["failures"]} for each in findings]
    return {"run": dict(found.run), "findings": kept}


def _worst(found: Results) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Return the worst finding of each preset by simulated run, adversary, target and measure."""
    from dbcl_audit.findings import Finding
    from dbcl_audit.report.rating import severity

    cells: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for row in found.rows:
        for each in row["result"]["findings"]:
            if each["measure"] not in MEASURES or each["value"] is None:
                continue
            finding = Finding(**{name: each[name] for name in FIELDS})
            key = short(finding.simulated_run), each["adversary"], each["target"], each["measure"]
            line = cells.setdefault(key, {})
            name = row["job"]["preset"]
            if name not in line or severity(finding) > severity(line[name]):
                line[name] = finding
    return cells


def short(simulated_run: str) -> str:
    """Name a simulated run without the numbers in which presets differ.

    >>> short("2 parties, single steps on fresh batches")
    'few parties, single steps'
    """
    if simulated_run.startswith("as the run is"):
        return "as the run is"
    if "all in every round" in simulated_run:
        return "a cohort, fixed shards"
    for words, name in {
        "fixed shards": "few parties, fixed shards",
        "single steps": "few parties, single steps",
        "one image": "two parties, one image",
    }.items():
        if words in simulated_run:
            return name
    return simulated_run


def table(found: Results) -> str:
    """Return the costs of the presets, then the worst adaptive attack by simulated run, adversary and measure."""
    names = list(dict.fromkeys(job["preset"] for job in found.jobs))
    runs = {name: found.of(preset=name) for name in names}
    costs: dict[str, Callable[[Row], str]] = {
        "accuracy": lambda run: f"{run.get('accuracy', float('nan')):.1%}",
        "rounds": lambda run: str(run.get("rounds")),
        "MB sent": lambda run: f"{run.get('bytes', 0) / 1e6:.0f}",
    }
    head = [
        [label, *(text(each[0]["run"]) if each else NOT_RUN for each in runs.values())] for label, text in costs.items()
    ]
    cells = _worst(found)
    lines = []
    for key in sorted(cells, key=lambda key: (ADVERSARIES.index(key[1]), key[2], key[3], key[0])):
        where, adversary, target, measure = key
        chance = next((each.chance for each in cells[key].values() if each.chance is not None), None)
        guess = "–" if chance is None or measure == "cosine" else f"{chance:.2f}"
        place = where or ("all clients, and canaries" if target == "guarantee" else "the finished model")
        own = [_cell(cells[key][name]) if name in cells[key] else "–" for name in names]
        lines.append([adversary, f"{target}, {measure}", place, guess, *own])
    text = (
        "Embedded digits, MLP 784-200-200-10, seed 0. An audit between `--quick` and a full one. A cell is the worst "
        "of the attacks; bold cells are leaks."
    )
    heads = ["adversary", "target and measure", "simulated run", "guessing", *names]
    return "\n\n".join([text, markdown(["costs", *names], head), markdown(heads, lines)])


def _cell(finding: Any) -> str:
    from dbcl_audit.report.rating import severity

    bold = "**" if severity(finding)[0] >= LEAK_RANK else ""
    return f"{bold}{finding.value:.{1 if finding.measure == 'psnr' else 2}f}{bold}"


def draw(found: Results) -> Mapping[str, Any]:
    """Draw what one client gets against the accuracy of the run, by target."""
    targets = (("auc", "membership", 0.5), ("psnr", "image", 13.0), ("auc", "property", 0.5))
    figure, panels = figures.new(12, 3.8, 1, len(targets))
    cells = _worst(found)
    for axes, (measure, target, guess) in zip(panels[0], targets, strict=True):
        for number, row in enumerate(found.rows):
            name, accuracy = row["job"]["preset"], row["result"]["run"].get("accuracy")
            best = [
                each[name].value
                for (_, adversary, own, kind), each in cells.items()
                if (adversary, own, kind) == ("client", target, measure) and name in each
            ]
            if best and accuracy is not None:
                colour = figures.COLOURS.get(name, figures.MORE[number % len(figures.MORE)])
                axes.plot(100 * accuracy, max(best), "o", color=colour, label=name)
        axes.axhline(guess, linestyle=":", color=figures.MORE[-1])
        figures.label(axes, "accuracy, %", f"{target}, {measure}")
    return {"presets": figure}


EXPERIMENT = Experiment(
    name="presets",
    title="Every preset against every attack",
    what="Every preset on the embedded digits against every attack of every adversary, beside accuracy and bytes.",
    minutes="about 30 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"scipy": "audit", "sklearn": "audit"},
)
