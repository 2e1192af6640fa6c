"""A server that sees only sums, with all its clients in this process."""

import logging
from collections.abc import Mapping

import numpy as np

from dbcl import seeds
from dbcl.engines.session import ServerSession, Updates
from dbcl.errors import ProtocolError
from dbcl.protocol import RoundReport, Server, Update, decode_broadcast, decode_update
from dbcl.protocol.secagg import Identity, Registry, SecureClient, SecureRounds, Terms, Total
from dbcl.protocol.secagg.client import weighted
from dbcl.protocol.secagg.ring import LEVELS, Ring
from dbcl.protocol.secagg.rounds import bounded, refuse_singling, shaped, traffic
from dbcl.round_plan import RoundPlan
from dbcl.state import State, join

log = logging.getLogger(__name__)


class SecureSession(ServerSession):
    """A server under secure aggregation, and the clients' side of it, over real bytes.

    With `masked=False` nothing is encrypted: the updates are rounded and added as they would be, which gives the same
    sums, for simulations in which only the server's view matters. `seed` fixes the rounding of experiments.

    >>> import torch, dbcl
    >>> server = dbcl.Server(torch.nn.Linear(6, 2), cover="all", steady_lanes=True, lanes=1)
    >>> session = SecureSession(server, Terms(bound=1.0, min_cohort=3))
    >>> broadcast = session.open("ann")
    >>> zero = {name: torch.zeros_like(tensor) for name, tensor in broadcast.tensors.items()}
    >>> update = Update(0, broadcast.plan.digest, zero, examples=1)
    >>> session.close({"ann": update, "bob": update, "cleo": update}).accepted
    3
    """

    def __init__(
        self, server: Server, terms: Terms, ema_decay: float = 0.0, *, masked: bool = True, seed: bytes | None = None
    ) -> None:
        super().__init__(server, ema_decay)
        self.rounds, self.masked = SecureRounds(server, terms), masked
        self._seed = seed
        self._known: dict[str, bytes] = {}
        self._clients: dict[str, SecureClient] = {}

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round down and up, without the broadcasts."""
        return self.rounds.sent_down, self.rounds.sent_up

    def sums(self) -> dict[str, Update]:
        """What the server has seen of the last round: the mean of each group, as an update of its lane."""
        most = self.rounds.terms.most
        found = {}
        for number, (plan, total) in enumerate(self.rounds.totals):
            mean = {name: tensor.float() for name, tensor in shaped(plan, total.values / total.weight).items()}
            found[f"sum {number}"] = Update(plan.round, plan.digest, mean, max(1, round(total.weight * most)))
        return {"sum": found["sum 0"]} if len(found) == 1 else found

    def close(self, updates: Updates) -> RoundReport:
        """Add the updates up securely, step on their sum, and take the new weights into the average."""
        if not isinstance(updates, Mapping):
            raise ProtocolError("secure aggregation is among clients with names: give the updates by their senders")
        if self.masked:
            report = self.rounds.play(list(updates), lambda sent: self._begun(sent, updates), self._answered)
        else:
            report = self._simulated(updates)
        self._average()
        return report

    def _begun(self, sent: Mapping[str, bytes], updates: Mapping[str, Update | bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            client = self._client(name)
            try:
                answers[name] = client.begin(decode_broadcast(data), _read(updates[name]), self._rounding(name))
            except ProtocolError as error:
                log.warning("%s takes no part in round %s: %s", name, self.round, error)
        return answers

    def _answered(self, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            try:
                answers[name] = self._client(name).answer(data)
            except ProtocolError as error:
                log.warning("%s leaves round %s: %s", name, self.round, error)
        return answers

    def _client(self, name: str) -> SecureClient:
        if name not in self._clients:
            identity = Identity()
            self._known[name] = identity.public
            self._clients[name] = SecureClient(name, identity, self.rounds.terms, Registry(self._known))
        return self._clients[name]

    def _rounding(self, name: str) -> np.random.Generator | None:
        if self._seed is None:
            return None
        return np.random.default_rng(seeds.words(self._seed, "rounding", self.round, name, n=4))

    def _simulated(self, updates: Mapping[str, Update | bytes]) -> RoundReport:
        """The same sums in the clear: rounded and weighted as clients would, added in the ring."""
        terms, rounds = self.rounds.terms, self.rounds
        rounds.sent_down = rounds.sent_up = 0
        totals: list[tuple[RoundPlan, Total]] = []
        refused: dict[str, str] = {}
        for group in rounds.grouped({name: self.open(name) for name in updates}):
            ring = Ring(terms.bound, len(group.clients))
            words, members = np.zeros(group.round.length + 1, dtype=np.uint32), []
            for name in group.clients:
                update = _read(updates[name])
                try:
                    values = bounded(update, group.plan, terms.bound)
                    words += weighted(ring, values, update.examples, terms.most, self._rounding(name))
                    members.append(name)
                except ProtocolError as error:
                    refused[name] = str(error)
            try:
                refuse_singling(rounds.rosters, members)
            except ProtocolError as error:
                refused |= group.failed(error)
                continue
            rounds.rosters.add(members)
            weight = int(words[-1] & ring.mask) / LEVELS
            totals.append((group.plan, Total(ring.values(words[:-1]), weight, tuple(sorted(members)))))
            down, up = traffic(group.clients, group.round.length, terms)
            rounds.sent_down, rounds.sent_up = rounds.sent_down + down, rounds.sent_up + up
        return rounds.close(totals, refused)

    def state(self) -> State:
        """The server's state and the average, and who was in which sum."""
        return join(session=super().state(), rosters=self.rounds.state())

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave; clients begin with new keys."""
        if "rosters" not in state.values:
            raise ProtocolError("the checkpoint is of a run without secure aggregation")
        super().load_state(state.part("session"))
        self.rounds.load_state(state.part("rosters"))
        self._clients, self._known = {}, {}


def _read(update: Update | bytes) -> Update:
    return decode_update(update) if isinstance(update, bytes) else update
