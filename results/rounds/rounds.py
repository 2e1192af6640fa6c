"""Count the rounds and bytes of a run to an accuracy: the presets, and settings of each beside the best plain one.

    python results/rounds/rounds.py presets [--model mnist-cnn]   plain, veil, paper, blind as they are
    python results/rounds/rounds.py scan [--model mnist-cnn]      rates, server momentum and running mean of each
    python results/rounds/rounds.py cifar                         CIFAR-10: the accuracy after 300 rounds
    python results/rounds/rounds.py unequal                       clients with unequal data
    python results/rounds/rounds.py diverging                     the CNN at a rate at which clients diverge
    python results/rounds/rounds.py secure                        blind with and without secure aggregation, 20 a round
    python results/rounds/rounds.py report                        the tables and the picture of all rows

A row for each run goes to rows.jsonl beside this file; a row that is there is not made again, so an interrupted scan
continues. DBCL_DATA says where the datasets are. On one core a run of mnist-mlp takes 5 to 30 seconds, one of mnist-cnn
some minutes; cifar needs --device cuda.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dbcl.engines import evaluate
from dbcl.simulation import RunConfig, Task, preset, task_of
from dbcl.simulation.build import build_engine, build_run_server, new_seed

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
SEEDS = {"mnist-mlp": (0, 1, 2, 3, 4, 11, 12, 13), "mnist-cnn": (0, 1, 2)}
TARGETS = {"mnist-mlp": 0.97, "mnist-cnn": 0.99}
MAX_ROUNDS = {"mnist-mlp": 200, "mnist-cnn": 110}
CLIENTS = {"mnist-mlp": {"epochs": 1, "lr": 0.05}, "mnist-cnn": {"epochs": 5, "lr": 0.02}}
"""100 clients, 10 a round, batches of 10: the paper's setting."""
RATES = {
    "mnist-mlp": {"plain": (0.05, 0.1, 0.2), "veil": (0.05, 0.1, 0.2), "blind": (0.05, 0.1)},
    "mnist-cnn": {"plain": (0.05, 0.1), "blind": (0.02,)},
}
OLD_DEFAULT = {"server_optimizer": "momentum", "server_momentum": 0.7, "ema_decay": 0.8}

Job = tuple[str, str, dict[str, Any], float | None, int]
"""A part of this file, a preset, its changed settings, the accuracy to reach and the most rounds."""


def presets(model: str, seeds: tuple[int, ...]) -> Iterator[Job]:
    ways: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("blind", {}), ("veil", {})]
    if model == "mnist-mlp":
        ways += [("paper", {}), ("blind", {"lanes": 1})]
    for (name, settings), seed in itertools.product(ways, seeds):
        own = {"model": model, **CLIENTS[model], **settings, "seed": seed}
        if model == "mnist-cnn" and name != "blind":
            own["lr"] = 0.05  # which is too much for a sketched CNN
        yield "presets", name, own, TARGETS[model], MAX_ROUNDS[model]


def scan(model: str, seeds: tuple[int, ...]) -> Iterator[Job]:
    """Every preset with the rate, server momentum and running mean that are best for it, so that none is favoured."""
    means, betas = ((0.0, 0.8), (0.0, 0.5, 0.7)) if model == "mnist-mlp" else ((0.0,), (0.0, 0.5, 0.7))
    for name, rates in RATES[model].items():
        for lr, mean, beta, seed in itertools.product(rates, means, betas, seeds):
            own = {"server_optimizer": "momentum", "server_momentum": beta, "ema_decay": mean, "seed": seed}
            yield "scan", name, {"model": model, **CLIENTS[model], "lr": lr, **own}, TARGETS[model], MAX_ROUNDS[model]


def cifar(model: str, seeds: tuple[int, ...]) -> Iterator[Job]:
    validated = {"max_influence": 1.5, "outlier_factor": 10.0}
    ways: list[tuple[str, float, dict[str, Any]]] = [("plain", lr, validated) for lr in (0.02, 0.05)]
    ways += [("blind", lr, OLD_DEFAULT) for lr in (0.01, 0.02)]
    for name, lr, more in ways:
        own = {"data": "cifar10", "model": "cifar-cnn", "epochs": 5, "batch_size": 50, "lr": lr, **more, "seed": 0}
        yield "cifar", name, own, None, 300


def unequal(model: str, seeds: tuple[int, ...]) -> Iterator[Job]:
    splits = [({"partition": "dirichlet", "alpha": 0.3}, 0.95), ({"partition": "shards"}, 0.93)]
    ways: list[tuple[str, dict[str, Any]]] = [("plain", {})]
    for beta, mean in itertools.product((0.5, 0.7), (0.0, 0.8)):
        ways.append(("plain", {"server_optimizer": "momentum", "server_momentum": beta, "ema_decay": mean}))
    ways += [("veil", {}), ("paper", {}), ("blind", {"lanes": 1}), ("blind", {})]
    for seed, (split, target), (name, settings) in itertools.product(seeds, splits, ways):
        own = {"model": "mnist-mlp", **CLIENTS["mnist-mlp"], **split, **settings, "seed": seed}
        yield "unequal", name, own, target, 150


def diverging(model: str, seeds: tuple[int, ...]) -> Iterator[Job]:
    validators: list[dict[str, Any]] = [{}, {"max_influence": 0.0, "outlier_factor": 0.0}]
    for validator in validators:
        settings = {"model": "mnist-cnn", "epochs": 5, "lr": 0.04, **validator, "seed": 0}
        yield "diverging", "blind", settings, TARGETS["mnist-cnn"], 50


def secure(model: str, seeds: tuple[int, ...]) -> Iterator[Job]:
    """20 clients a round, which are 10 in each of two lanes; sums are those of the ring, without the masks."""
    for seed, way in itertools.product(seeds, ({}, {"secure_aggregation": True})):
        own = {"model": "mnist-mlp", **CLIENTS["mnist-mlp"], "fraction": 0.2, **way, "seed": seed}
        yield "secure", "blind", own, TARGETS["mnist-mlp"], MAX_ROUNDS["mnist-mlp"]


JOBS = {"presets": presets, "scan": scan, "cifar": cifar, "unequal": unequal, "diverging": diverging, "secure": secure}


@cache
def task_on(device: str, data: str, model: str) -> Task:
    """A dataset and a network, read and brought to the device once."""
    task = task_of(RunConfig(data=data, model=model))
    where = torch.device(device)
    return replace(task, train=task.train.to(where), held_out=task.held_out.to(where))


def play(job: Job, device: str) -> dict[str, Any]:
    """One run, until it reaches its target."""
    part, name, settings, target, most = job
    config = preset(name, **{"data": "mnist", **settings}, device=device)
    task = task_on(device, config.data, config.model)
    seed = new_seed(config)
    server = build_run_server(config, task, seed=seed)
    engine = build_engine(config, task, server, seed=seed)
    sent, refused, curve, error = 0, 0, [], ""
    began = time.perf_counter()
    for number in range(1, most + 1):
        try:
            result = engine.play_round()
        except Exception as problem:
            error = str(problem).split("\n")[0]
            break
        sent += result.bytes_down + result.bytes_up
        refused += len(result.report.refused)
        curve.append(round(evaluate(server.released, task.held_out).score, 4))
        print(f"\r{part} {name} {settings}: round {number}, {curve[-1]:.4f}  ", end="", file=sys.stderr, flush=True)
        if target is not None and curve[-1] >= target:
            break
    reached = target is not None and bool(curve) and curve[-1] >= target
    row = {"part": part, "preset": name, "settings": settings, "target": target, "rounds": len(curve)}
    row |= {"reached": reached, "bytes": sent, "refused": refused, "accuracy": curve[-1] if curve else None}
    row |= {"seconds": round(time.perf_counter() - began, 1), "device": device, "torch": torch.__version__}
    return {**row, "error": error, "curve": curve}


def key(part: str, name: str, settings: dict[str, Any]) -> str:
    return json.dumps([part, name, settings], sort_keys=True)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*JOBS, "report"])
    parser.add_argument("--model", choices=list(TARGETS), default="mnist-mlp")
    parser.add_argument("--seeds", type=int, default=8, help="how many of the seeds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="only the jobs of this preset")
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if options.part == "report":
        report(rows(options.rows))
        return
    done = {key(row["part"], row["preset"], row["settings"]) for row in rows(options.rows)}
    for job in JOBS[options.part](options.model, SEEDS[options.model][: options.seeds]):
        if key(*job[:3]) not in done and options.only in ("", job[1]):
            row = play(job, options.device)
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"\n{row['preset']} {row['settings']}: {row['rounds'] if row['reached'] else 'not'} {row['accuracy']}"
            )


def grouped(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of runs that differ in their seeds alone."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        settings = {name: value for name, value in row["settings"].items() if name != "seed"}
        groups.setdefault(key(row["part"], row["preset"], settings), []).append(row)
    return groups


def report(found: list[dict[str, Any]]) -> None:
    """Write README.md and rounds.png beside this file: medians over the seeds, and the curves of the presets."""
    groups = grouped(found)
    lines = [HEAD]
    for part in JOBS:
        own = [group for group in groups.values() if group[0]["part"] == part]
        if own:
            lines.append(f"\n## {part}\n\n{TITLES[part]}\n\n{COLUMNS}")
            lines += sorted(map(as_row, own))
    (HERE / "README.md").write_text("\n".join(lines) + "\n")
    draw([group for group in groups.values() if group[0]["part"] == "presets"])
    print("\n".join(lines))


HEAD = """# Rounds and bytes to an accuracy

Written by `python results/rounds/rounds.py report` from rows.jsonl, which holds a row for each run: its settings, its
seed, the device, the accuracy after every round (after every tenth for CIFAR-10). 100 clients of which 10 take part in
a round; the MLP has one local epoch and its target is 97 % on MNIST, the CNN five and 99 %. Bytes are those of all
messages, up and down, until the target.

![accuracy against rounds and against bytes](rounds.png)"""
TITLES = {
    "scan": "`python results/rounds/rounds.py scan --model MODEL`: `blind` with other momentum and running means.",
    "presets": "`python results/rounds/rounds.py presets --model MODEL`: the presets, and `blind` with one change.",
    "cifar": "`python results/rounds/rounds.py cifar --device cuda`: CIFAR-10, no augmentation, 300 rounds.",
    "unequal": "`python results/rounds/rounds.py unequal`: clients with unequal data.",
    "secure": "`python results/rounds/rounds.py secure`: without and with secure aggregation; all its bytes count.",
    "diverging": "`python results/rounds/rounds.py diverging --device cuda`: a rate at which clients diverge.",
}
COLUMNS = """| preset | settings | seeds | median rounds | each | median MB | median accuracy at the end | refused |
|---|---|---|---|---|---|---|---|"""


def as_row(group: list[dict[str, Any]]) -> str:
    first = group[0]
    settings = ", ".join(f"{name} {value}" for name, value in first["settings"].items() if name != "seed")
    rounds = sorted(row["rounds"] if row["reached"] else float("inf") for row in group)
    each = ", ".join(f"{count:g}" if count < float("inf") else "not" for count in rounds)
    middle = statistics.median(rounds)
    shown = f"{middle:g}" if middle < float("inf") else f"not in {first['rounds']}"
    sent = statistics.median(row["bytes"] for row in group) / 1e6
    accuracy = statistics.median(row["accuracy"] for row in group)
    refused = sum(row["refused"] for row in group)
    cells = [f"`{first['preset']}`", settings, f"{len(group)}", shown, each, f"{sent:,.0f}", f"{accuracy:.2%}", refused]
    return f"| {' | '.join(map(str, cells))} |"


COLORS = {"plain": "0.45", "veil": "tab:green", "paper": "tab:red", "blind": "tab:blue"}


def draw(groups: list[list[dict[str, Any]]]) -> None:
    """The curve of each preset's median seed."""
    from matplotlib.figure import Figure

    models = [model for model in TARGETS if any(group[0]["settings"]["model"] == model for group in groups)]
    figure = Figure(figsize=(10, 3.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for model, (left, right) in zip(models, panels, strict=True):
        for group in sorted(groups, key=lambda group: group[0]["preset"]):
            settings = group[0]["settings"]
            changed = {name: settings[name] for name in ("lanes",) if name in settings}
            if settings["model"] != model:
                continue
            row = sorted(group, key=lambda row: row["rounds"])[len(group) // 2]
            label = " ".join([row["preset"], *(f"{name} {value}" for name, value in changed.items())])
            numbers = range(1, len(row["curve"]) + 1)
            a_round = row["bytes"] / len(row["curve"]) / 1e6
            style = {"label": label, "linewidth": 1.6, "linestyle": "-", "color": COLORS[row["preset"]]}
            if changed:
                style["linestyle"] = ":"
            left.plot(numbers, [100 * score for score in row["curve"]], **style)
            right.plot([number * a_round for number in numbers], [100 * score for score in row["curve"]], **style)
        target = 100 * TARGETS[model]
        for axes, what in ((left, "rounds"), (right, "MB sent by all, up and down")):
            axes.axhline(target, color="0.6", linewidth=0.8)
            axes.set_ylim(target - 4, target + 0.4)
            axes.set_xlabel(what)
            axes.set_ylabel(f"accuracy of {model}, %")
            axes.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "rounds.png", dpi=120)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
