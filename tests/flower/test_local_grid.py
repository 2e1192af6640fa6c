"""DoubleBlind on a grid in this process: the weights of the local engine, and what the grid does with faults."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import dbcl
from dbcl.config import SketchConfig
from dbcl.engines import LocalEngine, LocalTraining
from dbcl.errors import ConfigError
from dbcl.flower import DoubleBlind, LocalGrid, blinded, reply
from dbcl.testing.engine import SEED, clients, net
from dbcl.testing.nested import nested


def server(**settings: Any) -> dbcl.Server:
    torch.manual_seed(1)
    return dbcl.Server(net(), insecure_seed=0, **nested({"coverage": "hidden", **settings}))


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_double_blind_around_fedavg_is_the_local_engine() -> None:
    training = LocalTraining(lr=0.1, epochs=2, momentum=0.5)
    local = LocalEngine(server(veil=0.2), net(), clients(), training, seed=SEED)
    for _ in range(3):
        local.play_round()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        model = blinded(net(), message)
        round = int(message.content["config"]["server-round"]) - 1
        own = clients()[client]
        metrics = training.train(model, own, seed=SEED, round=round, client=client)
        return reply(model, message, examples=len(own), metrics=metrics)

    torch.manual_seed(1)
    strategy = DoubleBlind(
        FedAvg(fraction_evaluate=0.0), net(), SketchConfig(veil=0.2, coverage="hidden"), insecure_seed=0
    )
    result = strategy.start(LocalGrid(app, len(clients())), num_rounds=3)
    assert distance(local.server.model, strategy.server.model) < 1e-10
    assert distance(local.server.released, strategy.server.released) < 1e-10
    assert torch.equal(result.arrays.to_torch_state_dict()["0.weight"], strategy.server.released[0].weight)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]


def echo(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def questions(grid: LocalGrid) -> list[Message]:
    return [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]


class TestLocalGrid:
    def test_nodes_have_states_and_numbers_of_their_own(self) -> None:
        app = ClientApp()
        seen = []

        @app.query()
        def count(message: Message, context: Context) -> Message:
            record = context.state.setdefault("calls", MetricRecord({"n": 0}))
            record["n"] += 1
            seen.append((context.node_config["partition-id"], record["n"], context.run_config["lr"]))
            return Message(RecordDict(), reply_to=message)

        grid = LocalGrid(app, nodes=2, run_config={"lr": 0.1})
        for _ in range(2):
            grid.send_and_receive(questions(grid))
        assert seen == [(0, 1, 0.1), (1, 1, 0.1), (0, 2, 0.1), (1, 2, 0.1)]
        assert grid.contexts[1001].node_config["num-partitions"] == 2

    def test_an_exception_becomes_an_error_reply(self) -> None:
        grid = LocalGrid(ClientApp(), nodes=1)
        (answer,) = grid.send_and_receive(questions(grid), timeout=5)
        assert answer.has_error()
        assert "No query function registered" in answer.error.reason
        stray = Message(RecordDict(), 7, "query")
        (answer,) = grid.send_and_receive([stray])
        assert "no node 7 in this grid" in answer.error.reason

    def test_one_that_hangs_costs_only_its_own_answer(self) -> None:
        app = ClientApp()

        @app.query()
        def slow(message: Message, context: Context) -> Message:
            if context.node_config["partition-id"] == 1:
                time.sleep(30)
            return Message(RecordDict(), reply_to=message)

        grid = LocalGrid(app, nodes=3)
        began = time.monotonic()
        answers = grid.send_and_receive(questions(grid), timeout=0.6)
        assert [answer.metadata.src_node_id for answer in answers] == [1000, 1002]
        assert time.monotonic() - began < 5

    def test_neither_side_reaches_into_the_others_records(self) -> None:
        app = ClientApp()

        @app.query()
        def clear(message: Message, context: Context) -> Message:
            message.content.clear()
            return Message(RecordDict(), reply_to=message)

        seen: list[Message] = []
        grid = LocalGrid(app, nodes=1, hook=seen.append)
        content = RecordDict({"inner": MetricRecord({"a": 1})})
        grid.send_and_receive([Message(content, 1000, "query")])
        assert list(content) == ["inner"]
        assert len(seen) == 2

    def test_pushed_messages_are_pulled_once(self) -> None:
        app = ClientApp()
        app.query()(echo)
        grid = LocalGrid(app, nodes=2)
        keys = list(grid.push_messages(questions(grid)))
        assert len(grid.pull_messages(keys)) == 2
        assert grid.pull_messages(keys) == []

    def test_no_nodes_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="one node or more, got 0"):
            LocalGrid(ClientApp(), nodes=0)


def run_python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_without_flower_dbcl_works_and_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flwr", "ray"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "flwr" else real(name, *more)
sys.meta_path.insert(0, Absent())
import dbcl, dbcl.cli, dbcl.engines
try:
    import dbcl.flower
except ImportError as error:
    print(error)
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pip install '.[flower]' in a clone of dbcl" in done.stdout


def test_telemetry_is_off_unless_asked_for(tmp_path: Path) -> None:
    code = (
        "import os; os.environ.pop('FLWR_TELEMETRY_ENABLED', None); import dbcl.flower; "
        "print(os.environ['FLWR_TELEMETRY_ENABLED'], os.environ['RAY_USAGE_STATS_ENABLED'])"
    )
    assert run_python(code, tmp_path).stdout.split() == ["0", "0"]
