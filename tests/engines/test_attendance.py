"""Rounds of fixed parties with correlated noise in which some are missing: played, accounted and refused."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dbcl
from dbcl.cli.privacy import _after
from dbcl.engines.secure import SecureServer
from dbcl.errors import ProtocolError
from dbcl.privacy import NoiseStream, PrivacyPlan
from dbcl.privacy.attendance import Rows, attendance_mu
from dbcl.protocol import Broadcast, Update
from dbcl.protocol.secagg import NoisySum, SecureClient
from dbcl.protocol.secagg.history import AccountedAttendance
from dbcl.protocol.secagg.messages import Roster, decode_message, encode_message
from dbcl.protocol.secagg.vectors import broadcast_digest
from dbcl.simulation.privacy_budget import Account, account_in, account_of

SEED = bytes(32)
ALL = "abcde"
FACTS: dict[str, Any] = {
    "epsilon": 8.0, "delta": 1e-5, "clip": 0.1, "unit": "example", "noise_by": "clients", "separation": 2, "rounds": 6,
    "clients": 5, "cohort": 5, "fewest": 4, "examples": 600, "batch": 300, "values": 6,
}  # fmt: skip
PLAN, TRUSTING = PrivacyPlan(**FACTS, colluders=1), PrivacyPlan(**FACTS, colluders=0)
TOO_MUCH = ("abcd", "bcde", "abcd", "bcde", "abcd", "abcd")
"""Exceeds mu in its last round, if none colludes."""


def server_of(plan: PrivacyPlan, *, masked: bool) -> SecureServer:
    torch.manual_seed(0)
    return SecureServer(nn.Linear(6, 1, bias=False).double(), privacy=plan, masked=masked, rounding_seed=SEED)


def play(server: SecureServer, names: str) -> Broadcast:
    """Play a round in which these parties answer, each with values of its own."""
    broadcast = server.open_round()

    def made(value: float) -> Update:
        change = {name: torch.full_like(each, value, dtype=torch.float64) for name, each in broadcast.tensors.items()}
        return Update(server.round, broadcast.plan.digest, change, 1)

    server.close_round({name: made(0.01 * place) for place, name in enumerate(names)})
    return broadcast


def rows_of(*sums: str) -> Rows:
    return tuple((round, tuple(names)) for round, names in enumerate(sums) if names)


def client(server: SecureServer, name: str) -> SecureClient:
    return server._clients[name]


@pytest.mark.parametrize("masked", [True, False])
def test_a_party_that_was_missing_comes_back_and_what_was_spent_is_that_of_the_attendance(masked: bool) -> None:
    server, sums, sent = server_of(PLAN, masked=masked), (ALL, "abde", "abde", ALL, "bcde", ALL), []
    for place, names in enumerate(sums):
        sent.append(play(server, names))
        assert server.rounds.totals[0][1].members == tuple(names)
        if place == 3:  # it goes on from its checkpoint
            state, server = server.state(), server_of(PLAN, masked=masked)
            server.load_state(state)
    assert server.rounds.attendance is not None
    rows = rows_of(*sums)
    assert server.rounds.attendance.rows == rows
    spent = Account(PLAN, 6, 3, insecure=False, attendance=rows).spent
    assert spent == PLAN.spent_by(rows)
    assert math.sqrt(3 / 4) * PLAN.mu < spent.mu == attendance_mu(PLAN.shares, rows) < PLAN.mu
    for name in ALL if masked else "":
        rule = client(server, name).rule
        assert isinstance(rule, AccountedAttendance)
        assert rule.log.rows == rows  # each knows also the rounds that it missed
    # Its noise of the rounds that it missed was drawn: what it adds later is correlated with what it added before.
    back = client(server, "c").encoding
    assert isinstance(back, NoisySum)
    assert back.stream is not None
    again = NoiseStream(PLAN.shares, bytes.fromhex(back.stream.state().values["key"]))
    for place in (0, 3, 4, 5):
        noise = again.draw(place, broadcast_digest(sent[place]))
    assert back.stream.round == again.round == 6
    assert back.stream.state().values == again.state().values
    assert noise.any()


@pytest.mark.parametrize("masked", [True, False])
def test_a_sum_that_would_spend_too_much_is_not_revealed(masked: bool) -> None:
    server = server_of(TRUSTING, masked=masked)
    for names in TOO_MUCH[:-1]:
        play(server, names)
    before = server.weights()["weight"].clone()
    with pytest.raises(ProtocolError, match="mu would be"):
        play(server, TOO_MUCH[-1])
    assert torch.equal(server.weights()["weight"], before)
    assert server.rounds.attendance is not None
    assert len(server.rounds.attendance.rows) == 5
    server.void_round()
    assert server.round == 6


def lenient(server: SecureServer) -> None:
    """Let the server ask for any sum."""
    assert server.rounds.attendance is not None
    server.rounds.attendance.check = lambda round, names: None  # type: ignore[method-assign]


def test_parties_refuse_a_sum_that_would_spend_too_much_whatever_the_server_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = server_of(TRUSTING, masked=True)
    lenient(server)
    for names in TOO_MUCH[:-1]:
        play(server, names)
    with pytest.raises(ProtocolError, match="no sum could be made"):
        play(server, TOO_MUCH[-1])
    assert caplog.text.count("mu would be") == 4
    # They count the rounds in which they signed, also after a restart.
    state, server = server.state(), server_of(TRUSTING, masked=True)
    server.load_state(state)
    lenient(server)
    with pytest.raises(ProtocolError, match="no sum could be made"):
        play(server, TOO_MUCH[-1])


@pytest.mark.parametrize("past", [(), rows_of(ALL, "abce"), rows_of(ALL, ALL), rows_of("", "abde")])
def test_a_server_that_states_another_past_gets_no_sum(past: Rows, caplog: pytest.LogCaptureFixture) -> None:
    server = server_of(PLAN, masked=True)
    for names in (ALL, "abde"):
        play(server, names)
    assert server.rounds.attendance is not None
    server.rounds.attendance.before = lambda round: past  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="no sum could be made"):
        play(server, ALL)
    assert caplog.text.count("states another attendance") >= 4


def test_a_past_that_one_party_is_told_alone_does_not_let_it_into_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was missing and cannot know better; but its masks are of another roster than those of the others."""
    server = server_of(PLAN, masked=True)
    for names in (ALL, "abde"):
        play(server, names)
    honest = server._answered

    def lie(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        changed = dict(sent)
        if client(server, "c")._round.next_step == "share":  # type: ignore[union-attr]
            roster = decode_message(Roster, changed["c"])
            assert roster.attendance == rows_of(ALL, "abde")
            changed["c"] = encode_message(replace(roster, attendance=roster.attendance[:1]))
        return honest(changed)

    monkeypatch.setattr(server, "_answered", lie)
    play(server, ALL)
    assert server.rounds.totals[0][1].members == tuple("abde")


def test_a_registry_of_more_keys_than_parties_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    server = server_of(PLAN, masked=True)
    server.client("stranger")
    with pytest.raises(ProtocolError, match="no sum could be made"):
        play(server, ALL)
    assert "the registry has 6 keys" in caplog.text


def test_a_list_that_was_sent_out_counts_though_its_sum_was_not_revealed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(PLAN, masked=True)
    honest = server._answered

    def sign_only(sent: Mapping[str, bytes]) -> dict[str, bytes]:
        reveal = all(client(server, name)._round.next_step == "reveal" for name in sent)  # type: ignore[union-attr]
        return {} if reveal else honest(sent)

    monkeypatch.setattr(server, "_answered", sign_only)
    with pytest.raises(ProtocolError, match="no sum could be made"):
        play(server, ALL)
    monkeypatch.undo()
    assert server.rounds.attendance is not None
    assert server.rounds.attendance.rows == rows_of(ALL)
    server.void_round()
    play(server, "abcd")
    assert server.rounds.attendance.rows == rows_of(ALL, "abcd")


def test_a_run_states_what_it_spent_by_its_attendance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    options = {"colluders": 1, "fewest": 4, "rounds": 3, "separation": 2, "epsilon": 50.0, "lr": 0.05, "batch_size": 10}
    run = dbcl.simulate(
        nn.Linear(4, 2), (x, y), (x, y), settings="guaranteed", clients=5, folder=tmp_path / "run", **options
    )
    account = account_in(tmp_path / "run")
    assert account is not None
    assert account == account_of(run)
    facts = account.facts()
    assert (facts["revealed_sums"], facts["fewest_in_a_sum"]) == (3, 5)
    assert facts["spent_mu"] == pytest.approx(facts["mu"] * math.sqrt(3 / 4), rel=1e-9)
    _after(tmp_path / "run", as_json=False)
    assert "5 or more of 5 clients in each of 3 revealed sums" in capsys.readouterr().out
