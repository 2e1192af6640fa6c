"""Clients that send nonsense: what the server does with it, and whom it names."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg import SigningKey, client
from dbcl.protocol.secagg.keys import KeyPair
from dbcl.protocol.secagg.messages import (
    Advert,
    Agreement,
    Masked,
    Message,
    Reveal,
    Roster,
    Shares,
    decode_message,
    encode_message,
)
from dbcl.protocol.secagg.quantizer import LEVELS, Quantizer
from dbcl.protocol.secagg.statements import advertised, committed
from protocol.secagg.conftest import BOUND, BROADCAST, LENGTH, ROUND, Fleet, carried, easy_config, names

BAD, *GOOD = names(7)
SETTINGS = {"colluding": 0.3}  # of 7: 2 colluders, 5 must help


def fleet_of(count: int = 7) -> Fleet:
    return Fleet.made(count, easy_config(**SETTINGS))


def changed(kind: type[Message], answers: dict[str, bytes], name: str, change: Callable[..., Message]) -> None:
    answers[name] = encode_message(change(decode_message(kind, answers[name])))


# Keys


def advert(name: str, identity: SigningKey, share_key: bytes, mask_key: bytes) -> bytes:
    signature = identity.sign(*advertised(ROUND, BROADCAST, name, share_key, mask_key))
    return encode_message(Advert(ROUND, BROADCAST, name, identity.public, share_key, mask_key, signature))


def test_bad_keys_are_left_out_with_a_reason_and_the_others_go_on() -> None:
    """Clients would refuse the whole roster for one of these: the server must not let it come to that."""
    identity, key = SigningKey(), KeyPair().public
    for data, reason in (
        (advert(BAD, identity, bytes(32), key), "a public key that no honest client has"),
        (advert(BAD, identity, key, key), f"has a key that stands twice: of {BAD}, {BAD}"),
        (advert(GOOD[0], identity, key, KeyPair().public), "has not signed its keys"),
        (encode_message(replace(decode_message(Advert, advert(BAD, identity, key, key)), signature=bytes(64))),
         "has not signed its keys"),
        (b"DBCL", "advert: cut short, only 4 bytes long"),
    ):  # fmt: skip
        fleet = fleet_of()
        answers = {**fleet.adverts(), BAD: data}
        roster = fleet.server.roster(answers)
        assert roster.names == tuple(GOOD)
        assert fleet.server.refused == {BAD: reason}
        for name in GOOD:
            fleet.clients[name].share(carried(roster))


def test_a_copied_key_leaves_out_both() -> None:
    fleet = fleet_of()
    answers = fleet.adverts()
    honest = decode_message(Advert, answers[GOOD[0]])
    answers[BAD] = advert(BAD, SigningKey(), honest.share_key, KeyPair().public)
    assert fleet.server.roster(answers).names == tuple(GOOD[1:])
    assert set(fleet.server.refused) == {BAD, GOOD[0]}


def test_strangers_are_left_out_where_there_is_a_registry() -> None:
    fleet = Fleet.made(7, easy_config(**SETTINGS), registry=True)
    answers = fleet.adverts()
    answers["mallory"] = advert("mallory", SigningKey(), KeyPair().public, KeyPair().public)
    answers[BAD] = advert(BAD, SigningKey(), KeyPair().public, KeyPair().public)
    assert fleet.server.roster(answers).names == tuple(GOOD)
    assert fleet.server.refused == {
        "mallory": "no client is known as 'mallory'",
        BAD: f"'{BAD}' is known by another key",
    }


# Shares


def honest_until_the_end(fleet: Fleet, roster: Roster, answers: dict[str, bytes]) -> tuple[dict[str, bytes], set[str]]:
    """Play on from the shares: all reveals, and whose updates are in the sum."""
    deliveries = fleet.server.deliver(answers)
    survivors = fleet.server.survivors(fleet.mask({name: carried(each) for name, each in deliveries.items()}))
    agreed = fleet.server.agreed(fleet.agree(carried(survivors)))
    return fleet.reveal(carried(agreed)), set(survivors.survivors)


def garbage_for(fleet: Fleet, count: int) -> Callable[[Shares], Shares]:
    def change(shares: Shares) -> Shares:
        return replace(shares, sealed={**shares.sealed, **dict.fromkeys(GOOD[:count], bytes(48))})

    return change


@pytest.mark.parametrize("count", [1, 2])
def test_sealed_garbage_for_a_few_does_no_harm(count: int) -> None:
    fleet = fleet_of()
    roster = fleet.roster()
    answers = fleet.shares(roster)
    changed(Shares, answers, BAD, garbage_for(fleet, count))
    reveals, counted = honest_until_the_end(fleet, roster, answers)
    total = fleet.server.total(reveals)
    assert counted == set(names(7))
    assert np.array_equal(total.values, fleet.clear_sum(names(7)))


@pytest.mark.parametrize("count", [3, 6])
def test_sealed_garbage_for_many_fails_and_names_its_maker(count: int) -> None:
    """More than may collude could not open it: its maker is left out, and the round can begin anew without it."""
    fleet = fleet_of()
    roster = fleet.roster()
    answers = fleet.shares(roster)
    changed(Shares, answers, BAD, garbage_for(fleet, count))
    reveals, _ = honest_until_the_end(fleet, roster, answers)
    with pytest.raises(ProtocolError, match=f"the mask of {BAD} stays on: {7 - count} shares, and 5 are needed"):
        fleet.server.total(reveals)
    assert list(fleet.server.refused) == [BAD]
    again = Fleet.made(identities={name: fleet.clients[name].identity for name in GOOD}, config=easy_config(**SETTINGS))
    assert np.array_equal(again.play().values, again.clear_sum(GOOD))


def test_a_bad_commitment_names_its_maker() -> None:
    fleet = fleet_of()
    roster = fleet.roster()
    answers = fleet.shares(roster)
    changed(Shares, answers, BAD, lambda shares: replace(shares, commitment=bytes(32)))
    reveals, _ = honest_until_the_end(fleet, roster, answers)
    with pytest.raises(
        ProtocolError, match=f"the mask of {BAD} stays on: its shares do not give what it has committed"
    ):
        fleet.server.total(reveals)
    assert list(fleet.server.refused) == [BAD]


def test_shares_of_no_polynomial_name_their_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests that fit, and shares that belong to nothing."""
    fleet = fleet_of()
    roster = fleet.roster()
    bad = fleet.clients[BAD]
    honest = client.split
    with monkeypatch.context() as patch:
        patch.setattr(client, "split", lambda secret, threshold, count: honest(bytes(16), threshold, count))
        wrong = encode_message(bad.share(roster))
    answers = {**fleet.shares(roster, without=[BAD]), BAD: wrong}
    reveals, _ = honest_until_the_end(fleet, roster, answers)
    with pytest.raises(ProtocolError, match=f"the mask of {BAD} stays on: its shares do not give"):
        fleet.server.total(reveals)
    assert list(fleet.server.refused) == [BAD]


def test_another_digest_than_that_of_the_share_is_as_good_as_no_share() -> None:
    """Else its maker could make an honest client look like a liar."""
    fleet = fleet_of()
    roster = fleet.roster()
    answers = fleet.shares(roster)
    changed(Shares, answers, BAD, lambda own: replace(own, digests={**own.digests, GOOD[0]: bytes(64)}))
    reveals, _ = honest_until_the_end(fleet, roster, answers)
    assert BAD not in decode_message(Reveal, reveals[GOOD[0]]).shares
    assert np.array_equal(fleet.server.total(reveals).values, fleet.clear_sum(names(7)))
    assert fleet.server.refused == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: replace(own, sealed=dict(list(own.sealed.items())[1:])), "has not made a share for every other"),
        (lambda own: replace(own, sealed={**own.sealed, "mallory": bytes(48)}), "has not made a share for every other"),
        (lambda own: replace(own, digests={}), "has not told the digests of all its shares"),
        (lambda own: replace(own, signature=bytes(64)), "has not signed the roster"),
        (lambda own: replace(own, binding=bytes(32)), "answers another round or another roster"),
        (lambda own: replace(own, round=ROUND + 1), "answers another round or another roster"),
        (lambda own: Agreement(ROUND, own.binding, bytes(64)), "shares: expected, but these bytes are a agreement"),
    ],
)
def test_shares_that_are_refused(change: Callable[[Shares], Message], reason: str) -> None:
    fleet = fleet_of()
    roster = fleet.roster()
    answers = fleet.shares(roster)
    changed(Shares, answers, BAD, change)
    reveals, counted = honest_until_the_end(fleet, roster, answers)
    assert counted == set(GOOD)
    assert np.array_equal(fleet.server.total(reveals).values, fleet.clear_sum(GOOD))
    assert reason in fleet.server.refused[BAD]


# Reveals


def with_wrong_shares(fleet: Fleet, liars: list[str], *, dropped: Sequence[str] = ()) -> dict[str, bytes]:
    answers = fleet.reveal(fleet.agreed(without=dropped))
    for name in liars:
        changed(Reveal, answers, name, lambda own: replace(own, shares={each: bytes(16) for each in own.shares}))
    return answers


@pytest.mark.parametrize(
    ("liars", "dropped"), [([BAD], []), ([BAD, GOOD[2]], []), ([GOOD[-1]], []), ([BAD], [GOOD[-1]])]
)
def test_wrong_shares_are_passed_over_and_their_senders_are_named(liars: list[str], dropped: list[str]) -> None:
    fleet = fleet_of()
    total = fleet.server.total(with_wrong_shares(fleet, liars, dropped=dropped))
    assert np.array_equal(total.values, fleet.clear_sum(set(names(7)) - set(dropped)))
    for liar in liars:
        assert fleet.server.refused[liar] == f"gave another share of {BAD} than it was given"
    assert set(fleet.server.refused) == {*liars, *dropped}


def test_a_liar_with_the_first_number_in_a_large_group() -> None:
    """Trying sets of shares in their order, none of the first millions would be without the first client's."""
    fleet = Fleet.made(20, easy_config(colluding=0.3))
    total = fleet.server.total(with_wrong_shares(fleet, names(20)[:3]))
    assert np.array_equal(total.values, fleet.clear_sum(names(20)))
    assert set(fleet.server.refused) == set(names(20)[:3])


def test_too_many_wrong_shares_are_a_clean_refusal() -> None:
    fleet = fleet_of()
    liars = [BAD, *GOOD[:2]]
    with pytest.raises(ProtocolError, match="4 clients have helped to take the masks off, and 5 are needed") as error:
        fleet.server.total(with_wrong_shares(fleet, liars))
    assert all(f"{liar}: gave another share" in str(error.value) for liar in liars)
    assert set(fleet.server.refused) == set(liars)


def test_shares_kept_back_name_both_where_it_cannot_be_told() -> None:
    """Two of seven keep a share back and two are gone: the mask stays on, and nobody is accused of it."""
    fleet = fleet_of()
    answers = fleet.reveal(fleet.agreed())
    for name in GOOD[-2:]:
        del answers[name]
    for name in GOOD[:1]:
        changed(
            Reveal, answers, name,
            lambda own: replace(own, shares={each: share for each, share in own.shares.items() if each != BAD}),
        )  # fmt: skip
    with pytest.raises(ProtocolError, match=rf"mask of {BAD} stays on: 4 shares, and 5 .* \(none of {GOOD[0]}\)"):
        fleet.server.total(answers)
    assert set(fleet.server.refused) == set(GOOD[-2:])


# Updates and signatures


def test_random_words_instead_of_an_update_are_bounded_and_not_refused() -> None:
    """A sum of seven that is longer than seven updates can be: a refusal would tell of the other six."""
    fleet = fleet_of()
    fleet.server.length = 200
    fleet.numbers = {name: np.ones(200, dtype=np.int64) for name in names(7)}
    deliveries = fleet.deliveries()
    answers = fleet.mask(deliveries)
    words = np.random.default_rng(0).bytes(len(decode_message(Masked, answers[BAD]).packed))
    changed(Masked, answers, BAD, lambda own: replace(own, packed=words))
    survivors = fleet.server.survivors(answers)
    agreed = fleet.server.agreed(fleet.agree(survivors))
    total = fleet.server.total(fleet.reveal(agreed))
    quantizer = Quantizer(BOUND, 7)
    assert np.linalg.norm(total.values) == pytest.approx(7 * quantizer.longest(200), rel=1e-6)
    assert 7 / LEVELS <= total.weight <= 7


def test_a_masked_update_of_another_length_is_left_out() -> None:
    fleet = fleet_of()
    answers = fleet.mask(fleet.deliveries())
    changed(Masked, answers, BAD, lambda own: replace(own, packed=own.packed[:-1]))
    survivors = fleet.server.survivors(answers)
    total = fleet.server.total(fleet.reveal(fleet.server.agreed(fleet.agree(survivors))))
    assert np.array_equal(total.values, fleet.clear_sum(GOOD))
    assert "bytes are not" in fleet.server.refused[BAD]


def test_a_signature_under_something_else_does_not_count() -> None:
    fleet = fleet_of()
    survivors = fleet.survivors()
    answers = fleet.agree(survivors)
    changed(Agreement, answers, BAD, lambda own: replace(own, signature=fleet.clients[BAD].identity.sign(b"else")))
    agreed = fleet.server.agreed(answers)
    assert set(agreed.signatures) == set(GOOD)
    assert fleet.server.refused == {BAD: "has signed something else"}


# What a client refuses to send


@pytest.mark.parametrize(
    ("values", "examples", "reason"),
    [
        (np.full(LENGTH, np.nan), 1, "holds NaN or infinity"),
        (np.array([0.0, np.inf, 0.0, 0.0, 0.0]), 1, "holds NaN or infinity"),
        (np.full(LENGTH, 4.0), 1, "the update is 8.944 long, and the bound is 8"),
        (np.zeros(LENGTH), 0, "an update of 0 examples: nothing is sent"),
        (np.zeros(LENGTH), -3, "an update of -3 examples: nothing is sent"),
        (np.zeros(LENGTH + 1), 1, "values (6,), and the roster says 5"),
        (np.zeros((LENGTH, 1)), 1, "values (5, 1), and the roster says 5"),
    ],
)
def test_a_client_sends_no_update_that_is_none(values: np.ndarray, examples: int, reason: str) -> None:
    fleet = fleet_of()
    delivery = fleet.deliveries()[BAD]
    with pytest.raises(ProtocolError) as error:
        fleet.clients[BAD].mask(delivery, values, examples)
    assert reason in str(error.value)
    assert fleet.clients[BAD].next_step == "mask"


def test_the_commitment_is_to_one_roster_and_one_client() -> None:
    made = {committed(binding, name, bytes(16)) for binding in (bytes(32), bytes([1]) * 32) for name in ("ann", "bob")}
    assert len(made) == 4
