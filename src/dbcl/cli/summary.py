"""Result table of `dbcl train`, and its JSON form."""

import math
from typing import Any

from dbcl.cli.console import sparkline
from dbcl.cli.privacy import guarantee_text
from dbcl.config import SketchConfig
from dbcl.plan import SketchPlan
from dbcl.simulation import Run, message_bytes
from dbcl.simulation.planning import parameter_count
from dbcl.simulation.privacy_budget import Account, account_of

NOT_COVERED = (
    "that a party takes part, and how many examples it has; facts about a whole party or group; settings that were "
    "chosen by looking at results; the data of a party that runs other software"
)
"""Facts that an example-level guarantee does not protect."""


def facts(run: Run) -> dict[str, Any]:
    """Return the result of a run as JSON values."""
    last, best, account = run.history[-1], run.best, account_of(run)
    return {
        "folder": str(run.folder),
        "rounds": last.round,
        "stopped_by": run.stopped_by,
        "loss": _finite(last.loss),
        last.metric: _finite(last.score),
        "best": {best.metric: _finite(best.score), "round": best.round},
        "bytes_up": sum(metrics.bytes_up for metrics in run.history),
        "bytes_down": sum(metrics.bytes_down for metrics in run.history),
        "refused": sum(len(metrics.refused) for metrics in run.history),
        "clients": run.contributions.facts(),
        "seconds": round(sum(metrics.seconds for metrics in run.history), 3),
        "seed": run.config.seed,
        "insecure": run.config.insecure,
        "guarantee": None if account is None else account.facts(),
        "device": run.config.device,
    }


def _finite(value: float) -> float | None:
    """Return a finite value, or None for a value that JSON cannot represent."""
    return value if math.isfinite(value) else None


def rows(run: Run, without_noise: float | None = None) -> list[tuple[str, str]]:
    """Return the rows of the result table.

    Args:
        run: A run with at least one round.
        without_noise: Score of the same training without noise, or None.
    """
    account, plan, shown = account_of(run), run.server.plan, run.task.objective.shown
    against = account.plan.against if account is not None and account.plan.unit == "example" else ""
    found = [(f"test {run.history[-1].metric}", _score(run, without_noise)), ("trained", _trained(run))]
    if account is not None:
        found.append(("guarantee", _guarantee(run, account)))
        if against:
            found.append(("not covered", NOT_COVERED))
    else:
        found += [("a client saw", _seen(plan)), ("secret noise", _veil(plan))]
        found.append(("sent without noise or sketch", ", ".join(plan.unprotected) or "nothing"))
    found += [("messages", _messages(run)), _checks(run)]
    if lines := run.contributions.lines():
        found.append(("clients", "\n".join(lines)))
    found.append(("random seeds", "fixed by --seed, for experiments" if run.config.insecure else "new each round"))
    scores = [metrics.score for metrics in run.history]
    found.append((f"{run.history[-1].metric} by round", sparkline(scores, lambda score: shown(score, 1))))
    return found


def _score(run: Run, without_noise: float | None) -> str:
    config, shown, best = run.config, run.task.objective.shown, run.best
    text = f"{shown(run.history[-1].score)} (best {shown(best.score)}, round {best.round})"
    if without_noise is not None:
        text += f"; {shown(without_noise)} for the same training without noise"
    if config.ema_decay:
        text += f"\nof the weights averaged over about {1 / (1 - config.ema_decay):.0f} rounds"
    return text


def _trained(run: Run) -> str:
    refused = sum(len(metrics.refused) for metrics in run.history)
    features = f" on public features ({run.config.feature_map})" if run.config.feature_map else ""
    stopped = {
        "patience": f", stopped: no better {run.best.metric} since round {run.best.round}",
        "target": ", stopped: the target was reached",
    }.get(run.stopped_by, "")
    return (
        f"{parameter_count(run.server.model):,} parameters{features}, {run.history[-1].round} rounds{stopped}, "
        f"{run.config.cohort} of {run.config.clients} clients in a round"
        + (f"; {refused} updates rejected" if refused else "")
    )


def _guarantee(run: Run, account: Account) -> str:
    plan = account.plan
    if plan.shared and not account.insecure:
        said = f"(epsilon {plan.epsilon:g}, delta {plan.delta:g}) for every {plan.unit}, {plan.against}"
        if account.rounds < plan.rounds:
            said += f"; spent so far: epsilon {account.spent.epsilon:.3g}"
        return f"{said}\nby noise that each client adds before anything leaves it; the server sees noisy sums only"
    relative = max(tensor.veil for tensor in run.server.plan.tensors)
    return guarantee_text(account, relative, run.stopped_by)


def _messages(run: Run) -> str:
    config, model, plan = run.config, run.server.model, run.server.plan
    plain = SketchPlan.from_model(model, SketchConfig(sketch="identity-v1", veil=0))
    share = message_bytes(model, plan, config.wire) / message_bytes(model, plain, config.wire)
    up, down = sum(m.bytes_up for m in run.history), sum(m.bytes_down for m in run.history)
    saved = f"; each {1 - share:.0%} smaller than FedAvg's" if share < 0.995 else ""
    return f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down{saved}"


def _checks(run: Run) -> tuple[str, str]:
    """Return the row about update validation. Under secure aggregation, the server sees no
    individual update.
    """
    if not run.config.secure_aggregation:
        return "server checks", str(run.server.validator)
    how = "masked and added over real bytes" if run.config.engine == "local" else "rounded and added as if masked"
    privacy = run.config.privacy
    if privacy is not None and privacy.noise_by == "clients":
        least = f"{privacy.fewest} clients or more" if privacy.fewest else f"{run.config.cohort} clients"
        return "the server saw", f"sums over {least}, {how}"
    bound = run.config.secagg.clip if privacy is None else privacy.clip
    fewest = run.config.secagg.min_cohort
    return "the server saw", f"sums over {fewest} clients or more, {how}; each update is clipped to {bound:g}"


def _seen(plan: SketchPlan) -> str:
    sketched = [tensor for tensor in plan.tensors if tensor.sketched]
    if not sketched:
        return "every value of every tensor"
    lines = [f"{tensor.row()[3]} of {tensor.name}" for tensor in sketched]
    return "\n".join([*lines, f"in one of {plan.lanes} lanes"] if plan.lanes > 1 else lines)


def _veil(plan: SketchPlan) -> str:
    sizes = sorted({tensor.veil for tensor in plan.tensors})
    if sizes == [0.0]:
        if not any(tensor.sketched for tensor in plan.tensors):
            return "none"
        return "none: a client that stores earlier rounds can undo the sketch (docs/threat-model.md)"
    return f"{' or '.join(f'{size:g}' for size in sizes)} times the weights, on everything that is sent"
