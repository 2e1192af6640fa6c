"""Properties from each seat, on rehearsals where a working attack must find them, and where it must not."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dbcl import blinded, data
from dbcl.audit import rehearsal
from dbcl.audit.attacks import images as attacks
from dbcl.audit.attacks import learners as properties
from dbcl.audit.attacks import properties as inference
from dbcl.audit.attacks.matching import example_gradients, gradients
from dbcl.audit.findings import Finding
from dbcl.data.traits import properties_of
from dbcl.errors import AuditError
from dbcl.protocol import Server
from dbcl.run import config

ROUNDS, BATCH = 36, 16
NET = "small_net_to_infer_from"
SOURCE = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
"""


ORDER = np.random.default_rng(5).permutation(4000)  # the embedded digits are sorted by class
SPARE, REST = ORDER[:2000], ORDER[2000:]


def play(folder: Path, holds: np.ndarray, **settings: object) -> rehearsal.Rehearsal:
    """Two clients; the victim's batches have the property in every other round."""
    chosen = config.preset("paper", lr=0.05, **settings)
    script = rehearsal.drawn(REST, (ROUNDS, 2, BATCH), seed=1)
    for round in range(ROUNDS):
        pool = REST[holds[REST] == (round % 2 == 0)]
        script[round, rehearsal.VICTIM] = rehearsal.drawn(pool, (BATCH,), seed=round)
    return rehearsal.rehearse(chosen, data.load("digits"), script, folder)


def judged(folder: Path, holds: np.ndarray, estimators: list[str], **settings: object) -> dict[str, Finding]:
    played = play(folder, holds, **settings)
    found = attacks.estimates(played.attacker, estimators)
    every = inference.property_findings(
        played, data.load("digits"), holds, SPARE, found, batches=4, examples=200, seed=0, tell=lambda text: None
    )
    return {f"{finding.attack}, {finding.seat}": finding for finding in every}


@pytest.fixture(scope="module", autouse=True)
def small_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A network that a configuration can name, and no waiting for the disk."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / f"{NET}.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def thick() -> np.ndarray:
    return properties_of("digits")


def test_the_filters_find_a_property_where_the_update_is_known_and_not_where_it_is_noise(
    tmp_path: Path, thick: np.ndarray
) -> None:
    found = judged(tmp_path, thick, ["option II", "rewind"], model=f"{NET}:make")
    for learner, least in (("matched filter", 0.85), ("matched filter of magnitudes", 0.9), ("random forest", 0.8)):
        assert found[f"{learner} on the update itself, server"].value > least
        assert found[f"{learner} on rewind, client"].value > least
    assert found["matched filter on unsketched tensors only, client"].value > 0.8
    assert found["random forest on option II, client"].value < found["matched filter on rewind, client"].value


def test_a_property_of_no_consequence_is_not_found(tmp_path: Path) -> None:
    """Half of the digits at random: 24 tested rounds, so guessing stays within 0.5 +- 0.25 nineteen times in twenty."""
    coin = np.random.default_rng(0).random(len(data.load("digits").y_train)) < 0.5
    found = judged(tmp_path, coin, ["rewind"], model=f"{NET}:make")
    assert max(finding.value for finding in found.values()) < 0.85
    assert np.mean([finding.value for finding in found.values()]) == pytest.approx(0.5, abs=0.2)


def test_an_estimate_that_was_shrunk_is_known_to_be() -> None:
    """A share of 0.1 of the gradient and noise of a known size: both are found from examples of the attacker's own."""
    dataset = data.load("digits")
    own = inference.Own(dataset, np.arange(len(dataset.y_train)) % 2 == 0, SPARE)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))
    models = [blinded(net, Server(net, veil=0, insecure_seed=seed).open_round()) for seed in range(12)]
    rows, batches = [], []
    for number, model in enumerate(models):
        index = torch.from_numpy(REST[32 * number : 32 * number + 32])
        clean = own.gradient(model, index)
        rows.append({name: 0.1 * (g + 0.05 * torch.randn_like(g)) for name, g in clean.items()})
        batches.append(clean)
    source = inference.Source("an estimate", "client", "adaptive", rows, 1, exact=False)
    made = inference._Batches(batches, np.zeros(12, dtype=bool), np.arange(12))
    (found,) = inference._faithful([source], models, own, made, seed=0)
    for share, variance in (found["1.weight"], found["3.weight"]):
        assert share == pytest.approx(0.1, rel=0.15)
        assert variance == pytest.approx(0.0025, rel=0.3)


def test_gradients_of_single_examples_make_up_that_of_the_batch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)).double()
    client = blinded(net, Server(net, cover="all", insecure_seed=0).open_round())
    x, y = torch.randn(7, 1, 8, 8, dtype=torch.float64), torch.arange(7) % 2
    each, together = example_gradients(client, x, y, together=3), gradients(client, x, y)
    assert list(each) == list(together)
    for name, gradient in together.items():
        torch.testing.assert_close(each[name].mean(dim=0), gradient)


def test_a_network_that_mixes_examples_has_no_such_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(AuditError, match="no gradient of one example alone"):
        example_gradients(net, torch.randn(6, 4), torch.zeros(6, dtype=torch.long))


def test_the_rounding_of_an_estimate_does_not_drown_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty features tell; two thousand hardly vary, and an estimate's rounding is a hundred times as large."""
    rng = np.random.default_rng(0)
    feature = np.arange(2040)

    def examples(kinds: np.ndarray) -> np.ndarray:
        drawn = 3.0 + 0.5 * kinds[:, None] * (feature < 20) + rng.normal(size=(len(kinds), len(feature)))
        return drawn * np.where(feature < 40, 1.0, 1e-6)

    y, kinds = np.arange(200) % 2 == 0, np.arange(60) % 2 == 0
    rows = examples(y)
    tested = [examples(np.full(8, kind)).mean(axis=0) + 1e-4 * rng.normal(size=len(feature)) for kind in kinds]

    def auc() -> float:
        told = inference._Shapes(np.random.default_rng(1), rows, y, np.zeros(len(feature), dtype=np.int64), 8)
        return properties.judge(np.array([told(row, np.zeros(1)) for row in tested]), kinds, seed=0).auc

    assert auc() > 0.95
    monkeypatch.setattr(inference, "LEAST", 0.0)
    assert auc() < 0.8
