import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dbcl
from dbcl import seeds
from dbcl.errors import ProtocolError
from dbcl.privacy import IndependentNoise, NoiseMechanism, veil_sizes
from dbcl.privacy.noise import SCHEME
from dbcl.testing import NoiseMechanismContract

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "veil.json").read_text())
KEY = bytes(range(32))


def test_golden_streams() -> None:
    """What a veil's name stands for: the numbers that its key gives. veil-v1 is that of dbcl 0.1, in V's space."""
    assert {entry["scheme"] for entry in GOLDEN} == {"veil-v1", SCHEME}
    for entry in GOLDEN:
        drawn = seeds.normals(bytes.fromhex(entry["key"]), entry["scheme"], entry["name"], n=len(entry["numbers"]))
        assert drawn.tolist() == pytest.approx(entry["numbers"], rel=0, abs=1e-12)  # sines differ in the last bits


def test_the_white_veil_is_its_golden_stream_times_tau() -> None:
    (entry,) = [entry for entry in GOLDEN if entry["scheme"] == SCHEME]
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, 0.5)
    veil = IndependentNoise({"weight": 0.2, "bias": 0.0})
    veil.begin(3, bytes.fromhex(entry["key"]), layer)
    noise = veil.noise(3, "weight", (2, 4))
    tau = veil_sizes(layer, {"weight": 0.2})["weight"]
    assert tau == pytest.approx(0.1)
    assert (noise.flatten() / tau).tolist() == pytest.approx(entry["numbers"], abs=1e-12)
    assert veil.noise(3, "bias", (2,)) is None
    assert veil.guarantee() == "none"


def test_a_round_that_has_not_begun_has_no_noise() -> None:
    veil = IndependentNoise({"weight": 0.2})
    with pytest.raises(ProtocolError, match="round 0 has not begun"):
        veil.noise(0, "weight", (2, 4))
    veil.begin(0, KEY, nn.Linear(4, 2))
    with pytest.raises(ProtocolError, match="round 1 has not begun"):
        veil.noise(1, "weight", (2, 4))


def test_two_sketches_of_one_round_show_one_noise() -> None:
    """V = (W + N) R: with a noise of its own in each, two clients could average the veil away."""
    layer = nn.Linear(64, 32, dtype=torch.float64)
    server = dbcl.Server(layer, dbcl.SketchConfig(coverage="all", veil=0.5))
    broadcast = server.open_round()
    noise = server.noise.noise(0, "weight", (32, 64))
    sketch = broadcast.sketches()["weight"]
    torch.testing.assert_close(broadcast.tensors["weight"], sketch.apply(layer.weight.detach() + noise))
    torch.testing.assert_close(broadcast.tensors["bias"], layer.bias.detach() + server.noise.noise(0, "bias", (32,)))


class TestWhiteVeil(NoiseMechanismContract):
    def veil(self) -> IndependentNoise:
        return IndependentNoise({"weight": 0.2, "bias": 0.2})


class Shift(NoiseMechanism):
    """A veil of another kind: a constant that grows by one with every round, kept in its state."""

    def __init__(self) -> None:
        self.total = self.now = 0.0

    def begin(self, round: int, key: bytes, model: nn.Module) -> None:
        self.now = self.total + 1

    def end(self, round: int) -> None:
        self.total = self.now

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, self.now, dtype=torch.float64)

    def guarantee(self) -> str:
        return "none"

    def state(self) -> dbcl.state.State:
        return dbcl.state.State({"total": self.total}, {})

    def load_state(self, state: dbcl.state.State) -> None:
        self.total = state.values["total"]


def test_another_kind_of_veil_stands_in_its_place_and_is_restored_with_its_state() -> None:
    def make() -> dbcl.Server:
        torch.manual_seed(0)
        return dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all"), noise=Shift(), insecure_seed=0)

    server = make()
    for round in range(3):
        broadcast = server.open_round()
        shown = broadcast.tensors["bias"] - server.model.bias.detach()
        torch.testing.assert_close(shown, torch.full((2,), 1.0 + round))
        local = dbcl.blinded(nn.Linear(6, 2), broadcast)
        server.close_round([dbcl.make_update(local, broadcast, examples=1)])
    state = server.state()
    other = make()
    other.load_state(state)
    assert dbcl.encode(other.open_round()) == dbcl.encode(server.open_round())
    again = make()  # with the next round opened already when the checkpoint is written
    again.load_state(server.state())
    assert dbcl.encode(again.open_round()) == dbcl.encode(server.open_round())
