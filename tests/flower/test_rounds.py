"""DoubleBlind's rounds: what crosses the wire, what faults do, and going on after a crash."""

import logging
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from torch import Tensor, nn

import dbcl
from dbcl.config import SketchConfig
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower import DoubleBlind, LocalGrid, blinded, reply
from dbcl.flower.grid import GUARANTEE_REMEDY, REMEDY, SECURE_REMEDY, TimeoutGrid
from dbcl.flower.records import to_record
from dbcl.protocol import Reason
from dbcl.testing.nested import nested
from dbcl.testing.secrecy import leaks
from dbcl.transcripts import Recorder, Setting, Transcript

NODES = 4
TRAINING = LocalTraining(lr=0.1, batch_size=5)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def examples(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.randn(10 + client, 20, generator=generator), torch.arange(10 + client) % 3


Twist = Callable[[int, int, Message], Message]
"""What a client does to its honest answer: (client, round, answer) -> answer."""


def clients(twist: Twist = lambda client, round, answer: answer, before: Twist | None = None) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        round = int(message.content["config"]["server-round"]) - 1
        if before is not None:
            before(client, round, message)
        model = blinded(net(), message)
        x, y = examples(client)
        metrics = TRAINING.train(model, (x, y), seed=bytes(32), round=round, client=client)
        return twist(client, round, reply(model, message, examples=len(x), metrics=metrics))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = blinded(net(), message)
        x, y = examples(client)
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x), y).item()
        answer = reply(model, message, examples=len(x), metrics={"loss": loss})
        return twist(client, int(message.content["config"]["server-round"]) - 1, answer)

    return app


def fedavg(**more: Any) -> flower.FedAvg:
    return flower.FedAvg(**{"fraction_evaluate": 0.0, **more})


def altered(answer: Message, change: Callable[[dbcl.Update], dbcl.Update]) -> Message:
    update = change(dbcl.protocol.decode_update(answer.content["dbcl"]["update"]))
    answer.content["dbcl"] = ConfigRecord({"update": dbcl.encode(update)})
    return answer


def weights(strategy: DoubleBlind) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in strategy.server.model.named_parameters()}


class TestTheWire:
    """Everything that the grid carried, and everything that the clients hold, searched for the covered weights."""

    def play(self, *, broken: bool = False) -> tuple[list[Message], dict[str, Tensor], DoubleBlind]:
        strategy = DoubleBlind(
            flower.FedAdam(eta=0.01), net(), SketchConfig(veil=0.2, coverage="hidden")
        )  # evaluates, too
        if broken:
            honest = strategy._blind

            def leaky(asked: list[Message], *more: Any) -> list[Message]:
                messages = honest(asked, *more)
                messages[0].content["arrays"] = to_record(strategy.server.weights())
                return messages

            strategy._blind = leaky  # type: ignore[method-assign]
        carried: list[Message] = []
        secrets: dict[str, Tensor] = {}

        def note() -> None:
            covered = [t.name for t in strategy.server.plan.tensors if t.sketched]
            assert len(covered) == 2
            secrets.update({f"{n}, {strategy.server.round}": weights(strategy)[n] for n in covered})

        note()
        grid = LocalGrid(clients(), NODES, hook=carried.append)
        strategy.start(grid, num_rounds=2, evaluate_fn=lambda round, arrays: note())
        return carried, secrets, strategy

    def test_no_covered_weight_crosses_it(self) -> None:
        carried, secrets, _ = self.play()
        assert len(carried) == 2 * 2 * 2 * NODES  # rounds, phases, directions
        assert len(secrets) == 6
        assert leaks([vars(message) for message in carried], secrets) == []

    def test_the_search_would_have_found_one(self) -> None:
        carried, secrets, _ = self.play(broken=True)
        assert leaks([vars(message) for message in carried], secrets) != []

    def test_every_message_has_a_content_of_its_own_with_the_broadcast_alone(self) -> None:
        carried, _, _ = self.play()
        sent = [message for message in carried if message.metadata.dst_node_id >= 1000]
        assert len({id(message.content) for message in sent}) == len(sent)
        for message in sent:
            assert sorted(message.content) == ["config", "dbcl"]
            assert not message.content.array_records
            assert isinstance(message.content["dbcl"]["broadcast"], bytes)

    def test_evaluation_never_veils_the_same_weights_a_second_time(self) -> None:
        """A node trains in the lane in which it has evaluated; all lanes show one noise."""
        carried, _, strategy = self.play()
        sent = [message for message in carried if message.metadata.dst_node_id >= 1000]
        by_round: dict[int, set[bytes]] = {}
        by_node: dict[tuple[int, int], set[bytes]] = {}
        for message in sent:
            data = message.content["dbcl"]["broadcast"]
            broadcast = dbcl.protocol.decode_broadcast(data)
            by_round.setdefault(broadcast.round, set()).add(data)
            by_node.setdefault((broadcast.round, message.metadata.dst_node_id), set()).add(data)
        assert {round: len(broadcasts) for round, broadcasts in by_round.items()} == {0: 2, 1: 2, 2: 2}
        assert len(by_node) == 3 * NODES
        assert {len(broadcasts) for broadcasts in by_node.values()} == {1}
        for broadcasts in by_round.values():
            one, two = map(dbcl.protocol.decode_broadcast, broadcasts)
            assert sorted([one.plan.lane, two.plan.lane]) == [0, 1]
            for name in one.tensors.keys() - one.sketches().keys():
                assert torch.equal(one.tensors[name], two.tensors[name])
        assert strategy.server.round == 2

    def test_messages_come_as_lists(self) -> None:
        strategy = DoubleBlind(flower.FedAvg(), net(), SketchConfig(coverage="hidden"))
        grid = LocalGrid(clients(), NODES)
        strategy.start(grid, num_rounds=0)
        for configure in (strategy.configure_train, strategy.configure_evaluate):
            assert isinstance(configure(1, ArrayRecord(), ConfigRecord(), grid), list)


@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_the_true_weights_or_their_mean_are_evaluated_on_the_server_and_blinded_ones_on_the_nodes(
    decay: float,
) -> None:
    strategy = DoubleBlind(flower.FedAvg(), net(), SketchConfig(coverage="hidden"), insecure_seed=0, ema_decay=decay)
    seen: dict[int, float] = {}

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model = net()
        model.load_state_dict(arrays.to_torch_state_dict())
        for own, given in zip(strategy.server.released.parameters(), model.parameters(), strict=True):
            assert torch.equal(own, given)
        assert torch.equal(strategy.server.model[0].weight, model[0].weight) == (decay == 0 or round < 2)
        x, y = (torch.cat(parts) for parts in zip(*map(examples, range(NODES)), strict=True))
        seen[round] = nn.functional.cross_entropy(model(x), y).item()
        return MetricRecord({"loss": seen[round]})

    result = strategy.start(LocalGrid(clients(), NODES), num_rounds=2, evaluate_fn=evaluate)
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    blind = result.evaluate_metrics_clientapp[2]["loss"]
    assert isinstance(blind, float)
    assert abs(blind - seen[2]) > 1e-3  # the sketch is noise to a client that evaluates
    assert list(result.evaluate_metrics_clientapp[2]) == ["loss"]


def test_initial_arrays_and_configurations_arrive() -> None:
    other = nn.Sequential(*list(net()))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.125)
    seen: list[Any] = []
    strategy = DoubleBlind(fedavg(), net(), SketchConfig(veil=0.0, coverage="hidden"), insecure_seed=0)
    app = clients(before=lambda client, round, message: seen.append(message.content["config"]["lr"]))  # type: ignore[arg-type, return-value]
    strategy.start(LocalGrid(app, 2), ArrayRecord(other.state_dict()), 1, train_config=ConfigRecord({"lr": 0.5}))
    assert seen == [0.5, 0.5]
    assert (strategy.server.model[0].weight - 0.125).abs().max() < 0.1


class TestFaults:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda u: replace(u, tensors={n: t * math.nan for n, t in u.tensors.items()}), "holds NaN"),
            (lambda u: replace(u, round=u.round + 1), "answers round 1, and round 0 is open"),
            (lambda u: replace(u, plan="ab" * 32), "answers another plan than this round's"),
            (lambda u: replace(u, examples=0), "examples must be between 1 and"),
            (lambda u: replace(u, metrics={f"m{n}": 1.0 for n in range(101)}), "'metrics' cannot be"),
            (lambda u: replace(u, tensors={**u.tensors, "more": torch.zeros(1)}), "'more' was not asked for"),
        ],
        ids=["NaN", "wrong round", "wrong plan", "no examples", "many metrics", "more tensors"],
    )
    def test_one_bad_answer_is_refused_by_name_and_the_round_goes_on(
        self, change: Callable[[dbcl.Update], dbcl.Update], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def twist(client: int, round: int, answer: Message) -> Message:
            return altered(answer, change) if client == 2 else answer

        self.check(clients(twist), f"node 1002: .*{reason}", caplog)

    def test_garbage_is_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        def twist(client: int, round: int, answer: Message) -> Message:
            if client == 2:
                answer.content["dbcl"] = ConfigRecord({"update": b"garbage"})
            return answer

        self.check(clients(twist), "node 1002: update: does not begin with DBCL", caplog, kind=Reason.UNREADABLE)

    def test_an_answer_that_reply_did_not_make_is_refused(self, caplog: pytest.LogCaptureFixture) -> None:
        def twist(client: int, round: int, answer: Message) -> Message:
            if client == 2:
                arrays = ArrayRecord(net().state_dict())
                answer.content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 3})})
            return answer

        said = "node 1002: its answer holds no update; answer with dbcl.flower.reply"
        self.check(clients(twist), said, caplog, kind=Reason.UNREADABLE)

    def test_a_client_that_raises_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        def before(client: int, round: int, message: Message) -> Message:
            if client == 2:
                raise ValueError("out of paper")
            return message

        said = "node 1002: failed: ValueError: out of paper"
        self.check(clients(before=before), said, caplog, kind=Reason.NO_ANSWER)

    def test_a_client_that_hangs_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        release = threading.Event()

        def before(client: int, round: int, message: Message) -> Message:
            if client == 2:
                release.wait(60)
                raise CrashError
            return message

        began = time.monotonic()
        said = "node 1002: did not answer in time"
        self.check(clients(before=before), said, caplog, kind=Reason.NO_ANSWER, round_timeout=4.0)
        assert time.monotonic() - began < 20
        release.set()

    def check(
        self,
        app: ClientApp,
        reason: str,
        caplog: pytest.LogCaptureFixture,
        *,
        kind: Reason | None = None,
        **settings: Any,
    ) -> None:
        """The round goes on with three, exactly as if the fourth had not been there."""
        strategy = DoubleBlind(fedavg(), net(), insecure_seed=0, **nested({"coverage": "hidden", **settings}))
        with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
            result = strategy.start(LocalGrid(app, NODES), num_rounds=1)
        (report,) = strategy.reports
        assert report.accepted == 3
        assert len(report.refused) == 1
        assert re.match(reason, report.refused[0])
        assert kind in (None, report.rejected["node 1002"].reason)
        assert "refused node 1002" in caplog.text
        assert re.search(r"not every update counted as it was: node 1002: rejected in \d of \d rounds", caplog.text)
        assert dict(result.train_metrics_clientapp[1])["dbcl-refused"] == 1
        server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
        sent = {client: server.open_round(client) for client in range(NODES)}
        answers = {}
        for client in (0, 1, 3):
            local = dbcl.blinded(net(), sent[client])
            x, y = examples(client)
            TRAINING.train(local, (x, y), seed=bytes(32), round=0, client=client)
            answers[str(client)] = dbcl.make_update(local, sent[client], examples=len(x))
        server.close_round(answers)
        for name, parameter in server.model.named_parameters():
            torch.testing.assert_close(weights(strategy)[name], parameter.detach(), rtol=1e-5, atol=1e-6)

    def test_every_client_failing_is_an_error_and_the_round_stays_open(self) -> None:
        def before(client: int, round: int, message: Message) -> Message:
            raise ValueError("out of paper")

        strategy = DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden"))
        first = weights(strategy)
        with pytest.raises(
            ProtocolError, match=r"round 0 has 0 updates and needs 1(?s:.*)node 1003: failed: ValueError"
        ):
            strategy.start(LocalGrid(clients(before=before), NODES), num_rounds=2)
        assert strategy.server.round == 0
        assert all(torch.equal(first[name], tensor) for name, tensor in weights(strategy).items())

    def test_fewer_than_min_updates_is_an_error(self) -> None:
        def twist(client: int, round: int, answer: Message) -> Message:
            return answer if client else altered(answer, lambda u: replace(u, round=7))

        app = clients(twist)
        with pytest.raises(ProtocolError, match="round 0 has 3 updates and needs 4"):
            DoubleBlind(
                fedavg(), net(), SketchConfig(coverage="hidden"), validator=dbcl.protocol.UpdateValidator(min_updates=4)
            ).start(LocalGrid(app, NODES), num_rounds=1)
        DoubleBlind(
            fedavg(), net(), SketchConfig(coverage="hidden"), validator=dbcl.protocol.UpdateValidator(min_updates=3)
        ).start(LocalGrid(app, NODES), num_rounds=1)

    @pytest.mark.parametrize("phase", ["train", "evaluate"])
    @pytest.mark.parametrize("fixed", [False, True])
    def test_too_few_nodes_is_an_error_after_the_timeout(self, phase: str, fixed: bool) -> None:
        class Nodes(LocalGrid):
            def get_node_ids(self) -> list[int]:
                return super().get_node_ids()

        inner = flower.FedAvg(min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=3)
        if phase == "train":
            inner = fedavg(min_available_nodes=5)
        strategy = DoubleBlind(inner, net(), SketchConfig(coverage="hidden"), round_timeout=0.5)
        nodes, needed = (2, 3) if phase == "evaluate" else (4, 5)
        began = time.monotonic()
        waited = "" if fixed else "waited 0.5 s for "
        with pytest.raises(ProtocolError, match=rf"{waited}nodes: {nodes} are there; needed: {needed}\. "):
            strategy.start((LocalGrid if fixed else Nodes)(clients(), nodes), num_rounds=1)
        assert time.monotonic() - began < 10

    def test_a_node_that_comes_late_is_waited_for(self) -> None:
        class Late(LocalGrid):
            calls = 0

            def get_node_ids(self) -> list[int]:
                self.calls += 1
                return super().get_node_ids()[: self.calls + 1]

        strategy = DoubleBlind(
            fedavg(min_available_nodes=3), net(), SketchConfig(coverage="hidden"), round_timeout=30.0
        )
        strategy.start(Late(clients(), 3), num_rounds=1)
        assert strategy.reports[0].accepted >= 2

    def test_the_norm_bound_of_the_validator_holds(self) -> None:
        strategy = DoubleBlind(
            fedavg(), net(), SketchConfig(coverage="hidden"), validator=dbcl.protocol.UpdateValidator(norm_bound=0.001)
        )
        strategy.start(LocalGrid(clients(), NODES), num_rounds=1)
        assert strategy.reports[0].clipped == NODES
        assert strategy.reports[0].norm <= 0.001 * (1 + 1e-4)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (RecordDict(), "has 0 MetricRecords and must have one"),
            (RecordDict({"m": MetricRecord({"num-examples": 3, "loss": math.nan})}), "metric 'loss' is 'nan'"),
            (RecordDict({"m": MetricRecord({"num-examples": -3, "loss": 1.0})}), "num-examples must be between 1 and"),
            (RecordDict({"m": MetricRecord({"num-examples": 3, **{f"m{n}": 1.0 for n in range(101)}})}), "102 metrics"),
        ],
        ids=["nothing", "NaN", "negative", "many metrics"],
    )
    def test_a_bad_evaluation_is_left_out(
        self, content: RecordDict, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def twist(client: int, round: int, answer: Message) -> Message:
            if client == 1 and answer.metadata.message_type == "evaluate":
                answer.content = content
            return answer

        strategy = DoubleBlind(flower.FedAvg(), net(), SketchConfig(coverage="hidden"))
        with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
            result = strategy.start(LocalGrid(clients(twist), NODES), num_rounds=1)
        assert math.isfinite(result.evaluate_metrics_clientapp[1]["loss"])  # type: ignore[arg-type]
        assert "no evaluation by node 1001" in caplog.text
        assert reason in caplog.text

    def test_what_a_client_gets_wrong_is_said(self) -> None:
        grid = LocalGrid(ClientApp(), 1)
        plain = Message(RecordDict({"arrays": ArrayRecord(net().state_dict())}), 1000, "train")
        with pytest.raises(ProtocolError, match=r"holds no dbcl broadcast; wrap the server's strategy"):
            blinded(net(), plain)
        broadcast = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden")).open_round()
        content = RecordDict({"dbcl": ConfigRecord({"broadcast": dbcl.encode(broadcast)})})
        with pytest.raises(ProtocolError, match="needs the trained model, got None"):
            reply(None, Message(content, 1000, "train"), examples=1)
        assert reply(None, Message(content, 1000, "evaluate"), examples=1).content["metrics"] == {"num-examples": 1}
        assert grid.get_node_ids() == [1000]

    @pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
    def test_a_wait_without_an_end_is_refused(self, timeout: float) -> None:
        with pytest.raises(ConfigError, match="round_timeout must be above 0 seconds"):
            DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden"), round_timeout=timeout)


class CrashError(Exception):
    """What happens to a machine."""


class CrashingGrid(LocalGrid):
    """Dies in the middle of the n-th exchange: before it, or after the nodes have done their work."""

    def __init__(self, *arguments: Any, at: int, late: bool) -> None:
        super().__init__(*arguments)
        self.at, self.late, self.exchanges = at, late, 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        self.exchanges += 1
        if self.exchanges == self.at and not self.late:
            raise CrashError
        answers = super().send_and_receive(messages, timeout=timeout)
        if self.exchanges == self.at:
            raise CrashError
        return answers


class Measured:
    """A server-side evaluation that may die."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at

    def __call__(self, round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == self.crash_at:
            raise CrashError
        return MetricRecord({"size": float(sum(abs(array.numpy()).sum() for array in arrays.values()))})


INNER: dict[str, Callable[[], flower.Strategy]] = {
    "FedAdam": lambda: flower.FedAdam(eta=0.02, min_train_nodes=3, fraction_train=0.75),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.7),
    "FedYogi": lambda: flower.FedYogi(eta=0.02),
    "adaptive clipping": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        flower.FedAdagrad(eta=0.02), noise_multiplier=0.1, num_sampled_clients=NODES, initial_clipping_norm=0.5
    ),
}


PROGRAM = """
import hashlib, os, signal, sys
import torch, dbcl.flower
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam
from torch import nn

torch.set_num_threads(1)
folder, die = sys.argv[1:]
app = ClientApp()

@app.train()
def train(message, context):
    model = dbcl.flower.blinded(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)), message)
    model(torch.full((4, 8), 1.0 + context.node_config["partition-id"])).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return dbcl.flower.reply(model, message, examples=4)

def evaluate(round, arrays):
    if str(round) == die:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
strategy = dbcl.flower.DoubleBlind(
    FedAdam(eta=0.1, fraction_evaluate=0.0), net, insecure_seed=0, checkpoint=folder
)
result = strategy.start(dbcl.flower.LocalGrid(app, 3), num_rounds=4, evaluate_fn=evaluate)
data = b"".join(array.numpy().tobytes() for array in result.arrays.values())
print(len(strategy.reports), hashlib.sha256(data).hexdigest())
"""


class TestGoingOn:
    rounds = 4

    def make(self, folder: Path | None, inner: str = "FedAdam", **settings: Any) -> DoubleBlind:
        return DoubleBlind(
            INNER[inner](), net(), checkpoint=folder, **nested({"coverage": "hidden", "insecure_seed": 5, **settings})
        )

    def whole(self, inner: str) -> tuple[DoubleBlind, Any]:
        strategy = self.make(None, inner)
        return strategy, strategy.start(LocalGrid(clients(), NODES), num_rounds=self.rounds, evaluate_fn=Measured())

    @pytest.mark.parametrize("inner", INNER)
    @pytest.mark.parametrize(
        "crash",
        ["before train", "in train", "in evaluate", "in evaluate_fn", "while writing"],
    )
    def test_a_crash_in_any_phase_changes_nothing(
        self, inner: str, crash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected, result = self.whole(inner)
        at = {"before train": 3, "in train": 5, "in evaluate": 4}.get(crash, 10**9)  # exchanges: train, evaluate, ...
        grid = CrashingGrid(clients(), NODES, at=at, late=crash == "in train")
        first = self.make(tmp_path, inner)
        with monkeypatch.context() as patch:
            if crash == "while writing":
                count = [0]
                real = dbcl.protocol.checkpoint.write_atomic

                def dying(*arguments: Any, **more: Any) -> None:
                    count[0] += 1
                    if count[0] == 4:
                        raise CrashError
                    real(*arguments, **more)

                patch.setattr("dbcl.protocol.checkpoint.write_atomic", dying)
            evaluate = Measured(2 if crash == "in evaluate_fn" else None)
            with pytest.raises(CrashError):
                first.start(grid, num_rounds=self.rounds, evaluate_fn=evaluate)
        assert first.server.round < self.rounds

        again = self.make(tmp_path, inner)
        assert again.server.round == (first.server.round if crash != "while writing" else 1)
        replayed = again.start(LocalGrid(clients(), NODES), num_rounds=self.rounds, evaluate_fn=Measured())
        for name, tensor in weights(expected).items():
            assert torch.equal(weights(again)[name], tensor), name
        assert replayed.train_metrics_clientapp == result.train_metrics_clientapp
        assert replayed.evaluate_metrics_clientapp == result.evaluate_metrics_clientapp
        assert replayed.evaluate_metrics_serverapp == result.evaluate_metrics_serverapp

    @pytest.mark.slow
    def test_a_killed_process_goes_on_with_the_same_command(self, tmp_path: Path) -> None:
        program = tmp_path / "app.py"
        program.write_text(PROGRAM)

        def run(folder: str, die: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-W", "ignore", str(program), str(tmp_path / folder), die]
            return subprocess.run(command, capture_output=True, text=True, timeout=120)

        undisturbed, killed, again = run("a", "never"), run("b", "2"), run("b", "never")
        assert killed.returncode == -signal.SIGKILL
        assert killed.stdout == ""
        rounds, weights = again.stdout.split()
        assert rounds == "2"  # the last two of four
        assert undisturbed.stdout.split() == ["4", weights]

    def test_without_the_strategys_memory_the_weights_would_differ(self, tmp_path: Path) -> None:
        expected, _ = self.whole("FedAdam")
        first = self.make(tmp_path)
        first.start(LocalGrid(clients(), NODES), num_rounds=2)
        again = self.make(tmp_path)
        again.strategy.m_t = None  # type: ignore[attr-defined]
        again.start(LocalGrid(clients(), NODES), num_rounds=self.rounds)
        assert not torch.equal(weights(expected)["0.weight"], weights(again)["0.weight"])

    def test_the_open_rounds_secrets_are_on_the_disk_before_anything_is_sent(self, tmp_path: Path) -> None:
        """Which node is in which lane, too: one that got two lanes of a round would have no sketch before it."""

        class Noting(LocalGrid):
            def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
                sent.append({each.metadata.dst_node_id: each.content["dbcl"]["broadcast"] for each in messages})
                raise CrashError

        sent: list[dict[int, bytes]] = []
        for _ in range(6):  # fresh secrets, no experiment seed: the next process must send the very same bytes
            strategy = self.make(tmp_path, insecure_seed=None)
            # Other initial weights each time, as of a net that nobody seeds: the veil of a round hides one set only.
            shift = len(sent) / 8
            initial = ArrayRecord({name: tensor + shift for name, tensor in net().state_dict().items()})
            with pytest.raises(CrashError):
                strategy.start(Noting(clients(), NODES), initial, num_rounds=1)
        assert [len(nodes) for nodes in sent] == [3] * 6  # of four, chosen anew each time
        for node in range(1000, 1000 + NODES):
            assert len({nodes[node] for nodes in sent if node in nodes}) == 1

    def test_a_finished_run_plays_nothing_more_and_longer_ones_go_on(self, tmp_path: Path) -> None:
        self.make(tmp_path).start(LocalGrid(clients(), NODES), num_rounds=2)
        again = self.make(tmp_path)
        result = again.start(LocalGrid(clients(), NODES), num_rounds=2)
        assert again.reports == []
        assert sorted(result.train_metrics_clientapp) == [1, 2]
        again.start(LocalGrid(clients(), NODES), num_rounds=3)
        assert len(again.reports) == 1

    def test_the_checkpoint_of_something_else_is_refused(self, tmp_path: Path) -> None:
        self.make(tmp_path / "a").start(LocalGrid(clients(), NODES), num_rounds=1)
        with pytest.raises(ProtocolError, match="the checkpoint is of FedAdam and the strategy is FedYogi"):
            self.make(tmp_path / "a", "FedYogi")
        with pytest.raises(ProtocolError, match="belongs to another plan"):
            self.make(tmp_path / "a", veil=0.5)
        server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"))
        server.save(tmp_path / "b")
        with pytest.raises(ProtocolError, match="another engine or of an older dbcl; choose another folder"):
            self.make(tmp_path / "b")

    def test_what_a_checkpoint_cannot_hold_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        class Logging(flower.FedAvg):
            def __init__(self) -> None:
                super().__init__()
                self.seen = {1, 2}

        with caplog.at_level(logging.WARNING, logger="flwr.dbcl"):
            DoubleBlind(Logging(), net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path)
        assert "starts with it anew: Logging.seen (a set)" in caplog.text
        inner = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 2)
        inner.accountant = object()  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="whose spending a checkpoint cannot keep"):
            DoubleBlind(inner, net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path)

    def test_every_kind_of_memory_comes_back(self, tmp_path: Path) -> None:
        class Elephant(flower.FedAvg):
            memory: dict[str, Any] | None

            def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
                arrays, metrics = super().aggregate_train(server_round, replies)
                assert arrays is not None
                array = arrays["0.bias"].numpy()
                self.memory = {
                    "list": [array, 1, 2.5, "text", None, True],
                    "tuple": (b"bytes", array[0]),
                    "tensor": torch.arange(3),
                    "record": ArrayRecord({"a": Array(array)}),
                    "metrics": MetricRecord({"m": [1.0, 2.0]}),
                    "config": ConfigRecord({"c": b"x"}),
                    "by number": {3: array},
                }
                return arrays, metrics

        inner = Elephant(fraction_evaluate=0.0)
        DoubleBlind(inner, net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path).start(
            LocalGrid(clients(), NODES), num_rounds=1
        )
        back = Elephant(fraction_evaluate=0.0)
        DoubleBlind(back, net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path)
        assert inner.memory is not None
        assert back.memory is not None
        for name, value in inner.memory.items():
            assert type(back.memory[name]) is type(value)
            assert repr(back.memory[name]) == repr(value)
        assert back.memory["by number"][3].dtype == inner.memory["by number"][3].dtype


def test_transcripts_are_recorded_as_in_the_other_engines(tmp_path: Path) -> None:
    strategy = DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden"), insecure_seed=0)
    setting = Setting("net", (1, 1, 20), 3, TRAINING.settings(), clients=NODES, cohort=NODES)
    strategy.observer = Recorder(tmp_path, ["2", "server"], strategy.server, setting)
    strategy.start(LocalGrid(clients(), NODES), num_rounds=2)
    seen = Transcript(tmp_path / "client-2")
    assert len(seen) == 2
    assert list(seen[1].updates) == ["2"]
    assert seen[1].updates["2"].examples == 12
    server = Transcript(tmp_path / "server")
    assert [update.examples for update in server[0].updates.values()] == [10, 11, 12, 13]
    assert server[0].weights is not None
    assert torch.equal(server[0].weights["0.weight"], net()[0].weight)


class TestTooFewNodes:
    """What `TimeoutGrid` says where fewer nodes are there than are needed, and when."""

    class Open(LocalGrid):
        """A grid to which nodes may come: it lists those of `there`."""

        there = 2

        def get_node_ids(self) -> list[int]:
            return super().get_node_ids()[: self.there]

    def waiting(self, grid: LocalGrid, **more: Any) -> TimeoutGrid:
        return TimeoutGrid(grid, **{"timeout": 0.3, "needed": lambda: "4, as planned,", "fewest": 4, **more})

    def test_it_is_said_at_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        grid = self.waiting(self.Open(ClientApp(), 4))
        assert len(grid.get_node_ids()) == 2
        grid.get_node_ids()
        assert caplog.messages == ["waiting for nodes: 2 are there; needed: 4, as planned"]

    def test_nothing_is_said_where_enough_are_there(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        assert len(self.waiting(LocalGrid(ClientApp(), 4)).get_node_ids()) == 4
        assert caplog.messages == []

    def test_it_is_said_at_once_that_none_may_take_part(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        inner = self.Open(ClientApp(), 4)
        grid = self.waiting(inner, fewest=1, allowed=lambda there: there if len(there) == 4 else [])

        def come() -> None:
            inner.there = 4

        threading.Timer(0.1, come).start()
        assert len(grid.settle()) == 4
        assert caplog.messages[0] == (
            "waiting for nodes: 2 are there, 0 of them may take part in this round; needed: 4, as planned"
        )

    @pytest.mark.parametrize("remedy", [REMEDY, SECURE_REMEDY, GUARANTEE_REMEDY])
    def test_the_remedy_is_that_of_the_caller(self, remedy: str) -> None:
        grid = self.waiting(self.Open(ClientApp(), 4), remedy=remedy)
        grid.get_node_ids()
        time.sleep(0.4)
        with pytest.raises(ProtocolError, match=r"waited 0.3 s for nodes: 2 are there.* Start them") as error:
            grid.get_node_ids()
        assert str(error.value).endswith(remedy)
        assert ("min_available_nodes" in str(error.value)) == (remedy == REMEDY)

    @pytest.mark.parametrize("allowed", [None, lambda there: there[:1]])
    def test_a_grid_whose_nodes_are_fixed_is_not_waited_for(self, allowed: Any) -> None:
        grid = self.waiting(LocalGrid(ClientApp(), 3), timeout=600, allowed=allowed, remedy=SECURE_REMEDY)
        with pytest.raises(ProtocolError, match=r"nodes: 3 are there.* A LocalGrid gets no others: .*min_cohort"):
            grid.settle()

    def test_a_local_grid_under_secure_aggregation_names_the_lanes_at_once(self) -> None:
        config = dbcl.SecAggConfig(clip=4.0, min_cohort=3)
        app = ClientApp(mods=[dbcl.flower.SecureMod(config)])
        app.train()(lambda message, context: message)  # never asked
        strategy = DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden", lanes=2), secagg=config)
        began = time.monotonic()
        with pytest.raises(ProtocolError, match=r"needed: 6 \(3 or more in each of 2 lanes\).* LocalGrid .*min_cohort"):
            strategy.start(LocalGrid(app, 5), num_rounds=1)
        assert time.monotonic() - began < 60  # round_timeout is 600


def test_a_patient_grid_passes_everything_on() -> None:
    app = clients()
    grid = TimeoutGrid(LocalGrid(app, 2), timeout=5.0, needed=lambda: "2")
    grid.set_run("run")
    assert grid.run == "run"
    message = grid.create_message(RecordDict(), "query", 1000, "1")
    keys = list(grid.push_messages([message]))
    assert [answer.has_error() for answer in grid.pull_messages(keys)] == [True]
    assert len(list(grid.send_and_receive([Message(RecordDict(), 1001, "query")]))) == 1


def test_clients_that_diverge_are_told_what_to_lower() -> None:
    def twist(client: int, round: int, answer: Message) -> Message:
        return altered(answer, lambda u: replace(u, tensors={n: t * math.inf for n, t in u.tensors.items()}))

    with pytest.raises(ProtocolError, match="training has diverged, so lower their learning rate or clip their up"):
        DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden"), insecure_seed=0).start(
            LocalGrid(clients(twist), NODES), num_rounds=1
        )


def test_who_reports_other_metrics_is_not_left_out_and_leaves_nobody_out() -> None:
    """In 0.2 the most common set of names won, and whoever had another was thrown out of the round with its update."""

    def twist(client: int, round: int, answer: Message) -> Message:
        if answer.metadata.message_type != "train":
            answer.content["metrics"] = MetricRecord({"num-examples": 5, f"mine {client}": 1.0, "loss": 2.0 + client})
            return answer
        return altered(
            answer, lambda u: replace(u, metrics={f"mine {client}": 1.0, **({"loss": 1.0} if client else {})})
        )

    strategy = DoubleBlind(flower.FedAdam(), net(), SketchConfig(coverage="hidden"), insecure_seed=0)
    result = strategy.start(LocalGrid(clients(twist), NODES), num_rounds=1)
    assert strategy.reports[0].accepted == NODES
    assert result.train_metrics_clientapp[1]["loss"] == 1.0
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(3.5)
    assert not [name for name in result.train_metrics_clientapp[1] if name.startswith("mine")]


@pytest.mark.parametrize("key", ["num-examples", "importance"])
def test_what_a_node_counts_for_is_bounded(key: str) -> None:
    """A strategy may weigh answers by a metric that nodes report; one node must not own the average by it."""

    def twist(client: int, round: int, answer: Message) -> Message:
        greedy = 10_000_000 if client == 1 else 10
        if key == "num-examples":
            return altered(answer, lambda u: replace(u, examples=greedy))
        return altered(answer, lambda u: replace(u, metrics={"importance": float(greedy), "loss": float(client)}))

    seen: list[list[float]] = []

    class Noting(flower.FedAdam):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            listed = list(replies)
            seen.append([float(m.content["metrics"][key]) for m in listed])  # type: ignore[index]
            return super().aggregate_train(server_round, listed)

    strategy = DoubleBlind(
        Noting(weighted_by_key=key, fraction_evaluate=0.0), net(), SketchConfig(coverage="hidden"), insecure_seed=0
    )
    strategy.start(LocalGrid(clients(twist), NODES), num_rounds=1)
    assert seen == [[10, 15, 10, 10]]


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    one, two = (DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path) for _ in range(2))

    def meanwhile(client: int, round: int, answer: Message) -> Message:
        if client == 0:
            with pytest.raises(ConfigError, match="is in use by process"):
                two.start(LocalGrid(clients(), NODES), num_rounds=1)
        return answer

    one.start(LocalGrid(clients(meanwhile), NODES), num_rounds=2)
    with pytest.raises(ProtocolError, match="is at round 2 and this strategy at round 0: another process has gone on"):
        two.start(LocalGrid(clients(), NODES), num_rounds=3)
    assert DoubleBlind(fedavg(), net(), SketchConfig(coverage="hidden"), checkpoint=tmp_path).server.round == 2
