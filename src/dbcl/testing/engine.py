"""Contract tests of engines."""

import copy
import math
from abc import abstractmethod
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dbcl
from dbcl.data import Examples, examples_of
from dbcl.data.trees import call, map_tensors
from dbcl.engines import LocalTraining, draw_cohort
from dbcl.errors import ConfigError
from dbcl.objective import Objective
from dbcl.privacy import UpdateNoise
from dbcl.testing.clipping import SEED, ExampleClipContract
from dbcl.testing.kinds import CLASSES, FEATURES, KINDS, MIXING, TwoInputs
from dbcl.testing.nested import nested

FREE = dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None)


def examples() -> Examples:
    """Return two noisy clusters for each of three classes, in float64."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randn(3, 10, dtype=torch.float64, generator=generator)[y]
    return examples_of((x + 0.5 * torch.randn(90, 10, dtype=torch.float64, generator=generator), y))


def clients() -> list[Examples]:
    """Return the examples of four clients."""
    return [examples().subset(shard) for shard in SHARDS]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).double()


SHARDS = [np.arange(0, 40), np.arange(40, 47), np.arange(47, 48), np.arange(48, 90)]  # unequal on purpose


LANES: dict[str, dict[str, Any]] = {
    "one": {"lanes": 1},
    "two": {},
    "four": {"ratio": 4},
    "more than the ratio": {"lanes": 4},
    "fewer than the ratio": {"lanes": 2, "ratio": 4},
    "of many widths": {"ratio": (2, 4)},
}


class EngineContract(ExampleClipContract):
    @abstractmethod
    def engine(self, *arguments: Any, **more: Any) -> Any:
        """Create the engine with the arguments of `LocalEngine`."""

    def start(
        self, training: LocalTraining, fraction: float = 1.0, noise: UpdateNoise | None = None, **settings: Any
    ) -> Any:
        torch.manual_seed(1)
        server = dbcl.Server(net(), insecure_seed=0, **nested({"coverage": "hidden", **settings}))
        return self.engine(server, net(), clients(), training, fraction=fraction, seed=SEED, noise=noise)

    def test_it_learns(self) -> None:
        engine = self.start(LocalTraining(lr=0.05), veil=0.2)
        first = dbcl.engines.evaluate(engine.server.model, examples())
        for _ in range(60):
            engine.play_round()
        last = dbcl.engines.evaluate(engine.server.model, examples())
        assert last.score > 0.95 > first.score
        assert last.loss < first.loss

    @pytest.mark.parametrize(
        "training",
        [
            LocalTraining(lr=0.1, epochs=2, momentum=0.5),
            LocalTraining(lr=0.1, proximal=1.0),
            LocalTraining(lr=0.1, batch_size=32, steps=1),
        ],
        ids=["fedavg", "fedprox", "sgd"],
    )
    @pytest.mark.parametrize("veil", [0.0, 0.2])
    def test_three_rounds_are_the_sum_of_their_clients(self, training: LocalTraining, veil: float) -> None:
        """Compare three rounds with an explicit loop over clients."""
        reports = self.assert_as_written_out(training, rounds=3, veil=veil)
        assert [report.accepted for report in reports] == [4, 4, 4]

    @pytest.mark.parametrize("lanes", LANES)
    def test_clients_are_trained_in_their_lanes(self, lanes: str) -> None:
        reports = self.assert_as_written_out(
            LocalTraining(lr=0.1, momentum=0.5), rounds=2, coverage="all", **LANES[lanes]
        )
        assert all(max(report.lanes) - min(report.lanes) <= 1 for report in reports)

    def test_a_cohort_may_be_smaller_than_the_lanes(self) -> None:
        reports = self.assert_as_written_out(LocalTraining(lr=0.1), rounds=4, fraction=0.5, ratio=4, coverage="all")
        assert [sorted(report.lanes) for report in reports] == [[0, 0, 1, 1]] * 4

    def test_all_updates_of_a_lane_may_be_refused(self) -> None:
        validator = dbcl.protocol.UpdateValidator(max_examples=20)  # the first and the last client have more
        reports = self.assert_as_written_out(LocalTraining(lr=0.1), rounds=5, coverage="all", validator=validator)
        assert [report.accepted for report in reports] == [2] * 5
        assert {len(report.unanswered) for report in reports} == {0, 1}

    def assert_as_written_out(
        self, training: LocalTraining, *, rounds: int, fraction: float = 1.0, **settings: Any
    ) -> list[dbcl.RoundReport]:
        """Compare the engine's weights and reports with an explicit loop over clients.

        Returns:
            The reports of the engine.
        """
        engine = self.start(training, fraction, **settings)
        torch.manual_seed(1)
        server = dbcl.Server(net(), insecure_seed=0, **nested({"coverage": "hidden", **settings}))
        reports = []
        for round in range(rounds):
            result = engine.play_round()
            sent = {
                client: server.open_round(f"client {client}")
                for client in draw_cohort(len(SHARDS), fraction, seed=SEED, round=round)
            }
            updates = {}
            for client, broadcast in sent.items():
                own, local = clients()[client], dbcl.blinded(net(), broadcast)
                metrics = training.train(local, own, seed=SEED, round=round, client=client)
                counted = len(own) if training.steps is None else min(len(own), training.batch_size)
                updates[f"client {client}"] = dbcl.make_update(local, broadcast, examples=counted, metrics=metrics)
            report = server.close_round(updates)
            reports.append(report)
            for name in ("accepted", "examples", "clipped", "lanes"):
                assert getattr(result.report, name) == getattr(report, name)
            assert sorted(result.report.refused) == sorted(report.refused)
            assert result.report.norm == pytest.approx(report.norm, rel=1e-9)
            assert result.report.metrics["loss"] == pytest.approx(report.metrics["loss"], rel=1e-9)
        for name, tensor in server.model.state_dict().items():
            assert (tensor - engine.server.model.state_dict()[name]).abs().max() < 1e-10
        return reports

    def test_clients_clip_and_noise_their_updates_before_they_are_encoded(self) -> None:
        """Each client clips its update and adds noise before encoding it."""
        noise = UpdateNoise(clip=0.01, multiplier=0.5, insecure_seed=3)
        seen: list[list[dbcl.Update]] = []
        for each in (None, noise, noise):
            engine = self.start(LocalTraining(lr=0.1), noise=each)
            engine.observer = lambda sent, updates: seen.append(
                [m if isinstance(m, dbcl.Update) else dbcl.protocol.decode_update(m) for m in updates.values()]
            )
            engine.play_round()
        clear, noised, again = seen
        for client, (one, other, same) in enumerate(zip(clear, noised, again, strict=True)):
            expected = replace(noise, client=client)(one.tensors, round=0)
            for name, tensor in expected.items():
                torch.testing.assert_close(other.tensors[name], tensor, rtol=0, atol=1e-12)
                assert torch.equal(other.tensors[name], same.tensors[name])

    def test_the_bytes_are_those_of_the_messages(self) -> None:
        engine = self.start(LocalTraining(), fraction=0.5)
        twin = self.start(LocalTraining(), fraction=0.5)
        broadcast = twin.server.open_round("client 0")
        result = engine.play_round()
        assert result.bytes_down == 2 * len(dbcl.encode(broadcast))
        answer = dbcl.make_update(dbcl.blinded(net(), broadcast), broadcast, examples=40, metrics={"loss": math.pi})
        assert abs(result.bytes_up - 2 * len(dbcl.encode(answer))) < 60  # the header's numbers have various lengths

    def test_the_same_seeds_give_the_same_weights(self) -> None:
        one, two = (self.start(LocalTraining(lr=0.1), fraction=0.5) for _ in range(2))
        for engine in (one, two):
            for _ in range(4):
                engine.play_round()
        states = [engine.server.model.state_dict() for engine in (one, two)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_a_restored_server_goes_on_as_if_nothing_had_happened(self) -> None:
        whole = self.start(LocalTraining(lr=0.1), fraction=0.5, optimizer=dbcl.optim.momentum(0.5))
        for _ in range(2):
            whole.play_round()
        state = copy.deepcopy(whole.server.state())
        again = self.start(LocalTraining(lr=0.1), fraction=0.5, optimizer=dbcl.optim.momentum(0.5))
        again.server.load_state(state)
        for _ in range(2):
            whole.play_round()
            again.play_round()
        states = [engine.server.model.state_dict() for engine in (whole, again)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_a_client_that_diverges_is_refused_and_too_few_is_an_error(self) -> None:
        engine = self.start(LocalTraining(lr=1e200), veil=0)
        before = {name: tensor.clone() for name, tensor in engine.server.model.state_dict().items()}
        with pytest.raises(dbcl.errors.ProtocolError, match="round 0 has 0 updates and needs 1"):
            engine.play_round()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.server.model.state_dict().items())

    def test_targets_that_are_not_classes_are_refused(self) -> None:
        """Reject floating-point targets; cross-entropy would treat them as class probabilities."""
        x = torch.zeros(90, 10, dtype=torch.float64)
        with pytest.raises(ConfigError, match=r"the targets are torch.float64 and no classes: give the loss"):
            self.engine(
                dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden")),
                net(),
                [(x, x[:, :3])],
                LocalTraining(),
                seed=SEED,
            )

    def test_any_inputs_any_loss_and_any_optimiser(self) -> None:
        """Compare a regression with dictionary inputs and Adam with an explicit training loop."""
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
        sets = [({"left": part, "right": part.flip(1)}, part[:, :CLASSES]) for part in (x[:10], x[10:20])]
        objective = Objective.from_loss(F.mse_loss)
        torch.manual_seed(1)
        template = TwoInputs().double()
        engine = self.engine(
            dbcl.Server(copy.deepcopy(template), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0),
            template,
            sets,
            LocalTraining(lr=0.01, batch_size=10, optimizer=torch.optim.Adam),
            objective=objective,
            seed=SEED,
        )
        server = dbcl.Server(copy.deepcopy(template), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
        for _ in range(2):
            result = engine.play_round()
            updates = {}
            for client, (inputs, targets) in enumerate(sets):
                broadcast = server.open_round(f"client {client}")
                local = dbcl.blinded(template, broadcast)
                optimizer = torch.optim.Adam(local.parameters(), lr=0.01)
                F.mse_loss(local(**inputs), targets).backward()  # type: ignore[no-untyped-call]  # one batch holds all examples, in whatever order
                optimizer.step()
                updates[f"client {client}"] = dbcl.make_update(local, broadcast, examples=10)
            server.close_round(updates)
            assert result.report.accepted == 2
        for name, tensor in server.model.state_dict().items():
            assert (tensor - engine.server.model.state_dict()[name]).abs().max() < 1e-10

    @pytest.mark.parametrize("kind", [*KINDS, *MIXING])
    def test_models_of_all_kinds_train_as_in_plain_pytorch(self, kind: str) -> None:
        """Compare rounds without sketch and veil with federated averaging over plain modules.

        Clients have different numbers of batches, with different batch sizes.
        """
        torch.manual_seed(2)
        make, inputs = {**KINDS, **MIXING}[kind]
        x, y = torch.randn(18, FEATURES, dtype=torch.float64), torch.arange(18) % CLASSES
        template = make().double()
        sets = [(inputs(x[start:end]), y[start:end]) for start, end in ((0, 10), (10, 16), (16, 18))]
        training = LocalTraining(lr=0.1, batch_size=4, momentum=0.5)
        added = dbcl.optim.fedavg()
        server = dbcl.Server(
            copy.deepcopy(template), dbcl.SketchConfig(sketch="identity-v1", veil=0), validator=FREE, optimizer=added
        )
        engine = self.engine(server, copy.deepcopy(template), sets, training, seed=SEED)
        expected = copy.deepcopy(template)
        for round in range(2):
            engine.play_round()
            trained = [copy.deepcopy(expected) for _ in sets]
            for client, (local, (own, labels)) in enumerate(zip(trained, sets, strict=True)):
                optimizer = torch.optim.SGD(
                    [each for each in local.parameters() if each.requires_grad], lr=0.1, momentum=0.5
                )
                for taken in training.batches(len(labels), seed=SEED, round=round, client=client):
                    rows = torch.from_numpy(taken)
                    optimizer.zero_grad()
                    outputs = call(local, map_tensors(itemgetter(rows), own))
                    F.cross_entropy(outputs, labels[rows]).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            with torch.no_grad():
                for mean, *each in zip(*(model.parameters() for model in (expected, *trained)), strict=True):
                    mean.copy_(sum(len(own[1]) / 18 * one for own, one in zip(sets, each, strict=True)))
        for name, tensor in expected.named_parameters():
            torch.testing.assert_close(engine.server.model.get_parameter(name), tensor, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("width", [9, 11])
    def test_examples_that_the_network_does_not_take_are_refused(self, width: int) -> None:
        x, y = torch.zeros(90, width, dtype=torch.float64), torch.arange(90) % 3
        with pytest.raises(ConfigError, match="the network, these examples and the loss do not go together"):
            self.engine(
                dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden")), net(), [(x, y)], LocalTraining(), seed=SEED
            )
