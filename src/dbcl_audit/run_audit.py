"""The parts of an audit that rehearse a run as it is: fixed shards, its own local steps, momentum and cohort.

Three rehearsals, from the worst case to the run itself: few parties, of whom one attacks and sees every round; as many
clients as the run has in a round, all in every round; and all its clients, with the run's participation.
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
from dbcl_audit import picture_quality as pictures
from dbcl_audit.attacks.members import member_findings
from dbcl_audit.attacks.roc import Array
from dbcl_audit.attacks.span import span_membership_findings, unmixed_findings
from dbcl_audit.attacks.span_rounds import rewound_changes, round_span_findings
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
from dbcl_audit.attacks.update_labels import Answered, LabelReader, update_label_findings
from dbcl_audit.attacks.update_pictures import COSINE, update_picture_findings
from dbcl_audit.findings import Finding
from dbcl_audit.job import Job
from dbcl_audit.rehearsal import ServerSaw
from dbcl_audit.run_rehearsal import RunRehearsal, Shards, rehearse_run, shards_of

SERVER_ROUND = 2
"""The round of which the server attacks one update: the model has moved, and clients do not know their examples yet."""
MOST_MEMBERS = 1000
"""Of larger fleets so many members are looked for."""


def few_parties(job: Job) -> list[Finding]:
    """Members, updates and one update from the server's seat, with few parties that all take part in every round."""
    where = f"{job.clients} parties with fixed shards"
    played = _rehearsed(job, "few", clients=job.clients, rounds=job.budget.run_rounds, where=where)
    trajectory = _trajectory(job, played)
    job.tell(f"{where}: members, over all rounds")
    findings = member_findings(played, trajectory, null=job.budget.null_examples, seed=job.seed)
    findings += trajectory_update_findings(trajectory, played.recorded.truth, "client")
    findings += _server(job, played) + _exact_updates(job, played)
    if job.budget.known_ends:
        for what, knowledge in _ends(job, played).items():
            job.tell(f"{where}: members, knowing {what}")
            known = trajectory.knowing(knowledge)
            findings += [
                replace(each, attack=f"{each.attack}, knowing {what}")
                for each in member_findings(played, known, null=job.budget.null_examples, seed=job.seed)
                if each.attack == "likelihood ratio and losses over all rounds"
            ]
    return [replace(each, rehearsal=where) for each in findings]


def whole_cohort(job: Job) -> list[Finding]:
    """Members and updates, with as many clients as the run has in a round, all of them in every round.

    Once by one client, and where there are lanes once by as many that collude.
    """
    count = min(job.config.cohort, len(job.task.division or range(job.config.clients)))
    where = f"{count} clients with fixed shards, all in every round"
    findings = []
    lanes = job.lanes
    for allies in (0, lanes - 1) if lanes > 1 and count > lanes else (0,):
        name = f"cohort-{allies}"
        played = _rehearsed(job, name, clients=count, rounds=job.budget.run_rounds, where=where, allies=allies)
        trajectory = _trajectory(job, played)
        job.tell(f"{where}: members, {1 + allies} attack")
        note = f"{1 + allies} of {count} clients together" if allies else ""
        findings += member_findings(played, trajectory, null=job.budget.null_examples, seed=job.seed, note=note)
        findings += trajectory_update_findings(trajectory, played.recorded.truth, played.recorded.seat, note)
    return [replace(each, rehearsal=where) for each in findings]


def as_it_is(job: Job) -> list[Finding]:
    """Members, with all clients of the run and its participation, by a client that sees only its own rounds."""
    config = job.config
    count, cohort = len(job.task.division or range(config.clients)), config.cohort
    where = f"as the run is: {cohort} of {count} clients in a round"
    if cohort < 2:
        job.not_attacked["members, as the run is"] = "a round has one client, which is alone with the server"
        return []
    played = _rehearsed(job, "all", clients=None, cohort=cohort, rounds=job.budget.all_rounds, where=where)
    if len(played.recorded.attacker) < 3:
        job.not_attacked["members, as the run is"] = "no client takes part three times in the rehearsal's rounds"
        return []
    played = replace(played, shards=_fewer(played.shards, played.known, job.seed))
    trajectory = _trajectory(job, played)
    job.tell(f"{where}: members")
    findings = member_findings(played, trajectory, null=job.budget.null_examples, seed=job.seed)
    plan = privacy_plan(config, len(job.task.train))
    if plan is not None:
        bound = _bound(plan)
        said = f"the guarantee allows a client to be told with AUC {bound:.3f} at most"
        findings = [replace(each, note=said, budget={**each.budget, "auc bound": bound}) for each in findings]
    return [replace(each, rehearsal=where) for each in findings]


def _rehearsed(
    job: Job, name: str, *, clients: int | None, rounds: int, where: str, cohort: int | None = None, allies: int = 0
) -> RunRehearsal:
    job.tell(f"rehearsal: {where}")
    rounds = min(rounds, job.config.rounds) if job.config.privacy is not None else rounds
    shards = shards_of(job.config, job.task, clients=clients, seed=job.seed)
    return rehearse_run(
        job.config, job.task, shards, job.scratch / name, rounds=rounds, cohort=cohort, allies=allies, seed=job.seed,
        progress=lambda *_: job.step(),
    )  # fmt: skip


def _trajectory(job: Job, played: RunRehearsal) -> Trajectory:
    recorded = played.recorded
    return Trajectory(recorded.attacker, _knowledge(job, played), allies=recorded.allies, step=job.step)


def _knowledge(job: Job, played: RunRehearsal) -> Knowledge:
    """What every attacker of a rehearsal has: examples of its own, and what is public of a guarantee."""
    own = played.shards.examples.subset(played.shards.own)
    known = Knowledge(own, job.task.objective, job.budget.drift_examples)
    plan = privacy_plan(played.config, sum(map(len, played.shards.of_clients)))
    return known if plan is None else replace(known, noise=partial(noise_covariance, plan), clip=plan.clip)


def noise_covariance(plan: PrivacyPlan, rounds: Sequence[int]) -> Array:
    """Return the covariance of a guarantee's noise over the observed rounds: sigma^2 A C^-1 C^-T A^T.

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
    """The largest AUC with which a mu-GDP mechanism allows two neighbours to be told apart: Phi(mu / sqrt 2)."""
    return (1 + math.erf(plan.mu / 2)) / 2


def _ends(job: Job, played: RunRehearsal) -> dict[str, Knowledge]:
    """What attackers know who have the first weights, such as published ones, or receive the model in the end."""
    truth, rounds = played.recorded.truth, job.budget.run_rounds
    first = truth.weights(0)
    released = [(released_shares(played.config, rounds), {name: played.released[name] for name in first})]
    known = _knowledge(job, played)
    return {
        "W_0": replace(known, start=first),
        "the released model": replace(known, released=released),
        "both": replace(known, start=first, released=released),
    }


def released_shares(config: RunConfig, rounds: int) -> Mapping[int, float]:
    """Of which rounds' W the released model is the mean, after so many: the last one's, or a running mean.

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


def _server(job: Job, played: RunRehearsal) -> list[Finding]:
    """One client's update of several steps, as the server has it: who was in it, and which pictures."""
    dataset, shards = job.task.pictures, played.shards
    if dataset is None:
        return []
    victim = next(client for client in range(len(shards.of_clients)) if client not in played.known)
    saw = played.recorded.server_saw(min(SERVER_ROUND, job.budget.run_rounds - 1), victim)
    rows = np.concatenate([shards.of_clients[client] for client in saw.clients])
    members, others = (_inputs(shards, each) for each in (rows, shards.others))
    job.tell("server's seat: one update of several steps")
    findings = span_membership_findings(saw.broadcast, saw.tensors, members, others)
    findings += _labels_and_few_pictures(job, played, saw)
    limit = job.budget.programmes
    if limit and len(saw.clients) == 1:
        findings += unmixed_findings(
            saw.broadcast, saw.tensors, members, pictures.span(dataset), limit=limit, step=lambda *_: job.step(),
            solver_steps=job.budget.solver_steps,
        )  # fmt: skip
    return findings


def _exact_updates(job: Job, played: RunRehearsal) -> list[Finding]:
    """Members by the span of the others' updates, where a client knows these exactly: no veil, and one lane."""
    if job.task.pictures is None or job.config.sketch.veil or job.lanes > 1:
        return []
    shards = played.shards
    members, others = (_inputs(shards, each) for each in (shards.members(played.known), shards.others))
    return round_span_findings(rewound_changes(played.recorded.attacker), members, others, played.recorded.seat)


def _labels_and_few_pictures(job: Job, played: RunRehearsal, saw: ServerSaw) -> list[Finding]:
    """The labels of the client's shard, and single pictures of clients that have one and take the run's steps on it."""
    dataset, shards = job.task.pictures, played.shards
    if dataset is None or len(saw.clients) > 1:
        return []
    training, every = job.task.training(job.config), shards.examples.take(np.arange(len(shards.examples)))
    own = shards.examples.take(shards.own)
    template = played.recorded.attacker.template()
    reader = LabelReader(template, training, (own.inputs, own.targets), seed=job.seed)
    client = Answered(saw.broadcast, saw.tensors, shards.of_clients[saw.clients[0]])
    job.tell("server's seat: the labels of one update")
    findings = update_label_findings([client], every.targets, reader)
    if not job.budget.step_pictures:
        return findings
    single = []
    for row in shards.others[: job.budget.step_pictures]:
        local = blinded(template, saw.broadcast)
        alone, number = shards.examples.subset(np.array([row])), saw.broadcast.round
        training.train(local, alone, seed=bytes(32), round=number, client=0)
        sent = make_update(local, saw.broadcast, examples=1).tensors
        single.append(Answered(saw.broadcast, sent, np.array([row])))
    whole = replace(dataset, x_train=every.inputs, y_train=every.targets)
    return findings + update_picture_findings(template, single, whole, training, [COSINE], tell=job.tell)


def _inputs(shards: Shards, rows: np.ndarray) -> Tensor:
    inputs = shards.examples.take(rows).inputs
    assert isinstance(inputs, Tensor)
    return inputs


def _fewer(shards: Shards, known: tuple[int, ...], seed: int) -> Shards:
    """The same with fewer of the others' examples to look for, where there are very many."""
    others = [client for client in range(len(shards.of_clients)) if client not in known]
    each = max(1, MOST_MEMBERS // max(len(others), 1))
    rng = np.random.default_rng(seed)
    if sum(len(shards.of_clients[client]) for client in others) <= MOST_MEMBERS:
        return shards
    order = rng.permutation(others)[: MOST_MEMBERS // each]
    picked = [
        rows if client in known else (rng.permutation(rows)[:each] if client in order else rows[:0])
        for client, rows in enumerate(shards.of_clients)
    ]
    return replace(shards, of_clients=tuple(picked))
