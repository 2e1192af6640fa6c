"""Client side of a secure aggregation round: five steps, each permitted only once.

A second answer could reveal the update to the server. Per round, the client therefore sends its
keys, its shares, its masked update, its signature and the revealed shares only once. It sends them
only for the roster that it has accepted.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dbcl.config import SecAggConfig
from dbcl.errors import ProtocolError, shown
from dbcl.protocol.secagg.encoding import Encoding, Vector, WeightedMean
from dbcl.protocol.secagg.keys import SEED, KeyPair, Registry, SigningKey, derive, opened, seal
from dbcl.protocol.secagg.masks import add_masks
from dbcl.protocol.secagg.messages import (
    Advert,
    Agreed,
    Agreement,
    Delivery,
    Masked,
    Member,
    Message,
    Reveal,
    Roster,
    Shares,
    Survivors,
    decode_message,
    encode_message,
)
from dbcl.protocol.secagg.quantizer import packed
from dbcl.protocol.secagg.shares import split
from dbcl.protocol.secagg.statements import advertised, committed, joined, pairwise, share_digests
from dbcl.state import State

STEPS = ("advertise", "share", "mask", "agree", "reveal", "nothing more")


@dataclass
class ClientRound:
    """A client in one round. Create a new object for every round and every repeated round.

    `broadcast` and `plan` are digests of the received messages. The masks cancel only between
    clients with the same messages. `config` holds the settings that the client requires. `registry`
    holds the other clients' public keys; without a registry, a malicious server can add fake
    clients, and there is no protection.

    >>> own = ClientRound("ann", SigningKey(bytes(32)), 3, bytes(32), bytes(32), SecAggConfig(clip=4.0))
    >>> own.advertise().name, own.next_step
    ('ann', 'share')
    >>> own.advertise()
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3: ann was asked to advertise and would share: each is done once
    """

    name: str
    identity: SigningKey
    round: int
    broadcast: bytes
    plan: bytes
    config: SecAggConfig
    registry: Registry | None = None
    encoding: Encoding | None = None
    """Encoding of the update as integers; None selects `WeightedMean`."""
    rounding: np.random.Generator | None = None
    """Random generator for rounding, fixed in reproducible experiments."""
    _step: int = 0
    _share_keys: KeyPair = field(default_factory=KeyPair, repr=False)
    _mask_keys: KeyPair = field(default_factory=KeyPair, repr=False)
    _own_mask: bytes = field(default_factory=lambda: KeyPair().seed, repr=False)
    _roster: Roster | None = field(default=None, repr=False)
    _secrets: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    _held: dict[str, bytes] = field(default_factory=dict, repr=False)
    _sharers: tuple[str, ...] = ()
    _survivors: Survivors | None = field(default=None, repr=False)

    @property
    def _encoding(self) -> Encoding:
        return self.encoding or WeightedMean(self.config)

    @property
    def next_step(self) -> str:
        """Name of the client's next step."""
        return STEPS[self._step]

    @property
    def roster_names(self) -> tuple[str, ...]:
        """Clients in the accepted roster; empty before a roster is accepted."""
        return () if self._roster is None else self._roster.names

    def advertise(self) -> Advert:
        """First step: generate and sign two new keys."""
        self._take("advertise")
        keys = self._share_keys.public, self._mask_keys.public
        signature = self.identity.sign(*advertised(self.round, self.broadcast, self.name, *keys))
        return Advert(self.round, self.broadcast, self.name, self.identity.public, *keys, signature)

    def share(self, roster: Roster) -> Shares:
        """Second step: check the roster, and secret-share two secrets among its members."""
        self._expect("share", roster.round)
        problems = self._problems(roster)
        if problems:
            raise ProtocolError("\n  - ".join([f"round {self.round}: the roster is refused", *problems]))
        self._take("share")
        # What follows is bound to what this client has received itself, whatever its checks of the roster may miss.
        roster = self._roster = replace(roster, round=self.round, broadcast=self.broadcast, plan=self.plan)
        secrets = self._mask_keys.seed, self._own_mask
        pieces = zip(*(split(secret, roster.threshold, len(roster.members)) for secret in secrets), strict=True)
        sealed, digests = {}, {}
        for name, (key_share, mask_share) in zip(roster.names, pieces, strict=True):
            pair = key_share + mask_share
            digests[name] = share_digests(roster.binding, self.name, name, pair)
            if name == self.name:
                self._held[name] = pair
            else:
                sealed[name] = seal(self._channel(name, self.name, name), pair)
        commitment = committed(roster.binding, self.name, self._own_mask)
        signature = self.identity.sign(*joined(roster.binding))
        return Shares(self.round, roster.binding, commitment, signature, sealed, digests)

    def mask(self, delivery: Delivery, values: Vector, examples: int) -> Masked:
        """Third step: mask the quantized update.

        The masks are one pairwise mask for each client that sent shares, and a self-mask. A share
        counts as missing if it cannot be decrypted or does not match its owner's digest.
        """
        roster = self._bound("mask", delivery)
        unknown = set(delivery.sealed) - (set(roster.names) - {self.name})
        if unknown:
            raise ProtocolError(f"round {self.round}: shares of {shown(min(unknown))}, who is not in the roster")
        if not set(delivery.digests) == set(delivery.signatures) == set(delivery.sealed):
            raise ProtocolError(f"round {self.round}: shares without their digests or signatures")
        self._check_joined(roster, delivery)
        sharers = tuple(name for name in roster.names if name == self.name or name in delivery.sealed)
        if len(sharers) < max(roster.threshold, self.config.min_cohort):
            raise ProtocolError(f"round {self.round}: only {len(sharers)} clients have sent shares")
        if values.shape != (roster.length,):
            raise ProtocolError(f"round {self.round}: values {values.shape}, and the roster says {roster.length}")
        count = len(roster.members)
        words = self._encoding.words(values, examples, count, self.rounding)
        self._take("mask")
        self._sharers = sharers
        for name, sealed in delivery.sealed.items():
            pair = opened(self._channel(name, name, self.name), sealed)
            if pair is not None and share_digests(roster.binding, name, self.name, pair) == delivery.digests[name]:
                self._held[name] = pair
        pairs = {
            name: derive(self._secrets[name][1], *pairwise(roster, sharers, self.name, name))
            for name in sharers
            if name != self.name
        }
        own = derive(self._own_mask, b"own mask", roster.binding, self.name.encode())
        add_masks(
            words,
            plus=[own, *(key for name, key in pairs.items() if name > self.name)],
            minus=[key for name, key in pairs.items() if name < self.name],
        )
        bits = self._encoding.bits(count)
        return Masked(self.round, roster.binding, packed(words & np.uint32((1 << bits) - 1), bits))

    def _check_joined(self, roster: Roster, delivery: Delivery) -> None:
        """Raise `ProtocolError` if a client sent shares without signing this attempt's roster."""
        for member in roster.members:
            signature = delivery.signatures.get(member.name)
            if signature is not None and not SigningKey.signed_by(member.identity, signature, *joined(roster.binding)):
                raise ProtocolError(
                    f"round {self.round}: {shown(member.name)} has not signed this roster: its keys are of another "
                    "attempt, or another client sent it under its name"
                )

    def agree(self, survivors: Survivors) -> Agreement:
        """Fourth step: sign the list of clients whose updates arrived."""
        roster = self._bound("agree", survivors)
        listed = survivors.survivors
        inside = set(listed) <= set(self._sharers) and len(set(listed)) == len(listed)
        if survivors.sharers != self._sharers or not inside or self.name not in listed:
            raise ProtocolError(f"round {self.round}: a list of survivors that cannot be")
        if len(listed) < max(roster.threshold, self.config.min_cohort):
            raise ProtocolError(
                f"round {self.round}: a sum of {len(listed)} clients would be shown, and "
                f"{max(roster.threshold, self.config.min_cohort)} are the fewest"
            )
        self._take("agree")
        self._survivors = survivors
        return Agreement(self.round, roster.binding, self.identity.sign(*survivors.statement))

    def reveal(self, agreed: Agreed) -> Reveal:
        """Last step: reveal one share per client once enough clients signed the same list."""
        roster = self._bound("reveal", agreed)
        assert self._survivors is not None
        identities = {member.name: member.identity for member in roster.members}
        signed = [
            name
            for name, signature in agreed.signatures.items()
            if name in self._survivors.survivors
            and SigningKey.signed_by(identities[name], signature, *self._survivors.statement)
        ]
        if len(signed) < roster.threshold:
            raise ProtocolError(
                f"round {self.round}: {len(signed)} clients have signed who is in the sum, and {roster.threshold} must"
            )
        self._take("reveal")
        alive = set(self._survivors.survivors)
        shares = {name: pair[SEED:] if name in alive else pair[:SEED] for name, pair in self._held.items()}
        self._held = {}
        return Reveal(self.round, roster.binding, shares)

    def _expect(self, step: str, round: int) -> None:
        if STEPS[self._step] != step:
            raise ProtocolError(
                f"round {self.round}: {self.name} was asked to {step} and would {STEPS[self._step]}: each is done once"
            )
        if round != self.round:
            raise ProtocolError(f"round {self.round}: a message of round {round}")

    def _take(self, step: str) -> None:
        self._expect(step, self.round)
        self._step += 1

    def _bound(self, step: str, message: Delivery | Survivors | Agreed) -> Roster:
        self._expect(step, message.round)
        assert self._roster is not None
        if message.binding != self._roster.binding:
            raise ProtocolError(f"round {self.round}: a message for another roster")
        return self._roster

    def _channel(self, other: str, sender: str, receiver: str) -> bytes:
        """Return the encryption key for shares from one client to another."""
        assert self._roster is not None
        return derive(self._secrets[other][0], b"shares", self._roster.binding, sender.encode(), receiver.encode())

    def _problems(self, roster: Roster) -> list[str]:
        """Return the reasons to reject a roster."""
        count, config, members = len(roster.members), self.config, roster.members
        problems, most = list[str](), self._encoding.largest_group
        if not config.min_cohort <= count <= most:
            problems.append(f"{count} clients, and there must be {config.min_cohort} to {most}")
        if list(roster.names) != sorted(set(roster.names)):
            problems.append("its members are not in order, or one of them stands twice")
        expected = (config.threshold(count), config.colluders(count), config.clip, config.weight_cap)
        found = (roster.threshold, roster.colluders, roster.bound, roster.most)
        for what, own, theirs in zip(("threshold", "colluders", "bound", "most"), expected, found, strict=True):
            if own != theirs:
                problems.append(f"its {what} is {theirs} and must be {own}")
        if (roster.broadcast, roster.plan) != (self.broadcast, self.plan):
            problems.append("it is for another broadcast than this client has received")
        if not 0 < roster.length < 1 << 40:
            problems.append(f"its vectors have {roster.length} values")
        mine = Member(self.name, self.identity.public, self._share_keys.public, self._mask_keys.public, b"")
        if [member[:4] for member in members if member.name == self.name] != [mine[:4]]:
            problems.append("it does not have this client with its own keys")
        keys = [key for member in members for key in member[1:4]]
        if len(set(keys)) < len(keys):
            problems.append("a key stands in it twice")
        for member in members:
            if not SigningKey.signed_by(
                member.identity, member.signature, *advertised(self.round, self.broadcast, *_signed(member))
            ):
                problems.append(f"{shown(member.name)} has not signed its keys for this round")
            elif self.registry is not None and (why := self.registry.problem(member.name, member.identity)):
                problems.append(why)
            elif member.name != self.name:
                try:
                    secrets = self._share_keys.agree(member.share_key), self._mask_keys.agree(member.mask_key)
                    self._secrets[member.name] = secrets
                except ProtocolError as error:
                    problems.append(f"{shown(member.name)} has {error}")
        return problems

    def state(self) -> State:
        """Return the state that another process needs for the next step, including secrets.

        A state written after a step records the step, so the reader continues with the next step.
        The generator for rounding is not included.

        >>> own = ClientRound("ann", SigningKey(bytes(32)), 3, bytes(32), bytes(32), SecAggConfig(clip=4.0))
        >>> advert = own.advertise()
        >>> ClientRound.resumed(own.state(), SigningKey(bytes(32)), SecAggConfig(clip=4.0)).next_step
        'share'
        """
        values: dict[str, Any] = {
            "name": self.name,
            "round": self.round,
            "broadcast": self.broadcast.hex(),
            "plan": self.plan.hex(),
            "step": self._step,
            "seeds": [self._share_keys.seed.hex(), self._mask_keys.seed.hex(), self._own_mask.hex()],
            "held": {name: pair.hex() for name, pair in self._held.items()},
            "sharers": list(self._sharers),
        }
        seen: dict[str, Message | None] = {"roster": self._roster, "survivors": self._survivors}
        tensors = {
            name: torch.from_numpy(np.frombuffer(encode_message(each), dtype=np.uint8).copy())
            for name, each in seen.items()
            if each is not None
        }
        return State(values, tensors)

    @classmethod
    def resumed(
        cls,
        state: State,
        identity: SigningKey,
        config: SecAggConfig,
        registry: Registry | None = None,
        encoding: Encoding | None = None,
    ) -> "ClientRound":
        """Restore a round from its `state`."""
        values, tensors = state
        try:
            share_seed, mask_seed, own_mask = (bytes.fromhex(seed) for seed in values["seeds"])
            digests = bytes.fromhex(values["broadcast"]), bytes.fromhex(values["plan"])
            own = cls(values["name"], identity, values["round"], *digests, config, registry, encoding)
            own._step = STEPS.index(STEPS[values["step"]])
            own._share_keys, own._mask_keys, own._own_mask = KeyPair(share_seed), KeyPair(mask_seed), own_mask
            own._held = {name: bytes.fromhex(pair) for name, pair in values["held"].items()}
            own._sharers = tuple(values["sharers"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the state of a client in a round cannot be read ({type(error).__name__})") from error
        if "roster" in tensors:
            own._roster = decode_message(Roster, tensors["roster"].numpy().tobytes())
            for member in own._roster.members:
                if member.name != own.name:
                    keys = own._share_keys.agree(member.share_key), own._mask_keys.agree(member.mask_key)
                    own._secrets[member.name] = keys
        if "survivors" in tensors:
            own._survivors = decode_message(Survivors, tensors["survivors"].numpy().tobytes())
        return own


def _signed(member: Member) -> tuple[str, bytes, bytes]:
    return member.name, member.share_key, member.mask_key
