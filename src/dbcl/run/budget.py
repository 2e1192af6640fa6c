"""What a guarantee costs before a run, beside other choices, and what of it a run has spent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dbcl import data
from dbcl.errors import ConfigError, DataError, ProtocolError
from dbcl.privacy import Ledger, PrivacyPlan, plan_blt
from dbcl.privacy.accounting import Spent, mu_of
from dbcl.protocol import checkpoint
from dbcl.run.config import RunConfig
from dbcl.run.folder import Run, read_config
from dbcl.state import State

EPSILONS = (1.0, 2.0, 4.0, 8.0)
COMPARED = ("banded", "independent")


class Choice(NamedTuple):
    """What another choice would give: the noise relative to the weights.

    >>> Choice("epsilon 4", 2.9).relative
    2.9
    """

    name: str
    relative: float


def units_in(config: RunConfig, data_dir: str | None = None) -> int:
    """How many training examples the dataset of these settings has, where one of them is the unit; else 0.

    >>> units_in(RunConfig(epsilon=8, clip=1, unit="example", algorithm="sgd", fraction=1.0)), units_in(RunConfig())
    (4000, 0)
    """
    if config.epsilon is None or config.unit == "client":
        return 0
    if config.data not in data.LOADERS:
        raise ConfigError(
            "with --unit example and data of your own give --examples, how many all clients have together"
        )
    try:
        return len(data.load(config.data, data_dir).y_train)
    except DataError as error:
        raise ConfigError(f"{error}; or say by --examples how many there are") from None


def plan_of(config: RunConfig, examples: int = 0) -> PrivacyPlan:
    """The guarantee that settings ask for; settings that ask for none are refused.

    `examples` is how many all clients have together, which counts where one of them is the unit.

    >>> plan_of(RunConfig())
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: these settings promise nothing: give --epsilon and --clip, or --preset private
    """
    plan = config.privacy(examples)
    if plan is None:
        raise ConfigError("these settings promise nothing: give --epsilon and --clip, or --preset private")
    return plan


def with_blt(config: RunConfig, examples: int = 0) -> RunConfig:
    """The same settings with `mechanism` blt and its parameters, planned for them; needs the extra `privacy-planning`.

    >>> config = RunConfig(epsilon=8, clip=0.2, clients=1000, rounds=150)
    >>> round(with_blt(config).blt_decay, 4)  # doctest: +SKIP
    0.8475
    """
    plan = plan_of(config, examples)
    decay, scale = plan_blt(rounds=plan.rounds, separation=plan.separation, participations=plan.participations)
    return replace(config, mechanism="blt", blt_decay=decay[0], blt_scale=scale[0])


def choices(plan: PrivacyPlan, rms: float) -> list[Choice]:
    """What other choices would give, all else the same, with weights of the root mean square `rms`.

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
    for kind in COMPARED:
        if kind != plan.kind:
            others[f"{kind} noise"] = _of_kind(kind)
    # Other rounds, or more clients in them, are another rule of participation: that of turns.
    turns = {"separation": plan.separation if plan.unit == "example" else 0, "participations": 0}
    return [Choice(name, replace(plan, **{**turns, **changes}).relative(rms)) for name, changes in others.items()]


def noise_by_epsilon(plan: PrivacyPlan, rms: float, epsilons: Sequence[float]) -> dict[str, list[float]]:
    """The noise relative to the weights at each epsilon, correlated over rounds and independent, and the plan's own.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> found = noise_by_epsilon(plan, 0.026, [4.0, 8.0])
    >>> {kind: [round(each, 2) for each in relative] for kind, relative in found.items()}
    {'banded': [2.92, 1.62], 'independent': [7.45, 4.13]}
    """
    allowed = [mu_of(epsilon, plan.delta) for epsilon in epsilons]
    kinds = {kind: replace(plan, **_of_kind(kind)) for kind in COMPARED} | {plan.kind: plan}
    # All else the same, the noise is as the inverse of mu.
    return {kind: [each.relative(rms) * each.mu / mu for mu in allowed] for kind, each in kinds.items()}


def _of_kind(kind: str) -> dict[str, Any]:
    return {"kind": kind, "decay": (), "scale": ()}


@dataclass(frozen=True)
class Account:
    """What a run promised and what of it is spent: so many `rounds` are closed, and no client had more `turns`.

    `insecure` is a run whose noise follows from a seed: whoever knows that can take it off, so nothing is promised.
    """

    plan: PrivacyPlan
    rounds: int
    turns: int
    insecure: bool

    @property
    def spent(self) -> Spent:
        """What is used up if the run ends here."""
        return self.plan.spent(rounds=self.rounds, participations=self.turns)

    @property
    def caveat(self) -> str:
        """When `spent` counts instead of the whole promise; empty where all rounds were played."""
        if self.rounds >= self.plan.rounds:
            return ""
        return (
            "What is spent counts where the run ends here for a reason that has nothing to do with its data; where it "
            "was stopped for what it showed, as by --target or --patience, what is promised counts."
        )

    def facts(self) -> dict[str, Any]:
        """The account for another program.

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
            "promise": plan.promise,
        }


def account_of(run: Run) -> Account | None:
    """What a run here has spent; None where it promises nothing."""
    server = run.session.server
    if server.privacy is None or server.ledger is None:
        return None
    turns = _turns(server.privacy, server.round, server.ledger)
    return Account(server.privacy, server.round, turns, run.config.insecure)


def account_in(folder: Path) -> Account | None:
    """What the run in a folder has spent, by its settings and its checkpoint; None where it promises nothing."""
    config = read_config(folder)
    if config.epsilon is None:
        return None
    try:
        server = checkpoint.load(folder / "checkpoints").part("session").part("server").values
        rounds, kept = int(server["round"]["number"]), server["ledger"]
        # The plan as it was kept: of examples, the settings do not say how many there are.
        plan = PrivacyPlan(**{name: _as_given(value) for name, value in server["round"]["guarantee"].items()})
        ledger = Ledger(**{name: kept[name] for name in ("rounds", "separation", "participations")})
        ledger.load_state(State(kept, {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"the checkpoint in {folder} does not say what was promised and who took part") from error
    return Account(plan, rounds, _turns(plan, rounds, ledger), config.insecure)


def _turns(plan: PrivacyPlan, rounds: int, ledger: Ledger) -> int:
    """How often one unit took part at most: the ledger counts clients, and examples come back in a fixed cycle."""
    return ledger.most_uses if plan.unit == "client" else math.ceil(rounds / plan.separation)


def _as_given(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
