import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import dbcl
from dbcl.errors import ProtocolError
from dbcl.protocol.aggregation import Aggregate, replacement
from dbcl.state import State
from dbcl.testing.nested import nested
from protocol.conftest import answer, net, same, weights


def test_the_average_is_weighted_lifted_and_added(server: dbcl.Server) -> None:
    before = weights(server)
    broadcast = server.open_round()
    report = server.close_round([answer(broadcast, 1.0, examples=10), answer(broadcast, 4.0, examples=30)])
    mean = (1.0 * 10 + 4.0 * 30) / 40
    expected = broadcast.sketches()["0.weight"].lift(torch.full((6, 4), mean))
    after = weights(server)
    torch.testing.assert_close(after["0.weight"], before["0.weight"] + expected)
    torch.testing.assert_close(after["2.bias"], before["2.bias"] + mean)
    assert (report.round, report.accepted, report.refused, report.examples) == (0, 2, (), 40)
    assert report.metrics == {"loss": mean}
    assert report.norm == pytest.approx(mean * math.sqrt(6 * 4 + 6 + 12 + 2))


def test_distributed_sgd_is_the_papers_gradient_step() -> None:
    """One local step with a plain gradient, lifted: W - lr * G^T x S S^T, for a batch over two clients."""
    torch.manual_seed(0)
    model = nn.Linear(9, 3, dtype=torch.float64)
    W, b = model.weight.detach().clone(), model.bias.detach().clone()
    server = dbcl.Server(model, dbcl.SketchConfig(coverage="all", veil=0))
    broadcast = server.open_round()
    x, answers = torch.randn(2, 5, 9, dtype=torch.float64), []
    for client in range(2):
        local = dbcl.blinded(model, broadcast)
        local(x[client]).square().sum().backward()
        torch.optim.SGD(local.parameters(), lr=0.1).step()
        answers.append(dbcl.make_update(local, broadcast, examples=5))
    server.close_round(answers)
    R = broadcast.sketches()["weight"].dense()
    S = R * broadcast.sketches()["weight"].gain(R).sqrt()
    both = x.reshape(10, 9)
    G = 2 * (both @ S @ S.T @ W.T + b)
    torch.testing.assert_close(model.weight.detach(), W - 0.1 * (G.T @ both @ S @ S.T) / 2, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.bias.detach(), b - 0.1 * G.sum(dim=0) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (dbcl.optim.fedavg(), [1.0, 2.0, 3.0]),
        (dbcl.optim.fedavg(0.5), [0.5, 1.0, 1.5]),
        (dbcl.optim.momentum(0.5), [1.0, 2.5, 4.25]),
        (dbcl.optim.adam(0.1, eps=0.0), [0.1, 0.2, 0.3]),
    ],
    ids=["plain", "half", "momentum", "adam"],
)
def test_server_optimisers_step_on_the_true_weights(optimizer: dbcl.optim.ServerOptimizer, expected: list) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(veil=0, coverage="hidden"), optimizer=optimizer)
    start = server.model[2].bias.detach().clone()
    for value in expected:
        server.close_round([answer(server.open_round(), 1.0)])
        torch.testing.assert_close(server.model[2].bias.detach(), start + value)


def spoil(update: dbcl.Update, name: str, tensor: torch.Tensor) -> dbcl.Update:
    return dataclasses.replace(update, tensors={**update.tensors, name: tensor})


NAN, INF, HUGE = torch.full((6,), math.nan), torch.full((6,), -math.inf), torch.full((6,), 3e38)
BAD = {
    "nan": (lambda u: spoil(u, "0.bias", NAN), "0.bias holds NaN"),
    "infinity": (lambda u: spoil(u, "0.bias", INF), "0.bias holds infinity"),
    "huge": (lambda u: spoil(u, "0.bias", HUGE), "its norm 7.348e.38 is beyond"),
    "shape": (lambda u: spoil(u, "0.weight", torch.zeros(6, 8)), r"0.weight has shape \(6, 8\) and must have \(6, 4\)"),
    "dtype": (
        lambda u: spoil(u, "0.bias", torch.zeros(6).half()),
        "0.bias is torch.float16, and must be torch.float32",
    ),
    "whole numbers": (lambda u: spoil(u, "0.bias", torch.zeros(6).long()), "0.bias is torch.int64"),
    "extra": (lambda u: spoil(u, "more", torch.zeros(1)), "'more' was not asked for"),
    "name": (
        lambda u: dataclasses.replace(u, tensors={n.replace("0.bias", "O.bias"): t for n, t in u.tensors.items()}),
        "0.bias is missing; 'O.bias' was not asked for",
    ),
    "missing": (
        lambda u: dataclasses.replace(u, tensors={n: t for n, t in u.tensors.items() if n != "2.bias"}),
        "2.bias is missing",
    ),
    "old round": (lambda u: dataclasses.replace(u, round=6), "answers round 6, and round 0 is open"),
    "other plan": (lambda u: dataclasses.replace(u, plan="0" * 64), "answers another plan than this round's"),
    "no examples": (lambda u: dataclasses.replace(u, examples=0), "examples must be between 1 and 10000000, got 0"),
    "negative": (lambda u: dataclasses.replace(u, examples=-5), "examples must be between 1 and 10000000, got -5"),
    "absurd": (lambda u: dataclasses.replace(u, examples=10**12), "examples must be between 1 and 10000000"),
    "fraction": (lambda u: dataclasses.replace(u, examples=0.5), "examples must be a whole number, got 0.5"),
    "truth": (lambda u: dataclasses.replace(u, examples=True), "examples must be a whole number, got True"),
    "metric": (lambda u: dataclasses.replace(u, metrics={"loss": math.nan}), "metric 'loss' is nan"),
    "truncated": (lambda u: dbcl.encode(u)[:-7], "update: damaged or cut short"),
    "stub": (lambda u: dbcl.encode(u)[:20], "update: cut short, only 20 bytes long"),
    "corrupted": (lambda u: flip(dbcl.encode(u), 300), "damaged or cut short, its SHA-256 does not fit"),
    "version": (lambda u: flip(dbcl.encode(u), 4), "wire format version 0, and this dbcl reads version 1"),
    "garbage": (lambda u: b"GET / HTTP/1.1", "does not begin with DBCL"),
    "object": (lambda u: {"round": 0}, "is a dict and no update"),
}


def flip(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_refused_by_name_and_the_round_goes_on(server: dbcl.Server, kind: str) -> None:
    ruin, message = BAD[kind]
    broadcast = server.open_round()
    good = answer(broadcast)
    bad = ruin(answer(broadcast, 3.0))
    before = weights(server)
    with pytest.raises(ProtocolError, match=message):
        server.close_round([bad])  # alone: too few are left, and nothing has changed
    assert same(before, weights(server))
    assert server.round == 0
    report = server.close_round([good, bad, dbcl.encode(answer(broadcast, 1 + 1e-6))])
    assert report.accepted == 2
    (reason,) = report.refused
    assert reason.startswith("update 1: ")
    with pytest.raises(ProtocolError, match=message):
        raise ProtocolError(reason)
    torch.testing.assert_close(server.model[2].bias.detach(), before["2.bias"] + 1.0)


def test_too_few_updates_change_nothing_and_leave_the_round_open() -> None:
    server = dbcl.Server(
        net(), dbcl.SketchConfig(coverage="hidden"), validator=dbcl.protocol.UpdateValidator(min_updates=3)
    )
    broadcast = server.open_round()
    before = weights(server)
    with pytest.raises(ProtocolError, match="round 0 has 2 updates and needs 3"):
        server.close_round([answer(broadcast, 1.0), answer(broadcast, 1.1)])
    assert same(before, weights(server))
    again = server.open_round()
    assert dbcl.encode(again) == dbcl.encode(broadcast)
    assert server.close_round([answer(broadcast, scale) for scale in (1.0, 1.1, 1.2)]).accepted == 3


@pytest.mark.parametrize("clip", [True, False])
def test_a_norm_bound_clips_or_refuses(clip: bool) -> None:
    server = dbcl.Server(
        net(),
        dbcl.SketchConfig(veil=0, coverage="hidden"),
        validator=dbcl.protocol.UpdateValidator(norm_bound=0.5, clip=clip),
    )
    before = weights(server)
    broadcast = server.open_round()
    small, large = answer(broadcast, 0.01), answer(broadcast, 5.0)
    report = server.close_round([small, large])
    if clip:
        assert (report.accepted, report.clipped, report.refused) == (2, 1, ())
        length = math.sqrt(sum(float((weights(server)[n] - before[n]).square().sum()) for n in before))
        assert length == pytest.approx((0.5 + 0.01 * math.sqrt(44)) / 2, rel=1e-4)
    else:
        assert (report.accepted, report.clipped) == (1, 0)
        assert "its norm 33.17 is above the bound 0.5" in report.refused[0]


def test_rounds_must_be_opened_before_they_are_closed(server: dbcl.Server) -> None:
    with pytest.raises(ProtocolError, match="no round is open"):
        server.close_round([])


def test_an_answer_to_the_round_before_is_refused(server: dbcl.Server) -> None:
    old = server.open_round()
    server.close_round([answer(old)])
    server.open_round()
    with pytest.raises(ProtocolError, match="answers round 0, and round 1 is open"):
        server.close_round([answer(old)])


def test_seeds_are_fresh_unless_an_experiment_fixes_them() -> None:
    def seeds(server: dbcl.Server) -> list[bytes]:
        found = []
        for _ in range(3):
            broadcast = server.open_round()
            found.append(broadcast.plan.seed)
            server.close_round([answer(broadcast)])
        return found

    fresh = seeds(dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))) + seeds(
        dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
    )
    assert len(set(fresh)) == 6
    fixed = seeds(dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=7))
    assert len(set(fixed)) == 3
    assert (
        fixed
        == seeds(dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=7))
        != seeds(dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=8))
    )


@pytest.mark.parametrize("secret", [None, 3])
@pytest.mark.parametrize(
    "optimizer",
    [dbcl.optim.fedavg(), dbcl.optim.momentum(0.5), dbcl.optim.adam(0.1)],
    ids=["plain", "momentum", "adam"],
)
def test_a_restored_server_sends_the_same_broadcast_and_goes_on_alike(
    secret: int | None, optimizer: dbcl.optim.ServerOptimizer
) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=secret, optimizer=optimizer)
    for _ in range(2):
        server.close_round([answer(server.open_round())])
    other = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=secret, optimizer=optimizer)
    other.load_state(server.state())
    assert dbcl.encode(other.open_round()) == dbcl.encode(server.open_round())
    for each in (server, other):
        each.close_round([answer(each.open_round(), 0.5)])
    assert same(weights(server), weights(other))
    if secret is not None:
        assert dbcl.encode(other.open_round()) == dbcl.encode(server.open_round())


HIDDEN = dbcl.SketchConfig(coverage="hidden", ratio=2, veil=0.2)
OTHER_PLANS: dict[str, tuple[dbcl.SketchConfig, list[str]]] = {
    "coverage": (
        dbcl.SketchConfig(coverage="all"),
        ["sketch is lanes-v1 here and identity-v1 in the checkpoint: 4.weight"],
    ),
    "ratio": (
        dataclasses.replace(HIDDEN, ratio=4, lanes=2),
        ["ratio is 4.0 here and 2.0 in the checkpoint: 0.weight, 0.bias, 2.weight and 3 more"],
    ),
    "veil": (
        dataclasses.replace(HIDDEN, veil=0.3),
        ["veil is 0.3 here and 0.2 in the checkpoint: 0.weight, 0.bias, 2.weight and 3 more"],
    ),
    "lanes": (
        dataclasses.replace(HIDDEN, lanes=1),
        ["lanes is 1 here and 2 in the checkpoint", "sketch is count-v1 here and lanes-v1 in"],
    ),
    "sketch": (
        dataclasses.replace(HIDDEN, sketch="identity-v1"),
        ["lanes is 1 here", "sketch is identity-v1 here and lanes-v1 in the checkpoint: 0.weight, 2.weight"],
    ),
    "all at once": (
        dataclasses.replace(HIDDEN, lanes=1, veil=0.0, ratio=(3.0, 4.0)),
        ["lanes is 1", "sketch is", "ratio is 3.0, 4.0 here and 2.0", "veil is 0.0"],
    ),
}


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("what", OTHER_PLANS)
def test_the_state_of_the_same_model_under_another_plan_names_the_differences(what: str) -> None:
    sketch, differences = OTHER_PLANS[what]
    state = dbcl.Server(deep(), HIDDEN).state()
    with pytest.raises(ProtocolError, match="belongs to another plan:\n  - ") as error:
        dbcl.Server(deep(), sketch).load_state(state)
    assert [each for each in differences if each not in str(error.value)] == []
    assert str(error.value).count("\n") == len(differences)


def test_tensors_that_only_one_of_two_plans_sends_are_named() -> None:
    whole, part = dbcl.Server(deep(), HIDDEN), deep()
    part[0].requires_grad_(False)
    frozen = dbcl.Server(part, HIDDEN)
    with pytest.raises(ProtocolError, match=r"in the checkpoint, and not sent here: 0.weight, 0.bias"):
        frozen.load_state(whole.state())
    with pytest.raises(ProtocolError, match=r"sent here, and not in the checkpoint: 0.weight, 0.bias"):
        whole.load_state(frozen.state())
    with pytest.raises(ProtocolError, match=r"the frozen parameters that are sent.*send_frozen"):
        dbcl.Server(part, dataclasses.replace(HIDDEN, send_frozen=True)).load_state(frozen.state())


def test_the_state_of_another_plan_is_refused(server: dbcl.Server) -> None:
    with pytest.raises(ProtocolError, match="another plan"):
        dbcl.Server(net(), dbcl.SketchConfig(veil=0, coverage="hidden")).load_state(server.state())
    with pytest.raises(ProtocolError, match="with the optimiser SGD and this one has Adam"):
        dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), optimizer=dbcl.optim.adam()).load_state(server.state())
    with pytest.raises(ProtocolError, match="of an older dbcl or of something else: it has no 'weights'"):
        server.load_state(State({"round": {"number": 3, "key": "ab", "plan": "cd"}}, {}))


@pytest.mark.parametrize("wire", ["float64", "float32", "bfloat16", "float16"])
def test_wire_dtypes_reach_both_directions(wire: str) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), wire=wire)
    broadcast = dbcl.protocol.decode_broadcast(dbcl.encode(server.open_round()))
    dtype = getattr(torch, wire)
    assert {tensor.dtype for tensor in broadcast.tensors.values()} == {dtype}
    local = dbcl.blinded(net(), broadcast)
    assert {parameter.dtype for parameter in local.parameters()} == {torch.float32}
    update = answer(broadcast, 0.25)
    assert {tensor.dtype for tensor in update.tensors.values()} == {dtype}
    before = weights(server)
    server.close_round([dbcl.encode(update)])
    torch.testing.assert_close(weights(server)["2.bias"], before["2.bias"] + 0.25, rtol=0, atol=1e-2)
    with pytest.raises(ProtocolError, match="wire must be one of float64, float32, bfloat16, float16, got 'int8'"):
        dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), wire="int8")


def test_frozen_parameters_are_not_sent() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    server = dbcl.Server(model, dbcl.SketchConfig(coverage="all"), optimizer=dbcl.optim.momentum(0.9))
    before = weights(server)
    broadcast = dbcl.protocol.decode_broadcast(dbcl.encode(server.open_round()))
    assert sorted(broadcast.tensors) == ["0.bias", "2.bias", "2.weight"]
    assert [name for name, _ in broadcast.plan.frozen] == ["0.weight"]
    with pytest.raises(
        dbcl.errors.PlanError, match=r"0.weight is frozen, and this model's copy differs from the server's"
    ):
        dbcl.blinded(net(), broadcast)
    template = net()
    template[0].weight.data.copy_(model[0].weight)
    local = dbcl.blinded(template, broadcast)  # trainable in the client's own module, and frozen in its copy
    assert not local[0].weight.requires_grad
    local(torch.ones(3, 8)).sum().backward()
    torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1).step()
    server.close_round([dbcl.encode(dbcl.make_update(local, broadcast, examples=3))])
    assert torch.equal(weights(server)["0.weight"], before["0.weight"])
    assert not torch.equal(weights(server)["0.bias"], before["0.bias"])
    assert "not sent: 1 frozen parameters (0.weight)" in str(server.plan)


def test_local_adam_and_any_loop_will_do(server: dbcl.Server) -> None:
    broadcast = server.open_round()
    local = dbcl.blinded(net(), broadcast)
    optimizer = torch.optim.AdamW(local.parameters(), lr=0.01)
    x, y = torch.randn(32, 8), torch.arange(32) % 2
    losses = []
    for _ in range(50):
        loss = nn.functional.cross_entropy(local(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert server.close_round([dbcl.make_update(local, broadcast, examples=32)]).accepted == 1


@pytest.mark.parametrize("norm_bound", [None, 3.0])
def test_whoever_averages_the_lifted_weights_gets_what_close_round_gives(norm_bound: float | None) -> None:
    torch.manual_seed(0)
    validator = dbcl.protocol.UpdateValidator(norm_bound=norm_bound)
    one = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0, validator=validator)
    torch.manual_seed(0)
    other = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0, validator=validator)
    broadcast = one.open_round()
    other.open_round()
    answers = [answer(broadcast, 0.1, examples=10), answer(broadcast, 4.0, examples=30), b"garbage"]
    report = one.close_round(answers)
    result = other.validate({f"update {number}": each for number, each in enumerate(answers)})
    lifted = [(result.accepted[who].update.examples, tensors) for who, tensors in other.averaging.lifted(result)]
    mean = {name: sum(n / 40 * tensors[name].double() for n, tensors in lifted) for name in broadcast.tensors}
    made = replacement(mean, dict(other.model.named_parameters()), count=len(result.accepted))
    same_report = other.close(made, result.stats())
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-5, atol=1e-6)
    assert same_report.norm == pytest.approx(report.norm, rel=1e-5)
    assert dataclasses.replace(same_report, norm=0) == dataclasses.replace(report, norm=0)
    assert (one.round, other.round) == (1, 1)
    assert same(one.open_round().tensors, one.open_round().tensors)


def test_an_aggregation_of_ones_own_replaces_the_mean() -> None:
    class Median:
        def aggregate(self, result: dbcl.protocol.ValidationResult) -> Aggregate:
            every = [made for _, made in server.averaging.lifted(result)]
            median = {name: torch.stack([made[name] for made in every]).median(dim=0).values for name in every[0]}
            return replacement(median, server.weights(), len(every))

    server = dbcl.Server(net(), dbcl.SketchConfig(lanes=1), insecure_seed=0, optimizer=dbcl.optim.fedavg())
    before, broadcast = weights(server), server.open_round()
    answers = {who: answer(broadcast, size) for who, size in (("ann", 0.1), ("bob", 0.2), ("cleo", 0.9))}
    middle = dict(server.averaging.lifted(server.validate({"bob": answers["bob"]})))["bob"]
    assert server.close_validated(server.validate(answers), Median()).accepted == 3
    for name, tensor in weights(server).items():
        torch.testing.assert_close(tensor, middle[name].to(tensor))
        assert not torch.equal(tensor, before[name])


def test_an_aggregate_that_does_not_fit_leaves_the_round_open() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(lanes=1, coverage="hidden"), insecure_seed=0)
    before = weights(server)
    broadcast = server.open_round()
    sums = {name: torch.ones_like(tensor) for name, tensor in broadcast.tensors.items()}
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in before.items()}
    bad = {
        "2.bias is not finite": replacement({**before, "2.bias": torch.tensor([1.0, math.nan])}, before, count=1),
        "0.weight is missing": replacement({}, before, count=1),
        r"2.bias has shape \(1,\) and must have \(2,\)": replacement({**before, "2.bias": torch.ones(1)}, before, 1),
        r"0.weight has shape \(6, 8\) and must have \(6, 4\)": Aggregate(before, weight=1.0, count=1),
        "0.bias leaves the range of the weights' dtype": Aggregate(huge, weight=1.0, count=1, lifted=True),
    }
    server.model[0].bias.data.fill_(3e38)
    before["0.bias"] = server.model[0].bias.detach().clone()
    for reason, aggregate in bad.items():
        with pytest.raises(ProtocolError, match=reason):
            server.close(aggregate)
    with pytest.raises(ProtocolError, match="of 1 update or more, got 0"):
        Aggregate(sums, weight=1.0, count=0)
    assert same(weights(server), before)
    assert server.open_round() is broadcast
    server.close(Aggregate(sums, weight=2.0, count=1))
    torch.testing.assert_close(weights(server)["2.bias"], before["2.bias"] + 0.5)
    with pytest.raises(ProtocolError, match="no round is open"):
        server.close(Aggregate(sums, weight=2.0, count=1))


def test_an_aggregate_of_too_few_updates_is_refused() -> None:
    """Where the server learns only a sum, the validator still counts."""
    server = dbcl.Server(
        net(), dbcl.SketchConfig(lanes=1, coverage="hidden"), validator=dbcl.protocol.UpdateValidator(min_updates=3)
    )
    sums = dict(server.open_round().tensors)
    with pytest.raises(ProtocolError, match="made of 2 updates and 3 are needed"):
        server.close(Aggregate(sums, weight=2.0, count=2))
    assert server.close(Aggregate(sums, weight=3.0, count=3)).accepted == 3


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def measuring(broadcast: dbcl.Broadcast, x: torch.Tensor) -> dbcl.Update:
    """A client that only looks at its examples: what it measures, and no change of any weight."""
    local = dbcl.blinded(normalised(), broadcast).train()
    for batch in x.split(10):
        local(batch)
    return dbcl.make_update(local, broadcast, examples=len(x))


@pytest.mark.parametrize("veil", [0.0, 2.0])
def test_statistics_are_values_that_clients_measured_and_not_changes(veil: float) -> None:
    """Their average is the mean of the clients' own, whatever noise went out with the broadcast.

    Without noise it is what the server has, and with it the server measures on inputs of its own.
    """
    inputs = torch.randn(20, 8) if veil else None
    server = dbcl.Server(
        normalised(), dbcl.SketchConfig(veil=veil, sketch="identity-v1"), insecure_seed=0, calibration=inputs
    )
    with torch.no_grad():
        server.model[1].running_mean.fill_(7.0)
    broadcast = dbcl.protocol.decode_broadcast(dbcl.encode(server.open_round()))
    one, two = torch.randn(10, 8), torch.randn(30, 8) - 3
    updates = [measuring(broadcast, one), measuring(broadcast, two)]
    received = dbcl.blinded(normalised(), broadcast)[0]
    z = received(one)
    torch.testing.assert_close(updates[0].tensors["1.running_mean"], z.mean(dim=0).detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(updates[0].tensors["1.running_var"], z.var(dim=0).detach(), rtol=1e-3, atol=1e-3)
    weights = {name: tensor.clone() for name, tensor in server.model.named_parameters()}
    averages = server.averaging.aggregate(server.validate({"one": updates[0], "two": updates[1]})).mean()
    report = server.close_round([dbcl.encode(update) for update in updates])
    expected = (updates[0].tensors["1.running_mean"] * 10 + updates[1].tensors["1.running_mean"] * 30) / 40
    torch.testing.assert_close(averages["1.running_mean"], expected)
    if inputs is not None:
        expected = server.model[0](inputs).mean(dim=0).detach()
    torch.testing.assert_close(server.model[1].running_mean, expected)
    assert report.norm == 0
    assert all(torch.equal(tensor, weights[name]) for name, tensor in server.model.named_parameters())


def test_a_client_that_measured_nothing_says_nothing() -> None:
    server = dbcl.Server(normalised(), dbcl.SketchConfig(veil=0, sketch="identity-v1"))
    before = server.model[1].running_mean.clone()
    broadcast = server.open_round()
    silent = dbcl.make_update(dbcl.blinded(normalised(), broadcast), broadcast, examples=5)
    assert "1.running_mean" not in silent.tensors
    noised = dbcl.make_update(
        dbcl.blinded(normalised(), broadcast),
        broadcast,
        examples=5,
        noise=dbcl.privacy.UpdateNoise(clip=1.0, multiplier=0.1),
    )
    assert "1.running_mean" not in noised.tensors
    server.close_round([silent, noised])
    assert torch.equal(server.model[1].running_mean, before)
    broadcast = server.open_round()
    seen = measuring(broadcast, torch.randn(20, 8))
    server.close_round([dbcl.make_update(dbcl.blinded(normalised(), broadcast), broadcast, examples=1000), seen])
    assert not torch.equal(server.model[1].running_mean, before)


def test_a_negative_variance_is_refused() -> None:
    server = dbcl.Server(normalised(), dbcl.SketchConfig(veil=0, sketch="identity-v1"))
    update = measuring(server.open_round(), torch.randn(20, 8))
    with pytest.raises(ProtocolError, match=r"1.running_var holds a negative variance"):
        server.close_round([spoil(update, "1.running_var", -torch.ones(6))])
    with pytest.raises(ProtocolError, match=r"1.running_mean holds NaN"):
        server.close_round([spoil(update, "1.running_mean", NAN)])


def half(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).to(dtype)


def nudged(broadcast: dbcl.Broadcast, by: float) -> dbcl.Update:
    changes = {name: torch.full_like(tensor, by) for name, tensor in broadcast.tensors.items()}
    return dbcl.Update(broadcast.round, broadcast.plan.digest, changes, examples=1)


@pytest.mark.parametrize("optimizer", [dbcl.optim.fedavg(), dbcl.optim.momentum(beta=0.5, lr=0.5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_a_half_precision_model_add_up(dtype: torch.dtype, optimizer, tmp_path: Path) -> None:
    """Each of 200 updates is far below the resolution of a weight of size 1."""
    server = dbcl.Server(half(dtype), dbcl.SketchConfig(veil=0, coverage="all"), optimizer=optimizer, insecure_seed=0)
    nn.init.ones_(server.model[2].bias)
    start = server.model[2].bias.detach().double()
    for number in range(200):
        broadcast = server.open_round()
        assert all(tensor.dtype == dtype for tensor in broadcast.tensors.values())
        server.close_round([nudged(broadcast, 1e-4)])
        if number == 100:
            server.save(tmp_path)
            model = half(dtype)
            server = dbcl.Server.load(
                tmp_path, model, dbcl.SketchConfig(veil=0, coverage="all"), optimizer=optimizer, insecure_seed=0
            )
    assert server.model[2].bias.dtype == dtype
    torch.testing.assert_close(
        server.model[2].bias.detach().double() - start, torch.full((2,), 0.02).double(), rtol=0.2, atol=0
    )
    torch.testing.assert_close(server.weights()["2.bias"], torch.full((2,), 1.02), rtol=1e-4, atol=0)


def test_weights_written_into_a_half_precision_model_are_taken_over() -> None:
    server = dbcl.Server(half(torch.bfloat16), dbcl.SketchConfig(veil=0, coverage="hidden"), insecure_seed=0)
    server.open_round()
    server.close_round([nudged(server.open_round(), 1e-4)])
    kept = server.weights()["2.weight"].clone()
    with torch.no_grad():
        server.model[2].bias.fill_(3.0)
    assert torch.equal(server.open_round().tensors["2.bias"], torch.full((2,), 3.0, dtype=torch.bfloat16))
    assert torch.equal(server.weights()["2.weight"], kept)


def test_an_aggregate_must_stay_in_the_range_of_a_half_precision_model() -> None:
    server = dbcl.Server(half(torch.float16), dbcl.SketchConfig(veil=0, coverage="hidden"), insecure_seed=0)
    nn.init.constant_(server.model[2].bias, 6e4)
    broadcast = server.open_round()
    with pytest.raises(ProtocolError, match=r"2.bias leaves the range of the weights' dtype"):
        server.close_round([nudged(broadcast, 3e4)])


def adapted(base: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    frozen = nn.Linear(8, 8).to(base).requires_grad_(False)
    return nn.Sequential(frozen, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def frozen_server(**settings) -> dbcl.Server:
    return dbcl.Server(adapted(), **nested({"send_frozen": True, "coverage": "hidden", **settings}))


def test_frozen_parameters_are_sent_once_under_one_noise() -> None:
    server = frozen_server(veil=0.2)
    data = dbcl.encode(server.base())
    assert (
        len(dbcl.encode(server.open_round()))
        < len(dbcl.encode(dbcl.Server(adapted(), dbcl.SketchConfig(coverage="hidden")).open_round())) + 100
    )
    local = dbcl.blinded(dbcl.protocol.load_base(adapted(seed=5), dbcl.protocol.decode_base(data)), server.open_round())
    noise = local[0].weight - server.model[0].weight
    assert 0.1 < float(noise.norm() / server.model[0].weight.norm()) < 0.3
    for _ in range(3):  # training moves everything that is not frozen, and asking again averages nothing away
        broadcast = server.open_round()
        assert not {"0.weight", "0.bias"} & broadcast.tensors.keys()
        local = dbcl.blinded(dbcl.protocol.load_base(adapted(seed=6), server.base()), broadcast)
        local(torch.randn(4, 8)).square().mean().backward()
        torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=1.0).step()
        server.close_round([dbcl.make_update(local, broadcast, examples=4)])
        assert dbcl.encode(server.base()) == data
    assert torch.equal(server.model[0].weight, adapted()[0].weight)


def test_a_client_without_the_servers_frozen_parameters_is_refused_with_the_remedy() -> None:
    server = frozen_server()
    with pytest.raises(dbcl.errors.PlanError, match=r"0.weight is frozen, .* load what server.base\(\) sends"):
        dbcl.blinded(adapted(), server.open_round())  # even the true ones: the fingerprint is of what is sent
    with pytest.raises(dbcl.errors.PlanError, match=r"0.weight has shape \(3, 8\) and must have \(8, 8\)"):
        dbcl.protocol.load_base(nn.Sequential(nn.Linear(8, 3)), server.base())
    with pytest.raises(ProtocolError, match=r"make the server with SketchConfig\(send_frozen=True\)"):
        dbcl.Server(adapted(), dbcl.SketchConfig(coverage="hidden")).base()


def test_a_resumed_server_never_draws_a_second_noise(tmp_path: Path) -> None:
    server = frozen_server()
    server.save(tmp_path)
    revived = dbcl.Server.load(tmp_path, adapted(), dbcl.SketchConfig(send_frozen=True, coverage="hidden"))
    assert dbcl.encode(revived.base()) == dbcl.encode(server.base())
    assert revived.open_round().plan.frozen == server.open_round().plan.frozen
    assert dbcl.encode(frozen_server().base()) != dbcl.encode(server.base())
    assert dbcl.encode(frozen_server(insecure_seed=3).base()) == dbcl.encode(frozen_server(insecure_seed=3).base())
    with pytest.raises(ProtocolError, match="another plan"):
        dbcl.Server.load(tmp_path, adapted(), dbcl.SketchConfig(coverage="hidden"))


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("base", [torch.float32, torch.float64, torch.bfloat16])
def test_a_base_of_any_number_type_arrives_over_any_wire(base: torch.dtype, wire: str | None) -> None:
    server = dbcl.Server(adapted(base), dbcl.SketchConfig(send_frozen=True, coverage="hidden"), wire=wire)
    mine = dbcl.protocol.load_base(adapted(base, seed=1), dbcl.protocol.decode_base(dbcl.encode(server.base())))
    assert mine[0].weight.dtype == base
    dbcl.blinded(mine, dbcl.protocol.decode_broadcast(dbcl.encode(server.open_round())))


def test_values_that_are_not_floating_point_are_never_sent() -> None:
    model = adapted()
    model.table = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
    nn.init.zeros_(model[0].bias)
    plan = dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(send_frozen=True, coverage="hidden"))
    assert "sent once: 2 frozen parameters (0.weight, 0.bias), veil 0.2" in str(plan)
    assert plan.not_sent == (("table", "frozen"),)
    assert plan.adjust("0.*", veil=0).unprotected == ("0.weight", "0.bias")
    server = dbcl.Server(model, plan)
    assert float(server.base().tensors["0.bias"].abs().min()) > 0  # zeros are veiled too
    assert torch.equal(dbcl.Server(model, plan.adjust("0.*", veil=0)).base().tensors["0.weight"], model[0].weight)
