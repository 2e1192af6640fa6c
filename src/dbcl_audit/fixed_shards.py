"""Parts of an audit that simulate the run with its fixed shards, local steps, momentum and cohort.

There are three simulated runs, ordered from the worst case to the actual settings: a few parties,
one of which attacks and observes every round; as many clients as the run's cohort, with full
participation; and all clients of the run, with the run's participation rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from dbcl.privacy import PrivacyPlan
from dbcl.privacy.factorization import quotient
from dbcl.protocol import blinded, make_update
from dbcl.protocol.running_mean import decay_after
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.config import RunConfig
from dbcl_audit.attacks.members import member_findings
from dbcl_audit.attacks.roc import Array
from dbcl_audit.attacks.span import span_membership_findings
from dbcl_audit.attacks.span_rounds import rewound_changes, round_span_findings
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
from dbcl_audit.attacks.update_images import COSINE, update_image_findings
from dbcl_audit.attacks.update_labels import Answered, LabelReader, update_label_findings
from dbcl_audit.context import AuditContext
from dbcl_audit.findings import Finding
from dbcl_audit.guarantee import has_fixed_members
from dbcl_audit.simulated_run import ServerObservation, ShardRun, Shards, shards_of, simulate_run

SERVER_ROUND = 2
"""Round of the update that the server attacks. By then the model has changed, but has not yet
learnt the examples.
"""
MAX_MEMBERS = 1000
"""Maximum number of members to test. With more members, a random subset is tested."""
MIN_ROUNDS = 3
"""Minimum number of rounds that an attacker must observe."""


def few_parties(context: AuditContext) -> list[Finding]:
    """Infer members and updates, and attack one update as the server, with few parties and full
    participation.
    """
    where = f"{context.clients} parties with fixed shards"
    played = _simulated(context, "few", clients=context.clients, rounds=context.effort.run_rounds, where=where)
    trajectory = _trajectory(context, played)
    context.tell(f"{where}: members, over all rounds")
    findings = member_findings(played, trajectory, null=context.effort.null_examples, seed=context.seed)
    findings += trajectory_update_findings(trajectory, played.recorded.truth, "client")
    findings += _server(context, played) + _exact_updates(context, played)
    if context.effort.known_ends:
        for what, knowledge in _ends(context, played).items():
            context.tell(f"{where}: members, knowing {what}")
            known = trajectory.knowing(knowledge)
            findings += [
                replace(each, attack=f"{each.attack}, knowing {what}")
                for each in member_findings(played, known, null=context.effort.null_examples, seed=context.seed)
                if each.attack == "likelihood ratio and losses over all rounds"
            ]
    return [replace(each, simulated_run=where) for each in findings]


def whole_cohort(context: AuditContext) -> list[Finding]:
    """Infer members and updates with as many clients as the run's cohort and full participation.

    One client attacks. With several lanes, one client of each lane also attack together.
    """
    count = min(context.config.cohort, len(context.task.division or range(context.config.clients)))
    where = f"{count} clients with fixed shards, all in every round"
    findings = []
    lanes = context.lanes
    for allies in (0, lanes - 1) if lanes > 1 and count > lanes else (0,):
        name = f"cohort-{allies}"
        played = _simulated(context, name, clients=count, rounds=context.effort.run_rounds, where=where, allies=allies)
        trajectory = _trajectory(context, played)
        context.tell(f"{where}: members, {1 + allies} attack")
        note = f"{1 + allies} of {count} clients together" if allies else ""
        findings += member_findings(played, trajectory, null=context.effort.null_examples, seed=context.seed, note=note)
        findings += trajectory_update_findings(trajectory, played.recorded.truth, played.recorded.adversary, note)
    return [replace(each, simulated_run=where) for each in findings]


def as_it_is(context: AuditContext) -> list[Finding]:
    """Infer members with all clients of the run and its participation rate, as a client that
    observes only its own rounds.
    """
    config = context.config
    count, cohort = len(context.task.division or range(config.clients)), config.cohort
    where = f"as the run is: {cohort} of {count} clients in a round"
    if cohort < 2:
        context.not_attacked["members, as the run is"] = "a round has one client, which is alone with the server"
        return []
    played = _simulated(context, "all", clients=None, cohort=cohort, rounds=context.effort.all_rounds, where=where)
    if len(played.recorded.attacker) < MIN_ROUNDS:
        context.not_attacked["members, as the run is"] = "no client takes part three times in the simulated rounds"
        return []
    played = replace(played, shards=_fewer(played.shards, played.known, context.seed))
    trajectory = _trajectory(context, played)
    context.tell(f"{where}: members")
    findings = member_findings(played, trajectory, null=context.effort.null_examples, seed=context.seed)
    plan = privacy_plan(config, len(context.task.train))
    if plan is not None:
        bound = _bound(plan)
        said = f"the guarantee allows a client to be told with AUC {bound:.3f} at most"
        findings = [replace(each, note=said, budget={**each.budget, "auc bound": bound}) for each in findings]
    return [replace(each, simulated_run=where) for each in findings]


def few_steps(context: AuditContext) -> int:
    """Expected progress steps of `few_parties`."""
    return _steps_with_all(context) * (4 if context.effort.known_ends else 1)


def whole_cohort_steps(context: AuditContext) -> int:
    """Expected progress steps of `whole_cohort`."""
    wanted = context.effort.whole_cohort and context.config.cohort > 1
    return _steps_with_all(context) * min(context.lanes, 2) if wanted else 0


def as_it_is_steps(context: AuditContext) -> int:
    """Expected progress steps of `as_it_is`."""
    rounds = context.effort.all_rounds
    if context.guaranteed:
        return rounds + 3 * context.tensors if has_fixed_members(context) else 0
    return rounds + rounds // 3 + 2 * context.tensors if context.follows_updates else 0


def _steps_with_all(context: AuditContext) -> int:
    """Progress steps of a simulated run with full participation: rounds, drift and scores."""
    return 3 * context.effort.run_rounds + 2 * context.tensors if context.follows_updates else 0


def _simulated(
    context: AuditContext,
    name: str,
    *,
    clients: int | None,
    rounds: int,
    where: str,
    cohort: int | None = None,
    allies: int = 0,
) -> ShardRun:
    context.tell(f"simulated run: {where}")
    rounds = min(rounds, context.config.rounds) if context.config.privacy is not None else rounds
    shards = shards_of(context.config, context.task, clients=clients, seed=context.seed)
    return simulate_run(
        context.config, context.task, shards, context.scratch / name, rounds=rounds, cohort=cohort, allies=allies,
        seed=context.seed, progress=context.played,
    )  # fmt: skip


def _trajectory(context: AuditContext, played: ShardRun) -> Trajectory:
    recorded = played.recorded
    return Trajectory(recorded.attacker, _knowledge(context, played), allies=recorded.allies, step=context.step)


def _knowledge(context: AuditContext, played: ShardRun) -> Knowledge:
    """Return the knowledge common to all attackers: their own examples, and the public settings of
    a guarantee.
    """
    own = played.shards.examples.subset(played.shards.own)
    known = Knowledge(own, context.task.objective, context.effort.drift_examples)
    plan = privacy_plan(played.config, sum(map(len, played.shards.of_clients)))
    return known if plan is None else replace(known, noise=partial(noise_covariance, plan), clip=plan.clip)


def noise_covariance(plan: PrivacyPlan, rounds: Sequence[int]) -> Array:
    """Return the covariance of a guarantee's noise over the observed rounds: sigma^2 A C^-1 C^-T
    A^T.

    >>> facts = {"rounds": 400, "clients": 1000, "cohort": 100}
    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, correlation="independent", **facts)
    >>> (noise_covariance(plan, [1, 2]) / plan.sigma**2).round(3)
    array([[1., 1.],
           [1., 2.]])
    """
    last = max(rounds)
    strategy, workload = plan.strategy, plan.workload
    whole = np.convolve(strategy.numerator, workload.inverse)
    column = workload.lr * quotient(strategy.denominator, whole, max(last, 1))
    streams = np.zeros((len(rounds), last + 1))
    for row, seen in enumerate(rounds):
        if seen == 0:
            streams[row, last] = workload.lr  # noise of its own, on W_0
        else:
            streams[row, :seen] = column[:seen][::-1]
    found: Array = plan.sigma**2 * streams @ streams.T
    return found


def _bound(plan: PrivacyPlan) -> float:
    """Maximum AUC for distinguishing two neighbouring datasets under a mu-GDP mechanism: Phi(mu /
    sqrt 2).
    """
    return (1 + math.erf(plan.mu / 2)) / 2


def _ends(context: AuditContext, played: ShardRun) -> dict[str, Knowledge]:
    """Return the knowledge of attackers that know the initial weights, receive the released model,
    or both.
    """
    truth, rounds = played.recorded.truth, context.effort.run_rounds
    first = truth.weights(0)
    released = [(released_shares(played.config, rounds), {name: played.released[name] for name in first})]
    known = _knowledge(context, played)
    return {
        "W_0": replace(known, start=first),
        "the released model": replace(known, released=released),
        "both": replace(known, start=first, released=released),
    }


def released_shares(config: RunConfig, rounds: int) -> Mapping[int, float]:
    """Return the weight of each round's W in the released model: 1 for the last round, or the
    weights of a running mean.

    >>> {number: round(share, 3) for number, share in released_shares(RunConfig(ema_decay=0.5), 2).items()}
    {1: 0.091, 2: 0.909}
    """
    if not config.ema_decay:
        return {rounds: 1.0}
    shares = {0: 1.0}
    for number in range(1, rounds + 1):
        decay = decay_after(config.ema_decay, number)
        shares = {before: decay * share for before, share in shares.items()} | {number: 1 - decay}
    return {number: share for number, share in shares.items() if share}


def _server(context: AuditContext, played: ShardRun) -> list[Finding]:
    """Attack one client's update of several local steps as the server."""
    dataset, shards = context.task.pictures, played.shards
    if dataset is None:
        return []
    victim = next(client for client in range(len(shards.of_clients)) if client not in played.known)
    saw = played.recorded.server_observation(min(SERVER_ROUND, context.effort.run_rounds - 1), victim)
    rows = np.concatenate([shards.of_clients[client] for client in saw.clients])
    members, others = (_inputs(shards, each) for each in (rows, shards.others))
    context.tell("server: one update of several steps")
    findings = span_membership_findings(saw.broadcast, saw.tensors, members, others)
    findings += _labels_and_few_images(context, played, saw)
    return findings


def _exact_updates(context: AuditContext, played: ShardRun) -> list[Finding]:
    """Infer members from the span of the other clients' updates, which a client knows exactly
    without veil and lanes.
    """
    if context.task.pictures is None or context.config.sketch.veil or context.lanes > 1:
        return []
    shards = played.shards
    members, others = (_inputs(shards, each) for each in (shards.members(played.known), shards.others))
    return round_span_findings(rewound_changes(played.recorded.attacker), members, others, played.recorded.adversary)


def _labels_and_few_images(context: AuditContext, played: ShardRun, saw: ServerObservation) -> list[Finding]:
    """Infer the labels of a client's shard, and the images of clients with a single image."""
    dataset, shards = context.task.pictures, played.shards
    if dataset is None or len(saw.clients) > 1:
        return []
    training, every = context.task.training(context.config), shards.examples.take(np.arange(len(shards.examples)))
    own = shards.examples.take(shards.own)
    template = played.recorded.attacker.template()
    reader = LabelReader(template, training, (own.inputs, own.targets), seed=context.seed)
    client = Answered(saw.broadcast, saw.tensors, shards.of_clients[saw.clients[0]])
    context.tell("server: the labels of one update")
    findings = update_label_findings([client], every.targets, reader)
    if not context.effort.step_images:
        return findings
    single = []
    for row in shards.others[: context.effort.step_images]:
        local = blinded(template, saw.broadcast)
        alone, number = shards.examples.subset(np.array([row])), saw.broadcast.round
        training.train(local, alone, seed=bytes(32), round=number, client=0)
        sent = make_update(local, saw.broadcast, examples=1).tensors
        single.append(Answered(saw.broadcast, sent, np.array([row])))
    whole = replace(dataset, x_train=every.inputs, y_train=every.targets)
    return findings + update_image_findings(template, single, whole, training, [COSINE], tell=context.tell)


def _inputs(shards: Shards, rows: np.ndarray) -> Tensor:
    inputs = shards.examples.take(rows).inputs
    assert isinstance(inputs, Tensor)
    return inputs


def _fewer(shards: Shards, known: tuple[int, ...], seed: int) -> Shards:
    """Return the shards with at most `MAX_MEMBERS` members of the other clients."""
    others = [client for client in range(len(shards.of_clients)) if client not in known]
    each = max(1, MAX_MEMBERS // max(len(others), 1))
    rng = np.random.default_rng(seed)
    if sum(len(shards.of_clients[client]) for client in others) <= MAX_MEMBERS:
        return shards
    order = rng.permutation(others)[: MAX_MEMBERS // each]
    picked = [
        rows if client in known else (rng.permutation(rows)[:each] if client in order else rows[:0])
        for client, rows in enumerate(shards.of_clients)
    ]
    return replace(shards, of_clients=tuple(picked))
