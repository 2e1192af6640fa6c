"""`frontier`: what each defence costs, and what the strongest attackers still get of the clients' examples.

Longer than 350 lines: three adversaries of one run, whose findings share one table and one figure.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dbcl.engines.stacked.engine import one_thread
from dbcl.errors import DbclError
from dbcl.simulation import presets
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown, rounds_cell
from experiments.training import task_on, train

if TYPE_CHECKING:
    from dbcl_audit.attacks.trajectory import Trajectory
    from dbcl_audit.findings import Finding
    from dbcl_audit.simulated_run import ShardRun

TARGET = 0.9
DEFENCES: dict[str, dict[str, ExperimentJob]] = {
    "none": {"none": {"preset": "plain", "lr": 0.1}},
    "dropout": {"dropout 1/2": {"preset": "paper", "sketch": "sampling-v1", "lr": 0.05}},
    "noise on updates": {
        "noise 0.003": {"preset": "plain", "update_clip": 0.5, "update_noise": 0.003, "lr": 0.1},
        "noise 0.01": {"preset": "plain", "update_clip": 0.5, "update_noise": 0.01, "lr": 0.1},
    },
    "paper": {
        "ratio 2": {"preset": "paper", "ratio": 2.0, "lr": 0.05},
        "ratio 4": {"preset": "paper", "ratio": 4.0, "lr": 0.02},
        "ratio 8": {"preset": "paper", "ratio": 8.0, "lr": 0.01},
    },
    "blind": {f"veil {veil}": {"preset": "blind", "veil": veil} for veil in (0.05, 0.2, 0.5, 1.0)},
    "private": {f"epsilon {epsilon:g}": {"preset": "private", "epsilon": epsilon} for epsilon in (2.0, 4.0, 8.0)},
}
"""By family: the preset, and what differs from it. Rates are the better of two or three; ratio 8 diverges at 0.05."""
COLOURS = {**figures.COLOURS, "none": figures.COLOURS["plain"], "dropout": "#d08a2c", "noise on updates": "#2d6a3e"}
FIRST = [("none", False), ("ratio 2", False), ("veil 0.2", False), ("epsilon 8", False), ("veil 0.2", True)]
"""Most informative runs, which are played first."""
QUICK = [("none", False), ("ratio 2", False), ("veil 0.2", True)]
ADVERSARIES = {
    "two": "client, two parties", "cohort": "client, a cohort", "run": "client, as the run is", "server": "server",
}  # fmt: skip
WITH_SUMS, WITH_EPSILON = "sums need 8 clients in a lane", "the guarantee is for 1,000 clients"
SPAN_ROUNDS = 6
"""The first rounds, which tell most, are what the span attack takes together."""
FLOOR, TOLERANCE = 3e-3, 0.1
"""With no veil an attacker takes it to be so large, relative to the weights, and solves to this residual. Without any
noise conjugate gradients take 200 steps in double precision, in 20 times the time, to tell the same members."""
MOST_MEMBERS = 1000


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Every defence with and without secure aggregation."""
    order = {each: number for number, each in enumerate(QUICK if quick else FIRST)}
    fixed: ExperimentJob = {
        "data": "digits",
        "rounds": 200,
        "attacked": 30,
        "attacked_run": 60,
        "own": 500,
        "null": 300,
    }
    if quick:
        fixed |= {"rounds": 20, "attacked": 20, "attacked_run": 20, "own": 200, "null": 100}
    found = [
        {"family": family, "defence": name, "sums": sums, "seed": 0, **fixed, **settings}
        for sums in (False, True)
        for family, defences in DEFENCES.items()
        for name, settings in defences.items()
    ]
    for job in found:
        if job["preset"] == "private":
            job["rounds"] = 400  # the guarantee is for all of them
    found.sort(key=lambda job: order.get((job["defence"], job["sums"]), len(order)))
    return found[: len(QUICK)] if quick else found


def config_of(job: ExperimentJob) -> RunConfig:
    """The run of a job; with sums of clients a fifth of them take part, which is 20, and as many of 1,000 as before.

    >>> config = config_of(jobs(False, Path("nowhere"))[4])
    >>> config.sketch.veil, config.secure_aggregation, config.cohort
    (0.2, True, 20)
    """
    named = ("family", "defence", "sums", "preset", "attacked", "attacked_run", "own", "null")
    own = {name: value for name, value in job.items() if name not in named}
    if job["sums"]:
        own["secure_aggregation"] = True
        if job["preset"] != "private":
            own["fraction"] = 0.2
    return presets.preset(job["preset"], **own)


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train a run, then simulate it and attack as every adversary."""
    config, title = config_of(job), title_of(job)
    run = train(config, context, title)
    task = task_on("cpu", config.data, config.model, context.data_dir)
    attacks: dict[str, dict[str, Any]] = {}
    not_attacked: dict[str, str] = {}
    for adversary, part in _simulated_runs(job, config):
        if isinstance(part, str):
            not_attacked[adversary] = part
            continue
        context.tell(f"{title}: {ADVERSARIES[adversary]}", 0, 1)
        try:
            with tempfile.TemporaryDirectory() as scratch, one_thread(True):
                attacks |= part(task, Path(scratch), partial(context.tell, f"{title}: {ADVERSARIES[adversary]}", 0, 1))
        except DbclError as error:
            not_attacked[adversary] = str(error).splitlines()[0]
    plan = privacy_plan(config, len(task.train))
    kept = {name: run[name] for name in ("accuracy", "accuracies", "rounds", "bytes", "error")}
    # A mu-GDP mechanism lets two neighbours be told apart with an AUC of Phi(mu / sqrt 2) at most.
    bound = None if plan is None else round((1 + math.erf(plan.mu / 2)) / 2, 4)
    return {**kept, "attacks": attacks, "not_attacked": not_attacked, "auc_bound": bound}


def title_of(job: ExperimentJob) -> str:
    """Name a job.

    >>> title_of({"family": "blind", "defence": "veil 0.2", "sums": True})
    'blind, veil 0.2, sums'
    """
    named = [job["family"], *([] if job["defence"].startswith(job["family"]) else [job["defence"]])]
    return ", ".join([*named, *(["sums"] if job["sums"] else [])])


Part = Callable[[Task, Path, Callable[[], None]], dict[str, dict[str, Any]]]


def _simulated_runs(job: ExperimentJob, config: RunConfig) -> Iterator[tuple[str, "str | Part"]]:
    """Return how each adversary is simulated, or why it is not."""
    whole = partial(_attacked, job, config, rounds=job["attacked"])
    if job["preset"] == "private":
        yield "two", WITH_EPSILON
        yield "cohort", WITH_EPSILON
        yield "run", partial(_attacked, job, config, adversaries=("run", "server"), rounds=job["attacked_run"])
        return
    yield "two", WITH_SUMS if job["sums"] else partial(whole, adversaries=("two",), clients=2)
    yield "cohort", partial(whole, adversaries=("cohort", "server"), clients=config.cohort)
    yield "run", partial(_attacked, job, config, adversaries=("run",), rounds=job["attacked_run"])


def _attacked(
    job: ExperimentJob,
    config: RunConfig,
    task: Task,
    scratch: Path,
    step: Callable[[], None],
    *,
    adversaries: Sequence[str],
    rounds: int,
    clients: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Simulate one run, with `clients` in every round or as the run is; attack as a client and as the server."""
    from dbcl_audit.simulated_run import shards_of, simulate_run  # needs SciPy, which is an extra

    shards = shards_of(config, task, clients=clients, seed=job["seed"])
    cohort = clients or config.cohort
    played = simulate_run(
        config, task, shards, scratch, rounds=rounds, cohort=cohort, seed=job["seed"], progress=lambda *_: step()
    )
    found = {adversaries[0]: {**_client(job, played, task, step), "clients": cohort, "of": len(shards.of_clients)}}
    if "server" in adversaries:
        found["server"] = _server(played)
    return found


def _client(job: ExperimentJob, played: "ShardRun", task: Task, step: Callable[[], None]) -> dict[str, Any]:
    """Find the others' examples as a client: by all rounds, and by spans if it knows their updates."""
    from dbcl_audit.attacks.members import member_findings
    from dbcl_audit.attacks.span_rounds import rewound_changes, round_span_findings

    shards = played.shards
    most = max(1, MOST_MEMBERS // len(shards.of_clients))
    rng = np.random.default_rng(job["seed"])
    picked = [rows if client in played.known else rng.permutation(rows)[:most]
              for client, rows in enumerate(shards.of_clients)]  # fmt: skip
    played = replace(played, shards=replace(shards, of_clients=tuple(picked)))
    trajectory = _trajectory(job, played, task, step)
    findings = member_findings(played, trajectory, null=job["null"], seed=job["seed"])
    everybody = played.config.cohort == len(shards.of_clients)
    if everybody and not played.config.sketch.veil and played.config.privacy is None:
        inside, outside = _inputs(played, played.shards.members(played.known)), _inputs(played, shards.others)
        findings += round_span_findings(
            rewound_changes(played.recorded.attacker, SPAN_ROUNDS), inside, outside, "client"
        )
    return {**_strongest(findings), "seen": len(trajectory.rounds)}


def _trajectory(job: ExperimentJob, played: "ShardRun", task: Task, step: Callable[[], None]) -> "Trajectory":
    """Return a client's view of all rounds; it knows the settings, the clipping and the planned noise."""
    from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
    from dbcl_audit.fixed_shards import noise_covariance

    shards, config = played.shards, played.config
    own = shards.examples.subset(shards.own)
    known = Knowledge(
        own, task.objective, job["own"], clip=config.update_clip if config.privacy is None else config.privacy.clip
    )
    plan = privacy_plan(config, sum(map(len, shards.of_clients)))
    if plan is not None:
        known = replace(known, noise=partial(noise_covariance, plan))
    trajectory = Trajectory(played.recorded.attacker, known, step=step)
    if plan is None and not config.sketch.veil:
        scales = trajectory.scales
        trajectory.scales = {
            name: replace(each, veil=max(each.veil, FLOOR * each.weight)) if trajectory.views[name].sketched else each
            for name, each in scales.items()
        }
        models = {name: trajectory.model_of(name) for name in trajectory.views}
        trajectory.__dict__["posteriors"] = {name: model.solve(TOLERANCE) for name, model in models.items()}
    return trajectory


def _server(played: "ShardRun") -> dict[str, Any]:
    """Find the examples in a client's updates, or in the sums that it is in: of one round, and of several."""
    from dbcl_audit.attacks.span_rounds import round_span_findings, sent_changes

    shards = played.shards
    victim = next(client for client in range(len(shards.of_clients)) if client not in played.known)
    changes, clients = sent_changes(played.recorded, victim, SPAN_ROUNDS)
    inside = _inputs(played, np.concatenate([shards.of_clients[client] for client in clients]))
    nobody = np.concatenate([shards.others, shards.own])[:1000]  # the server needs no examples of its own
    outside = _inputs(played, nobody)
    one = round_span_findings(changes[2:3] or changes[:1], inside, outside, "server")
    several = round_span_findings(changes, inside, outside, "server")
    best = _strongest(one + several)
    return {**best, "one_update": _strongest(one)["tpr"], "in_a_sum": len(clients), "members": len(inside)}


def _inputs(played: "ShardRun", rows: Any) -> torch.Tensor:
    inputs = played.shards.examples.take(rows).inputs
    assert isinstance(inputs, torch.Tensor)
    return inputs


def _strongest(findings: "Sequence[Finding]") -> dict[str, Any]:
    """The attack with the highest AUC, and the highest share of members that any finds with 0.1 % of false alarms."""
    aucs = [each for each in findings if each.measure == "auc"]
    rates = [each.value for each in findings if each.measure == "tpr at 0.1 % fpr"]
    best = max(aucs, key=lambda each: each.value)
    return {"auc": round(best.value, 4), "attack": best.attack, "tpr": round(max(rates), 4) if rates else None}


def table(found: Results) -> str:
    """Everything, a line for each defence."""
    lines = []
    for job in found.jobs:
        runs = found.of(family=job["family"], defence=job["defence"], sums=job["sums"])
        name = [job["family"], job["defence"], "yes" if job["sums"] else "no"]
        lines.append([*name, NOT_RUN, *[""] * 7] if not runs else [*name, *_cells(runs[0])])
    heads = ["family", "defence", "sums", "accuracy", f"rounds to {TARGET:.0%}", f"MB to {TARGET:.0%}", "MB in all"]
    heads += [f"{adversary}: AUC" for name, adversary in ADVERSARIES.items() if name != "server"] + [
        "server: found, AUC"
    ]
    first = found.jobs[0]
    return "\n\n".join([_setting(first), markdown(heads, lines)])


def _setting(job: ExperimentJob) -> str:
    """Describe the setting that all lines of the table share."""
    return (
        "The embedded digits and the MLP 784-200-200-10. 100 clients with 40 examples each, 10 of them in a round, "
        f"{job['rounds']} rounds; with sums (secure aggregation) 20 in a round, since a sum needs 8 in each lane. "
        "`private`: 1,000 clients with 4 examples, 100 in a round, 400 rounds. One seed.\n\n"
        "A client looks for the examples that the others train on: among two parties and among the clients of a round, "
        f"where all take part in all of {job['attacked']} rounds, and as the run is, in {job['attacked_run']} rounds "
        "of which it sees those that it is drawn for. The cell has the strongest of matched filters over all rounds, "
        "losses, and, where there is no veil, the span of the others' updates, which it works out exactly. An AUC of "
        "0.5 is guessing. The server looks for examples in the span of the first layer's updates of one client, or "
        f"of the sums that it is in, over {SPAN_ROUNDS} rounds: the share that it finds with 0.1 % of false alarms, "
        "and the AUC. It knows the sketch and the weights, so that only sums and noise are in its way.\n\n"
        "Two parties make no sum of 8, and a guarantee for 1,000 clients would be noise alone among ten, so that those "
        "are attacked only as the run is; the guarantee bounds that AUC as the cell says."
    )


def to_target(run: Mapping[str, Any]) -> int | None:
    """After how many rounds a run first had the target accuracy.

    >>> to_target({"accuracies": [0.5, 0.91, 0.89]}), to_target({"accuracies": [0.5]})
    (2, None)
    """
    return next((number for number, score in enumerate(run["accuracies"], 1) if score >= TARGET), None)


def _cells(run: Mapping[str, Any]) -> list[str]:
    """The cells of a run: what it costs, and what leaks."""
    reached = to_target(run)
    cost = rounds_cell([{**run, "reached": reached is not None, "rounds": reached or run["rounds"]}])
    sent = "–" if reached is None else f"{_megabytes(run, reached):,.0f}"
    score = "–" if run["accuracy"] is None else f"{run['accuracy']:.1%}"
    cells = [score, cost, sent, f"{run['bytes'] / 1e6:,.0f}"]
    for adversary in ("two", "cohort", "run"):
        got = run["attacks"].get(adversary)
        bound = f" (at most {run['auc_bound']:.2f})" if adversary == "run" and run["auc_bound"] is not None else ""
        cells.append(f"{got['auc']:.3f}{bound}" if got else f"– ({run['not_attacked'].get(adversary, '')})")
    got = run["attacks"].get("server")
    if not got:
        return [*cells, "–"]
    of = "" if got["in_a_sum"] == 1 else f", sums of {got['in_a_sum']}"
    rate = "–" if got["tpr"] is None else f"{got['tpr']:.0%}"
    return [*cells, f"{rate}, {got['auc']:.3f}{of}"]


def _megabytes(run: Mapping[str, Any], rounds: int) -> float:
    """All that was sent until a round: every round sends the same."""
    return float(run["bytes"] * rounds / run["rounds"] / 1e6)


def draw(found: Results) -> Mapping[str, Any]:
    """Draw leakage against the test error and against bytes, a point for each defence; hollow with sums."""
    rows = {
        "cohort": ("auc", "AUC of a client among those of a round"), "run": ("auc", "AUC of a client, as the run is"),
        "server": ("tpr", "found by the server, 0.1 % false"),
    }  # fmt: skip
    figure, panels = figures.new(11, 12, 3, 2)
    for (left, right), (adversary, (measure, title)) in zip(panels, rows.items(), strict=True):
        for family in DEFENCES:
            for sums in (False, True):
                _family(left, right, found, family, sums, adversary, measure)
        for axes in (left, right):
            axes.set_ylim((0.45, 1.03) if measure == "auc" else (-0.04, 1.05))
            axes.axhline(0.5 if measure == "auc" else 0.001, color=figures.MORE[-1], linewidth=0.8, linestyle=":")
        figures.log_scale(left, "x")
        figures.log_scale(right, "x")
        figures.label(left, "test error after all rounds, %", title)
        figures.label(right, f"MB to {TARGET:.0%} (triangles: all that was sent, and not reached)", title)
        for axes in (left, right):
            if axes.get_legend() is not None:
                axes.get_legend().remove()
    names = panels[1, 0].get_legend_handles_labels()  # as the run is, where every family has points
    figure.legend(*names, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    return {"frontier": figure}


def _family(left: Any, right: Any, found: Results, family: str, sums: bool, adversary: str, measure: str) -> None:
    """The points of a family in two panels, joined."""
    points = []
    for job in found.jobs_of(family=family, sums=sums):
        for run in found.of(family=family, defence=job["defence"], sums=sums):
            got = run["attacks"].get(adversary, {}).get(measure)
            if got is not None and run["accuracy"] is not None:
                reached = to_target(run)
                sent = _megabytes(run, reached or run["rounds"])
                points.append((job["defence"], 100 - 100 * run["accuracy"], sent, reached is not None, got))
    points.sort(key=lambda point: list(DEFENCES[family]).index(point[0]))
    colour, name = COLOURS[family], f"{family}, sums" if sums else family
    style: dict[str, Any] = {"color": colour, "markerfacecolor": "white" if sums else colour, "alpha": 0.9}
    for axes, x in ((left, 1), (right, 2)):
        axes.plot([p[x] for p in points], [p[4] for p in points], "--" if sums else "-", color=colour, linewidth=1)
        for number, point in enumerate(points):
            mark = "o" if x == 1 or point[3] else ">"
            axes.plot(point[x], point[4], mark, **style, label=name if x == 1 and not number else None)
            if len(DEFENCES[family]) > 1:
                text = point[0].split()[-1]
                axes.annotate(text, (point[x], point[4]), (4, 4), textcoords="offset points", fontsize=7, color=colour)


EXPERIMENT = Experiment(
    name="frontier",
    title="What defences cost and what they leave",
    what="Accuracy, rounds and bytes of each defence against what the strongest attackers get, with and without sums.",
    minutes="35 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"scipy": "audit"},
)
