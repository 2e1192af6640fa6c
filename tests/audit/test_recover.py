"""Every attack on a case where it must succeed, and the published one where the sketch stops it."""

import base64
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl import data, models
from dbcl.audit import picture_quality as pictures
from dbcl.audit.attacks.matching import FirstLayer, Matching, as_gradient, clear_label, first_layer, gradients, recover
from dbcl.blind import lift
from dbcl.errors import ConfigError, PlanError

DIGITS = data.load("digits")
SPAN = pictures.span(DIGITS)
QUICK = Matching(steps=240, box=SPAN, enough=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digit(*numbers: int) -> tuple[Tensor, Tensor]:
    return DIGITS.x_test[list(numbers)].double(), DIGITS.y_test[list(numbers)]


def round_of(name: str, seed: int = 0, **plan: object) -> tuple[nn.Module, dbcl.Broadcast, nn.Module]:
    model = models.build(name, seed=seed).double()
    broadcast = dbcl.Server(model, veil=0, insecure_seed=seed, **plan).open_round()
    return model, broadcast, dbcl.blinded(model, broadcast)


def test_dlg_without_a_sketch():
    x, y = digit(0)
    model = models.build("dlg-lenet").double()
    found = recover(model, gradients(model, x, y), DIGITS.shape, settings=QUICK)
    assert found.labels.equal(y)
    assert pictures.psnr(found.images, x, SPAN).item() > 40
    assert found.failures == ()
    assert found.loss == min(found.losses_of_restarts) < QUICK.enough


def test_the_sketch_stops_the_published_attack_and_not_the_one_that_knows_it():
    x, y = digit(0)
    model, broadcast, local = round_of("dlg-lenet")
    sent = gradients(local, x, y)
    published = Matching(steps=200, restarts=1, even=False, spread=1.0)
    naive = recover(model, lift(broadcast.plan, sent), DIGITS.shape, settings=published)
    adaptive = recover(local, sent, DIGITS.shape, settings=Matching(steps=500, box=SPAN, enough=1e-6))
    assert pictures.psnr(naive.images, x, SPAN).item() < 8
    assert pictures.psnr(adaptive.images, x, SPAN).item() > 40


def test_from_a_client_s_own_update():
    x, y = digit(250)
    model, broadcast, local = round_of("dlg-lenet")
    victim = dbcl.blinded(model, broadcast)
    optimizer = torch.optim.SGD(victim.parameters(), lr=0.1)
    models.loss(victim(x), y).backward()
    optimizer.step()
    sent = as_gradient(dbcl.update(victim, broadcast, examples=1).tensors, lr=0.1)
    for name, gradient in gradients(local, x, y).items():
        torch.testing.assert_close(sent[name], gradient, rtol=1e-6, atol=1e-12)


def test_a_joint_label():
    x, y = digit(600)
    model = models.build("dlg-lenet").double()
    found = recover(model, gradients(model, x, y), DIGITS.shape, settings=replace(QUICK, label="joint"))
    assert found.labels.equal(y)
    assert pictures.psnr(found.images, x, SPAN).item() > 40


def test_a_batch_of_two():
    x, y = digit(100, 700)
    model = models.build("dlg-lenet").double()
    found = recover(model, gradients(model, x, y), DIGITS.shape, count=2, settings=QUICK)
    assert found.labels.equal(y.sort().values)
    assert pictures.psnr(found.images, x, SPAN).min() > 25


@pytest.mark.parametrize(("sketched", "tv"), [(False, 1e-3), (True, 1e-2)])
def test_inverting_gradients_beats_the_class_mean(sketched, tv):
    x, y = digit(0)
    model, _, local = round_of("mnist-mlp")
    model = local if sketched else model
    settings = Matching("cosine", steps=400, restarts=1, tv=tv, box=SPAN)
    found = recover(model, gradients(model, x, y), DIGITS.shape, settings=settings)
    guess = DIGITS.x_train[DIGITS.y_train == y].mean(dim=0, keepdim=True)
    assert pictures.psnr(found.images, x, SPAN).item() > pictures.psnr(guess, x, SPAN).item() + 4


def test_a_prior_that_stays_helps_with_noisy_gradients():
    x, y = digit(0)
    model = models.build("dlg-lenet").double()
    noise = torch.Generator().manual_seed(0)
    target = {
        name: g + 0.3 * g.square().mean().sqrt() * torch.randn(g.shape, generator=noise, dtype=g.dtype)
        for name, g in gradients(model, x, y).items()
    }
    stays, fades = (
        recover(model, target, DIGITS.shape, settings=Matching(steps=160, restarts=1, tv=1e-2, box=SPAN, fade=fade))
        for fade in (False, True)
    )
    assert pictures.psnr(stays.images, x, SPAN).item() > pictures.psnr(fades.images, x, SPAN).item() + 0.5


def test_clear_tensors_alone_give_the_label_and_are_matched_alone():
    x, y = digit(400)
    _, broadcast, local = round_of("dlg-lenet")
    clear = [part.name for part in broadcast.plan.tensors if not part.sketched]
    target = {name: gradient for name, gradient in gradients(local, x, y).items() if name in clear}
    assert len(target) == 5
    found = recover(local, target, DIGITS.shape, settings=Matching(steps=40, restarts=1))
    assert found.labels.equal(y)
    assert found.loss < 0.1


@pytest.mark.parametrize("number", [0, 150, 450, 950])
@pytest.mark.parametrize("seed", [0, 1])
def test_labels_from_the_output_layer(number, seed):
    x, y = digit(number)
    _, _, local = round_of("mnist-mlp", seed)
    found = gradients(local, x, y)
    assert clear_label(found["5.weight"], None).equal(y)
    assert clear_label(None, found["5.bias"]).equal(y)


@pytest.mark.parametrize("label", [0, 1])
def test_the_label_of_a_single_output(label):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 1))
    found = gradients(model, torch.ones(1, 4), torch.tensor([label]))
    assert clear_label(found["2.weight"], None).item() == label
    assert clear_label(None, found["2.bias"]).item() == label


def test_labels_of_a_batch_with_a_class_twice():
    x, y = digit(10, 20, 500, 820)
    model = models.build("dlg-lenet", seed=1).double()
    for parameter in model.parameters():
        parameter.data.mul_(0.1)  # nearly even probabilities, as in the first rounds
    found = gradients(model, x, y)
    assert clear_label(None, found["1.bias"], 4).equal(y)
    assert clear_label(found["1.weight"], None, 4).equal(y)


def first_layers(rounds: int, x: Tensor, y: Tensor) -> list[FirstLayer]:
    seen = []
    for seed in range(rounds):
        _, broadcast, local = round_of("mnist-mlp", seed)
        found = gradients(local, x, y)
        seen.append(FirstLayer(found["1.weight"], found["1.bias"], broadcast.sketches()["1.weight"]))
    return seen


def test_a_dense_first_layer_is_read_off_from_two_rounds():
    x, y = digit(0)
    one = first_layer(first_layers(1, x, y), DIGITS.shape, box=SPAN)
    two = first_layer(first_layers(2, x, y), DIGITS.shape, box=SPAN)
    assert pictures.psnr(one[None], x, SPAN).item() > 20
    assert pictures.psnr(two[None], x, SPAN).item() > 100


def test_a_first_layer_without_a_sketch_needs_one_round():
    x, y = digit(0)
    model = models.build("mnist-mlp").double()
    found = gradients(model, x, y)
    image = first_layer([FirstLayer(found["1.weight"], found["1.bias"], dbcl.Identity(784))], DIGITS.shape, box=SPAN)
    assert pictures.psnr(image[None], x, SPAN).item() > 100


def test_a_dead_first_layer_is_refused():
    with pytest.raises(ConfigError, match="no unit was active"):
        first_layer([FirstLayer(torch.zeros(2, 3), torch.zeros(2), dbcl.Identity(3))], (3,), box=(0, 1))


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
    with pytest.raises(PlanError, match="nothing: this model has no such parameter"):
        recover(model, {"nothing": torch.ones(1)}, DIGITS.shape)
    with pytest.raises(ConfigError, match="choose 'joint'"):
        recover(local, {"0.0.bias": sent["0.0.bias"]}, DIGITS.shape)
    with pytest.raises(ConfigError, match="needs 1 labels"):
        recover(local, sent, DIGITS.shape, settings=Matching(label="known"))
    with pytest.raises(ConfigError, match="objective must be one of l2, cosine"):
        Matching("l1")


def test_psnr_pairs_the_images_of_a_batch():
    truth = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    shuffled = truth[[2, 0, 1]]
    assert pictures.psnr(shuffled, truth).tolist() == [pictures.CEILING] * 3
    assert pictures.psnr(shuffled, truth, ordered=True).max() < 20
    assert pictures.ssim(shuffled, truth).min() > 0.99
    assert pictures.ssim(shuffled, truth, ordered=True).max() < 0.5


def test_psnr_is_that_of_pixels_clipped_to_the_data_s_range():
    truth = torch.full((1, 1, 4, 4), 2.0)
    assert pictures.psnr(torch.full((1, 1, 4, 4), 99.0), truth, (-2.0, 2.0)).item() == pictures.CEILING
    assert pictures.psnr(torch.full((1, 1, 4, 4), 1.6), truth, (-2.0, 2.0)).item() == pytest.approx(20, abs=1e-4)


def test_the_grid_is_a_picture():
    x, _ = digit(0, 500)
    png = base64.b64decode(pictures.grid_png([("truth", x), ("attack", x + 0.1), ("other", 0 * x)], SPAN))
    assert png.startswith(b"\x89PNG")
    colour = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert pictures.grid_png([("truth", colour), ("attack", colour)]).startswith("iVBOR")
