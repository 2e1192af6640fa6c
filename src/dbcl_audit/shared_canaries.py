"""Canaries in a run in which clients add the noise: measured epsilon for the server, colluding
clients and the public.

With secure aggregation the server receives S_t = sum_i (q_i + eta_i)_t, where eta_i = rint(s C^-1
z_i) (`dbcl.privacy.distributed`). An adversary is assumed to know all examples except the canaries,
and can compute C (S - known) = C x + s sum z_i. The server alone faces the noise of all n clients.
The server and k colluding clients can subtract the colluders' noise, which leaves h = n - k noise
shares; the guarantee is stated for this adversary. An adversary that has only the released model
observes one linear combination of all sums.

The score of a canary is computed as in `canaries`: a matched filter in the canary's direction.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.engines.secure import SecureServer
from dbcl.engines.training_server import Updates
from dbcl.errors import AuditError, ProtocolError
from dbcl.privacy import NoiseStream, PrivacyPlan, Spent, epsilon_of
from dbcl.protocol import Broadcast, RoundReport, Update, decode_update
from dbcl.protocol.running_mean import RunningMean
from dbcl.protocol.secagg import NoisySum
from dbcl.protocol.secagg.vectors import flat, shaped, sum_vector, update_vector
from dbcl_audit.canaries import (
    EXCESS_NORM,
    MIN_CANARIES,
    CanaryEstimate,
    ForwardingServer,
    default_count,
    lower_triangular,
    matched_filter,
    orthonormal,
)

Vector = NDArray[np.float64]

QUIET_ERRORS = 5.0
"""Number of standard errors below the planned noise at which a client's noise share is reported as
too small.
"""
QUIET_TOLERANCE = 0.01
"""Relative shortfall of a client's noise that is ignored. Covers rounding and deviations of the
directions from orthonormality.
"""


class Silent(NoiseStream):
    """Noise stream of zeros, for a canary's vector, which has no noise of its own.

    >>> from dbcl.privacy import Workload, independent
    >>> from dbcl.privacy.distributed import NoiseShares
    >>> from dbcl.privacy.factorization import Mechanism
    >>> mechanism = Mechanism(Workload(), independent(), rounds=4, separation=1, participations=4)
    >>> shares = NoiseShares(
    ...     epsilon=2, delta=1e-5, mechanism=mechanism, clients=4, colluders=1, values=3, steps=1000
    ... )
    >>> Silent(shares, bytes(32)).draw(0, b"")
    array([0, 0, 0])
    """

    def draw(self, round: int, broadcast: bytes) -> NDArray[np.int64]:
        return np.zeros(self.shares.values, dtype=np.int64)


class SharedCanaries(ForwardingServer):
    """Server for engines that adds canaries to a run in which clients add the noise.

    If the privacy unit is one example, the sum of all canaries' contributions is added to one
    client's data in rounds 0, b, 2b, ..., and this client's own code clamps, rounds and adds noise.
    Each canary has the norm that `contribution` returns for a broadcast: the change of a client's
    vector by a real extreme example. If the unit is one client, each canary is a client whose
    update exceeds the clip by a factor of 3 and that also takes part one round too early. Its own
    code clips and rounds the update or rejects the round, and the result is added to the observed
    sum.

    Args:
        server: Server of the run, with its clients.
        plan: Guarantee to measure, `server.privacy`.
        count: Number of canaries; the default is that of `Canaries`.
        seed: Seed of the directions.
        contribution: Norm of an extreme example's contribution; by default the planned clip.

    >>> import dbcl
    >>> plan = PrivacyPlan(
    ...     epsilon=8, delta=1e-3, clip=0.1, unit="example", noise_by="clients", colluders=1, separation=2, rounds=4,
    ...     clients=3, cohort=3, examples=60, batch=30, values=150,
    ... )
    >>> server = SecureServer(torch.nn.Linear(150, 1, bias=False), privacy=plan, masked=False)
    >>> canaries = SharedCanaries(server, plan, count=20)
    >>> for _ in range(4):
    ...     broadcast = canaries.open_round("ann")
    ...     zero = {"weight": torch.zeros(1, 150, dtype=torch.float64)}
    ...     update = Update(broadcast.round, broadcast.plan.digest, zero, examples=1)
    ...     _ = canaries.close_round({"ann": update, "bob": update, "cleo": update})
    >>> found = canaries.estimates()
    >>> list(found), round(found["colluders"].stated.epsilon, 1), round(found["server"].stated.epsilon, 1)
    (['server', 'colluders', 'anyone'], 8.0, 6.1)
    """

    server: SecureServer

    def __init__(
        self,
        server: SecureServer,
        plan: PrivacyPlan,
        *,
        count: int | None = None,
        seed: int = 0,
        contribution: Callable[[Broadcast], float] | None = None,
    ) -> None:
        super().__init__(server, plan)
        if server.round != 0:
            raise AuditError(f"canaries take part from round 0 on, and round {server.round} is next")
        values = plan.shares.values
        self.count = default_count(values) if count is None else count
        if self.count < MIN_CANARIES or 5 * self.count > values:
            raise AuditError(
                f"{self.count} canaries in {values} parameters: they are {MIN_CANARIES} or more, with five parameters "
                "or more for each"
            )
        self.largest = 0.0
        """Largest contribution of an example so far, relative to the planned sensitivity."""
        self._smallest = plan.shares.steps / plan.shares.sensitivity
        self.quiet: tuple[str, ...] = ()
        """Clients whose noise is smaller than planned by more than sampling error explains."""
        self._contribution = contribution or (lambda broadcast: plan.clip)
        self._start = self._weights(server.weights())
        self._directions = orthonormal(math.ceil(2.5 * self.count), torch.from_numpy(self._start).float(), seed)
        self._canaries = NoisySum(plan, Silent(plan.shares, bytes(32)))
        self._used: list[bool] = []
        self._left: list[Vector] = []
        """Inner products of the directions with each sum, after subtracting all known data."""
        self._known: list[Vector] = []
        """Inner products of the directions with the data that an adversary with the released model
        subtracts.
        """
        self._noise: list[dict[str, Vector]] = []
        """Inner products of the directions with the noise of each client, by round."""

    @torch.no_grad()
    def close_round(self, updates: Updates) -> RoundReport:
        """Close the round with the canaries added, and record the adversaries' observations."""
        if not isinstance(updates, Mapping):
            raise AuditError("a guarantee counts who takes part: give the updates as a dictionary by their senders")
        plan, broadcast = self.privacy, self.server.open_round("canaries")
        given = {name: each if isinstance(each, Update) else decode_update(each) for name, each in updates.items()}
        data = {name: self._data(each, broadcast) for name, each in given.items()}
        canaries = self._sent(broadcast)
        beside = np.zeros(plan.shares.values)
        if canaries is not None and plan.unit == "example":
            first = next(iter(given))
            own = shaped(broadcast.plan, data[first] + canaries)
            given[first] = replace(given[first], tensors=own)
            data[first] = data[first] + canaries
        elif canaries is not None:
            beside = canaries
        noise = {name: self._sent_by(name, each, broadcast) - data[name] for name, each in given.items()}
        report = self.server.close_round(given)
        if report.rejected:
            raise AuditError(f"round {report.round}: {len(report.rejected)} clients were refused in the simulated run")
        ((_, total),) = self.server.rounds.totals
        everything = np.sum(list(data.values()), axis=0)
        if canaries is not None and plan.unit == "example":
            everything = everything - canaries
        self._used.append(canaries is not None)
        # Canaries that are added to what is observed are not in the weights.
        rows = self._dots([total.values + beside - everything, everything - beside, *noise.values()])
        self._left.append(rows[0])
        self._known.append(rows[1])
        self._noise.append(dict(zip(noise, rows[2:], strict=True)))
        return report

    def estimates(self) -> dict[str, CanaryEstimate]:
        """Estimate mu for each adversary from the completed rounds, together with the mu stated for
        this adversary.

        "server" receives sums with the noise of all clients. "colluders" are the server and the
        planned number of clients. "anyone" has only the released model.
        """
        if not any(self._used):
            raise AuditError("no canary has taken part yet")
        plan, shares, rounds = self.privacy, self.privacy.shares, len(self._used)
        assert plan.colluders is not None
        C = lower_triangular(plan.strategy.coefficients(rounds))
        sums, signal = np.stack(self._left), C @ np.array(self._used, dtype=np.float64)
        unit, sizes = shares.scale * self._grid, self._sizes()
        self.quiet = tuple(name for name, (size, least) in sizes.items() if size < least)
        found = {"server": self._estimate(C @ sums, signal, unit * math.sqrt(shares.clients), 0)}
        if plan.colluders:
            known = np.stack([self._loudest(each, sizes) for each in self._noise])
            honest = unit * math.sqrt(shares.honest)
            found["colluders"] = self._estimate(C @ (sums - known), signal, honest, plan.colluders)
        if not plan.noise_on_updates:
            found["anyone"] = self._of_release()
        return found

    @property
    def _grid(self) -> float:
        return self.privacy.clip / self.privacy.shares.steps

    def _estimate(self, y: Vector, signal: Vector, size: float, colluders: int) -> CanaryEstimate:
        """Return the estimate from an adversary's observations, which have shape (rows,
        directions).
        """
        seen, unseen, spare = np.split(y, [self.count, 2 * self.count], axis=1)
        stated = self._stated(colluders)
        # From other directions than those that the filter is judged by.
        weights = matched_filter(signal, spare) / size
        return CanaryEstimate(
            tuple((weights @ seen).tolist()),
            tuple((weights @ unseen).tolist()),
            stated,
            len(self._used),
            sum(self._used),
            self.largest,
            self.quiet,
            stated.mu * self._smallest,
        )

    def _stated(self, colluders: int) -> Spent:
        """Return the guarantee that the plan states for the completed rounds against the server and
        `colluders` clients.
        """
        plan, rounds = self.privacy, len(self._used)
        turns = min(plan.participations, -(-rounds // plan.separation))
        spent = plan.spent(rounds=rounds, participations=turns)
        mu = spent.mu * plan.shares.mu_against(colluders) / plan.shares.mu
        return Spent(mu, epsilon_of(mu, plan.delta), plan.delta)

    def _of_release(self) -> CanaryEstimate:
        """Return the estimate from the released model alone."""
        plan, rounds = self.privacy, len(self._used)
        released = self._weights({n: t.detach() for n, t in self.server.released.named_parameters()})
        combined = self._combination() / plan.per_round
        (seen,) = self._dots([released - self._start])
        y = seen - combined @ np.stack(self._known)
        inverse = np.linalg.inv(lower_triangular(plan.strategy.coefficients(rounds)))
        size = plan.shares.scale * self._grid * math.sqrt(plan.shares.clients)
        signal = np.array([combined @ np.array(self._used, dtype=np.float64)])
        found = self._estimate(y[None], signal, size * float(np.linalg.norm(combined @ inverse)), 0)
        return replace(found, expected=0.0)  # one model shows less than all sums

    def _combination(self) -> Vector:
        """Return the coefficient of each average update in the released weights."""
        rounds, mean = len(self._used), self.server.release.mean
        column = self.privacy.workload.coefficients(rounds)
        rows = np.array([[column[t - 1 - s] if s < t else 0.0 for s in range(rounds)] for t in range(rounds + 1)])
        if mean is None:
            return np.asarray(rows[-1], dtype=np.float64)
        own = RunningMean(mean.decay)
        for number, row in enumerate(rows):
            own.update({"row": torch.from_numpy(row)}, number)
        return np.asarray(own.state().tensors["row"].numpy(), dtype=np.float64)

    def _sizes(self) -> dict[str, tuple[float, float]]:
        """Return for each client the standard deviation of its noise relative to the plan, and the
        minimum explained by sampling error.
        """
        names = dict.fromkeys(name for each in self._noise for name in each)
        correlated = self.privacy.strategy.memory > 0
        C, found = lower_triangular(self.privacy.strategy.coefficients(len(self._noise))), {}
        for name in names:
            rows = np.stack([each[name] for each in self._noise if name in each])
            z = (C @ rows if correlated else rows) / (self.privacy.shares.scale * self._grid)
            least = 1 - QUIET_TOLERANCE - QUIET_ERRORS / math.sqrt(2 * z.size)
            found[name] = float(np.sqrt(np.mean(z**2))), least
        return found

    def _loudest(self, noise: Mapping[str, Vector], sizes: Mapping[str, tuple[float, float]]) -> Vector:
        """Return the noise of a round's colluders. Clients with the largest noise are chosen,
        because subtracting their noise is the worst case.
        """
        names = sorted(noise, key=lambda name: -sizes[name][0])[: self.privacy.colluders]
        return np.asarray(sum(noise[name] for name in names), dtype=np.float64)

    def _sent(self, broadcast: Broadcast) -> Vector | None:
        """Return the sum of the canaries' contributions in this round, or None if canaries do not
        take part.
        """
        plan, rows = self.privacy, self._directions[: self.count]
        if plan.unit == "example":
            if broadcast.round % plan.separation:
                return None
            reached = self._contribution(broadcast)
            relative = reached / (plan.shares.sensitivity * self._grid)
            self.largest, self._smallest = max(self.largest, relative), min(self._smallest, relative)
            return np.asarray(reached * rows.double().sum(dim=0).numpy())
        turns = [round for round, used in enumerate(self._used) if used]
        since = broadcast.round - turns[-1] if turns else plan.separation
        if since not in (plan.separation - 1, plan.separation):
            return None
        total, tracker = np.zeros(plan.shares.values), self._canaries.tracker
        before = copy.deepcopy(tracker)
        for row in rows:
            self._canaries.tracker = copy.deepcopy(before)  # each canary counts its own turns
            own = shaped(broadcast.plan, np.asarray(EXCESS_NORM * plan.clip * row.double().numpy()))
            tensors = {name: each.to(broadcast.tensors[name]) for name, each in own.items()}
            update = Update(broadcast.round, broadcast.plan.digest, tensors, examples=1)
            try:
                vector, _ = self._canaries.vector(update, broadcast)
            except ProtocolError:
                return None
            total += vector * self._grid
        return total

    def _data(self, update: Update, broadcast: Broadcast) -> Vector:
        """Return the values of a client's update without noise, after the client's own
        preprocessing.
        """
        if self.privacy.unit == "example":
            return sum_vector(update, broadcast)
        return update_vector(update, broadcast, self.privacy.clip)[0]

    def _sent_by(self, name: str, update: Update, broadcast: Broadcast) -> Vector:
        """Return a client's vector before masking: rounded data plus the client's noise."""
        vector, _ = copy.deepcopy(self.server.client(name).encoding).vector(update, broadcast)
        return np.asarray(vector * self._grid, dtype=np.float64)

    def _weights(self, tensors: Mapping[str, Tensor]) -> Vector:
        """Return the weights as one vector, in the order of the plan."""
        return flat({each.name: tensors[each.name].detach() for each in self.server.plan.tensors})

    def _dots(self, vectors: Sequence[Vector]) -> Vector:
        columns = torch.from_numpy(np.stack(vectors)).float().to(self._directions)
        products: Vector = (columns @ self._directions.T).double().cpu().numpy()
        return products
