"""Lanes on the server: who is in which, what they show, what they add up to, and a lane without answers."""

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl.errors import ProtocolError
from dbcl.protocol.aggregation import Aggregate, replacement
from dbcl.testing.nested import nested
from protocol.conftest import answer, net, same, weights


def exact() -> nn.Sequential:
    """In float64, with inputs that 2, 3 and 4 divide, and a statistic."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)).double()


INPUTS = torch.randn(40, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def of_exact(**settings: Any) -> dbcl.Server:
    """A server of `exact`, which measures the statistic on inputs of its own."""
    return dbcl.Server(exact(), **nested({"coverage": "hidden", "calibration": INPUTS, **settings}))


def asked(server: dbcl.Server, clients: int) -> list[dbcl.Broadcast]:
    return [server.open_round(f"client {client}") for client in range(clients)]


# --- who is in which lane --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_a_client_keeps_its_lane_and_lanes_differ_by_one_client_at_most(lanes: int) -> None:
    server = of_exact(insecure_seed=0, lanes=lanes)
    orders = set()
    for _ in range(6):
        first: dict[int, dbcl.Broadcast] = {}
        for client in range(11):
            first[client] = server.open_round(client)
            assert server.open_round(str(client)) is first[client]
            counts = [sum(each.plan.lane == lane for each in first.values()) for lane in range(lanes)]
            assert max(counts) - min(counts) <= 1
        assert all(server.open_round(client) is first[client] for client in reversed(range(11)))
        assert len({each.plan.digest for each in first.values()}) == lanes
        assert len({each.plan.seed for each in first.values()}) == 1
        orders.add(tuple(each.plan.lane for each in first.values()))
        update = dbcl.make_update(dbcl.blinded(exact(), first[0]), first[0], examples=1)
        server.close_round({"0": update})
    assert (len(orders) > 1) == (lanes > 1)  # which lane comes first changes from round to round


def test_all_that_a_round_sends_is_made_once() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
    broadcasts = asked(server, 10)
    assert len({id(broadcast) for broadcast in broadcasts}) == 2
    assert server.open_round() is next(each for each in broadcasts if each.plan.lane == 0)


@pytest.mark.parametrize("settings", [{}, {"lanes": 3}])
def test_who_has_asked_is_in_the_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {"coverage": "hidden", **settings}
    server = dbcl.Server(net(), **nested(settings))
    sent = {client: dbcl.encode(server.open_round(client)) for client in ("bob", "ann", "eve", "joe", "sue")}
    server.save(tmp_path)
    revived = dbcl.Server.load(tmp_path, net(), **nested(settings))
    for client in ("sue", "ann", "joe", "eve", "bob"):  # in another order
        assert dbcl.encode(revived.open_round(client)) == sent[client]
    for late in ("kim", "lea"):
        assert dbcl.encode(revived.open_round(late)) == dbcl.encode(server.open_round(late))
    answering = dbcl.Server.load(tmp_path, net(), **nested(settings))
    answering.open_round()  # and nobody asks again: the answers were under way when the server died
    updates = {
        client: answer(dbcl.protocol.decode_broadcast(data), 1 + n / 9) for n, (client, data) in enumerate(sent.items())
    }
    report = answering.close_round(updates)
    assert (report.accepted, report.refused) == (5, ())
    again = dbcl.Server.load(tmp_path, net(), **nested(settings))
    again.save(tmp_path)  # before the round is opened again
    assert dbcl.encode(dbcl.Server.load(tmp_path, net(), **nested(settings)).open_round("sue")) == sent["sue"]


def test_with_the_round_its_lanes_are_forgotten() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
    broadcast = server.open_round("ann")
    assert server.state().values["round"]["asked"] == ["ann"]
    server.close_round({"ann": answer(broadcast)})
    assert "asked" not in server.state().values["round"]


def test_a_round_that_fails_keeps_its_lanes() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    before = {client: server.open_round(client) for client in "abcde"}
    with pytest.raises(ProtocolError, match="has 0 updates and needs 1"):
        server.close_round({"a": b"nothing"})
    with pytest.raises(ProtocolError, match="the aggregate is rejected"):
        server.close(replacement({}, server.weights(), count=1))
    assert all(server.open_round(client) is broadcast for client, broadcast in before.items())


# --- what the lanes show ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"ratio": 3}, {"ratio": 4}, {"lanes": 1, "ratio": 4}])
@pytest.mark.parametrize("veil", [0.0, 0.3])
def test_all_lanes_show_one_noise(settings: dict[str, Any], veil: float) -> None:
    """Lifted and added up the lanes are W + N, with the N that the veil gives: there is no second one to average."""
    server = of_exact(coverage="all", veil=veil, **settings)
    lanes = server.plan.lanes
    for _ in range(2):
        broadcasts = asked(server, 2 * lanes)
        for name, W in server.weights().items():
            noise = server.noise.noise(server.round, name, tuple(W.shape))
            assert (noise is None) == (veil == 0)
            shown = W.detach() + (0 if noise is None else noise)
            shown = shown.clamp(min=0) if name.endswith("running_var") else shown
            for group in (broadcasts[:lanes], broadcasts[lanes:]):
                assert sorted(each.plan.lane for each in group) == list(range(lanes))
                if name not in group[0].sketches():
                    assert all(torch.equal(each.tensors[name], shown) for each in group)
                elif lanes > 1:
                    total = sum(each.sketches()[name].lift(each.tensors[name]) for each in group)
                    torch.testing.assert_close(total, shown, rtol=0, atol=1e-12)
                for each in group:
                    sketch = each.sketches().get(name)
                    expected = shown if sketch is None else sketch.apply(shown)
                    torch.testing.assert_close(each.tensors[name], expected, rtol=0, atol=1e-12)
        local = dbcl.blinded(exact(), broadcasts[0])
        server.close_round({"client 0": dbcl.make_update(local, broadcasts[0], examples=1)})


def test_a_policy_is_met_in_every_lane_and_a_low_ratio_is_refused_in_each() -> None:
    for broadcast in asked(of_exact(ratio=4), 4):
        dbcl.blinded(exact(), broadcast, require=dbcl.protocol.BroadcastRequirements(min_ratio=4, max_ratio=4))
    for broadcast in asked(of_exact(ratio=1.5, lanes=3), 3):
        with pytest.raises(dbcl.errors.PlanError, match=r"0.weight is sketched from 12 to 8, a ratio below 2"):
            dbcl.blinded(exact(), broadcast, require=dbcl.protocol.BroadcastRequirements())


# --- what they add up to ---------------------------------------------------------------------------------------------


def trained(broadcast: dbcl.Broadcast, client: int) -> dbcl.Update:
    generator = torch.Generator().manual_seed(client)
    local = dbcl.blinded(exact(), broadcast).train()
    x = torch.randn(4 + client, 12, generator=generator, dtype=torch.float64)
    local(x).square().mean().backward()
    torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1).step()
    return dbcl.make_update(local, broadcast, examples=len(x), metrics={"loss": 1.0 + client})


FREE = dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None)


@pytest.mark.parametrize("settings", [{"lanes": 1}, {}, {"ratio": 4}, {"ratio": 3, "coverage": "all"}])
@pytest.mark.parametrize("answering", [(0, 1, 2, 3, 4), (0, 3, 4), (2,)])
def test_the_step_is_the_mean_of_the_lifted_updates(settings: dict[str, Any], answering: tuple[int, ...]) -> None:
    """By examples, whoever is in which lane; statistics are values, and the mean is over all clients.

    The model's own statistics are then measured on the server's inputs.
    """
    server = of_exact(insecure_seed=0, validator=FREE, **settings)
    before = {name: tensor.detach().clone() for name, tensor in server.weights().items()}
    broadcasts = asked(server, 5)
    updates = {client: trained(broadcasts[client], client) for client in answering}
    sent = {f"client {client}": update for client, update in updates.items()}
    averages = server.averaging.aggregate(server.validate(sent)).mean()
    report = server.close_round(sent)
    whole = sum(update.examples for update in updates.values())
    for name, W in before.items():
        total = torch.zeros_like(W)
        for client, update in updates.items():
            sketch = broadcasts[client].sketches().get(name)
            change = update.tensors[name] if sketch is None else sketch.lift(update.tensors[name]).reshape(W.shape)
            total += update.examples / whole * change
        if name in server.statistics:
            torch.testing.assert_close(averages[name], total, rtol=0, atol=1e-12)
        else:
            torch.testing.assert_close(server.weights()[name].detach(), W + total, rtol=0, atol=1e-12)
    assert server.statistics == {"1.running_mean", "1.running_var"}
    hidden = server.model[0](INPUTS).detach()
    torch.testing.assert_close(server.model[1].running_mean, hidden.mean(dim=0))
    torch.testing.assert_close(server.model[1].running_var, hidden.var(dim=0))
    counts = [sum(broadcasts[client].plan.lane == lane for client in answering) for lane in range(server.plan.lanes)]
    assert report.lanes == tuple(counts)
    assert report.unanswered == tuple(lane for lane, count in enumerate(counts) if not count)
    assert report.metrics == {
        "loss": pytest.approx(sum(u.examples * u.metrics["loss"] for u in updates.values()) / whole)
    }


def test_one_broadcast_for_all_is_one_lane_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0, validator=FREE)
    before, broadcast = weights(server), server.open_round()
    with caplog.at_level(logging.WARNING):
        report = server.close_round([answer(broadcast, 1.0), answer(broadcast, 2.0, examples=30)])
    assert (report.lanes, report.unanswered) == ((2, 0), (1,))
    assert "round 0: no answer in lanes 1 of 2; open_round(client) gives each client its lane" in caplog.text
    mean = torch.full((6, 4), (1.0 * 10 + 2.0 * 30) / 40)
    expected = before["0.weight"] + broadcast.sketches()["0.weight"].lift(mean)
    torch.testing.assert_close(weights(server)["0.weight"], expected)


@pytest.mark.parametrize(
    ("lanes", "answering", "warned"),
    [
        (2, [0, 1], None),
        (2, [0, 0], "no answer in lanes 1 of 2"),
        (2, [1], None),  # nobody else has answered: every lane cannot
        (4, [3, 0, 1], None),
        (4, [3, 0, 3, 3], "no answer in lanes 1, 2 of 4"),
        (1, [0, 0], None),
    ],
)
def test_a_lane_without_answers_is_warned_of_where_there_are_enough_for_all(
    lanes: int, answering: list[int], warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(lanes=lanes, coverage="hidden"))
    clients = {f"client {n}": broadcast for n, broadcast in enumerate(asked(server, 4 * lanes))}
    updates = {}
    for lane in answering:
        own = next(who for who in clients if who not in updates and clients[who].plan.lane == lane)
        updates[own] = answer(clients[own])
    with caplog.at_level(logging.WARNING):
        report = server.close_round(updates)
    assert report.lanes == tuple(answering.count(lane) for lane in range(lanes))
    assert report.unanswered == tuple(lane for lane in range(lanes) if lane not in answering)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [f"round 0: {warned}"] * bool(warned)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_an_answer_in_another_lane_than_ones_own_is_refused(stacked: bool) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    lanes = asked(server, 2)
    honest, greedy = answer(lanes[0]), answer(lanes[0], 1.5)  # of somebody who was given the other one
    updates: Any = {"client 0": honest, "client 1": greedy}
    report = server.close_round(stack(updates) if stacked else updates)
    assert report.accepted == 1
    assert report.refused == ("client 1: answers another lane than its own",)


def test_clients_may_be_numbers() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    lanes = [server.open_round(client) for client in (0, 1)]
    updates: Any = {0: answer(lanes[0]), 1: answer(lanes[0], 1.5)}
    assert server.close_round(updates).refused == ("1: answers another lane than its own",)


def test_whoever_has_not_asked_may_answer_in_any_lane() -> None:
    """The server cannot know what a relay did with the broadcasts."""
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    lanes = asked(server, 2)
    updates = {f"relayed {number}": answer(broadcast) for number, broadcast in enumerate([*lanes, lanes[1]])}
    assert server.close_round(updates).accepted == 3


def test_a_lane_of_another_round_is_another_plan() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    old = asked(server, 2)
    server.close_round({"client 0": answer(old[0])})
    new = asked(server, 2)
    stale = dataclasses.replace(answer(old[1]), round=1)
    report = server.close_round({"client 0": answer(new[0]), "client 1": stale})
    assert report.refused == ("client 1: answers another plan than this round's",)


def test_with_several_lanes_an_aggregate_must_be_lifted() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    before = weights(server)
    sums = {name: torch.ones_like(tensor) for name, tensor in server.open_round("ann").tensors.items()}
    with pytest.raises(ProtocolError, match="it is not lifted, and the round has 2 lanes"):
        server.close(Aggregate(sums, weight=2.0, count=2))
    assert same(before, weights(server))
    whole = {name: torch.ones_like(W) for name, W in server.weights().items()}
    assert server.close(Aggregate(whole, weight=2.0, count=2, lifted=True)).lanes == ()  # who knows
    torch.testing.assert_close(weights(server)["0.weight"], before["0.weight"] + 0.5)


# --- a lane without answers biases nothing ---------------------------------------------------------------------------


def test_a_lane_without_answers_costs_precision_and_no_bias() -> None:
    """The lifted update of a client whose gradient is G, over many draws: G on average, with the other lane or without.

    Nine inputs in buckets of two and three, so that even the two lanes together are not exact in any one round.
    """
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.randn(2, 2, 9, generator=generator, dtype=torch.float64)
    gradients = {"ann": shared + 0.2 * own, "bob": shared - 0.2 * own}
    spread = {}
    for answering in (("ann", "bob"), ("ann",)):
        model = nn.Linear(9, 2, bias=False, dtype=torch.float64)
        added = dbcl.optim.fedavg()
        server = dbcl.Server(
            model, dbcl.SketchConfig(coverage="all", veil=0), insecure_seed=1, validator=FREE, optimizer=added
        )
        assert server.plan.lanes == 2
        seen = []
        for round in range(300):
            before, updates = model.weight.detach().clone(), {}
            for client in gradients:
                broadcast = server.open_round(client)
                change = broadcast.sketches()["weight"].project(gradients[client])  # G R D, as a step on V makes it
                if client in answering:
                    updates[client] = dbcl.Update(round, broadcast.plan.digest, {"weight": change}, examples=1)
            report = server.close_round(updates)
            assert len(report.unanswered) == 2 - len(answering)
            seen.append(model.weight.detach() - before)
        draws = torch.stack(seen)
        expected = torch.stack([gradients[client] for client in answering]).mean(dim=0)
        error = draws.std(dim=0) / len(draws) ** 0.5
        assert bool(((draws.mean(dim=0) - expected).abs() < 4 * error).all())  # 18 numbers, one in 16,000 beyond
        spread[len(answering)] = float(draws.std(dim=0).square().mean().sqrt())
    assert spread[1] > 2 * spread[2] > 0


# --- updates that lie together ---------------------------------------------------------------------------------------


def stack(updates: dict[str, dbcl.Update]) -> dbcl.protocol.UpdateStack:
    every = list(updates.values())
    return dbcl.protocol.UpdateStack(
        every[0].round,
        tuple(updates),
        tuple(update.plan for update in every),
        {name: torch.stack([update.tensors[name] for update in every]) for name in every[0].tensors},
        tuple(update.examples for update in every),
        tuple(update.metrics for update in every),
    )


def test_a_stack_is_a_mapping_of_updates() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
    updates = {f"client {n}": answer(each, n + 1.0, n + 1) for n, each in enumerate(asked(server, 4))}
    made = stack(updates)
    assert (len(made), list(made), "client 2" in made, "client 7" in made) == (4, list(updates), True, False)
    with pytest.raises(KeyError, match="client 7"):
        made["client 7"]
    for who, update in made.items():
        assert dbcl.encode(update) == dbcl.encode(updates[who])
        assert (
            update.tensors["0.bias"].untyped_storage().data_ptr() == made.tensors["0.bias"].untyped_storage().data_ptr()
        )
    assert made.only(made.senders) is made.tensors
    some = made.only(["client 3", "client 1"])
    assert torch.equal(some["0.bias"], torch.stack([updates[f"client {n}"].tensors["0.bias"] for n in (3, 1)]))
    sizes = sum(len(dbcl.encode(update)) for update in updates.values())
    assert dbcl.protocol.encoded_size(made) == sizes


def with_value(name: str, value: float) -> Any:
    def ruin(update: dbcl.Update) -> dbcl.Update:
        tensor = update.tensors[name].clone()
        tensor.view(-1)[1] = value
        return dataclasses.replace(update, tensors={**update.tensors, name: tensor})

    return ruin


def scaled(factor: float) -> Any:
    def ruin(update: dbcl.Update) -> dbcl.Update:
        tensors = {n: t if "running" in n else factor * t for n, t in update.tensors.items()}
        return dataclasses.replace(update, tensors=tensors)

    return ruin


NAN, INF = float("nan"), float("inf")
LENGTHS: dict[str, Any] = {"outlier_factor": None}
ODD: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "nothing odd": (lambda u: u, {}, None),
    "NaN": (with_value("0.weight", NAN), {}, "0.weight holds NaN"),
    "infinity": (with_value("3.bias", -INF), {}, "3.bias holds infinity"),
    "NaN in a statistic": (with_value("1.running_mean", NAN), {}, "1.running_mean holds NaN"),
    "negative variance": (with_value("1.running_var", -1e-9), {}, "1.running_var holds a negative variance"),
    "negative mean": (with_value("1.running_mean", -3.0), {}, None),
    "absurd": (with_value("0.bias", 1e30), {}, "its norm 1e+30 is beyond"),
    "beyond float64": (with_value("0.bias", 1e200), {}, "its norm"),
    "many times the median": (scaled(1e4), {}, "times the median of its lane"),
    "clipped": (scaled(40.0), {"norm_bound": 0.5, **LENGTHS}, None),
    "too long": (scaled(40.0), {"norm_bound": 3.0, "clip": False, **LENGTHS}, "is above the bound 3"),
    "held back": (scaled(40.0), LENGTHS, None),
    "nobody held back": (scaled(40.0), {"max_influence": None, **LENGTHS}, None),
    "NaN in a metric": (lambda u: dataclasses.replace(u, metrics={"loss": NAN}), {}, "metric 'loss' is nan"),
    "another metric": (lambda u: dataclasses.replace(u, metrics={"score": 3.0}), {}, None),
    "no examples": (lambda u: dataclasses.replace(u, examples=0), {}, "examples must be between 1 and"),
    "many examples": (lambda u: dataclasses.replace(u, examples=10**6), {}, None),
    "another plan": (lambda u: dataclasses.replace(u, plan="0" * 64), {}, "answers another plan than this round's"),
    "too few": (with_value("0.weight", NAN), {"min_updates": 5}, "round 0 has 4 updates and needs 5"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("settings", [{"lanes": 1}, {}, {"ratio": 4}], ids=["one lane", "two", "four"])
def test_updates_that_lie_together_are_judged_and_averaged_as_one_by_one(kind: str, settings: dict[str, Any]) -> None:
    ruin, validator, reason = ODD[kind]
    server = of_exact(insecure_seed=0, validator=dbcl.protocol.UpdateValidator(**validator), **settings)
    twin = copy.deepcopy(server)
    count = 15 if kind == "many times the median" else 5  # three of each lane can tell
    updates = {f"client {n}": trained(each, n) for n, each in enumerate(asked(server, count))}
    asked(twin, count)
    updates["client 2"] = ruin(updates["client 2"])
    if kind == "too few":
        for holder, given in ((server, updates), (twin, stack(updates))):
            with pytest.raises(ProtocolError, match=str(reason)):
                holder.close_round(given)
            assert holder.round == 0
        return
    one, other = server.close_round(updates), twin.close_round(stack(updates))
    for name in ("round", "accepted", "refused", "clipped", "examples", "lanes"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.norm == pytest.approx(other.norm, rel=1e-12)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-12)
    assert [text for text in one.refused if str(reason) in text] == list(one.refused)
    assert len(one.refused) == (reason is not None)
    for name, tensor in server.weights().items():
        assert bool(tensor.isfinite().all())
        torch.testing.assert_close(twin.weights()[name], tensor, rtol=0, atol=1e-12)
    assert server.validation.influence._recent == pytest.approx(twin.validation.influence._recent)


def test_the_odd_cases_are_what_they_say() -> None:
    """That clipping, refusing and holding back really happen in the comparison above."""
    clipped = {}
    for kind in ("nothing odd", "clipped", "held back", "nobody held back", "many examples"):
        ruin, validator, _ = ODD[kind]
        server = of_exact(insecure_seed=0, validator=dbcl.protocol.UpdateValidator(**validator))
        updates = {f"client {n}": trained(each, n) for n, each in enumerate(asked(server, 5))}
        updates["client 2"] = ruin(updates["client 2"])
        clipped[kind] = server.close_round(stack(updates)).clipped
    assert clipped["nobody held back"] == 0
    assert clipped["clipped"] > clipped["nothing odd"]
    assert clipped["held back"] > clipped["nothing odd"]
    assert clipped["many examples"] > clipped["nothing odd"]


@pytest.mark.parametrize(
    "settings", [{"wire": "bfloat16"}, {"optimizer": dbcl.optim.momentum(0.5)}, {"wire": "float32"}]
)
def test_a_stack_travels_in_any_type(settings: dict[str, Any]) -> None:
    server = of_exact(insecure_seed=0, **settings)
    twin = copy.deepcopy(server)
    for _ in range(2):
        updates = {f"client {n}": trained(each, n) for n, each in enumerate(asked(server, 5))}
        asked(twin, 5)
        server.close_round(updates)
        twin.close_round(stack(updates))
    for name, tensor in server.weights().items():
        torch.testing.assert_close(twin.weights()[name], tensor, rtol=0, atol=1e-12)


def test_a_stack_of_wrong_shapes_is_refused_client_by_client() -> None:
    server = of_exact(insecure_seed=0)
    updates = {f"client {n}": trained(each, n) for n, each in enumerate(asked(server, 3))}
    made = stack(updates)
    wrong: dict[str, Tensor] = {**made.tensors, "0.bias": made.tensors["0.bias"][:, :-1]}
    with pytest.raises(ProtocolError, match=r"needs 1(?s:.*)client 2: 0.bias has shape \(23,\) and must have \(24,\)"):
        server.close_round(dataclasses.replace(made, tensors=wrong))
    half = {name: tensor.float() for name, tensor in made.tensors.items()}
    with pytest.raises(ProtocolError, match=r"client 0: .* is torch.float32, and must be torch.float64"):
        server.close_round(dataclasses.replace(made, tensors=half))
