"""Server side of one group in one round: relays messages and computes the sum.

An invalid answer is treated as missing: the client is excluded for the rest of the round, with a
reason. With too few clients, the round fails with a `ProtocolError`. It can be repeated with new
keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from dbcl.config import SecAggConfig
from dbcl.errors import ProtocolError, plain
from dbcl.privacy.attendance import Rows
from dbcl.protocol.secagg.encoding import Encoding, Total, WeightedMean
from dbcl.protocol.secagg.keys import DIGEST, KeyPair, Registry, SigningKey, derive
from dbcl.protocol.secagg.masks import add_masks
from dbcl.protocol.secagg.messages import (
    MAX_GROUP,
    Advert,
    Agreed,
    Agreement,
    Delivery,
    Masked,
    Message,
    Reveal,
    Roster,
    Shares,
    Survivors,
    decode_message,
)
from dbcl.protocol.secagg.quantizer import Words, unpacked
from dbcl.protocol.secagg.shares import combined
from dbcl.protocol.secagg.statements import advertised, committed, joined, pairwise, share_digests

M = TypeVar("M", bound=Message)


@dataclass
class GroupRound:
    """Server side of one group in one round.

    Call `roster`, `deliver`, `survivors`, `agreed` and `total` once each, in this order.
    `broadcast` and `plan` are digests of the group's messages; `length` is the number of values in
    an update. Honest clients reject a complete roster because of one invalid member. With a
    `registry`, the server therefore excludes clients that honest clients would reject.

    Any single client can make its group's round fail. `refused` lists clients with invalid keys,
    invalid shares, modified shares or missing answers. If a share is missing, either its sender or
    its recipient may be responsible, so the error names both. A client that sends invalid words
    cannot be identified; the sum is then wrong, within the bound of `Encoding.total`.

    >>> group = GroupRound(3, bytes(32), bytes(32), 5, SecAggConfig(clip=4.0, min_cohort=3))
    >>> group.roster({"ann": b"DBCL", "bob": b"noise"})
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3: 0 clients have given their keys, and 3 are needed: nothing is added
      - ann: advert: cut short, only 4 bytes long
      - bob: advert: does not begin with DBCL, so it is no dbcl message
    """

    round: int
    broadcast: bytes
    plan: bytes
    length: int
    config: SecAggConfig
    refused: dict[str, str] = field(default_factory=dict)
    """Excluded clients with reasons. After a failure, exclude them from the next attempt."""
    registry: Registry | None = None
    encoding: Encoding | None = None
    """Encoding of updates as integers; None selects `WeightedMean`."""
    attendance: Rows = ()
    """Clients of each earlier sum, if a guarantee depends on attendance."""
    _adverts: dict[str, Advert] = field(default_factory=dict)
    _roster: Roster | None = None
    _shares: dict[str, Shares] = field(default_factory=dict)
    _sum: Words | None = None
    _survivors: Survivors | None = None

    @property
    def _encoding(self) -> Encoding:
        return self.encoding or WeightedMean(self.config)

    @property
    def last(self) -> Survivors | None:
        """Clients in the sum, or None before they are known."""
        return self._survivors

    @property
    def names(self) -> tuple[str, ...]:
        """Clients in the roster."""
        return self._given().names

    def roster(self, answers: Mapping[str, Advert | bytes]) -> Roster:
        """Return the roster: the group's members and settings."""

        def check(name: str, advert: Advert) -> None:
            signed = advertised(self.round, self.broadcast, advert.name, advert.share_key, advert.mask_key)
            if advert.broadcast != self.broadcast:
                raise ProtocolError("answers another broadcast")
            if advert.name != name or not SigningKey.signed_by(advert.identity, advert.signature, *signed):
                raise ProtocolError("has not signed its keys")
            for key in (advert.share_key, advert.mask_key):
                probe.agree(key)
            if self.registry is not None and (why := self.registry.problem(name, advert.identity)):
                raise ProtocolError(why)

        probe = KeyPair()  # with a key of small order, every key gives the same
        self._adverts = self._without_doubles(self._read(Advert, answers, check))
        count = len(self._adverts)
        self._require(count, self.config.min_cohort, "clients have given their keys")
        if count > MAX_GROUP:
            raise ProtocolError(f"round {self.round}: {count} clients in a group, and {MAX_GROUP} are the most")
        self._roster = Roster(
            round=self.round,
            broadcast=self.broadcast,
            plan=self.plan,
            threshold=self.config.threshold(count),
            colluders=self.config.colluders(count),
            bound=self.config.clip,
            most=self.config.weight_cap,
            length=self.length,
            members=tuple(self._adverts[name].member for name in sorted(self._adverts)),
            attendance=self.attendance,
        )
        return self._roster

    def deliver(self, answers: Mapping[str, Shares | bytes]) -> dict[str, Delivery]:
        """Return each sender's encrypted shares from the other clients."""
        roster = self._given()

        def check(name: str, shares: Shares) -> None:
            if set(shares.sealed) != set(roster.names) - {name}:
                raise ProtocolError("has not made a share for every other client")
            if set(shares.digests) != set(roster.names):
                raise ProtocolError("has not told the digests of all its shares")
            if not SigningKey.signed_by(self._adverts[name].identity, shares.signature, *joined(roster.binding)):
                raise ProtocolError("has not signed the roster")

        self._shares = self._read(Shares, self._of(roster.names, answers), check)
        self._require(len(self._shares), self._fewest, "clients have sent shares")
        deliveries = {}
        for name in self._shares:
            others = {other: shares for other, shares in self._shares.items() if other != name}
            deliveries[name] = Delivery(
                self.round,
                roster.binding,
                {other: shares.sealed[name] for other, shares in others.items()},
                {other: shares.digests[name] for other, shares in others.items()},
                {other: shares.signature for other, shares in others.items()},
            )
        return deliveries

    def survivors(self, answers: Mapping[str, Masked | bytes]) -> Survivors:
        """Add the masked updates and return the list of their senders."""
        roster = self._given()
        bits, length = self._encoding.bits(len(roster.members)), roster.length + self._encoding.more_words
        total = np.zeros(length, dtype=np.uint32)

        def check(name: str, masked: Masked) -> None:
            total.__iadd__(unpacked(masked.packed, bits, length))

        arrived = self._read(Masked, self._of(self._shares, answers), check)
        self._require(len(arrived), self._fewest, "masked updates have arrived")
        sharers = tuple(sorted(self._shares))
        self._sum, self._survivors = total, Survivors(self.round, roster.binding, sharers, tuple(sorted(arrived)))
        return self._survivors

    def agreed(self, answers: Mapping[str, Agreement | bytes]) -> Agreed:
        """Return the signatures of the list of survivors."""
        roster, survivors = self._given(), self._survivors
        assert survivors is not None
        identities = {member.name: member.identity for member in roster.members}

        def check(name: str, agreement: Agreement) -> None:
            if not SigningKey.signed_by(identities[name], agreement.signature, *survivors.statement):
                raise ProtocolError("has signed something else")

        signed = self._read(Agreement, self._of(survivors.survivors, answers), check)
        self._require(len(signed), roster.threshold, "clients have signed who is in the sum")
        return Agreed(self.round, roster.binding, {name: each.signature for name, each in signed.items()})

    def total(self, answers: Mapping[str, Reveal | bytes]) -> Total:
        """Reconstruct the secrets, remove the masks and decode the sum."""
        roster, survivors = self._given(), self._survivors
        assert survivors is not None
        assert self._sum is not None
        reveals = self._read(Reveal, self._of(survivors.survivors, answers), self._check_shares)
        self._require(len(reveals), roster.threshold, "clients have helped to take the masks off")
        secrets = self._secrets(roster, survivors, reveals)
        plus: list[bytes] = []
        minus: list[bytes] = []
        for name, secret in secrets.items():
            if name in survivors.survivors:
                minus.append(derive(secret, b"own mask", roster.binding, name.encode()))
                continue
            keys = KeyPair(secret)
            for other in survivors.survivors:
                pair = derive(
                    keys.agree(self._adverts[other].mask_key), *pairwise(roster, survivors.sharers, name, other)
                )
                # The other one has added it where its partner's name is later, and taken it away where it is earlier.
                (minus if name > other else plus).append(pair)
        add_masks(self._sum, plus, minus)
        words, self._sum = self._sum, None
        return self._encoding.total(words, len(roster.members), survivors.survivors)

    def _secrets(self, roster: Roster, survivors: Survivors, reveals: Mapping[str, Reveal]) -> dict[str, bytes]:
        """Return the secrets for removing the masks, by client; name clients with lost secrets."""
        number = {name: place for place, name in enumerate(roster.names, start=1)}
        shares = {
            owner: {number[who]: each.shares[owner] for who, each in reveals.items() if owner in each.shares}
            for owner in survivors.sharers
        }
        enough = [owner for owner in shares if len(shares[owner]) >= roster.threshold]
        secrets = dict(zip(enough, combined([shares[owner] for owner in enough], roster.threshold), strict=True))
        problems = []
        for name in survivors.sharers:
            fits = self._commitment_fits(roster, name) if name in survivors.survivors else self._key_fits(name)
            if name in secrets and fits(secrets[name]):
                continue
            reason = f"{len(shares[name])} shares, and {roster.threshold} are needed"
            if name in secrets:
                reason = "its shares do not give what it has committed itself to"
            without = [who for who, each in reveals.items() if name not in each.shares]
            problems.append(f"the mask of {name} stays on: {reason}")
            if without:
                problems[-1] += f" (none of {', '.join(without)})"
            # As many as may collude could have kept a share back; of more, one is honest and was given none.
            if name in secrets or len(without) > roster.colluders:
                self.refused[name] = plain(f"gave out shares that are of no use: {reason}")
        if problems:
            raise ProtocolError("\n  - ".join([f"round {self.round}: {problems[0]}", *problems[1:]]))
        return secrets

    def _check_shares(self, name: str, reveal: Reveal) -> None:
        """Exclude a client that reveals a share other than the share it received."""
        assert self._survivors is not None
        for owner in self._survivors.sharers:
            if owner in reveal.shares:
                half = slice(DIGEST, None) if owner in self._survivors.survivors else slice(DIGEST)
                digests = share_digests(self._given().binding, owner, name, 2 * reveal.shares[owner])
                if digests[half] != self._shares[owner].digests[name][half]:
                    raise ProtocolError(f"gave another share of {owner} than it was given")

    def _without_doubles(self, adverts: dict[str, Advert]) -> dict[str, Advert]:
        """Exclude all clients with a common key.

        At least one of them has copied the key, and clients reject a roster with a duplicate key.
        """
        owners: dict[bytes, list[str]] = {}
        for name, advert in adverts.items():
            for key in (advert.identity, advert.share_key, advert.mask_key):
                owners.setdefault(key, []).append(name)
        for names in owners.values():
            if len(names) > 1:
                self.refused |= dict.fromkeys(names, plain(f"has a key that stands twice: of {', '.join(names)}"))
        return {name: advert for name, advert in adverts.items() if name not in self.refused}

    def _commitment_fits(self, roster: Roster, name: str) -> Callable[[bytes], bool]:
        return lambda secret: committed(roster.binding, name, secret) == self._shares[name].commitment

    def _key_fits(self, name: str) -> Callable[[bytes], bool]:
        return lambda seed: KeyPair(seed).public == self._adverts[name].mask_key

    def _given(self) -> Roster:
        if self._roster is None:
            raise ProtocolError(f"round {self.round}: there is no roster yet")
        return self._roster

    @property
    def _fewest(self) -> int:
        return max(self._given().threshold, self.config.min_cohort)

    def _of(
        self, names: Mapping[str, object] | tuple[str, ...], answers: Mapping[str, M | bytes]
    ) -> dict[str, M | bytes]:
        """Return the answers of the given clients. Clients without an answer are excluded."""
        for name in names:
            if name not in answers and name not in self.refused:
                self.refused[name] = "did not answer"
        return {name: answer for name, answer in answers.items() if name in names}

    def _read(self, kind: type[M], answers: Mapping[str, M | bytes], check: Callable[[str, M], None]) -> dict[str, M]:
        read: dict[str, M] = {}
        for name, answer in answers.items():
            try:
                message = decode_message(kind, bytes(answer)) if isinstance(answer, bytes | bytearray) else answer
                if not isinstance(message, kind):
                    raise ProtocolError(f"sent no {kind.__name__.lower()}")
                binding = getattr(message, "binding", None)
                if message.round != self.round or (binding is not None and binding != self._given().binding):
                    raise ProtocolError("answers another round or another roster")
                check(name, message)
                read[name] = message
            except ProtocolError as error:
                self.refused[name] = plain(str(error))
        return read

    def _require(self, count: int, least: int, what: str) -> None:
        if count < least:
            reasons = [f"{name}: {reason}" for name, reason in sorted(self.refused.items())]
            raise ProtocolError(
                "\n  - ".join(
                    [f"round {self.round}: {count} {what}, and {least} are needed: nothing is added", *reasons]
                )
            )
