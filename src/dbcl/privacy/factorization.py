"""Correlated noise over rounds: the matrix mechanism of DP-FTRL and its sensitivity.

The server's weights are a linear function of the rounds' average updates g_0, g_1, ...: W_(t+1) -
W_0 = (A g)_t, where A is the lower triangular matrix of its optimiser. The broadcast is W_(t+1) +
N_(t+1) with N_(t+1) = (A C^-1 z)_t and white noise z. Since A g + A C^-1 z = A C^-1 (C g + z), it
is a post-processing of C g + z, a Gaussian mechanism with the sensitivity of C. C is chosen such
that both its sensitivity and the noise A C^-1 z are small.

Indices: the broadcast of round t contains W_t, which includes the updates of rounds 0 to t-1. N_1
is added in round 1 and depends only on z_0. n rounds of updates need N_1 to N_n; N_n is added to
the released model W_n. W_0 contains no private data and needs no noise; see `CorrelatedNoise` for
its treatment.

Every C is lower triangular and Toeplitz, with c_j on the j-th diagonal and c_0 = 1, and is a
quotient of two short polynomials in the shift S, (S x)_t = x_(t-1). A C^-1 z can therefore be
computed round by round from a few stored tensors.

Longer than 350 lines: strategy, sensitivity and mechanism share one notation and its doctests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from dbcl.errors import ConfigError

Vector = NDArray[np.float64]

SEARCHED = 20_000
"""Maximum number of partial participation patterns in the search, if no closed form applies."""


@dataclass(frozen=True)
class Workload:
    """Linear map from average updates to weights: m_t = momentum * m_(t-1) + g_t, W_(t+1) = W_t +
    lr * m_t.

    Momentum 0 is federated averaging, where A is lr times the prefix sum. With `after=False`, the
    noise is added to the average updates before an arbitrary optimiser, and A is the identity.

    >>> Workload(momentum=0.5).coefficients(4)
    array([1.   , 1.5  , 1.75 , 1.875])
    """

    momentum: float = 0.0
    lr: float = 1.0
    after: bool = True

    def __post_init__(self) -> None:
        if not self.after and (self.momentum, self.lr) != (0.0, 1.0):
            raise ConfigError(
                "noise before the server's optimiser does not depend on its momentum and lr: leave them at 0 and 1, "
                f"got {self.momentum} and {self.lr}"
            )
        if not 0 <= self.momentum < 1 or not 0 < self.lr < math.inf:
            raise ConfigError(
                f"the server's momentum must be in [0, 1) and its lr above 0, got {self.momentum} and {self.lr}"
            )

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer) -> "Workload":
        """Return the workload of a server optimiser.

        Raises:
            ConfigError: The optimiser is not linear in the updates.

        >>> from dbcl import optim
        >>> Workload.from_optimizer(optim.momentum(0.5, lr=2.0)([torch.nn.Parameter(torch.zeros(1))]))
        Workload(momentum=0.5, lr=2.0, after=True)
        """
        settings, *groups = optimizer.param_groups
        others = ("dampening", "weight_decay", "nesterov", "maximize")
        unlike = any(each.get(name) != settings.get(name) for each in groups for name in ("lr", "momentum", *others))
        if type(optimizer) is not torch.optim.SGD or unlike or any(settings[name] for name in others):
            raise ConfigError(
                "noise that comes after the server's optimiser needs one that is linear in the updates, plain or with "
                f"momentum, the same for all parameters, got {type(optimizer).__name__}: the remedy is "
                "dbcl.optim.fedavg or dbcl.optim.momentum, or a plan with noise_on_updates=True"
            )
        return cls(float(settings["momentum"]), float(settings["lr"]))

    @property
    def inverse(self) -> tuple[float, ...]:
        """Polynomial (1 - S)(1 - momentum S) = lr A^-1; 1 if the noise is added before the
        optimiser.

        >>> Workload(momentum=0.5).inverse
        (1.0, -1.5, 0.5)
        """
        if not self.after:
            return (1.0,)
        return (1.0, -1.0) if self.momentum == 0 else (1.0, -1.0 - self.momentum, self.momentum)

    def coefficients(self, n: int) -> Vector:
        """Return the first column of A, of size n: lr (1 + momentum + ... + momentum^j)."""
        return self.lr * quotient((1.0,), self.inverse, n)


@dataclass(frozen=True)
class Strategy:
    """Matrix C = numerator / denominator, two polynomials in the shift with constant term 1.

    The functions `independent`, `banded` and `white` make common strategies.

    >>> Strategy("geometric", denominator=(1.0, -0.5)).coefficients(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """

    kind: str
    numerator: tuple[float, ...] = (1.0,)
    denominator: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for polynomial in (self.numerator, self.denominator):
            if not polynomial or polynomial[0] != 1.0 or not all(map(math.isfinite, polynomial)):
                raise ConfigError(
                    f"{self.kind}: a strategy's polynomials start with 1 and are finite, got {polynomial}"
                )

    @property
    def memory(self) -> int:
        """Number of model-sized tensors that the computation of C^-1 z stores.

        >>> banded(10).memory, independent().memory
        (9, 0)
        """
        return max(len(self.numerator), len(self.denominator)) - 1

    def coefficients(self, n: int) -> Vector:
        """Return the first column of C, of size n."""
        return quotient(self.numerator, self.denominator, n)


def independent() -> Strategy:
    """Return C = I: independent noise on every average update, accumulating in W, as in DP-FedAvg.

    >>> independent().coefficients(3)
    array([1., 0., 0.])
    """
    return Strategy("independent")


def banded(bands: int, momentum: float = 0.0) -> Strategy:
    """Return the banded square root of the workload.

    For the prefix sum, c_0 = 1 and c_j = c_(j-1) (2j - 1) / (2j) for j < bands. With momentum, C is
    the product of this series and the same series in momentum * S, which reduces the noise by 7 %
    at momentum 0.5 and by 15 % at 0.9. If the number of bands equals the separation of
    participations, the columns of different participations are orthogonal, and |C x| is at most
    sqrt(k) |c|.

    Args:
        bands: Number of diagonals.
        momentum: Momentum of the workload.

    >>> banded(4).coefficients(6)
    array([1.    , 0.5   , 0.375 , 0.3125, 0.    , 0.    ])
    """
    if bands < 1 or not 0 <= momentum < 1:
        raise ConfigError(f"a strategy has 1 band or more and momentum in [0, 1), got {bands} and {momentum}")
    j = np.arange(1, bands)
    root = np.concatenate([np.ones(1), np.cumprod((2 * j - 1) / (2 * j))])
    return Strategy("banded", _plain(np.convolve(root, root * momentum ** np.arange(bands))[:bands]))


def white(workload: Workload) -> Strategy:
    """Return C = A / lr: independent noise on every W_t. Baseline with the largest noise for
    repeated participation.

    >>> white(Workload(momentum=0.5)).coefficients(3)
    array([1.  , 1.5 , 1.75])
    """
    return Strategy("white", denominator=workload.inverse)


def sensitivity(coefficients: Sequence[float] | Vector, *, rounds: int, separation: int, participations: int) -> float:
    """Return max |C x| over a client's contributions x of norm at most 1 per participation.

    If the diagonals are monotone, the worst-case rounds are 0, b, 2b, ...: the product of two
    columns i < j is sum_s c_s c_(s+j-i) over s < rounds - j, which does not decrease if j moves
    towards i or if both move to earlier rounds. Otherwise all distinct patterns are searched.

    Args:
        coefficients: Non-negative diagonals of C.
        rounds: Size of C.
        separation: Minimum distance of two participations; 1 allows every round.
        participations: Maximum number of participations.

    >>> sensitivity([1.0, 0.5], rounds=6, separation=2, participations=3) == math.sqrt(3 * 1.25)
    True
    >>> sensitivity([1.0, 1.0, 1.0], rounds=3, separation=1, participations=3) == math.sqrt(1 + 4 + 9)
    True
    """
    given = np.asarray(coefficients, dtype=np.float64)[:rounds]
    if min(rounds, separation, participations) < 1:
        raise ConfigError(
            f"rounds, separation and participations are 1 or more, got {rounds}, {separation} and {participations}"
        )
    rounding = 1e-12 * float(np.abs(given).max(initial=0.0))
    if not np.isfinite(given).all() or (given < -rounding).any():
        raise ConfigError("a sensitivity is known for diagonals that are finite and not negative only")
    c = np.pad(given, (0, rounds - len(given)))
    steps = np.diff(c)
    if (steps <= rounding).all() or (steps >= -rounding).all():
        column = np.trim_zeros(given, "b")
        if len(column) <= separation:  # no two columns overlap
            count = min(participations, -(-rounds // separation))
            last = column[: rounds - (count - 1) * separation]
            return math.sqrt((count - 1) * float(column @ column) + float(last @ last))
        total = np.zeros(rounds)
        for start in range(0, rounds, separation)[:participations]:
            total[start : start + len(column)] += column[: rounds - start]
        return float(np.linalg.norm(total))
    return math.sqrt(_worst(c, len(np.trim_zeros(given, "b")), separation, participations))


def _worst(c: Vector, bands: int, separation: int, participations: int) -> float:
    """Return the squared sensitivity by searching all patterns. Patterns with equal remaining
    choices are merged.
    """
    n = len(c)

    def product(i: int, j: int) -> float:
        return float(c[: n - j] @ c[j - i : n - i])

    @cache
    def best(start: int, recent: tuple[int, ...], left: int) -> float:
        if best.cache_info().currsize > SEARCHED:
            raise ConfigError(f"these diagonals go up and down, over more than {separation} rounds: too many patterns")
        found = 0.0
        for j in range(start, n) if left else ():
            own = product(j, j) + 2 * sum(product(i, j) for i in recent)
            near = tuple(i for i in (*recent, j) if j + separation - i < bands)
            found = max(found, own + best(j + separation, near, left - 1))
        return found

    return best(0, (), participations)


class Memory(NamedTuple):
    """State of one tensor's noise stream: latest values of z / numerator, momentum buffer, and N.

    >>> Memory()
    Memory(past=(), velocity=None, total=None)
    """

    past: tuple[Tensor, ...] = ()
    velocity: Tensor | None = None
    total: Tensor | None = None


@dataclass(frozen=True)
class Mechanism:
    """Noise mechanism over `rounds` updates: workload, strategy and participation rule.

    >>> mechanism = Mechanism(Workload(), banded(10), rounds=150, separation=10, participations=15)
    >>> round(mechanism.sensitivity, 3), round(mechanism.growth, 3), round(mechanism.sensitivity * mechanism.growth, 1)
    (5.184, 2.678, 13.9)
    """

    workload: Workload
    strategy: Strategy
    rounds: int
    separation: int
    participations: int

    @cached_property
    def sensitivity(self) -> float:
        """Maximum change of C g by one client, in units of the client's share of one average
        update.
        """
        return sensitivity(
            self.strategy.coefficients(self.rounds),
            rounds=self.rounds,
            separation=self.separation,
            participations=self.participations,
        )

    @cached_property
    def growths(self) -> Vector:
        """Standard deviations of N_1, ..., N_n for unit white noise z: the row norms of A C^-1."""
        numerator = np.convolve(self.strategy.numerator, self.workload.inverse)
        column = self.workload.lr * quotient(self.strategy.denominator, numerator, self.rounds)
        return np.sqrt(np.cumsum(column**2))

    @cached_property
    def growth(self) -> float:
        """Root mean square of `growths`."""
        return float(np.sqrt(np.mean(self.growths**2)))

    def mu(self, *, sigma: float, clip: float, per_round: int) -> float:
        """Return mu = sensitivity * clip / (per_round * sigma).

        Membership of a client is as hard to infer as distinguishing N(0, 1) from N(mu, 1).

        Args:
            sigma: Standard deviation of z.
            clip: Clipping norm.
            per_round: Number of units in a round's average.

        >>> mechanism = Mechanism(Workload(), independent(), rounds=100, separation=1, participations=4)
        >>> mechanism.mu(sigma=0.01, clip=0.5, per_round=50)
        2.0
        """
        return self.sensitivity * clip / (per_round * sigma)

    def step(self, memory: Memory, z: Tensor) -> Memory:
        """Return the memory after one more z, without changing the given memory. Its `total` is the
        noise N.

        >>> mechanism = Mechanism(Workload(), banded(2), rounds=3, separation=2, participations=2)
        >>> one = mechanism.step(Memory(), torch.tensor([1.0]))
        >>> mechanism.step(one, torch.tensor([1.0])).total
        tensor([1.5000])
        """
        # v = 1/numerator z, then w = denominator v: of both polynomials together only v is remembered.
        v = z.clone()
        for p, old in zip(self.strategy.numerator[1:], memory.past, strict=False):
            v.sub_(old, alpha=p)
        velocity = v.clone()
        for q, old in zip(self.strategy.denominator[1:], memory.past, strict=False):
            velocity.add_(old, alpha=q)
        if memory.velocity is not None:
            velocity.add_(memory.velocity, alpha=self.workload.momentum)
        total = velocity * self.workload.lr
        if memory.total is not None and self.workload.after:
            total.add_(memory.total)
        past = (v, *memory.past)[: self.strategy.memory]
        return Memory(past, velocity if self.workload.momentum else None, total)


BLOCK = 4096
"""Number of coefficients that `quotient` computes per block."""


def quotient(numerator: Sequence[float] | Vector, denominator: Sequence[float] | Vector, n: int) -> Vector:
    """Return the first n coefficients of the power series numerator / denominator. The denominator
    must start with 1.

    >>> quotient((1.0,), (1.0, -0.5), 4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    divisor = np.asarray(denominator, dtype=np.float64)
    order = len(divisor) - 1
    series = np.zeros(n)
    series[: len(numerator)] = numerator[:n]
    if order == 0:
        return series
    begun = min(n, max(BLOCK, len(numerator)))
    for t in range(1, begun):
        reach = min(t, order)
        series[t] -= divisor[1 : reach + 1] @ series[t - reach : t][::-1]
    if n > begun:
        # Past the numerator the recursion is linear in the last `order` values: a block is one product with a matrix.
        after = np.vstack([np.eye(order), np.zeros((BLOCK, order))])
        for t in range(order, order + BLOCK):
            after[t] = -divisor[:0:-1] @ after[t - order : t]
        for start in range(begun, n, BLOCK):
            series[start : start + BLOCK] = (after[order:] @ series[start - order : start])[: n - start]
    return series


def _plain(values: Vector) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
