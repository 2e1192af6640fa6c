"""Properties by a matched filter over all rounds: where it must tell them, and where it must not."""

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dbcl.data import Examples
from dbcl.errors import AuditError
from dbcl.simulation import preset, task_of
from dbcl_audit.attacks.roc import measure_auc
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_properties import group_direction, trajectory_property_findings, unmixed_scores
from dbcl_audit.effort import QUICK
from dbcl_audit.simulated_run import VICTIM, SimulatedRun, simulate_batches
from dbcl_audit.single_steps import PROPERTY_NOISE_SCALE, property_script


@dataclass
class Case:
    simulated: SimulatedRun
    trajectory: Trajectory
    own: Examples
    holds: NDArray[np.bool_]
    truth: NDArray[np.bool_]

    def directions(self) -> list:
        """Of every seen round but the last, in the victim's lane: with two parties it is the only one of others."""
        lanes = [lanes[0] for lanes in self.trajectory.lanes[:-1]]
        return [group_direction(self.trajectory, t, lane, self.own, self.holds, 16) for t, lane in enumerate(lanes)]


@cache
def case(veil: float, rounds: int, own: int, lr: float = 0.01) -> Case:
    """Two parties, one step a round on a fresh batch of 16 that all have the property or all lack it."""
    config = preset("blind", veil=veil, model="audit.networks:thirty_two", lr=lr)
    task = task_of(config)
    rows, script = property_script(task, replace(QUICK, rounds=rounds, batch=16), 2, 0)
    simulated = simulate_batches(config, task, script, Path(tempfile.mkdtemp()))
    holds: Any = task.holds
    truth = np.array([holds[script[number, VICTIM]].mean() > 0.5 for number in range(rounds - 1)])
    examples = task.train.subset(rows[:own])
    trajectory = Trajectory(simulated.attacker, Knowledge(examples, process_noise_scale=PROPERTY_NOISE_SCALE))
    return Case(simulated, trajectory, examples, holds[rows[:own]], truth)


@pytest.mark.slow
def test_a_small_veil_shows_a_property_and_with_shuffled_truth_nothing_is_shown() -> None:
    """39 rounds: under the null the error of an AUC is 0.09, and that of the mean over ten shuffles 0.03."""
    made = case(0.02, 40, 800)
    scores = unmixed_scores(made.trajectory, made.directions())
    assert measure_auc(scores, made.truth, 0).auc > 0.8
    rng = np.random.default_rng(0)
    shuffled = [measure_auc(scores, rng.permutation(made.truth), 0).auc for _ in range(10)]
    assert np.mean(shuffled) == pytest.approx(0.5, abs=0.12)


def test_a_strong_veil_hides_it() -> None:
    made = case(5.0, 30, 400, lr=0.001)
    assert measure_auc(unmixed_scores(made.trajectory, made.directions()), made.truth, 0).auc < 0.75


def test_scores_say_how_far_the_others_went() -> None:
    """Along a direction twice as long they went half as far, and against a direction by as much less than nothing."""
    made = case(0.02, 8, 100)
    directions = made.directions()
    assert len(directions) == 7
    assert directions[0].keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    scores = unmixed_scores(made.trajectory, directions)
    twice = [{name: 2 * each for name, each in direction.items()} for direction in directions]
    np.testing.assert_allclose(unmixed_scores(made.trajectory, twice), scores / 2, rtol=1e-4, atol=1e-8)
    other = [directions[0], {name: -each for name, each in directions[1].items()}, *directions[2:]]
    turned = unmixed_scores(made.trajectory, other)
    np.testing.assert_allclose(turned * np.array([1, -1, 1, 1, 1, 1, 1]), scores, rtol=1e-4, atol=1e-6)


def test_findings_of_properties() -> None:
    made = case(0.02, 8, 100)
    (finding,) = trajectory_property_findings(
        made.simulated, made.trajectory, made.own, made.holds, made.truth.tolist()
    )
    assert (finding.attack, finding.adversary, finding.attacker) == (
        "matched filter over all rounds",
        "client",
        "adaptive",
    )
    assert (finding.target, finding.measure, finding.chance) == ("property", "auc", 0.5)
    expected = measure_auc(unmixed_scores(made.trajectory, made.directions()), made.truth, 0)
    assert (finding.value, finding.low, finding.high) == (expected.auc, expected.low, expected.high)
    assert finding.budget["tested rounds"] == 7
    assert finding.budget["own examples"] == 100


def test_an_attacker_needs_examples_of_both_kinds() -> None:
    made = case(0.02, 8, 100)
    every, truth = np.ones(100, dtype=bool), made.truth.tolist()
    with pytest.raises(AuditError, match="100 of the attacker's 100 examples have the property: it needs both"):
        trajectory_property_findings(made.simulated, made.trajectory, made.own, every, truth)
