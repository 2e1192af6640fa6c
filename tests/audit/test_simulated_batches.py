"""A rehearsal plays its script under a run's settings, and no attack on it opens the truth."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dbcl import data
from dbcl.errors import AuditError
from dbcl.simulation import presets
from dbcl.simulation.task import of_pictures
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.labels import label_finding
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.attacks.updates import estimates, update_findings
from dbcl_audit.findings import Finding
from dbcl_audit.simulated_run import VICTIM, SimulatedRun, draw_batches, simulate_batches

DIGITS = data.load("digits")


def quiet(text: str) -> None:
    """Nobody is told."""


def played(folder: Path, preset: str, shape: tuple[int, int, int], **settings: object) -> SimulatedRun:
    chosen = presets.preset(preset, **{"model": "audit.networks:twelve", "seed": 0, **settings})
    return simulate_batches(chosen, of_pictures(chosen, DIGITS), draw_batches(np.arange(400), shape, seed=3), folder)


def cosines(findings: list[Finding]) -> dict[str, float]:
    return {finding.attack: finding.value for finding in findings if finding.measure == "cosine"}


def test_a_rehearsal_plays_its_script(tmp_path: Path) -> None:
    script = draw_batches(np.arange(400), (3, 3, 4), seed=3)
    settings = presets.preset("paper", model="audit.networks:twelve", seed=0)
    one, two, again = (
        simulate_batches(settings, of_pictures(settings, DIGITS), script, tmp_path / name, seed=seed)
        for name, seed in (("one", 1), ("two", 2), ("again", 1))
    )
    assert one.attacker.rounds == [0, 1, 2]
    assert sorted(one.server[0].updates) == ["0", "1", "2"]
    # The same script and the same initial weights, and sketches that follow from the seed.
    assert one.attacker[0].broadcast.plan != two.attacker[0].broadcast.plan
    assert one.attacker[0].broadcast.plan == again.attacker[0].broadcast.plan
    bias = [each.server[0].weights["3.bias"] for each in (one, two)]  # type: ignore[index]
    assert bias[0].equal(bias[1])
    steps: list[tuple[int, int]] = []
    simulate_batches(
        settings, of_pictures(settings, DIGITS), script, tmp_path / "three", progress=lambda *step: steps.append(step)
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("noise", [{}, {"update_clip": 1.0, "update_noise": 0.1}])
def test_without_a_seed_of_the_run_it_can_still_be_repeated(tmp_path: Path, noise: dict[str, float]) -> None:
    one, again = (played(tmp_path / name, "blind", (2, 2, 4), seed=None, **noise) for name in ("one", "again"))
    for party in ("client-0", "server"):
        for path in (one.folder / party).iterdir():
            assert path.read_bytes() == (again.folder / party / path.name).read_bytes()


def test_without_a_defence_the_client_sees_every_update(tmp_path: Path) -> None:
    simulated = played(tmp_path, "plain", (20, 2, 1))
    found = estimates(simulated.attacker, ["option I", "rewind", "smoother"])
    values = cosines(update_findings(simulated.attacker, simulated.truth, found, quiet))
    assert values.keys() >= {"option I", "rewind", "smoother", "unprotected tensors"}
    assert list(values.values()) == pytest.approx([1.0] * len(values), abs=1e-3)
    assert label_finding(simulated, DIGITS, range(19)).value > 0.8


def test_a_veil_hides_most_from_the_smoother(tmp_path: Path) -> None:
    simulated = played(tmp_path, "blind", (8, 2, 4))
    assert simulated.attacker.setting.veil == 0.2
    made = estimates(simulated.attacker, ["option I", "smoother"])
    values = cosines(update_findings(simulated.attacker, simulated.truth, made, quiet))
    assert max(abs(values[name]) for name in made) < 0.5
    assert list(values)[-1] == "unsketched, veiled tensors"


def test_no_attack_of_a_rehearsal_opens_the_truth(tmp_path: Path) -> None:
    script = draw_batches(np.arange(400), (20, 2, 1), seed=3)
    script[:, VICTIM, 0] = np.arange(20)
    paper = presets.preset("paper", model="audit.networks:twelve", seed=0)
    simulated = simulate_batches(paper, of_pictures(paper, DIGITS), script, tmp_path)
    shutil.rmtree(tmp_path / "truth")
    made = estimates(simulated.attacker, ["option I", "rewind"])
    settings = Matching(steps=2, restarts=1)
    findings = image_findings(simulated, DIGITS, made, [0], settings, quiet, solver_steps=5)
    assert {(finding.attack, finding.adversary) for finding in findings} >= {
        ("matching the lifted update", "server"),
        ("matching through the sketch", "server"),
        *((f"matching on {name}", "client") for name in made),
    }
    assert not any(finding.failures for finding in findings)
    assert label_finding(simulated, DIGITS, range(19)).value > 0.8
    holds, own = np.arange(len(DIGITS.y_train)) % 2 == 0, np.arange(400, 800)
    assert property_findings(
        simulated, of_pictures(paper, DIGITS), holds, own, made, batches=2, examples=4, seed=0, tell=quiet
    )
    with pytest.raises(AuditError, match="truth: round 0 cannot be read"):
        update_findings(simulated.attacker, simulated.truth, made, quiet)


def test_weights_whose_inputs_come_first_are_attacked_as_the_matrices_they_are(tmp_path: Path) -> None:
    """A transposed convolution: without a defence every update is seen exactly, sketched or not."""
    chosen = presets.preset("paper", model="audit.networks:upwards", seed=0, coverage="all")
    task = of_pictures(chosen, DIGITS)
    simulated = simulate_batches(chosen, task, draw_batches(np.arange(400), (40, 2, 4), seed=3), tmp_path)
    found = estimates(simulated.attacker, ["rewind"])
    findings = update_findings(simulated.attacker, simulated.truth, found, quiet, min_lag=20)
    assert cosines(findings)["rewind"] > 0.95
    assert any("1.weight" in finding.budget.get("tensors", "") for finding in findings)
    holds, own = np.arange(len(DIGITS.y_train)) % 2 == 0, np.arange(400, 800)
    assert property_findings(simulated, task, holds, own, found, batches=2, examples=8, seed=0, tell=quiet)
