"""A client under secure aggregation over all rounds, and its record of past answers."""

import numpy as np
import torch

from dbcl.config import SecAggConfig
from dbcl.errors import ConfigError, ProtocolError, plain
from dbcl.protocol.messages import Broadcast, Update
from dbcl.protocol.secagg.client import ClientRound
from dbcl.protocol.secagg.encoding import Encoding, Vector, WeightedMean
from dbcl.protocol.secagg.keys import Registry, SigningKey
from dbcl.protocol.secagg.messages import Agreed, Delivery, Roster, Survivors, decode_message, encode_message
from dbcl.protocol.secagg.vectors import broadcast_digest
from dbcl.state import State, join


class SecureClient:
    """A client that answers the server's five messages of a round.

    Answer the broadcast with `begin` and all other messages with `answer`. Independently of the
    server, the client stores the keys of the current round and, for the complete run:

    - the last round and its broadcast, to reject earlier rounds and a second broadcast of a round;
    - its groups, to reject groups that isolate a client (`GroupRule`); with correlated noise and
      possible dropouts, also the attendance in all revealed sums;
    - with noise shares, its vector of the round: two vectors of one round would reveal the
      difference of their noise.

    A new run therefore needs a new client, which only its owner can create. If every message is
    processed by another process, save `state` before sending an answer. Two answers from one state
    could reveal the update.

    Args:
        name: Name of the client.
        identity: Signing key of the client.
        config: Secure aggregation settings that the client requires.
        registry: Public keys of the other clients. Without a registry, a malicious server can add
            fake clients.
        encoding: Encoding of updates as integers: `WeightedMean` or, for a guarantee against every
            party, `NoisySum.of_client`, which needs a registry.

    >>> client = SecureClient("ann", SigningKey(), SecAggConfig(clip=4.0))
    >>> client.answer(b"")
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: ann is in no round: it begins with a broadcast
    """

    def __init__(
        self,
        name: str,
        identity: SigningKey,
        config: SecAggConfig,
        registry: Registry | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        self.name, self.identity, self.config, self.registry = name, identity, config, registry
        self.encoding = encoding or WeightedMean(config)
        if self.encoding.noisy and registry is None:
            raise ConfigError(
                "a guarantee against the server needs a registry of the clients' keys: without one the server could "
                "invent all other clients"
            )
        self.rule = self.encoding.rule()
        self._last: tuple[int, bytes] | None = None
        self._round: ClientRound | None = None
        self._vector: Vector | None = None
        self._examples = 0

    def check(self, broadcast: Broadcast) -> None:
        """Raise `ProtocolError` if the client must not answer a broadcast. Call before training."""
        if self._last is None:
            return
        round, digest = self._last
        if broadcast.round < round:
            raise ProtocolError(
                f"{self.name} has taken part in round {round} and answers no earlier one, got round {broadcast.round}; "
                "a new run needs a new client, with a folder or state of its own"
            )
        if broadcast.round == round and broadcast_digest(broadcast) != digest:
            raise ProtocolError(f"{self.name} has received another broadcast of round {round}, and answers one only")

    def begin(self, broadcast: Broadcast, update: Update | bytes, rounding: np.random.Generator | None = None) -> bytes:
        """Take part in a round with an update.

        Args:
            broadcast: The received broadcast.
            update: The update, which is clipped to the public bound.
            rounding: Random generator for rounding, for reproducible experiments.

        Returns:
            The encoded message with the client's keys.

        Raises:
            ProtocolError: The client must not answer the broadcast.
        """
        self.check(broadcast)
        digest = broadcast_digest(broadcast)
        if not (self.encoding.noisy and self._last == (broadcast.round, digest)):
            self._vector, self._examples = self.encoding.vector(update, broadcast)
        self._last = broadcast.round, digest
        self._round = ClientRound(
            self.name,
            self.identity,
            broadcast.round,
            digest,
            self.encoding.binding(bytes.fromhex(broadcast.plan.digest)),
            self.config,
            self.registry,
            self.encoding,
            rounding,
        )
        return encode_message(self._round.advertise())

    def answer(self, data: bytes) -> bytes:
        """Answer the next message of the round.

        Args:
            data: The server's message.

        Returns:
            The encoded answer.

        Raises:
            ProtocolError: The message is invalid or not the expected next message.
        """
        if self._round is None or self._vector is None:
            raise ProtocolError(f"{self.name} is in no round: it begins with a broadcast")
        match self._round.next_step:
            case "share":
                roster = decode_message(Roster, data)
                self._check_roster(roster)
                return encode_message(self._round.share(roster))
            case "mask":
                delivery = decode_message(Delivery, data)
                masked = self._round.mask(delivery, self._vector, self._examples)
                self.rule.mask(self._round.round, self._round.roster_names)
                if not self.encoding.noisy:  # it is not needed any more
                    self._vector = self._vector[:0]
                return encode_message(masked)
            case "agree":
                survivors = decode_message(Survivors, data)
                self.rule.check_list(self._round.round, survivors.survivors)
                agreement = self._round.agree(survivors)
                self.rule.sign(self._round.round, survivors.survivors)
                return encode_message(agreement)
            case "reveal":
                reveal = self._round.reveal(decode_message(Agreed, data))
                self._round = None
                return encode_message(reveal)
        raise ProtocolError(f"{self.name} has nothing more to say in this round")

    def _check_roster(self, roster: Roster) -> None:
        self.rule.check_roster(roster.round, roster.names)
        parties = self.encoding.parties
        if parties is not None and self.registry is not None and len(self.registry.known) > parties:
            raise ProtocolError(
                f"the registry has {len(self.registry.known)} keys, and the guarantee is planned for {parties} clients"
            )
        self.rule.learn(roster.round, roster.attendance)

    def state(self) -> State:
        """Return the state that another process needs for the next message, including secrets.

        >>> client = SecureClient("ann", SigningKey(), SecAggConfig(clip=4.0))
        >>> again = SecureClient("ann", SigningKey(), SecAggConfig(clip=4.0))
        >>> again.load_state(client.state())
        >>> again.identity.public == client.identity.public
        True
        """
        values = {
            "name": self.name,
            "identity": self.identity.secret.hex(),
            "examples": self._examples,
            "last": None if self._last is None else [self._last[0], self._last[1].hex()],
        }
        tensors = {} if self._vector is None else {"update": torch.from_numpy(self._vector)}
        parts = {"client": State(values, tensors), "groups": self.rule.state()}
        if self.encoding.noisy:
            parts["noise"] = self.encoding.state()
        if self._round is not None:
            parts["round"] = self._round.state()
        return join(**parts)

    def load_state(self, state: State) -> None:
        """Restore the identity, the groups, the noise and the round from `state`."""
        try:
            own = state.part("client")
            name, identity, last = own.values["name"], SigningKey(bytes.fromhex(own.values["identity"])), None
            if own.values["last"] is not None:
                last = int(own.values["last"][0]), bytes.fromhex(own.values["last"][1])
            groups, examples = state.part("groups"), int(own.values["examples"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError(f"the state of {self.name} cannot be read ({type(error).__name__})") from error
        if name != self.name:
            raise ProtocolError(f"the state is of {plain(str(name))}, and this is {self.name}")
        if ("noise" in state.values) != self.encoding.noisy:
            raise ProtocolError(f"the state of {self.name} is of a run with another guarantee")
        self.rule.load_state(groups)
        if self.encoding.noisy:
            self.encoding.load_state(state.part("noise"))
        self.identity, self._last, self._examples = identity, last, examples
        self._round, self._vector = None, None
        if "update" in own.tensors:
            self._vector = own.tensors["update"].numpy()
        if "round" in state.values:
            self._round = ClientRound.resumed(state.part("round"), identity, self.config, self.registry, self.encoding)
            if self._vector is None:
                self._vector = np.zeros(0)
