"""One audit from beginning to end: rehearse, attack from every seat, score, and collect the findings."""

import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from torch import nn

from dbcl._version import __version__
from dbcl.data.examples import Rows
from dbcl.engines.stacked.engine import one_thread
from dbcl.errors import AuditError, DataError, DbclError, NotAttackableError
from dbcl.plan import SketchPlan
from dbcl.protocol import blinded
from dbcl.simulation.build import build_plan, build_server, calibration
from dbcl.simulation.config import RunConfig
from dbcl.simulation.metrics import read_metrics
from dbcl.simulation.run import read_config
from dbcl.simulation.task import Task, task_of
from dbcl.simulation.user_code import own_code
from dbcl.transcripts import Transcript, Truth
from dbcl_audit.attacks import OnProgress
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.labels import label_finding
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.membership import membership_findings
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_pictures import TrajectoryMatching, trajectory_picture_findings
from dbcl_audit.attacks.trajectory_properties import trajectory_property_findings
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
from dbcl_audit.attacks.updates import estimates, update_findings
from dbcl_audit.attacks.victim import Changes
from dbcl_audit.budget import FULL, Budget
from dbcl_audit.findings import Audit, Finding, with_interval
from dbcl_audit.guarantee import MEASURE, TARGET, guarantee_finding, measure_guarantee
from dbcl_audit.job import Job, Steps
from dbcl_audit.rehearsal import ATTACKER, VICTIM, Rehearsal, Script, colluders_of, draw_batches, rehearse
from dbcl_audit.run_audit import as_it_is, few_parties, whole_cohort

BOUNDED = "the guarantee bounds what they can tell of one {unit}, from every seat but the server's"
"""Why a run with a guarantee is attacked by canaries and by looking for members, and by nothing else."""
LARGE = 2_000_000
"""Networks with fewer numbers are attacked in one thread: what their kernels take is less than threads wait."""
PROPERTY_LEEWAY = 10.0
"""Batches are fresh in every round, so that a round must stand out from its neighbours."""
SINGLE = "{clients} parties, single steps on fresh batches"
"""What the rehearsals of rehearsal.py are called."""

log = logging.getLogger(__name__)


def audit(
    folder: Path,
    *,
    budget: Budget = FULL,
    clients: int = 2,
    seed: int = 0,
    data_dir: str | None = None,
    task: Task | None = None,
    allow_code: bool = False,
    tell: OnProgress = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Audit a finished run: its recorded transcripts where it has some, and rehearsals under its settings.

    `task` is that of a run that `dbcl.simulate` played: `audit(run.folder, task=run.task)`. Where the settings of a run
    name code of somebody's, as module:name, it is audited only with `allow_code`.

    A rehearsal has `clients` parties, all in every round, who each take one step of SGD on one batch. For a run with
    lanes there is one more, of at least twice as many parties as lanes, in which one client of each lane pools what it
    saw. Under secure aggregation there are as many parties as the smallest sums take. `tell` is called with what is
    being done, `progress` with how many steps of the work are done, and of how many: every round, tensor,
    picture and shadow model is one. A part that fails becomes a finding that says why, and the others go on.

    Of a run with a guarantee that is measured instead, by canaries in a rehearsal of all its clients.

    >>> audit(Path("nowhere"))
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: nowhere holds no run: it has no config.toml
    """
    began = perf_counter()
    config = read_config(folder)
    task = task or task_of(config, data_dir, allow_code=allow_code)
    plan = build_plan(config, task.make_model(0), task.layers, examples=len(task.train))
    if config.secure_aggregation:  # the server sees sums of so many
        clients = max(clients, plan.lanes * config.secagg.min_cohort)
    numbers = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    parts, expected = _parts(config, folder, plan, budget)
    steps = Steps(expected, progress)
    progress(0, steps.ends[-1])

    def tell_and_step(text: str) -> None:
        tell(text)
        steps.step()

    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as scratch, one_thread(numbers < LARGE):
        job = Job(config, task, folder, Path(scratch), budget, clients, seed, tell_and_step, steps.step, plan.lanes)
        for name, part in parts.items():
            try:
                with own_code(config):
                    findings += part(job)
            except NotAttackableError as reason:
                job.not_attacked[name] = str(reason)
            except Exception as error:  # whatever fails in one part, the findings of the others stand
                log.debug("%s failed", name, exc_info=True)
                findings.append(_failed(name, error))
            steps.end_part()
    promised = config.privacy is not None
    rehearsal = "all clients of the run, and canaries" if promised else f"{clients} parties or more, as each says"
    settings = {**config.options(), "clear": plan.unprotected, "rehearsal": rehearsal}
    return Audit(
        folder.name,
        settings,
        _run_facts(folder),
        seats(plan, config),
        tuple(with_interval(finding) for finding in findings),
        perf_counter() - began,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        parties=None if promised else clients,
        property_name=task.property_name,
        budget={**asdict(budget), "seed": seed},
        not_attacked=job.not_attacked,
    )


def _parts(
    config: RunConfig, folder: Path, plan: SketchPlan, budget: Budget
) -> tuple[dict[str, Callable[[Job], list[Finding]]], list[int]]:
    """What an audit does, by name, and about how many steps each part takes."""
    tensors = len(plan.tensors)
    if config.privacy is not None:
        canaries = min(budget.canary_rounds or config.rounds, config.rounds) + 2
        if not _members_too(config):
            return {TARGET: _guarantee}, [canaries]
        return {TARGET: _guarantee, "members as the run is": as_it_is}, [canaries, budget.all_rounds + 3 * tensors]
    parts: dict[str, Callable[[Job], list[Finding]]] = {
        f"updates from {transcript.name}": partial(_recorded, transcript)
        for transcript in sorted((folder / "transcripts").glob("client-*"))
    }
    recordings = len(parts)
    parts |= {"properties": _properties, "pictures": _pictures, "membership": _membership}
    if plan.lanes > 1:
        parts["colluders"] = partial(_colluders, plan.lanes)
    expected = _expected(budget, tensors, recordings, plan.lanes)
    seen = 3 * budget.run_rounds + 2 * tensors  # played, drift, scores
    if config.server_optimizer != "adam":
        parts |= {"pictures in all rounds": _fixed_pictures, "members": few_parties}
        fits = budget.fixed_pictures * (budget.fixed_rounds + budget.fixed_steps)
        expected += [fits, seen * (4 if budget.known_ends else 1) + budget.programmes]
        if budget.whole_cohort and config.cohort > 1:
            parts["members of a cohort"] = whole_cohort
            expected.append(seen * min(plan.lanes, 2))
        parts["members as the run is"] = as_it_is
        expected.append(budget.all_rounds + budget.all_rounds // 3 + 2 * tensors)
    return parts, expected


def _members_too(config: RunConfig) -> bool:
    """Whether members of a run with a guarantee are looked for: where its unit is a client, whose shard is fixed."""
    return config.privacy is not None and config.privacy.unit == "client" and config.server_optimizer != "adam"


def _guarantee(job: Job) -> list[Finding]:
    """The epsilon of a run with a guarantee, from a rehearsal in which canaries take part."""
    rest = "labels and properties" if _members_too(job.config) else "labels, properties and membership"
    job.not_attacked[f"updates, pictures, {rest}"] = BOUNDED.format(
        unit=job.config.privacy.unit if job.config.privacy is not None else "client"
    )
    job.tell("rehearsal: canaries among the run's clients")
    found = measure_guarantee(job.config, job.task, rounds=job.budget.canary_rounds, seed=job.seed, step=job.step)
    return [guarantee_finding(found)]


def _expected(budget: Budget, tensors: int, recordings: int, lanes: int) -> list[int]:
    """About how many steps each part takes: recorded transcripts, properties, pictures, membership and colluders."""
    updates = 2 * len(budget.estimators) * tensors  # estimated, then scored
    learners = 2 + len(budget.estimators) + 2  # the attacker's own batches, a forest for each source, fidelities
    learners += 2 * budget.rounds + tensors  # over all rounds: the drift, and the filter
    filters = budget.rounds - min(budget.min_lag, budget.rounds // 3)
    # With several lanes server and client have different models of the victim's, and each its own filters.
    properties = 1 + budget.rounds + updates + learners + filters * min(lanes, 2)
    each_picture = 4 + budget.inverting  # two from the server's seat, two from a client's
    pictures = 1 + _picture_rounds(budget) + 2 * tensors + budget.pictures * each_picture
    together = [1 + budget.rounds + 2 * tensors + 5 + filters] if lanes > 1 else []
    return [*[updates] * recordings, properties, pictures, 3 + budget.shadow_models, *together]


def _picture_rounds(budget: Budget) -> int:
    return budget.min_lag + budget.pictures + 8


def _recorded(folder: Path, job: Job) -> list[Finding]:
    """Updates, from what a client of the run itself saw there."""
    transcript = Transcript(folder)
    found = estimates(transcript, job.budget.estimators, job.tell)
    each = _updates(transcript, Truth(folder.parent), found, job)
    return [replace(finding, attack=f"{finding.attack} ({transcript.party} of the run)") for finding in each]


def _updates(
    transcript: Transcript, truth: Truth, found: dict[str, Changes], job: Job, allies: Sequence[Transcript] = ()
) -> list[Finding]:
    """The findings about updates, with how many rounds each was scored on."""
    min_lag = min(job.budget.min_lag, len(transcript) // 2)
    every = len(transcript) - 1  # from each seen round to the next
    scored = sum(lag >= min_lag for lag in range(1, every + 1))
    each = update_findings(transcript, truth, found, job.tell, min_lag=job.budget.min_lag, allies=allies)
    return [
        replace(finding, budget={**finding.budget, "scored rounds": scored if finding.attack in found else every})
        for finding in each
    ]


def _properties(job: Job) -> list[Finding]:
    """Updates and properties, from one rehearsal in which the victim's batches all have the property or all lack it."""
    own, script = property_script(job.task, job.budget, job.clients, job.seed)
    job.tell("rehearsal: batches with and without a property")
    where = job.scratch / "properties"
    rehearsal = rehearse(job.config, job.task, script, where, seed=job.seed, progress=lambda *_: job.step())
    found = estimates(rehearsal.attacker, job.budget.estimators, job.tell)
    findings = _updates(rehearsal.attacker, rehearsal.truth, found, job)
    findings += _over_all_rounds(rehearsal, job, own)
    if job.task.holds is None:
        job.not_attacked["property"] = "no property of these examples is known; it can be given with the data"
        return _in_single_steps(findings, job)
    return _in_single_steps(findings + _inferred(rehearsal, job, job.task.holds, own, found), job)


def _over_all_rounds(rehearsal: Rehearsal, job: Job, own: Rows) -> list[Finding]:
    """Updates and properties from all rounds together, with the drift that the attacker's own examples give."""
    job.tell("updates, over all rounds: the drift")
    examples = job.task.train.subset(own)
    knowledge = Knowledge(examples, job.task.objective, job.budget.property_examples, leeway=PROPERTY_LEEWAY)
    trajectory = Trajectory(rehearsal.attacker, knowledge, allies=rehearsal.allies, step=job.step)
    findings = trajectory_update_findings(trajectory, rehearsal.truth, rehearsal.seat)
    if job.task.holds is None:
        return findings
    holds, few = job.task.holds, own[: job.budget.property_examples]
    truth = [bool(holds[rehearsal.script[round, VICTIM]].mean() > 0.5) for round in trajectory.rounds[:-1]]
    job.tell("property: the attacker's own examples, over all rounds")
    few_examples = job.task.train.subset(few)
    return findings + trajectory_property_findings(
        rehearsal, trajectory, few_examples, holds[few], truth, seed=job.seed
    )


def _in_single_steps(findings: Sequence[Finding], job: Job) -> list[Finding]:
    return [replace(each, rehearsal=SINGLE.format(clients=job.clients)) for each in findings]


def _inferred(
    rehearsal: Rehearsal, job: Job, holds: NDArray[np.bool_], own: Rows, found: dict[str, Changes]
) -> list[Finding]:
    return property_findings(
        rehearsal,
        job.task,
        holds,
        own,
        found,
        batches=job.budget.own_batches,
        examples=job.budget.own_examples,
        seed=job.seed,
        tell=job.tell,
        min_lag=job.budget.min_lag,
    )


def _colluders(lanes: int, job: Job) -> list[Finding]:
    """Updates and properties, from a rehearsal in which one client of each lane shows the others what it saw."""
    clients = max(job.clients, 2 * lanes)
    own, script = property_script(job.task, job.budget, clients, job.seed)
    job.tell(f"rehearsal: {lanes} of {clients} clients collude")
    rehearsal = rehearse(
        job.config,
        job.task,
        script,
        job.scratch / "colluders",
        seed=job.seed,
        colluders=colluders_of(lanes),
        progress=lambda *_: job.step(),
    )
    found = estimates(rehearsal.attacker, ["smoother"], job.tell, allies=rehearsal.allies)
    findings = _updates(rehearsal.attacker, rehearsal.truth, found, job, rehearsal.allies)
    findings += _over_all_rounds(rehearsal, job, own)
    together = f"{lanes} of {clients} clients together, one of each lane"
    return [
        replace(
            each, note=f"{together}; {each.note}" if each.note else together, rehearsal=SINGLE.format(clients=clients)
        )
        for each in findings
    ]


def property_script(task: Task, budget: Budget, clients: int, seed: int) -> tuple[Rows, Script]:
    """Who trains on what: which examples are the attacker's own, and everybody's batches.

    Half of the examples are the attacker's, the others train on the rest. The victim's batches all have the property
    of the task or all lack it, where one is known.

    >>> from dbcl_audit.budget import QUICK
    >>> own, script = property_script(task_of(RunConfig()), QUICK, 2, 0)
    >>> len(own), script.shape
    (2000, (40, 2, 16))
    """
    half = len(task.train) // 2
    order = np.random.default_rng(seed).permutation(len(task.train))
    own, rest = order[:half], order[half:]
    script = draw_batches(rest, (budget.rounds, clients, budget.batch), seed)
    script[:, ATTACKER] = draw_batches(own, (budget.rounds, budget.batch), seed + 1)
    if task.holds is None:
        return own, script
    holds = task.holds
    with_, without = rest[holds[rest]], rest[~holds[rest]]
    if min(len(with_), len(without), holds[own].sum()) < 2:
        raise DataError(f"too few examples have the property {task.property_name!r}, or too few lack it")
    for round in range(budget.rounds):
        pool = with_ if (round * 7 + seed) % 13 % 2 else without
        script[round, VICTIM] = draw_batches(pool, (budget.batch,), seed + 2 + round)
    return own, script


def _pictures(job: Job) -> list[Finding]:
    """Pictures and labels, from a rehearsal in which every client trains on a single picture a round."""
    config, dataset, budget = job.config, job.task.pictures, job.budget
    if dataset is None:
        job.not_attacked["pictures and labels"] = job.task.why_no_pictures
        return []
    rounds = _picture_rounds(budget)
    script = draw_batches(np.arange(len(dataset.y_train)), (rounds, job.clients, 1), job.seed + 17)
    job.tell("rehearsal: single pictures")
    where = job.scratch / "pictures"
    rehearsal = rehearse(config, job.task, script, where, seed=job.seed, progress=lambda *_: job.step())
    lanes = rehearsal.attacker[0].broadcast.plan.lanes
    names = ["option I", "rewind"] if config.sketch.veil == 0 and lanes == 1 else ["option I", "smoother"]
    found = estimates(rehearsal.attacker, names, job.tell)
    matching = Matching(steps=budget.steps, restarts=budget.restarts, tv=1e-3 if config.sketch.veil else 0.0)
    inverting = Matching("cosine", steps=4 * budget.steps, restarts=1, tv=0.1) if budget.inverting else None
    # With lanes, the first round's update is not to be seen: nothing shows W in the victim's lane before it.
    first = 0 if lanes == 1 else 4
    picked = list(range(first, first + budget.pictures))
    findings = image_findings(
        rehearsal,
        dataset,
        found,
        picked,
        matching,
        job.tell,
        inverting=inverting,
        solver_steps=budget.solver_steps,
    )
    return _in_single_steps([*findings, label_finding(rehearsal, dataset, list(range(rounds - 1)))], job)


def _fixed_pictures(job: Job) -> list[Finding]:
    """Pictures and labels, from rehearsals of two parties in which the victim has one picture for all rounds."""
    dataset, budget = job.task.pictures, job.budget
    if dataset is None or job.clients != 2:
        return []
    rehearsals = []
    for number in range(budget.fixed_pictures):
        job.tell(f"rehearsal: one picture in all rounds, {number + 1} of {budget.fixed_pictures}")
        script = draw_batches(np.arange(len(dataset.y_train)), (budget.fixed_rounds, 2, 1), job.seed + 31 + number)
        script[:, VICTIM] = script[0, VICTIM]
        where = job.scratch / f"fixed-{number}"
        played = rehearse(job.config, job.task, script, where, seed=job.seed + number, progress=lambda *_: job.step())
        rehearsals.append(played)
    matching = TrajectoryMatching(steps=budget.fixed_steps)
    findings = trajectory_picture_findings(rehearsals, dataset, matching, tell=job.tell, step=job.step)
    return [replace(each, rehearsal="2 parties, one picture in all rounds") for each in findings]


def _membership(job: Job) -> list[Finding]:
    """Membership in the training data, from the finished model and from what a client would see of it."""
    config, path = job.config, job.folder / "model.safetensors"
    if not path.exists():
        raise AuditError(f"{path} is missing: the run is not finished")

    def make(number: int) -> nn.Module:
        job.step()  # shadow models are made one after another, each when the one before is trained
        return job.task.make_model(number)

    model = make(0)
    try:
        model.load_state_dict(safetensors.torch.load_file(path))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise AuditError(f"{path} cannot be read: {error}") from None
    server = build_server(
        config, model, layers=job.task.layers, insecure_seed=job.seed, calibration=calibration(config, job.task)
    )
    view = blinded(make(1), server.open_round())
    task = replace(job.task, make_model=make)
    training = replace(task.training(config), batch_size=20, epochs=10, steps=None, lr_decay=1.0, proximal=0.0)
    shadow_models = job.budget.shadow_models
    return membership_findings(model, view, task, training, shadow_models=shadow_models, seed=job.seed, tell=job.tell)


def seats(plan: SketchPlan, config: RunConfig) -> tuple[tuple[str, str, str], ...]:
    """Who sees what under a plan: party, what it receives, what it does not.

    >>> config = RunConfig.from_options(veil=0.0, lanes=1)
    >>> seats(build_plan(config, task_of(config).make_model(0)), config)[0][1][:65]
    "the sketches' seeds; sketches of 1.weight, 3.weight without noise"
    """
    sketched = [tensor.name for tensor in plan.tensors if tensor.sketched]
    noise = f" with secret noise of {config.sketch.veil:g} times their size" if config.sketch.veil else " without noise"
    if config.privacy is not None:
        noise = f" with the noise of the guarantee, for one {config.privacy.unit}"
    clear = f"; in clear: {', '.join(plan.unprotected)}" if plan.unprotected else ""
    lane = f" in one of {plan.lanes} lanes" if plan.lanes > 1 else ""
    sent = f"the sketches' seeds; sketches of {', '.join(sketched) or 'nothing'}{lane}"
    if config.privacy is not None and not sketched:
        sent = "the weights"
    client = f"{sent}{noise}{clear}; its own data"
    together = (
        ("colluders", f"sketches in all {plan.lanes} lanes together, which are the weights{noise}; their own data",
         "other clients' updates one by one"),
    ) if plan.lanes > 1 else ()  # fmt: skip
    server = "the true weights, all seeds, each client's update", "clients' data"
    if config.secure_aggregation:
        sums = f"the sum of the updates in each lane, of {config.secagg.min_cohort} clients or more"
        server = f"the true weights, all seeds, {sums}", "a client's update; clients' data"
    return (
        ("client", client, "the true weights; other clients' updates one by one"),
        *together,
        ("server", *server),
        ("anyone", "the finished model, if it is published", "the messages, if the transport encrypts them"),
    )  # fmt: skip


def _run_facts(folder: Path) -> dict[str, Any]:
    try:
        history = read_metrics(folder)
    except OSError:
        return {}
    if not history:
        return {}
    sent = sum(metrics.bytes_up + metrics.bytes_down for metrics in history)
    return {history[-1].metric: history[-1].score, "rounds": history[-1].round, "bytes": sent}


def _failed(what: str, error: Exception) -> Finding:
    expected = isinstance(error, DbclError)
    reason = str(error) if expected else f"{type(error).__name__}: {error} (a fault of dbcl; please report it)"
    if what == TARGET:
        return Finding("matched filter", "client", "adaptive", TARGET, MEASURE, float("nan"), failures=(reason,))
    words = {"pictures": "image", "properties": "property", "member": "membership"}
    target = next((target for word, target in words.items() if what.startswith(word)), "update")
    seat = "colluders" if what == "colluders" else "client"
    return Finding(what, seat, "adaptive", target, "cosine", float("nan"), failures=(reason,))
