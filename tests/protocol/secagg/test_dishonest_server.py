"""What a server that does not keep to the protocol tries, and honest clients refuse."""

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg import ClientRound, SecAggConfig, SigningKey
from dbcl.protocol.secagg.keys import SEED, KeyPair, derive
from dbcl.protocol.secagg.masks import add_masks
from dbcl.protocol.secagg.messages import (
    Agreed,
    Agreement,
    Delivery,
    Member,
    Reveal,
    Roster,
    Shares,
    Survivors,
    decode_message,
)
from dbcl.protocol.secagg.quantizer import Quantizer, unpacked
from dbcl.protocol.secagg.shares import combined
from dbcl.protocol.secagg.statements import advertised, pairwise
from protocol.secagg.conftest import BOUND, BROADCAST, LENGTH, ROUND, Fleet, easy_config, names, unmasked

VICTIM, *OTHERS = names(6)


def signed(name: str, identity: SigningKey, share_key: bytes, mask_key: bytes, round: int = ROUND) -> Member:
    signature = identity.sign(*advertised(round, BROADCAST, name, share_key, mask_key))
    return Member(name, identity.public, share_key, mask_key, signature)


def with_member(roster: Roster, number: int, **changes: bytes) -> Roster:
    members = list(roster.members)
    members[number] = members[number]._replace(**changes)
    return replace(roster, members=tuple(members))


# The roster


def test_a_changed_config_is_refused_and_all_reasons_are_given() -> None:
    fleet = Fleet.made()
    roster = fleet.roster()
    client = fleet.clients[VICTIM]
    forged = replace(roster, threshold=roster.threshold - 1, colluders=1, bound=BOUND / 2, most=2)
    with pytest.raises(ProtocolError) as error:
        client.share(forged)
    for reason in (
        "its threshold is 3 and must be 4",
        "its colluders is 1 and must be 0",
        f"its bound is {BOUND / 2} and must be {BOUND}",
        "its most is 2 and must be 1",
    ):
        assert reason in str(error.value)
    client.share(roster)  # a refused roster leaves the client where it was


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"broadcast": bytes(32)}, "another broadcast than this client has received"),
        ({"plan": bytes(32)}, "another broadcast than this client has received"),
        ({"round": ROUND + 1}, f"a message of round {ROUND + 1}"),
        ({"length": 0}, "its vectors have 0 values"),
    ],
)
def test_a_roster_for_something_else(changes: dict[str, object], reason: str) -> None:
    fleet = Fleet.made()
    with pytest.raises(ProtocolError, match=reason):
        fleet.clients[VICTIM].share(replace(fleet.roster(), **changes))


def test_rosters_that_are_no_lists_of_clients() -> None:
    fleet = Fleet.made()
    roster = fleet.roster()
    for members, reason in (
        (roster.members[1:], "does not have this client with its own keys"),
        (roster.members[::-1], "not in order"),
        ((roster.members[0], *roster.members), "stands twice"),
        (roster.members[:2], "2 clients, and there must be 3 to 128"),
    ):
        forged = replace(roster, members=members, threshold=len(members) // 2 + 1)
        with pytest.raises(ProtocolError, match=reason):
            fleet.clients[VICTIM].share(forged)


@pytest.mark.parametrize("which", ["share_key", "mask_key"])
def test_a_substituted_key(which: str) -> None:
    fleet = Fleet.made()
    forged = with_member(fleet.roster(), 2, **{which: KeyPair().public})
    with pytest.raises(ProtocolError, match="'client-02' has not signed its keys for this round"):
        fleet.clients[VICTIM].share(forged)
    own = with_member(forged, 0, **{which: KeyPair().public})
    with pytest.raises(ProtocolError, match="does not have this client with its own keys"):
        fleet.clients[VICTIM].share(own)


def test_keys_signed_by_somebody_else() -> None:
    """A server that signs as another client: refused with a registry. Without one it is believed, as the docs say."""
    for registry in (True, False):
        fleet = Fleet.made(registry=registry)
        roster = fleet.roster()
        mine = signed(OTHERS[0], SigningKey(), KeyPair().public, KeyPair().public)
        forged = replace(roster, members=(roster.members[0], mine, *roster.members[2:]))
        if registry:
            with pytest.raises(ProtocolError, match="'client-01' is known by another key"):
                fleet.clients[VICTIM].share(forged)
        else:
            assert set(fleet.clients[VICTIM].share(forged).sealed) == set(OTHERS)


def invented(fleet: Fleet) -> tuple[Roster, dict[str, ClientRound]]:
    """One honest client among clients that the server plays itself."""
    roster = fleet.roster()
    own = {name: ClientRound(name, SigningKey(), ROUND, BROADCAST, roster.plan, fleet.server.config) for name in OTHERS}
    made = tuple(client.advertise().member for client in own.values())
    return replace(roster, members=(roster.members[0], *made)), own


def test_invented_clients_are_refused_with_a_registry() -> None:
    fleet = Fleet.made(registry=True)
    roster, _ = invented(fleet)
    with pytest.raises(ProtocolError, match="is known by another key"):
        fleet.clients[VICTIM].share(roster)


def test_invented_clients_learn_everything_without_one() -> None:
    """The documented limit: without a registry a server that plays all other clients takes the masks off."""
    fleet = Fleet.made()
    roster, own = invented(fleet)
    victim, clients = fleet.clients[VICTIM], {VICTIM: fleet.clients[VICTIM], **own}
    made = {name: client.share(roster) for name, client in clients.items()}
    sent = {}
    for name, client in clients.items():
        delivery = Delivery(
            ROUND,
            roster.binding,
            {other: shares.sealed[name] for other, shares in made.items() if other != name},
            {other: shares.digests[name] for other, shares in made.items() if other != name},
            {other: shares.signature for other, shares in made.items() if other != name},
        )
        sent[name] = client.mask(delivery, fleet.values(name) if client is victim else np.zeros(LENGTH), 1)
    survivors = Survivors(ROUND, roster.binding, roster.names, roster.names)
    agreed = Agreed(
        ROUND, roster.binding, {name: client.agree(survivors).signature for name, client in clients.items()}
    )
    reveals = {name: client.reveal(agreed) for name, client in clients.items()}
    shares = {number: reveals[name].shares[VICTIM] for number, name in enumerate(roster.names, start=1)}
    mask = combined([shares], roster.threshold)[0]
    words = unpacked(sent[VICTIM].packed, Quantizer(BOUND, 6).bits, LENGTH + 1)
    keys = {name: own[name]._mask_keys for name in own}
    minus = [derive(mask, b"own mask", roster.binding, VICTIM.encode())]
    minus += [
        derive(keys[name].agree(roster.members[0].mask_key), *pairwise(roster, roster.names, VICTIM, name))
        for name in OTHERS
    ]  # the victim's name comes first
    add_masks(words, minus=minus)
    assert np.array_equal(Quantizer(BOUND, 6).values(words[:-1]), fleet.values(VICTIM))


def test_a_reflected_key() -> None:
    """The victim's own keys under another name: its mask with them would be one that it takes off itself."""
    fleet = Fleet.made()
    roster = fleet.roster()
    own = roster.members[0]
    mirror = signed(OTHERS[0], SigningKey(), own.share_key, own.mask_key)
    with pytest.raises(ProtocolError, match="a key stands in it twice"):
        fleet.clients[VICTIM].share(replace(roster, members=(own, mirror, *roster.members[2:])))


def test_a_key_of_small_order() -> None:
    """With it everybody has the same secret: zero."""
    fleet = Fleet.made()
    roster = fleet.roster()
    for point in (bytes(32), (1).to_bytes(32, "little")):
        weak = signed(OTHERS[0], SigningKey(), KeyPair().public, point)
        with pytest.raises(ProtocolError, match="'client-01' has a public key that no honest client has"):
            fleet.clients[VICTIM].share(replace(roster, members=(roster.members[0], weak, *roster.members[2:])))


def test_a_replayed_round() -> None:
    identities = {name: SigningKey() for name in names(6)}
    old, new = Fleet.made(identities=identities), Fleet.made(identities=identities, round=ROUND + 1)
    before, now = old.roster(), new.roster()
    with pytest.raises(ProtocolError, match="round 8: a message of round 7"):
        new.clients[VICTIM].share(before)
    stale = replace(now, members=(now.members[0], *before.members[1:]))
    with pytest.raises(ProtocolError, match="'client-01' has not signed its keys for this round"):
        new.clients[VICTIM].share(stale)


# Two of something


def test_every_step_is_taken_once() -> None:
    fleet = Fleet.made()
    roster = fleet.roster()
    client = fleet.clients[VICTIM]
    with pytest.raises(ProtocolError, match="was asked to advertise and would share: each is done once"):
        client.advertise()
    deliveries = fleet.server.deliver(fleet.shares(roster))
    with pytest.raises(ProtocolError, match="was asked to share and would mask"):
        client.share(roster)
    survivors = fleet.server.survivors(fleet.mask(deliveries))
    with pytest.raises(ProtocolError, match="was asked to mask and would agree"):
        client.mask(deliveries[VICTIM], fleet.values(VICTIM), 1)
    agreed = fleet.server.agreed(fleet.agree(survivors))
    with pytest.raises(ProtocolError, match="was asked to agree and would reveal"):
        client.agree(replace(survivors, survivors=survivors.survivors[:4]))
    fleet.reveal(agreed)
    with pytest.raises(ProtocolError, match="was asked to reveal and would nothing more"):
        client.reveal(agreed)


def test_two_rosters_in_parallel() -> None:
    """Half of the clients are given one roster and half another: neither half opens a share of the other."""
    fleet = Fleet.made()
    whole = fleet.roster()
    less = replace(whole, members=whole.members[:5], threshold=3)
    made = {name: client.share(whole if name in OTHERS[2:] else less) for name, client in fleet.clients.items()}
    assert {made[name].binding for name in OTHERS[2:]} == {whole.binding}
    half = {name: made[name] for name in (VICTIM, *OTHERS[:2])}
    mixed = {name: shares for name, shares in made.items() if name in less.names}
    for name in half:
        with pytest.raises(ProtocolError, match="a message for another roster"):
            fleet.clients[name].mask(Delivery(ROUND, whole.binding, {}, {}, {}), fleet.values(name), 1)
        told = Delivery(  # the server says that all shares are for this roster
            ROUND,
            less.binding,
            {other: shares.sealed[name] for other, shares in mixed.items() if other != name},
            {other: shares.digests[name] for other, shares in mixed.items() if other != name},
            {other: shares.signature for other, shares in mixed.items() if other != name},
        )
        with pytest.raises(ProtocolError, match="has not signed this roster"):
            fleet.clients[name].mask(told, fleet.values(name), 1)
        fleet.clients[name]._check_joined = lambda roster, delivery: None  # and a client that does not look
        fleet.clients[name].mask(told, fleet.values(name), 1)
        assert set(fleet.clients[name]._held) == set(half)


# Shares


@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: sealed[:-1],
        lambda sealed: b"",
        lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:],
        lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 128]),
    ],
    ids=["truncated", "empty", "tampered", "its tag"],
)
def test_a_share_that_was_changed_on_its_way_is_not_used(change: object) -> None:
    fleet = Fleet.made()
    deliveries = fleet.deliveries()
    for name in OTHERS:
        sealed = dict(deliveries[name].sealed)
        sealed[VICTIM] = change(sealed[VICTIM])  # type: ignore[operator]
        fleet.clients[name].mask(replace(deliveries[name], sealed=sealed), fleet.values(name), 1)
        assert set(fleet.clients[name]._held) == set(OTHERS)


def test_shares_of_another_round() -> None:
    """The same people a round before: other keys, so nothing opens; swapped within a round nothing opens either."""
    identities = {name: SigningKey() for name in names(6)}
    old = Fleet.made(identities=identities).deliveries()
    new = Fleet.made(identities=identities, round=ROUND + 1)
    deliveries = new.deliveries()
    first, second, third = OTHERS[:3]
    new.clients[first].mask(
        replace(deliveries[first], sealed=old[first].sealed, digests=old[first].digests), new.values(first), 1
    )
    assert set(new.clients[first]._held) == {first}
    swapped = {**deliveries[second].sealed, VICTIM: deliveries[third].sealed[VICTIM]}
    new.clients[second].mask(replace(deliveries[second], sealed=swapped), new.values(second), 1)
    assert set(new.clients[second]._held) == {second, *set(names(6)) - {VICTIM, second}}


def test_shares_of_strangers_or_without_digests() -> None:
    fleet = Fleet.made()
    delivery = fleet.deliveries()[VICTIM]
    stranger = replace(delivery, sealed={**delivery.sealed, "mallory": bytes(48)})
    with pytest.raises(ProtocolError, match="shares of 'mallory', who is not in the roster"):
        fleet.clients[VICTIM].mask(stranger, fleet.values(VICTIM), 1)
    own = replace(delivery, sealed={**delivery.sealed, VICTIM: bytes(48)})
    with pytest.raises(ProtocolError, match="shares of 'client-00', who is not in the roster"):
        fleet.clients[VICTIM].mask(own, fleet.values(VICTIM), 1)
    for missing in ("digests", "signatures"):
        with pytest.raises(ProtocolError, match="shares without their digests or signatures"):
            fleet.clients[VICTIM].mask(replace(delivery, **{missing: {}}), fleet.values(VICTIM), 1)


def test_different_sharers_for_different_clients() -> None:
    """The masks of a pair are those of a list of sharers: with two lists they do not cancel, and nobody signs."""
    fleet = Fleet.made()
    deliveries = fleet.deliveries()
    last = OTHERS[-1]
    for name in OTHERS[2:-1]:
        told = deliveries[name]
        deliveries[name] = replace(
            told,
            sealed={other: each for other, each in told.sealed.items() if other != last},
            digests={other: each for other, each in told.digests.items() if other != last},
            signatures={other: each for other, each in told.signatures.items() if other != last},
        )
    fleet.mask(deliveries)
    everybody = Survivors(ROUND, deliveries[VICTIM].binding, tuple(names(6)), tuple(names(6)))
    fewer = replace(everybody, sharers=tuple(names(5)), survivors=tuple(names(5)))
    assert {name: _signs(fleet, name, everybody) for name in OTHERS[2:-1]} == dict.fromkeys(OTHERS[2:-1], False)
    assert not _signs(fleet, VICTIM, fewer)
    # Even whoever knew every client's own mask would have noise, for each pair of the two halves.
    own = {name: client._own_mask for name, client in fleet.clients.items()}
    half = [VICTIM, *OTHERS[:2], last]
    assert not np.array_equal(_without_own_masks(fleet, names(6), own), fleet.clear_sum(names(6)))
    assert not np.array_equal(_without_own_masks(fleet, half, own), fleet.clear_sum(half))


def _signs(fleet: Fleet, name: str, survivors: Survivors) -> bool:
    try:
        fleet.clients[name].agree(survivors)
    except ProtocolError:
        return False
    return True


def _without_own_masks(fleet: Fleet, some: list[str], own: dict[str, bytes]) -> np.ndarray:
    quantizer, total = Quantizer(BOUND, len(fleet.clients)), np.zeros(LENGTH + 1, dtype=np.uint32)
    for name in some:
        total += unpacked(fleet.masked[name].packed, quantizer.bits, LENGTH + 1)
    bindings = {name: fleet.masked[name].binding for name in some}
    add_masks(total, minus=[derive(own[name], b"own mask", bindings[name], name.encode()) for name in some])
    return quantizer.values(total[:-1])


def test_without_own_masks_is_the_sum_where_all_is_honest() -> None:
    """The helper of the tests around it can find a sum where there is one."""
    fleet = Fleet.made()
    fleet.survivors()
    own = {name: client._own_mask for name, client in fleet.clients.items()}
    assert np.array_equal(_without_own_masks(fleet, names(6), own), fleet.clear_sum(names(6)))


# Survivors


def test_lists_of_survivors_that_cannot_be() -> None:
    fleet = Fleet.made(config=easy_config(min_cohort=5))
    survivors = fleet.survivors()
    client = fleet.clients[VICTIM]
    for listed, reason in (
        (OTHERS, "a list of survivors that cannot be"),
        ([VICTIM] * 6, "a list of survivors that cannot be"),
        ([VICTIM, *OTHERS, "mallory"], "a list of survivors that cannot be"),
        ([VICTIM], "a sum of 1 clients would be shown, and 5 are the fewest"),
        ([VICTIM, *OTHERS[:3]], "a sum of 4 clients would be shown, and 5 are the fewest"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            client.agree(replace(survivors, survivors=tuple(listed)))
    with pytest.raises(ProtocolError, match="a list of survivors that cannot be"):
        client.agree(replace(survivors, sharers=survivors.sharers[:-1], survivors=survivors.survivors[:-1]))
    client.agree(survivors)


def test_too_few_sharers() -> None:
    fleet = Fleet.made()
    delivery = fleet.deliveries()[VICTIM]
    few = replace(
        delivery,
        sealed={name: delivery.sealed[name] for name in OTHERS[:2]},
        digests={name: delivery.digests[name] for name in OTHERS[:2]},
        signatures={name: delivery.signatures[name] for name in OTHERS[:2]},
    )
    with pytest.raises(ProtocolError, match="only 3 clients have sent shares"):
        fleet.clients[VICTIM].mask(few, fleet.values(VICTIM), 1)


def test_signatures_of_others_and_under_other_lists_do_not_count() -> None:
    fleet = Fleet.made()
    survivors = fleet.survivors()
    signatures = {name: decode_message(Agreement, answer).signature for name, answer in fleet.agree(survivors).items()}
    client, binding = fleet.clients[VICTIM], survivors.binding
    one = signatures[OTHERS[0]]
    other = fleet.clients[OTHERS[1]].identity.sign(*replace(survivors, survivors=tuple(OTHERS)).statement)
    for given, count in (
        (dict.fromkeys(names(6), one), 1),
        ({name: signatures[name] for name in names(3)}, 3),
        ({**{name: signatures[name] for name in (VICTIM, OTHERS[0], OTHERS[2])}, OTHERS[1]: other}, 3),
        ({f"ghost-{number}": one for number in range(6)}, 0),
        ({}, 0),
    ):
        with pytest.raises(ProtocolError, match=f"{count} clients have signed who is in the sum, and 4 must"):
            client.reveal(Agreed(ROUND, binding, given))
    client.reveal(Agreed(ROUND, binding, {name: signatures[name] for name in names(4)}))


def test_one_client_never_gives_both_shares_of_anybody() -> None:
    """It gives one share of each, and a list with the others is not answered any more."""
    fleet = Fleet.made()
    agreed = fleet.agreed(without=[OTHERS[-1]])
    held = {name: dict(fleet.clients[name]._held) for name in fleet.clients}
    for name, answer in fleet.reveal(agreed).items():
        shares = decode_message(Reveal, answer).shares
        assert set(shares) == set(names(6))
        for owner, share in shares.items():
            dropped = owner == OTHERS[-1]
            assert share == (held[name][owner][:SEED] if dropped else held[name][owner][SEED:])
        with pytest.raises(ProtocolError, match="was asked to reveal and would nothing more"):
            fleet.clients[name].reveal(agreed)
        assert fleet.clients[name]._held == {}


# Two lists of survivors: one half of the clients is asked for one secret of the victim, the other half for the other


def test_two_lists_never_both_have_enough_signatures() -> None:
    """Honest clients sign one list, colluders sign both: n - c + 2 c signatures are fewer than 2 t."""
    for colluding in [Fraction(part, 12) for part in range(12)]:
        config = SecAggConfig(clip=1.0, min_cohort=3, colluding=float(colluding))
        for count in range(3, 65):
            colluders, threshold = config.colluders(count), config.threshold(count)
            assert colluders == int(colluding * count)
            assert count + colluders < 2 * threshold
            assert colluders < threshold <= count
            assert 2 * (threshold - 1) <= count + colluders  # and no higher than it must be


class Lowered(SecAggConfig):
    """A mutant that signs away the rule 2 t > n + c."""

    def threshold(self, count: int) -> int:
        return count // 2


def split(fleet: Fleet, colluders: list[str]) -> list[tuple[int, dict[str, Reveal]]]:
    """The server shows each half of the honest clients another list: how many sign it, and what its half reveals."""
    deliveries = fleet.deliveries()
    fleet.mask(deliveries)
    binding, everybody = deliveries[VICTIM].binding, tuple(names(6))
    lists = (
        Survivors(ROUND, binding, everybody, everybody),
        Survivors(ROUND, binding, everybody, tuple(OTHERS)),
    )
    honest = [name for name in OTHERS if name not in colluders]
    found = []
    for survivors, half in zip(lists, ([VICTIM, honest[0]], honest[1:]), strict=True):
        signatures = {name: fleet.clients[name].agree(survivors).signature for name in half}
        for name in colluders:
            signatures[name] = fleet.clients[name].identity.sign(*survivors.statement)
        reveals = {}
        for name in half:
            with suppress(ProtocolError):
                reveals[name] = fleet.clients[name].reveal(Agreed(ROUND, binding, signatures))
        found.append((len(signatures), reveals))
    return found


def test_split_over_the_clients_with_colluders() -> None:
    fleet = Fleet.made(config=easy_config(colluding=1 / 3))
    assert (fleet.server.config.threshold(6), fleet.server.config.colluders(6)) == (5, 2)
    assert [(count, len(reveals)) for count, reveals in split(fleet, OTHERS[-2:])] == [(4, 0), (4, 0)]


def test_split_over_the_clients_breaks_a_lower_threshold() -> None:
    """The mutant: with t = n / 2 the same server has both secrets of the victim, and reads its update."""
    fleet = Fleet.made(config=Lowered(clip=BOUND, min_cohort=3, colluding=1 / 3))
    colluders = OTHERS[-2:]
    fleet_secrets: dict[str, dict[int, bytes]] = {"own": {}, "key": {}}
    number = {name: place for place, name in enumerate(names(6), start=1)}
    (first, own), (second, key) = split(fleet, colluders)
    assert first == second == 4 >= fleet.server.config.threshold(6)
    for kind, reveals in (("own", own), ("key", key)):
        assert len(reveals) == 2
        for name, reveal in reveals.items():
            fleet_secrets[kind][number[name]] = reveal.shares[VICTIM]
    for name in colluders:
        pair = fleet.clients[name]._held[VICTIM]
        fleet_secrets["own"][number[name]], fleet_secrets["key"][number[name]] = pair[SEED:], pair[:SEED]
    roster = fleet.server._given()
    found = {kind: combined([shares], 3)[0] for kind, shares in fleet_secrets.items()}
    words = unpacked(fleet.masked[VICTIM].packed, Quantizer(BOUND, 6).bits, LENGTH + 1)
    seen = unmasked(words, roster, tuple(names(6)), VICTIM, found["own"], found["key"])
    assert np.array_equal(seen, fleet.values(VICTIM))


# Different broadcasts


class Careless(ClientRound):
    """A mutant that takes any roster, whoever has signed it."""

    def _check_joined(self, roster: Roster, delivery: Delivery) -> None: ...

    def _problems(self, roster: Roster) -> list[str]:
        super()._problems(roster)
        for member in roster.members:
            if member.name != self.name:
                self._secrets[member.name] = (
                    self._share_keys.agree(member.share_key),
                    self._mask_keys.agree(member.mask_key),
                )
        return []


HALF = {name: bytes([9]) * 32 for name in names(6)[3:]}


def two_broadcasts(kind: type[ClientRound] = ClientRound) -> tuple[Fleet, Roster]:
    """All six in one roster, whatever they were sent: the server passes over its own checks."""
    fleet = Fleet.made(kind=kind, broadcasts=HALF)
    adverts = {name: client.advertise() for name, client in fleet.clients.items()}
    honest = Fleet.made()
    fleet.server._adverts = adverts
    return fleet, replace(honest.roster(), members=tuple(adverts[name].member for name in names(6)))


def test_clients_that_were_sent_different_models_refuse_each_other() -> None:
    fleet, roster = two_broadcasts()
    for name, client in fleet.clients.items():
        told = replace(roster, broadcast=client.broadcast)
        with pytest.raises(ProtocolError) as error:
            client.share(told)
        strangers = set(names(6)) - set(HALF) if name in HALF else set(HALF)
        for other in names(6):
            assert (f"'{other}' has not signed its keys for this round" in str(error.value)) == (other in strangers)
    honest = Fleet.made(broadcasts=HALF)
    roster = honest.roster()
    assert set(roster.names) == set(names(6)) - set(HALF)  # an honest server leaves out who answers something else
    assert honest.server.refused == dict.fromkeys(HALF, "answers another broadcast")


@pytest.mark.parametrize("one_roster", [True, False])
def test_different_models_give_noise_even_where_nobody_checks(one_roster: bool) -> None:
    """Masks are bound to what a client was sent itself: those between the halves do not cancel."""
    fleet, roster = two_broadcasts(Careless)
    made: dict[str, Shares] = {}
    for name, client in fleet.clients.items():
        made[name] = client.share(roster if one_roster else replace(roster, broadcast=client.broadcast))
    for name, client in fleet.clients.items():
        delivery = Delivery(
            ROUND,
            made[name].binding,
            {other: shares.sealed[name] for other, shares in made.items() if other != name},
            {other: shares.digests[name] for other, shares in made.items() if other != name},
            {other: shares.signature for other, shares in made.items() if other != name},
        )
        fleet.masked[name] = client.mask(delivery, fleet.values(name), 1)
        half = set(HALF) if name in HALF else set(names(6)) - set(HALF)
        assert set(client._held) == half  # nothing of the other half can be opened
    own = {name: client._own_mask for name, client in fleet.clients.items()}
    noise = _without_own_masks(fleet, names(6), own)
    assert (noise != fleet.clear_sum(names(6))).sum() >= LENGTH - 1  # one word in 2^19 is right by chance
    for half in (names(3), names(6)[3:]):
        assert (_without_own_masks(fleet, half, own) != fleet.clear_sum(half)).sum() >= LENGTH - 1
