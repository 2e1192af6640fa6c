"""Flower as one more engine: the same contract, the same weights, and what its grid does with faults."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import dbcl
from dbcl.engines import LocalEngine, LocalTraining
from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower import DoubleBlind, FlowerEngine, LocalGrid, SimulationEngine, blinded, reply
from dbcl.flower.engine import Clients
from dbcl.run import Run
from dbcl.run.config import ENGINES, RunConfig
from dbcl.testing.engine import SEED, EngineContract, clients, net
from dbcl.testing.secrecy import leaks
from dbcl.transcripts import Transcript


class TestFlowerEngine(EngineContract):
    def engine(self, *arguments: Any, **more: Any) -> FlowerEngine:
        return FlowerEngine(*arguments, **more)


def server(**settings: Any) -> dbcl.Server:
    torch.manual_seed(1)
    return dbcl.Server(net(), insecure_seed=0, **settings)


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
    strategy = DoubleBlind(FedAvg(fraction_evaluate=0.0), net(), veil=0.2, insecure_seed=0)
    result = strategy.start(LocalGrid(app, len(clients())), num_rounds=3)
    assert distance(local.session.model, strategy.server.model) < 1e-10
    assert torch.equal(result.arrays.to_torch_state_dict()["0.weight"], strategy.server.model[0].weight)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_flowers_ray_simulation_gives_the_weights_of_the_local_engine() -> None:
    training = LocalTraining(lr=0.1, epochs=2, momentum=0.5)
    engines = [
        kind(server(veil=0.2), net(), clients(), training, fraction=0.5, seed=SEED)
        for kind in (LocalEngine, SimulationEngine)
    ]
    try:
        for engine in engines:
            for _ in range(3):
                engine.play_round()
    finally:
        engines[1].close()
    assert distance(engines[0].session.model, engines[1].session.model) < 1e-10


def test_what_travels_to_the_nodes_holds_nothing_of_the_server() -> None:
    held = server()
    secrets = {name: tensor.detach().clone() for name, tensor in held.model.named_parameters()}
    engine = FlowerEngine(held, net(), clients(), LocalTraining(), seed=SEED)
    nodes = Clients(engine.template, engine.clients, engine.training, engine.seed)
    assert leaks(nodes.app(), secrets) == []
    assert leaks([nodes.app(), held], secrets) != []  # the walk would have found them


def test_a_client_that_fails_ends_a_simulated_round_with_its_reason() -> None:
    broken = [*clients()[:3], clients()[3].subset(np.arange(5))]
    broken[3].rows += 1000  # type: ignore[attr-defined]
    engine = FlowerEngine(server(), net(), broken, LocalTraining(), seed=SEED)
    with pytest.raises(ProtocolError, match="round 0: client 3 failed: IndexError"):
        engine.play_round()
    assert engine.session.round == 0


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As Ray's workers have: in float32 another number of threads rounds in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_run_through_flowers_simulation_is_the_local_run_resumed_or_not(tmp_path: Path) -> None:
    config = RunConfig(engine="local", clients=10, fraction=0.3, rounds=4, seed=0, transcripts=("server",))
    whole = Run.start(config, tmp_path / "local")
    first = Run.start(replace(config, engine="flower", rounds=2), tmp_path / "flower")
    assert len(list(whole.play())) == 4
    assert len(list(first.play())) == 2
    second = Run.resume(tmp_path / "flower", rounds=4)
    assert len(list(second.play())) == 2
    assert distance(whole.session.model, second.session.model) < 1e-6
    for run in (whole, second):
        assert len(Transcript(run.folder / "transcripts" / "server")) == 4
    assert [m.score for m in whole.history] == pytest.approx([m.score for m in second.history], abs=0.002)


def test_who_asks_for_the_engine_flower_without_flower_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbcl.run.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[flower\]' in a clone of dbcl"):
        ENGINES["flower"]()
