"""Other people's strategies inside DoubleBlind: the same weights as if they were fed by hand, and poison withstood."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.serverapp import strategy as flower
from torch import nn

import dbcl
from dbcl import data
from dbcl.config import SketchConfig
from dbcl.engines import LocalTraining, evaluate
from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower import DoubleBlind, LocalGrid, blinded, reply
from dbcl.model import networks
from dbcl.testing.nested import nested

SEED = bytes(range(32))
NODES = 7  # Bulyan wants four times the malicious ones and three more
TRAINING = LocalTraining(lr=0.1, batch_size=4)
QUIET: dict[str, Any] = {"fraction_evaluate": 0.0}

STRATEGIES: dict[str, Callable[[], flower.Strategy]] = {
    "FedAvg": lambda: flower.FedAvg(**QUIET),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1, **QUIET),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.5, **QUIET),
    "FedAdam": lambda: flower.FedAdam(eta=0.01, **QUIET),
    "FedAdagrad": lambda: flower.FedAdagrad(eta=0.01, **QUIET),
    "FedYogi": lambda: flower.FedYogi(eta=0.01, **QUIET),
    "FedMedian": lambda: flower.FedMedian(**QUIET),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.2, **QUIET),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1, q=0.2, **QUIET),
    "Krum": lambda: flower.Krum(num_malicious_nodes=1, **QUIET),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3, **QUIET),
    "Bulyan": lambda: flower.Bulyan(num_malicious_nodes=1, **QUIET),
    "server-side clipping": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(**QUIET), noise_multiplier=0.0, clipping_norm=0.05, num_sampled_clients=NODES
    ),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


INPUTS = torch.randn(20, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
"""The server's own, on which it measures the statistics of `net`."""


def double_blind(inner: flower.Strategy, **settings: Any) -> DoubleBlind:
    """DoubleBlind that adds nothing to the step of the strategy inside."""
    added = {"optimizer": dbcl.optim.fedavg()} if type(inner) in (flower.FedAvg, flower.FedProx) else {}
    return DoubleBlind(inner, net(), **nested({"coverage": "hidden", "calibration": INPUTS, **added, **settings}))


def examples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    count = 8 + 2 * client  # of unequal weight
    return torch.randn(count, 10, dtype=torch.float64, generator=generator), torch.arange(count) % 3


def answer(model: nn.Module, round: int, client: int) -> dict[str, Any]:
    """Train, and give what an answer needs beside the model."""
    x, y = examples(client)
    metrics = TRAINING.train(model, (x, y), seed=SEED, round=round, client=client)
    return {"examples": len(x), "metrics": {"train_loss": metrics["loss"]}}


def clients() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = blinded(net(), message)
        round = int(message.content["config"]["server-round"]) - 1
        return reply(model, message, **answer(model, round, int(context.node_config["partition-id"])))

    return app


def by_hand(inner: flower.Strategy, rounds: int, **settings: Any) -> nn.Module:
    """The same rounds with the five verbs; the strategy gets W + dV R^T of every client as ordinary Flower replies."""
    model = net()
    server = dbcl.Server(model, insecure_seed=0, **nested({"coverage": "hidden", "calibration": INPUTS, **settings}))
    grid = LocalGrid(ClientApp(), NODES)
    for round in range(rounds):
        W = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        asked = list(inner.configure_train(round + 1, ArrayRecord(W), ConfigRecord(), grid))
        replies, answers = [], {}
        for message in sorted(asked, key=lambda message: message.metadata.dst_node_id):
            client = message.metadata.dst_node_id - 1000
            broadcast = server.open_round(f"node {client}")
            local = dbcl.blinded(net(), broadcast)
            more = answer(local, round, client)
            answers[f"node {client}"] = dbcl.make_update(local, broadcast, **more)
            changes = dict(answers[f"node {client}"].tensors)
            for name, sketch in broadcast.sketches().items():
                changes[name] = sketch.lift(changes[name])
            made = {name: changes[name] if name in server.statistics else W[name] + changes[name] for name in W}
            arrays = ArrayRecord(made)
            metrics = MetricRecord({"num-examples": more["examples"], **more["metrics"]})
            replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message))
        new, _ = inner.aggregate_train(round + 1, replies)
        assert new is not None
        server.close_round(answers)  # for its round, key and statistics; the weights are the strategy's
        with torch.no_grad():
            for name, tensor in new.to_torch_state_dict().items():
                if name not in server.statistics:
                    model.state_dict()[name].copy_(tensor)
        server.trained.calibrate(model)
    return model


CLEAR: dict[str, Any] = {"sketch": "identity-v1", "veil": 0.0, "calibration": None}
"""Nothing is hidden, so the statistics may be those that clients measured."""
LANES: dict[str, list[dict[str, Any]]] = {
    "FedAvg": [CLEAR],
    "FedAdam": [{"lanes": 1}, {"lanes": 4, "ratio": 4}, CLEAR],
    "Krum": [{"lanes": 1}, {"lanes": 4, "ratio": 4}],
}
"""Beside the default of two."""


@pytest.mark.parametrize(
    ("name", "lanes"), [(name, each) for name in STRATEGIES for each in [{}, *LANES.get(name, [])]]
)
def test_three_rounds_give_what_the_strategy_gives_when_fed_by_hand(name: str, lanes: dict[str, Any]) -> None:
    validator = dbcl.protocol.UpdateValidator(max_influence=None)  # by hand nobody is held back
    settings = {"veil": 0.1, **lanes}
    strategy = double_blind(STRATEGIES[name](), insecure_seed=0, validator=validator, **settings)
    result = strategy.start(LocalGrid(clients(), NODES), num_rounds=3)
    expected = by_hand(STRATEGIES[name](), 3, **settings)
    counts = strategy.reports[0].lanes
    assert (sum(counts), max(counts) - min(counts) <= 1) == (NODES, True)
    for key, tensor in expected.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(strategy.server.model.state_dict()[key], tensor, rtol=0, atol=1e-10)
            assert not torch.equal(tensor, net().state_dict()[key])
    assert [report.accepted for report in strategy.reports] == [NODES] * 3
    assert sorted(result.train_metrics_clientapp[3]) == ["dbcl-accepted", "dbcl-refused", "train_loss"]


def test_server_side_clipping_inside_clips_and_adds_its_noise() -> None:
    def play(multiplier: float, clip: float) -> tuple[float, nn.Module]:
        inner = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(**QUIET), multiplier, clip, NODES)
        strategy = double_blind(inner, insecure_seed=0)
        strategy.start(LocalGrid(clients(), NODES), num_rounds=1)
        return strategy.reports[0].norm, strategy.server.model

    loose, tight = play(0.0, 1e6)[0], play(0.0, 1e-3)[0]
    assert tight <= 1e-3 * (1 + 1e-9) < loose  # a mean of vectors of this length is no longer than it
    noisy, quiet = play(5.0, 0.1)[1], play(0.0, 0.1)[1]
    difference = torch.cat([(a - b).flatten() for a, b in zip(noisy.parameters(), quiet.parameters(), strict=True)])
    # The noise has the deviation 5 * 0.1 / 7; over 130 numbers it is met within a third.
    assert difference.std().item() == pytest.approx(0.5 / NODES, rel=0.33)


@pytest.mark.parametrize("settings", [{}, {"optimizer": dbcl.optim.fedavg()}, {"optimizer": dbcl.optim.adam()}])
@pytest.mark.parametrize("lanes", [1, 2])
def test_averaging_after_the_lift_is_averaging_before_it(lanes: int, settings: dict[str, Any]) -> None:
    """FedAvg inside DoubleBlind against the server's own average in the sketched space, with the server's own step."""
    settings = {"insecure_seed": 0, "lanes": lanes, "coverage": "hidden", "calibration": INPUTS, **settings}
    strategy = DoubleBlind(flower.FedAvg(**QUIET), net(), **nested(settings))
    result = strategy.start(LocalGrid(clients(), NODES), num_rounds=2)
    server = dbcl.Server(net(), **nested(settings))
    for round in range(2):
        answers = {}
        for client in range(NODES):
            broadcast = server.open_round(client)
            local = dbcl.blinded(net(), broadcast)
            more = answer(local, round, client)
            answers[str(client)] = dbcl.make_update(local, broadcast, **more)
        server.close_round(answers)
    for one, other in zip(strategy.server.model.parameters(), server.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    for name, tensor in server.released.state_dict().items():
        torch.testing.assert_close(result.arrays.to_torch_state_dict()[name], tensor, rtol=0, atol=1e-10)


def test_a_strategy_that_makes_the_weights_has_no_other_step() -> None:
    with pytest.raises(ConfigError, match="FedAdam makes the new weights itself; an optimizer goes with FedAvg and"):
        double_blind(flower.FedAdam(**QUIET), optimizer=dbcl.optim.momentum())


def test_statistics_under_a_veil_need_inputs_of_the_servers_own() -> None:
    with pytest.raises(dbcl.errors.PlanError, match=r"running statistic.*calibration=inputs"):
        double_blind(flower.FedAvg(**QUIET), calibration=None)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_keep_their_dtype_whatever_the_strategy_computes_in(dtype: torch.dtype, wire: str) -> None:
    def small() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = blinded(small(), message)
        model(torch.ones(4, 10, dtype=dtype)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return reply(model, message, examples=4)

    strategy = DoubleBlind(
        flower.FedAdam(eta=0.01, **QUIET), small(), SketchConfig(coverage="hidden"), wire=wire, insecure_seed=0
    )
    result = strategy.start(LocalGrid(app, 2), num_rounds=2)
    for name, parameter in strategy.server.model.named_parameters():
        assert parameter.dtype == dtype
        assert not torch.equal(parameter, small().get_parameter(name))
        assert result.arrays[name].numpy().dtype == np.float32


class Digits:
    """Ten clients of the embedded digits; client 3 may send ten times its update with the sign flipped."""

    def __init__(self) -> None:
        self.data = data.load("digits")
        self.shards = [shard[:150] for shard in data.iid(self.data.y_train.numpy(), 10, seed=SEED)]

    def net(self) -> nn.Module:
        return networks.build("mnist-mlp", shape=self.data.shape, seed=0)

    def accuracy(self, inner: flower.Strategy, *, poisoned: bool = True, rounds: int = 10, **settings: Any) -> float:
        training = LocalTraining(lr=0.05, epochs=2)
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            round = int(message.content["config"]["server-round"]) - 1
            model = blinded(self.net(), message)
            x, y = self.data.x_train[self.shards[client]], self.data.y_train[self.shards[client]]
            training.train(model, (x, y), seed=SEED, round=round, client=client)
            honest = reply(model, message, examples=len(x))
            if poisoned and client == 3:
                update = dbcl.protocol.decode_update(honest.content["dbcl"]["update"])
                turned = replace(update, tensors={name: -10 * tensor for name, tensor in update.tensors.items()})
                honest.content["dbcl"] = ConfigRecord({"update": dbcl.encode(turned)})
            return honest

        strategy = DoubleBlind(inner, self.net(), insecure_seed=0, **nested({"coverage": "hidden", **settings}))
        strategy.start(LocalGrid(app, 10), num_rounds=rounds)
        return evaluate(strategy.server.model, (self.data.x_test, self.data.y_test)).score


MARGIN = 0.06
"""How much accuracy a poisoned, sketched and veiled run of ten rounds may lose against the same unprotected run."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner",
    [
        lambda: flower.Krum(num_malicious_nodes=1, **QUIET),
        lambda: flower.FedTrimmedAvg(beta=0.2, **QUIET),
    ],
    ids=["Krum", "FedTrimmedAvg"],
)
def test_a_robust_strategy_withstands_poison_through_sketch_and_veil(inner: Callable[[], flower.Strategy]) -> None:
    digits = Digits()
    clear = digits.accuracy(inner(), sketch="identity-v1", veil=0.0)
    blind = digits.accuracy(inner())
    assert clear > 0.75
    assert blind > clear - MARGIN


@pytest.mark.slow
def test_the_same_poison_ruins_a_plain_average_and_the_validator_holds_it_back() -> None:
    digits = Digits()
    honest = digits.accuracy(flower.FedAvg(**QUIET), poisoned=False)
    accepts_all = dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None)
    ruined = digits.accuracy(flower.FedAvg(**QUIET), rounds=5, validator=accepts_all)
    held = digits.accuracy(flower.FedAvg(**QUIET))
    assert honest > 0.8
    assert ruined < 0.5
    assert held > honest - MARGIN


def wrapped(kind: type[flower.Strategy]) -> flower.Strategy:
    return kind(flower.FedAvg(), 1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda: OldFedAvg(), "FedAvg is no strategy of Flower's Message API.*the old generation"),
        (
            lambda: wrapped(flower.DifferentialPrivacyClientSideFixedClipping),
            "take DifferentialPrivacyServerSideFixedClipping",
        ),
        (
            lambda: flower.DifferentialPrivacyClientSideAdaptiveClipping(flower.FedAvg(), 0.1, 2),
            "take DifferentialPrivacyServerSideAdaptiveClipping",
        ),
        (lambda: flower.FedXgbBagging(), "FedXgbBagging trains trees"),
        (lambda: double_blind(flower.FedAvg()), "inside a DoubleBlind"),
        (
            lambda: flower.DifferentialPrivacyServerSideFixedClipping(double_blind(flower.FedAvg()), 1.0, 1.0, 2),
            "inside a DoubleBlind",
        ),
    ],
    ids=["old", "client clipping", "client adaptive", "trees", "twice", "twice, deeper"],
)
def test_what_cannot_work_inside_is_refused_with_a_remedy(inner: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        double_blind(inner())


def test_another_strategy_around_it_is_refused() -> None:
    around = flower.DifferentialPrivacyServerSideFixedClipping(double_blind(flower.FedAvg()), 1.0, 1.0, NODES)
    with pytest.raises(ConfigError, match=r"must be the outermost strategy.*DoubleBlind\(other, model\)"):
        around.start(LocalGrid(clients(), NODES), ArrayRecord(net().state_dict()), num_rounds=1)


def test_a_strategy_that_sends_more_than_the_model_is_refused() -> None:
    class ControlVariates(flower.FedAvg):
        def configure_train(self, *arguments: Any, **more: Any) -> list[Message]:
            messages = list(super().configure_train(*arguments, **more))
            for message in messages:
                message.content = copy.copy(message.content)
                message.content["control"] = ArrayRecord([np.zeros(3)])
            return messages

    strategy = double_blind(ControlVariates(**QUIET))
    with pytest.raises(ProtocolError, match="ControlVariates sends other arrays than the model's"):
        strategy.start(LocalGrid(clients(), NODES), num_rounds=1)


def test_a_strategy_that_makes_no_weights_ends_the_run() -> None:
    strategy = double_blind(flower.Bulyan(num_malicious_nodes=3, **QUIET))  # wants 15 answers
    with pytest.raises(ProtocolError, match=r"round 0: Bulyan made no weights of \d good answers"):
        strategy.start(LocalGrid(clients(), NODES), num_rounds=1)
    assert strategy.server.round == 0
