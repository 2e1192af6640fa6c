"""One sketch for all against two lanes: what one client gets, and what clients of both lanes get together.

    python results/audit/lanes.py

writes lanes.json beside this file and prints it. The embedded digits, ratio 2, hidden layers covered; every client
takes one step of SGD a round. A cosine is the median over rounds with 40 or more after them, of the smoother on the
first layer (784 inputs), in 90 rounds of 32 examples; an AUC the highest of the detectors on the smoother, by the
quick budget (60 rounds of 16 examples); each for every seed. Images are four of one example each, in decibels. About
20 minutes on two cores; an argument such as `updates` makes that part only, and keeps the others of the file.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from dbcl.simulation import RunConfig, task_of
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.attacks.updates import estimates
from dbcl_audit.effort import FULL, QUICK
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.estimators.smoother import known_scales, smoother
from dbcl_audit.scoring import score
from dbcl_audit.simulated_run import colluders_of, draw_batches, simulate_batches
from dbcl_audit.single_steps import property_script

HERE = Path(__file__).parent
BUDGET = replace(FULL, rounds=90, batch=32)
SEEDS = {"updates": (0, 1), "properties": (0, 1), "images": (0,)}
FIRST = {"mnist-mlp": "1.weight"}


@dataclass(frozen=True)
class Case:
    """One rehearsal: `lanes` of so many parties, alone or as colluders."""

    part: str
    veil: float
    lanes: int
    parties: int
    together: bool
    seed: int
    model: str = "mnist-mlp"

    def config(self) -> RunConfig:
        """Every setting that matters by its name, so that presets may change."""
        return RunConfig.from_options(
            data="digits",
            model=self.model,
            coverage="hidden",
            sketch="count-v1",
            ratio=2.0,
            lanes=self.lanes,
            veil=self.veil,
            lr=0.1 if self.model == "dlg-lenet" else 0.01,
            seed=self.seed,
        )

    @property
    def row(self) -> str:
        who = "one of each lane together" if self.together else "one client"
        return f"veil {self.veil:g}, {self.parties} parties, {who}"

    @property
    def column(self) -> str:
        return "one sketch" if self.lanes == 1 else f"{self.lanes} lanes"


def cases() -> Iterator[Case]:
    for veil in (0.0, 0.2):
        for lanes in (1, 2):
            for seed in SEEDS["updates"]:
                for parties in (2, 4, 10):
                    yield Case("updates", veil, lanes, parties, False, seed)
                for parties in (4, 10) if lanes == 2 else ():
                    yield Case("updates", veil, lanes, parties, True, seed)
            for seed in SEEDS["properties"]:
                yield Case("properties", veil, lanes, 2, False, seed)
                if lanes == 2:
                    yield Case("properties", veil, lanes, 4, True, seed)
            for seed in SEEDS["images"]:
                for model in ("mnist-mlp", "dlg-lenet"):
                    yield Case("images", veil, lanes, 2, False, seed, model)


def measured(case: Case) -> dict[str, float]:
    """What one rehearsal gave."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        return {"updates": updates, "properties": properties, "images": images}[case.part](case, Path(scratch))


def updates(case: Case, scratch: Path) -> dict[str, float]:
    config = case.config()
    task = task_of(config)
    _, script = property_script(task, BUDGET, case.parties, case.seed)
    colluders = colluders_of(case.lanes) if case.together else ()
    played = simulate_batches(config, task, script, scratch, seed=case.seed, colluders=colluders)
    view = tensor_observations(played.attacker, [FIRST[case.model]], allies=played.allies)[FIRST[case.model]]
    scores = score(played.truth, view, smoother(view, known_scales(view, case.veil)))
    return {"cosine": scores.median_cosine(40)}


def properties(case: Case, scratch: Path) -> dict[str, float]:
    config = case.config()
    task = task_of(config)
    own, script = property_script(task, QUICK, case.parties, case.seed)
    colluders = colluders_of(case.lanes) if case.together else ()
    played = simulate_batches(config, task, script, scratch, seed=case.seed, colluders=colluders)
    found = estimates(played.attacker, ["smoother"], allies=played.allies)
    assert task.holds is not None
    findings = property_findings(
        played,
        task,
        task.holds,
        own,
        found,
        batches=QUICK.own_batches,
        examples=QUICK.own_examples,
        seed=case.seed,
        tell=lambda text: None,
    )
    return {"auc": max(each.value for each in findings if each.attack.endswith("on smoother"))}


def images(case: Case, scratch: Path) -> dict[str, float]:
    config = case.config()
    task = task_of(config)
    assert task.pictures is not None
    script = draw_batches(np.arange(len(task.pictures.y_train)), (56, 2, 1), case.seed + 17)
    played = simulate_batches(config, task, script, scratch, seed=case.seed)
    found = estimates(played.attacker, ["smoother"])
    settings = Matching(steps=600, restarts=1, tv=1e-3 if case.veil else 0.0)
    findings = image_findings(played, task.pictures, found, [4, 5, 6, 7], settings, tell=lambda text: None)
    named = [each for each in findings if each.measure == "psnr" and each.adversary == "client"]
    return {f"{case.model}, {each.attack}": each.value for each in named} | {
        "guessing": next(each.chance for each in named if each.chance is not None)
    }


def main() -> None:
    began = perf_counter()
    every = [case for case in cases() if case.part in sys.argv[1:] or not sys.argv[1:]]
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    found: dict[Case, dict[str, float]] = {}
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measured, case): case for case in every}
        for done in as_completed(waiting):
            found[waiting[done]] = done.result()
            print(f"\r{len(found)} of {len(every)} rehearsals", end="", file=sys.stderr, flush=True)
    path = HERE / "lanes.json"
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"results": {}}
    for case in every:  # in their order, whichever was done first
        body["results"][case.part] = {}
    for case in every:
        row = body["results"][case.part].setdefault(case.row, {}).setdefault(case.column, {})
        for measure, value in found[case].items():
            row.setdefault(measure, []).append(round(value, 3))
    facts = {"command": "python results/audit/lanes.py", "torch": torch.__version__}
    seconds = {
        **body.get("seconds", {}),
        ", ".join(sorted({case.part for case in every})): round(perf_counter() - began),
    }
    path.write_text(json.dumps({**facts, "seconds": seconds, "results": body["results"]}, indent=1) + "\n")
    print(f"\n{json.dumps(body['results'], indent=1)}")


if __name__ == "__main__":
    main()
