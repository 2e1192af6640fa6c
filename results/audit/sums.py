"""What the server gets of one client where it sees only sums: images and properties, by the clients in a sum.

    python results/audit/sums.py

writes sums.json beside this file and prints it. The embedded digits, one sketch of ratio 2, one lane; every client
takes one step of SGD a round, on one image (dlg-lenet) or on 16 (mnist-mlp). The server holds W and the sketch. A sum
is that of secure aggregation: updates clipped to 4, rounded to 16 bits and added; with one client it is its update by
itself. Images are matched through the sketch, as many at once as are in the sum, and paired with the true ones; the
figure is the median over four rounds of the victim's, in decibels, beside that of the mean image. An AUC is the
highest of the detectors from the server's seat, and guessing has 0.5. Matching has 1,200 steps, for 16 and 32 clients
300. An argument such as `images` makes that part only, and keeps the other of the file.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from dbcl.simulation import RunConfig, task_of
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.effort import QUICK
from dbcl_audit.simulated_run import SimulatedRun, draw_batches, simulate_batches
from dbcl_audit.single_steps import property_script

HERE = Path(__file__).parent
SIZES = (1, 2, 4, 8, 16, 32)
SEEDS = {"images": (0,), "properties": (0, 1, 2)}


def config(model: str, seed: int) -> RunConfig:
    """Every setting that matters by its name, so that presets may change."""
    return RunConfig.from_options(
        data="digits", model=model, coverage="hidden", sketch="count-v1", ratio=2.0, lanes=1, veil=0.2,
        lr=0.1 if model == "dlg-lenet" else 0.01, seed=seed,
    )  # fmt: skip


def summed(played: SimulatedRun, size: int) -> SimulatedRun:
    """The same rehearsal as a server has it that sees the sum of all its clients."""
    return played if size == 1 else replace(played, bound=4.0)


def measured(part: str, size: int, seed: int) -> dict[str, float]:
    """What the attacks gave on sums of so many clients."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        return {"images": images, "properties": properties}[part](size, seed, Path(scratch))


def images(size: int, seed: int, scratch: Path) -> dict[str, float]:
    own = config("dlg-lenet", seed)
    task = task_of(own)
    assert task.pictures is not None
    script = draw_batches(np.arange(len(task.pictures.y_train)), (6, max(2, size), 1), seed + 17)
    played = summed(simulate_batches(own, task, script, scratch, seed=seed), size)
    settings = Matching(steps=1200 if size <= 8 else 300, restarts=1)
    findings = image_findings(played, task.pictures, {}, [1, 2, 3, 4], settings, tell=lambda text: None)
    best = max((each for each in findings if each.measure == "psnr"), key=lambda each: each.value)
    assert best.chance is not None
    return {"decibels": best.value, "best image": best.high or best.value, "the mean image": best.chance}


def properties(size: int, seed: int, scratch: Path) -> dict[str, float]:
    own = config("mnist-mlp", seed)
    task = task_of(own)
    mine, script = property_script(task, QUICK, max(2, size), seed)
    played = summed(simulate_batches(own, task, script, scratch, seed=seed), size)
    assert task.holds is not None
    findings = property_findings(
        played,
        task,
        task.holds,
        mine,
        {},
        batches=QUICK.own_batches,
        examples=QUICK.own_examples,
        seed=seed,
        tell=lambda text: None,
    )
    return {"AUC": max(each.value for each in findings if each.adversary == "server")}


def main() -> None:
    began = perf_counter()
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    parts = [part for part in SEEDS if part in sys.argv[1:] or not sys.argv[1:]]
    cases = [(part, size, seed) for part in parts for size in SIZES for seed in SEEDS[part]]
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measured, *case): case for case in reversed(cases)}
        for done in as_completed(waiting):
            found[waiting[done]] = done.result()
            print(f"\r{len(found)} of {len(cases)} rehearsals", end="", file=sys.stderr, flush=True)
    path = HERE / "sums.json"
    kept = json.loads(path.read_text())["results"] if path.exists() else {}
    results: dict[str, dict[str, dict[str, list[float]]]] = {part: kept[part] for part in kept if part not in parts}
    for part, size, seed in cases:
        row = results.setdefault(part, {}).setdefault(f"{size} in a sum", {})
        for measure, value in found[part, size, seed].items():
            row.setdefault(measure, []).append(round(value, 3))
    facts = {"command": "python results/audit/sums.py", "torch": torch.__version__}
    body = {**facts, "seconds": round(perf_counter() - began), "results": results}
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(f"\n{json.dumps(results, indent=1)}")


if __name__ == "__main__":
    main()
