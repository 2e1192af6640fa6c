"""Every preset against every attacker from every seat, and what it costs: presets.json, presets.md, presets.png.

    python results/audit/presets.py                  trains and audits what is not there yet; writes table and image
    python results/audit/presets.py blind private    some of them

Embedded digits, MLP 784-200-200-10, seed 0. An audit between `--quick` and a full one: EFFORT below. A preset that is
in presets.json is not audited again.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dbcl._version import __version__
from dbcl.simulation import Run, preset
from dbcl_audit.audit import audit
from dbcl_audit.effort import QUICK
from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report.rating import severity

HERE = Path(__file__).parent
PRESETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paper": {},
    "veil": {},
    "blind": {},
    "blind, secure aggregation": {"fraction": 0.2, "secure_aggregation": True},
    "private": {},
    "private-example": {},
}
EFFORT = replace(QUICK, run_rounds=60, whole_cohort=True, fixed_images=3, fixed_rounds=60, all_rounds=100)
MEASURES = ("cosine", "psnr", "accuracy", "auc", "auc", "tpr at 0.1 % fpr", "epsilon")
ADVERSARIES = ("client", "colluders", "server", "anyone")


def tell(text: str) -> None:
    print(f"\r{text:<100}"[:101], end="", file=sys.stderr, flush=True)


def made(name: str) -> dict[str, Any]:
    """One preset: trained for the rounds that it has by default, and audited."""
    base = name.split(",")[0]
    config = preset(base, seed=0, **PRESETS[name])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        run = Run.start(config, folder)
        for metrics in run.play():
            tell(f"{name}: round {metrics.round} of {config.rounds}")
        found = audit(folder, effort=EFFORT, tell=lambda text: tell(f"{name}: {text}"))
    return {"name": name, "run": dict(found.run), "seconds": round(found.seconds), "findings": rows(found)}


def rows(found: Audit) -> list[dict[str, Any]]:
    kept = (
        "rehearsal",
        "attack",
        "adversary",
        "attacker",
        "target",
        "measure",
        "value",
        "low",
        "high",
        "chance",
        "note",
    )
    read = json.loads(found.json())["findings"]
    return [{key: each[key] for key in kept} | {"failures": each["failures"]} for each in read]


def table(results: list[dict[str, Any]]) -> str:
    """A row for each rehearsal, seat and measure, a column for each preset: the worst adaptive attack."""
    keys: dict[tuple[str, str, str, str], None] = {}
    cells: dict[tuple[tuple[str, str, str, str], str], Finding] = {}
    for result in results:
        for each in result["findings"]:
            if each["measure"] not in MEASURES or each["value"] is None:
                continue
            finding = Finding(**{key: value for key, value in each.items() if key != "failures"})
            key = _short(finding.simulated_run), finding.adversary, finding.target, finding.measure
            keys[key] = None
            place = key, result["name"]
            if place not in cells or severity(finding) > severity(cells[place]):
                cells[place] = finding
    names = [result["name"] for result in results]
    order = sorted(keys, key=lambda key: (ADVERSARIES.index(key[1]), key[2], key[3], key[0]))
    lines = [f"| seat | what | rehearsal | guessing | {' | '.join(names)} |", "|" + "---|" * (4 + len(names))]
    for key in order:
        found = [cells.get((key, name)) for name in names]
        chance = next((each.chance for each in found if each and each.chance is not None), None)
        texts = [_cell(each) if each else "–" for each in found]
        what = f"{key[2]}, {key[3]}"
        guess = "–" if chance is None or key[3] == "cosine" else f"{chance:.2f}"
        where = key[0] or ("all clients, and canaries" if key[2] == "guarantee" else "the finished model")
        lines.append(f"| {key[1]} | {what} | {where} | {guess} | {' | '.join(texts)} |")
    costs = [
        ("accuracy", lambda run: f"{run.get('accuracy', float('nan')):.1%}"),
        ("rounds", lambda run: str(run.get("rounds"))),
        ("MB sent", lambda run: f"{run.get('bytes', 0) / 1e6:.0f}"),
    ]
    head = [f"| what it costs | {' | '.join(names)} |", "|" + "---|" * (1 + len(names))]
    head += [f"| {name} | {' | '.join(text(result['run']) for result in results)} |" for name, text in costs]
    return "\n".join([*head, "", *lines]) + "\n"


def _short(simulated_run: str) -> str:
    """A rehearsal without the numbers in which presets differ."""
    if simulated_run.startswith("as the run is"):
        return "as the run is"
    if "all in every round" in simulated_run:
        return "a cohort, fixed shards"
    for words in ("fixed shards", "single steps", "one image"):
        if words in simulated_run:
            return {"fixed shards": "few parties, fixed shards", "single steps": "few parties, single steps"}.get(
                words, "two parties, one image"
            )
    return simulated_run


def _cell(finding: Finding) -> str:
    digits = 1 if finding.measure == "psnr" else 2
    bad = "**" if severity(finding)[0] >= 4 else ""
    return f"{bad}{finding.value:.{digits}f}{bad}"


def draw(results: list[dict[str, Any]]) -> None:
    """What leaks to a client against accuracy, by how it was rehearsed."""
    import matplotlib.pyplot as plt

    panels = (
        ("auc", "membership", "members: AUC"),
        ("psnr", "image", "images: PSNR, dB"),
        ("auc", "property", "property: AUC"),
    )
    marks = {
        "few parties, fixed shards": "o", "a cohort, fixed shards": "s", "as the run is": "^",
        "two parties, one image": "o", "few parties, single steps": "D",
    }  # fmt: skip
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    colours = {name: f"C{number}" for number, name in enumerate(PRESETS)}
    for axis, (measure, target, label) in zip(axes, panels, strict=True):
        for result in results:
            best: dict[str, float] = {}
            for each in result["findings"]:
                if (each["measure"], each["target"], each["adversary"]) == (measure, target, "client") and each[
                    "value"
                ]:
                    place = _short(each["rehearsal"])
                    best[place] = max(best.get(place, 0.0), each["value"])
            for place, value in best.items():
                if place in marks:
                    x = 100 * result["run"].get("accuracy", float("nan"))
                    axis.plot(x, value, marks[place], color=colours[result["name"]], ms=8, alpha=0.85)
        axis.set(xlabel="accuracy, %", ylabel=label)
        axis.grid(alpha=0.3)
        guess = {"psnr": 13.0}.get(measure, 0.5)
        axis.axhline(guess, ls=":", color="grey")
    handles = [plt.Line2D([], [], marker="o", ls="", color=colours[r["name"]], label=r["name"]) for r in results]
    handles += [plt.Line2D([], [], marker=mark, ls="", color="black", label=place) for place, mark in marks.items()]
    figure.legend(handles=handles, loc="lower center", ncol=6, fontsize=8, frameon=False)
    figure.suptitle("What one client gets, against what the run reaches (dotted: guessing)")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(HERE / "presets.png", dpi=130)


def held(path: Path) -> list[dict[str, Any]]:
    """What was made before, in the order of the presets; another process may have added to it."""
    read = json.loads(path.read_text())["results"] if path.exists() else []
    return sorted(read, key=lambda each: list(PRESETS).index(each["name"]))


def main() -> None:
    torch.set_num_threads(1)
    path = HERE / "presets.json"
    for name in sys.argv[1:] or list(PRESETS):
        if all(each["name"] != name for each in held(path)):
            found = made(name)
            facts = {"command": "python results/audit/presets.py", "dbcl": __version__, "torch": torch.__version__}
            path.write_text(json.dumps({**facts, "results": [*held(path), found]}, indent=1) + "\n")
    results = held(path)
    (HERE / "presets.md").write_text(table(results))
    draw(results)
    print(table(results))


if __name__ == "__main__":
    main()
