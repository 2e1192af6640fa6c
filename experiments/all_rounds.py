"""`all-rounds`: what attacks over all rounds get of the preset `blind`, and a guarantee beside what it allows.

| part | run and target |
|---|---|
| members | two parties, fixed shards of 40, 60 rounds of the preset's FedAvg: the other's examples |
| cohort | the same with ten clients, by one of them and by two of different lanes |
| ends | two parties; the attacker knows W_0, the released model, or both |
| server | one update of 40 examples and 4 steps, as the server sees it: its examples |
| property | two parties, single steps of 32 at the rate 0.01, 120 rounds, 2,000 examples of the attacker's own |
| images | two parties, one image in all of 60 rounds, single steps at the rate 0.01, five victims |
| guarantee | preset private: members of its clients, and canaries, beside what mu allows |
| fresh | a control: members, with examples that the other never had as members |
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dbcl.engines.stacked.engine import one_thread
from dbcl.simulation import preset, task_of
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import markdown

if TYPE_CHECKING:
    from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
    from dbcl_audit.findings import Finding
    from dbcl_audit.simulated_run import ShardRun

Rows = list[dict[str, Any]]

ROUNDS, QUICK_ROUNDS = 60, 20
FIELDS = ("attack", "adversary", "target", "measure", "value", "low", "high", "chance", "note")
SEEDS = {
    "members": 5, "server": 5, "fresh": 2, "images": 1, "cohort": 2, "property": 2, "ends": 1, "guarantee": 1,
}  # fmt: skip
"""Number of seeds of each part."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Return every part with its seeds; the reduced setting has two short parts."""
    if quick:
        return [{"part": part, "rounds": QUICK_ROUNDS, "seed": 0} for part in ("server", "members")]
    return [{"part": part, "seed": seed} for part, count in SEEDS.items() for seed in range(count)]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Simulate the run of a part and attack it."""
    context.tell(title_of(job), 0, 1)
    with tempfile.TemporaryDirectory() as scratch, one_thread(True):
        return {"rows": PARTS[job["part"]](Path(scratch), job["seed"], job.get("rounds", ROUNDS))}


def title_of(job: ExperimentJob) -> str:
    """Name a job.

    >>> title_of({"part": "members", "seed": 0})
    'members, seed 0'
    """
    return f"{job['part']}, seed {job['seed']}"


def _rows(findings: "Sequence[Finding]", **more: Any) -> Rows:
    return [{**more, **{name: _plain(getattr(each, name)) for name in FIELDS}} for each in findings]


def _plain(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else None if value is None else str(value)


def _run(seed: int, scratch: Path, rounds: int, clients: int = 2, allies: int = 0) -> "ShardRun":
    from dbcl_audit.simulated_run import shards_of, simulate_run

    config = preset("blind")
    task = task_of(config)
    shards = shards_of(config, task, clients=clients, seed=seed)
    return simulate_run(config, task, shards, scratch / "run", rounds=rounds, allies=allies, seed=seed)


def _knowledge(run: "ShardRun", **more: Any) -> "Knowledge":
    from dbcl_audit.attacks.trajectory import Knowledge

    return Knowledge(run.shards.examples.subset(run.shards.own), **more)


def _trajectory(run: "ShardRun", **more: Any) -> "Trajectory":
    from dbcl_audit.attacks.trajectory import Trajectory

    return Trajectory(run.recorded.attacker, _knowledge(run, **more), allies=run.recorded.allies)


def _members(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.members import member_findings
    from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings

    run = _run(seed, scratch, rounds)
    seen = _trajectory(run)
    return _rows([*member_findings(run, seen), *trajectory_update_findings(seen, run.recorded.truth, "client")])


def _cohort(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.members import member_findings

    found: Rows = []
    for allies in (0, 1):
        run = _run(seed, scratch / str(allies), rounds, clients=10, allies=allies)
        found += _rows(member_findings(run, _trajectory(run)), attackers=1 + allies)
    return found


def _ends(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.members import member_findings
    from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
    from dbcl_audit.fixed_shards import released_shares

    run = _run(seed, scratch, rounds)
    first = run.recorded.truth.weights(0)
    last = [(released_shares(run.config, rounds), {name: run.released[name] for name in first})]
    known: dict[str, dict[str, Any]] = {
        "nothing": {}, "W_0": {"start": first}, "the released model": {"released": last},
        "both": {"start": first, "released": last},
    }  # fmt: skip
    found: Rows = []
    for name, more in known.items():
        seen = _trajectory(run, **more)
        each = [*member_findings(run, seen), *trajectory_update_findings(seen, run.recorded.truth, "client")]
        found += _rows(each, known=name)
    return found


def _server(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.span import span_membership_findings

    run = _run(seed, scratch, rounds)
    victim = next(client for client in (0, 1) if client not in run.known)
    saw, shards = run.recorded.server_observation(2, victim), run.shards
    inside, outside = (shards.examples.take(each).inputs for each in (shards.of_clients[victim], shards.others))
    return _rows(span_membership_findings(saw.broadcast, saw.tensors, inside, outside))


def _property(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
    from dbcl_audit.attacks.trajectory_properties import trajectory_property_findings
    from dbcl_audit.effort import FULL
    from dbcl_audit.simulated_run import VICTIM, simulate_batches
    from dbcl_audit.single_steps import PROPERTY_NOISE_SCALE, property_script

    config = preset("blind", lr=0.01)
    task = task_of(config)
    own, script = property_script(task, replace(FULL, rounds=2 * rounds, batch=32), 2, seed)
    run = simulate_batches(config, task, script, scratch / "run", seed=seed)
    assert task.holds is not None
    examples = task.train.subset(own)
    seen = Trajectory(run.attacker, Knowledge(examples, examples=2000, process_noise_scale=PROPERTY_NOISE_SCALE))
    truth = [bool(task.holds[script[number, VICTIM]].mean() > 0.5) for number in seen.rounds[:-1]]
    return _rows(trajectory_property_findings(run, seen, examples, task.holds[own], truth))


def _images(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.trajectory_images import TrajectoryMatching, trajectory_image_findings
    from dbcl_audit.simulated_run import VICTIM, draw_batches, simulate_batches

    config = preset("blind", lr=0.01)
    task = task_of(config)
    assert task.pictures is not None
    runs = []
    for number in range(5):
        script = draw_batches(np.arange(len(task.train)), (rounds, 2, 1), seed + 31 + number)
        script[:, VICTIM] = script[0, VICTIM]
        runs.append(simulate_batches(config, task, script, scratch / str(number), seed=seed + number))
    return _rows(trajectory_image_findings(runs, task.pictures, TrajectoryMatching()))


def _guarantee(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.context import AuditContext
    from dbcl_audit.effort import FULL
    from dbcl_audit.fixed_shards import as_it_is
    from dbcl_audit.guarantee import guarantee_finding, measure_guarantee

    config = preset("private")
    task, effort = task_of(config), replace(FULL, all_rounds=400)
    context = AuditContext(config, task, Path("none"), scratch, effort, 2, seed, lambda text: None)
    canaries = guarantee_finding(measure_guarantee(config, task, seed=seed))
    auc = {name: canaries.budget[name] for name in ("auc", "auc low", "auc high", "auc bound")}
    return [*_rows(as_it_is(context)), {**_rows([canaries])[0], **auc}]


def _fresh(scratch: Path, seed: int, rounds: int) -> Rows:
    from dbcl_audit.attacks.members import member_findings

    run = _run(seed, scratch, rounds)
    shards = run.shards
    victim = next(client for client in (0, 1) if client not in run.known)
    never = shards.own[-len(shards.of_clients[victim]) :]
    wrong = [never if client == victim else rows for client, rows in enumerate(shards.of_clients)]
    run = replace(run, shards=replace(shards, of_clients=tuple(wrong), own=shards.own[: -len(never)]))
    return _rows(member_findings(run, _trajectory(run)))


PARTS: dict[str, Callable[[Path, int, int], Rows]] = {
    "members": _members, "server": _server, "fresh": _fresh, "images": _images,
    "cohort": _cohort, "property": _property, "ends": _ends, "guarantee": _guarantee,
}  # fmt: skip


def table(found: Results) -> str:
    """Median over the seeds, and each, of every measure of a part."""
    lines = []
    for part in dict.fromkeys(job["part"] for job in found.jobs):
        values: dict[tuple[str, ...], list[float]] = {}
        for run in found.of(part=part):
            for row in run["rows"]:
                more = ", ".join(f"{name} {row[name]}" for name in ("attackers", "known") if name in row)
                if row["value"] is not None:
                    values.setdefault((more, row["attack"], row["measure"]), []).append(float(row["value"]))
        for (more, attack, measure), each in values.items():
            shown = ", ".join(f"{value:.3g}" for value in each)
            lines.append([part, more, attack, measure, f"{statistics.median(each):.3g}", shown])
    text = (
        "Embedded digits, MLP 784-200-200-10, preset `blind` (veil 0.2, two lanes) unless a part says otherwise; "
        "attackers take part in every round. Parts: the docstring of experiments/all_rounds.py."
    )
    return "\n\n".join([text, markdown(["part", "", "attack", "measure", "median", "each"], lines)])


def draw(found: Results) -> Mapping[str, Any]:
    """Draw the AUC of every attack on members by part."""
    figure, panels = figures.new(8, 4)
    axes, place, names = panels[0, 0], 0, list[str]()
    for part in ("members", "cohort", "fresh"):
        values: dict[str, list[float]] = {}
        for run in found.of(part=part):
            for row in run["rows"]:
                if row["measure"] == "auc" and row["target"] == "membership":
                    values.setdefault(f"{part}: {row['attack']}", []).append(float(row["value"]))
        for name, each in values.items():
            axes.plot(each, [place] * len(each), "o", color=figures.MORE[0])
            names.append(name)
            place += 1
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0.5, color=figures.MORE[-1], linewidth=0.8)
    figures.label(axes, "AUC, one point a seed", "")
    return {"all-rounds": figure}


EXPERIMENT = Experiment(
    name="all-rounds",
    title="Attacks over all rounds",
    what="What attacks that read the whole run get of the preset `blind`: members, images, properties, known ends, the "
    "server on one update; and a guarantee beside what it allows.",
    minutes="about 60 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"scipy": "audit", "sklearn": "audit"},
)
