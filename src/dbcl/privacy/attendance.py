"""Privacy cost of noise that a fixed set of parties correlates over rounds, with missing parties.

Party i draws the noise nu_i = s C^-1 z_i for all rounds, including rounds in which the party is
missing. The sum revealed in round t contains the noise of the attending parties A_t. With G = (C^T
C)^-1 and the diagonal attendance matrix P_i of party i, the noise of the honest parties in the
revealed sums has the covariance

    Cov = s^2 * sum over honest i of P_i G P_i,    Cov[t, t'] = s^2 G[t, t'] * (honest parties in both A_t and A_t'),

over the revealed rounds. An example of party v takes part in the rounds t = r modulo the separation
in which v attends, and contributes vectors of norm at most Delta. Its mu is at most the square root
of

    Delta^2 * sum over such t, t' of |Cov^-1[t, t']|,

maximised over r, v and the set of k colluders. The absolute values are needed because an adversary
that chooses the broadcasts can also choose the directions of the contributions.

Attendance may depend on all previously revealed sums: row t of the Cholesky factor of Cov depends
only on A_0 .. A_t, which are functions of the earlier sums. The run is therefore an adaptive
composition of Gaussian mechanisms whose budgets add up to mu^2 on every path, provided that no sum
exceeding the budget is revealed (fully adaptive composition: Smith and Thakurta 2022, Koskela,
Tobaben and Honkela 2023). Attendance must not depend on unnoised data. `docs/nobody-trusted.md` has
the proof and the conditions.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dbcl.errors import ProtocolError, plain
from dbcl.privacy.distributed import NoiseShares
from dbcl.privacy.factorization import Strategy, quotient
from dbcl.state import State

Matrix = NDArray[np.float64]
Rows = tuple[tuple[int, tuple[str, ...]], ...]
"""Revealed sums in the order of their rounds: the round, and the sorted names of its parties."""
MAX_SUBSETS = 256
"""Maximum number of colluder sets for an exact computation, enough for ten parties. Above this
number an upper bound is used.
"""
MAX_SUMS = 100_000
"""Maximum number of revealed sums accepted from a message."""
SLACK = 1e-9
"""Relative tolerance of mu in checks, for rounding differences between machines."""


def attendance_mu(shares: NoiseShares, rows: Rows) -> float:
    """Return the mu spent by revealing these sums, for the worst-case victim and colluders.

    The result is exact if at most `MAX_SUBSETS` sets of colluders differ in their attendance, and
    otherwise an upper bound. Each set requires the inverse of one matrix with a row per sum. For
    ten parties, two colluders and 800 sums, this takes 1 s on one core if all attendances differ,
    and 0.1 s if all parties attend every round.

    Args:
        shares: Noise shares of the parties.
        rows: The revealed sums.

    >>> from dbcl.privacy.factorization import Mechanism, Workload, banded
    >>> mechanism = Mechanism(Workload(), banded(2), rounds=4, separation=2, participations=2)
    >>> shares = NoiseShares(
    ...     epsilon=8, delta=1e-5, mechanism=mechanism, clients=4, largest=5, colluders=1, values=9, steps=1000
    ... )
    >>> four, five = ("ann", "bob", "cleo", "dan"), ("ann", "bob", "cleo", "dan", "eve")
    >>> always = attendance_mu(shares, tuple((round, four) for round in range(4)))
    >>> round(always / shares.mu, 9)
    1.0
    >>> sometimes = attendance_mu(shares, tuple((round, five if round % 3 else four) for round in range(4)))
    >>> round(sometimes / shares.mu, 3)
    0.913
    """
    mechanism = shares.mechanism
    worst = _worst(mechanism.strategy, mechanism.separation, shares.colluders, rows)
    return shares.sensitivity / shares.scale * math.sqrt(worst)


def covariance(strategy: Strategy, sums: Sequence[tuple[int, Collection[str]]], honest: Collection[str]) -> Matrix:
    """Return the covariance of the honest parties' noise in these sums, relative to s^2.

    >>> from dbcl.privacy.factorization import independent
    >>> covariance(independent(), [(0, {"ann", "bob"}), (0, {"ann"}), (1, {"ann"})], honest={"ann", "bob"})
    array([[2., 1., 0.],
           [1., 1., 0.],
           [0., 0., 1.]])
    """
    present = np.array([[float(name in names) for name in honest] for _, names in sums])
    found: Matrix = _correlation(strategy, [round for round, _ in sums]) * (present @ present.T)
    return found


def _correlation(strategy: Strategy, rounds: Sequence[int]) -> Matrix:
    """Return G = C^-1 C^-T restricted to some rounds."""
    length = max(rounds) + 1
    column = quotient(strategy.denominator, strategy.numerator, length)
    age = np.array(rounds)[:, None] - np.arange(length)
    inverse = np.where(age >= 0, column[np.maximum(age, 0)], 0.0)
    product: Matrix = inverse @ inverse.T
    return product


@lru_cache(maxsize=8)
def _worst(strategy: Strategy, separation: int, colluders: int, rows: Rows) -> float:
    """Return the maximum of the sum of |Cov^-1| over one example's rounds, relative to 1 / s^2."""
    if not rows:
        return 0.0
    rounds = [round for round, _ in rows]
    parties = sorted({name for _, names in rows for name in names})
    present = np.array([[float(name in names) for _, names in rows] for name in parties])
    # Parties with the same attendance are alike.
    kinds, counts = np.unique(present, axis=0, return_counts=True)
    correlation, turns = _correlation(strategy, rounds), np.array(rounds) % separation
    together = (kinds.T * counts) @ kinds  # number of parties in two sums
    if _count(counts, colluders) > MAX_SUBSETS:
        return _bound(correlation, together, kinds, counts, colluders, turns)
    found = 0.0
    for bad in _subsets(counts, colluders):
        honest = together.copy()
        for kind in np.flatnonzero(bad):
            honest -= bad[kind] * np.outer(kinds[kind], kinds[kind])
        found = max(found, _value(correlation, honest, kinds[counts > bad], turns))
    return found


def _count(counts: NDArray[np.int64], colluders: int) -> int:
    """Return the number of colluder sets with different attendance."""
    ways = [1]
    for most in counts:
        ways = np.convolve(ways, np.ones(int(most) + 1, dtype=object)).tolist()[: colluders + 1]
    return int(ways[colluders]) if colluders < len(ways) else 0


def _subsets(counts: NDArray[np.int64], colluders: int) -> Iterator[NDArray[np.int64]]:
    """Yield each colluder set as a count of parties per attendance pattern."""
    for chosen in itertools.combinations_with_replacement(range(len(counts)), colluders):
        bad = np.bincount(np.array(chosen, dtype=np.int64), minlength=len(counts))
        if (bad <= counts).all():
            yield bad


def _value(correlation: Matrix, together: Matrix, victims: Matrix, turns: NDArray[Any]) -> float:
    """Return the maximum, over the examples of a victim, of the sum of |Cov^-1| over the example's
    rounds.

    Args:
        correlation: The matrix G.
        together: Number of honest parties common to two sums.
        victims: Attendance of the honest parties, one row per party.
        turns: Round modulo the separation, for each sum.
    """
    if together.diagonal().min() < 1:  # a sum without any noise
        return math.inf
    # By Schur's product theorem the condition is at most that of G, times the ratio of honest parties in two sums.
    factor = torch.linalg.cholesky(torch.from_numpy(correlation * together))
    inverse = torch.cholesky_inverse(factor).numpy()
    found = 0.0
    for turn in np.unique(turns):
        own = np.flatnonzero(turns == turn)
        there = victims[:, own]
        found = max(found, float(((there @ np.abs(inverse[np.ix_(own, own)])) * there).sum(axis=1).max()))
    return found


def _bound(
    correlation: Matrix,
    together: Matrix,
    kinds: Matrix,
    counts: NDArray[np.int64],
    colluders: int,
    turns: NDArray[Any],
) -> float:
    """Return an upper bound on `_value` over all sets of colluders.

    Let Cov be the covariance of all parties' noise and X_i the contribution of party i. With X_i <=
    l_i Cov in the order of positive semidefinite matrices, and L the sum of the k largest l_i, the
    covariance without the colluders is at least (1 - L) Cov, and its inverse at most Cov^-1 / (1 -
    L). If all parties attend every round, l_i = 1 / n, and the bound is exact.
    """
    factor = torch.linalg.cholesky(torch.from_numpy(correlation * together))
    parts = []
    for kind in kinds:
        part = torch.from_numpy(correlation * np.outer(kind, kind))
        half = torch.linalg.solve_triangular(factor, part, upper=False)
        whole = torch.linalg.solve_triangular(factor, half.T, upper=False)
        parts.append(float(torch.linalg.eigvalsh((whole + whole.T) / 2)[-1]) * (1 + SLACK))
    left = 1 - sum(sorted(np.repeat(parts, counts), reverse=True)[:colluders])
    return _value(correlation, together, kinds, turns) / left if left > 0 else math.inf


def packed(rows: Rows) -> dict[str, Any]:
    """Encode attendance as JSON values: the parties, and spans of rounds with equal attendance.

    >>> packed(((0, ("ann", "bob")), (1, ("ann", "bob")), (3, ("bob",))))
    {'parties': ['ann', 'bob'], 'spans': [[0, 2, '3'], [3, 1, '2']]}
    """
    parties = sorted({name for _, names in rows for name in names})
    place = {name: 1 << number for number, name in enumerate(parties)}
    spans: list[list[Any]] = []
    for round, names in rows:
        mask = f"{sum(place[name] for name in names):x}"
        if spans and spans[-1][2] == mask and round == spans[-1][0] + spans[-1][1]:
            spans[-1][1] += 1
        else:
            spans.append([round, 1, mask])
    return {"parties": parties, "spans": spans}


def unpacked(values: Any) -> Rows:
    """Decode attendance encoded by `packed`; raise `ValueError` for malformed values.

    >>> rows = ((0, ("ann", "bob")), (3, ("bob",)))
    >>> unpacked(packed(rows)) == rows
    True
    """
    try:
        parties, spans = values["parties"], values["spans"]
        if len(values) != 2 or not isinstance(spans, list) or parties != sorted(set(map(str, parties))):
            raise ValueError("attendance has sorted parties and spans")
        rows: list[tuple[int, tuple[str, ...]]] = []
        for first, count, mask in spans:
            if type(first) is not int or type(count) is not int or first < 0 or not 0 < count <= MAX_SUMS - len(rows):
                raise ValueError("a span has a first round and a length")
            if not isinstance(mask, str) or not 0 < int(mask, 16) < 1 << len(parties):
                raise ValueError("a span has parties")
            bits = int(mask, 16)
            names = tuple(name for number, name in enumerate(parties) if bits >> number & 1)
            rows += [(round, names) for round in range(first, first + count)]
    except (KeyError, TypeError) as error:
        raise ValueError("attendance cannot be read") from error
    if packed(tuple(rows)) != values or any(one >= two for (one, _), (two, _) in itertools.pairwise(rows)):
        raise ValueError("attendance is in the order of rounds, and names parties that attend")
    return tuple(rows)


class AttendanceLog:
    """Log of the revealed sums, which rejects a sum that would raise mu above the plan's mu.

    The server and every client keep their own log. A sum counts as revealed as soon as its survivor
    list may be signed. A missing client learns the attendance of these rounds from the roster of
    its next round. The server cannot omit or change a revealed sum in the roster: all masks are
    bound to the roster, so all its members agree on the attendance, and at least one honest member
    has signed the survivor list of the sum.

    Args:
        shares: Noise shares of the parties.

    >>> from dbcl.privacy.factorization import Mechanism, Workload, banded
    >>> mechanism = Mechanism(Workload(), banded(2), rounds=4, separation=2, participations=2)
    >>> shares = NoiseShares(
    ...     epsilon=8, delta=1e-5, mechanism=mechanism, clients=2, largest=3, colluders=0, values=9, steps=1000
    ... )
    >>> log = AttendanceLog(shares)
    >>> for round, names in enumerate([("ann", "bob"), ("ann", "cleo"), ("ann", "bob")]):
    ...     log.add(round, names)
    >>> log.add(3, ("ann", "cleo"))
    >>> log.mu <= shares.mu
    True
    """

    def __init__(self, shares: NoiseShares) -> None:
        self.shares = shares
        self._sums: dict[int, tuple[str, ...]] = {}
        self._own: set[int] = set()
        """Rounds whose sums were added locally instead of learned from a roster."""

    @property
    def rows(self) -> Rows:
        """All revealed sums."""
        return tuple(sorted(self._sums.items()))

    def before(self, round: int) -> Rows:
        """Return the revealed sums of earlier rounds."""
        return tuple(row for row in self.rows if row[0] < round)

    @property
    def mu(self) -> float:
        """The mu spent so far."""
        return attendance_mu(self.shares, self.rows)

    def learn(self, round: int, rows: Rows) -> None:
        """Adopt the attendance of earlier rounds from the roster of a round.

        Raises:
            ProtocolError: The attendance contradicts the local log or is impossible.
        """
        given = dict(rows)
        for own in sorted(self._own):
            if own < round and given.get(own) != self._sums[own]:
                raise ProtocolError(
                    f"round {round}: the roster states another attendance of round {own} than the list that was signed"
                )
        everyone = {name for _, names in rows for name in names}
        sizes = [len(names) for _, names in rows]
        if (rows and rows[-1][0] >= round) or len(everyone) > self.shares.largest:
            raise ProtocolError(f"round {round}: the roster states an attendance that cannot be")
        if sizes and min(sizes) < self.shares.clients:
            raise ProtocolError(f"round {round}: the roster states a sum of {min(sizes)} clients, which are too few")
        self._sums = given | {own: self._sums[own] for own in self._own}

    def check(self, round: int, names: Collection[str]) -> None:
        """Raise `ProtocolError` if revealing this sum would violate the plan.

        Args:
            round: Number of the round.
            names: Parties in the sum.
        """
        group = tuple(sorted(names))
        if round in self._own and self._sums[round] != group:
            raise ProtocolError(f"round {round}: another list of survivors was signed, and a round has one sum")
        mu = attendance_mu(self.shares, (*self.before(round), (round, group)))
        if not mu <= self.shares.mu * (1 + SLACK):
            raise ProtocolError(
                f"round {round}: with the sum of {plain(', '.join(group), 300)} mu would be {mu:.6g}, and the plan "
                f"allows {self.shares.mu:.6g}: the round is void, or waits for more clients"
            )

    def add(self, round: int, names: Collection[str]) -> None:
        """Record a sum as revealed; raise `ProtocolError` as `check` does."""
        self.check(round, names)
        self._sums[round] = tuple(sorted(names))
        self._own.add(round)

    def state(self) -> State:
        """Return the state, which must be on disk before a survivor list is signed."""
        return State({"sums": packed(self.rows), "own": sorted(self._own)}, {})

    def load_state(self, state: State) -> None:
        """Restore a state returned by `state`."""
        try:
            sums, own = dict(unpacked(state.values["sums"])), set(map(int, state.values["own"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("the state does not say who was in the sums that were revealed") from error
        if not own <= sums.keys():
            raise ProtocolError("the state does not say who was in the sums that were signed")
        self._sums, self._own = sums, own


def attendance_in(values: Mapping[str, Any]) -> Rows:
    """Return the revealed sums from the values of an `AttendanceLog.state`."""
    return unpacked(values["sums"])
