"""Client under secure aggregation over all rounds: its answers, and its memory of those it must not repeat."""

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
    """Client that answers a server's five messages: the broadcast with `begin`, all others with `answer`.

    It keeps the keys of one round, and for the whole run, independently of the server:

    - the last round and its broadcast: it rejects earlier rounds, and a second broadcast of one round;
    - its groups, from which the groups follow that it must reject (`GroupRule`), and with noise that is correlated over
      rounds, if clients may be missing, the attendance of all revealed sums;
    - with shares of noise, its vector of the round: two vectors of one round would reveal the difference of their
      noise.

    So a new run needs a new client, which only its owner can make. A client that runs in another process for every
    message writes its `state` before an answer leaves: two answers from one state could reveal the update.

    Args:
        name: Name of the client.
        identity: Key that signs its messages.
        config: Conditions that it requires.
        registry: Keys of the others; without it a server can invent clients.
        encoding: How updates become integers: `WeightedMean`, or `NoisySum.of_client` for a guarantee against everyone,
            which needs a registry.

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
        """Raise `ProtocolError` if this client must not answer a broadcast; call it before the training."""
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
        """Take part in a round with an update, clipped to the public bound; return the client's keys."""
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
        """Answer the next message of the round; any other message is a `ProtocolError`."""
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
        """Return the state that another process needs to answer the next message, secrets included.

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
        """Restore what `state` returned: the identity, the groups, the noise and the round."""
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
