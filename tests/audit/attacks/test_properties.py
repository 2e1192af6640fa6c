"""Properties from each seat, on rehearsals where a working attack must find them, and where it must not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dbcl import blinded, data
from dbcl.config import SketchConfig
from dbcl.data import Dataset
from dbcl.data.traits import properties_of
from dbcl.errors import AuditError
from dbcl.protocol import Server
from dbcl.simulation import RunConfig, presets
from dbcl.simulation.task import of_pictures
from dbcl_audit import simulated_run
from dbcl_audit.attacks.gradients import example_gradients, gradients
from dbcl_audit.attacks.own_data import OwnBatches, OwnExamples
from dbcl_audit.attacks.properties import property_findings
from dbcl_audit.attacks.roc import measure_auc
from dbcl_audit.attacks.round_filters import MagnitudeFilter, fidelities
from dbcl_audit.attacks.sources import Source
from dbcl_audit.attacks.updates import estimates
from dbcl_audit.attacks.victim import VictimsRound
from dbcl_audit.findings import Finding

DIGITS = data.load("digits")
ORDER = np.random.default_rng(5).permutation(4000)  # the embedded digits are sorted by class
OWN, REST = ORDER[:2000], ORDER[2000:]
COIN = np.random.default_rng(0).random(4000) < 0.5


def play(
    folder: Path, dataset: Dataset, holds: np.ndarray, rounds: int, batch: int = 16, model: str = "twelve"
) -> simulated_run.SimulatedRun:
    """Two clients; the victim's batches have the property in every other round."""
    settings = presets.preset("paper", lr=0.05, seed=0, model=f"audit.networks:{model}")
    script = simulated_run.draw_batches(REST, (rounds, 2, batch), seed=1)
    for round in range(rounds):
        pool = REST[holds[REST] == (round % 2 == 0)]
        script[round, simulated_run.VICTIM] = simulated_run.draw_batches(pool, (batch,), seed=round)
    return simulated_run.simulate_batches(settings, of_pictures(settings, dataset), script, folder)


def judged(
    played: simulated_run.SimulatedRun,
    dataset: Dataset,
    holds: np.ndarray,
    estimators: list[str],
    batches: int,
    examples: int,
) -> dict[str, Finding]:
    found = estimates(played.attacker, estimators)
    every = property_findings(
        played,
        of_pictures(RunConfig(), dataset),
        holds,
        OWN,
        found,
        batches=batches,
        examples=examples,
        seed=0,
        tell=lambda text: None,
    )
    return {f"{finding.attack}, {finding.adversary}": finding for finding in every}


def marked(holds: np.ndarray) -> Dataset:
    """The digits with a white corner where they have the property: as visible as a property can be."""
    x = DIGITS.x_train.clone()
    x[torch.from_numpy(holds), :, :8, :8] = DIGITS.x_train.max()
    return replace(DIGITS, x_train=x)


def test_a_visible_property_is_found_where_the_update_is_known(tmp_path: Path) -> None:
    dataset = marked(COIN)
    played = play(tmp_path, dataset, COIN, rounds=30, model="thirty_two")
    found = judged(played, dataset, COIN, ["rewind"], batches=2, examples=40)
    for learner, least in (("matched filter", 0.85), ("matched filter of magnitudes", 0.9), ("random forest", 0.8)):
        assert found[f"{learner} on the update itself, server"].value > least
        assert found[f"{learner} on rewind, client"].value > least
    assert found["matched filter of magnitudes on unsketched tensors only, client"].value > 0.9
    assert {(f.target, f.measure, f.chance) for f in found.values()} == {("property", "auc", 0.5)}


def test_a_property_of_no_consequence_is_not_found(tmp_path: Path) -> None:
    """Half of the digits at random: 24 tested rounds, so guessing stays within 0.5 +- 0.25 nineteen times in twenty."""
    played = play(tmp_path, DIGITS, COIN, rounds=36)
    found = judged(played, DIGITS, COIN, ["rewind"], batches=2, examples=25)
    assert len(found) == 9
    assert max(finding.value for finding in found.values()) < 0.85
    assert np.mean([finding.value for finding in found.values()]) == pytest.approx(0.5, abs=0.2)


@pytest.mark.slow
def test_thick_strokes_are_found_where_the_update_is_known_and_not_where_it_is_noise(tmp_path: Path) -> None:
    thick = properties_of("digits")
    played = play(tmp_path, DIGITS, thick, rounds=36, model="thirty_two")
    found = judged(played, DIGITS, thick, ["option II", "rewind"], batches=4, examples=200)
    for learner, least in (("matched filter", 0.85), ("matched filter of magnitudes", 0.9), ("random forest", 0.8)):
        assert found[f"{learner} on the update itself, server"].value > least
        assert found[f"{learner} on rewind, client"].value > least
    assert found["matched filter on unsketched tensors only, client"].value > 0.8
    assert found["random forest on option II, client"].value < found["matched filter on rewind, client"].value


@pytest.mark.slow
def test_more_examples_do_not_find_a_property_of_no_consequence(tmp_path: Path) -> None:
    played = play(tmp_path, DIGITS, COIN, rounds=36, model="thirty_two")
    found = judged(played, DIGITS, COIN, ["rewind"], batches=4, examples=200)
    assert max(finding.value for finding in found.values()) < 0.85
    assert np.mean([finding.value for finding in found.values()]) == pytest.approx(0.5, abs=0.2)


def test_too_few_rounds_of_one_kind_are_refused(tmp_path: Path) -> None:
    played = play(tmp_path, DIGITS, COIN, rounds=12, batch=2)
    with pytest.raises(AuditError, match="only 4 of 8 tested rounds have the property"):
        judged(played, DIGITS, COIN, ["rewind"], batches=2, examples=2)


def test_a_network_with_buffers_is_refused_with_a_reason(tmp_path: Path) -> None:
    """Batch normalisation mixes the examples of a batch; before, its running means stopped the whole audit."""
    played = play(tmp_path, DIGITS, COIN, rounds=20, batch=4, model="with_batch_norm")
    with pytest.raises(AuditError, match="no gradient of one example alone"):
        judged(played, DIGITS, COIN, ["rewind"], batches=1, examples=10)


def test_an_estimate_that_was_shrunk_is_known_to_be() -> None:
    """A share of 0.1 of the gradient and noise of a known size: both are found from examples of the attacker's own."""
    own = OwnExamples(of_pictures(RunConfig(), DIGITS), np.arange(len(DIGITS.y_train)) % 2 == 0, OWN)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))
    sent = [Server(net, SketchConfig(veil=0, lanes=1), insecure_seed=seed).open_round() for seed in range(12)]
    models = [blinded(net, broadcast) for broadcast in sent]
    rows, batches = [], []
    for number, model in enumerate(models):
        index = torch.from_numpy(REST[32 * number : 32 * number + 32])
        clean = own.gradient(model, index)
        rows.append({name: 0.1 * (g + 0.05 * torch.randn_like(g)) for name, g in clean.items()})
        batches.append(clean)
    victims = [VictimsRound(broadcast, 1, 1) for broadcast in sent]
    source = Source("an estimate", "client", "adaptive", rows, victims, exact=False)
    made = OwnBatches(batches, np.zeros(12, dtype=bool), np.arange(12))
    (found,) = fidelities([source], models, own, made, seed=0)
    for share, variance in (found["1.weight"], found["3.weight"]):
        assert share == pytest.approx(0.1, rel=0.15)
        assert variance == pytest.approx(0.0025, rel=0.3)


def test_gradients_of_single_examples_make_up_that_of_the_batch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)).double()
    client = blinded(net, Server(net, SketchConfig(coverage="all"), insecure_seed=0).open_round())
    x, y = torch.randn(7, 1, 8, 8, dtype=torch.float64), torch.arange(7) % 2
    each, together = example_gradients(client, x, y, together=3), gradients(client, x, y)
    assert list(each) == list(together)
    for name, gradient in together.items():
        torch.testing.assert_close(each[name].mean(dim=0), gradient)


def test_a_network_that_mixes_examples_has_no_such_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(AuditError, match="no gradient of one example alone"):
        example_gradients(net, torch.randn(6, 4), torch.zeros(6, dtype=torch.long))


def test_the_rounding_of_an_estimate_does_not_drown_magnitudes() -> None:
    """Forty features tell; two thousand hardly vary, and an estimate's rounding is a hundred times as large."""
    rng = np.random.default_rng(0)
    feature = np.arange(2040)

    def examples(kinds: np.ndarray) -> np.ndarray:
        drawn = 3.0 + 0.5 * kinds[:, None] * (feature < 20) + rng.normal(size=(len(kinds), len(feature)))
        return drawn * np.where(feature < 40, 1.0, 1e-6)

    y, kinds = np.arange(120) % 2 == 0, np.arange(60) % 2 == 0
    rows = examples(y)
    tested = [examples(np.full(8, kind)).mean(axis=0) + 1e-4 * rng.normal(size=len(feature)) for kind in kinds]

    def auc(**settings: float) -> float:
        group = np.zeros(len(feature), dtype=np.int64)
        score = MagnitudeFilter(np.random.default_rng(1), rows, y, group, 8, **settings)
        return measure_auc(np.array([score(row, np.zeros(1)) for row in tested]), kinds, seed=0).auc

    assert auc() > 0.95
    assert auc(least_spread=0.0) < 0.8
