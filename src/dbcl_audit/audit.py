"""Complete audit of a run: `PARTS` lists the attacks, and `audit` runs them and collects the
findings.
"""

import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from dbcl._version import __version__
from dbcl.engines.stacked.engine import one_thread
from dbcl.errors import DbclError, NotAttackableError
from dbcl.plan import SketchPlan
from dbcl.simulation.build import build_plan
from dbcl.simulation.config import RunConfig
from dbcl.simulation.metrics import read_metrics
from dbcl.simulation.run_folder import read_config
from dbcl.simulation.task import Task, task_of
from dbcl.simulation.user_code import user_code
from dbcl_audit.attacks.membership import audit_final_model, final_model_steps
from dbcl_audit.attacks.updates import audit_recording, recording_steps
from dbcl_audit.context import AuditContext, OnProgress, Steps
from dbcl_audit.effort import FULL, AuditEffort
from dbcl_audit.findings import Audit, Finding, Measure, with_interval
from dbcl_audit.fixed_shards import as_it_is, as_it_is_steps, few_parties, few_steps, whole_cohort, whole_cohort_steps
from dbcl_audit.guarantee import audit_guarantee, colluders_of, guarantee_steps
from dbcl_audit.single_steps import (
    attack_colluding,
    attack_fixed_images,
    attack_images,
    attack_properties,
    colluding_steps,
    fixed_image_steps,
    image_steps,
    property_steps,
)

MAX_PARAMETERS_FOR_ONE_THREAD = 2_000_000
"""Number of parameters below which one thread is used, because synchronisation costs more than it
saves.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One attack, or a group of attacks on the same simulated run.

    Attributes:
        name: Name in progress messages and in the finding of a failure.
        adversary: Adversary in the finding of a failure.
        target: Target in the finding of a failure.
        measure: Measure in the finding of a failure.
        run: Runs the attack and returns its findings.
        steps: Returns the expected number of progress steps, or 0 if the part does not apply to the
            run.

    >>> part = Part("nothing", "client", "update", Measure.COSINE, lambda context: [], lambda context: 1)
    >>> part.failed(ValueError("no rounds")).failures
    ('ValueError: no rounds (a fault of dbcl; please report it)',)
    """

    name: str
    adversary: str
    target: str
    measure: Measure
    run: Callable[[AuditContext], list[Finding]]
    steps: Callable[[AuditContext], int]

    def failed(self, error: Exception) -> Finding:
        """Return a finding that contains the error message of a failure."""
        known = isinstance(error, DbclError)
        reason = str(error) if known else f"{type(error).__name__}: {error} (a fault of dbcl; please report it)"
        attacked = self.name, self.adversary, "adaptive", self.target, self.measure
        return Finding(*attacked, math.nan, failures=(reason,))


PARTS: tuple[Part, ...] = (
    Part("matched filter", "client", "guarantee", Measure.EPSILON, audit_guarantee, guarantee_steps),
    Part("properties", "client", "property", Measure.AUC, attack_properties, property_steps),
    Part("images", "client", "image", Measure.PSNR, attack_images, image_steps),
    Part("membership", "anyone", "membership", Measure.AUC, audit_final_model, final_model_steps),
    Part("colluders", "colluders", "update", Measure.COSINE, attack_colluding, colluding_steps),
    Part("images in all rounds", "client", "image", Measure.PSNR, attack_fixed_images, fixed_image_steps),
    Part("members", "client", "membership", Measure.AUC, few_parties, few_steps),
    Part("members of a cohort", "client", "membership", Measure.AUC, whole_cohort, whole_cohort_steps),
    Part("members as the run is", "client", "membership", Measure.AUC, as_it_is, as_it_is_steps),
)
"""All parts of an audit, in order. To add an attack, add a line."""


def parts_of(context: AuditContext) -> list[Part]:
    """Return the parts that apply to a run: one part per recorded client, and the applicable
    entries of `PARTS`.
    """
    recorded = []
    if context.config.privacy is None:
        recorded = [
            Part(
                f"updates from {folder.name}", "client", "update", Measure.COSINE,
                partial(audit_recording, folder), recording_steps,
            )
            for folder in sorted((context.folder / "transcripts").glob("client-*"))
        ]  # fmt: skip
    return [*recorded, *(part for part in PARTS if part.steps(context))]


def audit(
    folder: Path,
    *,
    effort: AuditEffort = FULL,
    clients: int = 2,
    seed: int = 0,
    data_dir: str | None = None,
    task: Task | None = None,
    allow_code: bool = False,
    tell: OnProgress = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Audit a finished run: attack its recorded transcripts, and simulated runs with its settings.

    In a simulated run, `clients` parties take part in every round, and each takes one SGD step on
    one batch. For a run with lanes there is an additional simulated run with at least twice as many
    parties as lanes, in which one client of each lane pools its observations. With secure
    aggregation, a simulated run has as many parties as the smallest sums require. A part that fails
    becomes a finding with the error message, and the other parts continue. For a run with a
    differential-privacy guarantee, canaries measure the epsilon instead.

    Args:
        folder: Folder of the run.
        effort: Number of rounds, images and models that the attacks use.
        clients: Parties of a simulated run.
        seed: Seed of the attacks' random choices.
        data_dir: Folder of datasets.
        task: Task of a run that `dbcl.simulate` created: `audit(run.folder, task=run.task)`.
        allow_code: Import code that the run's settings name as module:name.
        tell: Called with a progress message.
        progress: Called with the number of completed steps and the total number of steps.

    Returns:
        The findings.

    Raises:
        ConfigError: The folder holds no run, or its settings name code that is not allowed.

    >>> audit(Path("nowhere"))
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: nowhere holds no run: it has no config.toml
    """
    began = perf_counter()
    config = read_config(folder)
    task = task or task_of(config, data_dir, allow_code=allow_code)
    plan = build_plan(config, task.make_model(0), task.layers, examples=len(task.train))
    if config.secure_aggregation:  # the server sees sums of this many updates
        clients = max(clients, plan.lanes * config.secagg.min_cohort)
    parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    with tempfile.TemporaryDirectory() as scratch, one_thread(parameters < MAX_PARAMETERS_FOR_ONE_THREAD):
        context = AuditContext(config, task, folder, Path(scratch), effort, clients, seed, tell, plan=plan)
        findings = _run_parts(context, parts_of(context), progress)
    guaranteed = config.privacy is not None
    simulated = "all clients of the run, and canaries" if guaranteed else f"{clients} parties or more, as each says"
    settings = {**config.options(), "unprotected": plan.unprotected, "simulated_run": simulated}
    colluders = colluders_of(config, plan, len(task.train))
    if colluders is not None:
        settings["colluders"] = colluders
    return Audit(
        folder.name,
        settings,
        _run_facts(folder),
        adversaries(plan, config, colluders),
        tuple(with_interval(finding) for finding in findings),
        perf_counter() - began,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        parties=None if guaranteed else clients,
        property_name=task.property_name,
        budget={**asdict(effort), "seed": seed},
        not_attacked=context.not_attacked,
    )


def _run_parts(context: AuditContext, parts: Sequence[Part], progress: Callable[[int, int], None]) -> list[Finding]:
    """Run all parts. A part that fails becomes a finding."""
    steps = Steps([part.steps(context) for part in parts], progress)
    progress(0, steps.ends[-1])
    context = context.counting(steps.step)
    findings: list[Finding] = []
    for part in parts:
        try:
            with user_code(context.config):
                findings += part.run(context)
        except NotAttackableError as reason:
            context.not_attacked[part.name] = str(reason)
        except Exception as error:  # a failure of one part leaves the findings of the others valid
            log.debug("%s failed", part.name, exc_info=True)
            findings.append(part.failed(error))
        steps.end_part()
    return findings


def adversaries(plan: SketchPlan, config: RunConfig, colluders: int | None = None) -> tuple[tuple[str, str, str], ...]:
    """Return for each adversary its name, the data it receives, and the data it does not receive.

    `colluders` is the assumed number of colluding clients if clients add the noise of a guarantee.

    >>> config = RunConfig.from_options(veil=0.0, lanes=1)
    >>> adversaries(build_plan(config, task_of(config).make_model(0)), config)[0][1][:65]
    "the sketches' seeds; sketches of 1.weight, 3.weight without noise"
    """
    if colluders is not None:
        return _adversaries_of_shares(config.cohort, colluders)
    sketched = [tensor.name for tensor in plan.tensors if tensor.sketched]
    noise = f" with secret noise of {config.sketch.veil:g} times their size" if config.sketch.veil else " without noise"
    if config.privacy is not None:
        noise = f" with the noise of the guarantee, for one {config.privacy.unit}"
    unprotected = f"; unprotected: {', '.join(plan.unprotected)}" if plan.unprotected else ""
    lane = f" in one of {plan.lanes} lanes" if plan.lanes > 1 else ""
    sent = f"the sketches' seeds; sketches of {', '.join(sketched) or 'nothing'}{lane}"
    if config.privacy is not None and not sketched:
        sent = "the weights"
    client = f"{sent}{noise}{unprotected}; its own data"
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


def _adversaries_of_shares(cohort: int, colluders: int) -> tuple[tuple[str, str, str], ...]:
    """Return the adversaries of a run in which clients add the noise of a guarantee."""
    together = (
        ("colluders",
         f"what the server and {colluders} clients see together: sums with the noise of {cohort - colluders} others",
         "the others' data, updates and noise"),
    ) if colluders else ()  # fmt: skip
    return (
        ("client", "the weights, which follow from noisy sums; its own data and noise",
         "other clients' updates and noise"),
        ("server", f"sums of {cohort} updates with the noise of all {cohort} clients, and so the weights",
         "a client's update by itself; clients' data and noise"),
        *together,
        ("anyone", "the finished model, and the weights of all rounds if they are published",
         "clients' data and noise"),
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
