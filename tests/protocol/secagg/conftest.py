"""A group of clients and its server, over encoded messages, with updates that are whole steps of the quantizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbcl.protocol.secagg import ClientRound, GroupRound, Registry, SecAggConfig, SigningKey, Total
from dbcl.protocol.secagg.keys import KeyPair, derive
from dbcl.protocol.secagg.masks import add_masks
from dbcl.protocol.secagg.messages import (
    Agreed,
    Delivery,
    Masked,
    Message,
    Roster,
    Survivors,
    decode_message,
    encode_message,
)
from dbcl.protocol.secagg.quantizer import LEVELS, Quantizer
from dbcl.protocol.secagg.statements import pairwise

ROUND, BROADCAST, PLAN = 7, bytes([1]) * 32, bytes([2]) * 32
BOUND = LEVELS / 4096
"""A step of the quantizer is 2^-12, so that whole numbers of steps are exact in floating point and are not rounded."""
LENGTH = 5


def names(count: int) -> list[str]:
    return [f"client-{number:02d}" for number in range(count)]


def easy_config(**changes: Any) -> SecAggConfig:
    return SecAggConfig(**{"clip": BOUND, "weight_cap": 1, "min_cohort": 3, "colluding": 0.0, **changes})


def whole_numbers(count: int, length: int = LENGTH) -> NDArray[np.int64]:
    """Updates of `count` clients in steps of the quantizer, another one for each."""
    return np.random.default_rng(count).integers(-3000, 3001, size=(count, length))


def carried(message: Any) -> Any:
    """The same after a way as bytes."""
    return decode_message(type(message), encode_message(message))


@dataclass
class Fleet:
    """Clients by name, the server of their group, and all bytes that the server has received."""

    clients: dict[str, ClientRound]
    server: GroupRound
    numbers: dict[str, NDArray[np.int64]]
    received: list[bytes] = field(default_factory=list)
    masked: dict[str, Masked] = field(default_factory=dict)

    @classmethod
    def made(
        cls,
        count: int = 6,
        config: SecAggConfig | None = None,
        *,
        registry: bool = False,
        round: int = ROUND,
        broadcasts: Mapping[str, bytes] = {},
        identities: Mapping[str, SigningKey] | None = None,
        kind: type[ClientRound] = ClientRound,
    ) -> "Fleet":
        config = config or easy_config()
        own = identities or {name: SigningKey() for name in names(count)}
        known = Registry({name: identity.public for name, identity in own.items()}) if registry else None
        clients = {
            name: kind(name, identity, round, broadcasts.get(name, BROADCAST), PLAN, config, known)
            for name, identity in own.items()
        }
        numbers = dict(zip(own, whole_numbers(len(own)), strict=True))
        return cls(clients, GroupRound(round, BROADCAST, PLAN, LENGTH, config, registry=known), numbers)

    def values(self, name: str) -> NDArray[np.float64]:
        return self.numbers[name] / 4096

    def ask(self, names: Any, what: Callable[[str], Message]) -> dict[str, bytes]:
        """What some clients answer, as bytes."""
        answers = {name: encode_message(what(name)) for name in names}
        self.received += answers.values()
        return answers

    def adverts(self, *, without: Any = ()) -> dict[str, bytes]:
        return self.ask(set(self.clients) - set(without), lambda name: self.clients[name].advertise())

    def roster(self, *, without: Any = ()) -> Roster:
        return carried(self.server.roster(self.adverts(without=without)))

    def shares(self, roster: Roster, *, without: Any = ()) -> dict[str, bytes]:
        members = set(roster.names) - set(without)
        return self.ask(members, lambda name: self.clients[name].share(roster))

    def deliveries(self, *, without: Any = ()) -> dict[str, Delivery]:
        made = self.server.deliver(self.shares(self.roster(), without=without))
        return {name: carried(each) for name, each in made.items()}

    def mask(self, deliveries: Mapping[str, Delivery], *, without: Any = ()) -> dict[str, bytes]:
        answers = self.ask(
            set(deliveries) - set(without),
            lambda name: self.clients[name].mask(deliveries[name], self.values(name), 1),
        )
        self.masked = {name: decode_message(Masked, answer) for name, answer in answers.items()}
        return answers

    def survivors(self, *, without: Any = ()) -> Survivors:
        return carried(self.server.survivors(self.mask(self.deliveries(), without=without)))

    def agree(self, survivors: Survivors, *, without: Any = ()) -> dict[str, bytes]:
        asked = set(survivors.survivors) - set(without)
        return self.ask(asked, lambda name: self.clients[name].agree(survivors))

    def agreed(self, *, without: Any = ()) -> Agreed:
        return carried(self.server.agreed(self.agree(self.survivors(without=without))))

    def reveal(self, agreed: Agreed, *, without: Any = ()) -> dict[str, bytes]:
        assert self.server.last is not None
        asked = set(self.server.last.survivors) - set(without)
        return self.ask(asked, lambda name: self.clients[name].reveal(agreed))

    def play(self, drops: Mapping[str, int] = {}) -> Total:
        """A whole round, in which some clients do not answer from a phase on: 1 keys, 2 shares, ... 5 the last."""

        def gone(phase: int) -> set[str]:
            return {name for name, last in drops.items() if last <= phase}

        roster = self.roster(without=gone(1))
        deliveries = self.server.deliver(self.shares(roster, without=gone(2)))
        sent = self.mask({name: carried(each) for name, each in deliveries.items()}, without=gone(3))
        survivors = carried(self.server.survivors(sent))
        agreed = carried(self.server.agreed(self.agree(survivors, without=gone(4))))
        return self.server.total(self.reveal(agreed, without=gone(5)))

    def clear_sum(self, members: Any) -> NDArray[np.float64]:
        return sum(self.numbers[name] for name in members) / 4096


def unmasked(
    words: NDArray[np.uint32], roster: Roster, sharers: tuple[str, ...], name: str, own: bytes, key: bytes
) -> NDArray[np.float64]:
    """The update of one client, to whoever has both its secrets."""
    words, keys = words.copy(), KeyPair(key)
    minus, plus = [derive(own, b"own mask", roster.binding, name.encode())], []
    for member in roster.members:
        if member.name in sharers and member.name != name:
            pair = derive(keys.agree(member.mask_key), *pairwise(roster, sharers, name, member.name))
            (minus if member.name > name else plus).append(pair)
    add_masks(words, plus, minus)
    return Quantizer(BOUND, len(roster.members)).values(words[:-1])
