"""Measurement of a run's differential-privacy guarantee by a simulated run with canaries, reported
as a finding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dbcl import seeds
from dbcl.engines import Engine
from dbcl.engines.secure import SecureServer
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Broadcast, Server
from dbcl.protocol.secagg import NoisySum
from dbcl.simulation.build import build_engine, build_run_server, privacy_plan
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from dbcl_audit.canaries import Canaries, CanaryEstimate
from dbcl_audit.context import AuditContext
from dbcl_audit.extreme_examples import contributions, difference, paired_updates, with_extremes
from dbcl_audit.findings import Curve, Finding, Measure
from dbcl_audit.shared_canaries import SharedCanaries

MAX_BINS = 14
"""Maximum number of bins in a histogram of scores."""
BOUNDED = "the guarantee bounds how well every adversary but the server can infer one {unit}"
BOUNDED_FOR_ALL = "the guarantee bounds how well every adversary, the server{others} included, can infer one {unit}"
"""Reasons for omitting other attacks on a run with a guarantee."""
KNOWING = {
    "client": "the attacker sees every broadcast and knows all updates but the canaries'",
    "server": "the attacker sees every sum, with the noise of all clients, and knows all data but the canaries'",
    "colluders": "the attacker sees every sum, knows all data but the canaries', and subtracts the colluders' noise",
    "anyone": "the attacker has the released model alone, and knows all data but the canaries'",
}
"""Assumed knowledge of each adversary."""
SHARED_ORDER = ("anyone", "server", "colluders")
"""Adversaries of a run in which clients add the noise. Each adversary also has the knowledge of the
previous ones.
"""


def audit_guarantee(context: AuditContext) -> list[Finding]:
    """Measure the epsilon of a run with a guarantee, by canaries in a simulated run."""
    privacy = context.config.privacy
    assert privacy is not None
    rest = "labels and properties" if has_fixed_members(context) else "labels, properties and membership"
    config, task, rounds, seed = context.config, context.task, context.effort.canary_rounds, context.seed
    assert context.plan is not None
    colluders = colluders_of(config, context.plan, len(task.train))
    if colluders is not None:
        others = f" and {colluders} colluding client{'s' * (colluders != 1)}" if colluders else ""
        reason = BOUNDED_FOR_ALL.format(others=others, unit=privacy.unit)
        context.not_attacked[f"updates, images, {rest}"] = reason
        context.tell("simulated run: canaries among the run's clients, who add the noise")
        shares = measure_shares(config, task, rounds=rounds, seed=seed, step=context.step)
        return shared_findings(shares, colluders=colluders)
    context.not_attacked[f"updates, images, {rest}"] = BOUNDED.format(unit=privacy.unit)
    context.tell("simulated run: canaries among the run's clients")
    return [guarantee_finding(measure_guarantee(config, task, rounds=rounds, seed=seed, step=context.step))]


def guarantee_steps(context: AuditContext) -> int:
    """Expected progress steps of `audit_guarantee`."""
    rounds = context.config.rounds
    return min(context.effort.canary_rounds or rounds, rounds) + 2 if context.guaranteed else 0


def has_fixed_members(context: AuditContext) -> bool:
    """Return True if members of a run with a guarantee are attacked: the privacy unit is a client
    with a fixed shard.
    """
    privacy = context.config.privacy
    if privacy is None or privacy.noise_by == "clients":  # broadcasts without noise of the server's own
        return False
    return privacy.unit == "client" and context.config.server_optimizer != "adam"


def measure_guarantee(
    config: RunConfig,
    task: Task,
    *,
    rounds: int | None = None,
    seed: int = 0,
    step: Callable[[], None] = lambda: None,
) -> CanaryEstimate:
    """Simulate a run's settings with additional canaries, and measure the epsilon.

    If the privacy unit is one example, real extreme examples are processed by the clients' code on
    the run's engine.

    Args:
        config: settings of the run. All secrets are drawn anew, even if the run has a seed.
        task: task of the run.
        rounds: number of rounds to simulate; None for all rounds of the run.
        seed: seed of the canaries' directions.
        step: called after each round.

    Returns:
        The measured mu and epsilon with intervals.

    >>> from dbcl.simulation import task_of
    >>> config = RunConfig.from_options(
    ...     model="dlg-lenet", sketch="identity-v1", veil=0.0, clients=40, fraction=0.25, rounds=8, lr=0.1,
    ...     epsilon=8, delta=1e-3, clip=0.1, server_optimizer="fedavg",
    ... )
    >>> found = measure_guarantee(config, task_of(config), rounds=4)
    >>> found.rounds, found.turns, found.stated.epsilon < 8
    (4, 1, True)
    """
    # On the run's device where it is here: another one has other code.
    config = replace(config, seed=None, device=config.device if torch.cuda.is_available() else "auto")
    drawn = seeds.fresh()
    server = build_run_server(config, task, seed=drawn)
    plan = server.privacy
    assert plan is not None
    pairs = _pairs(config, task, server, drawn) if plan.unit == "example" else None
    canaries = Canaries(
        server,
        plan,
        seed=seed,
        contribution=None if pairs is None else lambda broadcast: max(contributions(pairs, broadcast)),
    )
    engine = build_engine(replace(config, engine="stacked"), task, canaries, seed=drawn)
    for _ in range(config.rounds if rounds is None else min(rounds, config.rounds)):
        engine.play_round()
        step()
    engine.close()
    return canaries.estimate()


def measure_shares(
    config: RunConfig,
    task: Task,
    *,
    rounds: int | None = None,
    seed: int = 0,
    step: Callable[[], None] = lambda: None,
) -> dict[str, CanaryEstimate]:
    """Simulate a run in which clients add the noise, with canaries, and measure epsilon for each
    adversary.

    The arguments are those of `measure_guarantee`. Server, clients and engine are those of the run.
    The measurement uses the aggregated sums: quantized, and with the noise shares of all clients.

    >>> from dbcl.data import load
    >>> from dbcl.simulation import task_of
    >>> config = RunConfig.from_options(
    ...     model="dlg-lenet", sketch="identity-v1", veil=0.0, clients=3, fraction=1.0, algorithm="sgd", rounds=2,
    ...     lr=0.1, epsilon=80, delta=1e-5, clip=0.1, server_optimizer="fedavg", privacy_unit="example", separation=2,
    ...     noise_by="clients", secure_aggregation=True, batch_size=1,
    ... )
    >>> found = measure_shares(config, task_of(config), rounds=1)
    >>> {adversary: each.turns for adversary, each in found.items()}
    {'server': 1, 'colluders': 1, 'anyone': 1}
    """
    config = replace(config, seed=None, device=config.device if torch.cuda.is_available() else "auto")
    drawn = seeds.fresh()
    server = build_run_server(config, task, seed=drawn)
    plan = server.privacy
    assert plan is not None
    assert isinstance(server, SecureServer)
    reached = _reached(plan, _pairs(config, task, server, drawn)) if plan.unit == "example" else None
    canaries = SharedCanaries(server, plan, seed=seed, contribution=reached)
    engine = build_engine(config, task, canaries, seed=drawn)
    for _ in range(config.rounds if rounds is None else min(rounds, config.rounds)):
        engine.play_round()
        step()
    engine.close()
    return canaries.estimates()


def _reached(plan: PrivacyPlan, pairs: Engine) -> Callable[[Broadcast], float]:
    """Return a function that measures the contribution of an extreme example to the vector that a
    client sends.

    The pair of clients with the largest difference encodes both updates with the same noise. Before
    masking, the two vectors then differ only by the example.
    """
    key = seeds.fresh()
    encodings = NoisySum.of_client(plan, key), NoisySum.of_client(plan, key)

    def reached(broadcast: Broadcast) -> float:
        updates = paired_updates(pairs, broadcast)
        with_it, without = max(updates, key=lambda pair: difference(*pair))
        one, other = (
            encoding.vector(update, broadcast)[0]
            for encoding, update in zip(encodings, (with_it, without), strict=True)
        )
        steps = float(np.linalg.norm((one - other).astype(np.float64)))
        return steps * plan.clip / plan.shares.steps

    return reached


def colluders_of(config: RunConfig, plan: SketchPlan, examples: int) -> int | None:
    """Return the number of colluding clients that a run's guarantee tolerates, or None if clients
    do not add the noise.

    >>> from dbcl.config import UNSKETCHED
    >>> from dbcl.simulation.presets import preset
    >>> config = preset("guaranteed", rounds=4, separation=1, lr=0.1)
    >>> colluders_of(config, SketchPlan.from_model(torch.nn.Linear(9, 3), UNSKETCHED), examples=4000)
    2
    """
    if config.privacy is None or config.privacy.noise_by != "clients":
        return None
    made = privacy_plan(config, examples, sum(math.prod(tensor.shape) for tensor in plan.tensors))
    assert made is not None
    return made.colluders


def _pairs(config: RunConfig, task: Task, server: Server, seed: bytes) -> Engine:
    """Build the run's engine with pairs of clients that differ by one extreme example."""
    made = with_extremes(task, separation=config.privacy.separation if config.privacy is not None else 1)
    return build_engine(made.adapt(config), made, server, seed=seed)


def shared_findings(found: Mapping[str, CanaryEstimate], *, colluders: int) -> list[Finding]:
    """Return a finding for each adversary of a run in which clients add the noise, strongest
    adversary first.

    An adversary is rated at least as severe as any adversary whose knowledge it has. Colluding
    clients also have the knowledge of the server, and the server has the released model.

    >>> from dbcl.privacy import Spent
    >>> sound = CanaryEstimate((0.0, 1.0, 2.0), (-1.0, 0.0, 1.0), Spent(1.0, 4.38, 1e-5), rounds=9, turns=3)
    >>> made = shared_findings({"server": replace(sound, largest=2.0), "colluders": sound}, colluders=2)
    >>> [(each.adversary, each.budget["colluders"], each.budget["holds"]) for each in made]
    [('colluders', 2, False), ('server', 0, False)]
    """
    made: list[Finding] = []
    holds, exceeds = True, False
    for adversary in (each for each in SHARED_ORDER if each in found):
        finding = guarantee_finding(found[adversary], adversary)
        assert finding.low is not None
        holds = holds and found[adversary].holds
        exceeds = exceeds or finding.low > found[adversary].stated.epsilon
        own = {"colluders": colluders if adversary == "colluders" else 0, "holds": holds, "exceeds": exceeds}
        own["reached"] = found[adversary].reached
        made.insert(0, replace(finding, budget={**finding.budget, **own}))
    return [made[0], *(replace(each, curves=()) for each in made[1:])]


def guarantee_finding(found: CanaryEstimate, adversary: str = "client") -> Finding:
    """Return the measured epsilon as a finding with its interval. The budget contains the stated
    values.

    >>> from dbcl.privacy import Spent
    >>> stated = Spent(mu=1.0, epsilon=4.38, delta=1e-5)
    >>> found = CanaryEstimate(seen=(0.0, 1.0, 2.0), unseen=(-1.0, 0.0, 1.0), stated=stated, rounds=9, turns=3)
    >>> made = guarantee_finding(found)
    >>> made.measure, round(made.value, 2), made.budget["stated epsilon"], made.budget["holds"]
    ('epsilon', 4.38, 4.38, True)
    """
    low, high = found.epsilon_interval
    budget: dict[str, Any] = {
        "canaries": len(found.seen),
        "unused directions": len(found.unseen),
        "rounds": found.rounds,
        "turns": found.turns,
        "stated epsilon": found.stated.epsilon,
        "delta": found.stated.delta,
        "stated mu": found.stated.mu,
        "mu": found.mu,
        "mu low": found.mu_interval[0],
        "mu high": found.mu_interval[1],
        "auc": found.auc,
        "auc low": found.auc_interval[0],
        "auc high": found.auc_interval[1],
        "auc bound": found.auc_bound,
        "holds": found.holds,
    }
    if found.largest:
        budget["largest example"] = found.largest
    if found.quiet:
        budget["clients with too little noise"] = list(found.quiet)
    curves = (
        _histogram("canaries that took part", found.seen),
        _histogram("unused directions", found.unseen),
        _normal("took part, as stated", found.stated.mu),
        _normal("unused, as stated", 0.0),
    )
    return Finding(
        "matched filter",
        adversary,
        "adaptive",
        "guarantee",
        Measure.EPSILON,
        found.epsilon,
        low,
        high,
        chance=0.0,
        budget=budget,
        note=KNOWING[adversary],
        curves=curves,
        axes=("score", "density"),
    )


def _histogram(label: str, scores: Sequence[float]) -> Curve:
    """Return the density of the scores as the outline of a histogram."""
    heights, edges = np.histogram(scores, bins=min(MAX_BINS, max(4, len(scores) // 5)), density=True)
    outline = [0.0, *np.repeat(heights, 2).tolist(), 0.0]
    return Curve(label, tuple(np.repeat(edges, 2).tolist()), tuple(outline))


def _normal(label: str, mean: float) -> Curve:
    x = np.linspace(mean - 4, mean + 4, 81)
    y = np.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi)
    return Curve(label, tuple(x.tolist()), tuple(y.tolist()), dashed=True)
