"""Canaries in runs whose clients add the noise: each adversary's epsilon, from both sides, and faults that are seen."""

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dbcl import seeds
from dbcl.engines.secure import SecureServer
from dbcl.errors import AuditError
from dbcl.objective import CLASSIFICATION
from dbcl.privacy import NoiseStream, PrivacyPlan, epsilon_of, independent
from dbcl.privacy.distributed import NoiseShares
from dbcl.protocol import Update
from dbcl.protocol.secagg import NoisySum
from dbcl.simulation.presets import preset
from dbcl.simulation.task import given
from dbcl_audit.canaries import CanaryEstimate
from dbcl_audit.guarantee import measure_shares
from dbcl_audit.shared_canaries import SharedCanaries, Silent

VALUES, COUNT, DELTA = 2_000, 400, 1e-5


@pytest.fixture(autouse=True)
def known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make secrets repeatable: a measurement by chance is beyond its limits once in a thousand times."""
    drawn: list[bytes] = []

    def fresh() -> bytes:
        drawn.append(seeds.derive(bytes(32), "shared canaries", len(drawn)))
        return drawn[-1]

    monkeypatch.setattr("dbcl.seeds.fresh", fresh)


def plan_of(mu: float = 1.5, silos: int = 3, colluders: int = 1, **changes: Any) -> PrivacyPlan:
    facts: dict[str, Any] = {
        "epsilon": epsilon_of(mu, DELTA),
        "delta": DELTA,
        "clip": 0.1,
        "unit": "example",
        "noise_by": "clients",
        "colluders": colluders,
        "rounds": 6,
        "separation": 3,
        "clients": silos,
        "cohort": silos,
        "examples": 600,
        "batch": 200,
        "values": VALUES,
    }
    return PrivacyPlan(**{**facts, **changes})


def server_of(plan: PrivacyPlan, **changes: Any) -> SecureServer:
    net = nn.Linear(VALUES, 1, bias=False)
    return SecureServer(net, privacy=plan, **{"masked": False, **changes})


def measured(
    plan: PrivacyPlan, server: SecureServer | None = None, *, rounds: int | None = None, count: int = COUNT
) -> dict[str, CanaryEstimate]:
    canaries = SharedCanaries(server or server_of(plan), plan, count=count)
    generator = np.random.default_rng(0)
    for round in range(plan.rounds if rounds is None else rounds):
        size = plan.cohort if plan.unit == "client" else plan.clients
        first = size * (round % plan.separation) if plan.unit == "client" else 0
        updates = {}
        for number in range(first, first + size):
            name = f"silo {number}"
            broadcast = canaries.open_round(name)
            data = torch.from_numpy(0.01 * plan.clip * generator.normal(size=(1, VALUES)))
            kept = data if plan.unit == "example" else data.float()
            updates[name] = Update(round, broadcast.plan.digest, {"weight": kept}, 1)
        canaries.close_round(updates)
    return canaries.estimates()


def assert_as_stated(found: CanaryEstimate) -> None:
    assert abs(found.mu - found.stated.mu) < 3 * found.mu_error + 0.02 * found.stated.mu
    assert found.mu_error < 0.12
    assert found.holds
    assert found.reached
    low, high = found.epsilon_interval
    assert low < 1.05 * found.stated.epsilon
    assert found.stated.epsilon < 1.1 * high


@pytest.mark.parametrize(
    ("mu", "silos", "colluders", "changes"),
    [
        (0.7, 3, 1, {}),
        (1.5, 5, 3, {}),
        (2.0, 10, 2, {"rounds": 4, "separation": 2}),
        (1.5, 3, 1, {"rounds": 3, "separation": 1, "lr": 2.0}),
        (1.5, 3, 1, {"momentum": 0.5}),
    ],
    ids=str,
)
def test_each_adversary_measures_what_is_stated_for_it(
    mu: float, silos: int, colluders: int, changes: dict[str, Any]
) -> None:
    plan = plan_of(mu, silos, colluders, **changes)
    found = measured(plan)
    for adversary, known in (("server", 0), ("colluders", colluders)):
        assert_as_stated(found[adversary])
        assert found[adversary].stated.epsilon == pytest.approx(plan.shares.epsilon_against(known))
    assert found["colluders"].stated.epsilon == pytest.approx(plan.epsilon, rel=0.01)
    assert found["colluders"].mu > found["server"].mu
    model = found["anyone"]
    assert model.holds
    assert model.stated == found["server"].stated
    assert 0.2 * mu < model.mu < model.stated.mu + 3 * model.mu_error


def test_the_whole_protocol_measures_the_same_as_sums_that_are_only_added() -> None:
    plan = plan_of(rounds=2, separation=1)
    whole, added = (measured(plan, server_of(plan, masked=masked)) for masked in (True, False))
    for each in whole.values():
        assert each.holds
        assert each.reached
    assert whole["colluders"].mu == pytest.approx(added["colluders"].mu, rel=0.2)


def test_fewer_rounds_are_compared_with_what_they_spend() -> None:
    plan = plan_of(2.0)
    found = measured(plan, rounds=3)
    assert found["colluders"].turns == 1
    assert found["colluders"].stated.mu == pytest.approx(plan.mu / math.sqrt(2))
    assert_as_stated(found["colluders"])


def test_without_colluders_the_server_is_the_worst_case() -> None:
    plan = plan_of(colluders=0)
    found = measured(plan)
    assert set(found) == {"server", "anyone"}
    assert found["server"].stated.epsilon == pytest.approx(plan.epsilon, rel=0.01)
    assert_as_stated(found["server"])


def test_a_client_as_the_unit() -> None:
    """Cohorts in turns; canaries send three times too much, and come back too early."""
    plan = plan_of(
        unit="client", clients=8, cohort=4, fewest=4, separation=2, rounds=4, examples=0, batch=0, delta=1e-3
    )
    found = measured(plan)
    assert_as_stated(found["colluders"])
    assert found["colluders"].turns == 2
    assert found["anyone"].mu == pytest.approx(found["server"].mu, abs=0.5)


# Faults


def replaced(server: SecureServer, plan: PrivacyPlan, kind: type[NoiseStream], names: list[str]) -> SecureServer:
    for name in names:
        encoding = server.client(name).encoding
        assert isinstance(encoding, NoisySum)
        encoding.stream = kind(plan.shares, seeds.fresh())
    return server


class White(NoiseStream):
    """C = I in place of C^-1: independent noise in every round, in the size that is meant for z."""

    def __init__(self, shares: NoiseShares, key: bytes) -> None:
        super().__init__(shares, key)
        self._mechanism = replace(self._mechanism, strategy=independent())


class Restarted(NoiseStream):
    """The same z in every round, as after a restart from the beginning."""

    def draw(self, round: int, broadcast: bytes) -> NDArray[np.int64]:
        return NoiseStream(self.shares, self._key).draw(0, b"")


@pytest.mark.parametrize("silos", [3, 10])
def test_a_client_without_noise_is_seen_and_named(silos: int) -> None:
    plan = plan_of(2.0, silos)
    found = measured(plan, replaced(server_of(plan), plan, Silent, ["silo 1"]))
    assert not any(each.holds for each in found.values())
    assert found["colluders"].quiet == ("silo 1",)
    if silos == 3:
        assert found["colluders"].epsilon_interval[0] > found["colluders"].stated.epsilon


def test_shares_that_do_not_count_on_colluders_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: Any = NoiseShares.__dict__["scale"]

    def small(self: NoiseShares) -> float:
        return float(planned.func(self)) * math.sqrt(self.honest / self.clients)

    scale = cached_property(small)
    scale.__set_name__(NoiseShares, "scale")
    monkeypatch.setattr(NoiseShares, "scale", scale)
    found = measured(plan_of(2.0, 5, 3))["colluders"]
    assert not found.holds
    assert found.mu > 1.3 * found.stated.mu
    assert found.epsilon_interval[0] > found.stated.epsilon


def test_noise_without_its_correlation_is_seen() -> None:
    """It is another noise than planned: these canaries are found less often than the plan says, beyond chance."""
    plan = plan_of(3.0, rounds=12, separation=6)
    found = measured(plan, replaced(server_of(plan), plan, White, [f"silo {number}" for number in range(3)]))
    assert not found["colluders"].reached
    assert found["colluders"].mu < 0.95 * found["colluders"].stated.mu


def test_noise_that_begins_again_every_round_is_seen() -> None:
    plan = plan_of()
    found = measured(plan, replaced(server_of(plan), plan, Restarted, [f"silo {number}" for number in range(3)]))
    for adversary in ("server", "colluders"):
        assert not found[adversary].holds
        assert found[adversary].epsilon_interval[0] > 2 * found[adversary].stated.epsilon


@pytest.mark.parametrize("engine", ["stacked", "local"])
@pytest.mark.parametrize("clips", [True, False])
def test_real_extreme_examples_find_clients_that_do_not_clip(
    engine: str, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbcl_audit.canaries.MAX_CANARIES", 60)
    if not clips:
        for place in ("example_clipping", "dense_clipping"):
            monkeypatch.setattr(f"dbcl.privacy.{place}.clip_factors", lambda squares, clip: torch.ones_like(squares))
    generator = torch.Generator().manual_seed(0)
    examples = torch.randn(80, 20, generator=generator), torch.arange(80) % 3
    task = given(
        lambda seed: nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)),
        examples,
        examples,
        objective=CLASSIFICATION,
    )
    config = preset("guaranteed", clients=4, rounds=2, separation=2, delta=1e-3, epsilon=30.0, lr=0.1, engine=engine)
    found = measure_shares(config, task)["colluders"]
    assert found.holds is clips
    assert found.largest == pytest.approx(1.0, rel=0.02) if clips else found.largest > 10


def test_what_cannot_be_measured_is_refused() -> None:
    plan = plan_of()
    with pytest.raises(AuditError, match="five parameters or more for each"):
        SharedCanaries(server_of(plan), plan, count=1000)
    canaries = SharedCanaries(server_of(plan), plan, count=20)
    with pytest.raises(AuditError, match="no canary has taken part"):
        canaries.estimates()
    with pytest.raises(AuditError, match="by their senders"):
        canaries.close_round([])
