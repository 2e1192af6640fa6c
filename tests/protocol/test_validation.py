"""A validator that one client cannot own: weights, norms, copies, metrics, and a step that is undone if it fails."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import dbcl
from dbcl.errors import ConfigError, PlanError, ProtocolError
from dbcl.protocol import BroadcastRequirements
from dbcl.testing.nested import nested
from protocol.conftest import answer, net, same, weights

HONEST = (1.0, 1.01, 1.02, 1.03, 0.97, 0.98, 0.99, 1.04, 0.96)


def pull(hostile: dbcl.Update | None, **settings: Any) -> float:
    """How far the average moves W where nine honest clients move it by about 1."""
    torch.manual_seed(0)
    server = dbcl.Server(net(), insecure_seed=0, **nested({"veil": 0, "sketch": "identity-v1", **settings}))
    before = weights(server)
    broadcast = server.open_round()
    updates = [answer(broadcast, scale) for scale in HONEST]
    if hostile is not None:
        updates.append(
            dbcl.Update(0, broadcast.plan.digest, dict(hostile.tensors), hostile.examples, dict(hostile.metrics))
        )
    server.close_round(updates)
    return float((weights(server)["0.bias"] - before["0.bias"]).mean())


def hostile(scale: float, examples: int = 10) -> dbcl.Update:
    torch.manual_seed(0)
    server = dbcl.Server(net(), dbcl.SketchConfig(veil=0, sketch="identity-v1"), insecure_seed=0)
    return answer(server.open_round(), scale, examples)


@pytest.mark.parametrize(
    ("update", "least"),
    [
        (hostile(1e6), 1.0),  # (9 + 1.5) / 10
        (hostile(-10), 0.74),  # (9 - 1.5) / 10
        (hostile(-1e6), 0.74),
        (hostile(0.0, examples=10_000_000), 0.84),  # 9 / 10.5: it counts for one and a half
        (hostile(-10, examples=10_000_000), 0.70),  # one and a half times the weight of a usual length: 7.5 / 10.5
    ],
)
def test_one_client_in_ten_does_not_own_the_round(update: dbcl.Update, least: float) -> None:
    for validator in (dbcl.protocol.UpdateValidator(), dbcl.protocol.UpdateValidator(outlier_factor=None)):
        assert least <= pull(update, validator=validator) <= 1.06
    wild = pull(update, validator=dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None))
    assert not 0.1 < wild < 10


def test_an_update_many_times_longer_than_the_median_is_refused_and_named() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    broadcast = server.open_round()
    sent = {"ann": 1.0, "bob": 1.2, "cleo": 0.9, "dan": 40.0}
    report = server.close_round({who: answer(broadcast, scale) for who, scale in sent.items()})
    assert report.accepted == 3
    (reason,) = report.refused
    assert reason.startswith("dan: its norm")
    assert re.search(r"times the median of its lane, above 10: lower its learning rate", reason)
    assert "harm" not in reason  # an honest client's rate may be too high


def test_who_has_more_examples_may_move_farther_and_two_cannot_judge_each_other() -> None:
    for sent in ({"ann": (1.0, 10), "bob": (1.0, 10), "dan": (40.0, 50)}, {"ann": (1.0, 10), "dan": (40.0, 10)}):
        server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
        broadcast = server.open_round()
        report = server.close_round({who: answer(broadcast, *what) for who, what in sent.items()})
        assert report.accepted == len(sent)


def test_honest_updates_are_left_as_they_are() -> None:
    assert pull(None) == pull(None, validator=dbcl.protocol.UpdateValidator(max_influence=None))
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    broadcast = server.open_round()
    report = server.close_round([answer(broadcast, scale, examples=n) for scale, n in ((1.0, 10), (1.1, 12), (0.9, 9))])
    assert report.clipped == 0


def test_copies_count_once() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    broadcast = server.open_round()
    update = answer(broadcast)
    report = server.close_round([update, dbcl.encode(update), answer(broadcast, 2.0), update])
    assert report.accepted == 2
    assert report.refused == ("update 1: is a copy of update 0", "update 3: is a copy of update 0")


def test_clients_that_change_nothing_are_no_copies() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    broadcast = server.open_round()
    still = dbcl.make_update(dbcl.blinded(net(), broadcast), broadcast, examples=3)
    assert server.close_round([still, still, answer(broadcast)]).accepted == 3


def test_a_sender_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    broadcast = server.open_round()
    result = server.validate({7: answer(broadcast, 1.0), "7": answer(broadcast, 9.0)})
    assert result.accepted["7"].update.metrics == {"loss": 1.0}
    assert "1 further answers of 7 are ignored" in caplog.text


def test_two_clients_are_measured_by_the_last_rounds_and_a_restored_server_remembers_them() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(veil=0, sketch="identity-v1"), insecure_seed=0)
    for round in range(4):
        broadcast = server.open_round()
        server.close_round([answer(broadcast, 1.0 + round / 100), answer(broadcast, 1.1)])
    other = dbcl.Server(net(), dbcl.SketchConfig(veil=0, sketch="identity-v1"), insecure_seed=0)
    other.load_state(copy.deepcopy(server.state()))
    for each in (server, other):
        before = weights(each)
        broadcast = each.open_round()
        report = each.close_round([answer(broadcast, 1.0), answer(broadcast, -100.0)])
        assert report.clipped == 1
        assert float((weights(each)["0.bias"] - before["0.bias"]).mean()) > -0.4  # (1 - 1.5 x about 1.05) / 2
    assert same(weights(server), weights(other))


class Strange:
    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metrics": {f"m{number}": 1.0 for number in range(101)}}, "has 101 metrics, more than 100"),
        ({"metrics": {"loss": 1e101}}, "metric 'loss' is 1e"),
        ({"metrics": {"\x1b[31m": float("nan")}}, r"metric '.\(31m' is nan"),
        ({"metrics": {"loss": "low"}}, "cannot be read .TypeError"),
        ({"metrics": 3}, "cannot be read .TypeError"),
        ({"tensors": None}, "cannot be read"),
        ({"tensors": {"0.bias": "text"}}, "cannot be read"),
        ({"examples": Strange()}, "examples must be a whole number|cannot be read"),
        ({"round": Strange()}, "cannot be read|answers round"),
    ],
)
def test_whatever_one_client_sends_the_others_round_goes_on(change: dict[str, Any], reason: str) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    broadcast = server.open_round()
    honest = answer(broadcast)
    fields = {"round": 0, "plan": broadcast.plan.digest, "tensors": honest.tensors, "examples": 5, "metrics": {}}
    report = server.close_round([dbcl.Update(**{**fields, **change}), honest])
    assert report.accepted == 1
    (said,) = report.refused
    assert re.search(reason, said), said
    assert len(said) < 300
    assert said.isprintable()


@pytest.mark.parametrize("fails", ["raises", "not finite", "interrupted"])
def test_a_step_that_fails_is_undone(fails: str) -> None:
    class Optimizer(torch.optim.SGD):
        wrong = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.wrong:
                if fails == "raises":
                    raise RuntimeError("no more memory")
                if fails == "interrupted":
                    raise KeyboardInterrupt
                self.param_groups[0]["params"][0].data[0] = float("inf")

    server = dbcl.Server(
        net(),
        dbcl.SketchConfig(coverage="hidden"),
        insecure_seed=0,
        optimizer=lambda params: Optimizer(params, lr=1.0, momentum=0.5),
    )
    server.close_round([answer(server.open_round())])
    before, broadcast = copy.deepcopy(server.state()), server.open_round()
    Optimizer.wrong = True
    with pytest.raises((RuntimeError, KeyboardInterrupt, ProtocolError)):
        server.close_round([answer(broadcast)])
    Optimizer.wrong = False
    after = server.state()
    assert repr(after.values) == repr(before.values)
    assert same(after.tensors, before.tensors)
    assert server.open_round() is broadcast
    assert server.close_round([answer(broadcast)]).accepted == 1


def test_weights_that_are_not_finite_never_leave() -> None:
    """In 0.2 one NaN made a tensor's veil NaN, which switched it off."""
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
    with torch.no_grad():
        server.model[0].weight[0, 0] = float("nan")
    with pytest.raises(ProtocolError, match=r"0.weight must be veiled, and the size of its veil would be nan"):
        server.open_round()
    clear = dbcl.Server(net(), dbcl.SketchConfig(veil=0, coverage="hidden"))
    with torch.no_grad():
        clear.model[0].weight[0, 0] = float("inf")
    with pytest.raises(ProtocolError, match=r"nothing leaves the server, 0.weight holds NaN or infinity"):
        clear.open_round()
    narrow = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), wire="float16")
    with torch.no_grad():
        narrow.model[0].weight.mul_(1e6)
    with pytest.raises(ProtocolError, match=r"nothing leaves the server, 0.weight holds"):
        narrow.open_round()
    empty = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all"))
    for parameter in empty.model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(ProtocolError, match="the weights are all 0, so nothing leaves"):
        empty.open_round()


def test_a_key_veils_one_set_of_weights() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
    state = copy.deepcopy(server.state())
    first = server.open_round()
    server.load_state(state)
    assert dbcl.encode(server.open_round()) == dbcl.encode(first)  # after a crash the very same bytes
    server.load_state(state)
    with torch.no_grad():
        server.model[0].bias.add_(1)
    assert server.open_round().plan.seed != first.plan.seed


def test_clients_can_insist() -> None:
    def sent(**settings: Any) -> dbcl.Broadcast:
        return dbcl.protocol.decode_broadcast(
            dbcl.encode(dbcl.Server(net(), **nested({"coverage": "hidden", **settings})).open_round())
        )

    hidden = BroadcastRequirements(sketched="hidden")
    dbcl.blinded(net(), sent(), require=hidden)
    for settings, message in (
        ({"veil": 0.1}, "the veil is 0.1, and 0.2 is required"),
        ({"veil": 0}, "the veil is 0, and 0.2 is required"),
        ({"sketch": "identity-v1"}, "0.weight is not sketched"),
        ({"ratio": 1.2}, "0.weight is sketched from 8 to 6, a ratio below 2"),
    ):
        with pytest.raises(PlanError, match=message):
            dbcl.blinded(net(), sent(**settings), require=hidden)
    dbcl.blinded(net(), sent(sketch="identity-v1"), require=BroadcastRequirements(sketched=None))
    dbcl.blinded(net(), sent(veil=0.1), require=BroadcastRequirements(veil=0.05))
    with pytest.raises(PlanError, match="a ratio above 3"):
        dbcl.blinded(net(), sent(ratio=8), require=BroadcastRequirements(max_ratio=3))
    with pytest.raises(PlanError, match=r"2.weight is not sketched"):
        dbcl.blinded(net(), sent(), require=BroadcastRequirements(sketched="all"))
    for wrong in ({"veil": float("nan")}, {"min_ratio": 0.5}, {"min_ratio": 3, "max_ratio": 2}):
        with pytest.raises(ConfigError):
            BroadcastRequirements(**wrong)


@pytest.mark.parametrize("value", [0.5, float("nan"), -1])
def test_a_limit_below_the_median_is_refused(value: float) -> None:
    with pytest.raises(ProtocolError, match="max_influence must be 1 or more"):
        dbcl.protocol.UpdateValidator(max_influence=value)


def test_lanes_are_judged_apart() -> None:
    """A lane whose sketch sees nearly nothing of the data must not have the other lane's honest updates refused."""
    server = dbcl.Server(net(), dbcl.SketchConfig(lanes=2, coverage="hidden"), insecure_seed=0)
    sent = {f"client {number}": server.open_round(f"client {number}") for number in range(6)}
    updates = {who: answer(each, 1e-4 if each.plan.lane == 0 else 1.0) for who, each in sent.items()}
    assert server.close_round(updates).lanes == (3, 3)
