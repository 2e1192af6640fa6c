"""DoubleBlind with a guarantee against everyone: every node adds its share of the noise."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

import dbcl
from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower import DoubleBlind, KeyRegistry, LocalGrid, SecureMod, blinded, clipped_reply, make_key, reply
from dbcl.flower.client import protected
from dbcl.flower.grid import FIRST_NODE
from dbcl.flower.guarantee_node import GuaranteeMod
from dbcl.flower.identity import key_name
from dbcl.privacy import PrivacyPlan, UpdateNoise, cyclic_batch
from dbcl.protocol import Update
from dbcl.protocol.secagg import NoisySum
from dbcl.protocol.secagg.encoding import noisy_config
from dbcl.testing.clipping import per_example_sum
from dbcl.testing.kinds import CLASSES, FEATURES, KINDS
from flower.recording import read, recorded
from flower.revealed import ServerView

CLIP = 0.5
PLAN = PrivacyPlan(
    epsilon=8,
    delta=1e-4,
    clip=0.5 * CLIP,
    unit="example",
    noise_by="clients",
    colluders=1,
    rounds=4,
    separation=2,
    clients=5,
    cohort=5,
    examples=200,
    batch=100,
    values=33,
)
FLEET = PrivacyPlan(
    epsilon=8,
    delta=1e-3,
    clip=0.2,
    noise_by="clients",
    colluders=1,
    fewest=3,
    rounds=4,
    clients=8,
    cohort=4,
    separation=1,
    participations=3,
    values=33,
)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(10, 3)


def examples(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(40, 10, generator=generator)
    return x, x[:, :3].argmax(1)


def registry(folder: Path, nodes: int) -> KeyRegistry:
    """Let each node make its key, and write the file that all of them read."""
    keys = [make_key(folder / f"partition-{number}") for number in range(nodes)]
    (folder / "keys.txt").write_text("\n".join(keys))
    return KeyRegistry.read(folder / "keys.txt")


def grid_of(plan: PrivacyPlan, folder: Path, **changes: Any) -> LocalGrid:
    nodes = plan.clients
    mod = SecureMod(folder=folder, registry=registry(folder, nodes), privacy=plan)
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        if plan.unit == "example":
            return clipped_reply(net(), message, examples(number), privacy=plan, clip=CLIP)
        x, y = examples(number)
        model = blinded(net(), message)
        nn.functional.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return reply(model, message, examples=40, noise=UpdateNoise(plan.clip))

    return LocalGrid(app, nodes, **changes)


def strategy_of(plan: PrivacyPlan, **more: Any) -> DoubleBlind:
    return DoubleBlind(FedAvg(fraction_evaluate=0.0), net(), privacy=plan, round_timeout=30.0, **more)


def test_silos_play_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = strategy_of(PLAN)
    with caplog.at_level(logging.INFO):
        strategy.start(grid_of(PLAN, tmp_path), num_rounds=4)
    assert [report.accepted for report in strategy.reports] == [5] * 4
    assert "against the server, up to 1 colluding client" in caplog.text
    assert strategy.server.guarantee == PLAN.promise
    with pytest.raises(ConfigError, match="planned for 4 rounds"):
        strategy.start(grid_of(PLAN, tmp_path), num_rounds=5)


def test_the_sum_is_that_of_the_nodes_gradients_and_shares(tmp_path: Path) -> None:
    """Noise is a function of a node's key and of what it was sent: with the keys, it can be taken off again."""
    grid = grid_of(PLAN, tmp_path)
    sent: list[bytes] = []
    strategy = strategy_of(PLAN)
    before = {name: tensor.clone() for name, tensor in strategy.server.weights().items()}
    grid.hook = lambda message: sent.extend(
        [data for record in [message.content.get("dbcl")] if record is not None and (data := record.get("broadcast"))]
    )
    strategy.start(grid, num_rounds=1)
    assert strategy._secure is not None
    ((_, total),) = strategy._secure.rounds.totals
    broadcast = dbcl.protocol.decode_broadcast(sent[0])
    expected = torch.zeros(33, dtype=torch.float64)
    for number in range(5):
        state = dbcl.protocol.codec.unpack(
            dbcl.protocol.codec.CHECKPOINT, (tmp_path / f"partition-{number}" / "secure.dbcl").read_bytes()
        )
        key = bytes.fromhex(state[0]["noise"]["noise"]["key"])
        turn = list(cyclic_batch(0, examples=40, separation=PLAN.separation))
        x, y = examples(number)
        sums = per_example_sum(dbcl.blinded(net(), broadcast), x[turn], y[turn], CLIP)
        tensors = {name: -PLAN.clip / CLIP * each.double() for name, each in sums.items()}
        vector, _ = NoisySum.of_client(PLAN, key).vector(Update(0, broadcast.plan.digest, tensors, 1), broadcast)
        expected += torch.from_numpy(vector)
    steps = torch.from_numpy(total.values / NoisySum(PLAN).grid)
    assert (
        float((steps - expected).abs().max()) <= 5 + 1e-6
    )  # each node rounds once; float32 may round to the next step
    assert float(expected.abs().max()) > 1000
    moved = torch.cat([(strategy.server.weights()[name] - before[name]).flatten() for name in before])
    torch.testing.assert_close(moved, torch.from_numpy(total.values / PLAN.batch), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["dense", "convolution", "embedding", "residual", "tied weights", "dictionary"])
def test_a_reply_is_the_sum_of_the_clipped_gradients_of_the_examples_whose_turn_it_is(kind: str) -> None:
    torch.manual_seed(0)
    make, inputs = KINDS[kind]
    model, x, y = make().double(), inputs(30 * torch.randn(9, FEATURES, dtype=torch.float64)), torch.arange(9) % CLASSES
    server = dbcl.Server(copy.deepcopy(model), dbcl.config.UNSKETCHED)
    server.sequence.restart(1, [])
    broadcast = server.open_round()
    LocalGrid(ClientApp(), nodes=1)  # without a grid no message can be made
    message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": dbcl.encode(broadcast)})}), 1000, "train")
    with protected():
        answer = clipped_reply(model, message, (x, y), privacy=PLAN, clip=CLIP)
    found = dbcl.protocol.decode_update(answer.content["dbcl"]["update"]).tensors  # type: ignore[arg-type]
    turn = [1, 3, 5, 7]
    own = {name: each[turn] for name, each in x.items()} if isinstance(x, dict) else x[turn]
    for name, total in per_example_sum(dbcl.blinded(model, broadcast), own, y[turn], CLIP).items():
        torch.testing.assert_close(found[name], -PLAN.clip / CLIP * total, rtol=0, atol=1e-12)
    assert float(torch.cat([each.flatten() for each in found.values()]).norm()) > PLAN.clip / 10


@pytest.mark.parametrize("exchange", [1, 2, 3, 4, 5])
def test_a_node_that_is_lost_in_a_round_and_comes_back_does_not_end_the_run(exchange: int, tmp_path: Path) -> None:
    grid, strategy = grid_of(PLAN, tmp_path), strategy_of(PLAN)
    counted = {"messages": 0, "lost": 0}

    def lose(message: Message) -> None:
        record = message.content.get("dbcl")
        if message.metadata.dst_node_id != FIRST_NODE + 2 or not isinstance(record, ConfigRecord):
            return
        counted["messages"] += "step" in record or "broadcast" in record
        if counted["messages"] == exchange and not counted["lost"]:
            counted["lost"] = 1
            raise RuntimeError("the node is gone")

    process = grid.client_app

    def fragile(message: Message, context: Context) -> Message:
        lose(message)
        return process(message, context)

    grid.client_app = fragile  # type: ignore[assignment]
    recorded(grid, str(tmp_path / "messages"))
    strategy.start(grid, num_rounds=3)
    assert counted["lost"] == 1
    assert [report.accepted for report in strategy.reports] == [5, 5, 5]
    names = [key_name(bytes.fromhex(key)) for key in (tmp_path / "keys.txt").read_text().split()]
    seen = ServerView.of(read(tmp_path / "messages"))
    seen.assert_nothing_is_revealed_twice(names, rounds=3)
    # Before its signature the round begins anew; after its masked vector the others need no help.
    assert len(seen.rosters[0]) == (2 if 1 < exchange < 4 else 1)


def test_a_server_that_dies_goes_on_and_nothing_is_revealed_twice(tmp_path: Path) -> None:
    grid = grid_of(PLAN, tmp_path / "nodes")
    first = strategy_of(PLAN, checkpoint=tmp_path / "server")
    first.start(grid, num_rounds=2)
    second = strategy_of(PLAN, checkpoint=tmp_path / "server")
    second.start(grid, num_rounds=4)
    assert second.server.round == 4
    again = strategy_of(PLAN)  # without the checkpoint a server would play the rounds again
    with pytest.raises(ProtocolError, match="attempt"):
        again.start(grid, num_rounds=1)


def test_a_fleet_takes_turns_and_counts_them_itself(tmp_path: Path) -> None:
    grid, strategy = grid_of(FLEET, tmp_path), strategy_of(FLEET)
    strategy.start(grid, num_rounds=4)
    assert [report.accepted for report in strategy.reports] == [4] * 4
    tracker = strategy.server.keeper.tracker
    assert tracker is not None
    assert (
        sorted(tracker.uses(key_name(bytes.fromhex(key))) for key in (tmp_path / "keys.txt").read_text().split())
        == [2] * 8
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "needs a config"),
        ({"privacy": PLAN}, "a folder on the node's own disk"),
        ({"privacy": PLAN, "folder": "x"}, "keys of all nodes"),
        ({"privacy": PLAN, "folder": "x", "registry": KeyRegistry()}, "keys of all nodes"),
        ({"privacy": PLAN, "config": dbcl.SecAggConfig()}, "the config follows from it"),
        (
            {
                "privacy": PLAN,
                "folder": "x",
                "registry": KeyRegistry(keys=frozenset([bytes(32)])),
            },
            "planned for 5 nodes that all take part in every round, and the registry has 1",
        ),
    ],
)
def test_a_mod_without_what_the_guarantee_needs_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SecureMod(**changes)


def test_a_mod_that_only_counts_is_refused() -> None:
    with pytest.raises(ConfigError, match="adds neither noise nor masks"):
        GuaranteeMod(PLAN, folder="x")


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_of_the_app_does_not_quote_data_to_the_server(
    raises: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = ClientApp(mods=[SecureMod(folder=tmp_path, registry=registry(tmp_path, 5), privacy=PLAN)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if raises:
            raise ValueError("patient 17 has no age")
        return Message(Error(1, "patient 17 has no age"), reply_to=message)

    grid, told = LocalGrid(app, 5), list[str]()
    grid.hook = lambda message: told.append(message.error.reason) if message.has_error() else None
    with pytest.raises(ProtocolError, match="no sum could be made"):
        strategy_of(PLAN).start(grid, num_rounds=1)
    assert told
    assert not any("patient" in reason for reason in told)
    assert "patient 17 has no age" in caplog.text


def test_a_node_whose_update_is_no_sum_of_clipped_gradients_takes_no_part(tmp_path: Path) -> None:
    plan = PLAN
    mod = SecureMod(folder=tmp_path, registry=registry(tmp_path, 5), privacy=plan)
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply(blinded(net(), message), message, examples=40)

    with pytest.raises(ProtocolError, match="attempt"):
        strategy_of(plan).start(LocalGrid(app, 5), num_rounds=1)


@pytest.mark.parametrize("flag", [{"secure": True}, {}])
def test_an_app_without_the_mod_sends_nothing(flag: dict[str, Any]) -> None:
    """Whatever the server says: one that asks for an unprotected update gets none."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return clipped_reply(net(), message, examples(0), privacy=PLAN, clip=CLIP)

    broadcast = dbcl.Server(net(), dbcl.config.UNSKETCHED).open_round()
    LocalGrid(app, 1)
    record = ConfigRecord({"broadcast": dbcl.encode(broadcast), **flag})
    with pytest.raises(ProtocolError, match="would leave without noise"):
        train(Message(RecordDict({"dbcl": record}), 1000, "train"), None)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="protect one example"):
        clipped_reply(net(), Message(RecordDict(), 1000, "train"), examples(0), privacy=FLEET, clip=CLIP)


def test_the_conditions_follow_from_the_plan() -> None:
    assert strategy_of(PLAN)._secure.rounds.config == noisy_config(PLAN)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="leave out secagg"):
        strategy_of(PLAN, secagg=dbcl.SecAggConfig(clip=1.0))


def test_a_round_without_a_sum_is_given_up_where_groups_change(tmp_path: Path) -> None:
    """Whoever masked for one group masks for no other in that round, so the server goes on to the next."""
    grid, strategy = grid_of(FLEET, tmp_path), strategy_of(FLEET)
    process, counted = grid.client_app, {"steps": 0}

    def fragile(message: Message, context: Context) -> Message:
        record = message.content.get("dbcl")
        step = isinstance(record, ConfigRecord) and "step" in record
        counted["steps"] += step
        if step and counted["steps"] <= 12 and int(context.node_config["partition-id"]) % 2 == 0:
            raise RuntimeError("the node is gone")
        return process(message, context)

    grid.client_app = fragile  # type: ignore[assignment]
    strategy.start(grid, num_rounds=3)
    accepted = [report.accepted for report in strategy.reports]
    assert len(accepted) == strategy.server.round == 3
    assert accepted[-1] >= 3
