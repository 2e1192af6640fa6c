"""Labels from the output layer, and what guessing them gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from audit.attacks.digits import DIGITS, digit, round_of
from dbcl.data import Dataset
from dbcl.model import networks
from dbcl.simulation import presets
from dbcl.simulation.task import of_pictures
from dbcl_audit.attacks.gradients import gradients
from dbcl_audit.attacks.images import image_findings
from dbcl_audit.attacks.labels import label_chance, label_finding, labels_of_gradient
from dbcl_audit.attacks.matching import Matching
from dbcl_audit.attacks.updates import estimates
from dbcl_audit.report.rating import GUESS, word
from dbcl_audit.simulated_run import SimulatedRun, draw_batches, simulate_batches


@pytest.mark.parametrize("number", [0, 150, 450, 950])
@pytest.mark.parametrize("seed", [0, 1])
def test_labels_from_the_output_layer(number, seed):
    x, y = digit(number)
    _, _, local = round_of("mnist-mlp", seed)
    found = gradients(local, x, y)
    assert labels_of_gradient(found["5.weight"], None).equal(y)
    assert labels_of_gradient(None, found["5.bias"]).equal(y)


@pytest.mark.parametrize("label", [0, 1])
def test_the_label_of_a_single_output(label):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
    found = gradients(model, torch.ones(1, 4), torch.tensor([label]))
    assert labels_of_gradient(found["2.weight"], None).item() == label
    assert labels_of_gradient(None, found["2.bias"]).item() == label


def test_labels_of_a_batch_with_a_class_twice():
    x, y = digit(10, 20, 500, 820)
    model = networks.build("dlg-lenet", seed=1).double()
    for parameter in model.parameters():
        parameter.data.mul_(0.1)  # nearly even probabilities, as in the first rounds
    found = gradients(model, x, y)
    assert labels_of_gradient(None, found["1.bias"], 4).equal(y)
    assert labels_of_gradient(found["1.weight"], None, 4).equal(y)


def played(folder: Path, dataset: Dataset, model: str) -> SimulatedRun:
    settings = presets.preset("paper", model=f"audit.networks:{model}", seed=0)
    return simulate_batches(
        settings, of_pictures(settings, dataset), draw_batches(np.arange(400), (4, 2, 1), seed=0), folder
    )


def test_of_two_classes_a_coin_is_right_half_of_the_time_and_leaks_nothing(tmp_path: Path) -> None:
    dataset = replace(DIGITS, y_train=DIGITS.y_train % 2, y_test=DIGITS.y_test % 2, outputs=2)
    simulated = played(tmp_path, dataset, "two_classes")
    found = estimates(simulated.attacker, ["option I"])
    findings = image_findings(simulated, dataset, found, [0], Matching(steps=1, restarts=1), str, solver_steps=5)
    findings.append(label_finding(simulated, dataset, range(3)))
    named = [finding for finding in findings if finding.target == "label"]
    assert len(named) == 5
    for finding in named:
        assert finding.chance == 0.5
        assert word(replace(finding, value=0.5)) == GUESS


def test_guessing_names_the_most_common_class() -> None:
    assert label_chance(DIGITS.y_train) == 0.1
    assert label_chance(torch.tensor([2] * 7 + [0] * 3)) == 0.7


def test_a_network_without_a_bias_says_so(tmp_path: Path) -> None:
    finding = label_finding(played(tmp_path, DIGITS, "without_bias"), DIGITS, range(3))
    assert np.isnan(finding.value)
    assert finding.failures == ("the network has no bias",)
