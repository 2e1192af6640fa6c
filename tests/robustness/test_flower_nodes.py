"""A table of what one node of four can do: every round commits with the honest three, and the log stays readable."""

import copy
import logging
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from torch import nn

import dbcl
from dbcl.flower import DoubleBlind, LocalGrid, blinded, reply
from robustness import fuzz

NODES, HOSTILE, ROUNDS = 4, 1002, 2


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def nodes() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = blinded(net(), message)
        client = int(context.node_config["partition-id"])
        model(torch.full((4, 6), 1.0 + client)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        return reply(model, message, examples=10, metrics={"loss": 0.5})

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return reply(None, message, examples=10, metrics={"loss": 0.25})

    return app


class HostileGrid(LocalGrid):
    """What the hostile node answers is what `behave` makes of its honest answer."""

    def __init__(self, behave: Callable[[Message], Message | list[Message] | None]) -> None:
        super().__init__(nodes(), NODES)
        self.behave = behave

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        came = []
        for answer in super().send_and_receive(messages, timeout=timeout):
            if answer.metadata.src_node_id != HOSTILE:
                came.append(answer)
                continue
            made = self.behave(answer)
            came += made if isinstance(made, list) else [made] if made is not None else []
        return came


Behaviour = Callable[[Message], Message | list[Message] | None]


def trains(answer: Message) -> bool:
    return answer.metadata.message_type.startswith("train")


def content(make: Callable[[], Any]) -> Behaviour:
    """Another content, in both phases."""

    def behave(answer: Message) -> Message:
        answer.content = RecordDict(make())
        return answer

    return behave


def update(change: Callable[[dbcl.Update], Any]) -> Behaviour:
    """Another update; it evaluates honestly."""

    def behave(answer: Message) -> Message:
        if trains(answer):
            made = change(dbcl.protocol.decode_update(answer.content["dbcl"]["update"]))
            data = made if isinstance(made, bytes) else dbcl.encode(made)
            answer.content["dbcl"] = ConfigRecord({"update": data})
        return answer

    return behave


def metrics(**values: Any) -> Behaviour:
    """Another evaluation; it trains honestly."""

    def behave(answer: Message) -> Message:
        if not trains(answer):
            answer.content["metrics"] = MetricRecord({"num-examples": 10, "loss": 0.25, **values})
        return answer

    return behave


def error(reason: str | None, code: int = 3) -> Behaviour:
    def behave(answer: Message) -> Message:
        return Message(Error(code, reason), reply_to=_question(answer))

    return behave


def _question(answer: Message) -> Message:
    asked = Message(RecordDict(), answer.metadata.src_node_id, answer.metadata.message_type)
    asked.metadata.__dict__["_message_id"] = answer.metadata.reply_to_message_id
    return asked


def meta(**values: Any) -> Behaviour:
    def behave(answer: Message) -> Message:
        for name, value in values.items():
            answer.metadata.__dict__[f"_{name}"] = value
        return answer

    return behave


def scaled(factor: float) -> Behaviour:
    return update(lambda u: replace(u, tensors={n: t * factor for n, t in u.tensors.items()}))


def twice(answer: Message) -> list[Message]:
    return [answer, copy.deepcopy(answer)]


def ten_times_another(answer: Message) -> list[Message]:
    """Ten answers, of which every one after the first pulls the other way."""
    back = copy.deepcopy(answer)
    return [answer, *[scaled(-100.0)(back) if trains(answer) else back for _ in range(9)]]  # type: ignore[list-item]


def of_a_stranger(answer: Message) -> list[Message]:
    other = copy.deepcopy(answer)
    other.metadata.__dict__["_src_node_id"] = 77
    return [answer, other]


def error_and_answer(answer: Message) -> list[Message]:
    return [error("first")(answer), answer]  # type: ignore[list-item]


class Late:
    """The answer of the round before, in every round after the first."""

    def __init__(self) -> None:
        self.kept: dict[str, Message] = {}

    def __call__(self, answer: Message) -> Message:
        kept = self.kept.get(answer.metadata.message_type)
        self.kept[answer.metadata.message_type] = copy.deepcopy(answer)
        return answer if kept is None else kept


def swapped(answer: Message) -> Message:
    """To train with metrics, to evaluate with an update."""
    if trains(answer):
        answer.content = RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 0.1})})
    else:
        answer.content = RecordDict({"dbcl": ConfigRecord({"update": b"DBCL" + bytes(100)})})
    return answer


ESCAPE = "\x1b[31m[bold]<script>\n\r\x07\u202e"
ARRAYS = {"w": Array(np.zeros(3))}

BEHAVIOURS: dict[str, Behaviour] = {
    "no answer": lambda answer: None,
    "nothing in it": content(dict),
    "metrics to train, update to evaluate": swapped,
    "garbage bytes": content(lambda: {"dbcl": ConfigRecord({"update": b"\xff" * 1000}), "metrics": MetricRecord()}),
    "no bytes": content(lambda: {"dbcl": ConfigRecord({"update": b""})}),
    "text for bytes": content(lambda: {"dbcl": ConfigRecord({"update": "DBCL"})}),
    "a number for bytes": content(lambda: {"dbcl": ConfigRecord({"update": 7})}),
    "a list for bytes": content(lambda: {"dbcl": ConfigRecord({"update": [b"DBCL", b""]})}),
    "another name for it": content(lambda: {"dbcl": ConfigRecord({"updates": b"DBCL"})}),
    "metrics where the update belongs": content(lambda: {"dbcl": MetricRecord({"update": 1.0})}),
    "arrays where the update belongs": content(lambda: {"dbcl": ArrayRecord(ARRAYS)}),
    "plain weights": content(lambda: {"arrays": ArrayRecord(net().state_dict()), "metrics": MetricRecord({"a": 1.0})}),
    "a thousand records": content(lambda: {f"r{n}": ConfigRecord({"a": 1}) for n in range(1000)}),
    "records called markup": content(lambda: {ESCAPE: ConfigRecord({"a": 1}), "x" * 100_000: ConfigRecord()}),
    "two MetricRecords": content(lambda: {name: MetricRecord({"num-examples": 5, "loss": 1.0}) for name in "ab"}),
    "the broadcast back": content(lambda: {"dbcl": ConfigRecord({"broadcast": b"DBCL", "update": b"DBCL"})}),
    "64 MB of zeros": content(lambda: {"dbcl": ConfigRecord({"update": bytes(64 << 20)})}),
    "a huge text beside it": content(lambda: {"config": ConfigRecord({"a": "x" * 10_000_000})}),
    "an error": error("out of paper"),
    "an error without a reason": error(None),
    "an error with an empty reason": error(""),
    "an error of 1 MB": error("x" * (1 << 20)),
    "an error that is markup": error(ESCAPE * 50),
    "an error with surrogates": error("\ud800" * 10),
    "an error of an unknown code": error("?", code=-(1 << 40)),
    "twice": twice,
    "ten times, the others worse": ten_times_another,
    "an error and an answer": error_and_answer,
    "an answer as a stranger too": of_a_stranger,
    "as a stranger": meta(src_node_id=77),
    "as nobody": meta(src_node_id=0),
    "to another message": meta(reply_to_message_id="another"),
    "with another type": meta(message_type="query"),
    "with a type of markup": meta(message_type="train" + ESCAPE),
    "of another run": meta(run_id=99),
    "the last round's answer": Late(),
    "NaN": scaled(math.nan),
    "infinity": scaled(math.inf),
    "a million times": scaled(1e6),
    "minus ten times": scaled(-10.0),
    "1e30 times": scaled(1e30),
    "zeros": scaled(0.0),
    "another round": update(lambda u: replace(u, round=u.round + 1)),
    "another plan": update(lambda u: replace(u, plan=ESCAPE)),
    "ten million examples": update(lambda u: replace(u, examples=10_000_000)),
    "2^62 examples": update(lambda u: replace(u, examples=1 << 62)),
    "minus one example": update(lambda u: replace(u, examples=-1)),
    "no tensor": update(lambda u: replace(u, tensors={})),
    "more tensors": update(lambda u: replace(u, tensors={**u.tensors, "[b]": torch.zeros(1)})),
    "other shapes": update(lambda u: replace(u, tensors={n: t[None] for n, t in u.tensors.items()})),
    "other numbers": update(lambda u: replace(u, tensors={n: t.double() for n, t in u.tensors.items()})),
    "complex numbers": update(lambda u: replace(u, tensors={n: t + 1j for n, t in u.tensors.items()})),
    "half an update": update(lambda u: dbcl.encode(u)[:-40]),
    "a hundred metrics called markup": update(lambda u: replace(u, metrics={ESCAPE + str(n): 1.0 for n in range(99)})),
    "a metric of 1e99": update(lambda u: replace(u, metrics={"loss": 1e99, "num-examples": 1e99})),
    "a metric of NaN": update(lambda u: replace(u, metrics={"loss": math.nan})),
    "a metric of markup": metrics(**{ESCAPE: 1.0}),
    "a metric called nothing": metrics(**{"": 1.0}),
    "a metric of 10^300 as a whole number": metrics(loss=10**300),
    "a metric of infinity": metrics(loss=math.inf),
    "a list for a metric": metrics(loss=[1.0, 2.0]),
    "examples as NaN": metrics(**{"num-examples": math.nan}),
    "examples as a fraction": metrics(**{"num-examples": 0.5}),
    "examples as a float": metrics(**{"num-examples": 3.5}),
    "minus examples": metrics(**{"num-examples": -5}),
    "10^18 examples": metrics(**{"num-examples": 10**18}),
    "examples as a list": metrics(**{"num-examples": [1, 2]}),
    "ten thousand metrics": metrics(**{f"m{n}": 1.0 for n in range(10_000)}),
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_one_node_of_four(name: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = DoubleBlind(flower.FedAdam(eta=0.01), net(), insecure_seed=0)
    with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
        result = strategy.start(HostileGrid(BEHAVIOURS[name]), num_rounds=ROUNDS)
    assert strategy.server.round == ROUNDS
    for number, report in enumerate(strategy.reports):
        assert report.accepted >= NODES - 1
        assert all(reason.startswith((f"node {HOSTILE}: ", "node 77: ")) for reason in report.refused)
        assert report.accepted + len(report.refused) == NODES
        assert math.isfinite(float(result.train_metrics_clientapp[number + 1]["loss"]))  # type: ignore[arg-type]
        assert 0.2 < float(result.evaluate_metrics_clientapp[number + 1]["loss"]) < 1e100  # type: ignore[arg-type]
    ours = [record.getMessage() for record in caplog.records if record.name == "flwr.dbcl"]
    for said in [*ours, *(reason for report in strategy.reports for reason in report.refused)]:
        assert len(said) <= 300, said[:400]
        assert said.isprintable(), said
        assert "[" not in said, said
        assert "<" not in said, said
    for tensor in strategy.server.model.parameters():
        assert tensor.isfinite().all()
        assert tensor.abs().max() < 2


def test_the_table_is_long_enough() -> None:
    assert len(BEHAVIOURS) >= 45


def test_a_plain_average_stays_near_the_honest_one() -> None:
    """What the validator lets through of a hostile node pulls no further than four honest ones."""

    def moved(behave: Behaviour) -> float:
        strategy = DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), net(), insecure_seed=0)
        strategy.start(HostileGrid(behave), num_rounds=1)
        return (
            sum(
                float((now - before).detach().square().sum())
                for now, before in zip(strategy.server.model.parameters(), net().parameters(), strict=True)
            )
            ** 0.5
        )

    honest = moved(lambda answer: answer)
    for name in ("a million times", "minus ten times", "ten million examples", "ten times, the others worse", "twice"):
        assert moved(BEHAVIOURS[name]) < 4 * honest, name


@pytest.mark.parametrize("rounds", [20, pytest.param(1_000, marks=pytest.mark.slow)])
def test_mutated_updates_of_a_node(rounds: int) -> None:
    """DoubleBlind reads what the fuzzer makes of honest updates: every round commits with the honest three."""
    rng = random.Random(rounds)

    def behave(answer: Message) -> Message:
        answer.content["dbcl"] = ConfigRecord({"update": fuzz.mutated(answer.content["dbcl"]["update"], rng)})
        return answer

    strategy = DoubleBlind(flower.FedAvg(fraction_evaluate=0.0), net(), insecure_seed=0)
    strategy.start(HostileGrid(behave), num_rounds=rounds)
    assert [report.accepted >= NODES - 1 for report in strategy.reports] == [True] * rounds
    reasons = [reason for report in strategy.reports for reason in report.refused]
    assert len(reasons) > rounds // 2
    assert [reason for reason in reasons if fuzz.wrong_with(dbcl.errors.ProtocolError(reason))] == []
    assert [
        reason for reason in reasons if f"node {HOSTILE}: cannot be read" in reason
    ] == []  # caught at the last validator
