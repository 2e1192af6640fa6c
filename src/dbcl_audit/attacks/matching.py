"""Gradient inversion by gradient matching (DLG, iDLG, Inverting Gradients).

The naive attacker follows the papers: it matches the lifted update with gradients of the unsketched
model W. The adaptive attacker knows the sketch: it matches the update as sent with gradients of the
client's sketched model, and replays all local steps of the client.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dbcl.errors import ConfigError, PlanError
from dbcl.round_plan import mismatches
from dbcl_audit.attacks.gradients import gradients, parameters
from dbcl_audit.attacks.labels import labels_of_gradient
from dbcl_audit.attacks.local_steps import LocalSteps

OBJECTIVES = ("l2", "cosine")
LABELS = ("known", "inferred", "joint")
STEPS_PER_CHECK = 20  # iterations of L-BFGS between two evaluations of the loss, as in DLG
SOLVED_LOSS = 1e-16  # relative squared error at which L-BFGS stops


@dataclass(frozen=True)
class Matching:
    """Settings of gradient matching.

    Args:
        objective: "l2" is DLG: |g - g*|^2 / |g*|^2, minimised by L-BFGS with a strong Wolfe line
            search. "cosine" is Inverting Gradients: 1 - <g, g*> / |g||g*|, minimised by signed Adam
            with learning rate 0.1, divided by 10 after 3/8, 5/8 and 7/8 of the steps.
        steps: iterations per restart.
        restarts: maximum number of restarts.
        tv: weight of the total variation.
        anneal_tv: with "l2", decrease the weight `tv` to zero over the first 80 % of the steps.
            Suits exact gradients; estimated gradients need the prior throughout.
        box: range of the input values.
        label: "known", "inferred" from the output layer (iDLG), or "joint": optimised as soft
            labels.
        per_tensor: divide each tensor's squared error by the tensor's squared norm. Otherwise the
            error of the large output layer dominates.
        start_std: standard deviation of the random initial images.
        good_enough: loss below which no further restart is made.

    DLG as published has per_tensor=False and start_std=1.

    >>> Matching("cosine", steps=4800, restarts=1, tv=0.1).label
    'inferred'
    """

    objective: str = "l2"
    steps: int = 600
    restarts: int = 3
    tv: float = 0.0
    anneal_tv: bool = True
    box: tuple[float, float] | None = None
    label: str = "inferred"
    per_tensor: bool = True
    start_std: float = 0.1
    good_enough: float = 1e-7

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        if self.label not in LABELS:
            raise ConfigError(f"label must be one of {', '.join(LABELS)}, got {self.label!r}")
        if self.steps < 1 or self.restarts < 1 or not (math.isfinite(self.tv) and self.tv >= 0):
            raise ConfigError("steps and restarts must be at least 1 and tv at least 0")
        if self.box is not None and not self.box[0] < self.box[1]:
            raise ConfigError(f"box must rise, got {self.box}")


@dataclass(frozen=True, eq=False)
class Recovered:
    """Recovered images. `loss` is the matching error of the best restart, without any prior.

    >>> Recovered(torch.zeros(1, 1, 4, 4), torch.tensor([3]), 1e-9, (1e-9,), (), 0.5).labels
    tensor([3])
    """

    images: Tensor  # (count, *shape)
    labels: Tensor  # (count,)
    loss: float
    losses_of_restarts: tuple[float, ...]
    failures: tuple[str, ...]
    seconds: float


def recover(
    model: nn.Module,
    target: Mapping[str, Tensor],
    shape: Sequence[int],
    labels: Tensor | None = None,
    count: int = 1,
    settings: Matching | None = None,
    seed: int = 0,
    steps: LocalSteps | None = None,
) -> Recovered:
    """Recover images by gradient matching: minimise distance(dL/dV(x), target) + tv TV(x) over x.

    Args:
        model: model of the client. A copy in float64 is used, on the same device.
        target: gradients keyed by the plan's names, in the shapes of the model's parameters.
            Parameters without a target are not matched, so that unprotected tensors can be attacked
            alone. Buffers are ignored.
        shape: shape of one image.
        labels: true labels; used only if `settings.label` is "known".
        count: number of images.
        settings: settings of the optimisation.
        seed: seed of the initial images.
        steps: local steps of the client. The target is then the scaled change that `as_gradient`
            returns, and the replayed training must reproduce this change.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2)).double()
    >>> x = torch.tensor([[0.1, -0.2, 0.3, 0.4]]).double()
    >>> found = recover(model, gradients(model, x, torch.tensor([1])), (4,))
    >>> found.labels, bool(torch.allclose(found.images, x, atol=1e-3))
    (tensor([1]), True)
    """
    settings, start = settings or Matching(), time.perf_counter()
    model = copy.deepcopy(model).double()
    wanted = _matched(model, target)
    given = _labels(model, wanted, labels, count, settings)
    if steps is not None and {row for batch in steps.batches for row in batch} != set(range(count)):
        raise ConfigError(f"the batches must be of the examples 0 to {count - 1}, all of them, got {steps.batches}")
    generator = torch.Generator().manual_seed(seed)
    best, losses, failures = None, list[float](), list[str]()
    for number in range(settings.restarts):
        attempt = _Restart(model, wanted, shape, given, count, settings, generator, steps)
        failure = (attempt.lbfgs if settings.objective == "l2" else attempt.adam)()
        if failure:
            failures.append(f"restart {number + 1}: {failure}")
        losses.append(math.inf if failure else attempt.best_loss)
        if best is None or losses[-1] < min(losses[:-1]):
            best = attempt
        if losses[-1] < settings.good_enough:
            break
    assert best is not None
    images = best.best_images if settings.box is None else best.best_images.clamp(*settings.box)
    seconds = time.perf_counter() - start
    return Recovered(images, best.best_labels, min(losses), tuple(losses), tuple(failures), seconds)


class _Restart:
    """One restart: its variables, its objective, and the best point so far."""

    def __init__(
        self,
        model: nn.Module,
        wanted: Mapping[str, Tensor],
        shape: Sequence[int],
        labels: Tensor | None,
        count: int,
        settings: Matching,
        generator: torch.Generator,
        steps: LocalSteps | None,
    ) -> None:
        like = next(iter(wanted.values()))
        self.model, self.wanted, self.settings, self.steps = model, wanted, settings, steps
        noise = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        self.images = settings.start_std * noise.to(like.device)
        if settings.box is not None:
            self.images.clamp_(*settings.box)
        self.variables = [self.images.requires_grad_()]
        self.labels = labels
        if labels is None:
            with torch.no_grad():
                outputs = model(self.images).shape[-1]
            soft = torch.randn(count, outputs, generator=generator, dtype=torch.float64).to(like.device)
            self.variables.append(soft.requires_grad_())
        self.tv = settings.tv
        sizes = torch.stack([gradient.square().sum() for gradient in wanted.values()])
        self.size = float(sizes.sum().sqrt())
        per_tensor = torch.where(sizes > 0, 1 / sizes, 0) / int((sizes > 0).sum())
        self.weights = per_tensor if settings.per_tensor else torch.ones_like(sizes) / sizes.sum()
        self.best_loss = math.inf
        self.keep(math.inf)

    def soft_labels(self) -> Tensor:
        """Return the targets of the loss: the given classes, or the soft labels as probabilities."""
        if self.labels is not None:
            return self.labels
        soft = self.variables[1]
        return soft.squeeze(-1).sigmoid() if soft.shape[-1] == 1 else soft.softmax(dim=-1)

    def distance(self) -> Tensor:
        """Relative distance between the target and the gradients of the current images."""
        if self.steps is None:
            found = gradients(self.model, self.images, self.soft_labels(), create_graph=True)
        else:
            found = self.steps.mean_gradient(self.model, self.images, self.soft_labels())
        pairs = [(found[name], wanted) for name, wanted in self.wanted.items()]
        if self.settings.objective == "l2":
            errors = torch.stack([(one - other).square().sum() for one, other in pairs])
            return (errors * self.weights).sum()
        inner = torch.stack([(one * other).sum() for one, other in pairs]).sum()
        size = torch.stack([one.square().sum() for one, _ in pairs]).sum().sqrt()
        return 1 - inner / (size * self.size + 1e-30)

    def objective(self) -> Tensor:
        """Return the distance plus the priors, and set the gradients of the variables."""
        for variable in self.variables:
            variable.grad = None
        distance = self.distance()
        loss = distance + self.tv * total_variation(self.images) if self.tv else distance
        if self.settings.box is not None and self.settings.objective == "l2":
            # A line search cannot clamp, so values outside the box get a smooth penalty instead.
            loss = loss + (self.images - self.images.clamp(*self.settings.box)).square().mean()
        grads = torch.autograd.grad(loss, self.variables)
        for variable, grad in zip(self.variables, grads, strict=True):
            variable.grad = grad
        self.last = float(distance.detach())
        return loss.detach()

    def keep(self, loss: float) -> None:
        """Store the current images and labels if their loss is the lowest so far."""
        if loss <= self.best_loss:
            self.best_loss, self.best_images = loss, self.images.detach().clone()
            soft = self.soft_labels().detach()
            self.best_labels = (soft.argmax(-1) if soft.ndim == 2 else soft.round().long()).cpu()

    def lbfgs(self) -> str:
        """Optimise with L-BFGS as in DLG. Return the error message of a failure, or an empty
        string.
        """
        optimizer = torch.optim.LBFGS(
            self.variables, lr=1, max_iter=STEPS_PER_CHECK, history_size=100, tolerance_grad=0, tolerance_change=0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip
        chunks = math.ceil(self.settings.steps / STEPS_PER_CHECK)
        for chunk in range(chunks):
            if self.settings.anneal_tv:
                # Anneal total variation to zero over the first 80 % of the steps.
                done = chunk / (0.8 * chunks)
                self.tv = self.settings.tv * 10 ** (-6 * done) if done < 1 else 0.0
            else:
                self.best_loss = math.inf  # keep the last point: the one with the least distance would ignore the prior
            optimizer.step(lambda: float(self.objective()))  # type: ignore[no-untyped-call]
            loss = float(self.distance().detach())
            if not math.isfinite(loss):
                return f"diverged within {(chunk + 1) * STEPS_PER_CHECK} steps"
            self.keep(loss)
            if loss < SOLVED_LOSS:
                break
        return ""

    def adam(self) -> str:
        """Optimise with signed Adam as in Inverting Gradients. Return the error message of a
        failure, or an empty string.
        """
        steps = self.settings.steps
        optimizer = torch.optim.Adam(self.variables, lr=0.1)
        drops = [max(1, int(steps * part)) for part in (3 / 8, 5 / 8, 7 / 8)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, gamma=0.1)
        for step in range(steps):
            self.objective()
            if not math.isfinite(self.last):
                return f"diverged after {step} steps"
            self.keep(self.last)
            assert self.images.grad is not None
            self.images.grad.sign_()
            optimizer.step()
            schedule.step()
            if self.settings.box is not None:
                with torch.no_grad():
                    self.images.clamp_(*self.settings.box)
        return ""


def total_variation(images: Tensor) -> Tensor:
    """Mean of |x_ij - x_(i+1)j| + |x_ij - x_i(j+1)|, smoothed at 0 to be differentiable.

    >>> round(float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))), 3)
    1.001
    """
    if images.ndim < 4:
        return images.new_zeros(())
    across, down = images.diff(dim=-1), images.diff(dim=-2)
    return (across.square() + 1e-6).sqrt().mean() + (down.square() + 1e-6).sqrt().mean()


def _matched(model: nn.Module, target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients to match, in float64 on the model's device. Raise if names or shapes
    differ from the model's.
    """
    own, buffers = parameters(model), dict(model.named_buffers())
    asked = {name: tuple(parameter.shape) for name, parameter in own.items() if name in target}
    problems = mismatches(asked, {name: tensor for name, tensor in target.items() if name not in buffers})
    if problems:
        remedy = "a lifted update goes with the plain model, one as it was sent with the sketched model"
        raise PlanError("\n  - ".join([f"these gradients are not of this model ({remedy}):", *problems]))
    wanted = {name: target[name].detach().to(own[name]) for name in target if name in own}
    if not any(gradient.any() for gradient in wanted.values()):
        raise ConfigError("there is no gradient to match: all that was given is zero or buffers")
    return wanted


def _labels(
    model: nn.Module, wanted: Mapping[str, Tensor], labels: Tensor | None, count: int, settings: Matching
) -> Tensor | None:
    """Return the known or inferred labels, or None if the labels are optimised."""
    device = next(iter(wanted.values())).device
    if settings.label == "known":
        if labels is None or len(labels) != count:
            raise ConfigError(f"label='known' needs {count} labels; give them or choose 'inferred' or 'joint'")
        return labels.to(device)
    if settings.label == "joint":
        return None
    layer = list(parameters(model))[-1].removesuffix("weight").removesuffix("bias")
    weight, bias = wanted.get(f"{layer}weight"), wanted.get(f"{layer}bias")
    if weight is None and bias is None:
        raise ConfigError("label='inferred' needs the output layer's gradient in the target; choose 'joint'")
    return labels_of_gradient(weight, bias, count).to(device)
