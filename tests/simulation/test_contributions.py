"""Clients whose updates were rejected or counted for less are named at the end of every kind of run."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dbcl
from dbcl.protocol import Reason, Rejection, Update
from dbcl.protocol.contributions import NAMED_CLIENTS, Contributions
from dbcl.protocol.messages import AggregationStats
from simulation.test_mistakes import HELD_OUT, Lazy, X, Y, net, with_value

ROUNDS = 4


def one_with_nan() -> list[Lazy]:
    """Four clients; the first has most of the examples and NaN in one of them."""
    x, y = X.repeat(5, 1), Y.repeat(5)
    parts = [slice(0, 48), slice(48, 52), slice(52, 56), slice(56, 60)]
    return [Lazy(with_value(x, float("nan"))[part], y[part]) for part in parts]


def of_sizes(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, 4, generator=generator) for size in sizes]
    return [(x, (x[:, 0] > 0).long()) for x in made]


def test_simulate_names_a_client_that_was_rejected_in_every_round(caplog: pytest.LogCaptureFixture) -> None:
    run = dbcl.simulate(net(), one_with_nan(), HELD_OUT, rounds=ROUNDS, seed=0, settings="blind")
    assert run.contributions.rejected == {"client 0": ROUNDS}
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert sum("rejected client 0: " in each for each in said) == 1  # at once, and not in every round
    assert f"client 0: rejected in {ROUNDS} of {ROUNDS} rounds" in said[-1]
    assert "look for NaN in its examples" in said[-1]


def test_simulate_names_clients_that_counted_for_less(caplog: pytest.LogCaptureFixture) -> None:
    run = dbcl.simulate(net(), of_sizes(20, 40, 80, 160), HELD_OUT, rounds=ROUNDS, seed=0, settings="blind")
    assert run.contributions.capped["client 3"] == ROUNDS
    assert "client 0" not in run.contributions.capped
    assert f"client 3: counted for fewer examples than it has in {ROUNDS} of {ROUNDS} rounds" in caplog.text
    assert "`max_influence` bounds the influence of one client" in caplog.text


def test_nothing_is_said_of_a_run_in_which_every_update_counted_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    run = dbcl.simulate(net(), of_sizes(20, 40, 80, 160), HELD_OUT, rounds=ROUNDS, settings="plain", lr=0.01)
    assert run.contributions.lines() == []
    assert "counted" not in caplog.text


def test_a_run_that_goes_on_counts_from_its_beginning(tmp_path: Path) -> None:
    given = {"folder": tmp_path / "run", "seed": 0}
    dbcl.simulate(net(), one_with_nan(), HELD_OUT, rounds=2, settings="blind", **given)
    run = dbcl.simulate(net(), one_with_nan(), HELD_OUT, rounds=ROUNDS, resume=True, settings="blind", **given)
    assert run.contributions.rejected == {"client 0": ROUNDS}


def test_a_guarantee_says_nothing_of_how_long_updates_were() -> None:
    run = dbcl.simulate(
        net(), of_sizes(20, 40, 80, 160), HELD_OUT, rounds=ROUNDS, settings="private", fraction=0.5, clip=1e-3
    )  # fmt: skip
    assert run.contributions.facts() == {"rejected": {}, "capped": {}, "clipped": {}}


def test_the_five_verbs_say_at_once_who_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    server = dbcl.Server(net())
    for _ in range(3):
        updates: dict[str, Update] = {}
        for name in ("ann", "bob", "cleo"):
            broadcast = server.open_round(name)
            local = dbcl.blinded(net(), broadcast)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            F.cross_entropy(local(X * (float("nan") if name == "bob" else 1)), Y).backward()
            optimizer.step()
            updates[name] = dbcl.make_update(local, broadcast, examples=12)
        server.close_round(updates)
    assert caplog.text.count("rejected bob: ") == 1
    assert server.contributions.facts()["rejected"]["bob"]["rounds"] == 3
    again = dbcl.Server(net())
    again.load_state(server.state())
    assert str(again.contributions) == str(server.contributions)


def test_a_checkpoint_with_counts_that_are_none_is_refused() -> None:
    server = dbcl.Server(net())
    for wrong in ({"rejected": {"ann": -1}}, {"rejected": {"ann": 2}}, {"capped": 3}):
        state = server.state()
        state.values["clients"] |= wrong
        with pytest.raises(dbcl.errors.ProtocolError, match="the checkpoint is damaged"):
            server.load_state(state)


def test_only_the_most_affected_are_named() -> None:
    counted = Contributions()
    bad = Rejection(Reason.NOT_FINITE, "bias holds NaN")
    counted.add(AggregationStats({f"client {number}": bad for number in range(10)}))
    counted.add(AggregationStats({"client 4": bad}, senders=("client 3",)))
    lines = counted.lines()
    assert lines[0].startswith("client 4: rejected in 2 of 2 rounds")
    assert lines[-1] == "and 5 more clients"
    assert len(lines) == NAMED_CLIENTS + 1
