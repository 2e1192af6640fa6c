"""Encoding of updates as integer vectors for masking, and decoding of their sums.

Each encoding defines the client side and the server side in one class, because both must agree bit
by bit. `WeightedMean` weights updates by examples and gives no guarantee for the sum. `NoisySum`
adds each client's noise share, so that a guarantee covers the sum.
"""

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbcl import seeds
from dbcl.config import SecAggConfig
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import NoiseStream, ParticipationTracker, PrivacyPlan, clip_factor
from dbcl.privacy.distributed import SCHEME, longest_rounded
from dbcl.protocol.messages import Broadcast, Update
from dbcl.protocol.secagg.history import AccountedAttendance, GroupRule, OneSumARound, StandingGroup
from dbcl.protocol.secagg.keys import digest
from dbcl.protocol.secagg.messages import MAX_GROUP
from dbcl.protocol.secagg.quantizer import LEVELS, Quantizer, Words, folded, rounded_at_random, word_bits
from dbcl.protocol.secagg.vectors import broadcast_digest, sum_vector, update_vector
from dbcl.state import State, join

Vector = NDArray[Any]
MAX_BITS = 32
"""Maximum number of bits in a masked word."""
OWN = "itself"
"""Client name in a client's own participation record."""
NOISE_TAIL = 8.0
"""Range reserved for the noise in a word, in standard deviations."""


@dataclass(frozen=True)
class Total:
    """Result of a group: the weighted sum, the sum of the weights, and the contributing clients.

    >>> total = Total(np.array([1.0, -2.0]), weight=2.0, members=("ann", "bob", "cleo"))
    >>> total.values / total.weight  # the mean of their updates
    array([ 0.5, -1. ])
    """

    values: NDArray[np.float64]
    weight: float
    members: tuple[str, ...]


class Encoding(ABC):
    """Encoding of updates as integers for summation."""

    noisy = False
    """True if the sum includes the noise of a guarantee."""
    more_words = 0
    """Number of additional words in a vector besides its values."""

    @property
    def largest_group(self) -> int:
        """Largest number of clients in a sum."""
        return MAX_GROUP

    parties: int | None = None
    """Maximum number of registered clients, or None.

    A guarantee needs this limit if a client uses other clients' statements about past rounds.
    """

    @abstractmethod
    def vector(self, update: Update | bytes, broadcast: Broadcast) -> tuple[Vector, int]:
        """Return the vector of a client's update for this round, and its number of examples.

        Raises:
            ProtocolError: The update does not answer the broadcast, or the client must not answer.
        """

    @abstractmethod
    def words(self, vector: Vector, examples: int, clients: int, rng: np.random.Generator | None = None) -> Words:
        """Return the unmasked words of a vector, for a group with the given number of clients."""

    @abstractmethod
    def bits(self, clients: int) -> int:
        """Return the number of bits per word for a group with the given number of clients."""

    @abstractmethod
    def total(self, words: Words, clients: int, members: tuple[str, ...]) -> Total:
        """Decode the sum over the members of a group with the given number of clients.

        Sums from honest clients are decoded exactly. Sums with invalid words from malicious clients
        are projected onto the ball of honest sums. They are never rejected, because the decision
        would depend on honest clients' data without noise.
        """

    def rule(self) -> GroupRule:
        """Return a client's rule for participation in groups."""
        return StandingGroup()

    def binding(self, plan: bytes) -> bytes:
        """Return a digest of all settings that clients must agree on.

        `plan` is the digest of the round plan.
        """
        return plan

    def state(self) -> State:
        """Return the state that a client must store between rounds."""
        return State({}, {})

    def load_state(self, state: State) -> None:  # noqa: B027  most keep nothing
        """Restore the state returned by `state`."""


@dataclass(frozen=True)
class WeightedMean(Encoding):
    """The weighted update with stochastic rounding, followed by one word for the weight.

    >>> encoding = WeightedMean(SecAggConfig(clip=1.0, weight_cap=10))
    >>> encoding.words(np.zeros(3), examples=5, clients=2)
    array([    0,     0,     0, 16384], dtype=uint32)
    """

    config: SecAggConfig
    more_words = 1

    def __post_init__(self) -> None:
        if self.config.min_cohort < 3:
            raise ConfigError(
                f"in a sum of 2 clients each learns the other's update, got min_cohort {self.config.min_cohort}"
            )

    def vector(self, update: Update | bytes, broadcast: Broadcast) -> tuple[Vector, int]:
        return update_vector(update, broadcast, self.config.clip)

    def words(self, vector: Vector, examples: int, clients: int, rng: np.random.Generator | None = None) -> Words:
        # The weight is examples / weight_cap in 2^15 - 1 steps, at most 1 and never 0; the update is multiplied by what
        # it was rounded to, so that the mean is that of the weights that were sent.
        if not examples >= 1:
            raise ProtocolError(f"an update of {examples} examples: nothing is sent")
        steps = max(1, math.ceil(LEVELS * min(1.0, examples / self.config.weight_cap)))
        words = Quantizer(self.config.clip, clients).quantized(vector * (steps / LEVELS), rng)
        return np.append(words, np.uint32(steps))

    def bits(self, clients: int) -> int:
        return Quantizer(self.config.clip, clients).bits

    def total(self, words: Words, clients: int, members: tuple[str, ...]) -> Total:
        quantizer, count = Quantizer(self.config.clip, clients), len(members)
        values, weight = quantizer.values(words[:-1]), int(quantizer.steps(words[-1:])[0])
        factor = clip_factor(float(np.linalg.norm(values)), count * quantizer.longest(len(values)) * (1 + 1e-9))
        return Total(values * factor, min(max(weight, count), count * LEVELS) / LEVELS, members)


class NoisySum(Encoding):
    """The rounded update plus a noise share: a plan's guarantee covers the sum against every party.

    If the privacy unit is one example, the update is a sum of clipped gradients in float64, rounded
    to the nearest integers. Otherwise, it is clipped and stochastically rounded within
    `longest_rounded`. The update and the noise must be rounded separately: only then is the total
    sum a function of the Gaussian mechanism's output.

    Args:
        plan: The plan of the guarantee, with `noise_by="clients"`.
        stream: The client's noise generator; None on the server.

    >>> plan = PrivacyPlan(
    ...     epsilon=2, delta=1e-5, clip=0.1, unit="example", separation=2, rounds=8, clients=4, cohort=4, examples=800,
    ...     batch=400, values=3, noise_by="clients",
    ... )
    >>> encoding = NoisySum(plan, NoiseStream(plan.shares, bytes(32)))
    >>> encoding.bits(4), plan.shares.steps
    (19, 256)
    """

    noisy = True

    def __init__(self, plan: PrivacyPlan, stream: NoiseStream | None = None) -> None:
        if not plan.shared:
            raise ConfigError("shares of noise are for a plan with noise_by='clients'")
        self.plan, self.stream = plan, stream
        self.tracker = ParticipationTracker(
            rounds=plan.rounds,
            separation=plan.separation if plan.unit == "client" else 1,
            participations=plan.participations if plan.unit == "client" else plan.rounds,
            clients=1,
        )
        """The client's own participation record, independent of the server."""

    @classmethod
    def of_client(cls, plan: PrivacyPlan, key: bytes | None = None) -> "NoisySum":
        """Return a client's encoding.

        Its noise is derived from a secret key, by default a new key.
        """
        return cls(plan, NoiseStream(plan.shares, key or seeds.fresh()))

    @property
    def largest_group(self) -> int:
        """Planned number of clients in a round; words reserve range for their noise."""
        return min(self.plan.cohort, MAX_GROUP)

    @property
    def parties(self) -> int | None:  # type: ignore[override]
        return self.plan.clients if self.plan.counts_attendance else None

    def rule(self) -> GroupRule:
        if self.plan.counts_attendance:
            return AccountedAttendance(self.plan.shares)
        return OneSumARound(steady=self.plan.least == self.plan.clients)

    @property
    def grid(self) -> float:
        """Value that one integer step represents."""
        return self.plan.clip / self.plan.shares.steps

    @cached_property
    def limit(self) -> int:
        """Bound on each value of a client's vector, in steps.

        Clamping to this bound is 1-Lipschitz and does not weaken the guarantee.
        """
        room = min(self.plan.per_round * self.plan.shares.steps, (1 << (MAX_BITS - 2)) - self._tail)
        units = self.plan.cohort if self.plan.unit == "client" else 1
        if room < units * self.plan.shares.steps:
            raise ConfigError("the noise leaves no room in words of 32 bits; take a larger epsilon or fewer parameters")
        return room // self.plan.cohort

    @property
    def _largest(self) -> int:
        """Maximum absolute value of a sum over honest clients, in steps."""
        return self.plan.cohort * self.limit + self._tail

    @property
    def _tail(self) -> int:
        return math.ceil(NOISE_TAIL * self.plan.shares.noise(self.plan.cohort))

    def vector(self, update: Update | bytes, broadcast: Broadcast) -> tuple[Vector, int]:
        if self.stream is None:
            raise ProtocolError("the server has no updates of its own")
        shares = self.plan.shares
        if shares.whole:
            values, _ = update_vector(update, broadcast, self.plan.clip)
        else:
            values = sum_vector(update, broadcast)
        if len(values) != shares.values:
            raise ProtocolError(
                f"the guarantee is planned for {shares.values} values, and the update has {len(values)}"
            )
        if (reason := self.tracker.refusal(broadcast.round, OWN)) is not None:
            raise ProtocolError(f"round {broadcast.round}, by the client's own count: {reason}")
        steps = np.clip(values / self.grid, -self.limit, self.limit)
        rounded = (
            rounded_at_random(steps, longest_rounded(shares.steps, shares.values)) if shares.whole else np.rint(steps)
        )
        noise = self.stream.draw(broadcast.round, broadcast_digest(broadcast))
        self.tracker.use(broadcast.round, [OWN])
        return rounded.astype(np.int64) + noise, 1

    def words(self, vector: Vector, examples: int, clients: int, rng: np.random.Generator | None = None) -> Words:
        words: Words = (vector & np.int64((1 << self.bits(clients)) - 1)).astype(np.uint32)
        return words

    def bits(self, clients: int) -> int:
        return word_bits(self._largest)

    def total(self, words: Words, clients: int, members: tuple[str, ...]) -> Total:
        values = folded(words, self.bits(clients), self._largest) * np.float64(self.grid)
        # Above the norm of honest noise with a probability that is negligible, since it has one more half.
        noise = 1.5 * self.plan.shares.noise(self.plan.cohort) * self.grid * math.sqrt(len(values))
        factor = clip_factor(float(np.linalg.norm(values)), self.plan.per_round * self.plan.clip + noise)
        return Total(values * factor, float(self.plan.per_round), members)

    def binding(self, plan: bytes) -> bytes:
        # Beside the plan what follows from it, since another version of dbcl may derive another grid or scale.
        shares = self.plan.shares
        derived = {"scheme": SCHEME, "steps": shares.steps, "scale": f"{shares.scale:.9g}"}
        terms = json.dumps({**asdict(self.plan), **derived}, sort_keys=True).encode()
        return digest(b"guarantee", plan, terms)

    def state(self) -> State:
        if self.stream is None:
            return State({}, {})
        plan = State({"digest": self.binding(b"").hex()}, {})
        return join(plan=plan, noise=self.stream.state(), turns=self.tracker.state())

    def load_state(self, state: State) -> None:
        if self.stream is None:
            raise ProtocolError("the server has no noise of its own")
        try:
            noise, turns, plan = state.part("noise"), state.part("turns"), state.part("plan").values["digest"]
        except (KeyError, TypeError) as error:
            raise ProtocolError("the state of a client's noise cannot be read") from error
        if plan != self.binding(b"").hex():
            raise ProtocolError(
                "the state of a client's noise is of another plan: a guarantee cannot be changed in a run, and a new "
                "run needs a new key"
            )
        self.tracker.load_state(turns)
        self.stream.load_state(noise)


def encoding_of(config: SecAggConfig, plan: PrivacyPlan | None) -> Encoding:
    """Return the server's encoding: `NoisySum` if clients add the noise, else `WeightedMean`."""
    return NoisySum(plan) if plan is not None and plan.shared else WeightedMean(config)


def noisy_config(plan: PrivacyPlan) -> SecAggConfig:
    """Return the secure aggregation settings for a plan with distributed noise.

    >>> plan = PrivacyPlan(
    ...     epsilon=2, delta=1e-5, clip=0.1, unit="example", separation=2, rounds=8, clients=10, cohort=10,
    ...     examples=4000, batch=2000, values=3, noise_by="clients",
    ... )
    >>> config = noisy_config(plan)
    >>> config.min_cohort, config.colluders(10), config.threshold(10)
    (10, 2, 7)
    """
    assert plan.colluders is not None
    # As a share of the smallest group, so that no group counts on fewer colluders than were planned for.
    return SecAggConfig(clip=plan.clip, weight_cap=1, min_cohort=plan.least, colluding=plan.colluders / plan.least)
