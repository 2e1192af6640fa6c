"""Distributed noise for an untrusted server: scale of the clients' noise shares, and the privacy
cost of their rounding.

Each of n clients adds integers to its own update before masking: q_i + rint(nu_i), where q_i is its
rounded vector (the sum of its clipped gradients if one example is the privacy unit) and nu_i = s
C^-1 z_i over the rounds. Secure aggregation reveals only sum q_i + sum rint(nu_i). Without
rounding, the noise of the h = n - k non-colluding clients would equal that of the central
mechanism, s sqrt(h) C^-1 z, and with a sensitivity of Delta grid steps

    mu = Delta * max |C x| / (s sqrt(h)),    Delta = clip / grid + sqrt(d),

where sqrt(d) accounts for rounding a sum of d values to the nearest integers. If the vector is the
complete contribution of a privacy unit, stochastic rounding is repeated until the norm is below a
bound, and Delta is only slightly larger than clip / grid.

Rounded shares are approximately Gaussian. Given w = sum nu_i, the fractional parts of nu_1, ...,
nu_(h-1) are a wrapped Gaussian with the covariance (I - J/h) (x) s^2 (C^T C)^-1. This distribution
is within `total_variation` of the uniform distribution. For uniform fractional parts, sum
rint(nu_i) would be distributed as rint(w + sum U_i) with independent uniform U_i. As q is an
integer, q + rint(w + U) = rint(q + w + U) is a function of the Gaussian mechanism's output. The
mechanism is therefore (epsilon, delta_mu(epsilon) + (1 + e^epsilon) d tau)-differentially private.
The bound on tau does not depend on C, because the Gram-Schmidt norms of C^-1 are 1.
`docs/nobody-trusted.md` has the proof. If clients may be missing in some rounds, s / sum |c_j|
replaces s in the bound (`NoiseShares.spread`), and `attendance` computes mu.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl import seeds
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy.conversion import epsilon_of, mu_of
from dbcl.privacy.factorization import Mechanism, Memory, Workload, quotient
from dbcl.state import State

SCHEME = "silo-noise-v1"
"""Label of the random stream of z."""
MIN_SCALE = 3.0
"""Minimum standard deviation of a share in grid steps, times `NoiseShares.spread`. At this scale
tau is below 1e-25.
"""


def total_variation(scale: float, honest: int, rounds: int) -> float:
    """Return a bound on tau, the total variation distance of the shares' fractional parts from
    uniform.

    The bound holds for one value over all rounds.

    tau = 1/2 (prod_{i=1}^{h-1} theta(2 pi^2 s^2 i / (i+1))^T - 1), theta(a) = sum over all integers
    m of e^(-a m^2).

    Args:
        scale: s, the standard deviation of a share in grid steps.
        honest: h, the number of non-colluding clients.
        rounds: T, the number of rounds.

    >>> total_variation(3.0, honest=8, rounds=1000) < 1e-34
    True
    """
    exponent = rounds * sum(_log_theta(2 * math.pi**2 * scale**2 * i / (i + 1)) for i in range(1, honest))
    return 0.5 * math.expm1(exponent) if exponent < 700 else math.inf


def _log_theta(a: float) -> float:
    """Return log(theta(a)), theta(a) = sum over all integers m of e^(-a m^2)."""
    if a < 1:  # few terms by Poisson's summation formula
        return 0.5 * math.log(math.pi / a) + math.log1p(2 * sum(math.exp(-((math.pi * m) ** 2) / a) for m in (1, 2, 3)))
    return math.log1p(2 * sum(math.exp(-a * m * m) for m in range(1, 8)))


@dataclass(frozen=True, kw_only=True)
class NoiseShares:
    """Integer noise of each client for a guarantee against a server that colludes with k clients.

    Args:
        epsilon: Epsilon of the guarantee.
        delta: Delta of the guarantee. The rounding of the shares uses a negligible part of it.
        mechanism: Correlation of the noise over rounds, and participation of a privacy unit.
        clients: n, the minimum number of clients in a revealed sum.
        colluders: k, the maximum number of colluding clients, whose noise is not counted.
        values: d, the number of values in an update.
        steps: Clipping norm in grid steps.
        whole: Whether the vector is the complete contribution of one privacy unit, instead of a sum
            over several privacy units.
        largest: Maximum number of clients in a sum; 0 if all of `clients` are in every sum.

    >>> from dbcl.privacy import Workload, banded
    >>> mechanism = Mechanism(Workload(), banded(10), rounds=200, separation=10, participations=20)
    >>> shares = NoiseShares(
    ...     epsilon=2, delta=1e-5, mechanism=mechanism, clients=10, colluders=2, values=39_700, steps=1 << 16
    ... )
    >>> round(shares.mu, 4), round(shares.scale), shares.delta_of_rounding < 1e-100
    (0.5013, 277509, True)
    """

    epsilon: float
    delta: float
    mechanism: Mechanism
    clients: int
    colluders: int
    values: int
    steps: int
    whole: bool = False
    largest: int = 0

    def __post_init__(self) -> None:
        if not self.largest:
            object.__setattr__(self, "largest", self.clients)
        problems = []
        if self.largest < self.clients:
            problems.append(f"a sum has {self.clients} clients at least, and {self.largest} at most")
        if not 0 <= self.colluders < self.clients:
            problems.append(f"of {self.clients} clients 0 to {self.clients - 1} may collude, got {self.colluders}")
        if self.values < 1 or self.steps < 1:
            problems.append(f"values and steps are 1 or more, got {self.values} and {self.steps}")
        if not problems and self.scale < MIN_SCALE * self.spread:
            problems.append(
                f"a share of noise would have a standard deviation of {self.scale:.3g} grid steps, and "
                f"{MIN_SCALE * self.spread:.3g} are needed; take more steps"
            )
        if not problems and self.delta_of_rounding > self.delta / 100:
            problems.append(
                f"the rounding of the shares would take {self.delta_of_rounding:.3g} of delta {self.delta:g}"
            )
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def honest(self) -> int:
        """h, the minimum number of non-colluding clients in a sum."""
        return self.clients - self.colluders

    @cached_property
    def mu(self) -> float:
        """The mu of the target, after reserving 1 % of delta for the rounding of the shares."""
        return mu_of(self.epsilon, self.delta * 0.99)

    @property
    def sensitivity(self) -> float:
        """Sensitivity Delta: maximum change of a client's rounded vector by one privacy unit, in
        grid steps.
        """
        return longest_rounded(self.steps, self.values) if self.whole else self.steps + math.sqrt(self.values)

    @cached_property
    def scale(self) -> float:
        """s, the standard deviation of a client's z in grid steps."""
        return self.sensitivity * self.mechanism.sensitivity / (self.mu * math.sqrt(self.honest))

    @cached_property
    def spread(self) -> float:
        """Sum of |c_j| if clients may be missing, else 1.

        The norm of C is at most the sum of |c_j|. A noise share therefore contains independent
        noise of standard deviation s / spread in each round. This component alone makes the
        fractional parts of the shares almost uniform for any attendance. If all clients attend, the
        bound does not depend on C.
        """
        if self.largest == self.clients:
            return 1.0
        return float(np.abs(self.mechanism.strategy.coefficients(self.mechanism.rounds)).sum())

    @cached_property
    def delta_of_rounding(self) -> float:
        """Delta spent by rounding, (1 + e^epsilon) d tau."""
        tau = total_variation(self.scale / self.spread, self.largest - self.colluders, self.mechanism.rounds)
        return (1 + math.exp(self.epsilon)) * self.values * tau

    def mu_against(self, colluders: int) -> float:
        """Return the mu that holds if this many clients collude with the server.

        >>> from dbcl.privacy import Workload, independent
        >>> mechanism = Mechanism(Workload(), independent(), rounds=4, separation=1, participations=4)
        >>> shares = NoiseShares(
        ...     epsilon=2, delta=1e-5, mechanism=mechanism, clients=10, colluders=2, values=100, steps=1000
        ... )
        >>> shares.mu_against(2) == shares.mu, shares.mu_against(6) / shares.mu
        (True, 1.41421...)
        """
        if not 0 <= colluders < self.clients:
            raise ConfigError(f"colluders are at least 0 and below {self.clients}, got {colluders}")
        return self.mu * math.sqrt(self.honest / (self.clients - colluders))

    def epsilon_against(self, colluders: int) -> float:
        """Return the epsilon, at the same delta, that holds if this many clients collude with the
        server.
        """
        return epsilon_of(self.mu_against(colluders), self.delta)

    @cached_property
    def growth(self) -> float:
        """Standard deviation of a share in the last round relative to z: the norm of a row of C^-1."""
        strategy = self.mechanism.strategy
        return float(np.linalg.norm(quotient(strategy.denominator, strategy.numerator, self.mechanism.rounds)))

    def noise(self, clients: int) -> float:
        """Return the maximum standard deviation of the sum of this many shares, in grid steps."""
        return self.scale * self.growth * math.sqrt(clients)


def longest_rounded(steps: float, values: int) -> float:
    """Return the norm bound to which `rounded_at_random` rounds a vector.

    A trial of stochastic rounding satisfies the bound with a probability of at least 1 - 1/sqrt(e)
    (Kairouz, Liu and Steinke 2021, proposition 22, with beta = exp(-1/2)).

    Args:
        steps: Norm of the vector in grid steps.
        values: Number of values in the vector.

    >>> longest_rounded(1000, 100) < 1000 + math.sqrt(100)
    True
    """
    return min(math.sqrt(steps**2 + values / 4 + steps + math.sqrt(values) / 2), steps + math.sqrt(values))


class NoiseStream:
    """A client's noise shares, round by round: rint(s C^-1 z) with z derived from a secret key.

    z of round t is a function of the key, of t, and of all broadcasts received up to and including
    round t. A second broadcast for an answered round therefore gives fresh noise. The same noise is
    never used on different data, even if a client's disk is restored from a backup. z is also drawn
    for rounds without participation, because later noise depends on it.

    Args:
        shares: Noise shares of the plan.
        key: The client's secret key.

    >>> from dbcl.privacy import banded
    >>> mechanism = Mechanism(Workload(), banded(2), rounds=4, separation=2, participations=2)
    >>> shares = NoiseShares(
    ...     epsilon=2, delta=1e-5, mechanism=mechanism, clients=4, colluders=1, values=3, steps=1000
    ... )
    >>> stream = NoiseStream(shares, bytes(32))
    >>> stream.draw(0, b"what was sent in round 0").dtype, stream.round
    (dtype('int64'), 1)
    """

    def __init__(self, shares: NoiseShares, key: bytes) -> None:
        self.shares, self._key = shares, key
        self._mechanism = replace(shares.mechanism, workload=Workload(after=False))
        self._memory = Memory()
        self._received = bytes(32)
        self.round = 0
        """Round whose noise is drawn next."""

    def draw(self, round: int, broadcast: bytes) -> NDArray[np.int64]:
        """Return the noise of a round. Rounds before `self.round` raise an error.

        Args:
            round: Number of the round.
            broadcast: Digest of the round's broadcast.
        """
        if not self.round <= round < self._mechanism.rounds:
            raise ProtocolError(
                f"noise is drawn for round {self.round} of {self._mechanism.rounds}, and round {round} was asked for"
            )
        while self.round < round and self._mechanism.strategy.memory:
            self._step(b"")
        self.round = round
        noise: NDArray[np.int64] = self._step(broadcast).round().to(torch.int64).numpy()
        return noise

    def _step(self, broadcast: bytes) -> Tensor:
        """Update the memory with z of the next round; return s C^-1 z."""
        count = self.shares.values
        self._received = hashlib.sha256(self._received + hashlib.sha256(broadcast).digest()).digest()
        words = seeds.words(self._key, SCHEME, self.round, self._received.hex(), n=count + count % 2)
        z = seeds.fine_normals_on(torch.device("cpu"), words, count).mul_(self.shares.scale)
        self._memory = self._mechanism.step(self._memory, z)
        self.round += 1
        assert self._memory.total is not None
        return self._memory.total

    def state(self) -> State:
        """Return the state, including the key. It must be on disk before the noise of a round is
        used.
        """
        past = {f"past{age}": each for age, each in enumerate(self._memory.past)}
        values = {"round": self.round, "received": self._received.hex(), "key": self._key.hex()}
        return State(values, past)

    def load_state(self, state: State) -> None:
        """Restore a state returned by `state`."""
        try:
            round, received = int(state.values["round"]), bytes.fromhex(state.values["received"])
            key = bytes.fromhex(state.values["key"])
            past = tuple(state.tensors[f"past{age}"] for age in range(len(state.tensors)))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the state of a client's noise cannot be read ({type(error).__name__})") from error
        if any(each.shape != (self.shares.values,) or each.dtype != torch.float64 for each in past):
            raise ProtocolError("the state of a client's noise is that of another model")
        self.round, self._received, self._key, self._memory = round, received, key, Memory(past)
