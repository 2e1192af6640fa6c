"""Clients that point against the others over the rounds: how that is measured, and what it does to them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import dbcl
from dbcl.protocol import Update, UpdateStack
from dbcl.protocol.reputation import MIN_CLIENTS as FEWEST
from dbcl.protocol.reputation import MIN_ROUNDS, Reputation, agreement
from dbcl.testing.nested import nested
from protocol.conftest import net

CLIENTS = tuple(f"client {number}" for number in range(10))
HOSTILE = CLIENTS[:3]


def stack(clients: int = 9, seed: int = 0) -> UpdateStack:
    """Updates in two lanes with a sketched weight, a bias, a single number and a statistic."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (5, 4), "b": (3,), "s": (), "mean": (2,)}
    tensors = {name: torch.randn(clients, *shape, generator=generator) for name, shape in shapes.items()}
    tensors["w"][4] = tensors["b"][4] = tensors["s"][4] = 0  # it changes nothing
    plans = tuple("pq"[number % 2] for number in range(clients))
    return UpdateStack(0, CLIENTS[:clients], plans, tensors, (1,) * clients, ({},) * clients)


def by_definition(sent: UpdateStack, trust: dict[str, float]) -> dict[str, float]:
    def vector(who: str, names: list[str]) -> Tensor:
        return torch.cat([sent[who].tensors[name].flatten() for name in names]).double()

    def cosine(one: str, other: str) -> float:
        names = ["w", "b", "s"] if sent[one].plan == sent[other].plan else ["b", "s"]
        found = torch.nn.functional.cosine_similarity(vector(one, names), vector(other, names), dim=0)
        return float(found)

    found = {}
    for who in sent:
        others = [other for other in sent if other != who]
        found[who] = sum(trust[other] * cosine(who, other) for other in others) / sum(trust[each] for each in others)
    return found


@pytest.mark.parametrize("stacked", [True, False])
def test_agreement_is_the_trusted_mean_cosine_with_the_others(stacked: bool) -> None:
    sent = stack()
    trust = {who: (number % 4) / 3 for number, who in enumerate(sent)}
    trust[CLIENTS[4]] = 0.0  # who changes nothing has no direction, and is not taken out of a sum either
    found = agreement(sent if stacked else dict(sent.items()), trust, {"w"}, {"mean"})
    assert found == pytest.approx(by_definition(sent, trust), abs=1e-6)


def rounds(hostile: Any, count: int, **settings: Any) -> tuple[dbcl.Server, list[dbcl.RoundReport]]:
    """Rounds in which seven clients send much the same update, and three what `hostile` makes of it."""
    torch.manual_seed(0)
    server = dbcl.Server(net(), insecure_seed=0, **nested({"coverage": "hidden", **settings}))
    reports = []
    for _ in range(count):
        updates = {}
        for who in CLIENTS:
            broadcast = server.open_round(who)
            tensors = {name: 0.01 + 0.01 * torch.randn_like(tensor) for name, tensor in broadcast.tensors.items()}
            if who in HOSTILE:
                tensors = {name: hostile(tensor) for name, tensor in tensors.items()}
            updates[who] = Update(broadcast.round, broadcast.plan.digest, tensors, examples=10)
        reports.append(server.close_round(updates))
    return server, reports


def test_clients_that_reverse_the_training_count_for_nothing_after_a_few_rounds() -> None:
    server, reports = rounds(lambda tensor: -tensor, MIN_ROUNDS + 2)
    assert [len(report.refused) for report in reports] == [0] * MIN_ROUNDS + [3, 3]
    assert {reason.partition(": ")[0] for reason in reports[-1].refused} == set(HOSTILE)
    assert "have pointed against those of the others" in reports[-1].refused[0]
    assert set(server.contributions.rejected) == set(HOSTILE)
    again = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    again.load_state(copy.deepcopy(server.state()))
    assert again.validation.influence.reputation.trust(CLIENTS) == server.validation.influence.reputation.trust(CLIENTS)


def test_who_stops_doing_so_counts_again() -> None:
    standing = Reputation()
    honest = dict.fromkeys(CLIENTS[3:], 0.1)
    for _ in range(10):
        standing.observe({**honest, CLIENTS[0]: -0.2})
    assert standing.trust(CLIENTS)[CLIENTS[0]] == 0.0
    for _ in range(30):
        standing.observe({**honest, CLIENTS[0]: 0.1})
    assert standing.trust(CLIENTS)[CLIENTS[0]] == 1.0


def test_clients_that_all_differ_alike_are_all_trusted() -> None:
    """Each with labels of its own: all cosines are negative, and nobody stands out."""
    standing = Reputation()
    for _ in range(20):
        standing.observe(dict.fromkeys(CLIENTS, -0.11))
    assert set(standing.trust(CLIENTS).values()) == {1.0}


def test_nobody_is_judged_where_every_update_is_taken_as_it_is_or_nobody_is_known() -> None:
    server, reports = rounds(
        lambda tensor: -tensor, MIN_ROUNDS + 2, validator=dbcl.protocol.UpdateValidator(max_influence=None)
    )
    assert not any(report.refused for report in reports)
    for _ in range(MIN_ROUNDS + 2):  # a list has no names: places in it are nobody's
        broadcast = server.open_round()
        sent = [
            Update(broadcast.round, broadcast.plan.digest, {n: scale + t for n, t in broadcast.tensors.items()}, 1)
            for scale in torch.linspace(-1, 1, FEWEST + 2).tolist()
        ]
        assert server.close_round(sent).refused == ()


@pytest.mark.parametrize("wrong", [{"ann": [1.0]}, {"ann": [9.0, 1.0, 1.0]}, {"ann": "x"}, 3])
def test_a_checkpoint_with_a_standing_that_cannot_be_is_refused(wrong: object) -> None:
    server = dbcl.Server(net())
    state = server.state()
    state.values["influence"]["reputation"]["clients"] = wrong
    with pytest.raises(dbcl.errors.ProtocolError, match="the checkpoint is damaged"):
        server.load_state(state)


def test_a_round_with_more_hostile_clients_than_honest_ones_moves_no_further_than_others() -> None:
    """The median of that round is theirs; that of the rounds before is not."""

    def moved(server: dbcl.Server, scales: list[float]) -> float:
        before = server.model.state_dict()["0.bias"].clone()
        broadcast = server.open_round()
        noise = torch.Generator().manual_seed(server.round)
        updates = []
        for scale in scales:
            tensors = {
                name: scale * (1 + 0.01 * torch.rand(tensor.shape, generator=noise))
                for name, tensor in broadcast.tensors.items()
            }
            updates.append(Update(broadcast.round, broadcast.plan.digest, tensors, 10))
        server.close_round(updates)
        return float((server.model.state_dict()["0.bias"] - before).norm())

    server = dbcl.Server(
        net(), dbcl.SketchConfig(veil=0, sketch="identity-v1"), insecure_seed=0, optimizer=dbcl.optim.fedavg()
    )
    usual = [moved(server, [0.01] * 10) for _ in range(5)]
    assert moved(server, [0.01] * 4 + [-0.09] * 6) < 1.5 * max(usual)
