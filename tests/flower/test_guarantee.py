"""DoubleBlind with a guarantee: who is asked, what is refused, what leaves, and going on after a crash."""

import dataclasses
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from torch import Tensor, nn

import dbcl
from dbcl.config import SketchConfig
from dbcl.engines import LocalEngine, LocalTraining
from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower import DoubleBlind, GuaranteeMod, LocalGrid, SecureMod, blinded, reply
from dbcl.privacy import PrivacyPlan, UpdateNoise
from dbcl.protocol import checkpoint
from dbcl.protocol.secagg import SecAggConfig
from dbcl.testing.nested import nested

NODES = 6
PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.1, rounds=6, clients=NODES, cohort=2)
TRAINING = LocalTraining(lr=0.1, batch_size=5)
SEED = bytes(32)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def examples(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    count = 8 + 2 * client  # they count alike all the same
    return torch.randn(count, 10, dtype=torch.float64, generator=generator), torch.arange(count) % 3


def clients(
    asked: list[tuple[int, int]] | None = None,
    fails: tuple[int, int] | None = None,
    plan: PrivacyPlan = PLAN,
    folder: Path | None = None,
) -> ClientApp:
    """An app that notes (round, client); of `fails` the answer never comes."""
    app = ClientApp(mods=[GuaranteeMod(plan, folder or tempfile.mkdtemp())])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        round = int(message.content["config"]["server-round"]) - 1
        if asked is not None:
            asked.append((round, client))
        if (round, client) == fails:
            raise RuntimeError("no power")
        model = blinded(net(), message)
        metrics = TRAINING.train(model, examples(client), seed=SEED, round=round, client=client)
        count = TRAINING.counted(len(examples(client)[0]))
        return reply(model, message, examples=count, metrics=metrics, noise=UpdateNoise(PLAN.clip))

    return app


def fedavg(**more: Any) -> flower.FedAvg:
    return flower.FedAvg(**{"fraction_evaluate": 0.0, **more})


def double_blind(inner: flower.Strategy | None = None, **more: Any) -> DoubleBlind:
    return DoubleBlind(
        inner or fedavg(), net(), **nested({"coverage": "hidden", "privacy": PLAN, "insecure_seed": 0, **more})
    )


def uses(strategy: DoubleBlind, nodes: int = NODES) -> list[int]:
    """How often the server has used each node's updates, in the order of the nodes."""
    return [strategy.server.keeper.tracker.uses(strategy._names.of(1000 + node) or "") for node in range(nodes)]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def test_nodes_take_turns_and_the_tracker_counts_them() -> None:
    asked: list[tuple[int, int]] = []
    strategy = double_blind()
    strategy.start(LocalGrid(clients(asked), NODES), num_rounds=PLAN.rounds)
    turns = [sorted(client for round, client in asked if round == number) for number in range(PLAN.rounds)]
    assert turns == [[0, 1], [2, 3], [4, 5]] * 2
    assert [report.accepted for report in strategy.reports] == [2] * PLAN.rounds
    assert uses(strategy) == [2] * NODES


def test_who_did_not_answer_has_spent_nothing_and_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[int, int]] = []
    strategy = double_blind()
    with caplog.at_level(logging.DEBUG, logger="flwr.dbcl"):
        strategy.start(LocalGrid(clients(asked, fails=(0, 1)), NODES), num_rounds=2)
    assert [len(report.refused) for report in strategy.reports] == [1, 0]
    assert "no power" not in caplog.text + strategy.reports[0].refused[0]  # an error may quote data
    assert asked[2:] == [(1, 1), (1, 2)]
    assert uses(strategy, 3) == [1, 1, 1]


@pytest.mark.parametrize("kind", [{"lanes": 1}, {"lanes": 2}])
@pytest.mark.parametrize("inner", [fedavg, lambda: flower.FedProx(proximal_mu=0.0, fraction_evaluate=0.0)])
def test_it_is_the_local_engine(inner: Any, kind: dict[str, Any]) -> None:
    strategy = double_blind(inner(), **kind)
    strategy.start(LocalGrid(clients(), NODES), num_rounds=4)
    server = dbcl.Server(net(), privacy=PLAN, insecure_seed=0, **nested({"coverage": "hidden", **kind}))
    own = [examples(client) for client in range(NODES)]
    engine = LocalEngine(server, net(), own, TRAINING, fraction=1 / 3, seed=SEED, noise=UpdateNoise(PLAN.clip))
    engine.in_turns = True
    for _ in range(4):
        engine.play_round()
    torch.testing.assert_close(flat(strategy.server.weights()), flat(server.weights()), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        flat(strategy.server.noisy_weights()), flat(server.noisy_weights()), rtol=0, atol=PLAN.grid + 1e-10
    )
    assert not torch.equal(flat(server.weights()), flat(dict(net().named_parameters())))


@pytest.mark.parametrize("plan", [{"noise_on_updates": True}, {"weight_cap": 12.0}])
def test_other_plans_are_the_local_engine_too(plan: dict[str, Any]) -> None:
    plan = dataclasses.replace(PLAN, **plan)
    strategy = double_blind(privacy=plan)
    strategy.start(LocalGrid(clients(plan=plan), NODES), num_rounds=3)
    server = dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), privacy=plan, insecure_seed=0)
    own = [examples(client) for client in range(NODES)]
    engine = LocalEngine(server, net(), own, TRAINING, fraction=1 / 3, seed=SEED, noise=UpdateNoise(PLAN.clip))
    engine.in_turns = True
    for _ in range(3):
        engine.play_round()
    torch.testing.assert_close(flat(strategy.server.weights()), flat(server.weights()), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        flat(strategy.server.noisy_weights()), flat(server.noisy_weights()), rtol=0, atol=plan.grid + 1e-10
    )


def test_what_is_returned_and_evaluated_is_noisy_and_no_client_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    seen: dict[int, Tensor] = {}

    def measure(round: int, arrays: ArrayRecord) -> MetricRecord:
        seen[round] = flat(arrays.to_torch_state_dict())
        return MetricRecord({"round": round})

    strategy = double_blind(ema_decay=0.0)
    with caplog.at_level(logging.INFO):
        result = strategy.start(LocalGrid(clients(), NODES), num_rounds=2, evaluate_fn=measure)
    noisy, true = flat(strategy.server.noisy_weights()), flat(strategy.server.weights())
    assert torch.equal(seen[0], flat(dict(net().named_parameters())))  # before anybody has trained
    assert torch.equal(seen[2], noisy)
    assert torch.equal(flat(result.arrays.to_torch_state_dict()), noisy)
    assert float((noisy - true).abs().min()) > 0
    assert result.evaluate_metrics_clientapp == {}
    assert dict(result.train_metrics_clientapp[2]) == {"dbcl-accepted": 2, "dbcl-refused": 0}
    assert all(report.metrics == {} and math.isnan(report.norm) for report in strategy.reports)
    assert "guarantee: none: its secrets follow from insecure_seed" in caplog.text
    assert "the noise follows from insecure_seed, so there is no guarantee" in caplog.text
    assert "another one on the same data spends a second budget" in caplog.text
    assert "loss" not in caplog.text


def test_what_is_tied_is_noisy_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    app = ClientApp(mods=[GuaranteeMod(PLAN, tmp_path)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return reply(blinded(Tied(), message), message, examples=1, noise=UpdateNoise(PLAN.clip))

    strategy = DoubleBlind(fedavg(), Tied(), SketchConfig(coverage="all", sketch="identity-v1"), privacy=PLAN)
    arrays = strategy.start(LocalGrid(app, NODES), num_rounds=1).arrays.to_torch_state_dict()
    assert torch.equal(arrays["first.weight"], arrays["second.weight"])
    assert not torch.equal(arrays["second.weight"], strategy.server.model.second.weight)


def test_the_inner_strategy_sees_noisy_weights_and_whose_turn_it_is() -> None:
    seen: list[tuple[Tensor, list[int]]] = []

    class Curious(flower.FedAvg):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
            seen.append((flat(arrays.to_torch_state_dict()), list(grid.get_node_ids())))
            return super().configure_train(server_round, arrays, config, grid)

        def configure_evaluate(self, *arguments: Any) -> Any:
            raise AssertionError("no client evaluates")

    strategy = double_blind(Curious(fraction_evaluate=0.0))
    strategy.start(LocalGrid(clients(), NODES), num_rounds=2)
    assert [nodes for _, nodes in seen] == [[1000, 1001], [1002, 1003]]
    fresh = double_blind()
    assert torch.equal(seen[0][0], flat(fresh.server.noisy_weights()))


MORE: dict[str, tuple[Any, str]] = {
    "FedAvgM": (lambda: flower.FedAvgM(fraction_evaluate=0.0), "FedAvgM makes more of the updates than their sum"),
    "FedAdam": (lambda: flower.FedAdam(fraction_evaluate=0.0), "FedAdam makes more of the updates than their sum"),
    "Krum": (lambda: flower.Krum(fraction_evaluate=0.0), "Krum makes more of the updates than their sum"),
    "FedMedian": (lambda: flower.FedMedian(fraction_evaluate=0.0), "FedMedian makes more"),
    "a DP wrapper": (
        lambda: flower.DifferentialPrivacyServerSideFixedClipping(fedavg(), 1.0, 1.0, 2),
        "DifferentialPrivacyServerSideFixedClipping makes more of the updates",
    ),
    "weights": (
        lambda: fedavg(weighted_by_key="quality"),
        "all updates count alike, or by their examples up to the plan's weight_cap",
    ),
    "evaluation": (flower.FedAvg, r"take FedAvg\(fraction_evaluate=0.0\), and evaluate_fn"),
    "a fraction": (lambda: fedavg(fraction_train=0.5), "planned for 2 clients in a round.*leave out fraction_train"),
    "more nodes": (lambda: fedavg(min_available_nodes=6), "planned for 2 clients in a round, and FedAvg waits for 6"),
}


@pytest.mark.parametrize("what", MORE)
def test_what_a_guarantee_does_not_cover_is_refused(what: str) -> None:
    inner, reason = MORE[what]
    with pytest.raises(ConfigError, match=reason):
        double_blind(inner())


def test_one_example_as_the_unit_is_refused() -> None:
    plan = PrivacyPlan(
        epsilon=8,
        delta=1e-5,
        clip=0.1,
        rounds=6,
        clients=2,
        cohort=2,
        unit="example",
        examples=100,
        batch=10,
        separation=10,
    )
    with pytest.raises(ConfigError, match=r"need not clip every example.*unit=\"client\""):
        double_blind(privacy=plan)


def test_more_rounds_than_planned_are_refused() -> None:
    strategy = double_blind()
    with pytest.raises(ConfigError, match="planned for 6 rounds, and num_rounds is 7"):
        strategy.start(LocalGrid(clients(), NODES), num_rounds=7)


def test_too_few_nodes_whose_turn_it_is_are_waited_for_and_named() -> None:
    strategy = double_blind()
    with pytest.raises(ProtocolError, match="3 are there, 1 of them may take part in this round; needed: 2") as error:
        strategy.start(LocalGrid(clients(), 3), num_rounds=2, timeout=0.5)
    assert "PrivacyPlan(clients=..., cohort=...)" in str(error.value)
    assert "min_train_nodes" not in str(error.value)
    assert strategy.server.round == 1


def test_initial_arrays_may_be_given_to_a_run_that_begins() -> None:
    strategy = double_blind()
    start = ArrayRecord({name: tensor + 1 for name, tensor in net().state_dict().items()})
    strategy.start(LocalGrid(clients(), NODES), initial_arrays=start, num_rounds=1)
    moved = flat(strategy.server.weights()) - flat(start.to_torch_state_dict())
    assert 0 < float(moved.norm()) <= PLAN.clip * (1 + 1e-9)


def test_a_run_that_goes_on_is_the_whole_run_and_ends_with_its_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = double_blind()
    everything = whole.start(LocalGrid(clients(), NODES), num_rounds=PLAN.rounds)
    first = double_blind(checkpoint=tmp_path)
    first.start(LocalGrid(clients(), NODES), num_rounds=3)
    second = double_blind(checkpoint=tmp_path)
    assert second.server.keeper.tracker.state() == first.server.keeper.tracker.state()
    result = second.start(LocalGrid(clients(), NODES), num_rounds=PLAN.rounds)
    assert torch.equal(flat(second.server.weights()), flat(whole.server.weights()))
    for name, tensor in everything.arrays.to_torch_state_dict().items():
        assert torch.equal(result.arrays.to_torch_state_dict()[name], tensor)
    again = double_blind(checkpoint=tmp_path)
    with caplog.at_level(logging.INFO):
        end = again.start(LocalGrid(clients(), NODES), num_rounds=PLAN.rounds)
    assert "The budget of the guarantee is spent, and the run cannot go on" in caplog.text
    assert torch.equal(flat(end.arrays.to_torch_state_dict()), flat(result.arrays.to_torch_state_dict()))
    other = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.1, rounds=12, clients=NODES, cohort=2)
    for plan in (other, None):
        with pytest.raises(ProtocolError, match="cannot go on"):
            double_blind(checkpoint=tmp_path, privacy=plan)


def test_a_crash_between_disk_and_wire_shows_the_same_bytes_and_counts_once(tmp_path: Path) -> None:
    carried: list[tuple[int, bytes]] = []

    def note(message: Message) -> None:
        if not message.has_error() and "broadcast" in message.content.get("dbcl", {}):
            carried.append((message.metadata.dst_node_id, bytes(message.content["dbcl"]["broadcast"])))
            if len(carried) == 3 and not crashed:
                crashed.append(True)
                raise KeyboardInterrupt  # the first node of round 1 has its message, and nobody else

    crashed: list[bool] = []
    strategy = double_blind(checkpoint=tmp_path, insecure_seed=None, lanes=2)
    with pytest.raises(KeyboardInterrupt):
        strategy.start(_Direct(clients(), NODES, hook=note), num_rounds=2)
    assert checkpoint.newest(tmp_path) == 1
    resumed = double_blind(checkpoint=tmp_path, insecure_seed=None, lanes=2)
    resumed.start(_Direct(clients(), NODES, hook=note), num_rounds=2)
    assert len(carried) == 5
    assert carried[2] in carried[3:]  # in whatever order the nodes are asked
    assert uses(resumed, 5) == [1, 1, 1, 1, 0]


class _Direct(LocalGrid):
    """Without threads, so that what the hook raises ends the run."""

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return super().send_and_receive(messages)


# Who a node is: names follow from keys, and both sides count


class Restarting(LocalGrid):
    """SuperNodes without authentication keys: every time they start, Flower gives them new ids."""

    def restart(self) -> None:
        self.contexts = {
            node + NODES: Context(0, node + NODES, context.node_config, RecordDict(), context.run_config)
            for node, context in self.contexts.items()
        }


def test_a_node_that_starts_again_is_still_the_same(tmp_path: Path) -> None:
    """By ids, six nodes that start again before every round would take part in as many rounds as there are."""
    strategy, grid = double_blind(), Restarting(clients(folder=tmp_path), NODES)
    for round in range(PLAN.rounds):
        strategy.start(grid, num_rounds=round + 1)
        grid.restart()
    assert [report.accepted for report in strategy.reports] == [2] * PLAN.rounds
    assert strategy.server.keeper.tracker.most_uses == PLAN.participations
    assert len(strategy.server.keeper.tracker.state().values["uses"]) == NODES
    names = {(path / "public-key").read_text() for path in tmp_path.iterdir()}
    assert len(names) == NODES


def test_more_names_than_planned_are_refused() -> None:
    """With a new folder a node that starts again has a new key: it is a new node, and no more are planned."""
    strategy, grid = double_blind(), Restarting(clients(), NODES)
    strategy.start(grid, num_rounds=3)
    grid.restart()
    grid.client_app = clients()
    with pytest.raises(ProtocolError, match="6 are there, 0 of them may take part in this round"):
        strategy.start(grid, num_rounds=4, timeout=0.5)


@pytest.mark.parametrize("secure", [True, False])
def test_a_node_whose_key_ends_with_its_process_takes_no_part(secure: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Two nodes of 20 that are planned: with a new key at every start they would have 10 turns in place of 2."""
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.1, rounds=20, clients=20, cohort=4)
    config = SecAggConfig(clip=0.09, min_cohort=3)
    mod: Any = SecureMod(config) if secure else GuaranteeMod(plan, None)  # type: ignore[arg-type]
    app = ClientApp(mods=[mod])
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    strategy = double_blind(privacy=plan, secagg=config if secure else None, lanes=1)
    with caplog.at_level(logging.WARNING), pytest.raises(ProtocolError, match="none of 4 nodes shows a key"):
        strategy.start(LocalGrid(app, 4), num_rounds=1)
    assert "its key ends with its process, and a guarantee counts nodes by key" in caplog.text
    with pytest.raises(TypeError, match="folder"):
        GuaranteeMod(plan)  # type: ignore[call-arg]


def test_the_nodes_count_whatever_the_server_says(tmp_path: Path) -> None:
    strategy, grid = double_blind(), LocalGrid(clients(folder=tmp_path), NODES)
    strategy.start(grid, num_rounds=3)
    refused: list[str] = []

    def note(message: Message) -> None:
        if message.has_error():
            refused.append(str(message.error.reason))

    other = LocalGrid(clients(folder=tmp_path), NODES, hook=note)
    with pytest.raises(ProtocolError, match="round 0 has 0 updates"):
        double_blind(insecure_seed=None).start(other, num_rounds=1)  # a server that forgets and begins anew
    assert len(refused) == 2
    assert all("answered another broadcast of round 0" in reason or "by its own count" in reason for reason in refused)


def test_a_round_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    sent: list[Message] = []
    grid = LocalGrid(clients(folder=tmp_path), NODES, hook=lambda message: sent.append(message))
    double_blind().start(grid, num_rounds=1)
    broadcasts = [m for m in sent if not m.has_error() and "broadcast" in m.content.get("dbcl", {})]
    assert len(broadcasts) == 2
    before = {path: path.read_bytes() for path in tmp_path.glob("*/participation.dbcl")}
    assert len(before) == 2
    again = grid.send_and_receive(
        [Message(m.content, m.metadata.dst_node_id, "train") for m in broadcasts for _ in range(3)]
    )
    assert not any(answer.has_error() for answer in again)
    assert {path: path.read_bytes() for path in before} == before


def test_an_app_without_the_mod_takes_no_part(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    with caplog.at_level(logging.WARNING), pytest.raises(ProtocolError, match="none of 6 nodes shows a key"):
        double_blind().start(LocalGrid(app, NODES), num_rounds=1)
    assert "node 1000 takes no part: its answer is not signed with its key" in caplog.text


def test_nodes_do_not_evaluate_under_a_guarantee() -> None:
    app = clients()
    app.evaluate()(lambda message, context: Message(RecordDict(), reply_to=message))
    (answer,) = LocalGrid(app, NODES).send_and_receive([Message(RecordDict(), 1000, "evaluate")])
    assert "is not covered by the guarantee" in answer.error.reason
