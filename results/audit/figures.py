"""What the strongest attacks get of the preset blind on the embedded digits: figures.json.

    python results/audit/figures.py                 all of it; what is in figures.json already is not made again
    python results/audit/figures.py members server  some of it

members     two parties, fixed shards of 40, 60 rounds of the preset's FedAvg: which examples the other has, five seeds
cohort      the same with ten clients, by one of them and by two of different lanes, two seeds
ends        two parties: the attacker knows W_0, receives the released model, or both
server      one update of 40 examples and 4 steps, from the server's seat: who is in it, five seeds
property    two parties, single steps of 32 at the learning rate 0.01, 120 rounds, 2,000 examples of the attacker's own
images    two parties, one image in all of 60 rounds, single steps at the learning rate 0.01, five victims
guarantee   preset private: members of its clients, and canaries, beside what mu allows
fresh       where it must fail: members, with examples that the other never had as members
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from dbcl.simulation import preset, task_of
from dbcl_audit.attacks.members import member_findings
from dbcl_audit.attacks.span import span_membership_findings
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_images import TrajectoryMatching, trajectory_image_findings
from dbcl_audit.attacks.trajectory_properties import trajectory_property_findings
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
from dbcl_audit.context import AuditContext
from dbcl_audit.effort import FULL
from dbcl_audit.findings import Finding
from dbcl_audit.fixed_shards import as_it_is, released_shares
from dbcl_audit.guarantee import guarantee_finding, measure_guarantee
from dbcl_audit.simulated_run import VICTIM, ShardRun, draw_batches, shards_of, simulate_batches, simulate_run
from dbcl_audit.single_steps import PROPERTY_NOISE_SCALE, property_script

HERE = Path(__file__).parent
ROUNDS = 60


def rows(findings: list[Finding], **more: Any) -> list[dict[str, Any]]:
    """Findings as they are written down."""
    names = ("attack", "adversary", "target", "measure", "value", "low", "high", "chance", "note")
    return [{**more, **{name: _number(getattr(each, name)) for name in names}} for each in findings]


def _number(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def played(seed: int, scratch: Path, clients: int = 2, allies: int = 0) -> ShardRun:
    config = preset("blind")
    task = task_of(config)
    shards = shards_of(config, task, clients=clients, seed=seed)
    return simulate_run(config, task, shards, scratch / "played", rounds=ROUNDS, allies=allies, seed=seed)


def knowledge(run: ShardRun, **more: Any) -> Knowledge:
    return Knowledge(run.shards.examples.subset(run.shards.own), **more)


def trajectory(run: ShardRun, **more: Any) -> Trajectory:
    return Trajectory(run.recorded.attacker, knowledge(run, **more), allies=run.recorded.allies)


def members(scratch: Path, seed: int) -> list[dict[str, Any]]:
    run = played(seed, scratch)
    seen = trajectory(run)
    found = member_findings(run, seen) + trajectory_update_findings(seen, run.recorded.truth, "client")
    return rows(found, seed=seed)


def cohort(scratch: Path, seed: int) -> list[dict[str, Any]]:
    found = []
    for allies in (0, 1):
        run = played(seed, scratch / str(allies), clients=10, allies=allies)
        found += rows(member_findings(run, trajectory(run)), seed=seed, attackers=1 + allies)
    return found


def ends(scratch: Path, seed: int) -> list[dict[str, Any]]:
    run = played(seed, scratch)
    first = run.recorded.truth.weights(0)
    last = [(released_shares(run.config, ROUNDS), {name: run.released[name] for name in first})]
    ways: dict[str, dict[str, Any]] = {
        "nothing": {}, "W_0": {"start": first}, "the released model": {"released": last},
        "both": {"start": first, "released": last},
    }  # fmt: skip
    found = []
    for known, more in ways.items():
        seen = trajectory(run, **more)
        each = member_findings(run, seen) + trajectory_update_findings(seen, run.recorded.truth, "client")
        found += rows(each, seed=seed, known=known)
    return found


def server(scratch: Path, seed: int) -> list[dict[str, Any]]:
    run = played(seed, scratch)
    victim = next(client for client in (0, 1) if client not in run.known)
    saw = run.recorded.server_observation(2, victim)
    inside, outside = (
        run.shards.examples.take(each).inputs for each in (run.shards.of_clients[victim], run.shards.others)
    )
    return rows(span_membership_findings(saw.broadcast, saw.tensors, inside, outside), seed=seed)


def property_(scratch: Path, seed: int) -> list[dict[str, Any]]:
    config = preset("blind", lr=0.01)
    task = task_of(config)
    own, script = property_script(task, replace(FULL, rounds=120, batch=32), 2, seed)
    run = simulate_batches(config, task, script, scratch / "played", seed=seed)
    assert task.holds is not None
    examples = task.train.subset(own)
    seen = Trajectory(run.attacker, Knowledge(examples, examples=2000, process_noise_scale=PROPERTY_NOISE_SCALE))
    truth = [bool(task.holds[script[number, VICTIM]].mean() > 0.5) for number in seen.rounds[:-1]]
    return rows(trajectory_property_findings(run, seen, examples, task.holds[own], truth), seed=seed)


def images(scratch: Path, seed: int) -> list[dict[str, Any]]:
    config = preset("blind", lr=0.01)
    task = task_of(config)
    assert task.pictures is not None
    runs = []
    for number in range(5):
        script = draw_batches(np.arange(len(task.train)), (ROUNDS, 2, 1), seed + 31 + number)
        script[:, VICTIM] = script[0, VICTIM]
        runs.append(simulate_batches(config, task, script, scratch / str(number), seed=seed + number))
    found = trajectory_image_findings(runs, task.pictures, TrajectoryMatching())
    return rows([replace(each, images=()) for each in found], seed=seed)


def guarantee(scratch: Path, seed: int) -> list[dict[str, Any]]:
    config = preset("private")
    task = task_of(config)
    context = AuditContext(
        config, task, Path("none"), scratch, replace(FULL, all_rounds=400), 2, seed, lambda text: None
    )
    canaries = guarantee_finding(measure_guarantee(config, task, seed=seed))
    auc = {name: canaries.budget[name] for name in ("auc", "auc low", "auc high", "auc bound")}
    return [*rows(as_it_is(context), seed=seed), {**rows([canaries], seed=seed)[0], **auc}]


def fresh(scratch: Path, seed: int) -> list[dict[str, Any]]:
    run = played(seed, scratch)
    shards = run.shards
    victim = next(client for client in (0, 1) if client not in run.known)
    strangers = shards.own[-len(shards.of_clients[victim]) :]
    wrong = [strangers if client == victim else rows for client, rows in enumerate(shards.of_clients)]
    run = replace(run, shards=replace(shards, of_clients=tuple(wrong), own=shards.own[: -len(strangers)]))
    return rows(member_findings(run, trajectory(run)), seed=seed)


PARTS: dict[str, tuple[Callable[[Path, int], list[dict[str, Any]]], int]] = {
    "members": (members, 5), "server": (server, 5), "fresh": (fresh, 2), "images": (images, 1),
    "cohort": (cohort, 2), "property": (property_, 2), "ends": (ends, 1), "guarantee": (guarantee, 1),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    path = HERE / "figures.json"
    held: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"command": "python results/audit/figures.py"}
    )
    for name in sys.argv[1:] or list(PARTS):
        part, seeds = PARTS[name]
        for seed in range(seeds):
            done = held.setdefault(name, {})
            if str(seed) in done:
                continue
            began = perf_counter()
            with tempfile.TemporaryDirectory() as scratch:
                found = part(Path(scratch), seed)
            done[str(seed)] = {"seconds": round(perf_counter() - began), "rows": found}
            path.write_text(json.dumps(held, indent=1) + "\n")
            for each in found:
                shown = {
                    key: value for key, value in each.items() if key not in ("note", "chance") and value is not None
                }
                print(name, shown, flush=True)


if __name__ == "__main__":
    main()
