"""The veil with a guarantee: its noise against dense matrices, in a server, over restarts, and what it refuses."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl import optim, seeds
from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy import (
    CorrelatedNoise,
    Mechanism,
    PrivacyPlan,
    Strategy,
    Workload,
    banded,
    independent,
    white,
)
from dbcl.privacy.correlated import SCHEME
from dbcl.state import State
from dbcl.testing import NoiseMechanismContract

PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=40, clients=100, cohort=10, momentum=0.5)
STRATEGIES = [
    independent(),
    banded(3),
    banded(3, 0.5),
    Strategy("mixed", (1.0, -0.2), (1.0, -0.8)),
    white(Workload(0.5)),
]


def key_of(round: int) -> bytes:
    return seeds.derive(bytes(32), "test", round)


def z_of(key: bytes, round: int, name: str, n: int) -> np.ndarray:
    """The stream's standard normal values, from whole numbers: 64 bits of radius and 64 of angle for two of them."""
    drawn = [int(word) for word in seeds.words(key, SCHEME, round, name, n=n + n % 2)]
    radii, angles = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    polar = [
        (math.sqrt(-2 * math.log((r + 1) / 2**64)), 2 * math.pi * a / 2**64) for r, a in zip(radii, angles, strict=True)
    ]
    return np.array([r * math.cos(a) for r, a in polar] + [r * math.sin(a) for r, a in polar])[:n]


def mechanism(strategy: Strategy, rounds: int = 8, momentum: float = 0.5) -> Mechanism:
    return Mechanism(Workload(momentum, 0.7), strategy, rounds, 3, 3)


def toeplitz(column: np.ndarray) -> np.ndarray:
    n = len(column)
    return np.array([[column[t - s] if s <= t else 0.0 for s in range(n)] for t in range(n)])


def factor(own: Mechanism) -> np.ndarray:
    """B = A C^-1."""
    return toeplitz(own.workload.coefficients(own.rounds)) @ np.linalg.inv(
        toeplitz(own.strategy.coefficients(own.rounds))
    )


def streams(veil: CorrelatedNoise, count: int) -> list[Tensor]:
    """N_0, ..., N_n of one tensor with this many numbers."""
    layer, noises = nn.Linear(count, 1, bias=False), []
    for round in range(veil.mechanism.rounds + 1):
        veil.begin(round, key_of(round), layer)
        noises.append(veil.noise(round, "weight", (1, count)).flatten())
        veil.end(round)
    return noises


def test_the_tail_of_the_noise_is_that_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest word of a radius gives 9.4 standard deviations; of 32 bits it would be 6.7."""
    monkeypatch.setattr(seeds, "words", lambda *labels, n: np.zeros(n, dtype=np.uint64))
    noises = streams(CorrelatedNoise(Mechanism(Workload(), independent(), 2, 1, 2), sigma=0.5), 4)
    assert float(noises[1].max()) > 9 * 0.5


class TestBanded(NoiseMechanismContract):
    def veil(self) -> CorrelatedNoise:
        return CorrelatedNoise.from_plan(PLAN)


class TestBuffered(NoiseMechanismContract):
    def veil(self) -> CorrelatedNoise:
        return CorrelatedNoise(mechanism(banded(2)), 0.1)


class TestPlain(NoiseMechanismContract):
    def veil(self) -> CorrelatedNoise:
        return CorrelatedNoise(mechanism(banded(3), momentum=0.0), 0.1)


def test_the_golden_stream() -> None:
    """What the scheme's name stands for: a change of these numbers is a new name."""
    veil = CorrelatedNoise(Mechanism(Workload(), independent(), 3, 1, 3), 0.5)
    assert SCHEME == "correlated-v2"
    veil.begin(0, bytes(range(32)), nn.Linear(3, 1))
    drawn = veil.noise(0, "weight", (1, 3)).flatten()
    expected = 0.5 * z_of(bytes(range(32)), 0, "weight", 3)
    assert drawn.tolist() == pytest.approx(expected.tolist(), abs=1e-15)
    assert drawn.tolist() == pytest.approx([0.01576419405143949, 0.9041393267970104, 0.642948268015729], abs=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.kind)
def test_the_noise_of_round_t_is_row_t_of_the_mechanism(strategy: Strategy) -> None:
    own = mechanism(strategy)
    noises = streams(CorrelatedNoise(own, 0.3), 5)
    z = np.stack([0.3 * z_of(key_of(t), t, "weight", 5) for t in range(own.rounds + 1)])
    np.testing.assert_allclose(torch.stack(noises[1:]).numpy(), factor(own) @ z[1:], atol=1e-12)
    np.testing.assert_allclose(noises[0].numpy(), 0.7 * z[0], atol=1e-15)  # on W_0, and nowhere else


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.kind)
def test_the_covariance_of_ten_thousand_streams(strategy: Strategy) -> None:
    own, count = mechanism(strategy), 10_000
    noises = torch.stack(streams(CorrelatedNoise(own, 0.3), count)).numpy() / 0.3
    B = np.zeros((own.rounds + 1, own.rounds + 1))
    B[0, 0], B[1:, 1:] = own.workload.lr, factor(own)
    expected = B @ B.T
    error = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / count)
    assert (np.abs(noises @ noises.T / count - expected) / error).max() < 4  # of 45 numbers
    whitened = np.linalg.solve(B, noises)
    assert np.abs(whitened.mean(axis=1)).max() < 4 / math.sqrt(count)
    assert np.abs((whitened**4).mean(axis=1) - 3).max() < 4 * math.sqrt(96 / count)  # and it is normal


def run_server(
    folder: Path | None = None, *, stop: int, first: dbcl.Server | None = None
) -> tuple[dbcl.Server, dict[int, bytes]]:
    """A server with this veil, whose clients answer with the number 0.01 everywhere; the broadcasts by round."""
    server = first or make_server()
    sent = {}
    while server.round < stop:
        if folder is not None:
            server.save(folder)
        broadcast = server.open_round()
        sent[server.round] = dbcl.encode(broadcast)
        server.close_round([answer(broadcast)])
    return server, sent


def make_server() -> dbcl.Server:
    torch.manual_seed(0)
    return dbcl.Server(
        nn.Linear(6, 2, dtype=torch.float64),
        dbcl.SketchConfig(coverage="all"),
        optimizer=optim.momentum(0.5),
        insecure_seed=3,
        noise=CorrelatedNoise.from_plan(PLAN),
    )


def answer(broadcast: dbcl.Broadcast) -> dbcl.Update:
    local = dbcl.blinded(nn.Linear(6, 2, dtype=torch.float64), broadcast)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(0.01)
    return dbcl.make_update(local, broadcast, examples=1)


def test_in_a_server_every_broadcast_has_its_row_of_the_mechanism() -> None:
    server = make_server()
    keys, seen = [], []
    for _ in range(6):
        broadcast = server.open_round()
        keys.append(seeds.derive(server.sequence.keys.current, "veil"))
        seen.append((broadcast.tensors["bias"] - server.model.bias.detach()).numpy())
        server.prepare()  # what is drawn ahead is the same
        server.close_round([answer(broadcast)])
    z = np.stack([PLAN.sigma * z_of(key, t, "bias", 2) for t, key in enumerate(keys)])
    short = Mechanism(PLAN.workload, PLAN.strategy, 5, PLAN.separation, PLAN.participations)
    np.testing.assert_allclose(np.stack(seen[1:]), factor(short) @ z[1:], atol=1e-12)
    assert Workload.from_optimizer(server.trained.optimizer) == PLAN.workload
    assert server.noise.guarantee() == PLAN.promise


def test_a_server_that_comes_back_sends_the_same_bytes(tmp_path: Path) -> None:
    _, whole = run_server(stop=14)
    server, before = run_server(tmp_path, stop=12)
    server.save(tmp_path)
    opened = dbcl.encode(server.open_round())
    server.save(tmp_path)  # with round 12 open, and its noise shown
    revived = make_server()
    revived.load_state(server.state())
    _, after = run_server(first=revived, stop=14)
    assert opened == whole[12]
    assert {**before, **after} == whole


def test_a_checkpoint_on_disk_brings_it_back(tmp_path: Path) -> None:
    server, _ = run_server(tmp_path, stop=12)
    server.save(tmp_path)
    revived = make_server()
    revived.load_state(dbcl.protocol.checkpoint.load(tmp_path))
    assert dbcl.encode(revived.open_round()) == dbcl.encode(server.open_round())


def test_a_step_that_is_undone_leaves_the_open_round_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = run_server(stop=7)
    server, _ = run_server(stop=5)
    broadcast = server.open_round()
    with monkeypatch.context() as patched:
        patched.setattr(server.trained.optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            server.close_round([answer(broadcast)])
    assert dbcl.encode(server.open_round()) == whole[5]
    server.close_round([answer(broadcast)])
    assert dbcl.encode(server.open_round()) == whole[6]


def test_an_open_round_survives_a_state_that_is_loaded_and_given_up() -> None:
    server, _ = run_server(stop=5)
    other, _ = run_server(stop=3)
    server.open_round()
    before, noise = server.noise.state(), server.noise.noise(5, "bias", (2,))
    server.noise.load_state(other.noise.state())
    with pytest.raises(ProtocolError, match="round 5 has not begun"):
        server.noise.noise(5, "bias", (2,))
    with pytest.raises(ProtocolError, match="round 5 has not begun"):
        server.noise.end(5)
    server.noise.load_state(before)
    assert torch.equal(server.noise.noise(5, "bias", (2,)), noise)
    server.noise.end(5)


def test_the_model_after_the_last_round_can_be_released_and_nothing_after_it() -> None:
    veil = CorrelatedNoise(mechanism(banded(3), rounds=2), 0.1)
    noises = streams(veil, 4)
    assert len(noises) == 3
    with pytest.raises(ProtocolError, match="the budget of 2 rounds is spent"):
        veil.begin(3, key_of(3), nn.Linear(4, 1))


def test_no_second_noise_on_the_same_weights() -> None:
    veil, layer = CorrelatedNoise.from_plan(PLAN), nn.Linear(4, 2)
    veil.begin(0, key_of(0), layer)
    with pytest.raises(ProtocolError, match="round 0 has begun with another key"):
        veil.begin(0, key_of(1), layer)
    revived = CorrelatedNoise.from_plan(PLAN)
    revived.load_state(veil.state())
    with pytest.raises(ProtocolError, match="round 0 has begun with another key"):
        revived.begin(0, key_of(1), layer)
    with pytest.raises(ProtocolError, match="that of round 0, and round 1 would begin"):
        veil.begin(1, key_of(1), layer)
    with pytest.raises(ProtocolError, match="round 1 has not begun"):
        veil.noise(1, "bias", (2,))
    veil.end(0)
    with pytest.raises(ProtocolError, match="that of round 1, and round 0 would begin"):
        veil.begin(0, key_of(0), layer)
    with pytest.raises(ProtocolError, match="round 1 has not begun"):
        veil.end(1)


def test_a_key_that_comes_again_gives_other_numbers() -> None:
    veil, layer = CorrelatedNoise(mechanism(independent()), 0.1), nn.Linear(4, 2)
    steps, last = [], torch.zeros(2, 4, dtype=torch.float64)
    for round in range(3):
        veil.begin(round, key_of(0), layer)
        noise = veil.noise(round, "weight", (2, 4))
        steps.append(noise - last)
        last = noise if round else last
        veil.end(round)
    assert not torch.allclose(steps[0], steps[1])
    assert not torch.allclose(steps[1], steps[2])


def test_statistics_that_clients_measure_are_refused() -> None:
    norm = nn.BatchNorm1d(3)
    veil = CorrelatedNoise.from_plan(PLAN)
    veil.begin(0, key_of(0), norm)
    veil.noise(0, "weight", (3,))
    with pytest.raises(ProtocolError, match=r"running_mean is no parameter.*GroupNorm"):
        veil.noise(0, "running_mean", (3,))


def test_a_tensor_that_comes_or_goes_in_between_is_refused() -> None:
    veil, layer = CorrelatedNoise.from_plan(PLAN), nn.Linear(4, 2)
    for round in range(2):
        veil.begin(round, key_of(round), layer)
        veil.noise(round, "weight", (2, 4))
        veil.end(round)
    veil.begin(2, key_of(2), layer)
    with pytest.raises(ProtocolError, match="bias has not left the server since round 1"):
        veil.noise(2, "bias", (2,))
    with pytest.raises(ProtocolError, match="round 2: weight did not leave the server"):
        veil.end(2)


@pytest.mark.parametrize(
    "other",
    [
        {"epsilon": 4.0},
        {"rounds": 50, "participations": 10},
        {"momentum": 0.0},
        {"correlation": "independent"},
    ],
)
def test_a_checkpoint_of_another_noise_or_budget_is_refused(other: Mapping[str, Any]) -> None:
    settings = {"epsilon": 8.0, "delta": 1e-5, "clip": 0.2, "rounds": 40, "clients": 100, "cohort": 10, "momentum": 0.5}
    veil = CorrelatedNoise.from_plan(PrivacyPlan(**{**settings, **other}))
    with pytest.raises(ProtocolError, match="another noise or another budget"):
        veil.load_state(CorrelatedNoise.from_plan(PLAN).state())
    with pytest.raises(ProtocolError, match="another noise or another budget"):
        veil.load_state(State({}, {}))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_noise_of_no_size_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="sigma must be above 0 and finite"):
        CorrelatedNoise(mechanism(independent()), sigma)


def test_a_veil_that_was_not_made_of_a_plan_promises_nothing() -> None:
    assert CorrelatedNoise(mechanism(independent()), 0.1).guarantee() == "none"
