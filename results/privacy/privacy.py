"""What a guarantee costs: the accuracy of released models on MNIST at several epsilons, banded and independent noise.

    python results/privacy/privacy.py scan --device cuda        rates, clips and rounds, one seed
    python results/privacy/privacy.py clients --device cuda     one client as the unit: 1,000 clients, 2,000 clients
    python results/privacy/privacy.py examples --device cuda    one example as the unit: 10 clients, 2 clients
    python results/privacy/privacy.py sketches --device cuda    the same with sketch and lanes
    python results/privacy/privacy.py frontier --device cuda    two parties: accuracy against the strongest attack
    python results/privacy/privacy.py report                    the tables and the picture of what lies here

A row for each run goes to rows.jsonl beside this file; a row that is there is not made again. DBCL_DATA says where the
datasets lie. `--workers 12` plays twelve runs at once, which one large GPU bears.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rounds"))
import rounds as runs
import torch
from rounds import Job, grouped, key, rows, task_on

from dbcl.engines import evaluate
from dbcl.simulation import preset
from dbcl.simulation.build import build_engine, build_run_server, new_seed
from dbcl_audit.canaries import Canaries

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
CLIENTS = {"model": "mnist-mlp", "epochs": 5, "lr": 0.05, "delta": 1e-5, "ema_decay": 0.95, "fraction": 0.1}
EXAMPLES = {
    "model": "mnist-mlp", "unit": "example", "algorithm": "sgd", "fraction": 1.0, "delta": 1e-5, "ema_decay": 0.95,
    "separation": 10,
}  # fmt: skip
FLEETS = [(1000, 8.0, 400, 0.2), (1000, 4.0, 200, 0.2), (1000, 2.0, 200, 0.1), (2000, 4.0, 300, 0.3)]
"""Clients, epsilon, rounds and clip: the best of the scan and of the prototype that set the goals."""
FEW = [(8.0, 1500, 1.0), (4.0, 600, 2.0), (2.0, 200, 2.0), (1.0, 200, 2.0)]
"""Epsilon, rounds and rate at the clip 4: the best of the scan."""
FLEETS_ALONE = [(count, epsilon, rounds, clip / 2) for count, epsilon, rounds, clip in FLEETS]
FEW_ALONE = [(8.0, 1500, 0.5), (4.0, 600, 0.5), (2.0, 200, 1.0), (2.0, 200, 0.5), (1.0, 200, 1.0), (1.0, 200, 0.5)]
"""Independent noise wants smaller steps: with these it does better than with those above."""


def client_job(part: str, count: int, epsilon: float, rounds: int, clip: float, seed: int, **own: Any) -> Job:
    settings = {**CLIENTS, "clients": count, "epsilon": epsilon, "clip": clip, "rounds": rounds, **own, "seed": seed}
    return part, "plain", settings, None, rounds


def example_job(part: str, count: int, epsilon: float, rounds: int, lr: float, seed: int, **own: Any) -> Job:
    settings = {**EXAMPLES, "clients": count, "epsilon": epsilon, "clip": 4.0, "lr": lr, "rounds": rounds, **own}
    return part, "plain", {**settings, "seed": seed}, None, rounds


def scan(seeds: int) -> Iterator[Job]:
    """What was tried before the settings above were chosen, and independent noise with settings of its own."""
    ways = [(8.0, 400, 0.2), (8.0, 400, 0.1), (8.0, 400, 0.3), (8.0, 800, 0.1), (4.0, 200, 0.2), (4.0, 200, 0.3)]
    ways += [(2.0, 200, 0.1), (2.0, 200, 0.2)]
    for epsilon, rounds, clip in ways:
        yield client_job("scan", 1000, epsilon, rounds, clip, 0, correlation="banded")
    for (epsilon, rounds, clip), lr in itertools.product([ways[0], ways[4], ways[6]], (0.02, 0.1)):
        yield client_job("scan", 1000, epsilon, rounds, clip, 0, correlation="banded", lr=lr)
    for (_, epsilon, rounds, clip), part in itertools.product(FLEETS[:3], (0.5, 0.25)):
        yield client_job("scan", 1000, epsilon, rounds, clip * part, 0, correlation="independent")
    for epsilon, rounds in ((8.0, 1500), (4.0, 600), (2.0, 600), (2.0, 200), (1.0, 200)):
        for clip, step in itertools.product((1.0, 4.0), (0.25, 0.5, 1.0, 2.0, 4.0)):
            yield example_job("scan", 10, epsilon, rounds, step / clip, 0, clip=clip)
    for lr in (0.25, 0.5, 1.0):
        yield example_job("scan", 10, 4.0, 600, lr, 0, correlation="independent")
    for epsilon, rounds in ((4.0, 600), (2.0, 200), (1.0, 200)):
        yield example_job("scan", 10, epsilon, rounds, 2.0, 0)


def clients(seeds: int) -> Iterator[Job]:
    ways = [(plan, kind) for plan in FLEETS for kind in ("banded", "independent")]
    ways += [(plan, "independent") for plan in FLEETS_ALONE]
    for (plan, kind), seed in itertools.product(ways, range(seeds)):
        yield client_job("clients", *plan, seed, mechanism=kind)


def examples(seeds: int) -> Iterator[Job]:
    for plan, seed in itertools.product(FEW, range(seeds)):
        yield example_job("examples", 10, *plan, seed)
        yield example_job("examples", 2, *plan, seed)
    for plan, seed in itertools.product([*FEW, *FEW_ALONE], range(seeds)):
        yield example_job("examples", 10, *plan, seed, correlation="independent")


def sketches(seeds: int) -> Iterator[Job]:
    """Half of every large layer's inputs in two lanes; the server's steps stay plain averages."""
    for seed in range(seeds):
        jobs = [client_job("sketches", *plan, seed, server_optimizer="fedavg") for plan in FLEETS[:3]]
        jobs += [example_job("sketches", 10, *plan, seed, server_optimizer="fedavg") for plan in FEW[1:]]
        for part, _, settings, target, rounds in jobs:
            yield part, "blind", settings, target, rounds


def frontier(seeds: int) -> Iterator[Job]:
    """White noise on every W_t wants much smaller steps: four rates for it, one for banded noise."""
    for seed, epsilon in itertools.product(range(seeds), (1.0, 2.0, 4.0, 8.0, 16.0)):
        for kind, lr in (("banded", 2.0), ("white", 0.1), ("white", 0.3), ("white", 1.0), ("white", 2.0)):
            yield example_job("frontier", 2, epsilon, 200, lr, seed, correlation=kind)


def play(job: Job, device: str) -> dict[str, Any]:
    """Play one run; those of the frontier with canaries in it."""
    part, name, settings, _, most = job
    if part != "frontier":
        return runs.play(job, device)
    config = preset(name, data="mnist", device=device, **settings)
    task, seed = task_on(device, config.data, config.model), new_seed(config)
    server = build_run_server(config, task, seed=seed)
    privacy = server.privacy
    assert privacy is not None
    canaries = Canaries(server, privacy, seed=settings["seed"])
    engine = build_engine(config, task, canaries, seed=seed)
    for number in range(1, most + 1):
        engine.play_round()
        print(f"\r{settings}: round {number}  ", end="", file=sys.stderr, flush=True)
    found = canaries.estimate()
    row = {"part": part, "preset": name, "settings": settings, "rounds": most, "noise": privacy.noise}
    row |= {"accuracy": evaluate(server.released, task.held_out).score, "error": "", "curve": []}
    row |= {"canaries": len(found.seen), "auc": found.auc, "auc_interval": found.auc_interval}
    row |= {"auc_bound": found.auc_bound, "mu": found.mu, "mu_interval": found.mu_interval}
    return {**row, "epsilon": found.epsilon, "device": device, "torch": torch.__version__}


JOBS = {"scan": scan, "clients": clients, "examples": examples, "sketches": sketches, "frontier": frontier}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*JOBS, "report"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if options.part == "report":
        report(rows(options.rows))
        return
    done = {key(row["part"], row["preset"], row["settings"]) for row in rows(options.rows)}
    jobs = [job for job in JOBS[options.part](options.seeds) if key(*job[:3]) not in done]
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(play, job, options.device) for job in jobs]
        for number, finished in enumerate(as_completed(waiting), 1):
            row = finished.result()
            with options.rows.open("a") as file:
                file.write(json.dumps({**row, "curve": row["curve"][9::10]}) + "\n")
            print(f"\n{number} of {len(jobs)}: {row['settings']}: {row['accuracy']} {row['error']}", flush=True)


def report(found: list[dict[str, Any]]) -> None:
    """Write README.md and privacy.png beside this file: medians over the seeds."""
    groups = grouped(found)
    lines = [HEAD]
    for part, title in TITLES.items():
        own = sorted((group for group in groups.values() if group[0]["part"] == part), key=order)
        if own:
            lines.append(f"\n## {part}\n\n{COMMAND.format(part)}{title}\n\n{COLUMNS}")
            lines += map(as_row, own)
    both = sorted((row for row in found if row["part"] == "frontier"), key=frontier_order)
    if both:
        lines.append(f"\n## frontier\n\n{COMMAND.format('frontier')}{FRONTIER}")
        lines += map(frontier_row, both)
        draw_frontier(both)
    (HERE / "README.md").write_text("\n".join(lines) + "\n")
    draw([group for group in groups.values() if group[0]["part"] in ("clients", "examples", "sketches")])
    print("\n".join(lines))


HEAD = """# What a guarantee costs

Written by `python results/privacy/privacy.py report` from rows.jsonl, which holds a row for each run. MNIST, the
network 784-200-200-10, delta 1e-5; the accuracy is that of the model that is released, the running mean (0.95) of noisy
models, on the 10,000 test pictures. Banded noise is the default with `--epsilon`; independent noise is DP-FedAvg's, and
DP-SGD's where one example is the unit, in the same code. No amplification by sampling is claimed for either. Clip,
rates and rounds were chosen by looking at accuracies (`scan`), which is not accounted. A row says on which device it
was made: all on an H200, but the frontier and part of the independent noise with one example as the unit, on a CPU.

![accuracy of the released model against epsilon](privacy.png)"""
COMMAND = "`python results/privacy/privacy.py {} --device cuda`: "
TITLES = {
    "clients": "one client is the unit; a tenth of them in a round, five local epochs, 60,000 / clients examples each.",
    "examples": "one example is the unit; all clients in every round, 6,000 examples together.",
    "sketches": "the same with the sketch and the two lanes of `blind`.",
    "scan": "what was tried, seed 0.",
}
COLUMNS = """| unit | epsilon | noise | clients | rounds | clip | rate | accuracy, median | each |
|---|---|---|---|---|---|---|---|---|"""


def order(group: list[dict[str, Any]]) -> tuple[Any, ...]:
    own = group[0]["settings"]
    return (
        own.get("unit", "client"),
        own["clients"],
        -own["epsilon"],
        kind_of(group),
        own["rounds"],
        own["clip"],
        own["lr"],
    )


def kind_of(group: list[dict[str, Any]]) -> str:
    kind = str(group[0]["settings"].get("mechanism", "banded"))
    return kind + (", sketch and lanes" if group[0]["preset"] == "blind" else "")


def score_of(group: list[dict[str, Any]]) -> float:
    return statistics.median(row["accuracy"] or 0.0 for row in group)


def as_row(group: list[dict[str, Any]]) -> str:
    own = group[0]["settings"]
    each = ", ".join(f"{score:.2%}" for score in sorted(row["accuracy"] or 0.0 for row in group))
    cells = [own.get("unit", "client"), f"{own['epsilon']:g}", kind_of(group), own["clients"], own["rounds"]]
    cells += [f"{own['clip']:g}", f"{own['lr']:g}", f"**{score_of(group):.1%}**", each]
    return f"| {' | '.join(map(str, cells))} |"


FRONTIER = """two parties, one example is the unit, 200 rounds, and the strongest attack that
there is: canaries in the run, found in all that it shows by a matched filter (`dbcl_audit.canaries`). White noise is on
every W_t by itself, as the veil of the other presets; both kinds have the size that keeps the epsilon.

![accuracy against the attack](frontier.png)

| noise | epsilon | rate | size of the noise | measured AUC | 95 % | AUC by the theorem | accuracy |
|---|---|---|---|---|---|---|---|"""


def frontier_order(row: dict[str, Any]) -> tuple[Any, ...]:
    own = row["settings"]
    return own["kind"], own["epsilon"], own["lr"]


def frontier_row(row: dict[str, Any]) -> str:
    own, (low, high) = row["settings"], row["auc_interval"]
    cells = [own["kind"], f"{own['epsilon']:g}", f"{own['lr']:g}", f"{row['noise']:.3g}", f"{row['auc']:.3f}"]
    cells += [f"{low:.3f} to {high:.3f}", f"{row['auc_bound']:.3f}", f"{row['accuracy']:.1%}"]
    return f"| {' | '.join(cells)} |"


def draw_frontier(found: list[dict[str, Any]]) -> None:
    """The best rate of each kind of noise at every epsilon."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, color in (("banded", "tab:blue"), ("white", "tab:orange")):
        best: dict[float, dict[str, Any]] = {}
        for row in (row for row in found if row["settings"]["kind"] == kind):
            epsilon = row["settings"]["epsilon"]
            if epsilon not in best or row["accuracy"] > best[epsilon]["accuracy"]:
                best[epsilon] = row
        points = [best[epsilon] for epsilon in sorted(best)]
        heights = [100 * row["accuracy"] for row in points]
        sides = [[row["auc"] - row["auc_interval"][0], row["auc_interval"][1] - row["auc"]] for row in points]
        axes.errorbar(
            [row["auc"] for row in points],
            heights,
            xerr=list(zip(*sides, strict=True)),
            color=color,
            marker="o",
            label=kind,
        )
        for row, height in zip(points, heights, strict=True):
            label = f"{row['settings']['epsilon']:g}"
            axes.annotate(label, (row["auc"], height), xytext=(4, -12), textcoords="offset points", fontsize=8)
    axes.set_xlabel("AUC of the matched filter (0.5: nothing is seen); numbers are epsilon")
    axes.set_ylabel("accuracy of the released model, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(HERE / "frontier.png", dpi=120)


LOOKS = {
    "banded": {"color": "tab:blue", "marker": "o"},
    "independent": {"color": "tab:red", "marker": "s"},
    "banded, sketch and lanes": {"color": "tab:purple", "marker": "^", "linestyle": ":"},
}


def draw(groups: list[list[dict[str, Any]]]) -> None:
    """The best settings of each kind of noise at every epsilon."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, unit, count in zip(panels, ("client", "example"), (1000, 10), strict=True):
        for kind, look in LOOKS.items():
            best: dict[float, float] = {}
            for group in groups:
                own = group[0]["settings"]
                if (own.get("unit", "client"), own["clients"], kind_of(group)) == (unit, count, kind):
                    best[own["epsilon"]] = max(best.get(own["epsilon"], 0.0), 100 * score_of(group))
            axes.plot(sorted(best), [best[epsilon] for epsilon in sorted(best)], label=kind, **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.set_xlabel("epsilon (delta 1e-5)")
        axes.set_title(f"{count:,} clients, the unit is one {unit}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("accuracy of the released model, %")
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "privacy.png", dpi=120)


if __name__ == "__main__":
    main()
