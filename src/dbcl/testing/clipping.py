"""Contract tests of per-example clipping. Engines inherit them through `EngineContract`.

A guarantee with one example as the privacy unit depends on the training code of the client. The
tests therefore cover all model types and all execution paths of an engine.
"""

import copy
import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import toeplitz
from torch import Tensor, nn

import dbcl
from dbcl.data.trees import call, map_tensors
from dbcl.engines import LocalTraining
from dbcl.engines.secure import SecureServer
from dbcl.errors import ConfigError
from dbcl.privacy import PrivacyPlan, cyclic_batch
from dbcl.protocol import Update, decode_update
from dbcl.protocol.secagg import NoisySum
from dbcl.testing.kinds import CLASSES, FEATURES, KINDS, MIXING, PLAIN
from dbcl.testing.nested import nested

SEED = bytes(range(32))


def per_example_sum(model: nn.Module, inputs: Any, y: Tensor, clip: float) -> dict[str, Tensor]:
    """Return the sum of clipped per-example gradients, computed one by one with autograd."""
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for row in range(len(y)):
        model.zero_grad()
        one = (
            {name: each[row : row + 1] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[[row]]
        )
        F.cross_entropy(call(model, one), y[[row]]).backward()  # type: ignore[no-untyped-call]
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        length = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        for name, grad in grads.items():
            total[name] += grad * min(1.0, clip / float(length))
    return total


class ExampleClipContract(ABC):
    """Contract tests of engines if one example is the privacy unit."""

    @abstractmethod
    def engine(self, *arguments: Any, **more: Any) -> Any:
        """Create the engine with the arguments of `LocalEngine`."""

    @staticmethod
    def _data(kind: str, scale: float = 1.0) -> tuple[nn.Module, Any, Tensor]:
        torch.manual_seed(2)
        make, inputs = {**KINDS, **MIXING}[kind]
        x, y = scale * torch.randn(16, FEATURES, dtype=torch.float64), torch.arange(16) % CLASSES
        return make().double(), inputs(x), y

    @staticmethod
    def _part(inputs: Any, start: int, end: int | None) -> Any:
        if isinstance(inputs, dict):
            return {name: each[start:end] for name, each in inputs.items()}
        return inputs[start:end]

    @staticmethod
    def _server(kind: str, model: nn.Module, **more: Any) -> dbcl.Server:
        how: dict[str, Any] = {"sketch": "identity-v1"} if kind in PLAIN or kind in MIXING else {"coverage": "large"}
        return dbcl.Server(copy.deepcopy(model), insecure_seed=0, **nested({"lanes": 1, **how, **more}))

    @pytest.mark.parametrize("clip", [0.05, 100.0])
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_update_is_the_sum_of_clipped_gradients(self, kind: str, clip: float) -> None:
        model, inputs, y = self._data(kind)
        parts = [(0, 9), (9, 10), (10, None)]  # unequal on purpose
        clients = [(self._part(inputs, *part), y[slice(*part)]) for part in parts]
        training = LocalTraining(lr=0.1, steps=1, example_clip=clip, separation=2)
        server = self._server(kind, model)
        engine = self.engine(server, copy.deepcopy(model), clients, training, seed=SEED)
        sent = {client: server.open_round(f"client {client}") for client in range(3)}
        answers = engine.train_cohort(sent)
        for client, (own, labels) in enumerate(clients):
            local = dbcl.blinded(model, sent[client]).train()
            turn = list(cyclic_batch(0, examples=len(labels), separation=2))
            batch = {name: each[turn] for name, each in own.items()} if isinstance(own, dict) else own[turn]
            total = per_example_sum(local, batch, labels[turn], clip)
            with torch.no_grad():
                for name, parameter in local.named_parameters():
                    parameter.sub_(0.1 * total[name])
            expected = dbcl.make_update(local, sent[client], examples=1).tensors
            found = _read(answers[f"client {client}"]).tensors
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("kind", ["centred batch", "running mean", "counter", "memory"])
    def test_an_example_acts_through_its_own_gradient_alone(self, kind: str) -> None:
        """A client's update is the sum of the updates of single-example clients."""
        model, inputs, y = self._data(kind)
        training = LocalTraining(lr=1.0, steps=1, example_clip=0.01, separation=1)
        server = self._server(kind, model)
        sent, updates = {0: server.open_round("client 0")}, []
        for kept in (slice(None), slice(0, 1), slice(1, None)):
            engine = self.engine(server, copy.deepcopy(model), [(inputs[kept], y[kept])], training, seed=SEED)
            tensors = _read(engine.train_cohort(sent)["client 0"]).tensors.values()
            updates.append(torch.cat([each.flatten() for each in tensors]))
        torch.testing.assert_close(updates[0], updates[1] + updates[2], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("kind", ["weight in a list", "renormalised embedding"])
    def test_models_whose_examples_cannot_be_told_apart_are_refused(self, kind: str) -> None:
        model, inputs, y = self._data(kind)
        training = LocalTraining(lr=0.1, steps=1, example_clip=0.01, separation=1)
        server = self._server(kind, model)
        engine = self.engine(server, copy.deepcopy(model), [(inputs, y)], training, seed=SEED)
        with pytest.raises(ConfigError, match="gradient of a single example cannot be computed"):
            engine.train_cohort({0: server.open_round("client 0")})

    @pytest.mark.parametrize("kind", KINDS)
    def test_mu_of_paired_runs_with_an_extreme_example_is_the_stated_one(self, kind: str) -> None:
        """Compare mu of two neighbouring runs with the stated mu.

        The runs differ by one example. The norm of C times the difference of their updates, divided
        by the noise standard deviation, is mu.
        """
        separation, rounds, clip = 2, 5, 0.01
        model, inputs, y = self._data(kind, scale=30.0)
        plan = PrivacyPlan(
            epsilon=8,
            delta=1e-4,
            clip=0.1 * clip,
            rounds=rounds,
            clients=1,
            cohort=1,
            unit="example",
            examples=7,
            batch=3,
            separation=separation,
        )
        training = LocalTraining(lr=0.1, steps=1, example_clip=clip, separation=separation)
        server = self._server(kind, model, privacy=plan)
        engines = [
            self.engine(server, copy.deepcopy(model), [(self._part(inputs, 0, end), y[:end])], training, seed=SEED)
            for end in (7, 6)  # the last example has its turn in rounds 0, 2 and 4
        ]
        differences = []
        for _ in range(rounds):
            sent = {0: server.open_round("client 0")}
            one, other = (_read(engine.train_cohort(sent)["client 0"]) for engine in engines)
            moved = [(tensor - other.tensors[name]).flatten() for name, tensor in one.tensors.items()]
            differences.append(torch.cat(moved).numpy())
            server.close_round({"client 0": other})
        C = toeplitz(plan.strategy.coefficients(rounds), np.zeros(rounds))
        measured = np.linalg.norm(C @ np.stack(differences)) / (plan.batch * plan.sigma)
        assert measured == pytest.approx(plan.mu, rel=0.01)


class SharedNoiseContract(ExampleClipContract):
    """Contract tests of engines whose clients add the noise of the guarantee."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_mu_of_paired_runs_with_shares_of_noise_is_the_stated_one(self, kind: str) -> None:
        """Compare mu of two neighbouring runs with the stated mu, for clients that add the noise.

        The norm of C times the difference of their integer vectors, divided by the standard
        deviation of the honest clients' noise, is mu.
        """
        separation, rounds, clip, silos = 2, 5, 0.01, 3
        model, inputs, y = self._data(kind, scale=30.0)
        model, inputs = model.float(), map_tensors(_in_float32, inputs)
        plan = PrivacyPlan(
            epsilon=8,
            delta=1e-4,
            clip=0.1 * clip,
            unit="example",
            noise_by="clients",
            colluders=1,
            rounds=rounds,
            clients=silos,
            cohort=silos,
            examples=15,
            batch=8,
            separation=separation,
            values=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        )
        training = LocalTraining(lr=0.1, steps=1, example_clip=clip, separation=separation)
        server = SecureServer(copy.deepcopy(model), privacy=plan, masked=False, insecure_seed=0)
        rest = [(self._part(inputs, start, start + 4), y[start : start + 4]) for start in (7, 11)]
        engines = [
            self.engine(
                server, copy.deepcopy(model), [(self._part(inputs, 0, end), y[:end]), *rest], training, seed=SEED
            )
            for end in (7, 6)  # the last example of client 0 has its turn in rounds 0, 2 and 4
        ]
        pair = [NoisySum.of_client(plan, SEED) for _ in engines]
        differences = []
        for _ in range(rounds):
            sent = {client: server.open_round(f"client {client}") for client in range(silos)}
            answers = [engine.train_cohort(sent) for engine in engines]
            one, other = (
                encoding.vector(own["client 0"], sent[0])[0] for encoding, own in zip(pair, answers, strict=True)
            )
            differences.append(one - other)
            server.close_round(answers[1])
        C = toeplitz(plan.strategy.coefficients(rounds), np.zeros(rounds))
        measured = np.linalg.norm(C @ np.stack(differences)) / (plan.shares.scale * math.sqrt(plan.shares.honest))
        assert measured <= plan.mu * (1 + 1e-12)
        assert measured == pytest.approx(plan.mu, rel=0.0105)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _read(message: Update | bytes) -> Update:
    return message if isinstance(message, Update) else decode_update(message)
