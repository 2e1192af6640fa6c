"""Server under secure aggregation, with all clients simulated in the same process."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from dbcl import seeds
from dbcl.config import SecAggConfig, SketchConfig
from dbcl.errors import ConfigError, ProtocolError, plain
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import RoundReport, Server, Update, decode_broadcast
from dbcl.protocol.secagg import (
    Encoding,
    NoisySum,
    Registry,
    SecureClient,
    SecureRounds,
    SigningKey,
    Total,
    WeightedMean,
)
from dbcl.protocol.secagg.encoding import noisy_config
from dbcl.protocol.secagg.groups import traffic
from dbcl.protocol.secagg.vectors import shaped
from dbcl.round_plan import RoundPlan
from dbcl.state import State, join, restored_on_error

log = logging.getLogger(__name__)


class SecureServer(Server):
    """Server under secure aggregation, together with its simulated clients and encoded messages.

    Args:
        model: The network.
        sketch: Configuration or plan of the sketches and the veil.
        secagg: Conditions of secure aggregation. With noise shares, the plan defines them.
        privacy: Plan of the guarantee. With `noise_by="clients"`, each client adds a share of the
            noise.
        masked: Run the complete protocol. Otherwise the updates are encoded and added without
            masks, which gives the same sums and is sufficient for simulations of the server's view.
        rounding_seed: Seed of the stochastic rounding and the noise, for reproducible experiments
            without a guarantee.
        settings: Further keyword arguments of `Server`.

    >>> import torch, dbcl
    >>> sketch = dbcl.SketchConfig(lanes=1)
    >>> server = SecureServer(torch.nn.Linear(6, 2), sketch, secagg=SecAggConfig(clip=1.0, min_cohort=3))
    >>> broadcast = server.open_round("ann")
    >>> zero = {name: torch.zeros_like(tensor) for name, tensor in broadcast.tensors.items()}
    >>> update = Update(0, broadcast.plan.digest, zero, examples=1)
    >>> server.close_round({"ann": update, "bob": update, "cleo": update}).accepted
    3
    """

    def __init__(
        self,
        model: nn.Module,
        sketch: SketchConfig | SketchPlan | None = None,
        *,
        secagg: SecAggConfig | None = None,
        privacy: PrivacyPlan | None = None,
        masked: bool = True,
        rounding_seed: bytes | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, sketch, privacy=privacy, steady_lanes=True, **settings)
        if secagg is None:
            if privacy is None or not privacy.shared:
                raise ConfigError("secagg is needed: the conditions of secure aggregation")
            secagg = noisy_config(privacy)
        self.rounds, self.masked = SecureRounds(self, secagg), masked
        self._seed = rounding_seed
        self._known: dict[str, bytes] = {}
        self._clients: dict[str, SecureClient] = {}

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round down and up, excluding the broadcasts."""
        return self.rounds.sent_down, self.rounds.sent_up

    def sums(self) -> dict[str, Update]:
        """Return the server's view of the last round: the mean of each group, as an update of the
        group's lane.
        """
        found = {}
        for number, (plan, total) in enumerate(self.rounds.totals):
            mean = {name: tensor.float() for name, tensor in shaped(plan, total.values / total.weight).items()}
            examples = max(1, round(total.weight * self.rounds.config.weight_cap))
            found[f"sum {number}"] = Update(plan.round, plan.digest, mean, examples)
        return {"sum": found["sum 0"]} if len(found) == 1 else found

    def close_round(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> RoundReport:
        """Aggregate the updates securely and step on their sum."""
        if not isinstance(updates, Mapping):
            raise ProtocolError("secure aggregation is among clients with names: give the updates by their senders")
        if self.masked:
            return self.rounds.play(list(updates), lambda sent: self._begun(sent, updates), self._answered)
        return self._simulated(updates)

    def _begun(self, sent: Mapping[str, bytes], updates: Mapping[str, Update | bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            try:
                answers[name] = self.client(name).begin(decode_broadcast(data), updates[name], self._rounding(name))
            except ProtocolError as error:
                log.warning("%s takes no part in round %s: %s", name, self.round, error)
        return answers

    def _answered(self, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            try:
                answers[name] = self.client(name).answer(data)
            except ProtocolError as error:
                log.warning("%s leaves round %s: %s", name, self.round, error)
        return answers

    def client(self, name: str) -> SecureClient:
        """Return the simulated client of this name, created on first use."""
        if name not in self._clients:
            key = SigningKey()
            self._known[name] = key.public
            config, known = self.rounds.config, Registry(self._known)
            self._clients[name] = SecureClient(name, key, config, known, self._encoding(name))
        return self._clients[name]

    def _encoding(self, name: str) -> Encoding:
        """Return a client's encoding, including its noise shares."""
        if not self.rounds.encoding.noisy:
            return WeightedMean(self.rounds.config)
        assert self.privacy is not None
        key = None if self._seed is None else seeds.derive(self._seed, "noise", name)
        return NoisySum.of_client(self.privacy, key)

    def _rounding(self, name: str) -> np.random.Generator | None:
        if self._seed is None:
            return None
        return np.random.default_rng(seeds.words(self._seed, "rounding", self.round, name, n=4))

    def _simulated(self, updates: Mapping[str, Update | bytes]) -> RoundReport:
        """Compute the sums without masks. Updates are validated and encoded as on the clients."""
        config, rounds = self.rounds.config, self.rounds
        rounds.sent_down = rounds.sent_up = 0
        totals: list[tuple[RoundPlan, Total]] = []
        sent = {name: self.open_round(name) for name in updates}
        playing, refused = rounds.grouped(sent)
        for group in playing:
            length = group.round.length + rounds.encoding.more_words
            words, members, count = np.zeros(length, dtype=np.uint32), [], len(group.clients)
            for name in group.clients:
                encoding = self.client(name).encoding
                try:
                    vector, examples = encoding.vector(updates[name], sent[name])
                except ProtocolError as error:
                    group.round.refused[name] = plain(str(error))
                    continue
                words += encoding.words(vector, examples, count, self._rounding(name))
                members.append(name)
            refused |= group.round.refused
            try:
                group.settle(members, rounds.record)
            except ProtocolError as error:
                refused |= group.failed(error)
                continue
            totals.append((group.plan, rounds.encoding.total(words, count, tuple(sorted(members)))))
            down, up = traffic(group.clients, group.round.length, config, rounds.encoding)
            rounds.sent_down, rounds.sent_up = rounds.sent_down + down, rounds.sent_up + up
        return rounds.close(totals, refused)

    def state(self) -> State:
        """Return the server's state, including the groups that have been aggregated. With noise
        shares, it includes the state of all clients.
        """
        own, sums = super().state(), self.rounds.state()
        clients = State({}, {})
        if self.rounds.encoding.noisy:
            clients = join(**{name: client.state() for name, client in self._clients.items()})
        more = join(sums=sums, members=clients)
        return State({**own.values, **more.values}, {**own.tensors, **more.tensors})

    def load_state(self, state: State) -> None:
        """Restore a state returned by `state`. Without noise shares, clients start with new keys."""
        if not isinstance(state.values, Mapping) or not {"sums", "members"} <= state.values.keys():
            raise ProtocolError("the checkpoint is of a run without secure aggregation")
        own = {name: part for name, part in state.values.items() if name not in ("sums", "members")}
        tensors = {name: each for name, each in state.tensors.items() if not name.startswith("members.")}
        before = self._clients, self._known
        try:
            with restored_on_error(self.rounds):
                self.rounds.load_state(state.part("sums"))
                self._load_clients(state.part("members"))
                super().load_state(State(own, tensors))
        except Exception as error:
            self._clients, self._known = before
            if isinstance(error, ProtocolError):
                raise
            said = f"{type(error).__name__}: {plain(str(error), 100)}"
            raise ProtocolError(f"the checkpoint is damaged ({said})") from error

    def _load_clients(self, state: State) -> None:
        self._clients, self._known = {}, {}
        for name in state.values:
            client = self.client(name)
            client.load_state(state.part(name))
            self._known[name] = client.identity.public
