"""Replayed local training is what a client does, and images are matched through it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
from audit.attacks.digits import DIGITS, SPAN
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.simulation import preset
from dbcl.simulation.build import build_server
from dbcl_audit import image_quality
from dbcl_audit.attacks.gradients import as_gradient
from dbcl_audit.attacks.local_steps import LocalSteps
from dbcl_audit.attacks.matching import Matching, Recovered, recover
from dbcl_audit.attacks.update_images import COSINE, recover_from_update, update_image_findings
from dbcl_audit.attacks.update_labels import Answered, LabelReader

ORDER = np.random.default_rng(0).permutation(len(DIGITS.x_train))
STEPS = LocalTraining(lr=0.1, epochs=5)  # of full batches, for up to ten images
SMOOTH = Matching(steps=200, restarts=1, box=SPAN)
ONCE = replace(STEPS, epochs=1)


@cache
def answered(name: str, network: str, count: int, first: int = 0, epochs: int = 5) -> tuple[nn.Module, Answered]:
    """The template, and one round of a client with these images."""
    model, rows = networks.build(network, seed=0), ORDER[first : first + count]
    broadcast = build_server(preset(name), model, insecure_seed=0).open_round()
    local = dbcl.blinded(model, broadcast)
    training = replace(STEPS, epochs=epochs)
    training.train(local, (DIGITS.x_train[rows], DIGITS.y_train[rows]), seed=bytes(32), round=0, client=0)
    return model, Answered(broadcast, dict(dbcl.make_update(local, broadcast, examples=count).tensors), rows)


def psnr(found: Recovered, each: Answered) -> Tensor:
    return image_quality.psnr(found.images, DIGITS.x_train[each.rows].double(), SPAN)


@pytest.mark.parametrize("training", [STEPS, replace(STEPS, momentum=0.9, epochs=3), replace(STEPS, proximal=0.5)])
def test_the_replay_is_the_client_s_training(training):
    model = networks.build("mnist-mlp", seed=0).double()
    broadcast = dbcl.Server(model, insecure_seed=0).open_round()
    x, y = DIGITS.x_train[:3].double(), DIGITS.y_train[:3]
    local = dbcl.blinded(model, broadcast)
    training.train(local, (x, y), seed=bytes(32), round=0, client=0)
    steps = LocalSteps.from_training(training, 3)
    sent = as_gradient(dbcl.make_update(local, broadcast, examples=3).tensors, steps.rate, len(steps.batches))
    replayed = steps.mean_gradient(dbcl.blinded(model, broadcast), x, y)
    assert replayed.keys() == sent.keys()
    for tensor, gradient in replayed.items():
        torch.testing.assert_close(gradient, sent[tensor], rtol=1e-6, atol=1e-9)


def test_steps_are_those_of_the_settings():
    assert LocalSteps.from_training(LocalTraining(batch_size=2, steps=1), 4).batches == ((0, 1),)
    assert LocalSteps.from_training(LocalTraining(lr=0.1, lr_decay=0.5), 1, round=2).rate == pytest.approx(0.025)
    with pytest.raises(ConfigError, match="only the steps of SGD"):
        LocalSteps.from_training(LocalTraining(optimizer=torch.optim.Adam), 1)
    with pytest.raises(ConfigError, match="1 or more batches"):
        LocalSteps(0.1, ())
    with pytest.raises(ConfigError, match="rate must be above 0"):
        LocalSteps(0.0, ((0,),))
    model, each = answered("plain", "dlg-lenet", 1)
    target = as_gradient(each.tensors, 0.1, 5)
    with pytest.raises(ConfigError, match="examples 0 to 0, all of them"):
        recover(dbcl.blinded(model, each.broadcast), target, DIGITS.shape, steps=LocalSteps(0.1, ((0, 1),)))


def test_a_frozen_layer_does_not_move():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    moved = LocalSteps(0.1, ((0,), (0,))).mean_gradient(model, torch.ones(1, 3), torch.tensor([1]))
    assert not moved["0.weight"].any()
    assert moved["1.weight"].any()


@pytest.mark.parametrize(
    "name", ["blind", *(pytest.param(name, marks=pytest.mark.slow) for name in ("paper", "plain"))]
)
def test_one_image_is_matched_through_five_steps_and_not_as_one_gradient(name):
    model, each = answered(name, "dlg-lenet", 1)
    replayed = recover_from_update(model, each, DIGITS.shape, STEPS, [SMOOTH])
    assert replayed.labels.equal(DIGITS.y_train[each.rows])
    assert psnr(replayed, each).item() > 25
    target = as_gradient({name: change.double() for name, change in each.tensors.items()}, 0.1, 5)
    as_one = recover(dbcl.blinded(model, each.broadcast), target, DIGITS.shape, None, 1, SMOOTH)
    assert psnr(as_one, each).item() < 15


@pytest.mark.slow
def test_one_image_of_a_dense_network_through_the_default_preset():
    model, each = answered("blind", "mnist-mlp", 1)
    found = recover_from_update(model, each, DIGITS.shape, STEPS, [replace(COSINE, box=SPAN)])
    assert psnr(found, each).item() > 18


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "least"), [("blind", 2, 20), ("plain", 4, 25)])
def test_several_images_with_labels_that_are_read(name, count, least):
    model, each = answered(name, "dlg-lenet", count, epochs=3)
    training = replace(STEPS, epochs=3)
    reader = LabelReader(model, training, (DIGITS.x_test, DIGITS.y_test), simulations=200)
    settings = [replace(SMOOTH, steps=400, tv=1e-3)]
    found = recover_from_update(model, each, DIGITS.shape, training, settings, reader=reader)
    assert found.labels.equal(DIGITS.y_train[each.rows].sort().values)
    assert psnr(found, each).median() > least


def test_a_sum_of_many_clients_and_large_noise_hide_the_image():
    model, each = answered("plain", "dlg-lenet", 1)
    together = [answered("plain", "dlg-lenet", 1, first)[1].tensors for first in range(12)]
    mean = {name: torch.stack([one[name] for one in together]).mean(0) for name in each.tensors}
    generator = torch.Generator().manual_seed(0)
    noised = {
        name: change + 10 * change.square().mean().sqrt() * torch.randn(change.shape, generator=generator)
        for name, change in each.tensors.items()
    }
    for tensors in (mean, noised):
        found = recover_from_update(model, each._replace(tensors=tensors), DIGITS.shape, STEPS, [SMOOTH])
        assert psnr(found, each).item() < 13


def test_findings_of_images_are_measured_against_the_true_ones():
    model, each = answered("plain", "dlg-lenet", 1)
    told = []
    found = update_image_findings(model, [each], DIGITS, STEPS, [SMOOTH], tell=told.append)
    psnr, ssim, share, label = found
    assert {(f.attack, f.adversary, f.attacker) for f in found} == {("matching all local steps", "server", "adaptive")}
    assert psnr.value > 25
    assert ssim.value > 0.9
    assert (share.value, label.value) == (1.0, 1.0)
    assert psnr.images
    assert psnr.budget["local steps"] == 5
    assert told == ["images, server, replaying local steps: 1 of 1"]
    stranger = each._replace(rows=ORDER[500:501])
    assert update_image_findings(model, [stranger], DIGITS, STEPS, [replace(SMOOTH, steps=40)])[0].value < 13


def test_images_recovered_together_are_paired_and_what_fails_says_why():
    model, each = answered("plain", "dlg-lenet", 2, epochs=1)
    psnr, _, share, label = update_image_findings(model, [each], DIGITS, ONCE, [replace(SMOOTH, steps=300)])
    assert psnr.budget["images"] == 2
    assert share.value == 1.0
    assert label.value == 1.0
    nothing = each._replace(tensors={name: torch.zeros_like(tensor) for name, tensor in each.tensors.items()})
    failed = update_image_findings(model, [nothing], DIGITS, ONCE, [SMOOTH])[0]
    assert "no gradient to match" in failed.failures[0]
