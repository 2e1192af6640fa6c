"""Sums over several rounds: which groups may add up again, and servers that try to combine sums."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import dbcl
from dbcl.errors import ProtocolError
from dbcl.protocol.secagg import (
    GroupRound,
    Registry,
    SecAggConfig,
    SecureClient,
    SecureRounds,
    SigningKey,
    SumHistory,
    WeightedMean,
    decode_message,
    encode_message,
)
from dbcl.protocol.secagg.messages import Delivery, Shares
from dbcl.protocol.secagg.quantizer import LEVELS, Quantizer
from dbcl.protocol.secagg.vectors import broadcast_digest, vector_length
from dbcl.state import State

NAMES = [f"client {number}" for number in range(6)]
CONFIG = SecAggConfig(clip=1.0, min_cohort=3, colluding=0.0)


@settings(max_examples=150, deadline=None)
@given(some.lists(some.lists(some.sampled_from(NAMES), min_size=1, unique=True), min_size=1, max_size=6))
def test_combinations_of_the_sums_show_nothing_but_these_sums(lists: list[list[str]]) -> None:
    """The groups that were let through are disjoint: a client can only be seen alone where it was a group."""
    history = SumHistory()
    groups: list[set[str]] = []
    for names in lists:
        try:
            history.add(names)
        except ProtocolError:
            assert any(set(names) & group and set(names) != group for group in groups)
            continue
        groups.append(set(names))
    assert all(one == other or not one & other for one in groups for other in groups)
    again = SumHistory()
    again.load_state(history.state())
    assert again.state() == history.state()


@pytest.mark.parametrize(
    "values", [{}, {"groups": 3}, {"groups": [["ann", 4]]}, {"groups": [[""]]}, {"groups": [["a", "b"], ["b", "c"]]}]
)
def test_a_damaged_state_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=r"in a sum together|is not revealed"):
        SumHistory().load_state(State(values, {}))


class Forgets(SumHistory):
    """A mutant that lets everything through."""

    def check_isolation(self, names: object) -> None: ...

    def add(self, names: object) -> None: ...


class Forgetful(SecureClient):
    """A mutant that is in any roster, and signs any list."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rule.history = Forgets()  # type: ignore[attr-defined]

    def _check_roster(self, roster: object) -> None: ...


class SignsOne(SecureClient):
    """A mutant that is in any roster, and signs one list only."""

    def _check_roster(self, roster: object) -> None: ...


class Fleet:
    """Clients that remember, and whatever server somebody makes of them."""

    def __init__(self, names: list[str], *, kind: type[SecureClient] = SecureClient) -> None:
        identities = {name: SigningKey() for name in names}
        known = Registry({name: own.public for name, own in identities.items()})
        self.clients = {name: kind(name, own, CONFIG, known) for name, own in identities.items()}
        self.model = nn.Linear(4, 2)
        self.server = dbcl.Server(self.model, dbcl.SketchConfig(coverage="all", veil=0.0, lanes=1), steady_lanes=True)
        self.rounds = SecureRounds(self.server, CONFIG)
        self.refusals: list[str] = []

    def begin(self, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        answers = {}
        for place, (name, data) in enumerate(sent.items()):
            broadcast = dbcl.protocol.decode_broadcast(data)
            change = {key: torch.full_like(tensor, 0.01 + place / 1000) for key, tensor in broadcast.tensors.items()}
            update = dbcl.Update(broadcast.round, broadcast.plan.digest, change, 1)
            try:
                answers[name] = self.clients[name].begin(broadcast, update)
            except ProtocolError as error:
                self.refusals.append(str(error))
        return answers

    def ask(self, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            try:
                answers[name] = self.clients[name].answer(data)
            except ProtocolError as error:
                self.refusals.append(str(error))
        return answers

    def play(self, names: list[str]) -> dbcl.RoundReport:
        self.refusals.clear()
        return self.rounds.play(names, self.begin, self.ask)

    def forget(self) -> None:
        """Let the server forget which groups it has formed and which have added up."""
        self.rounds = SecureRounds(self.server, CONFIG)


@pytest.mark.parametrize("kind", [SecureClient, Forgetful])
def test_a_sum_without_one_client_is_not_made(kind: type[SecureClient]) -> None:
    fleet = Fleet(NAMES, kind=kind)
    assert fleet.play(NAMES).accepted == 6
    before = fleet.model.weight.detach().clone()
    fleet.forget()
    if kind is Forgetful:  # the difference of the two sums is one client's update
        assert fleet.play(NAMES[1:]).accepted == 5
        return
    with pytest.raises(ProtocolError, match="no sum could be made"):
        fleet.play(NAMES[1:])
    assert len(fleet.refusals) == 5
    assert all("without client 0, who was in the group before" in refusal for refusal in fleet.refusals)
    assert torch.equal(fleet.model.weight, before)
    fleet.forget()
    assert fleet.play(NAMES).accepted == 6  # all of them are back


@pytest.mark.parametrize("kind", [SecureClient, Forgetful])
def test_four_groups_that_show_one_client(kind: type[SecureClient]) -> None:
    """(A1 + A2 + v) - (A1 + B1) - (A2 + B2) + (B1 + B2) = v, where no two groups differ by one client."""
    a1, a2, b1, b2 = ([f"{part}{number}" for number in range(3)] for part in ("a", "b", "c", "d"))
    fleet, sums = Fleet([*a1, *a2, *b1, *b2, "victim"], kind=kind), []
    for names in ([*a1, *a2, "victim"], [*a1, *b1], [*a2, *b2], [*b1, *b2]):
        fleet.forget()
        try:
            fleet.play(names)
        except ProtocolError:
            continue
        sums.append(fleet.rounds.totals[0][1].members)
    if kind is Forgetful:
        assert len(sums) == 4
        return
    assert sums == [tuple(sorted([*a1, *a2, "victim"])), tuple(sorted([*b1, *b2]))]  # which have nobody in common


def test_a_client_is_in_no_second_group_that_others_sign() -> None:
    """A sum has what all survivors sent, and a threshold of them signs it: the others may be of another group.

    (S1 + X1) - (S2 + X2) is a difference of two clients, where all of S1 but one are X2 and all of S2 but one are X1.
    """
    for kind in (SecureClient, SignsOne):
        fleet, sums = Fleet(NAMES, kind=kind), []
        for signers, others in (([0, 1, 2], [3, 4]), ([3, 4, 5], [0, 1])):
            names, deaf = [NAMES[place] for place in (*signers, *others)], {NAMES[place] for place in others}
            steps = iter(("roster", "delivery", "survivors", "agreed"))

            def ask(
                sent: Mapping[str, bytes],
                fleet: Fleet = fleet,
                steps: Iterator[str] = steps,
                deaf: Collection[str] = deaf,
            ) -> dict[str, bytes]:
                told = deaf if next(steps) == "survivors" else ()
                return fleet.ask({name: data for name, data in sent.items() if name not in told})

            fleet.forget()
            with suppress(ProtocolError):
                fleet.rounds.play(names, fleet.begin, ask)
                sums.append(set(fleet.rounds.totals[0][1].members))
        if kind is SignsOne:
            assert sums[0] ^ sums[1] == {"client 2", "client 5"}
            continue
        assert sums == [set(NAMES[:5])]
        assert sum("in the group before" in refusal for refusal in fleet.refusals) == 2  # they have signed
        assert sum("may be in its sum" in refusal for refusal in fleet.refusals) == 2  # they have not


def test_a_group_that_was_asked_for_masked_updates_goes_on_as_it_is() -> None:
    """Of six clients one gave no keys and two were lost later: five add up when they are back, without the sixth."""
    fleet = Fleet(NAMES)
    lost: set[str] = set()
    steps = iter(("roster", "delivery", "survivors"))

    def begin(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        return fleet.begin({name: data for name, data in sent.items() if name != NAMES[0]})

    def ask(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        lost.update(NAMES[1:3] if next(steps) == "delivery" else ())
        return fleet.ask({name: data for name, data in sent.items() if name not in lost})

    with pytest.raises(ProtocolError, match="no sum could be made"):
        fleet.rounds.play(NAMES, begin, ask)
    state = fleet.rounds.state()
    fleet.forget()  # another process goes on
    fleet.rounds.load_state(state)
    assert fleet.play(NAMES).accepted == 5
    assert fleet.play(NAMES).accepted == 5
    for name, client in fleet.clients.items():
        again = SecureClient(name, client.identity, CONFIG, client.registry)
        again.load_state(client.state())
        assert again.state().values == client.state().values


def test_rounds_never_go_back_and_have_one_broadcast() -> None:
    fleet = Fleet(NAMES)
    first = fleet.server.open_round(NAMES[0])
    fleet.play(NAMES)
    fleet.play(NAMES)
    client = fleet.clients[NAMES[0]]
    with pytest.raises(ProtocolError, match="answers no earlier one, got round 0"):
        client.check(first)
    second = fleet.server.open_round(NAMES[0])
    client.begin(second, dbcl.Update(2, second.plan.digest, second.tensors, 1))
    client.check(second)  # a round may begin anew
    other = dbcl.Broadcast(second.plan, {name: tensor + 1 for name, tensor in second.tensors.items()})
    with pytest.raises(ProtocolError, match="another broadcast of round 2"):
        client.check(other)
    again = SecureClient(client.name, client.identity, CONFIG, client.registry)
    again.load_state(client.state())
    for broadcast in (first, other):
        with pytest.raises(ProtocolError, match=r"earlier|another broadcast"):
            again.check(broadcast)


class Trusting(SecureClient):
    """A mutant that does not look whether the others have signed the roster of this attempt."""

    def answer(self, data: bytes) -> bytes:
        if self._round is not None:
            self._round._check_joined = lambda roster, delivery: None  # type: ignore[method-assign]
        return super().answer(data)


@pytest.mark.parametrize("trusting", [False, True])
def test_keys_are_not_replayed_from_another_attempt(trusting: bool) -> None:
    """Keys of an earlier attempt would make a second sum: without a client that is in the first, or with dead ones."""
    fleet = Fleet(NAMES)
    if trusting:
        for name, client in fleet.clients.items():
            fleet.clients[name] = Trusting(name, client.identity, CONFIG, client.registry)
    sent = {name: dbcl.encode(fleet.server.open_round(name)) for name in NAMES}
    old = fleet.begin(sent)  # the first attempt ends here; its keys are kept
    alive, dead = NAMES[:4], NAMES[4:]
    new = fleet.begin({name: sent[name] for name in alive})
    mixed = {**{name: old[name] for name in dead}, **new}
    broadcast = fleet.server.open_round(NAMES[0])
    digests = broadcast_digest(broadcast), bytes.fromhex(broadcast.plan.digest)
    group = GroupRound(0, *digests, vector_length(broadcast.plan), CONFIG)
    roster = group.roster(mixed)
    assert set(roster.names) == set(NAMES)
    shares = {name: decode_message(Shares, fleet.clients[name].answer(encode_message(roster))) for name in alive}
    # The server speaks for the two dead ones: it has their old keys, and makes shares in their names.
    forged = shares[alive[0]]
    for name in dead:
        shares[name] = Shares(
            0, roster.binding, forged.commitment, bytes(64), dict.fromkeys(set(NAMES) - {name}, bytes(48)),
            dict.fromkeys(NAMES, bytes(64)),
        )  # fmt: skip
    answers, refusals = [], []
    for name in alive:
        others = {other: each for other, each in shares.items() if other != name}
        delivery = Delivery(
            0,
            roster.binding,
            {other: each.sealed[name] for other, each in others.items()},
            {other: each.digests[name] for other, each in others.items()},
            {other: each.signature for other, each in others.items()},
        )
        try:
            answers.append(fleet.clients[name].answer(encode_message(delivery)))
        except ProtocolError as error:
            refusals.append(str(error))
    if trusting:
        assert len(answers) == 4
        return
    assert answers == []
    assert all("has not signed this roster: its keys are of another attempt" in refusal for refusal in refusals)


def test_a_bad_client_moves_the_sum_by_its_own_share_and_no_honest_one_by_more() -> None:
    """The parked coordinate: next to the fold, one step of an honest client moves the decoded sum by one step."""
    clients = 5
    quantizer, encoding = Quantizer(clip=1.0, clients=clients), WeightedMean(SecAggConfig(clip=1.0))
    honest = np.linspace(-1, 1, 41)
    for parked in [*range(0, 1 << quantizer.bits, 997), *(1 << (quantizer.bits - 1) - shift for shift in range(3))]:
        words = np.array([parked], dtype=np.uint32)
        decoded = [
            encoding.total(
                np.append(words + quantizer.quantized(np.array([value]), np.random.default_rng(0)), np.uint32(LEVELS)),
                clients,
                ("ann", "bob"),
            ).values[0]
            for value in honest
        ]
        assert np.abs(np.diff(decoded)).max() <= (honest[1] - honest[0]) + 2 * quantizer.step
        assert np.abs(decoded).max() <= 2 * quantizer.longest(1) * (1 + 1e-8)
