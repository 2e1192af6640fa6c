"""Rehearsals with lanes: every seat works in the lane that is the victim's, and clients of all lanes see everything."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dbcl import blinded, data
from dbcl.simulation import presets
from dbcl.simulation.task import of_pictures
from dbcl_audit.attacks.gradients import as_gradient, gradients
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.attacks.sources import sources
from dbcl_audit.attacks.updates import estimates, update_findings
from dbcl_audit.attacks.victim import victims_rounds
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.findings import Finding
from dbcl_audit.simulated_run import VICTIM, SimulatedRun, colluders_of, draw_batches, simulate_batches

DIGITS = data.load("digits")


def played(
    folder: Path, shape: tuple[int, int, int], colluders: tuple[int, ...] = (), **settings: object
) -> SimulatedRun:
    chosen = presets.preset(
        "paper", **{"model": "audit.networks:twelve", "seed": 0, "lanes": 2, "lr": 0.05, **settings}
    )
    script = draw_batches(np.arange(400), shape, seed=3)
    return simulate_batches(chosen, of_pictures(chosen, DIGITS), script, folder, colluders=colluders)


def cosines(findings: list[Finding]) -> dict[str, float]:
    return {finding.attack: finding.value for finding in findings if finding.measure == "cosine"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> SimulatedRun:
    """Two parties in two lanes, without a veil."""
    return played(tmp_path_factory.mktemp("two"), (26, 2, 1))


def test_two_parties_in_two_lanes_without_a_veil_see_each_others_updates_and_models(two: SimulatedRun) -> None:
    found = estimates(two.attacker, ["smoother", "rewind"])
    values = cosines(update_findings(two.attacker, two.truth, found, str))
    assert values["smoother"] > 0.98
    assert values["rewind"] < 0.9
    known = victims_rounds(two, tensor_observations(two.attacker), found, range(1, 6))
    for each in known:
        seen = two.server[each.broadcast.round]
        sent = seen.answered(str(VICTIM))
        assert sent.plan.lane != two.attacker[each.broadcast.round].broadcast.plan.lane
        assert each.broadcast.plan == sent.plan
        for name, tensor in sent.tensors.items():
            assert float((each.broadcast.tensors[name] - tensor).norm() / tensor.norm()) < 0.1
        assert (each.others, each.in_lane) == (1, 1)
    server, client = sources(two, found, range(1, 6))[:2]
    exact, shown = ([row["1.weight"].double().flatten() for row in source.gradients] for source in (server, client))
    assert client.name == "smoother"
    close = [float(torch.nn.functional.cosine_similarity(a, b, dim=0)) for a, b in zip(exact, shown, strict=True)]
    assert np.median(close) > 0.95  # in the victim's own space; a small gradient drowns in what stays unknown


def test_the_server_attacks_the_model_that_the_victim_received(two: SimulatedRun) -> None:
    template, lr = two.server.template(), two.server.setting.local.lr
    places = set()
    for round in range(8):
        seen = two.server[round]
        sent = seen.answered(str(VICTIM))
        places.add(seen.broadcasts.index(sent))
        index = two.script[round, VICTIM]
        batch = DIGITS.x_train[index], DIGITS.y_train[index]
        own = gradients(blinded(template, sent), *batch)
        for name, gradient in as_gradient(seen.updates[str(VICTIM)].tensors, lr).items():
            torch.testing.assert_close(gradient, own[name], atol=1e-4, rtol=1e-2)
    assert places == {1}  # the attacker is named first, so that a server that takes the first lane takes the wrong one
    findings = image_findings(two, DIGITS, {}, [0, 1], Matching(steps=1, restarts=1), str, solver_steps=40)
    solved = next(each for each in findings if each.attack == "solving the first layer" and each.measure == "psnr")
    assert solved.value > 15


def test_clients_of_all_lanes_together_see_every_update(tmp_path: Path) -> None:
    simulated = played(tmp_path, (16, 4, 2), colluders_of(2))
    assert [each.party for each in (simulated.attacker, *simulated.allies)] == ["client-2", "client-3"]
    found = estimates(simulated.attacker, ["smoother"], allies=simulated.allies)
    findings = update_findings(simulated.attacker, simulated.truth, found, str, allies=simulated.allies)
    assert {finding.adversary for finding in findings} == {"colluders"}
    assert cosines(findings)["smoother"] > 0.999
    assert "1.weight" in findings[0].budget["tensors"]
    alone = estimates(simulated.attacker, ["smoother"])
    assert cosines(update_findings(simulated.attacker, simulated.truth, alone, str))["smoother"] < 0.95
    holds, own = np.arange(len(DIGITS.y_train)) % 2 == 0, np.arange(400, 800)
    holds[simulated.script[:, VICTIM]] = (np.arange(16) % 2 == 0)[:, None]
    task = of_pictures(presets.preset("paper", model="audit.networks:twelve"), DIGITS)
    inferred = property_findings(simulated, task, holds, own, found, batches=1, examples=4, seed=0, tell=str)
    assert {finding.adversary for finding in inferred} == {"colluders"}


def test_a_veil_is_not_averaged_away_by_clients_of_several_lanes(tmp_path: Path) -> None:
    simulated = played(tmp_path, (16, 4, 2), colluders_of(2), veil=0.2)
    found = estimates(simulated.attacker, ["smoother"], allies=simulated.allies)
    findings = update_findings(simulated.attacker, simulated.truth, found, str, allies=simulated.allies)
    assert abs(cosines(findings)["smoother"]) < 0.6
