"""Privacy cost of planned settings compared to alternatives, and the spent budget of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dbcl import data
from dbcl.engines.secure import SecureServer
from dbcl.errors import ConfigError, DataError, ProtocolError
from dbcl.privacy import ParticipationTracker, PrivacyPlan, Spent, mu_of
from dbcl.privacy.attendance import Rows, attendance_in
from dbcl.protocol import checkpoint
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.config import RunConfig
from dbcl.simulation.run import Run
from dbcl.simulation.run_folder import read_config
from dbcl.state import State

EPSILONS = (1.0, 2.0, 4.0, 8.0)
COMPARED = ("banded", "independent")


class Choice(NamedTuple):
    """Alternative settings and their noise relative to the weights.

    >>> Choice("epsilon 4", 2.9).relative
    2.9
    """

    name: str
    relative: float


def units_in(config: RunConfig, data_dir: str | None = None) -> int:
    """Return the number of training examples if one example is the privacy unit, else 0.

    >>> config = RunConfig.from_options(
    ...     epsilon=8, clip=1, privacy_unit="example", separation=10, algorithm="sgd", fraction=1.0
    ... )
    >>> units_in(config), units_in(RunConfig())
    (4000, 0)
    """
    if config.privacy is None or config.privacy.unit == "client":
        return 0
    if config.data not in data.LOADERS:
        raise ConfigError(
            "with `privacy_unit=example` and data of your own give `examples`, the number that all clients have "
            "together"
        )
    try:
        return len(data.load(config.data, data_dir).y_train)
    except DataError as error:
        raise ConfigError(f"{error}; or give their number by `examples`") from None


def plan_of(config: RunConfig, examples: int = 0, values: int = 0) -> PrivacyPlan:
    """Return the privacy plan of the settings. Raise `ConfigError` for settings without a
    guarantee.

    Args:
        config: Settings of the run.
        examples: Number of training examples.
        values: Number of values in an update.

    >>> plan_of(RunConfig())
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: these settings have no guarantee: give `epsilon` and `clip`, or take the preset private
    """
    plan = privacy_plan(config, examples, values)
    if plan is None:
        raise ConfigError("these settings have no guarantee: give `epsilon` and `clip`, or take the preset private")
    return plan


def choices(plan: PrivacyPlan, rms: float) -> list[Choice]:
    """Return alternative settings with their noise relative to the weights.

    Args:
        plan: Plan of the guarantee.
        rms: Root mean square of the weights.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> [(name, round(relative, 2)) for name, relative in choices(plan, rms=0.026)][:4]
    [('epsilon 1', 10.09), ('epsilon 2', 5.39), ('epsilon 4', 2.92), ('half the clip', 0.81)]
    """
    others: dict[str, dict[str, Any]] = {
        f"epsilon {epsilon:g}": {"epsilon": epsilon} for epsilon in EPSILONS if epsilon != plan.epsilon
    }
    bound = "clip or lr" if plan.unit == "example" else "clip"  # a client sends its gradients times its rate
    for word, factor in (("half", 0.5), ("twice", 2)):
        others[f"{word} the {bound}"] = {"clip": plan.clip * factor}
    size = "batch" if plan.unit == "example" else "cohort"
    for name, now, most in (("rounds", plan.rounds, None), (size, plan.per_round, plan.units)):
        for word, number in (("half", now // 2), ("twice", 2 * now)):
            if number >= 1 and (most is None or number <= most):
                set_by = {"separation": plan.units // number} if name == "batch" else {}
                label = f"separation {set_by['separation']}" if set_by else number
                others[f"{word} the {name}, {label}"] = {name: number, **set_by}
    for correlation in COMPARED:
        if correlation != plan.correlation:
            others[f"{correlation} noise"] = {"correlation": correlation}
    # Other rounds, or more clients in them, are another rule of participation: that of turns.
    turns = {"separation": plan.separation if plan.unit == "example" else 0, "participations": 0}
    return [Choice(name, replace(plan, **{**turns, **changes}).relative(rms)) for name, changes in others.items()]


def noise_by_epsilon(plan: PrivacyPlan, rms: float, epsilons: Sequence[float]) -> dict[str, list[float]]:
    """Return the relative noise at each epsilon, for the plan's correlation and for the baselines.

    Args:
        plan: Plan of the guarantee.
        rms: Root mean square of the weights.
        epsilons: Values of epsilon.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> found = noise_by_epsilon(plan, 0.026, [4.0, 8.0])
    >>> {kind: [round(each, 2) for each in relative] for kind, relative in found.items()}
    {'banded': [2.92, 1.62], 'independent': [7.45, 4.13]}
    """
    allowed = [mu_of(epsilon, plan.delta) for epsilon in epsilons]
    kinds = {kind: replace(plan, correlation=kind) for kind in COMPARED} | {plan.correlation: plan}
    # The noise is inversely proportional to mu.
    return {kind: [each.relative(rms) * each.mu / mu for mu in allowed] for kind, each in kinds.items()}


@dataclass(frozen=True)
class Account:
    """Guarantee of a run and its spent budget.

    Args:
        plan: Plan of the guarantee.
        rounds: Number of closed rounds.
        turns: Maximum number of participations of one privacy unit.
        insecure: Whether the noise is derived from a known seed, so that there is no guarantee.
        attendance: Clients of each revealed sum, if the guarantee depends on attendance.
    """

    plan: PrivacyPlan
    rounds: int
    turns: int
    insecure: bool
    attendance: Rows | None = None

    @property
    def spent(self) -> Spent:
        """Budget spent if the run ends now. Computed from the attendance if the guarantee depends
        on it.
        """
        if self.attendance is not None:
            return self.plan.spent_by(self.attendance)
        return self.plan.spent(rounds=self.rounds, participations=self.turns)

    @property
    def caveat(self) -> str:
        """Condition under which `spent` holds instead of the complete budget; empty after the last
        round.
        """
        if self.rounds >= self.plan.rounds:
            return ""
        return (
            "The spent part holds if the run ends here for a reason that does not depend on its data. If it was "
            "stopped for its results, as by `target` or `patience`, the whole budget is spent."
        )

    def facts(self) -> dict[str, Any]:
        """Return the account as JSON values.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> facts = Account(plan, 100, 10, insecure=False).facts()
        >>> facts["holds"], facts["epsilon"], round(facts["spent_epsilon"], 2), facts["rounds"]
        (True, 8, 3.55, 100)
        """
        plan, spent = self.plan, self.spent
        return {
            "holds": not self.insecure,
            "unit": plan.unit,
            "epsilon": plan.epsilon,
            "delta": plan.delta,
            "mu": plan.mu,
            "spent_epsilon": spent.epsilon,
            "spent_mu": spent.mu,
            "spent_caveat": self.caveat,
            "rounds": self.rounds,
            "planned_rounds": plan.rounds,
            "most_participations": self.turns,
            "planned_participations": plan.participations,
            **self._attended(),
            "promise": plan.promise,
        }

    def _attended(self) -> dict[str, Any]:
        """Return the number of revealed sums and the minimum number of clients in a sum, if the
        guarantee depends on attendance.
        """
        if self.attendance is None:
            return {}
        sizes = [len(names) for _, names in self.attendance]
        return {"revealed_sums": len(sizes), "fewest_in_a_sum": min(sizes, default=0), "clients": self.plan.clients}


def account_of(run: Run) -> Account | None:
    """Return the privacy account of a run; None without a guarantee."""
    keeper = run.server.keeper
    if keeper.plan is None or keeper.tracker is None:
        return None
    turns = _turns(keeper.plan, run.server.round, keeper.tracker)
    attendance = run.server.rounds.attendance if isinstance(run.server, SecureServer) else None
    rows = None if attendance is None else attendance.rows
    return Account(keeper.plan, run.server.round, turns, run.config.insecure, rows)


def account_in(folder: Path) -> Account | None:
    """Return the privacy account from the checkpoint in a run's folder; None without a guarantee."""
    config = read_config(folder)
    if config.privacy is None:
        return None
    try:
        server = checkpoint.load(folder / "checkpoints").part("server").values
        rounds, kept = int(server["round"]["number"]), server["guarantee"]["participation"]
        # The plan of the checkpoint: settings do not say how many examples there are.
        held: dict[str, Any] = server["round"]["guarantee"]
        plan = PrivacyPlan(**held)
        names = ("rounds", "separation", "participations", "clients")
        tracker = ParticipationTracker(**{name: kept[name] for name in names})
        tracker.load_state(State(kept, {}))
        attendance = attendance_in(server["sums"]["attendance"]) if plan.counts_attendance else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the checkpoint in {folder} does not hold the guarantee and the participations") from error
    return Account(plan, rounds, _turns(plan, rounds, tracker), config.insecure, attendance)


def _turns(plan: PrivacyPlan, rounds: int, tracker: ParticipationTracker) -> int:
    """Return the maximum number of participations of one privacy unit. Examples follow a fixed
    cycle.
    """
    return tracker.most_uses if plan.unit == "client" else math.ceil(rounds / plan.separation)
