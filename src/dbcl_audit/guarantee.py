"""Measurement of a run's guarantee: a simulated run of its settings with canaries, as a finding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from dbcl import seeds
from dbcl.engines import Engine
from dbcl.protocol import Server
from dbcl.simulation.build import build_engine, build_run_server
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from dbcl_audit.canaries import Canaries, CanaryEstimate
from dbcl_audit.context import AuditContext
from dbcl_audit.extreme_examples import contributions, with_extremes
from dbcl_audit.findings import Curve, Finding, Measure

MAX_BINS = 14
"""Largest number of bins of a histogram of scores."""
BOUNDED = "the guarantee bounds how well every adversary but the server can infer one {unit}"
"""Reason for leaving out other attacks on a run with a guarantee."""


def audit_guarantee(context: AuditContext) -> list[Finding]:
    """Measure the epsilon of a run with a guarantee, by canaries in a simulated run."""
    privacy = context.config.privacy
    assert privacy is not None
    rest = "labels and properties" if has_fixed_members(context) else "labels, properties and membership"
    context.not_attacked[f"updates, images, {rest}"] = BOUNDED.format(unit=privacy.unit)
    context.tell("simulated run: canaries among the run's clients")
    rounds = context.effort.canary_rounds
    found = measure_guarantee(context.config, context.task, rounds=rounds, seed=context.seed, step=context.step)
    return [guarantee_finding(found)]


def guarantee_steps(context: AuditContext) -> int:
    """Expected steps of `audit_guarantee`."""
    rounds = context.config.rounds
    return min(context.effort.canary_rounds or rounds, rounds) + 2 if context.guaranteed else 0


def has_fixed_members(context: AuditContext) -> bool:
    """Return True if members of a run with a guarantee are attacked: its unit is a client with a
    fixed shard.
    """
    privacy = context.config.privacy
    return privacy is not None and privacy.unit == "client" and context.config.server_optimizer != "adam"


def measure_guarantee(
    config: RunConfig,
    task: Task,
    *,
    rounds: int | None = None,
    seed: int = 0,
    step: Callable[[], None] = lambda: None,
) -> CanaryEstimate:
    """Play a run's settings with canaries among its clients, and measure the epsilon.

    All secrets are fresh, those of a run with a seed as well; `seed` draws the canaries'
    directions. `rounds` is how many of the run's rounds are played, all where it is None, and
    `step` is called after each. Where one example is the unit, real extreme examples go through the
    clients' code on the run's own engine.

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


def _pairs(config: RunConfig, task: Task, server: Server, seed: bytes) -> Engine:
    """Make the run's engine with pairs of clients that differ by an extreme example."""
    made = with_extremes(task, separation=config.privacy.separation if config.privacy is not None else 1)
    return build_engine(made.adapt(config), made, server, seed=seed)


def guarantee_finding(found: CanaryEstimate) -> Finding:
    """Return the measured epsilon as a finding with its interval; its budget has the stated values.

    >>> from dbcl.privacy import Spent
    >>> stated = Spent(mu=1.0, epsilon=4.38, delta=1e-5)
    >>> found = CanaryEstimate(seen=(0.0, 1.0, 2.0), unseen=(-1.0, 0.0, 1.0), stated=stated, rounds=9, turns=3)
    >>> made = guarantee_finding(found)
    >>> made.measure, round(made.value, 2), made.budget["stated epsilon"], made.budget["holds"]
    ('epsilon', 4.38, 4.38, True)
    """
    low, high = found.epsilon_interval
    budget = {
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
    curves = (
        _histogram("canaries that took part", found.seen),
        _histogram("unused directions", found.unseen),
        _normal("took part, as stated", found.stated.mu),
        _normal("unused, as stated", 0.0),
    )
    return Finding(
        "matched filter",
        "client",
        "adaptive",
        "guarantee",
        Measure.EPSILON,
        found.epsilon,
        low,
        high,
        chance=0.0,
        budget=budget,
        note="the attacker sees every broadcast and knows all updates but the canaries'",
        curves=curves,
        axes=("score", "density"),
    )


def _histogram(label: str, scores: Sequence[float]) -> Curve:
    """Return the density of scores as the outline of a histogram."""
    heights, edges = np.histogram(scores, bins=min(MAX_BINS, max(4, len(scores) // 5)), density=True)
    outline = [0.0, *np.repeat(heights, 2).tolist(), 0.0]
    return Curve(label, tuple(np.repeat(edges, 2).tolist()), tuple(outline))


def _normal(label: str, mean: float) -> Curve:
    x = np.linspace(mean - 4, mean + 4, 81)
    y = np.exp(-((x - mean) ** 2) / 2) / math.sqrt(2 * math.pi)
    return Curve(label, tuple(x.tolist()), tuple(y.tolist()), dashed=True)
