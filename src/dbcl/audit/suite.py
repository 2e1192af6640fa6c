"""One audit from beginning to end: rehearse, attack from every seat, score, and gather the findings."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import safetensors.torch
from torch import nn

from dbcl import data, models
from dbcl.audit.attacks import images as attacks
from dbcl.audit.attacks.images import OnProgress
from dbcl.audit.attacks.matching import Matching
from dbcl.audit.attacks.properties import property_findings
from dbcl.audit.findings import Audit, Finding
from dbcl.audit.rehearsal import ATTACKER, VICTIM, Script, drawn, rehearse
from dbcl.data import Dataset
from dbcl.data.traits import properties_of
from dbcl.errors import AuditError, DataError, DbclError
from dbcl.plan import SketchPlan
from dbcl.protocol import Server, blinded
from dbcl.run.config import RunConfig, from_toml
from dbcl.transcripts import Transcript, Truth

PROPERTY_DATA = ("digits", "mnist", "lfw")


@dataclass(frozen=True)
class Budget:
    """How much an audit spends: more rounds, pictures and shadow models make its findings surer.

    >>> QUICK.rounds < FULL.rounds
    True
    """

    rounds: int
    batch: int
    pictures: int
    steps: int
    own_batches: int
    own_examples: int
    shadows: int
    estimators: tuple[str, ...]


QUICK = Budget(60, 16, 2, 200, 2, 60, 4, ("option I", "smoother"))
FULL = Budget(
    200, 32, 5, 600, 3, 150, 16,
    ("option I", "option II", "rewind", "smoother", "smoother, sizes fitted", "shaped smoother"),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What every part of an audit needs to know."""

    config: RunConfig
    dataset: Dataset
    folder: Path  # of the run
    scratch: Path
    budget: Budget
    clients: int
    seed: int
    data_dir: str | None
    tell: OnProgress


def audit(
    folder: Path,
    *,
    budget: Budget = FULL,
    clients: int = 2,
    seed: int = 0,
    data_dir: str | None = None,
    tell: OnProgress = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Audit a finished run: its recorded transcripts where it has some, and rehearsals under its settings.

    A rehearsal has `clients` parties, all in every round, who each take one step of SGD on one batch. `tell` hears what
    is being done, `progress` how many parts of the work are done.
    """
    began = perf_counter()
    try:
        config = from_toml((folder / "config.toml").read_text())
    except OSError:
        raise AuditError(f"{folder} holds no run: it has no config.toml") from None
    dataset = data.load(config.data, data_dir)
    parts: dict[str, Callable[[Job], list[Finding]]] = {
        f"updates from {place.name}": partial(recorded, place)
        for place in sorted((folder / "transcripts").glob("client-*"))
    }
    parts |= {"properties": properties_part, "pictures": pictures_part, "membership": membership_part}
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(config, dataset, folder, Path(scratch), budget, clients, seed, data_dir, tell)
        for done, (name, part) in enumerate(parts.items()):
            progress(done, len(parts))
            try:
                findings += part(job)
            except DbclError as error:
                findings.append(_failed(name, error))
    progress(len(parts), len(parts))
    plan = _plan(config, dataset)
    settings = {**asdict(config), "clear": plan.in_clear, "rehearsal": f"{clients} parties, one SGD step a round"}
    return Audit(
        folder.name, settings, _run_facts(folder), seats(plan, config), tuple(findings), perf_counter() - began
    )


def recorded(place: Path, job: Job) -> list[Finding]:
    """What a client of the run itself could estimate from what it saw there."""
    transcript = Transcript(place)
    found = attacks.estimates(transcript, job.budget.estimators, job.tell)
    each = attacks.updates(transcript, Truth(place.parent), found, job.tell)
    return [replace(finding, attack=f"{finding.attack} ({transcript.party} of the run)") for finding in each]


def properties_part(job: Job) -> list[Finding]:
    """Updates and properties, from one rehearsal in which the victim's batches have the property or have it not."""
    holds, spare, script = property_script(
        job.config.data, job.dataset, job.budget, job.clients, job.seed, job.data_dir
    )
    job.tell("rehearsal: batches with and without a property")
    rehearsal = rehearse(job.config, job.dataset, script, job.scratch / "properties", seed=job.seed)
    found = attacks.estimates(rehearsal.attacker, job.budget.estimators, job.tell)
    findings = attacks.updates(rehearsal.attacker, rehearsal.truth, found, job.tell)
    if holds is None:
        return findings
    return findings + property_findings(
        rehearsal,
        job.dataset,
        holds,
        spare,
        found,
        batches=job.budget.own_batches,
        examples=job.budget.own_examples,
        seed=job.seed,
        tell=job.tell,
    )


def property_script(
    name: str, dataset: Dataset, budget: Budget, clients: int, seed: int, data_dir: str | None
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]] | None, np.ndarray[Any, np.dtype[np.int64]], Script]:
    """Who trains on what: the first half of the examples is the attacker's, the second belongs to all others."""
    half = len(dataset.y_train) // 2
    order = np.random.default_rng(seed).permutation(len(dataset.y_train))
    spare, rest = order[:half], order[half:]
    script = drawn(rest, (budget.rounds, clients, budget.batch), seed)
    script[:, ATTACKER] = drawn(spare, (budget.rounds, budget.batch), seed + 1)
    if name not in PROPERTY_DATA:
        return None, spare, script
    holds = properties_of(name, data_dir)
    with_, without = rest[holds[rest]], rest[~holds[rest]]
    if min(len(with_), len(without), holds[spare].sum()) < 2:
        raise DataError(f"too few examples of {name} have the property")
    for round in range(budget.rounds):
        pool = with_ if (round * 7 + seed) % 13 % 2 else without
        script[round, VICTIM] = drawn(pool, (budget.batch,), seed + 2 + round)
    return holds, spare, script


def pictures_part(job: Job) -> list[Finding]:
    """Pictures and labels, from a rehearsal in which every client trains on a single picture a round."""
    config, dataset, budget, quick = job.config, job.dataset, job.budget, job.budget is QUICK
    rounds = attacks.OLD + budget.pictures + 8
    script = drawn(np.arange(len(dataset.y_train)), (rounds, job.clients, 1), job.seed + 17)
    job.tell("rehearsal: single pictures")
    rehearsal = rehearse(config, dataset, script, job.scratch / "pictures", seed=job.seed)
    names = ["option I", "rewind"] if config.veil == 0 else ["option I", "smoother"]
    found = attacks.estimates(rehearsal.attacker, names, job.tell)
    matching = Matching(steps=budget.steps, restarts=1 if quick else 3, tv=1e-3 if config.veil else 0.0)
    inverting = None if quick else Matching("cosine", steps=4 * budget.steps, restarts=1, tv=0.1)
    picked = list(range(budget.pictures))
    findings = attacks.images(rehearsal, dataset, found, picked, matching, job.tell, inverting=inverting)
    return [*findings, attacks.clear_labels(rehearsal, dataset, list(range(rounds - 1)))]


def membership_part(job: Job) -> list[Finding]:
    """Membership in the training data, from the finished model and from what a client would see of it."""
    config, dataset, path = job.config, job.dataset, job.folder / "model.safetensors"
    if not path.exists():
        raise AuditError(f"{path} is missing: the run is not finished")

    def make(number: int) -> nn.Module:
        return models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=number)

    model = make(0)
    model.load_state_dict(safetensors.torch.load_file(path))
    view = blinded(make(1), Server(model, _plan(config, dataset), insecure_seed=job.seed).open_round())
    return attacks.members(model, view, dataset, make, shadows=job.budget.shadows, seed=job.seed, tell=job.tell)


def seats(plan: SketchPlan, config: RunConfig) -> tuple[tuple[str, str, str], ...]:
    """Who sees what under a plan."""
    sketched = [tensor.name for tensor in plan.tensors if tensor.sketched]
    noise = f" with secret noise of {config.veil:g} times their size" if config.veil else " without noise"
    clear = f"; in clear: {', '.join(plan.in_clear)}" if plan.in_clear else ""
    return (
        ("client", f"the sketches' seeds; sketches of {', '.join(sketched) or 'nothing'}{noise}{clear}; its own data",
         "the true weights; other clients' updates one by one"),
        ("server", "the true weights, all seeds, each client's update", "clients' data"),
        ("anyone", "the finished model, if it is published", "the messages, if the transport encrypts them"),
    )  # fmt: skip


def _plan(config: RunConfig, dataset: Dataset) -> SketchPlan:
    model = models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=config.seed)
    return SketchPlan.of(model, ratio=config.ratio, cover=config.cover, veil=config.veil, sketch=config.sketch)


def _run_facts(folder: Path) -> dict[str, Any]:
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    if not lines:
        return {}
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in lines)
    return {"accuracy": lines[-1]["accuracy"], "rounds": lines[-1]["round"], "bytes": sent}


def _failed(what: str, error: Exception) -> Finding:
    target = {"pictures": "image", "properties": "property", "membership": "membership"}.get(what, "update")
    return Finding(what, "client", "adaptive", target, "cosine", float("nan"), failures=(str(error),))
