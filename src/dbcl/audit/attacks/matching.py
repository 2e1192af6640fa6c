"""Training examples back from a gradient: matching by descent, labels from the output layer, and a first layer solved.

The naive attacker, that of the papers, matches the lifted update with the gradients of the plain model W. The adaptive
one knows the sketch: it matches the update as it was sent with the gradients of a client's own sketched model.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dbcl.cover import owner
from dbcl.errors import AuditError, ConfigError, PlanError
from dbcl.nn import compact_parameter
from dbcl.sketch import Sketch

OBJECTIVES = ("l2", "cosine")
LABELS = ("known", "inferred", "joint")
CHUNK = 20  # iterations of L-BFGS between two looks at the loss, as in DLG
SOLVED = 1e-16  # a relative squared error that more steps would not make visibly smaller


@dataclass(frozen=True)
class Matching:
    """How gradients are matched.

    "l2" is DLG: |g - g*|^2 / |g*|^2 by L-BFGS with a strong Wolfe search. "cosine" is Inverting Gradients:
    1 - <g, g*> / |g||g*| by signed Adam whose rate of 0.1 falls tenfold after 3/8, 5/8 and 7/8 of the steps. Both add
    `tv` times the total variation. Where that is to `fade`, "l2" lets its weight fall to nothing over the steps: right
    for exact gradients, while estimated ones need the prior to the end. `box` is the range of the values that inputs
    can have. `label` says whether labels are known, inferred from the output layer (iDLG), or optimised jointly as soft
    labels. `even` takes each tensor's squared error relative to that tensor alone, or else the large output layer
    drowns the others; `spread` is the deviation of the random start. DLG as published has even=False and spread=1.
    There is another restart until one falls below `enough`.

    >>> Matching("cosine", steps=4800, restarts=1, tv=0.1).label
    'inferred'
    """

    objective: str = "l2"
    steps: int = 600
    restarts: int = 3
    tv: float = 0.0
    fade: bool = True
    box: tuple[float, float] | None = None
    label: str = "inferred"
    even: bool = True
    spread: float = 0.1
    enough: float = 1e-7

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
    """What an attack brought back; `loss` is the matching error of the best restart, without any prior.

    >>> Recovered(torch.zeros(1, 1, 4, 4), torch.tensor([3]), 1e-9, (1e-9,), (), 0.5).labels
    tensor([3])
    """

    images: Tensor  # (count, *shape)
    labels: Tensor  # (count,)
    loss: float
    losses_of_restarts: tuple[float, ...]
    failures: tuple[str, ...]
    seconds: float


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """What an attack differentiates by, under the names of the plan: W of a plain model, V of a sketched one.

    >>> import dbcl
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), cover="all").open_round()
    >>> {name: tuple(tensor.shape) for name, tensor in parameters(dbcl.blinded(nn.Linear(6, 2), broadcast)).items()}
    {'bias': (2,), 'weight': (2, 3)}
    """
    found = {}
    for full, parameter in model.named_parameters():
        name = _plan_name(full)
        home, last = owner(model, name)
        found[name] = compact_parameter(home, last) if is_parametrized(home, last) else parameter
    return found


def gradients(model: nn.Module, images: Tensor, labels: Tensor, *, create_graph: bool = False) -> dict[str, Tensor]:
    """The gradient of the mean cross entropy, dL/dV, under the names of the plan.

    Labels are classes, or soft labels: a row of probabilities for each image (one number each for a single output).

    >>> found = gradients(nn.Linear(3, 2), torch.ones(1, 3), torch.tensor([1]))
    >>> {name: tuple(gradient.shape) for name, gradient in found.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    held = parameters(model)
    loss = _loss(model(images), labels)
    return dict(zip(held, torch.autograd.grad(loss, list(held.values()), create_graph=create_graph), strict=True))


def example_gradients(model: nn.Module, images: Tensor, labels: Tensor, *, together: int = 50) -> dict[str, Tensor]:
    """The gradient of each example alone, under the names of the plan, with a leading axis for the examples.

    >>> found = example_gradients(nn.Linear(3, 2), torch.ones(5, 3), torch.zeros(5, dtype=torch.long))
    >>> {name: tuple(gradient.shape) for name, gradient in found.items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """
    held = {full: parameter.detach() for full, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(model, values, (image.unsqueeze(0),))
        return _loss(logits, label.unsqueeze(0))

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    try:
        parts = [
            each(held, x, y) for x, y in zip(torch.split(images, together), torch.split(labels, together), strict=True)
        ]
    except (RuntimeError, ValueError) as error:
        raise AuditError(f"this network has no gradient of one example alone: {error}") from error
    return {_plan_name(full): torch.cat([part[full] for part in parts]) for full in held}


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels.to(logits.dtype))
    return F.cross_entropy(logits, labels)


def _plan_name(full: str) -> str:
    """A parameter's name in the plan, whether it is parametrized or not."""
    head, mark, tail = full.rpartition("parametrizations.")
    return head + tail.removesuffix(".original") if mark else full


def as_gradient(changes: Mapping[str, Tensor], lr: float, steps: int = 1) -> dict[str, Tensor]:
    """Read a client's update as a gradient: g = -dV / (lr steps).

    Exact for one step of plain SGD. For several local steps it is an approximation: it takes every step's gradient as
    that at the broadcast weights, and so the batches of all steps as one batch.

    >>> as_gradient({"bias": torch.tensor([-0.2])}, lr=0.1)["bias"]
    tensor([2.])
    """
    return {name: change / -(lr * steps) for name, change in changes.items()}


def clear_label(weight: Tensor | None, bias: Tensor | None, count: int = 1) -> Tensor:
    """Labels from the gradient of the output layer alone: its bias if there is one, else the rows' sums (iDLG).

    The bias gradient of class c is mean(p_c) - n_c / count, and a row's sum is that times the layer's inputs, which
    sigmoid and ReLU keep positive: one example makes exactly one entry negative. In a batch the most negative entry is
    taken `count` times, each time with what one example adds taken back (exact for biases while p is even).

    >>> clear_label(None, torch.tensor([0.1, 0.1, -0.9, 0.7]))
    tensor([2])
    >>> clear_label(None, torch.tensor([-0.4, 0.2, -0.1, 0.3]), count=2)
    tensor([0, 2])
    """
    if bias is not None:
        evidence = bias.detach().double().clone()
        one = 1 / count
    elif weight is not None:
        evidence = weight.detach().double().flatten(1).sum(dim=1)
        one = float(evidence.abs().sum() / 2) / count
    else:
        raise ConfigError("labels need the gradient of the output layer's weight or bias")
    if len(evidence) == 1:  # one logit speaks for class 1 and against class 0
        evidence = torch.cat([-evidence, evidence])
    found = []
    for _ in range(count):
        found.append(int(evidence.argmin()))
        evidence[found[-1]] += one
    return torch.tensor(sorted(found))


def recover(
    model: nn.Module,
    target: Mapping[str, Tensor],
    shape: Sequence[int],
    labels: Tensor | None = None,
    count: int = 1,
    settings: Matching | None = None,
    seed: int = 0,
) -> Recovered:
    """Find images whose gradients are those seen: min over x of distance(dL/dV(x), target) + tv TV(x).

    `target` holds gradients by the plan's names, in the shape of the model's own parameters. Only what it holds is
    matched, so the tensors in clear alone are an attack of their own; buffers in it are passed over. `labels` are read
    only where the settings say that they are known. The model is copied, in float64, on the device that it lies on.

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
    generator = torch.Generator().manual_seed(seed)
    best, losses, failures = None, list[float](), list[str]()
    for number in range(settings.restarts):
        attempt = _Attempt(model, wanted, shape, given, count, settings, generator)
        failure = (attempt.lbfgs if settings.objective == "l2" else attempt.adam)()
        if failure:
            failures.append(f"restart {number + 1}: {failure}")
        losses.append(math.inf if failure else attempt.best_loss)
        if best is None or losses[-1] < min(losses[:-1]):
            best = attempt
        if losses[-1] < settings.enough:
            break
    assert best is not None
    images = best.best_images if settings.box is None else best.best_images.clamp(*settings.box)
    seconds = time.perf_counter() - start
    return Recovered(images, best.best_labels, min(losses), tuple(losses), tuple(failures), seconds)


class _Attempt:
    """One restart: what is optimised, its objective, and the best that was met."""

    def __init__(
        self,
        model: nn.Module,
        wanted: Mapping[str, Tensor],
        shape: Sequence[int],
        labels: Tensor | None,
        count: int,
        settings: Matching,
        generator: torch.Generator,
    ) -> None:
        like = next(iter(wanted.values()))
        self.model, self.wanted, self.settings = model, wanted, settings
        noise = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        self.images = settings.spread * noise.to(like.device)
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
        even = torch.where(sizes > 0, 1 / sizes, 0) / int((sizes > 0).sum())
        self.weights = even if settings.even else torch.ones_like(sizes) / sizes.sum()
        self.best_loss = math.inf
        self.keep(math.inf)

    def soft_labels(self) -> Tensor:
        """The labels that the loss takes: the classes given, or the soft labels as probabilities."""
        if self.labels is not None:
            return self.labels
        soft = self.variables[1]
        return soft.squeeze(-1).sigmoid() if soft.shape[-1] == 1 else soft.softmax(dim=-1)

    def distance(self) -> Tensor:
        """How far the gradients of the images are from those seen, whatever their size."""
        found = gradients(self.model, self.images, self.soft_labels(), create_graph=True)
        pairs = [(found[name], wanted) for name, wanted in self.wanted.items()]
        if self.settings.objective == "l2":
            errors = torch.stack([(one - other).square().sum() for one, other in pairs])
            return (errors * self.weights).sum()
        inner = torch.stack([(one * other).sum() for one, other in pairs]).sum()
        size = torch.stack([one.square().sum() for one, _ in pairs]).sum().sqrt()
        return 1 - inner / (size * self.size + 1e-30)

    def objective(self) -> Tensor:
        """Distance and prior, with the gradients of both left in the variables."""
        for variable in self.variables:
            variable.grad = None
        distance = self.distance()
        loss = distance + self.tv * total_variation(self.images) if self.tv else distance
        if self.settings.box is not None and self.settings.objective == "l2":
            # A line search cannot clamp; outside the box a smooth wall rises, and inside it nothing changes.
            loss = loss + (self.images - self.images.clamp(*self.settings.box)).square().mean()
        grads = torch.autograd.grad(loss, self.variables)
        for variable, grad in zip(self.variables, grads, strict=True):
            variable.grad = grad
        self.last = float(distance.detach())
        return loss.detach()

    def keep(self, loss: float) -> None:
        """Remember this point if it is the best so far."""
        if loss <= self.best_loss:
            self.best_loss, self.best_images = loss, self.images.detach().clone()
            soft = self.soft_labels().detach()
            self.best_labels = (soft.argmax(-1) if soft.ndim == 2 else soft.round().long()).cpu()

    def lbfgs(self) -> str:
        """DLG's optimiser; says why it failed, or nothing."""
        optimizer = torch.optim.LBFGS(
            self.variables, lr=1, max_iter=CHUNK, history_size=100, tolerance_grad=0, tolerance_change=0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip
        chunks = math.ceil(self.settings.steps / CHUNK)
        for chunk in range(chunks):
            if self.settings.fade:
                # The prior leads the way and leaves: the last fifth of the steps is the gradients' alone.
                done = chunk / (0.8 * chunks)
                self.tv = self.settings.tv * 10 ** (-6 * done) if done < 1 else 0.0
            else:
                self.best_loss = math.inf  # a prior that stays must be heard: the last point counts, not the nearest
            optimizer.step(lambda: float(self.objective()))  # type: ignore[no-untyped-call]
            loss = float(self.distance().detach())
            if not math.isfinite(loss):
                return f"diverged within {(chunk + 1) * CHUNK} steps"
            self.keep(loss)
            if loss < SOLVED:
                break
        return ""

    def adam(self) -> str:
        """The optimiser of Inverting Gradients; says why it failed, or nothing."""
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
    """The mean of |x_ij - x_(i+1)j| + |x_ij - x_i(j+1)|, rounded off at 0 so that it has a derivative.

    >>> round(float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))), 3)
    1.001
    """
    if images.ndim < 4:
        return images.new_zeros(())
    across, down = images.diff(dim=-1), images.diff(dim=-2)
    return (across.square() + 1e-6).sqrt().mean() + (down.square() + 1e-6).sqrt().mean()


def _matched(model: nn.Module, target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients to be matched, in float64 beside the model; all that does not fit is named at once."""
    own, buffers = parameters(model), dict(model.named_buffers())
    problems = [f"{name}: this model has no such parameter" for name in target if name not in own | buffers]
    problems += [
        f"{name}: shape {tuple(target[name].shape)} here and {tuple(own[name].shape)} in the model"
        for name in target
        if name in own and target[name].shape != own[name].shape
    ]
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
    """The labels that are fixed from the start; None where they are optimised."""
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
    return clear_label(weight, bias, count).to(device)


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """What one round showed of a dense first layer: the gradients of its weight and bias, and its sketch.

    >>> from dbcl import CountSketch
    >>> FirstLayer(torch.zeros(3, 2), torch.ones(3), CountSketch(4, 2, seed=bytes(32))).sketch
    CountSketch(4 -> 2)
    """

    weight: Tensor  # (dout, width)
    bias: Tensor  # (dout,)
    sketch: Sketch

    def inputs(self) -> Tensor:
        """x R of a single example: dV = db^T (x R D), so every row of dV with a bias gradient holds x R D."""
        weight, bias = self.weight.detach().cpu().double(), self.bias.detach().cpu().double()
        if not bias.any():
            raise ConfigError("the first layer's bias gradient is zero: no unit was active, and nothing can be read")
        return (bias @ weight) / (bias @ bias) / self.sketch.gain(weight)


def first_layer(
    rounds: Sequence[FirstLayer], shape: Sequence[int], *, box: tuple[float, float], tv: float = 1e-3, steps: int = 300
) -> Tensor:
    """Read one example off a dense first layer with bias: min over x in the box of sum_t |x R_t - y_t|^2 + tv TV(x).

    Several rounds that trained on this example alone each add equations; two rounds at ratio 2 have as many as x has
    entries. The prior's weight falls to nothing in stages, so that it only decides what the equations leave open.

    >>> import dbcl
    >>> x, delta = torch.tensor([[0.2, 0.9, 0.4]]), torch.tensor([[1.0], [2.0]])
    >>> first_layer([FirstLayer(delta @ x, delta[:, 0], dbcl.Identity(3))], (3,), box=(0, 1)).round(decimals=4)
    tensor([0.2000, 0.9000, 0.4000], dtype=torch.float64)
    """
    from scipy.optimize import Bounds, minimize  # here, so that only audits need it

    seen = [(one.sketch, one.inputs()) for one in rounds]
    low, high = box

    def objective(values: NDArray[np.float64], weight: float) -> tuple[float, NDArray[np.float64]]:
        x = torch.from_numpy(values).clone().requires_grad_()
        errors = [sketch.project(x) / sketch.gain(y) - y for sketch, y in seen]
        loss = torch.stack([error.square().sum() for error in errors]).sum()
        if weight:
            loss = loss + weight * x.numel() * total_variation(x.reshape(1, *shape))
        (grad,) = torch.autograd.grad(loss, x)
        return float(loss.detach()), grad.numpy()

    x = np.full(math.prod(shape), (low + high) / 2)
    for weight in (tv, 1e-2 * tv, 1e-4 * tv, 0.0):
        options = {"maxiter": steps, "maxfun": 2 * steps, "maxcor": 50, "ftol": 0.0, "gtol": 1e-12}
        x = minimize(objective, x, (weight,), "L-BFGS-B", jac=True, bounds=Bounds(low, high), options=options).x
    return torch.from_numpy(x).reshape(*shape)
