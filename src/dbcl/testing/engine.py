"""What every engine must do. An engine's tests inherit this class and supply `engine`."""

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.privacy import UpdateNoise

SEED = bytes(range(32))


def examples() -> tuple[Tensor, Tensor]:
    """Two noisy clouds for each of three classes, in float64."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randn(3, 10, dtype=torch.float64, generator=generator)[y]
    return x + 0.5 * torch.randn(90, 10, dtype=torch.float64, generator=generator), y


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).double()


SHARDS = [np.arange(0, 40), np.arange(40, 47), np.arange(47, 48), np.arange(48, 90)]  # unequal on purpose


class EngineContract(ABC):
    @abstractmethod
    def engine(self, *arguments: Any, **more: Any) -> Any:
        """Make the engine; the arguments are those of `LocalEngine`."""

    def start(
        self, training: LocalTraining, fraction: float = 1.0, noise: UpdateNoise | None = None, **settings: Any
    ) -> Any:
        torch.manual_seed(1)
        server = dbcl.Server(net(), insecure_seed=0, **settings)
        return self.engine(server, net(), *examples(), SHARDS, training, fraction=fraction, seed=SEED, noise=noise)

    def test_it_learns(self) -> None:
        engine = self.start(LocalTraining(lr=0.05), veil=0.2)
        x, y = examples()
        first = dbcl.engines.evaluate(engine.session.model, x, y)
        for _ in range(60):
            engine.play_round()
        last = dbcl.engines.evaluate(engine.session.model, x, y)
        assert last.accuracy > 0.95 > first.accuracy
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
        """The engine against a loop written out here with the five verbs."""
        engine = self.start(training, veil=veil)
        torch.manual_seed(1)
        server = dbcl.Server(net(), insecure_seed=0, veil=veil)
        x, y = examples()
        for round in range(3):
            result = engine.play_round()
            broadcast = server.open_round()
            updates = []
            for client, shard in enumerate(SHARDS):
                local = dbcl.blinded(net(), broadcast)
                metrics = training.train(local, x[shard], y[shard], seed=SEED, round=round, client=client)
                counted = len(shard) if training.steps is None else min(len(shard), training.batch_size)
                updates.append(dbcl.update(local, broadcast, examples=counted, metrics=metrics))
            report = server.close_round(updates)
            assert result.report.accepted == report.accepted == 4
            assert result.report.examples == report.examples
            assert result.report.metrics["loss"] == pytest.approx(report.metrics["loss"], rel=1e-9)
        for name, tensor in server.model.state_dict().items():
            assert (tensor - engine.session.model.state_dict()[name]).abs().max() < 1e-10

    def test_clients_clip_and_noise_their_updates_before_they_are_encoded(self) -> None:
        """What reaches the server is noised already, by each client with noise of its own."""
        noise = UpdateNoise(clip=0.01, multiplier=0.5, insecure_seed=3)
        seen: list[list[dbcl.Update]] = []
        for each in (None, noise, noise):
            engine = self.start(LocalTraining(lr=0.1), noise=each)
            engine.observer = lambda broadcast, cohort, messages: seen.append(
                [m if isinstance(m, dbcl.Update) else dbcl.decode_update(m) for m in messages]
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
        broadcast = twin.session.open()
        result = engine.play_round()
        assert result.bytes_down == 2 * len(dbcl.encode(broadcast))
        answer = dbcl.update(dbcl.blinded(net(), broadcast), broadcast, examples=40, metrics={"loss": math.pi})
        assert abs(result.bytes_up - 2 * len(dbcl.encode(answer))) < 60  # the header's numbers have various lengths

    def test_the_same_seeds_give_the_same_weights(self) -> None:
        one, two = (self.start(LocalTraining(lr=0.1), fraction=0.5) for _ in range(2))
        for engine in (one, two):
            for _ in range(4):
                engine.play_round()
        states = [engine.session.model.state_dict() for engine in (one, two)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_a_restored_server_goes_on_as_if_nothing_had_happened(self) -> None:
        whole = self.start(LocalTraining(lr=0.1), fraction=0.5, optimizer=dbcl.optim.momentum(0.5))
        for _ in range(2):
            whole.play_round()
        state = copy.deepcopy(whole.session.state())
        again = self.start(LocalTraining(lr=0.1), fraction=0.5, optimizer=dbcl.optim.momentum(0.5))
        again.session.load_state(state)
        for _ in range(2):
            whole.play_round()
            again.play_round()
        states = [engine.session.model.state_dict() for engine in (whole, again)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_a_client_that_diverges_is_refused_and_too_few_is_an_error(self) -> None:
        engine = self.start(LocalTraining(lr=1e200), veil=0)
        before = {name: tensor.clone() for name, tensor in engine.session.model.state_dict().items()}
        with pytest.raises(dbcl.ProtocolError, match="round 0 has 0 updates and needs 1"):
            engine.play_round()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.session.model.state_dict().items())

    def test_targets_that_are_not_classes_are_refused(self) -> None:
        """Floating-point targets would be taken for soft labels, and a regression trained as something else."""
        x, _ = examples()
        with pytest.raises(ConfigError, match=r"the targets are torch.float64, and the engines train classifiers"):
            self.engine(dbcl.Server(net()), net(), x, x[:, :3], SHARDS, LocalTraining(), seed=SEED)

    @pytest.mark.parametrize("width", [9, 11])
    def test_examples_that_the_network_does_not_take_are_refused(self, width: int) -> None:
        x, y = torch.zeros(90, width, dtype=torch.float64), torch.arange(90) % 3
        with pytest.raises(ConfigError, match="does not take these examples"):
            self.engine(dbcl.Server(net()), net(), x, y, SHARDS, LocalTraining(), seed=SEED)
