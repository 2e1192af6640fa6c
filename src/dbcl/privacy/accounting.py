"""Privacy plan of a run: its noise, and the spent part of its privacy budget.

All noise of a run is one Gaussian mechanism with sensitivity / sigma = mu (`factorization`,
`distributed`).

Longer than 350 lines: all quantities of a guarantee are properties of one plan.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from dbcl.config import PrivacyConfig
from dbcl.errors import ConfigError, GuaranteeError
from dbcl.privacy.attendance import Rows, attendance_mu
from dbcl.privacy.conversion import epsilon_of, mu_of
from dbcl.privacy.distributed import NoiseShares
from dbcl.privacy.factorization import Mechanism, Strategy, Workload, banded, independent, white

MAX_NOISE_TO_WEIGHTS, MAX_NOISE_TO_SIGNAL = 10.0, 3.0
"""Limits of a useful plan: noise relative to the initial weights, and relative to the maximum total
change by all updates. A plan above both limits is rejected. On MNIST, with one of 1,000 clients as
the unit at epsilon 1, the ratios are about 10 and 2, and a network still reached 88 %.
"""


STEPS_SUM, STEPS_WHOLE = 100, 10
"""Minimum number of grid steps in the clip, divided by the square root of the number of values. At
these minima, rounding increases the sensitivity of a sum by 1 % and of a client's complete update
by 0.13 %.
"""


class Spent(NamedTuple):
    """Spent part of a privacy budget.

    >>> Spent(mu=1.0, epsilon=4.38, delta=1e-5).epsilon
    4.38
    """

    mu: float
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(PrivacyConfig):
    """Plan of the noise in a run with a guarantee: a `PrivacyConfig` and the parameters of the run.

    With one client as the privacy unit, each update is clipped, and the sum of the updates is
    divided by `cohort`. With one example as the unit, each gradient is clipped, and the sum of the
    gradients of all clients is divided by `batch`. Both denominators are public and independent of
    dropouts.

    Args:
        rounds: Number of rounds.
        clients: Number of clients.
        cohort: Number of clients in a round.
        examples: Number of examples of all clients; required if the unit is one example.
        batch: Number of examples in a round.
        participations: Maximum number of rounds in which one unit takes part; 0 selects the number
            in a fixed cyclic order.
        momentum: Momentum of the server's optimiser.
        lr: Learning rate of the server's optimiser.
        noise_on_updates: Add the noise to each average update, which permits nonlinear optimisers
            such as Adam. Otherwise the noise is added to the weights.
        values: Number of values in an update; required if clients add the noise.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> plan.separation, plan.participations, round(plan.mu, 3), round(plan.sigma, 4), round(plan.noise, 4)
    (10, 40, 1.666, 0.0102, 0.0422)
    """

    rounds: int
    clients: int
    cohort: int
    examples: int = 0
    batch: int = 0
    participations: int = 0
    momentum: float = 0.0
    lr: float = 1.0
    noise_on_updates: bool = False
    values: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared:
            self._set_shared()
        problems = self._problems()
        if not problems:
            # In turns a client takes part ceil(rounds cohort / clients) times; an example every separation-th round.
            separation = self.separation or self.clients // self.cohort
            turns = self.rounds * self.cohort / self.clients if self.unit == "client" else self.rounds / separation
            object.__setattr__(self, "separation", separation)
            object.__setattr__(self, "participations", self.participations or math.ceil(turns))
            problems = self._misfits()
        if problems:
            raise GuaranteeError("\n  - ".join(["there is no such guarantee:", *problems]))
        _ = self.workload, self.strategy  # validate their own arguments
        if self.shared:
            _ = self.shares

    def _set_shared(self) -> None:
        """Set the fields that depend on other parameters if clients add the noise."""
        if self.colluders is None:
            object.__setattr__(self, "colluders", min(max(1, self.cohort // 5), max(0, self.cohort - 1)))
        if self.unit == "client":  # shares of changing clients cannot be correlated over rounds
            object.__setattr__(self, "correlation", "independent")

    @classmethod
    def from_config(cls, config: PrivacyConfig, **facts: Any) -> "PrivacyPlan":
        """Make the plan of a configuration for a run.

        Args:
            config: Target of the guarantee.
            facts: Arguments of `PrivacyPlan` that are not in the configuration.

        >>> config = PrivacyConfig(epsilon=8, clip=0.2)
        >>> PrivacyPlan.from_config(config, rounds=400, clients=1000, cohort=100).participations
        40
        """
        return cls(**{field.name: getattr(config, field.name) for field in fields(PrivacyConfig)}, **facts)

    def _problems(self) -> list[str]:
        of_examples = self.unit == "example"
        checks = {
            f"rounds must be 1 or more, got {self.rounds}": self.rounds >= 1,
            f"cohort must be between 1 and the number of clients, {self.clients}, got {self.cohort}": 1
            <= self.cohort
            <= self.clients,
            f"participations must not be negative, got {self.participations}": self.participations >= 0,
            'unit "example" needs examples, the number that all clients have together, and batch, that of one round, '
            f"got {self.examples} and {self.batch}": not of_examples or 1 <= self.batch <= self.examples,
            'unit "example" needs separation, the rounds after which an example comes back': not of_examples
            or self.separation >= 1,
            f"delta must be below 1 / {self.units} ({self.unit}s), or revealing one of them entirely would be allowed, "
            f"got {self.delta}": self.delta < 1 / max(self.units, 1),
            "if clients add the noise, values is the number of values in an update, 1 or more": not self.shared
            or self.values >= 1,
            "if clients add the noise to protect one example, all clients take part in every round, got cohort "
            f"{self.cohort} of {self.clients}": not (self.shared and of_examples) or self.cohort == self.clients,
            f"fewest must not be above the cohort, {self.cohort}, got {self.fewest}": self.fewest <= self.cohort,
        }
        return [problem for problem, fine in checks.items() if not fine]

    def _misfits(self) -> list[str]:
        """Return the requirements of the participation rule that the clients cannot satisfy."""
        problems = []
        if self.counts_attendance and self.least < self._least_overlapping:
            problems.append(
                f"with fewest {self.fewest} of {self.clients} clients and {self.colluders} colluders the sums of "
                "two rounds need not have an honest client in common that knows who was in both: with noise that is "
                f"correlated over rounds fewest must be {self._least_overlapping} or more"
            )
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
    def shared(self) -> bool:
        """Return whether clients add noise shares, so that the server is untrusted."""
        return self.noise_by == "clients"

    @property
    def least(self) -> int:
        """Minimum number of clients in a revealed sum if clients add the noise."""
        return self.fewest or self.cohort

    @property
    def counts_attendance(self) -> bool:
        """Return whether mu depends on attendance: clients may be missing, and the noise is
        correlated over rounds.
        """
        return self.shared and self.least < self.cohort and self.strategy.memory > 0

    @property
    def _least_overlapping(self) -> int:
        """Smallest `fewest` for which the signers of one sum and the members of another share an
        honest client.

        At least (m + k) // 2 + 1 members of a sum sign, more than half of its m members and k
        colluders; of n clients n - k are honest. The condition also excludes two sums in one round,
        which would require 2 (m - k) <= n - k.
        """
        bad = self.colluders or 0
        return next(m for m in range(bad + 1, self.clients + 1) if m + (m + bad) // 2 + 1 > self.clients + bad)

    @cached_property
    def shares(self) -> NoiseShares:
        """Noise shares of the clients; only if `shared`."""
        assert self.colluders is not None
        whole = self.unit == "client"
        least = (STEPS_WHOLE if whole else STEPS_SUM) * math.sqrt(self.values)
        return NoiseShares(
            epsilon=self.epsilon,
            delta=self.delta,
            mechanism=replace(self.mechanism, workload=Workload(after=False)),
            clients=self.least,
            colluders=self.colluders,
            values=self.values,
            steps=1 << math.ceil(math.log2(least)),
            whole=whole,
            largest=self.cohort,
        )

    @property
    def units(self) -> int:
        """Number of privacy units in the run: clients or examples."""
        return self.examples if self.unit == "example" else self.clients

    @property
    def per_round(self) -> int:
        """Planned number of privacy units in a round: the fixed, public denominator of their sum."""
        return self.batch if self.unit == "example" else self.cohort

    @cached_property
    def workload(self) -> Workload:
        """Linear map from average updates to weights."""
        return Workload(self.momentum, self.lr, after=not self.noise_on_updates)

    @cached_property
    def strategy(self) -> Strategy:
        """Correlation of the noise over rounds."""
        if self.correlation == "white":
            return white(self.workload)
        return banded(self.separation, self.momentum) if self.correlation == "banded" else independent()

    @cached_property
    def mechanism(self) -> Mechanism:
        """Noise mechanism: workload, strategy and participation rule."""
        return Mechanism(self.workload, self.strategy, self.rounds, self.separation, self.participations)

    @cached_property
    def mu(self) -> float:
        """Largest mu that satisfies the target."""
        return self.shares.mu if self.shared else mu_of(self.epsilon, self.delta)

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of z: sensitivity * clip / (per_round * mu). For noise shares, that of
        their sum.
        """
        if self.shared:
            return self.shares.scale * math.sqrt(self.cohort) * self.clip / (self.shares.steps * self.per_round)
        return self.mechanism.mu(sigma=self.mu, clip=self.clip, per_round=self.per_round)

    @property
    def grid(self) -> float:
        """Grid to which noisy values are rounded: a power of two, at most sigma / 8.

        >>> PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100).grid
        0.0009765625
        """
        return float(2.0 ** math.floor(math.log2(self.sigma / 8)))

    @property
    def noise(self) -> float:
        """RMS of the noise on the weights over all rounds; with `noise_on_updates`, on one average
        update.
        """
        return self.sigma * self.mechanism.growth

    @cached_property
    def _added(self) -> Mechanism:
        """Mechanism of the noise on the weights. With `noise_on_updates`, the mechanism of plain
        averaging.
        """
        return replace(self.mechanism, workload=Workload()) if self.noise_on_updates else self.mechanism

    def relative(self, rms: float) -> float:
        """Return the noise relative to weights of this RMS. With `noise_on_updates`, plain
        averaging is assumed.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> round(plan.relative(rms=0.026), 2)
        1.62
        """
        return self.sigma * self._added.growth / rms if rms > 0 else math.inf

    @cached_property
    def reach(self) -> float:
        """Maximum norm of the total change of W: all updates have the norm `clip` and the same
        direction.
        """
        return self.clip * float(self._added.workload.coefficients(self.rounds).sum())

    def noise_to_signal(self, parameters: int) -> float:
        """Return the norm of the noise on the final model, relative to `reach`.

        Args:
            parameters: Number of trained parameters.

        >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
        >>> round(plan.noise_to_signal(parameters=199_210), 2)
        0.33
        """
        return self.sigma * float(self._added.growths[-1]) * math.sqrt(parameters) / self.reach

    def useful(self, rms: float, parameters: int) -> bool:
        """Return whether a model can learn under this noise.

        Noise far above the initial weights destroys them, which is harmful only if the updates
        cannot exceed the noise.

        Args:
            rms: Root mean square of the initial weights.
            parameters: Number of trained parameters.
        """
        return self.relative(rms) <= MAX_NOISE_TO_WEIGHTS or self.noise_to_signal(parameters) <= MAX_NOISE_TO_SIGNAL

    def require_useful(self, rms: float, parameters: int) -> None:
        """Raise `GuaranteeError` with remedies if the noise prevents learning.

        Args:
            rms: Root mean square of the initial weights.
            parameters: Number of trained parameters.

        Raises:
            GuaranteeError: The plan is not `useful`.

        >>> few = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=10, cohort=10)
        >>> few.require_useful(rms=0.026, parameters=199_210)
        Traceback (most recent call last):
            ...
        dbcl.errors.GuaranteeError: at epsilon 8 the noise would be 26.8 times the largest change that all updates ...
        """
        if self.useful(rms, parameters):
            return
        beside = f" and {self.relative(rms):.3g} times the initial weights" if rms > 0 else ""
        ways = f"a larger epsilon, fewer parameters or more {self.unit}s in a round"
        if self.unit == "client":
            ways = f"one example as the unit (its noise is divided by the examples of a round, not by clients), {ways}"
        raise GuaranteeError(
            f"at epsilon {self.epsilon:g} the noise would be {self.noise_to_signal(parameters):.3g} times the largest "
            f"change that all updates together can make{beside}, and nothing could be learned: {self.per_round} "
            f"{self.unit}s in a round are too few to hide one of them. The remedy: {ways}"
        )

    def spent(self, *, rounds: int, participations: int) -> Spent:
        """Return the budget spent after some rounds.

        Args:
            rounds: Number of rounds.
            participations: Maximum number of participations of any unit in these rounds.

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
        mu = self.mu * used.sensitivity / self.mechanism.sensitivity
        return Spent(mu, epsilon_of(mu, self.delta), self.delta)

    def spent_by(self, attendance: Rows) -> Spent:
        """Return the budget spent by revealing these sums; only if `counts_attendance`.

        Args:
            attendance: The revealed sums.

        >>> plan = PrivacyPlan(
        ...     epsilon=8, delta=1e-5, clip=1.0, unit="example", noise_by="clients", colluders=1, fewest=4,
        ...     separation=2, rounds=8, clients=5, cohort=5, examples=500, batch=250, values=10,
        ... )
        >>> always = tuple((round, ("ann", "bob", "cleo", "dan", "eve")) for round in range(8))
        >>> round(plan.mu, 3), round(plan.spent_by(always).mu, 3)  # the root of 3/4
        (1.665, 1.442)
        """
        if not self.counts_attendance:
            raise ConfigError("attendance counts if clients that add correlated noise may be missing")
        if attendance and attendance[-1][0] >= self.rounds:
            raise ConfigError(f"the plan covers {self.rounds} rounds, got a sum of round {attendance[-1][0]}")
        mu = attendance_mu(self.shares, attendance)
        return Spent(mu, epsilon_of(mu, self.delta), self.delta)

    @property
    def promise(self) -> str:
        """Guarantee and its conditions as a sentence.

        >>> PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100).promise
        '(epsilon 8, delta 1e-05) differential privacy (mu 1.666) for one client, against clients and the public, ...'
        """
        if self.shared:
            return self._promise_of_shares()
        whom, differ, what = "client", "client, whose updates are zero in one of them", "updates"
        if self.unit == "example":
            # The server cannot verify a client's clipping; one that does not clip harms only its own examples.
            whom = "example of a client that clips each example's gradient, and keeps their turns, by itself"
            differ, what = "example, whose gradient is zero in one of them", "gradients, times the rate,"
        count = f", weighted by their examples up to {self.weight_cap:g}," if self.weight_cap else ""
        return (
            f"(epsilon {self.epsilon:g}, delta {self.delta:g}) differential privacy (mu {self.mu:.4g}) for one "
            f"{whom}, {self.against}: neighbouring runs differ by one "
            f"{differ}; {what} are clipped to {self.clip:g} and their sum{count} is divided by "
            f"{self.per_round}, and no {self.unit} takes part twice within {self.separation} rounds, nor more than "
            f"{self.participations} times in {self.rounds}"
        )

    @property
    def against(self) -> str:
        """Adversaries covered by the guarantee.

        >>> PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100).against
        'against clients and the public, with a trusted server'
        """
        if not self.shared:
            return "against clients and the public, with a trusted server"
        plural = "" if self.colluders == 1 else "s"
        others = f"up to {self.colluders} colluding client{plural}" if self.colluders else "other clients"
        return f"against the server, {others} and everyone who gets the model"

    @property
    def _members(self) -> str:
        if self.least == self.cohort:
            return f"all {self.cohort} clients"
        within = ", as long as mu by the attendance stays within it" if self.counts_attendance else ""
        return f"{self.least} clients or more{within}"

    def _promise_of_shares(self) -> str:
        """Return the sentence of `promise` if clients add the noise."""
        against = self.against
        whom = f"(epsilon {self.epsilon:g}, delta {self.delta:g}) differential privacy (mu {self.mu:.4g}) for every"
        if self.unit == "example":
            return (
                f"{whom} example of a client that runs this software, {against}: neighbouring runs differ by one "
                "example, whose gradient is zero in one of them; gradients, times the rate, are clipped to "
                f"{self.clip:g}, and every client adds its share of the noise before anything leaves it; only sums "
                f"over {self._members} are revealed, and an example takes part {self.participations} times at most in "
                f"{self.rounds} rounds, {self.separation} rounds apart or more"
            )
        return (
            f"{whom} client that runs this software, {against}: neighbouring runs differ by one client, whose updates "
            f"are zero in one of them; updates are clipped to {self.clip:g}, and every client adds its share of the "
            f"noise before anything leaves it; only sums over {self._members} are revealed, and no "
            f"client takes part twice within {self.separation} rounds, nor more than {self.participations} times in "
            f"{self.rounds}"
        )
