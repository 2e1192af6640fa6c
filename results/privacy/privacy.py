"""What a guarantee costs: the accuracy of released models on MNIST at several epsilons, banded and independent noise.

    python results/privacy/privacy.py clients --device cuda     one client as the unit: 1,000 clients, 2,000 clients
    python results/privacy/privacy.py examples --device cuda    one example as the unit: 10 clients, 2 clients
    python results/privacy/privacy.py sketches --device cuda    the same with sketch and lanes
    python results/privacy/privacy.py report                    the table of what lies here

A row for each run goes to rows.jsonl beside this file; a row that is there is not made again. DBCL_DATA says where the
datasets lie.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "rounds"))
from rounds import Job, key, play, rows

HERE = Path(__file__).parent
ROWS = HERE / "rows.jsonl"
CLIENTS = {"model": "mnist-mlp", "epochs": 5, "lr": 0.05, "delta": 1e-5, "ema_decay": 0.95}
EXAMPLES = {
    "model": "mnist-mlp", "unit": "example", "algorithm": "sgd", "fraction": 1.0, "delta": 1e-5, "ema_decay": 0.95,
    "separation": 10,
}  # fmt: skip


def clients(seeds: int) -> Iterator[Job]:
    """Rounds and clips are those of the prototype that set the goals."""
    plans = [(1000, 8.0, 400, 0.2), (1000, 4.0, 200, 0.2), (1000, 2.0, 200, 0.1), (2000, 4.0, 300, 0.3)]
    for (count, epsilon, rounds, clip), kind, seed in itertools.product(plans, ("banded", "independent"), range(seeds)):
        settings = {**CLIENTS, "clients": count, "fraction": 0.1, "epsilon": epsilon, "clip": clip, "rounds": rounds}
        yield "clients", "plain", {**settings, "mechanism": kind, "seed": seed}, None, rounds


def examples(seeds: int) -> Iterator[Job]:
    plans = [(8.0, 1500, 1.0), (4.0, 600, 1.0), (2.0, 600, 0.5), (1.0, 200, 0.5)]
    for count, (epsilon, rounds, lr), seed in itertools.product((10, 2), plans, range(seeds)):
        settings = {**EXAMPLES, "clients": count, "epsilon": epsilon, "clip": 1.0, "lr": lr, "rounds": rounds}
        yield "examples", "plain", {**settings, "seed": seed}, None, rounds
    settings = {**EXAMPLES, "clients": 10, "epsilon": 4.0, "clip": 1.0, "lr": 1.0, "rounds": 600}
    for seed in range(seeds):
        yield "examples", "plain", {**settings, "mechanism": "independent", "seed": seed}, None, 600


def sketches(seeds: int) -> Iterator[Job]:
    for seed in range(seeds):
        settings = {**CLIENTS, "clients": 1000, "fraction": 0.1, "epsilon": 8.0, "clip": 0.2, "rounds": 400}
        own = {**settings, "server_optimizer": "fedavg", "seed": seed}
        yield "sketches", "blind", own, None, 400
        more = {**EXAMPLES, "clients": 10, "epsilon": 8.0, "clip": 1.0, "lr": 1.0, "rounds": 600, "seed": seed}
        yield "sketches", "blind", {**more, "server_optimizer": "fedavg"}, None, 600


JOBS = {"clients": clients, "examples": examples, "sketches": sketches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*JOBS, "report"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=Path, default=ROWS)
    options = parser.parse_args()
    if options.part == "report":
        report(rows(options.rows))
        return
    done = {key(row["part"], row["preset"], row["settings"]) for row in rows(options.rows)}
    for job in JOBS[options.part](options.seeds):
        if key(*job[:3]) not in done:
            row = play(job, options.device)
            with options.rows.open("a") as file:
                file.write(json.dumps({**row, "curve": row["curve"][9::10]}) + "\n")
            print(f"\n{row['preset']} {row['settings']}: {row['accuracy']} {row['error']}", flush=True)


def report(found: list[dict[str, Any]]) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        settings = {name: value for name, value in row["settings"].items() if name != "seed"}
        groups.setdefault(key(row["part"], row["preset"], settings), []).append(row)
    print("| part | epsilon | noise | clients | rounds | clip | accuracy of the released model, median | each |")
    print("|---|---|---|---|---|---|---|---|")
    for group in groups.values():
        own = group[0]["settings"]
        scores = sorted(row["accuracy"] or 0.0 for row in group)
        each = ", ".join(f"{score:.2%}" for score in scores)
        kind = own.get("mechanism", "banded") + (", sketch and lanes" if group[0]["preset"] == "blind" else "")
        cells = [group[0]["part"], own["epsilon"], kind, own["clients"], own["rounds"], own["clip"]]
        print(f"| {' | '.join(map(str, cells))} | {statistics.median(scores):.2%} | {each} |")


if __name__ == "__main__":
    main()
