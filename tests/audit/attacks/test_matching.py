"""Every attack on a case where it must succeed, and the published one where the sketch stops it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dbcl
from audit.attacks.digits import DIGITS, SPAN, digit, round_of
from dbcl.blinding import lift
from dbcl.errors import ConfigError, PlanError
from dbcl.model import networks
from dbcl.objective import cross_entropy
from dbcl_audit import image_quality
from dbcl_audit.attacks.gradients import as_gradient, gradients
from dbcl_audit.attacks.matching import Matching, recover

QUICK = Matching(steps=240, box=SPAN, good_enough=1e-5)


def test_dlg_without_a_sketch():
    x, y = digit(0)
    model = networks.build("dlg-lenet").double()
    found = recover(model, gradients(model, x, y), DIGITS.shape, settings=QUICK)
    assert found.labels.equal(y)
    assert image_quality.psnr(found.images, x, SPAN).item() > 40
    assert found.failures == ()
    assert found.loss == min(found.losses_of_restarts) < QUICK.good_enough


def test_the_sketch_stops_the_published_attack_and_not_the_one_that_knows_it():
    x, y = digit(0)
    model, broadcast, local = round_of("dlg-lenet")
    sent = gradients(local, x, y)
    published = Matching(steps=200, restarts=1, per_tensor=False, start_std=1.0)
    naive = recover(model, lift(broadcast.plan, sent), DIGITS.shape, settings=published)
    adaptive = recover(local, sent, DIGITS.shape, settings=Matching(steps=360, box=SPAN, good_enough=1e-6))
    assert image_quality.psnr(naive.images, x, SPAN).item() < 8
    assert image_quality.psnr(adaptive.images, x, SPAN).item() > 40


def test_from_a_client_s_own_update():
    x, y = digit(250)
    model, broadcast, local = round_of("dlg-lenet")
    victim = dbcl.blinded(model, broadcast)
    optimizer = torch.optim.SGD(victim.parameters(), lr=0.1)
    cross_entropy(victim(x), y).backward()
    optimizer.step()
    sent = as_gradient(dbcl.make_update(victim, broadcast, examples=1).tensors, lr=0.1)
    for name, gradient in gradients(local, x, y).items():
        torch.testing.assert_close(sent[name], gradient, rtol=1e-6, atol=1e-12)


def test_a_joint_label():
    x, y = digit(600)
    model = networks.build("dlg-lenet").double()
    found = recover(model, gradients(model, x, y), DIGITS.shape, settings=replace(QUICK, label="joint"))
    assert found.labels.equal(y)
    assert image_quality.psnr(found.images, x, SPAN).item() > 40


def test_a_batch_of_two():
    x, y = digit(100, 700)
    model = networks.build("dlg-lenet").double()
    found = recover(model, gradients(model, x, y), DIGITS.shape, count=2, settings=QUICK)
    assert found.labels.equal(y.sort().values)
    assert image_quality.psnr(found.images, x, SPAN).min() > 25


@pytest.mark.parametrize(("sketched", "tv"), [(False, 1e-3), (True, 1e-2)])
def test_inverting_gradients_beats_the_class_mean(sketched, tv):
    x, y = digit(0)
    model, _, local = round_of("mnist-mlp")
    model = local if sketched else model
    settings = Matching("cosine", steps=400, restarts=1, tv=tv, box=SPAN)
    found = recover(model, gradients(model, x, y), DIGITS.shape, settings=settings)
    guess = DIGITS.x_train[DIGITS.y_train == y].mean(dim=0, keepdim=True)
    assert image_quality.psnr(found.images, x, SPAN).item() > image_quality.psnr(guess, x, SPAN).item() + 4


def test_a_prior_that_stays_helps_with_noisy_gradients():
    x, y = digit(0)
    model = networks.build("dlg-lenet").double()
    noise = torch.Generator().manual_seed(0)
    target = {
        name: g + 0.3 * g.square().mean().sqrt() * torch.randn(g.shape, generator=noise, dtype=g.dtype)
        for name, g in gradients(model, x, y).items()
    }
    stays, annealed = (
        recover(
            model, target, DIGITS.shape, settings=Matching(steps=160, restarts=1, tv=1e-2, box=SPAN, anneal_tv=anneal)
        )
        for anneal in (False, True)
    )
    assert image_quality.psnr(stays.images, x, SPAN).item() > image_quality.psnr(annealed.images, x, SPAN).item() + 0.5


def test_clear_tensors_alone_give_the_label_and_are_matched_alone():
    x, y = digit(400)
    _, broadcast, local = round_of("dlg-lenet", coverage="hidden")
    clear = [part.name for part in broadcast.plan.tensors if not part.sketched]
    target = {name: gradient for name, gradient in gradients(local, x, y).items() if name in clear}
    assert len(target) == 5
    found = recover(local, target, DIGITS.shape, settings=Matching(steps=40, restarts=1))
    assert found.labels.equal(y)
    assert found.loss < 0.1


def test_divergence_is_a_failure_and_not_a_result():
    model = nn.Sequential(nn.Linear(4, 3), _Blows(), nn.Linear(3, 2)).double()
    target = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    found = recover(model, target, (4,), settings=Matching("cosine", steps=3, restarts=2))
    assert found.failures == ("restart 1: diverged after 0 steps", "restart 2: diverged after 0 steps")
    assert found.losses_of_restarts == (float("inf"), float("inf"))
    assert found.images.isfinite().all()


class _Blows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


def test_the_same_seed_gives_the_same_images():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    target = gradients(model, torch.ones(1, 4), torch.tensor([0]))
    settings = Matching(steps=20, restarts=1)
    one, two, other = (recover(model, target, (4,), settings=settings, seed=seed).images for seed in (1, 1, 2))
    assert one.equal(two)
    assert not one.equal(other)


def test_what_does_not_fit_is_refused():
    model, _, local = round_of("dlg-lenet")
    sent = gradients(local, *digit(0))
    with pytest.raises(PlanError, match="a lifted update goes with the plain model"):
        recover(model, sent, DIGITS.shape)
    with pytest.raises(PlanError, match="'nothing' was not asked for"):
        recover(model, {"nothing": torch.ones(1)}, DIGITS.shape)
    with pytest.raises(ConfigError, match="choose 'joint'"):
        recover(local, {"0.0.bias": sent["0.0.bias"]}, DIGITS.shape)
    with pytest.raises(ConfigError, match="needs 1 labels"):
        recover(local, sent, DIGITS.shape, settings=Matching(label="known"))
    with pytest.raises(ConfigError, match="objective must be one of l2, cosine"):
        Matching("l1")
