"""Tables in Markdown, and the page of an experiment."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.experiment import Experiment, Results

NOT_RUN = "not run"


def markdown(headings: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a table.

    >>> print(markdown(["network", "rounds"], [["MLP", 96]]))
    | network | rounds |
    |---|---|
    | MLP | 96 |
    """
    body = [f"| {' | '.join(map(str, cells))} |" for cells in (headings, *lines)]
    return "\n".join([body[0], f"|{'---|' * len(headings)}", *body[1:]])


def rounds_cell(runs: Sequence[dict[str, Any]]) -> str:
    """Return the rounds that runs of one setting took to their target: the median, and each; nothing is extrapolated.

    >>> rounds_cell([{"reached": True, "rounds": 40}, {"reached": True, "rounds": 44}, {"reached": True, "rounds": 60}])
    '44 (40, 44, 60)'
    >>> rounds_cell([{"reached": False, "rounds": 600, "error": ""}])
    'not in 600 rounds'
    >>> rounds_cell([{"reached": False, "rounds": 600, "error": ""}] * 3)
    'not in 600 rounds (3 seeds)'
    >>> rounds_cell([{"reached": False, "rounds": 7, "error": "no update is left"}])
    'diverged in round 8'
    >>> rounds_cell([])
    'not run'
    """
    if not runs:
        return NOT_RUN
    each = [_rounds(run) for run in sorted(runs, key=lambda run: (not run["reached"], run["rounds"]))]
    if len(each) == 1:
        return each[0]
    reached = sorted(run["rounds"] for run in runs if run["reached"])
    if not reached and len(set(each)) == 1:
        return f"{each[0]} ({len(each)} seeds)"
    if len(reached) <= len(runs) / 2:
        return ", ".join(each)
    middle = statistics.median([*reached, *[float("inf")] * (len(runs) - len(reached))])
    return f"{middle:g} ({', '.join(each)})"


def page(experiment: Experiment, found: Results, images: Sequence[str], command: str = "") -> str:
    """Return the README of an experiment's results; `command` is what wrote it, where it is not the usual one."""
    command = command or f"python -m experiments {experiment.name}{' --quick' if found.quick else ''}"
    parts = [f"# {experiment.title}", f"{experiment.what} Written by `{command}`."]
    if found.quick:
        parts.append(
            "**This is the reduced setting (`--quick`)**, which shows that everything works; its numbers are not "
            "the paper's setting and stand beside the paper's only where the table says so."
        )
    missing = len(found.jobs) - len(found.rows)
    if missing:
        parts.append(f"{missing} of {len(found.jobs)} jobs have not been played; the same command plays them.")
    parts.append(experiment.table(found))
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in images]
    parts.append(_made_with(found))
    return "\n\n".join(parts) + "\n"


def _made_with(found: Results) -> str:
    devices = sorted({row["device"] for row in found.rows})
    kinds = sorted({", ".join(f"{name} {text}" for name, text in row["versions"].items()) for row in found.rows})
    minutes = sum(row["seconds"] for row in found.rows) / 60
    return (
        f"{len(found.rows)} jobs in {minutes:.1f} minutes on {', '.join(devices)}; {'; '.join(kinds)}. `rows.jsonl` "
        "has a line for each with its settings and its seed, `settings.json` the jobs as they were planned."
    )


def _rounds(run: dict[str, Any]) -> str:
    if run["reached"]:
        return str(run["rounds"])
    return f"diverged in round {run['rounds'] + 1}" if run.get("error") else f"not in {run['rounds']} rounds"


def until(run: Mapping[str, Any], target: float) -> dict[str, Any]:
    """Return a run as if it had stopped at a lower target.

    >>> until({"accuracies": [0.5, 0.8, 0.7, 0.9], "error": ""}, 0.75)
    {'reached': True, 'rounds': 2, 'error': ''}
    """
    rounds = next((number for number, score in enumerate(run["accuracies"], 1) if score >= target), None)
    return {"reached": rounds is not None, "rounds": rounds or len(run["accuracies"]), "error": run["error"]}
