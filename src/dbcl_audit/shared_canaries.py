"""Canaries in a run whose clients add the noise: what the server, colluding clients and the public can tell.

Secure aggregation shows the server S_t = sum_i (q_i + eta_i)_t with eta_i = rint(s C^-1 z_i)
(`dbcl.privacy.distributed`). An adversary knows all examples but the canaries, so it computes
C (S - known) = C x + s sum z_i. The server alone has the noise of all n clients against it. With k
colluding clients it subtracts their noise, too, and h = n - k shares are left: the theorem is for
this adversary. Anyone with the finished model sees one linear combination of all sums.

The score of a canary is that of `canaries`: a matched filter in a direction of its own.
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
"""Standard errors below the planned noise from which on a client's share is called too small."""
QUIET_TOLERANCE = 0.01
"""Relative shortfall of a client's noise that is not looked at: rounding, and directions that are not exact."""


class Silent(NoiseStream):
    """Stream without noise: a canary's own vector, of which only the data count.

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
    """Server for engines that adds canaries to a run whose clients add the noise.

    Where one example is the unit, the data of one client get the sum of what all canaries add, in
    rounds 0, b, 2b, ...: the client's own code clamps, rounds and noises it with the rest. Each has
    the norm that `contribution` gives for a broadcast: what a real extreme example changes in a
    client's vector. Where one client is the unit, each canary is a client that sends three times
    too much and comes back too early; its own code clips, rounds and refuses, and what it sends is
    added to the sum that is observed.

    Args:
        server: The server of the run, with its clients.
        plan: The guarantee that is measured, `server.privacy`.
        count: Number of canaries; by default as `Canaries` has it.
        seed: Source of the directions.
        contribution: Norm that an extreme example contributes; by default the planned clip.

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
        """Clients whose noise is smaller than planned, beyond chance."""
        self._contribution = contribution or (lambda broadcast: plan.clip)
        self._start = self._weights(server.weights())
        self._directions = orthonormal(math.ceil(2.5 * self.count), torch.from_numpy(self._start).float(), seed)
        self._canaries = NoisySum(plan, Silent(plan.shares, bytes(32)))
        self._used: list[bool] = []
        self._left: list[Vector] = []
        """Products of the directions with each sum, less all data that are known."""
        self._known: list[Vector] = []
        """Products of the directions with the data that an owner of the model subtracts."""
        self._noise: list[dict[str, Vector]] = []
        """Products of the directions with the noise of each client, by round."""

    @torch.no_grad()
    def close_round(self, updates: Updates) -> RoundReport:
        """Close the round with the canaries among the data, and record what adversaries see."""
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
        """Estimate mu for each adversary from the rounds so far, beside the one that is stated for it.

        "server" sees sums with the noise of all clients, "colluders" are the server and the planned
        number of clients, and "anyone" has the released model.
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
        """Return the estimate from what an adversary sees. (rows, directions)"""
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
        """Return what the plan states of these rounds against the server and this many clients."""
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
        """Return the size of each client's noise relative to the plan, and the smallest that chance explains."""
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
        """Return the noise of a round's colluders: the clients whose noise protects the others most."""
        names = sorted(noise, key=lambda name: -sizes[name][0])[: self.privacy.colluders]
        return np.asarray(sum(noise[name] for name in names), dtype=np.float64)

    def _sent(self, broadcast: Broadcast) -> Vector | None:
        """Return the sum of what canaries contribute in this round; None if it is none of their rounds."""
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
        """Return the values of a client's update without noise, as the client's code takes them."""
        if self.privacy.unit == "example":
            return sum_vector(update, broadcast)
        return update_vector(update, broadcast, self.privacy.clip)[0]

    def _sent_by(self, name: str, update: Update, broadcast: Broadcast) -> Vector:
        """Return what a client is about to send before it is masked: rounded data and its noise."""
        vector, _ = copy.deepcopy(self.server.client(name).encoding).vector(update, broadcast)
        return np.asarray(vector * self._grid, dtype=np.float64)

    def _weights(self, tensors: Mapping[str, Tensor]) -> Vector:
        """Return weights in the order of the plan."""
        return flat({each.name: tensors[each.name].detach() for each in self.server.plan.tensors})

    def _dots(self, vectors: Sequence[Vector]) -> Vector:
        columns = torch.from_numpy(np.stack(vectors)).float().to(self._directions)
        products: Vector = (columns @ self._directions.T).double().cpu().numpy()
        return products
