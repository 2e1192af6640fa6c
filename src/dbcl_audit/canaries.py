"""Canaries: empirical measurement of a run's privacy guarantee, by the optimal test for known
contributions.

The server releases S_t = W_t + N_t, where W_(t+1) - W_0 = (A g)_t and N_(t+1) = (A C^-1 z)_t
(`dbcl.privacy.factorization`). An observer of all S can therefore compute C A^-1 (S - W_0) = C g +
z. The guarantee assumes that the attacker knows all other updates. After subtracting these, C g is
the canary's contribution alone: C x in the canary's direction. The optimal test is a matched
filter. Its score is normal, with mean mu if the canary took part and mean 0 otherwise.

One run measures mu: many canaries take part at once in orthogonal directions, and as many unused
directions give the null distribution of the scores (Andrew et al., arXiv 2302.03098).

Longer than 350 lines, because `Canaries` is a whole server for engines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn

from dbcl.engines.training_server import Updates
from dbcl.errors import AuditError
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan, Spent, clip_factor, epsilon_of, norm, share
from dbcl.privacy.factorization import quotient
from dbcl.protocol import Broadcast, RoundReport, Server, Update, UpdateStack, decode_update
from dbcl.protocol.aggregation import Weighted, stacked_sums, summed
from dbcl_audit.estimators.covariance import cholesky, solve

Vector = NDArray[np.float64]

MAX_VALUES = 100_000_000
"""Maximum number of float32 values of all directions together (400 MB)."""
COLUMNS_PER_BLOCK = 2**16
"""Number of columns of the directions that are orthogonalised at once."""
MIN_CANARIES, MAX_CANARIES = 20, 500
"""Minimum and maximum default number of canaries. Fewer give no useful interval; more are not
needed.
"""
EXCESS_NORM = 3.0
"""Factor by which a canary's update exceeds the clip, if the server clips."""
ROUNDING = 1e-3
"""Relative rounding error of the norm of an example's contribution, in float32."""
MIN_DIVISOR = 1e-300
"""Smallest divisor; replaces 0 if canaries have no measurable effect."""
Z_95, Z_999 = 1.96, 3.09
"""Number of standard errors of a 95 % interval, and of a limit that one valid run in a thousand
exceeds.
"""


@dataclass(frozen=True)
class CanaryEstimate:
    """Scores of canaries and of unused directions, and the resulting estimate of epsilon.

    Args:
        seen: scores of the canaries.
        unseen: scores of the unused directions.
        stated: guarantee stated by the plan for the completed `rounds`.
        rounds: number of completed rounds.
        turns: number of rounds in which each canary took part.
        largest: largest contribution of one example relative to the planned clip, if an example is
            the privacy unit.
        quiet: clients that add less noise than planned, if clients add the noise.
        expected: expected mu of these canaries under the planned noise; 0 if unknown.

    >>> stated = Spent(mu=1.0, epsilon=4.38, delta=1e-5)
    >>> found = CanaryEstimate(seen=(0.0, 1.0, 2.0), unseen=(-1.0, 0.0, 1.0), stated=stated, rounds=9, turns=3)
    >>> found.mu, round(found.epsilon, 2), round(found.auc, 2), round(found.auc_bound, 2), found.holds
    (1.0, 4.38, 0.78, 0.76, True)
    """

    seen: tuple[float, ...]
    unseen: tuple[float, ...]
    stated: Spent
    rounds: int
    turns: int
    largest: float = 0.0
    """Largest contribution of one example relative to the planned clip, if an example is the
    privacy unit.
    """
    quiet: tuple[str, ...] = ()
    """Clients that add less noise than planned, if clients add the noise."""
    expected: float = 0.0
    """Expected mu of these canaries if the noise has exactly the planned variance; 0 if unknown."""

    @cached_property
    def mu(self) -> float:
        """Difference of the mean scores, in standard deviations of the unused directions'
        scores.
        """
        return float((np.mean(self.seen) - np.mean(self.unseen)) / np.std(self.unseen, ddof=1))

    @cached_property
    def mu_error(self) -> float:
        """Standard error of mu, to first order, from the errors of both means and of the standard
        deviation.

        With m canaries, n unused directions and ratio s of their standard deviations, the standard
        error is the square root of s^2 / m + 1 / n + mu^2 / (2 (n - 1)).
        """
        ratio = np.var(self.seen, ddof=1) / np.var(self.unseen, ddof=1)
        m, n = len(self.seen), len(self.unseen)
        return math.sqrt(ratio / m + 1 / n + self.mu**2 / (2 * (n - 1)))

    @property
    def mu_interval(self) -> tuple[float, float]:
        """95 % interval: mu plus and minus 1.96 standard errors."""
        return self.mu - Z_95 * self.mu_error, self.mu + Z_95 * self.mu_error

    @cached_property
    def epsilon(self) -> float:
        """Epsilon of a Gaussian mechanism with this mu, at the plan's delta."""
        return epsilon_of(self.mu, self.stated.delta)

    @cached_property
    def epsilon_interval(self) -> tuple[float, float]:
        """Epsilon at both ends of the interval of mu. Epsilon increases with mu."""
        low, high = (epsilon_of(end, self.stated.delta) for end in self.mu_interval)
        return low, high

    @cached_property
    def auc(self) -> float:
        """Probability that a canary has a higher score than an unused direction."""
        return float(self._placed(self.seen, self.unseen).mean())

    @cached_property
    def auc_interval(self) -> tuple[float, float]:
        """95 % interval, by DeLong's standard error."""
        won, lost = self._placed(self.seen, self.unseen), self._placed(self.unseen, self.seen)
        half = Z_95 * math.sqrt(won.var(ddof=1) / len(won) + lost.var(ddof=1) / len(lost))
        return max(0.0, self.auc - half), min(1.0, self.auc + half)

    @staticmethod
    def _placed(scores: Sequence[float], others: Sequence[float]) -> Vector:
        """Return for each score the fraction of `others` below it; ties count half."""
        ordered = np.sort(others)
        below, within = np.searchsorted(ordered, scores), np.searchsorted(ordered, scores, side="right")
        placed: Vector = (below + within) / (2 * len(ordered))
        return placed

    @property
    def auc_bound(self) -> float:
        """Phi(mu / sqrt 2): the maximum AUC under the stated mu, attained by the optimal test."""
        return 0.5 * math.erfc(-self.stated.mu / 2)

    @property
    def holds(self) -> bool:
        """True unless mu exceeds the stated mu by more than one valid run in a thousand would.

        Also False if an example contributes more than the clip or a client adds too little noise,
        because neither is random.
        """
        return self.largest <= 1 + ROUNDING and not self.quiet and self.mu - Z_999 * self.mu_error <= self.stated.mu

    @property
    def reached(self) -> bool:
        """True unless mu is below the expected mu by more than one valid run in a thousand would
        be.

        If False, the noise differs from the plan, or the measurement does not detect the canaries.
        """
        return self.mu + Z_999 * self.mu_error >= self.expected


class ForwardingServer:
    """Server for engines that forwards every call to another server. Subclasses add canaries.

    >>> import dbcl
    >>> plan = PrivacyPlan(epsilon=8, delta=1e-3, clip=0.5, rounds=6, clients=8, cohort=4)
    >>> server = dbcl.Server(nn.Linear(30, 4), dbcl.SketchConfig(sketch="identity-v1"), privacy=plan)
    >>> ForwardingServer(server, plan).round
    0
    """

    def __init__(self, server: Server, privacy: PrivacyPlan) -> None:
        self.server, self.privacy = server, privacy

    @property
    def round(self) -> int:
        return self.server.round

    @property
    def plan(self) -> SketchPlan:
        return self.server.plan

    @property
    def model(self) -> nn.Module:
        return self.server.model

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round in addition to broadcasts and updates."""
        return self.server.traffic

    def open_round(self, client: str | int | None = None) -> Broadcast:
        """Return a client's broadcast for the current round."""
        return self.server.open_round(client)

    def prepare(self) -> None:
        """Precompute the randomness of the next round."""
        self.server.prepare()

    def close_round(self, updates: Updates) -> RoundReport:
        """Close the round with the clients' updates and return the report."""
        return self.server.close_round(updates)

    def sums(self) -> Mapping[str, Update]:
        """Return the sums of the last round, for a server that receives only sums."""
        return self.server.sums()


class Canaries(ForwardingServer):
    """Server for engines that forwards the clients' updates to `server` and adds the updates of
    canaries.

    A canary makes the worst-case contribution: a direction of its own with the maximum norm, in
    rounds 0, b, 2b, ...

    If the privacy unit is one client, each canary is a malicious client of the server. Its update
    exceeds the clip by a factor of 3, states twice the permitted number of examples, and is also
    sent one round too early. Update validation and participation tracking must prevent all of this.

    If the privacy unit is one example, one additional client sends the sum of all canaries'
    contributions. Each has the norm that `contribution` returns for a broadcast: the largest norm
    that the clients' own code permits for a real extreme example (`extreme_examples`). The
    example's direction is replaced by the canary's direction, which makes no difference under
    isotropic noise. Without `contribution` the norm is `plan.clip`, and only the server's part is
    measured.

    The directions are orthonormal vectors over all unsketched tensors. Only their inner products
    with the noisy weights of each round are stored.

    Args:
        server: server of the run.
        plan: guarantee to measure, `server.privacy`.
        count: number of canaries; by default as many as `MAX_VALUES` allows. As many directions
            stay unused, and half as many estimate the noise covariance over rounds.
        seed: seed of the directions.
        contribution: norm of an example's contribution, given the broadcast.

    >>> import copy, dbcl
    >>> from dbcl.engines import LocalEngine, LocalTraining
    >>> plan = PrivacyPlan(epsilon=8, delta=1e-3, clip=0.5, rounds=6, clients=8, cohort=4)
    >>> net, clients = nn.Linear(30, 4), [(torch.randn(5, 30), torch.arange(5) % 4)] * 8
    >>> server = dbcl.Server(net, dbcl.SketchConfig(sketch="identity-v1"), privacy=plan)
    >>> canaries = Canaries(server, plan, count=20)
    >>> engine = LocalEngine(canaries, copy.deepcopy(net), clients, LocalTraining(), fraction=0.5, seed=bytes(32))
    >>> engine.in_turns = True
    >>> for _ in range(6):
    ...     _ = engine.play_round()
    >>> found = canaries.estimate()
    >>> found.rounds, found.turns, len(found.seen), round(found.stated.epsilon, 3)
    (6, 3, 20, 8.0)
    """

    def __init__(
        self,
        server: Server,
        plan: PrivacyPlan,
        *,
        count: int | None = None,
        seed: int = 0,
        contribution: Callable[[Broadcast], float] | None = None,
    ) -> None:
        if plan.noise_on_updates:
            raise AuditError(
                "the noise of this guarantee goes into the updates, before an optimiser that is not linear: what is "
                "shown does not give it back, and canaries cannot be measured; dbcl privacy states what is promised"
            )
        if server.round != 0:
            raise AuditError(f"canaries take part from round 0 on, and round {server.round} is next")
        super().__init__(server, plan)
        self.largest = 0.0
        """Largest contribution of an example so far, relative to the planned clip. A value above 1
        shows that clients do not clip.
        """
        self._contribution = contribution or (lambda broadcast: plan.clip)
        weights = server.weights()
        self._shapes = {each.name: each.shape for each in server.plan.tensors if not each.sketched}
        self._start = self._flat({name: weights[name].detach() for name in self._shapes}).clone()
        self.count = default_count(len(self._start)) if count is None else count
        if self.count < MIN_CANARIES or 5 * self.count > len(self._start):
            raise AuditError(
                f"{self.count} canaries in the {len(self._start)} unsketched parameters: they are {MIN_CANARIES} "
                f"or more, with five parameters or more for each, and by default at most {MAX_VALUES} values in all"
            )
        assert server.keeper.tracker is not None
        server.keeper.tracker.clients += self.count + 1  # canaries are clients beside those of the plan
        self._directions = orthonormal(math.ceil(2.5 * self.count), self._start, seed)
        self._used: list[bool] = []
        self._shown: list[Vector] = []
        self._honest: list[Vector] = []

    @torch.no_grad()
    def close_round(self, updates: Updates) -> RoundReport:
        """Close the round with the canaries' and the clients' updates, and record the next noisy
        weights.
        """
        if not isinstance(updates, Mapping):
            raise AuditError("a guarantee counts who takes part: give the updates as a dictionary by their senders")
        sent = self._sent() if self._due() else {}
        report = self.server.close_round(_together(updates, sent) if sent else updates)
        refused = [who for who in (*sent, *updates) if who in report.rejected]
        absent = sum(who in sent for who in refused)
        if 0 < absent < len(sent):
            raise AuditError(f"{absent} of {len(sent)} canaries were refused in round {report.round}, and others not")
        self._used.append(bool(sent) and not absent)
        self._honest.append(self._dots(self._average(updates, refused)))
        self._shown.append(self._dots(self._flat(self.server.noisy_weights()) - self._start))
        return report

    def estimate(self) -> CanaryEstimate:
        """Estimate mu from the completed rounds, together with the stated guarantee."""
        rounds, turns = len(self._used), sum(self._used)
        if not turns:
            raise AuditError("no canary has taken part yet")
        workload, strategy = self.privacy.workload, self.privacy.strategy
        C = lower_triangular(strategy.coefficients(rounds))
        whole = quotient(np.convolve(strategy.numerator, workload.inverse), strategy.denominator, rounds)
        y = lower_triangular(whole / workload.lr) @ np.stack(self._shown) - C @ np.stack(
            self._honest
        )  # (rounds, directions)
        seen, unseen, spare = np.split(y, [self.count, 2 * self.count], axis=1)
        # From other directions than those that the filter is judged by.
        weights = matched_filter(C @ np.array(self._used, dtype=np.float64), spare) / self.privacy.sigma
        allowed = min(self.privacy.participations, -(-rounds // self.privacy.separation))
        return CanaryEstimate(
            tuple((weights @ seen).tolist()),
            tuple((weights @ unseen).tolist()),
            self.privacy.spent(rounds=rounds, participations=allowed),
            rounds,
            turns,
            self.largest,
        )

    def _due(self) -> bool:
        """Return True if canaries send updates in this round. Canaries that are clients also try
        one round too early.
        """
        turns = [round for round, used in enumerate(self._used) if used]
        if self.privacy.unit == "example":
            return self.round % self.privacy.separation == 0
        since = self.round - turns[-1] if turns else self.privacy.separation
        return since in (self.privacy.separation - 1, self.privacy.separation)

    def _sent(self) -> dict[str, Update]:
        """Return the canaries' updates for the current round, by sender."""
        plan, rows = self.privacy, self._directions[: self.count]
        if plan.unit == "example":
            reached = self._contribution(self.server.open_round("canaries"))
            self.largest = max(self.largest, reached / plan.clip)
            return {"canaries": self._update("canaries", reached * rows.sum(dim=0), self.count)}
        examples = max(1, math.ceil(2 * plan.weight_cap))
        names = [f"canary {number}" for number in range(self.count)]
        return {
            name: self._update(name, EXCESS_NORM * plan.clip * row, examples)
            for name, row in zip(names, rows, strict=True)
        }

    def _update(self, name: str, flat: Tensor, examples: int) -> Update:
        broadcast = self.server.open_round(name)
        sizes = [math.prod(each) for each in self._shapes.values()]
        own = dict(zip(self._shapes, torch.split(flat, sizes), strict=True))
        tensors = {
            name: own[name].reshape(V.shape).to(V) if name in own else torch.zeros_like(V)
            for name, V in broadcast.tensors.items()
        }
        return Update(broadcast.round, broadcast.plan.digest, tensors, examples)

    def _average(self, updates: Mapping[str, Any], refused: Sequence[str]) -> Tensor:
        """Return the other clients' contribution to the round's average, after validation and
        clipping.
        """
        plan, like = self.privacy, self.server.weights()
        like = {name: like[name].detach() for name in self._shapes}

        def factor(who: str, length: float, examples: int) -> float:
            counted = share(examples, weight_cap=plan.weight_cap, per_round=1) if plan.weight_cap else 1.0
            bound = plan.clip * (1 if plan.unit == "client" else min(examples, plan.batch) * (1 + 1e-6))
            clipped = clip_factor(length, bound)
            return 0.0 if who in refused else counted * clipped / plan.per_round

        if isinstance(updates, UpdateStack):
            stack = updates
            lengths = stack.norms(stack.tensors).tolist()
            row = [factor(*each) for each in zip(stack.senders, lengths, stack.examples, strict=True)]
            return self._flat(stacked_sums({name: stack.tensors[name] for name in like}, [row], like)[0])
        every = []
        for who, message in updates.items():
            update = message if isinstance(message, Update) else decode_update(message)
            every.append(Weighted(update.tensors, factor(who, norm(update.tensors), update.examples)))
        return self._flat(summed(every, like, whole=1.0))

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self._shapes]) if self._shapes else torch.empty(0)

    def _dots(self, flat: Tensor) -> Vector:
        products: Vector = torch.mv(self._directions, flat.to(self._directions)).double().cpu().numpy()
        return products


def default_count(dim: int) -> int:
    """Return the default number of canaries for directions of `dim` values."""
    return min(MAX_CANARIES, int(MAX_VALUES / max(dim, 1) / 2.5), int(dim / 5))


def orthonormal(count: int, like: Tensor, seed: int) -> Tensor:
    """Draw orthonormal random directions, shape (count, dim), on the device of `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    drawn = torch.randn(count, len(like), generator=generator, device=like.device)
    root = cholesky((drawn @ drawn.T).double()).to(drawn)
    for part in torch.split(drawn, COLUMNS_PER_BLOCK, dim=1):
        part.copy_(torch.linalg.solve_triangular(root, part, upper=False))
    return drawn


def matched_filter(signal: Vector, noise: Vector) -> Vector:
    """Return the unit matched filter for a signal, given noise samples with shape (rounds,
    samples).

    Covariances are shrunk to the part that sampling error cannot explain. For white noise, as
    planned, the filter is the normalised signal.
    """
    samples = noise.shape[1]
    sizes = np.sqrt(np.mean(noise**2, axis=1))
    logs = np.log(np.maximum(sizes, max(1e-9 * sizes.max(), MIN_DIVISOR)))
    spread, by_chance = logs.var(), 1 / (2 * samples)
    sizes = np.exp(logs.mean() + max(0.0, 1 - by_chance / max(spread, by_chance)) * (logs - logs.mean()))
    covariance, _ = ledoit_wolf((noise / sizes[:, None]).T, assume_centered=True)
    right = torch.from_numpy(signal / sizes)[:, None]
    found: Vector = solve(torch.from_numpy(covariance), right)[:, 0].numpy() / sizes
    return found / max(float(np.linalg.norm(found)), MIN_DIVISOR)


def lower_triangular(column: Vector) -> Vector:
    """Return the lower triangular Toeplitz matrix with the given first column."""
    whole: Vector = toeplitz(column, np.zeros_like(column))
    return whole


def _together(updates: Mapping[str, Any], canaries: Mapping[str, Update]) -> Mapping[str, Any]:
    """Join the clients' and the canaries' updates. A stack stays a stack if all shapes, dtypes and
    devices match.
    """
    if not isinstance(updates, UpdateStack):
        return {**updates, **canaries}
    own = list(canaries.values())
    kinds = {name: (tensor.shape[1:], tensor.dtype, tensor.device) for name, tensor in updates.tensors.items()}
    if any((V.shape, V.dtype, V.device) != kinds[name] for each in own for name, V in each.tensors.items()):
        return {**updates, **canaries}
    return UpdateStack(
        updates.round,
        (*updates.senders, *canaries),
        (*updates.plans, *(each.plan for each in own)),
        {
            name: torch.cat([tensor, torch.stack([each.tensors[name] for each in own])])
            for name, tensor in updates.tensors.items()
        },
        (*updates.examples, *(each.examples for each in own)),
        (*updates.metrics, *(each.metrics for each in own)),
    )
