"""Images fitted to all rounds: the likelihoods against dense Gaussians, and where the fit must succeed and fail."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import dbcl
from audit.attacks.digits import DIGITS, SPAN
from dbcl.blinding import lift
from dbcl.engines import LocalTraining
from dbcl.errors import AuditError, ConfigError
from dbcl.simulation import preset, task_of
from dbcl.sketch import Identity, Sketch, draw
from dbcl_audit import image_quality
from dbcl_audit.attacks.trajectory_first_layer import FirstLayerLikelihood
from dbcl_audit.attacks.trajectory_images import (
    TrajectoryMatching,
    fit_images,
    trajectory_image_findings,
    trajectory_of,
)
from dbcl_audit.attacks.trajectory_likelihood import TensorLikelihood, projection
from dbcl_audit.attacks.trajectory_victim import SimulatedVictim
from dbcl_audit.estimators.kalman import Scales
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.simulated_run import SimulatedRun, simulate_batches

ROUNDS, ROWS, DIM, VEIL, WEIGHT = 4, 2, 6, 0.3, 2.0
VICTIMS = np.random.default_rng(5).permutation(len(DIGITS.y_train))
FEW = TrajectoryMatching(steps=30, starts=1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sketches(kind: int) -> list[Sketch]:
    """Of the attacker (0) and the victim (1), who are in two lanes."""
    return [
        draw("lanes-v1", DIM, 3, seed=bytes(32), round=t, name="w", lane=kind, lanes=2) if kind < 2 else Identity(DIM)
        for t in range(ROUNDS)
    ]


def small(momentum: float, *, sketched: bool = True, rows: int = ROWS) -> tuple[TensorObservations, list]:
    mine = sketches(0 if sketched else 2)
    width = mine[0].width
    view = TensorObservations(
        "w", tuple(range(ROUNDS)), (1,) * ROUNDS, tuple(mine),
        tuple(random(rows, width, seed=t) for t in range(ROUNDS)),
        tuple(0.1 * random(rows, width, seed=100 + t) for t in range(ROUNDS)), momentum=momentum, lr=0.7,
    )  # fmt: skip
    return view, [projection(each, 1, -0.5) for each in sketches(1 if sketched else 2)[:-1]]


def brute_force(view: TensorObservations, through: list, changes: Tensor, start: Tensor | None = None) -> float:
    """-log p of all that was seen, row by row, from the covariance of W_0 and the veil as one matrix."""
    weights, velocity, left = torch.zeros(changes.shape[1], view.dim).double(), 0.0, []
    weights = weights if start is None else start
    for t, sketch in enumerate(view.sketches):
        left.append(view.seen[t] - sketch.apply(weights))
        if t < len(changes):
            velocity = view.momentum * velocity + sketch.lift(view.own[t]) + through[t](changes[t])
            weights = weights + view.lr * velocity
    R = torch.cat([sketch.apply(torch.eye(view.dim).double()) for sketch in view.sketches], dim=1)
    prior = WEIGHT**2 * R.T @ R if start is None else 0.0
    covariance = prior + VEIL**2 * torch.eye(R.shape[1]).double()
    y = torch.cat(left, dim=1)
    return float((y @ torch.linalg.inv(covariance) * y).sum() / 2)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sketched", [True, False])
def test_a_tensors_likelihood_is_that_of_a_dense_gaussian(momentum: float, known: bool, sketched: bool) -> None:
    view, through = small(momentum, sketched=sketched)
    start = random(ROWS, DIM, seed=7) if known else None
    likelihood = TensorLikelihood(view, Scales(VEIL, 0.0, WEIGHT), start, through)
    likelihood = _double(likelihood)
    changes = random(ROUNDS - 1, ROWS, DIM, seed=9)
    value, slopes = likelihood(changes)
    at_zero = brute_force(view, through, torch.zeros_like(changes), start)
    assert value == pytest.approx(brute_force(view, through, changes, start) - at_zero, rel=1e-4)
    for place in [(0, 0, 0), (1, 1, 3), (2, 0, 5)]:
        moved = changes.clone()
        moved[place] += 1e-3
        back = changes.clone()
        back[place] -= 1e-3
        slope = (brute_force(view, through, moved, start) - brute_force(view, through, back, start)) / 2e-3
        assert float(slopes[place]) == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_the_expected_start_is_the_posterior_mean() -> None:
    view, through = small(0.0)
    likelihood = _double(TensorLikelihood(view, Scales(VEIL, 0.0, WEIGHT), None, through))
    changes = torch.zeros(ROUNDS - 1, ROWS, DIM).double()
    R = torch.cat([sketch.apply(torch.eye(DIM).double()) for sketch in view.sketches], dim=1)
    weights, left = torch.zeros(ROWS, DIM).double(), []
    for sketch, seen, own in zip(view.sketches, view.seen, view.own, strict=True):
        left.append(seen - sketch.apply(weights))
        weights = weights + view.lr * sketch.lift(own)
    covariance = WEIGHT**2 * R.T @ R + VEIL**2 * torch.eye(R.shape[1]).double()
    expected = WEIGHT**2 * torch.cat(left, dim=1) @ torch.linalg.inv(covariance) @ R.T
    assert torch.allclose(likelihood.weights(changes)[0], expected, atol=1e-4)


@pytest.mark.parametrize(("count", "momentum"), [(1, 0.0), (2, 0.7)])
def test_errors_are_integrated_out(count: int, momentum: float) -> None:
    """Against the sum over a Gaussian in all errors, whose quadratic form is read off the likelihoods themselves."""
    view, through = small(momentum)
    of_bias, through_bias = small(momentum, sketched=False, rows=1)
    one = TensorObservations(
        "b", of_bias.rounds, of_bias.gaps, (Identity(ROWS),) * ROUNDS, tuple(v[:, :ROWS] for v in of_bias.seen),
        tuple(u[:, :ROWS] for u in of_bias.own), momentum=momentum, lr=0.7,
    )  # fmt: skip
    weight = _double(TensorLikelihood(view, Scales(VEIL, 0.0, WEIGHT), None, through))
    bias = _double(TensorLikelihood(one, Scales(VEIL, 0.0, WEIGHT), None, through_bias))
    images, sizes = random(count, DIM, seed=3), random(ROUNDS - 1, seed=4).exp()

    def unlikely(errors: Tensor) -> Tensor:  # (rounds, count, rows)
        changes = torch.einsum("tbr,bd->trd", errors, images)
        return torch.tensor(weight(changes)[0] + bias(errors.sum(dim=1, keepdim=True))[0]).double()

    size = (ROUNDS - 1) * count * ROWS
    basis = torch.eye(size).double().reshape(size, ROUNDS - 1, count, ROWS)
    single = torch.stack([unlikely(each) for each in basis])
    pairs = torch.stack([torch.stack([unlikely(a + b) for b in basis]) for a in basis])
    H = pairs - single[:, None] - single  # of the quadratic form, up to its own halves on the diagonal
    g = single - H.diagonal() / 2
    prior = sizes.repeat_interleave(count * ROWS)
    whole = H + torch.diag(prior**-2)
    expected = torch.logdet(torch.diag(prior) @ whole @ torch.diag(prior)) / 2 - g @ torch.linalg.solve(whole, g) / 2
    found = FirstLayerLikelihood(weight, bias)
    assert float(found(images, sizes)) == pytest.approx(float(expected), rel=1e-3, abs=1e-3)
    mean = -torch.linalg.solve(whole, g).reshape(ROUNDS - 1, count, ROWS)
    assert torch.allclose(found.deltas(images, sizes), mean, atol=1e-3)
    assert torch.autograd.gradcheck(found, (images.requires_grad_(), sizes.requires_grad_()), atol=1e-3)


def _double(likelihood: TensorLikelihood) -> TensorLikelihood:
    likelihood.dtype = torch.float64
    for name in ("at_zero", "moved", "lifted"):
        setattr(likelihood, name, getattr(likelihood, name).double())
    return likelihood


def played(
    victims: np.ndarray, *, model: str = "mnist-mlp", lr: float = 0.01, rounds: int = 30, fresh: bool = False,
    seed: int = 0, **settings: object,
) -> SimulatedRun:  # fmt: skip
    config = preset("blind", model=model, lr=lr, **settings)
    script = np.random.default_rng(seed).integers(0, len(DIGITS.y_train), (rounds, 2, len(victims)))
    if not fresh:
        script[:, 1] = victims
    return simulate_batches(config, task_of(config), script, Path(tempfile.mkdtemp()), seed=seed)


def psnr_of(
    simulated: SimulatedRun, victims: np.ndarray, settings: TrajectoryMatching = FEW, **known: object
) -> Tensor:
    found = fit_images(trajectory_of(simulated, DIGITS), count=len(victims), settings=settings, **known)
    return image_quality.psnr(found.images, DIGITS.x_train[victims].double(), SPAN)


def class_mean(victim: int) -> float:
    alike = DIGITS.x_train[DIGITS.y_train == DIGITS.y_train[victim]].double().mean(dim=0, keepdim=True)
    return float(image_quality.psnr(alike, DIGITS.x_train[[victim]].double(), SPAN))


@pytest.mark.parametrize(("lanes", "local_steps"), [(2, 1), (2, 3), (1, 1)])
def test_the_gradient_of_a_simulated_victim(lanes: int, local_steps: int) -> None:
    trajectory = trajectory_of(played(VICTIMS[:1], model="dlg-lenet", lr=0.1, rounds=4, lanes=lanes), DIGITS)
    template, setting, seen, plans, *_ = trajectory
    victim = SimulatedVictim(template, setting, seen, plans, local_steps=local_steps)
    assert bool(victim.hidden) == (lanes == 2)
    images, labels = DIGITS.x_train[VICTIMS[:1]].double(), DIGITS.y_train[VICTIMS[:1]]
    noise = {name: random(*each.shape).to(each) for name, each in victim.noise().items()}
    variables = [images.requires_grad_(), *(each.requires_grad_() for each in noise.values())]
    slopes = torch.autograd.grad(victim(images, labels, noise), variables)
    for variable, slope in zip(variables, slopes, strict=True):
        along = slope.detach() / slope.norm()
        step = 1e-2 if variable is images else 0.1
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                variable += sign * step * along
                ends.append(float(victim(images, labels, noise)))
                variable -= sign * step * along
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(slope.norm()), rel=0.05)


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("coverage", ["hidden", "auto"])
def test_a_simulated_victim_changes_what_a_client_changes(coverage: str, local_steps: int) -> None:
    rate = 0.001  # at a large one a single step fits the image, and further ones change nothing
    simulated = played(VICTIMS[:1], model="dlg-lenet", lr=rate, rounds=4, lanes=1, coverage=coverage)
    template, setting, seen, plans, *_ = trajectory_of(simulated, DIGITS)
    images, labels = DIGITS.x_train[VICTIMS[:1]], DIGITS.y_train[VICTIMS[:1]]
    changes = SimulatedVictim(template, setting, seen, plans, local_steps=local_steps).changes(images, labels)
    broadcast = simulated.attacker[1].broadcast
    local = dbcl.blinded(simulated.attacker.template(), broadcast)
    training = LocalTraining(lr=rate, batch_size=1, epochs=local_steps)
    training.train(local, (images, labels), seed=bytes(32), round=1, client=1)
    sent = dbcl.make_update(local, broadcast, examples=1).tensors
    for name, each in changes.items():
        sketch = broadcast.plan.sketches.get(name) or Identity(each.shape[-1])
        expected = -rate * sketch.project(each[1])
        assert torch.allclose(sent[name].reshape(expected.shape), expected, rtol=1e-3, atol=1e-7), name


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_victims_weights_are_seen_in_its_own_lane_and_estimated_in_another(lanes: int) -> None:
    simulated = played(VICTIMS[:1], model="dlg-lenet", lr=0.1, rounds=20, lanes=lanes)
    template, setting, seen, plans, *_ = trajectory_of(simulated, DIGITS)
    victim = SimulatedVictim(template, setting, seen, plans)
    images, labels = DIGITS.x_train[VICTIMS[:1]], DIGITS.y_train[VICTIMS[:1]]
    victim.believe(victim.changes(images, labels))
    sent = [simulated.server[round].answered("1") for round in range(19)]
    for name in ("0.2.weight", "1.weight"):
        true = torch.stack([lift(each.plan, _gained(each, name))[name] for each in sent])
        off = float((victim.sent[name] - true).norm() / true.norm())
        assert off < 1e-5 if lanes == 1 or name == "1.weight" else 0.15 < off < 0.25  # the veil is 0.2 of W


def _gained(broadcast: dbcl.Broadcast, name: str) -> dict[str, Tensor]:
    """V D, which lifted is the effective weight."""
    sketch, V = broadcast.plan.sketches.get(name), broadcast.tensors
    return {**V, name: V[name] * sketch.gain(V[name])} if sketch else dict(V)


def test_one_fixed_image_is_found_and_fresh_ones_are_not() -> None:
    simulated = played(VICTIMS[:1])
    victim = int(VICTIMS[0])
    found = fit_images(trajectory_of(simulated, DIGITS), settings=FEW)
    assert found.labels.tolist() == [int(DIGITS.y_train[victim])]
    assert (
        float(image_quality.psnr(found.images, DIGITS.x_train[[victim]].double(), SPAN)) > 20 > class_mean(victim) + 5
    )
    shuffled = image_quality.psnr(found.images.expand(5, -1, -1, -1), DIGITS.x_train[VICTIMS[1:6]].double(), SPAN)
    assert float(shuffled.max()) < 14
    fresh = played(VICTIMS[:1], fresh=True)
    first = int(fresh.script[0, 1, 0])
    assert float(psnr_of(fresh, np.array([first]))) < class_mean(first) + 1


@pytest.mark.slow
def test_most_images_are_above_20_db_and_a_stronger_veil_hides_them() -> None:
    """A veil of 5 is no case that must fail: at some learning rates it makes the updates themselves large."""

    def median(veil: float, lr: float) -> float:
        few = [VICTIMS[number : number + 1] for number in range(3)]
        found = [psnr_of(played(each, lr=lr, veil=veil, rounds=60, seed=n), each) for n, each in enumerate(few)]
        return float(np.median([float(each) for each in found]))

    assert median(0.2, lr=0.01) > 24
    assert median(0.2, lr=0.003) > 19
    assert median(1.0, lr=0.003) < 14
    assert median(5.0, lr=0.0003) < 14


@pytest.mark.slow
def test_known_initial_weights_do_not_hurt() -> None:
    simulated = played(VICTIMS[:1], rounds=40)
    start = simulated.server[0].weights
    assert float(psnr_of(simulated, VICTIMS[:1], start=start)) > float(psnr_of(simulated, VICTIMS[:1])) - 0.5


@pytest.mark.slow
def test_the_image_of_a_convolutional_network_without_its_label() -> None:
    simulated, victim = played(VICTIMS[:1], model="dlg-lenet", lr=0.1, rounds=51), int(VICTIMS[0])
    settings = TrajectoryMatching(steps=90)
    found = fit_images(trajectory_of(simulated, DIGITS), settings=settings)
    assert found.labels.tolist() == [int(DIGITS.y_train[victim])]
    assert float(image_quality.psnr(found.images, DIGITS.x_train[[victim]].double(), SPAN)) > class_mean(victim) + 4


def test_findings_of_all_rounds() -> None:
    said, steps = list[str](), list[int]()
    simulated = played(VICTIMS[:1], rounds=12)
    few = TrajectoryMatching(steps=3, starts=1, trial=2)
    findings = trajectory_image_findings([simulated], DIGITS, few, tell=said.append, step=lambda: steps.append(1))
    assert [(each.target, each.measure) for each in findings] == [
        ("image", "psnr"), ("image", "ssim"), ("image", "share above 20 dB"), ("label", "accuracy"),
    ]  # fmt: skip
    assert findings[0].images
    assert findings[0].budget["images"] == 1
    assert findings[0].note.startswith("the victim trains on the same images in every round")
    assert said == ["images, client, all rounds together: 1 of 1"]
    assert len(steps) >= 3


def test_what_a_fit_does_not_take() -> None:
    with pytest.raises(ConfigError, match="starts must be 1 or more, got 0"):
        TrajectoryMatching(starts=0)
    with pytest.raises(ConfigError, match="tv must be 0 or more, got -1"):
        TrajectoryMatching(tv=-1)
    config = preset("blind", model="dlg-lenet")
    script = np.random.default_rng(0).integers(0, 100, (3, 3, 1))
    simulated = simulate_batches(config, task_of(config), script, Path(tempfile.mkdtemp()))
    with pytest.raises(AuditError, match="3 clients a round, 1 of them attackers"):
        trajectory_of(simulated, DIGITS)
