"""Canaries against the real server: what is measured is what the plan states, from both sides, and faults are seen."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dbcl import optim, seeds
from dbcl.errors import AuditError
from dbcl.privacy import CorrelatedNoise, ParticipationTracker, PrivacyPlan, epsilon_of
from dbcl.protocol import Server, Update, UpdateStack, encode
from dbcl.testing.nested import nested
from dbcl_audit.canaries import Canaries, CanaryEstimate

ROUNDS, SEPARATION, COHORT, CLIP, DELTA = 12, 3, 10, 0.5, 1e-4


def plan_of(mu: float = 1.0, **changes: Any) -> PrivacyPlan:
    given = {
        "epsilon": epsilon_of(mu, DELTA),
        "delta": DELTA,
        "clip": CLIP,
        "rounds": ROUNDS,
        "clients": SEPARATION * COHORT,
        "cohort": COHORT,
    }
    return PrivacyPlan(**{**given, **changes})


def server_of(plan: PrivacyPlan, **changes: Any) -> Server:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 10))
    settings = {"sketch": "identity-v1", "optimizer": optim.momentum(plan.momentum, lr=plan.lr), **changes}
    return Server(net, privacy=plan, insecure_seed=1, **nested(settings))


def honest(server: Server, plan: PrivacyPlan, kind: str) -> Any:
    """The updates of a round's cohort: they pull together, and at the weights that they see."""
    round, cohort = server.round, plan.cohort
    first = plan.cohort * (round % plan.separation) if plan.unit == "client" else 0
    names = [f"client {number}" for number in range(first, first + cohort)]
    sent = [server.open_round(name) for name in names]
    length = plan.clip if plan.unit == "client" else plan.clip * plan.batch / cohort / 2
    pulls = [{name: 0.2 - V.float() for name, V in each.tensors.items()} for each in sent]
    lengths = [math.sqrt(sum(float(V.square().sum()) for V in pull.values())) for pull in pulls]
    pulls = [{name: V * (length / own) for name, V in pull.items()} for pull, own in zip(pulls, lengths, strict=True)]
    if kind == "stack":
        stacked = {name: torch.stack([pull[name] for pull in pulls]) for name in pulls[0]}
        digests = tuple(each.plan.digest for each in sent)
        return UpdateStack(round, tuple(names), digests, stacked, (1,) * cohort, ({},) * cohort)
    made = [Update(round, each.plan.digest, pull, 1) for each, pull in zip(sent, pulls, strict=True)]
    return {name: encode(each) if kind == "bytes" else each for name, each in zip(names, made, strict=True)}


def measured(
    plan: PrivacyPlan,
    *,
    server: Server | None = None,
    rounds: int = ROUNDS,
    kind: str = "stack",
    count: int | None = 300,
    canaries: type[Canaries] = Canaries,
) -> CanaryEstimate:
    measuring = canaries(server or server_of(plan), plan, count=count)
    for _ in range(rounds):
        measuring.close_round(honest(measuring.server, plan, kind))
    return measuring.estimate()


def assert_as_stated(found: CanaryEstimate, error: float = 0.14) -> None:
    assert abs(found.mu - found.stated.mu) < 3 * found.mu_error
    assert found.mu_error < error
    assert abs(found.auc - found.auc_bound) < 0.08
    assert found.holds


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("unit", ["client", "example"])
def test_what_is_measured_is_what_is_stated(mu: float, unit: str) -> None:
    changes = {"unit": unit, "examples": 300, "batch": 100, "separation": 3} if unit == "example" else {}
    found = measured(plan_of(mu, **changes))
    assert found.stated.mu == pytest.approx(mu)
    assert_as_stated(found)
    low, high = found.epsilon_interval
    assert low < found.epsilon < high
    assert low < 1.1 * found.stated.epsilon
    assert found.stated.epsilon < 1.1 * high


@pytest.mark.parametrize(
    "changes",
    [
        {"correlation": "white"},
        {"correlation": "independent", "lr": 0.5},
        {"momentum": 0.7, "lr": 2.0},
        {"correlation": "white", "momentum": 0.5},
        {"weight_cap": 7.0},
    ],
    ids=str,
)
def test_all_kinds_of_noise(changes: dict[str, Any]) -> None:
    found = measured(plan_of(**changes))
    assert_as_stated(found)


def test_a_stack_and_bytes_measure_the_same() -> None:
    stack, sent = (measured(plan_of(), kind=kind) for kind in ("stack", "bytes"))
    assert sent.mu == pytest.approx(stack.mu, rel=1e-5)


def test_with_a_sketch_canaries_are_in_what_is_not_sketched() -> None:
    plan = plan_of(2.0)
    server = server_of(plan, sketch="count-v1", lanes=2, coverage="large")
    assert [each.name for each in server.plan.tensors if each.sketched] == ["0.weight"]
    assert_as_stated(measured(plan, server=server, count=100, kind="update"), error=0.22)


def test_fewer_rounds_are_compared_with_what_they_spend() -> None:
    plan = plan_of(2.0)
    found = measured(plan, rounds=4)
    assert found.turns == 2
    assert found.stated == plan.spent(rounds=4, participations=2)
    assert_as_stated(found)


class Replayed(CorrelatedNoise):
    """z of the first round, again and again."""

    def _drawn(self, key: bytes, round: int, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return super()._drawn(seeds.derive(bytes(32), "replayed"), 0, name, shape, device)


class Late(CorrelatedNoise):
    """The noise of a round comes one round late."""

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor:
        now = super().noise(round, name, shape)
        before = self._memory[name].total if name in self._memory else None
        return torch.zeros_like(now) if before is None else before.clone()


class White(CorrelatedNoise):
    """The noise of every round by itself, in the size that is meant for correlated noise."""

    def noise(self, round: int, name: str, shape: tuple[int, ...]) -> Tensor:
        super().noise(round, name, shape)
        begun = self._opened(round)
        return self._drawn(begun.key, round, name, shape, begun.devices[name])


def half_the_noise(server: Server, plan: PrivacyPlan) -> None:
    server.sequence.noise = CorrelatedNoise(plan.mechanism, plan.sigma / 2)


def replayed(server: Server, plan: PrivacyPlan) -> None:
    server.sequence.noise = Replayed(plan.mechanism, plan.sigma)


def late(server: Server, plan: PrivacyPlan) -> None:
    server.sequence.noise = Late(plan.mechanism, plan.sigma)


def white_noise(server: Server, plan: PrivacyPlan) -> None:
    server.sequence.noise = White(plan.mechanism, plan.sigma)


def no_clip(server: Server, plan: PrivacyPlan) -> None:
    server.validation.validator = replace(server.validator, norm_bound=None)


def early(server: Server, plan: PrivacyPlan) -> None:
    server.keeper.tracker = ParticipationTracker(
        rounds=ROUNDS, separation=SEPARATION - 1, participations=ROUNDS, clients=10**6
    )


def divided_by_less(server: Server, plan: PrivacyPlan) -> None:
    fewer = replace(plan, cohort=plan.cohort // 2, separation=SEPARATION, participations=plan.participations)
    server.keeper.plan = fewer


MUTANTS = (half_the_noise, replayed, late, white_noise, no_clip, early, divided_by_less)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(mutant: Callable[[Server, PrivacyPlan], None]) -> None:
    plan = plan_of()
    server = server_of(plan)
    mutant(server, plan)
    found = measured(plan, server=server, count=600)
    assert not found.holds
    assert found.epsilon_interval[0] > found.stated.epsilon


def test_an_example_that_comes_back_too_early_is_seen() -> None:
    class Early(Canaries):
        def _due(self) -> bool:
            return self.round % (self.privacy.separation - 1) == 0

    plan = plan_of(2.0, unit="example", examples=300, batch=100, separation=3)
    assert not measured(plan, canaries=Early).holds


def test_weights_beyond_the_cap_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(weight_cap=7.0)
    server = server_of(plan)
    server.keeper.plan = replace(plan, weight_cap=3.5)  # an update of 14 examples counts for one all the same
    assert measured(plan, server=server, kind="update").holds
    monkeypatch.setattr("dbcl.protocol.guarantee.share", lambda weight, *, weight_cap, per_round: weight / weight_cap)
    assert not measured(plan, kind="update").holds


def test_what_cannot_be_measured_is_refused() -> None:
    plan = plan_of()
    with pytest.raises(AuditError, match="by default at most"):
        Canaries(server_of(plan), plan, count=19)
    with pytest.raises(AuditError, match="five parameters or more for each"):
        Canaries(server_of(plan), plan, count=1000)
    with pytest.raises(AuditError, match="before an optimiser that is not linear"):
        Canaries(server_of(plan), replace(plan, noise_on_updates=True))
    canaries = Canaries(server_of(plan), plan)
    with pytest.raises(AuditError, match="no canary has taken part"):
        canaries.estimate()
    with pytest.raises(AuditError, match="by their senders"):
        canaries.close_round([])
    canaries.close_round(honest(canaries.server, plan, "stack"))
    with pytest.raises(AuditError, match="from round 0 on"):
        Canaries(canaries.server, plan)


def test_an_estimate_has_both_ends() -> None:
    plan = plan_of()
    found = replace(measured(plan, rounds=3), seen=(5.0, 6.0, 7.0), unseen=(-1.0, 0.0, 1.0))
    assert (found.auc, found.auc_interval) == (1.0, (1.0, 1.0))
    assert found.mu == 6.0
    assert found.mu_error == pytest.approx(math.sqrt(1 / 3 + 1 / 3 + 36 / 4))
