"""Who was in which sum: whom combinations of sums show alone, against brute force, and a server that wants to know."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import dbcl
from dbcl.errors import ProtocolError
from dbcl.protocol.secagg import Identity, Registry, Rosters, SecureClient, SecureRounds, Terms
from dbcl.state import State

NAMES = [f"client {number}" for number in range(6)]


def alone(lists: list[list[str]]) -> list[str]:
    """Whom some combination of the lists has alone, by elimination over fractions with nothing clever in it."""
    everybody = sorted({name for names in lists for name in names})
    shown = []
    for name in everybody:
        # e is a combination of the rows where it does not raise their rank.
        rows = [[Fraction(int(each in names)) for each in everybody] for names in lists]
        if rank([*rows, [Fraction(int(each == name)) for each in everybody]]) == rank(rows):
            shown.append(name)
    return shown


def rank(rows: list[list[Fraction]]) -> int:
    rows, found = [list(row) for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((number for number in range(found, len(rows)) if rows[number][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        for number in range(len(rows)):
            if number != found and rows[number][column]:
                factor = rows[number][column] / rows[found][column]
                rows[number] = [one - factor * other for one, other in zip(rows[number], rows[found], strict=True)]
        found += 1
    return found


@settings(max_examples=150, deadline=None)
@given(some.lists(some.lists(some.sampled_from(NAMES), min_size=1, unique=True), min_size=1, max_size=6))
def test_it_is_what_elimination_over_fractions_finds(lists: list[list[str]]) -> None:
    rosters = Rosters()
    for number, names in enumerate(lists):
        assert rosters.singled_out(names) == alone(lists[: number + 1])
        rosters.add(names)
    again = Rosters()
    again.load_state(rosters.state())
    for names in lists:
        assert again.singled_out(names) == rosters.singled_out(names) == alone(lists)


def test_longer_combinations_are_seen() -> None:
    """No two of these lists differ by one client; half of the first and the third less the second is ann's update."""
    rosters = Rosters()
    for names in (["ann", "bob"], ["bob", "cleo"]):
        assert rosters.singled_out(names) == []
        rosters.add(names)
    assert rosters.singled_out(["ann", "cleo"]) == ["ann", "bob", "cleo"]


def test_a_thousand_clients_take_no_time_to_speak_of() -> None:
    rosters, generator = Rosters(), np.random.default_rng(0)
    order = [str(number) for number in generator.permutation(1000)]
    for _ in range(3):
        for start in range(0, 1000, 20):
            batch = order[start : start + 20]
            assert rosters.singled_out(batch) == []
            rosters.add(batch)
    assert len(rosters.state().values["lists"]) == 50  # what tells nothing new takes no room


@pytest.mark.parametrize("values", [{}, {"lists": 3}, {"lists": [["ann", 4]]}, {"lists": [[""]]}])
def test_a_damaged_state_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="who was in which sum"):
        Rosters().load_state(State(values, {}))


# A server that forgets on purpose: the clients remember


def play(rounds: SecureRounds, clients: dict[str, SecureClient], names: list[str]) -> dbcl.RoundReport:
    def begin(sent: dict[str, bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            broadcast = dbcl.decode_broadcast(data)
            change = {key: torch.full_like(tensor, 0.01) for key, tensor in broadcast.tensors.items()}
            update = dbcl.Update(broadcast.round, broadcast.plan.digest, change, 1)
            answers[name] = clients[name].begin(broadcast, update)
        return answers

    def ask(sent: dict[str, bytes]) -> dict[str, bytes]:
        answers = {}
        for name, data in sent.items():
            try:
                answers[name] = clients[name].answer(data)
            except ProtocolError as error:
                refusals.append(str(error))
        return answers

    refusals.clear()
    return rounds.play(names, begin, ask)  # type: ignore[arg-type]


refusals: list[str] = []


@pytest.mark.parametrize("forgetful", [False, True])
def test_clients_do_not_help_to_single_one_of_them_out(forgetful: bool) -> None:
    terms = Terms(bound=1.0, min_cohort=3, colluding=0.0)
    identities = {name: Identity() for name in NAMES}
    known = Registry({name: own.public for name, own in identities.items()})
    clients = {
        name: SecureClient(name, own, terms, known, Rosters() if not forgetful else Forgets())
        for name, own in identities.items()
    }
    model = nn.Linear(4, 2)
    rounds = SecureRounds(dbcl.Server(model, cover="all", veil=0.0, lanes=1, steady_lanes=True), terms)
    assert play(rounds, clients, NAMES).accepted == 6
    before = model.weight.detach().clone()
    rounds.rosters = Rosters()  # the server's own memory is gone
    if forgetful:  # clients without a memory would do it: the difference of the two sums is one client's update
        assert play(rounds, clients, NAMES[1:]).accepted == 5
        return
    with pytest.raises(ProtocolError, match="no sum could be made"):
        play(rounds, clients, NAMES[1:])
    assert len(refusals) == 5
    assert all("would show client 0 alone" in refusal for refusal in refusals)
    assert torch.equal(model.weight, before)


class Forgets(Rosters):
    def add(self, names: object) -> None: ...
