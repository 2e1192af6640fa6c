"""A client's side of one round of secure aggregation: five steps, each of which can be taken once.

Everything that a server could do with a second answer is refused: keys, shares, the masked update, the signature and
the shares that take masks off are given out once in a round, and only for the roster that the client has agreed to.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dbcl.errors import ProtocolError, shown
from dbcl.protocol.secagg.keys import SEED, Identity, KeyPair, Registry, derive, digest, opened, seal
from dbcl.protocol.secagg.masks import add_masks
from dbcl.protocol.secagg.messages import (
    MAX_GROUP,
    Advert,
    Agreed,
    Agreement,
    Delivery,
    Masked,
    Member,
    Reveal,
    Roster,
    Shares,
    Survivors,
    names_digest,
)
from dbcl.protocol.secagg.ring import LEVELS, Ring, packed
from dbcl.protocol.secagg.shares import split
from dbcl.protocol.secagg.terms import Terms

STEPS = ("advertise", "share", "mask", "agree", "reveal", "nothing more")


@dataclass
class ClientRound:
    """One client in one round: make a new one for every round, and for every round that begins anew.

    `broadcast` and `plan` are the digests of what the client itself received: clients that were sent something else
    have other masks, which do not cancel. `terms` is what it insists on. `registry` holds the others' identities;
    without it a server can invent as many clients as it likes, and then nothing is promised.

    >>> own = ClientRound("ann", Identity(bytes(32)), 3, bytes(32), bytes(32), Terms(bound=4.0))
    >>> own.advertise().name, own.next_step
    ('ann', 'share')
    >>> own.advertise()
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3: ann was asked to advertise and would share: each is done once
    """

    name: str
    identity: Identity
    round: int
    broadcast: bytes
    plan: bytes
    terms: Terms
    registry: Registry | None = None
    rounding: np.random.Generator | None = None
    """Fixes how values are rounded, for experiments that are to be repeated."""
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
    def next_step(self) -> str:
        """What the client would do next."""
        return STEPS[self._step]

    def advertise(self) -> Advert:
        """Two new keys, signed: the first step."""
        self._take("advertise")
        keys = self._share_keys.public, self._mask_keys.public
        signature = self.identity.sign(*advertised(self.round, self.broadcast, self.name, *keys))
        return Advert(self.round, self.broadcast, self.name, self.identity.public, *keys, signature)

    def share(self, roster: Roster) -> Shares:
        """Check the roster, and share the two secrets among its members: the second step."""
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
        return Shares(self.round, roster.binding, commitment, sealed, digests)

    def mask(self, delivery: Delivery, values: NDArray[np.float64], examples: int) -> Masked:
        """The rounded update under the masks of all who sent shares, and one of its own: the third step.

        A share that cannot be opened, or is not the one that its owner has told the server of, is as good as none.
        """
        roster = self._bound("mask", delivery)
        strangers = set(delivery.sealed) - (set(roster.names) - {self.name})
        if strangers:
            raise ProtocolError(f"round {self.round}: shares of {shown(min(strangers))}, who is not in the roster")
        if set(delivery.digests) != set(delivery.sealed):
            raise ProtocolError(f"round {self.round}: shares without their digests")
        sharers = tuple(name for name in roster.names if name == self.name or name in delivery.sealed)
        if len(sharers) < max(roster.threshold, self.terms.min_cohort):
            raise ProtocolError(f"round {self.round}: only {len(sharers)} clients have sent shares")
        if values.shape != (roster.length,):
            raise ProtocolError(f"round {self.round}: values {values.shape}, and the roster says {roster.length}")
        ring = Ring(roster.bound, len(roster.members))
        words = weighted(ring, values, examples, roster.most, self.rounding)
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
        return Masked(self.round, roster.binding, packed(words & ring.mask, ring.bits))

    def agree(self, survivors: Survivors) -> Agreement:
        """Sign the list of those whose updates arrived: the fourth step."""
        roster = self._bound("agree", survivors)
        listed = survivors.survivors
        inside = set(listed) <= set(self._sharers) and len(set(listed)) == len(listed)
        if survivors.sharers != self._sharers or not inside or self.name not in listed:
            raise ProtocolError(f"round {self.round}: a list of survivors that cannot be")
        if len(listed) < max(roster.threshold, self.terms.min_cohort):
            raise ProtocolError(
                f"round {self.round}: a sum of {len(listed)} clients would be shown, and "
                f"{max(roster.threshold, self.terms.min_cohort)} are the fewest"
            )
        self._take("agree")
        self._survivors = survivors
        return Agreement(self.round, roster.binding, self.identity.sign(*survivors.statement))

    def reveal(self, agreed: Agreed) -> Reveal:
        """Where enough have signed the same list: a share of one secret of each client. The last step."""
        roster = self._bound("reveal", agreed)
        assert self._survivors is not None
        identities = {member.name: member.identity for member in roster.members}
        signed = [
            name
            for name, signature in agreed.signatures.items()
            if name in self._survivors.survivors
            and Identity.signed_by(identities[name], signature, *self._survivors.statement)
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
        """The key for the shares that one of two clients makes for the other."""
        assert self._roster is not None
        return derive(self._secrets[other][0], b"shares", self._roster.binding, sender.encode(), receiver.encode())

    def _problems(self, roster: Roster) -> list[str]:
        """Everything for which a roster is refused."""
        count, terms, members = len(roster.members), self.terms, roster.members
        problems = []
        if not terms.min_cohort <= count <= MAX_GROUP:
            problems.append(f"{count} clients, and there must be {terms.min_cohort} to {MAX_GROUP}")
        if list(roster.names) != sorted(set(roster.names)):
            problems.append("its members are not in order, or one of them stands twice")
        expected = (terms.threshold(count), terms.colluders(count), terms.bound, terms.most)
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
            if not Identity.signed_by(
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


def _signed(member: Member) -> tuple[str, bytes, bytes]:
    return member.name, member.share_key, member.mask_key


def advertised(round: int, broadcast: bytes, name: str, share_key: bytes, mask_key: bytes) -> tuple[bytes, ...]:
    """What a client signs when it gives out its keys."""
    return b"keys", round.to_bytes(8, "big"), broadcast, name.encode(), share_key, mask_key


def pairwise(roster: Roster, sharers: tuple[str, ...], one: str, other: str) -> tuple[bytes, ...]:
    """What the mask of two clients is derived for: the same for both, and another for any other list of sharers."""
    low, high = sorted((one, other))
    return b"pair mask", roster.binding, names_digest(sharers), low.encode(), high.encode()


def committed(binding: bytes, name: str, own_mask: bytes) -> bytes:
    """What shows later that the secret of a client's own mask was put together rightly, and tells nothing before."""
    return digest(b"own mask", binding, name.encode(), own_mask)


def share_digests(binding: bytes, owner: str, holder: str, pair: bytes) -> bytes:
    """What shows later that a client gives out the shares that another one made for it, and tells nothing before.

    >>> len(share_digests(bytes(32), "ann", "bob", bytes(32)))
    64
    """
    about = binding, owner.encode(), holder.encode()
    return digest(b"key share", *about, pair[:SEED]) + digest(b"mask share", *about, pair[SEED:])


def weighted(
    ring: Ring, values: NDArray[np.float64], examples: int, most: int, rng: np.random.Generator | None = None
) -> NDArray[np.uint32]:
    """The update times its weight, rounded, and the weight itself as one more number.

    The weight is `examples` / `most` in 2^15 - 1 steps, at most 1 and never 0; the update is multiplied by what it was
    rounded to, so that the mean is that of the weights that were sent.

    >>> weighted(Ring(bound=1.0, clients=2), np.zeros(3), examples=5, most=10)
    array([    0,     0,     0, 16384], dtype=uint32)
    """
    if not examples >= 1:
        raise ProtocolError(f"an update of {examples} examples: nothing is sent")
    steps = max(1, math.ceil(LEVELS * min(1.0, examples / most)))
    words = ring.quantized(values * (steps / LEVELS), rng)
    return np.append(words, np.uint32(steps))
