"""A noise mechanism of one's own: `Server(noise=...)` calls it in every round and keeps its state."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl import seeds
from dbcl.errors import PlanError, ProtocolError
from dbcl.privacy import NoiseMechanism, PrivacyPlan
from dbcl.protocol.aggregation import Aggregate
from dbcl.state import State


class FadingNoise(NoiseMechanism):
    """Uniform noise that gets smaller with every round that was closed."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.closed: list[int] = []
        self._begun: tuple[int, bytes] | None = None

    def begin(self, round: int, key: bytes, model: nn.Module) -> None:
        self._begun = round, key

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor | None:
        assert self._begun is not None
        assert self._begun[0] == round
        if name == "bias":
            return None
        words = seeds.words(self._begun[1], "fading", name, n=torch.Size(shape).numel())
        size = self.size / (1 + len(self.closed))
        return torch.from_numpy(words / 2.0**63 - 1).reshape(shape) * size

    def guarantee(self) -> str:
        return "none: it fades"

    def end(self, round: int) -> None:
        self.closed.append(round)
        self._begun = None

    def state(self) -> State:
        return State({"closed": list(self.closed)}, {})

    def load_state(self, state: State) -> None:
        self.closed = list(map(int, state.values["closed"]))


def server_with(noise: NoiseMechanism, **more: object) -> dbcl.Server:
    torch.manual_seed(0)
    sketch = dbcl.SketchConfig(coverage="all", lanes=1)
    return dbcl.Server(nn.Linear(6, 4), sketch, noise=noise, **more)  # type: ignore[arg-type]


def close(server: dbcl.Server) -> dbcl.RoundReport:
    ones = {name: torch.full_like(tensor, 0.1) for name, tensor in server.open_round().tensors.items()}
    return server.close(Aggregate(ones, weight=1.0, count=1))


def difference(server: dbcl.Server) -> Tensor:
    """The noise on the weight, as the server applies it."""
    return (server.noisy_weights()["weight"] - server.model.weight).detach()


def test_everything_that_leaves_has_the_noise_of_the_mechanism() -> None:
    noise = FadingNoise(0.5)
    server = server_with(noise)
    broadcast = server.open_round("ann")
    expected = noise.noise(0, "weight", (4, 6))
    assert expected is not None
    torch.testing.assert_close(difference(server), expected.float())
    assert 0.25 < difference(server).abs().max() <= 0.5
    sketch = broadcast.sketches()["weight"]
    torch.testing.assert_close(broadcast.tensors["weight"], sketch.apply(server.noisy_weights()["weight"]))
    assert torch.equal(broadcast.tensors["bias"], server.model.bias)
    assert server.noise is noise
    assert server.guarantee == "none: it fades"


def test_each_round_begins_and_ends_once_and_a_failed_one_does_not_end() -> None:
    noise = FadingNoise(0.5)
    server = server_with(noise)
    for closed in range(3):
        assert difference(server).abs().max() <= 0.5 / (1 + closed)
        bad = {name: torch.full_like(each, torch.nan) for name, each in server.open_round().tensors.items()}
        with pytest.raises(ProtocolError, match="not finite"):
            server.close(Aggregate(bad, weight=1.0, count=1))
        assert noise.closed == list(range(closed))
        close(server)
    assert noise.closed == [0, 1, 2]


def test_its_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    server = server_with(FadingNoise(0.5))
    for _ in range(2):
        close(server)
    sent = server.open_round("ann").tensors
    server.save(tmp_path)
    assert json.loads(json.dumps(server.state().values["noise"])) == {"closed": [0, 1]}
    noise = FadingNoise(0.5)
    resumed = dbcl.Server.load(tmp_path, nn.Linear(6, 4), server.plan, noise=noise)
    assert noise.closed == [0, 1]
    assert all(torch.equal(tensor, sent[name]) for name, tensor in resumed.open_round("ann").tensors.items())


PLAN = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.5, rounds=4, clients=8, cohort=4)


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, noise_on_updates=True)])
def test_a_guarantee_has_noise_of_its_own(plan: PrivacyPlan) -> None:
    with pytest.raises(PlanError, match="noise of its own"):
        dbcl.Server(nn.Linear(6, 4), privacy=plan, noise=FadingNoise(0.5))
