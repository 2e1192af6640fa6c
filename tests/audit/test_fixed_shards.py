"""The parts of an audit that rehearse a run as it is: what they know, what they find, and what a guarantee allows."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from dbcl.privacy import CorrelatedNoise, PrivacyPlan
from dbcl.simulation import preset, task_of
from dbcl.simulation.build import build_plan, privacy_plan
from dbcl.simulation.config import RunConfig
from dbcl_audit import fixed_shards
from dbcl_audit.context import AuditContext
from dbcl_audit.effort import QUICK
from dbcl_audit.findings import Finding
from dbcl_audit.fixed_shards import as_it_is, few_parties, noise_covariance, whole_cohort

FEW = replace(QUICK, run_rounds=6, all_rounds=8, drift_examples=50, null_examples=50)
ENTRIES = 20_000


# --- what is public of a guarantee ----------------------------------------------------------------------------------


def drawn(plan: PrivacyPlan, rounds: int) -> Tensor:
    """The noise of rounds 0 to `rounds`, in as many independent streams as there are entries."""
    noise, net = CorrelatedNoise.from_plan(plan), nn.Linear(ENTRIES // 10, 10, bias=False)
    found = []
    for number in range(rounds + 1):
        noise.begin(number, bytes([number] * 32), net)
        found.append(noise.noise(number, "weight", tuple(net.weight.shape)).flatten())
        noise.end(number)
    return torch.stack(found)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("correlation", ["banded", "independent"])
@pytest.mark.parametrize("seen", [range(7), (0, 2, 5), (1, 4, 6)])
def test_the_covariance_of_the_noise_is_that_of_what_is_drawn(correlation: str, momentum: float, seen: Any) -> None:
    """An entry of an empirical covariance has the variance (K_tt K_ss + K_ts^2) / streams; within 4 of its errors."""
    facts = {"rounds": 12, "clients": 20, "cohort": 5, "momentum": momentum, "lr": 0.7}
    plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, correlation=correlation, **facts)
    noise = drawn(plan, 6)[list(seen)]
    found = noise_covariance(plan, list(seen))
    empirical = (noise @ noise.T / ENTRIES).numpy()
    error = np.sqrt((np.outer(np.diag(found), np.diag(found)) + found**2) / ENTRIES)
    assert (np.abs(empirical - found) < 4 * error).all()
    if 0 in seen:
        assert not found[0, 1:].any()  # noise of its own, on W_0
        assert found[0, 0] == pytest.approx((0.7 * plan.sigma) ** 2)


# --- the parts ------------------------------------------------------------------------------------------------------


def context(folder: Path, config: RunConfig, **changes: Any) -> AuditContext:
    said: list[str] = []
    task = task_of(config)
    plan = build_plan(config, task.make_model(0), task.layers)
    return AuditContext(config, task, folder, folder, replace(FEW, **changes), 2, 0, said.append, plan=plan)


def config_of(name: str = "blind", **settings: Any) -> RunConfig:
    return preset(name, **{"model": "audit.networks:twelve", "clients": 100, "fraction": 0.04, **settings})


def by_attack(findings: list[Finding], measure: str) -> dict[str, Finding]:
    return {each.attack: each for each in findings if each.measure == measure}


MEMBERS = ("likelihood ratio over all rounds", "losses over all rounds", "likelihood ratio and losses over all rounds")


def test_few_parties_are_attacked_from_a_clients_and_as_the_server(tmp_path: Path) -> None:
    findings = few_parties(context(tmp_path, config_of()))
    assert {each.simulated_run for each in findings} == {"2 parties with fixed shards"}
    assert {each.adversary for each in findings} == {"client", "server"}
    assert {each.target for each in findings} == {"membership", "update", "label"}
    assert not [each.failures for each in findings if each.failures]
    members = by_attack([each for each in findings if each.adversary == "client"], "auc")
    assert tuple(members) == MEMBERS
    assert members[MEMBERS[0]].budget["members"] == 40
    assert by_attack(findings, "cosine").keys() == {
        "smoother with drift", "smoother beyond the drift", "smoother with drift, sums of 5 rounds",
    }  # fmt: skip


def test_who_knows_the_ends_is_tried_where_the_budget_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = []
    made = fixed_shards.Trajectory.__init__

    def watched(self: Any, transcript: Any, knowledge: Any, **more: Any) -> None:
        known.append(knowledge)
        made(self, transcript, knowledge, **more)

    monkeypatch.setattr(fixed_shards.Trajectory, "__init__", watched)
    findings = few_parties(context(tmp_path, config_of(ema_decay=0.1), known_ends=True))
    both = f"{MEMBERS[2]}, knowing "
    assert [each.attack for each in findings if each.attack.startswith(both) and each.measure == "auc"] == [
        f"{both}W_0", f"{both}the released model", f"{both}both",
    ]  # fmt: skip
    assert list(dict.fromkeys((each.start is not None, len(each.released)) for each in known)) == [
        (False, 0), (True, 0), (False, 1), (True, 1),
    ]  # fmt: skip
    shares, weights = known[-1].released[0]
    assert sum(shares.values()) == pytest.approx(1)
    assert max(shares) == 6
    assert weights.keys() == known[-1].start.keys()


def test_as_many_clients_as_the_run_has_in_a_round_are_attacked_by_one_and_by_one_of_each_lane(tmp_path: Path) -> None:
    findings = whole_cohort(context(tmp_path, config_of()))
    assert {each.simulated_run for each in findings} == {"4 clients with fixed shards, all in every round"}
    assert {each.adversary for each in findings} == {"client", "colluders"}
    assert {each.target for each in findings} == {"membership", "update"}
    members = [each for each in findings if each.measure == "auc"]
    assert [each.budget["members"] for each in members if each.adversary == "client"] == [120] * 3
    assert [each.budget["members"] for each in members if each.adversary == "colluders"] == [80] * 3


def test_with_one_lane_nobody_colludes(tmp_path: Path) -> None:
    assert {each.adversary for each in whole_cohort(context(tmp_path, config_of(lanes=1)))} == {"client"}


def test_a_run_is_attacked_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_shards, "MAX_MEMBERS", 190)
    findings = as_it_is(context(tmp_path, config_of(clients=20, fraction=0.5)))
    assert {each.simulated_run for each in findings} == {"as the run is: 10 of 20 clients in a round"}
    assert {(each.adversary, each.target) for each in findings} == {("client", "membership")}
    auc = by_attack(findings, "auc")[MEMBERS[2]]
    assert auc.budget["members"] == 190  # ten of each of the others, who are 19
    assert 3 <= auc.budget["rounds seen"] < 8
    assert "auc bound" not in auc.budget


def test_who_hardly_takes_part_is_not_attacked(tmp_path: Path) -> None:
    work = context(tmp_path, config_of(fraction=0.02))
    assert as_it_is(work) == []
    assert work.not_attacked == {"members, as the run is": "no client takes part three times in the simulated rounds"}


def test_of_a_run_with_a_guarantee_the_bound_is_stated_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members are single examples, and the bound is on a whole client: they stay below it, within the interval."""
    known: list[Any] = []
    made = fixed_shards.Trajectory.__init__

    def watched(self: Any, transcript: Any, knowledge: Any, **more: Any) -> None:
        known.append(knowledge)
        made(self, transcript, knowledge, **more)

    monkeypatch.setattr(fixed_shards.Trajectory, "__init__", watched)
    config = config_of("private", clients=20, rounds=24, fraction=0.2, delta=1e-3, clip=0.05)
    findings = as_it_is(context(tmp_path, config, all_rounds=40))
    plan: Any = privacy_plan(config)
    bound = norm.cdf(plan.mu / math.sqrt(2))
    for each in findings:
        assert each.budget["auc bound"] == pytest.approx(bound)
        assert each.note == f"the guarantee allows a client to be told with AUC {bound:.3f} at most"
        assert each.budget["rounds seen"] == 5  # every fifth of 24, no more than the guarantee is for
    for each in by_attack(findings, "auc").values():
        assert each.low < bound  # type: ignore[operator]
    for knowledge in known:
        assert knowledge.clip == 0.05
        np.testing.assert_allclose(knowledge.noise([1, 6, 11]), noise_covariance(plan, [1, 6, 11]))
