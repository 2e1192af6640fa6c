"""Parts of an audit that simulate single SGD steps on batches chosen by the auditor."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dbcl.data.examples import Rows
from dbcl.errors import DataError
from dbcl.simulation.task import Task
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.labels import label_finding
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_images import TrajectoryMatching, trajectory_image_findings
from dbcl_audit.attacks.trajectory_properties import trajectory_property_findings
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
from dbcl_audit.attacks.updates import estimates, scored_updates
from dbcl_audit.attacks.victim import Changes
from dbcl_audit.context import AuditContext
from dbcl_audit.effort import AuditEffort
from dbcl_audit.findings import Finding
from dbcl_audit.simulated_run import (
    ATTACKER,
    VICTIM,
    Script,
    SimulatedRun,
    colluders_of,
    draw_batches,
    simulate_batches,
)

PROPERTY_NOISE_SCALE = 10.0
"""Value of `Knowledge.process_noise_scale`. Large, because batches are fresh in every round and
successive updates differ.
"""
SINGLE = "{clients} parties, single steps on fresh batches"
"""Name of these simulated runs in findings."""


def attack_properties(context: AuditContext) -> list[Finding]:
    """Infer updates and properties in a run in which either all or none of the examples in a
    victim's batch have the property.
    """
    own, script = property_script(context.task, context.effort, context.clients, context.seed)
    context.tell("simulated run: batches with and without a property")
    simulated = _simulate(context, script, "properties")
    found = estimates(simulated.attacker, context.effort.estimators, context.tell)
    findings = scored_updates(simulated.attacker, simulated.truth, found, context)
    findings += _over_all_rounds(simulated, context, own)
    if context.task.holds is None:
        context.not_attacked["property"] = "no property of these examples is known; it can be given with the data"
        return _in_single_steps(findings, context.clients)
    effort = context.effort
    findings += property_findings(
        simulated,
        context.task,
        context.task.holds,
        own,
        found,
        batches=effort.own_batches,
        examples=effort.own_examples,
        seed=context.seed,
        tell=context.tell,
        min_lag=effort.min_lag,
    )
    return _in_single_steps(findings, context.clients)


def property_steps(context: AuditContext) -> int:
    """Expected progress steps of `attack_properties`."""
    effort, estimators = context.effort, len(context.effort.estimators)
    if context.guaranteed:
        return 0
    updates = 2 * estimators * context.tensors  # estimated, then scored
    learners = 4 + estimators  # the attacker's own batches, a forest for each source, fidelities
    learners += 2 * effort.rounds + context.tensors  # over all rounds: the drift, and the filter
    # With several lanes, server and client have different models of the victim's, and each its own filters.
    return 1 + effort.rounds + updates + learners + _filters(effort) * min(context.lanes, 2)


def _filters(effort: AuditEffort) -> int:
    return effort.rounds - min(effort.min_lag, effort.rounds // 3)


def attack_colluding(context: AuditContext) -> list[Finding]:
    """Infer updates and properties in a run in which one client of each lane colludes with those of
    the other lanes.
    """
    lanes, clients = context.lanes, max(context.clients, 2 * context.lanes)
    own, script = property_script(context.task, context.effort, clients, context.seed)
    context.tell(f"simulated run: {lanes} of {clients} clients collude")
    simulated = _simulate(context, script, "colluders", colluders=colluders_of(lanes))
    found = estimates(simulated.attacker, ["smoother"], context.tell, allies=simulated.allies)
    findings = scored_updates(simulated.attacker, simulated.truth, found, context, simulated.allies)
    findings += _over_all_rounds(simulated, context, own)
    together = f"{lanes} of {clients} clients together, one of each lane"
    noted = [replace(each, note=f"{together}; {each.note}" if each.note else together) for each in findings]
    return _in_single_steps(noted, clients)


def colluding_steps(context: AuditContext) -> int:
    """Expected progress steps of `attack_colluding`."""
    if context.guaranteed or context.lanes == 1:
        return 0
    return 6 + context.effort.rounds + 2 * context.tensors + _filters(context.effort)


def _simulate(
    context: AuditContext, script: Script, name: str, *, colluders: tuple[int, ...] = (), number: int = 0
) -> SimulatedRun:
    return simulate_batches(
        context.config,
        context.task,
        script,
        context.scratch / name,
        seed=context.seed + number,
        colluders=colluders,
        progress=context.played,
    )


def _over_all_rounds(simulated: SimulatedRun, context: AuditContext, own: Rows) -> list[Finding]:
    """Infer updates and properties from all rounds together, with the drift computed from the
    attacker's own examples.
    """
    context.tell("updates, over all rounds: the drift")
    task, count = context.task, context.effort.property_examples
    examples = task.train.subset(own)
    knowledge = Knowledge(examples, task.objective, count, process_noise_scale=PROPERTY_NOISE_SCALE)
    trajectory = Trajectory(simulated.attacker, knowledge, allies=simulated.allies, step=context.step)
    findings = trajectory_update_findings(trajectory, simulated.truth, simulated.adversary)
    if task.holds is None:
        return findings
    holds, few = task.holds, own[:count]
    truth = [bool(holds[simulated.script[round, VICTIM]].mean() > 0.5) for round in trajectory.rounds[:-1]]
    context.tell("property: the attacker's own examples, over all rounds")
    return findings + trajectory_property_findings(
        simulated, trajectory, task.train.subset(few), holds[few], truth, seed=context.seed
    )


def _in_single_steps(findings: Sequence[Finding], clients: int) -> list[Finding]:
    return [replace(each, simulated_run=SINGLE.format(clients=clients)) for each in findings]


def property_script(task: Task, effort: AuditEffort, clients: int, seed: int) -> tuple[Rows, Script]:
    """Draw the attacker's own examples and every client's batches.

    The attacker has half of the examples, and the other clients train on the other half. If the
    task has a known property, either all or none of the examples in a victim's batch have the
    property.

    Args:
        task: Data of the run.
        effort: Number of rounds and batch size.
        clients: Number of clients.
        seed: Seed of the random draws.

    Returns:
        Indices of the attacker's own examples, and the script.

    Raises:
        DataError: Too few examples have the property, or too few lack it.

    >>> from dbcl.simulation import RunConfig, task_of
    >>> from dbcl_audit.effort import QUICK
    >>> own, script = property_script(task_of(RunConfig()), QUICK, 2, 0)
    >>> len(own), script.shape
    (2000, (40, 2, 16))
    """
    half = len(task.train) // 2
    order = np.random.default_rng(seed).permutation(len(task.train))
    own, rest = order[:half], order[half:]
    script = draw_batches(rest, (effort.rounds, clients, effort.batch), seed)
    script[:, ATTACKER] = draw_batches(own, (effort.rounds, effort.batch), seed + 1)
    if task.holds is None:
        return own, script
    holds: NDArray[np.bool_] = task.holds
    with_, without = rest[holds[rest]], rest[~holds[rest]]
    if min(len(with_), len(without), holds[own].sum()) < 2:
        raise DataError(f"too few examples have the property {task.property_name!r}, or too few lack it")
    for round in range(effort.rounds):
        pool = with_ if (round * 7 + seed) % 13 % 2 else without
        script[round, VICTIM] = draw_batches(pool, (effort.batch,), seed + 2 + round)
    return own, script


def attack_images(context: AuditContext) -> list[Finding]:
    """Recover images and labels in a run in which every client trains on a single image per
    round.
    """
    config, dataset, effort = context.config, context.task.pictures, context.effort
    if dataset is None:
        context.not_attacked["images and labels"] = context.task.why_no_pictures
        return []
    rounds = _image_rounds(effort)
    script = draw_batches(np.arange(len(dataset.y_train)), (rounds, context.clients, 1), context.seed + 17)
    context.tell("simulated run: single images")
    simulated = _simulate(context, script, "images")
    lanes = simulated.attacker[0].broadcast.plan.lanes
    names = ["option I", "rewind"] if config.sketch.veil == 0 and lanes == 1 else ["option I", "smoother"]
    found: dict[str, Changes] = estimates(simulated.attacker, names, context.tell)
    matching = Matching(steps=effort.steps, restarts=effort.restarts, tv=1e-3 if config.sketch.veil else 0.0)
    inverting = Matching("cosine", steps=4 * effort.steps, restarts=1, tv=0.1) if effort.inverting else None
    # With lanes, the first round's update cannot be estimated: nothing shows W in the victim's lane before it.
    first = 0 if lanes == 1 else 4
    findings = image_findings(
        simulated,
        dataset,
        found,
        list(range(first, first + effort.images)),
        matching,
        context.tell,
        inverting=inverting,
        solver_steps=effort.solver_steps,
    )
    return _in_single_steps([*findings, label_finding(simulated, dataset, list(range(rounds - 1)))], context.clients)


def image_steps(context: AuditContext) -> int:
    """Expected progress steps of `attack_images`."""
    if context.guaranteed:
        return 0
    each_image = 4 + context.effort.inverting  # two by the server, two by a client
    return 1 + _image_rounds(context.effort) + 2 * context.tensors + context.effort.images * each_image


def _image_rounds(effort: AuditEffort) -> int:
    return effort.min_lag + effort.images + 8


def attack_fixed_images(context: AuditContext) -> list[Finding]:
    """Recover images and labels in runs with two clients, in which the victim trains on the same
    image in every round.
    """
    dataset, effort = context.task.pictures, context.effort
    if dataset is None or context.clients != 2:
        return []
    simulated = []
    for number in range(effort.fixed_images):
        context.tell(f"simulated run: one image in all rounds, {number + 1} of {effort.fixed_images}")
        seed = context.seed + 31 + number
        script = draw_batches(np.arange(len(dataset.y_train)), (effort.fixed_rounds, 2, 1), seed)
        script[:, VICTIM] = script[0, VICTIM]
        simulated.append(_simulate(context, script, f"fixed-{number}", number=number))
    matching = TrajectoryMatching(steps=effort.fixed_steps)
    findings = trajectory_image_findings(simulated, dataset, matching, tell=context.tell, step=context.step)
    return [replace(each, simulated_run="2 parties, one image in all rounds") for each in findings]


def fixed_image_steps(context: AuditContext) -> int:
    """Expected progress steps of `attack_fixed_images`."""
    effort = context.effort
    return effort.fixed_images * (effort.fixed_rounds + effort.fixed_steps) if context.follows_updates else 0
