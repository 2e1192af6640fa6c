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
MAX_NOISE_TO_WEIGHTS, MAX_NOISE_TO_SIGNAL = 10.0, 3.0
"""A plan is rejected where the noise is above both: this many times the initial weights, and this many times the
largest change that all updates together can make. On MNIST, one of 1,000 clients at epsilon 1, both about 10 and 2, a
network still learned 88 %."""


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
    clients, each update is clipped to the norm `clip` and their sum is divided by `cohort`; of examples, each
    gradient is clipped and their sum over all clients is divided by `batch`, any public number. Left at 0,
    `separation` and `participations` become those of turns in a fixed order (`cyclic_cohort`); an example comes back
    after exactly `separation` rounds (`cyclic_batch`), which the clients decide, so there it must be given. All clients
    count alike; with `most`, a public number, by their examples, those with `most` and more for one.

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
            separation = self.separation or self.clients // self.cohort
            turns = self.rounds * self.cohort / self.clients if self.unit == "client" else self.rounds / separation
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
            'unit "example" needs separation, after how many rounds the clients take an example again': self.unit
            != "example"
            or self.separation >= 1,
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
        """List what the participation rule asks for and the clients cannot keep."""
        problems = []
        if self.unit == "example":
            turns = math.ceil(self.rounds / self.separation)
            if self.participations < turns:
                problems.append(
                    f"in {self.rounds} rounds an example that comes back after {self.separation} takes part {turns} "
                    f"times, and participations is {self.participations}"
                )
            return problems
        if self.separation * self.cohort > self.clients:
            problems.append(
                f"with {self.cohort} clients in a round, {self.separation} rounds apart, {self.clients} are too few: "
                f"separation can be {self.clients // self.cohort} at most"
            )
        if self.participations * self.clients < self.rounds * self.cohort:
            problems.append(
                f"{self.rounds} rounds with {self.cohort} clients each are more than {self.clients} can fill, "
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

    @cached_property
    def _added(self) -> Mechanism:
        """The mechanism, or with `before` that of updates which are simply added."""
        return replace(self.mechanism, workload=Workload()) if self.before else self.mechanism

    def relative(self, rms: float) -> float:
        """Return the noise relative to weights of this root mean square; with `before` that of plain addition.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> round(plan.relative(rms=0.026), 2)
        1.62
        """
        return self.sigma * self._added.growth / rms if rms > 0 else math.inf

    @cached_property
    def reach(self) -> float:
        """The norm of the largest change of W: by updates that all have the norm `clip` and one direction."""
        return self.clip * float(self._added.workload.coefficients(self.rounds).sum())

    def noise_to_signal(self, parameters: int) -> float:
        """Return the norm of the noise on the last model relative to `reach`, the most that updates can change.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> round(plan.noise_to_signal(parameters=199_210), 2)
        0.33
        """
        return self.sigma * float(self._added.growths[-1]) * math.sqrt(parameters) / self.reach

    def useful(self, rms: float, parameters: int) -> bool:
        """Return whether anything can be learned with this noise, by weights of this initial RMS and number.

        Noise far above the initial weights wipes them out, which matters only where the updates cannot rise above it.
        """
        return self.relative(rms) <= MAX_NOISE_TO_WEIGHTS or self.noise_to_signal(parameters) <= MAX_NOISE_TO_SIGNAL

    def require_useful(self, rms: float, parameters: int) -> None:
        """Reject a target that only noise far above all that can be learned would meet, and name the remedy.

        >>> few = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=10, cohort=10)
        >>> few.require_useful(rms=0.026, parameters=199_210)
        Traceback (most recent call last):
            ...
        dbcl.errors.ConfigError: at epsilon 8 the noise would be 26.8 times the largest change that all updates ...
        """
        if self.useful(rms, parameters):
            return
        beside = f" and {self.relative(rms):.3g} times the initial weights" if rms > 0 else ""
        ways = f"a larger epsilon, fewer parameters or more {self.unit}s in a round"
        if self.unit == "client":
            ways = f"one example as the unit (its noise is divided by the examples of a round, not by clients), {ways}"
        raise ConfigError(
            f"at epsilon {self.epsilon:g} the noise would be {self.noise_to_signal(parameters):.3g} times the largest "
            f"change that all updates together can make{beside}, and nothing could be learned: {self.per_round} "
            f"{self.unit}s in a round are too few to hide one of them. The remedy: {ways}"
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
        what = "updates"
        if self.unit == "example":
            what = "gradients of examples, times the rate, which each client clips by itself,"
        count = f", where they count by their examples up to {self.most:g}," if self.most else ""
        return (
            f"(epsilon {self.epsilon:g}, delta {self.delta:g}) differential privacy (mu {self.mu:.4g}) for one "
            f"{self.unit}, against clients and the public, with a trusted server: neighbouring runs differ by one "
            f"{self.unit}'s data set to zero; {what} are clipped to {self.clip:g} and their sum{count} is divided by "
            f"{self.per_round}, and no {self.unit} takes part twice within {self.separation} rounds, nor more than "
            f"{self.participations} times in {self.rounds}"
        )
