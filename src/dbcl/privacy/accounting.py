"""From noise to (epsilon, delta) and back, and the plan of a run with a guarantee.

All noise of a run is one Gaussian mechanism with sensitivity / sigma = mu (`factorization`). What that means as
(epsilon, delta) is computed by dp-accounting, which the extra `privacy` installs; nothing is accounted here.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from dbcl.errors import ConfigError
from dbcl.privacy.factorization import Mechanism, Strategy, Workload, banded, buffered, independent, white

KINDS = ("banded", "blt", "independent", "white")
UNITS = ("client", "example")
USEFUL = 10.0
"""Noise that is so many times larger than the weights is refused: on MNIST six times left 73 %, of 97 %."""


def epsilon_of(mu: float, delta: float) -> float:
    """The epsilon at this delta of a Gaussian mechanism whose sensitivity is mu times its noise.

    >>> round(epsilon_of(1.0, 1e-5), 3)
    4.377
    """
    return float(_dp_accounting().get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu that keeps (epsilon, delta).

    >>> round(mu_of(8.0, 1e-5), 3)
    1.666
    """
    return 1 / float(_dp_accounting().get_sigma_gaussian(epsilon, delta))


def _dp_accounting() -> ModuleType:
    try:
        return import_module("dp_accounting")
    except ImportError as error:
        raise ConfigError(
            "a guarantee needs dp-accounting, which is not installed; the remedy: pip install '.[privacy]' in a clone "
            "of dbcl"
        ) from error


class Spent(NamedTuple):
    """What of a budget is used up.

    >>> Spent(mu=1.0, epsilon=4.38, delta=1e-5).epsilon
    4.38
    """

    mu: float
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """A run with a guarantee: the target, how often one unit takes part, and the noise that this needs.

    `unit` is what the guarantee protects: all that one "client" contributes in the whole run, or one "example". Of
    clients, each update is clipped to the length `clip` and their sum is divided by `cohort`; of examples, each
    gradient is clipped and their sum over all clients is divided by `batch`. Left at 0, `separation` and
    `participations` become those of turns in a fixed order (`cyclic_cohort`, `cyclic_batch`). All clients count alike;
    with `most`, a public number, by their examples, those with `most` and more for one.

    `momentum` and `lr` are the server's. With `before` the noise goes into the average update, before an optimiser that
    need not be linear, such as Adam: `noise` is then that on one update. `kind` is how the noise is correlated:
    "banded", "blt" with its `decay` and `scale` (`plan_blt` finds them), and to compare with "independent" (DP-FedAvg)
    and "white" (on each W_t by itself).

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> plan.separation, plan.participations, round(plan.mu, 3), round(plan.sigma, 4), round(plan.noise, 4)
    (10, 40, 1.666, 0.0102, 0.0422)
    """

    epsilon: float
    delta: float
    clip: float
    rounds: int
    clients: int
    cohort: int
    unit: str = "client"
    examples: int = 0
    batch: int = 0
    separation: int = 0
    participations: int = 0
    momentum: float = 0.0
    lr: float = 1.0
    before: bool = False
    most: float = 0.0
    kind: str = "banded"
    decay: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        problems = self._problems()
        if not problems:
            # In turns a client has ceil(rounds cohort / clients) of them; an example comes every separation-th round.
            separation = self.separation or self.units // self.per_round
            turns = self.rounds * self.per_round / self.units if self.unit == "client" else self.rounds / separation
            object.__setattr__(self, "separation", separation)
            object.__setattr__(self, "participations", self.participations or math.ceil(turns))
            problems = self._misfits()
        if problems:
            raise ConfigError("\n  - ".join(["there is no such guarantee:", *problems]))
        _ = self.workload, self.strategy  # they check what is theirs

    def _problems(self) -> list[str]:
        checks = {
            f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}": self.unit in UNITS,
            f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}": self.kind in KINDS,
            f"epsilon must be above 0 and finite, got {self.epsilon}": 0 < self.epsilon < math.inf,
            f"clip must be above 0 and finite, got {self.clip}": 0 < self.clip < math.inf,
            f"rounds must be 1 or more, got {self.rounds}": self.rounds >= 1,
            f"cohort must be between 1 and the number of clients, {self.clients}, got {self.cohort}": 1
            <= self.cohort
            <= self.clients,
            f"separation and participations must not be negative, got {self.separation} and {self.participations}": min(
                self.separation, self.participations
            )
            >= 0,
            'unit "example" needs examples, the number of all clients\' together, and batch, that of one round, got '
            f"{self.examples} and {self.batch}": self.unit != "example" or 1 <= self.batch <= self.examples,
            f"delta must be above 0 and below 1 / {self.units} ({self.unit}s): with more, showing one of them whole "
            f"would be allowed, got {self.delta}": 0 < self.delta < 1 / max(self.units, 1),
            f"most must be 0 or more and finite, got {self.most}": 0 <= self.most < math.inf,
            f"most is for clients, and one example is the unit, got {self.most}": self.unit == "client"
            or not self.most,
            f"decay and scale are those of kind blt, got kind {self.kind}": self.kind == "blt"
            or not (self.decay or self.scale),
        }
        return [problem for problem, fine in checks.items() if not fine]

    def _misfits(self) -> list[str]:
        """What the participation rule asks for and the number of units cannot give."""
        problems = []
        if self.separation * self.per_round > self.units:
            problems.append(
                f"with {self.per_round} {self.unit}s in a round, {self.separation} rounds apart, {self.units} are too "
                f"few: separation can be {self.units // self.per_round} at most"
            )
        if self.participations * self.units < self.rounds * self.per_round:
            problems.append(
                f"{self.rounds} rounds with {self.per_round} {self.unit}s each are more than {self.units} can fill, "
                f"{self.participations} times each: the remedy is fewer rounds or more participations"
            )
        return problems

    @property
    def units(self) -> int:
        """How many clients or examples there are."""
        return self.examples if self.unit == "example" else self.clients

    @property
    def per_round(self) -> int:
        """How many of them a round is planned with: the fixed, public number that their sum is divided by."""
        return self.batch if self.unit == "example" else self.cohort

    @cached_property
    def workload(self) -> Workload:
        """What the server's optimiser makes of the updates."""
        return Workload(self.momentum, self.lr, after=not self.before)

    @cached_property
    def strategy(self) -> Strategy:
        """How the noise is correlated."""
        if self.kind == "blt":
            return buffered(self.decay, self.scale)
        if self.kind == "white":
            return white(self.workload)
        return banded(self.separation, self.momentum) if self.kind == "banded" else independent()

    @cached_property
    def mechanism(self) -> Mechanism:
        """Both, with the participation rule."""
        return Mechanism(self.workload, self.strategy, self.rounds, self.separation, self.participations)

    @cached_property
    def mu(self) -> float:
        """The mu that the target allows."""
        return mu_of(self.epsilon, self.delta)

    @cached_property
    def sigma(self) -> float:
        """The standard deviation of z: sensitivity * clip / (per_round * mu)."""
        return self.mechanism.mu(sigma=self.mu, clip=self.clip, per_round=self.per_round)

    @property
    def grid(self) -> float:
        """To multiples of this what is shown is rounded: a power of two, an eighth of sigma or a little less.

        >>> PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100).grid
        0.0009765625
        """
        return float(2.0 ** math.floor(math.log2(self.sigma / 8)))

    @property
    def noise(self) -> float:
        """The root mean square of the noise on the weights, over all rounds; with `before` on one average update."""
        return self.sigma * self.mechanism.growth

    def relative(self, rms: float) -> float:
        """The noise against weights of this root mean square; with `before` that of updates which are simply added.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> round(plan.relative(rms=0.026), 2)
        1.62
        """
        added = replace(self.mechanism, workload=Workload()) if self.before else self.mechanism
        return self.sigma * added.growth / rms if rms > 0 else math.inf

    def require_useful(self, rms: float) -> None:
        """Refuse a target that only noise far larger than the weights would meet, and name the way out.

        >>> PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=10, cohort=10).require_useful(rms=0.026)
        Traceback (most recent call last):
            ...
        dbcl.errors.ConfigError: at epsilon 8 the noise would be 131 times the weights, and nothing could be ...
        """
        relative = self.relative(rms)
        if relative <= USEFUL:
            return
        ways = f"a larger epsilon, a smaller clip, fewer rounds or more {self.unit}s in a round"
        if self.unit == "client":
            ways = f"one example as the unit (its noise is divided by the examples of a round, not by clients), {ways}"
        raise ConfigError(
            f"at epsilon {self.epsilon:g} the noise would be {relative:.3g} times the weights, and nothing could be "
            f"learned: {self.per_round} {self.unit}s in a round are too few to hide one of them. The remedy: {ways}"
        )

    def spent(self, *, rounds: int, participations: int) -> Spent:
        """What is used up when this many rounds have been closed and no unit took part more often than that.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> round(plan.spent(rounds=100, participations=10).epsilon, 2)
        3.55
        """
        if rounds > self.rounds or participations > self.participations:
            raise ConfigError(
                f"the plan covers {self.rounds} rounds and {self.participations} participations, got {rounds} and "
                f"{participations}: there is no guarantee"
            )
        if min(rounds, participations) < 1:
            return Spent(0.0, 0.0, self.delta)
        used = replace(self.mechanism, rounds=rounds, participations=participations)
        mu = used.mu(sigma=self.sigma, clip=self.clip, per_round=self.per_round)
        return Spent(mu, epsilon_of(mu, self.delta), self.delta)

    @property
    def promise(self) -> str:
        """The guarantee in a sentence, with what it rests on.

        >>> PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100).promise
        "(epsilon 8, delta 1e-05) differential privacy (mu 1.666) for one client, against clients and the public, ..."
        """
        what = "gradients of examples, times the rate," if self.unit == "example" else "updates"
        count = f", where they count by their examples up to {self.most:g}," if self.most else ""
        return (
            f"(epsilon {self.epsilon:g}, delta {self.delta:g}) differential privacy (mu {self.mu:.4g}) for one "
            f"{self.unit}, against clients and the public, with a trusted server: neighbouring runs differ by one "
            f"{self.unit}'s data set to zero; {what} are clipped to {self.clip:g} and their sum{count} is divided by "
            f"{self.per_round}, and no {self.unit} takes part twice within {self.separation} rounds, nor more than "
            f"{self.participations} times in {self.rounds}"
        )
