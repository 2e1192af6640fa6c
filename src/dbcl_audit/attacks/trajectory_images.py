"""Recovery of images on which the victim trains in every round, by maximum likelihood over all
rounds.

Reads: client-0 and its allies; server, for the victim's plan.

The images x are the parameters of one regression over all observations. In round t the attacker
observes V_t = W_t R_t + tau Z_t with W_t = W_0 + S_t(x). S_t(x) consists of the attacker's known
updates and the victim's updates, which are the gradients of x at the victim's broadcasts. W_0 is
marginalised, and noise averages out over the rounds.

Longer than 350 lines, because both fits (dense layer, simulated victim) share one optimiser.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from dbcl.data import Dataset
from dbcl.errors import AuditError, ConfigError
from dbcl.round_plan import RoundPlan
from dbcl.transcripts import Setting
from dbcl_audit import image_quality
from dbcl_audit.attacks.images import Attack, recovered_image_findings
from dbcl_audit.attacks.labels import labels_of_gradient
from dbcl_audit.attacks.matching import Recovered
from dbcl_audit.attacks.trajectory_first_layer import FirstLayerLikelihood
from dbcl_audit.attacks.trajectory_likelihood import TensorLikelihood
from dbcl_audit.attacks.trajectory_victim import SimulatedVictim, likelihood_of
from dbcl_audit.context import OnProgress
from dbcl_audit.estimators.observations import TensorObservations, tensor_observations
from dbcl_audit.findings import Finding
from dbcl_audit.simulated_run import VICTIM, SimulatedRun

Array = NDArray[np.float64]
OnStep = Callable[[], None]
Limit = float | None
FIT_STAGES = 3
"""Number of stages of a fit. After each stage, the victim's broadcasts are recomputed from the
current images.
"""
SIZE_KNOWN = 0.02
"""Standard deviation of the logarithm of an image's norm during a fit."""


@dataclass(frozen=True)
class TrajectoryMatching:
    """Settings of fitting images to a trajectory by L-BFGS with bounds.

    Args:
        steps: iterations of the fit.
        starts: number of initial points.
        trial: iterations for each initial point, before the most likely point is continued.
        tv: weight of the Laplacian prior with a dense first layer: the sum of absolute differences
            of neighbouring pixels, scaled to [0, 1], is multiplied by `tv` and added to -log p.
        simulated_tv: weight of the same prior if the victim is simulated.
        candidates: number of labels to try if labels are unknown and the victim is simulated. The
            output layer's bias determines the most likely labels.
        local_steps: SGD steps of the simulated victim per round, each on all its images.

    >>> TrajectoryMatching(steps=40).tv
    6.0
    """

    steps: int = 60
    starts: int = 3
    trial: int = 12
    tv: float = 6.0
    simulated_tv: float = 2.0
    candidates: int = 2
    local_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "starts", "trial", "candidates", "local_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("tv", "simulated_tv"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")


class VictimsTrajectory(NamedTuple):
    """Input of a fit: the attacker's observations, own images and labels, and the plans of the
    victim's broadcasts.
    """

    template: nn.Module
    setting: Setting
    seen: dict[str, TensorObservations]
    plans: list[RoundPlan]  # of all rounds but the last
    box: tuple[float, float]
    own: Tensor  # images of the attacker's own
    own_labels: Tensor


def trajectory_of(simulated: SimulatedRun, dataset: Dataset) -> VictimsTrajectory:
    """Return the input of a fit from a simulated run whose cohort is the attacker, or colluders,
    and one victim.
    """
    attackers = simulated.colluders or (0,)
    setting = simulated.attacker.setting
    if setting.cohort != len(attackers) + 1:
        raise AuditError(
            f"{setting.cohort} clients a round, {len(attackers)} of them attackers: the fit takes one more client"
        )
    seen = tensor_observations(simulated.attacker, allies=simulated.allies)
    plans = [simulated.server[round].answered(str(VICTIM)).plan for round in simulated.attacker.rounds[:-1]]
    rows = torch.from_numpy(np.unique(simulated.script[:, list(attackers)]))
    own, own_labels = dataset.x_train[rows].double(), dataset.y_train[rows]
    return VictimsTrajectory(
        simulated.attacker.template(), setting, seen, plans, image_quality.span(dataset), own, own_labels
    )


def fit_images(
    trajectory: VictimsTrajectory,
    *,
    count: int = 1,
    labels: Tensor | None = None,
    start: Mapping[str, Tensor] | None = None,
    settings: TrajectoryMatching | None = None,
    seed: int = 0,
    on_step: OnStep = lambda: None,
) -> Recovered:
    """Find the `count` images that maximise the likelihood of the observations.

    For one image and a dense first layer, this layer alone determines the image
    (`trajectory_first_layer.py`). Several images would be determined only up to linear mixtures.
    For several images or other first layers, the victim is simulated (`trajectory_victim.py`).

    Args:
        trajectory: input of the fit.
        count: number of images.
        labels: labels of the images, if known.
        start: initial weights W_0, if known.
        settings: settings of the fit.
        seed: seed of the initial points.
        on_step: called after every iteration.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl import data
    >>> digits = data.load("digits")
    >>> played = example_batches("blind", rounds=4, fixed=True, model="dlg-lenet", lr=0.1)
    >>> found = fit_images(trajectory_of(played, digits), settings=TrajectoryMatching(steps=3, trial=1))
    >>> found.images.shape, found.labels.shape
    (torch.Size([1, 1, 28, 28]), torch.Size([1]))
    """
    settings, began = settings or TrajectoryMatching(), perf_counter()
    generator = torch.Generator().manual_seed(seed)
    kind = _DenseFit if count == 1 and _dense_first_layer(trajectory) else _SimulatedFit
    best = kind(trajectory, start, settings, on_step).best(count, labels, generator)
    return Recovered(best.images, best.labels, best.value, (best.value,), (), perf_counter() - began)


class _Point(NamedTuple):
    """State of a fit: -log p including the prior, the images, the labels, and all other
    variables.
    """

    value: float
    images: Tensor  # (count, *shape)
    labels: Tensor
    rest: Array


class _Fit:
    """Base class of both fits: optimises images and further variables by L-BFGS with bounds."""

    def __init__(self, trajectory: VictimsTrajectory, settings: TrajectoryMatching, on_step: OnStep) -> None:
        self.trajectory, self.settings, self.on_step = trajectory, settings, on_step
        names = [name for name in trajectory.seen if name.endswith("bias")]
        self.output_bias = names[-1] if names else None

    def label_scores(self, sizes: Tensor, likelihood: TensorLikelihood) -> Tensor:  # (rounds,) -> (classes,)
        """Return the derivative of -log p by the output bias of each class, weighted by the delta
        size of each round.
        """
        return (sizes[:, None] * likelihood.at_zero[:, 0].double()).sum(dim=0)

    def minimized(
        self, objective: Callable[[Tensor, Tensor], Tensor], point: _Point, bounds: tuple[Limit, Limit], steps: int
    ) -> _Point:
        """Run L-BFGS from a point. `bounds` apply to the variables other than the images."""
        shape, inside = point.images.shape, point.images.numel()

        def of_values(values: Array) -> tuple[float, Array]:
            vector = torch.from_numpy(values.copy()).requires_grad_()
            value = objective(vector[:inside].reshape(shape), vector[inside:])
            (slope,) = torch.autograd.grad(value, vector)
            return float(value.detach()), slope.numpy()

        best = minimize(
            of_values,
            np.concatenate([point.images.flatten().numpy(), point.rest]),
            method="L-BFGS-B",
            jac=True,
            bounds=[self.trajectory.box] * inside + [bounds] * len(point.rest),
            options={"maxiter": steps, "maxfun": 3 * steps, "maxcor": 20},
            callback=lambda _: self.on_step(),
        )
        images = torch.from_numpy(best.x[:inside].copy()).reshape(shape)
        return point._replace(value=float(best.fun), images=images, rest=best.x[inside:])


class _DenseFit(_Fit):
    """Fit with a dense first layer. The other variables are the logarithms of the delta sizes, one
    per round.

    The layer hardly determines brightness: a darker image with larger deltas is equally likely, and
    lets noise stay inside the box. The norm of the image is therefore fixed to that of the
    attacker's own images until `_stretched` scales the image.
    """

    def __init__(
        self,
        trajectory: VictimsTrajectory,
        start: Mapping[str, Tensor] | None,
        settings: TrajectoryMatching,
        on_step: OnStep,
    ) -> None:
        super().__init__(trajectory, settings, on_step)
        layer = trajectory.plans[0].tensors[0].name.removesuffix("weight")
        names = {f"{layer}weight", f"{layer}bias", self.output_bias or f"{layer}bias"}
        made = {
            name: likelihood_of(trajectory.seen[name], trajectory.setting, trajectory.plans, start) for name in names
        }
        self.likelihood = FirstLayerLikelihood(made[f"{layer}weight"], made[f"{layer}bias"])
        self.of_output = made[self.output_bias or f"{layer}bias"]
        self.typical = _log_size(trajectory.own).mean()

    def best(self, count: int, labels: Tensor | None, generator: torch.Generator) -> _Point:
        """Return the most likely point: fit from several initial points, continue the best, stretch
        the images and fit again.
        """
        size, unknown = self.typical.expand(count), torch.zeros(count, dtype=torch.long)
        tried = []
        for images in self._starts(count, self.settings.starts, generator):
            rest = min(np.arange(-6.0, 0.0), key=lambda each: self._likeliness(images, each))
            begun = _Point(math.inf, images, unknown, np.full(self.likelihood.rounds, rest))
            tried.append(self._fitted(begun, size, self.settings.trial))
        best = self._fitted(min(tried, key=lambda point: point.value), size, self.settings.steps)
        images = self._stretched(best.images)
        best = self._fitted(best._replace(images=images), _log_size(images), max(1, self.settings.steps // 2))
        scores = self.label_scores(torch.from_numpy(np.exp(best.rest)), self.of_output)
        guessed = scores.topk(min(count, len(scores))).indices.repeat(-(-count // len(scores)))[:count]
        return best._replace(labels=guessed if labels is None else labels)

    def _starts(self, count: int, starts: int, generator: torch.Generator) -> list[Tensor]:
        """Return initial images: the mean of the attacker's own images, then averages of this mean
        and single images.
        """
        own, found = self.trajectory.own, list[Tensor]()
        mean = own.mean(dim=0, keepdim=True).repeat(count, *(1 for _ in self.trajectory.setting.shape))
        for number in range(starts):
            single = own[torch.randint(len(own), (count,), generator=generator)]
            found.append(mean if number == 0 and count == 1 else (mean + single) / 2)
        return found

    def _likeliness(self, images: Tensor, size: float) -> float:
        with torch.no_grad():
            sizes = torch.full((self.likelihood.rounds,), math.exp(size), dtype=torch.float64)
            return float(self.likelihood(images.flatten(1), sizes))

    def _fitted(self, point: _Point, size: Tensor, steps: int) -> _Point:
        def objective(images: Tensor, rest: Tensor) -> Tensor:
            off = _log_size(images) - size
            prior = self.settings.tv * variation(images, self.trajectory.box) / off.exp() + (off / SIZE_KNOWN) ** 2 / 2
            return self.likelihood(images.flatten(1), rest.exp()) + prior.sum() + (rest + 3).square().sum() / 200

        return self.minimized(objective, point, (-12.0, 3.0), steps)

    def _stretched(self, images: Tensor) -> Tensor:
        """Scale images to fill the box, ignoring the darkest 10 % and the brightest 1 % of the
        pixels.
        """
        low, high = self.trajectory.box
        darkest, brightest = (images.flatten(1).quantile(part, dim=1) for part in (0.1, 0.99))
        times = torch.minimum(
            torch.where(darkest < 0, low / darkest, math.inf), torch.where(brightest > 0, high / brightest, math.inf)
        )
        return (images * times.clamp(1, 2).reshape(-1, 1, 1, 1)).clamp(low, high)


class _SimulatedFit(_Fit):
    """Fit by simulating the victim. The other variables are the noise of the victim's broadcasts,
    if unknown.
    """

    def __init__(
        self,
        trajectory: VictimsTrajectory,
        start: Mapping[str, Tensor] | None,
        settings: TrajectoryMatching,
        on_step: OnStep,
    ) -> None:
        super().__init__(trajectory, settings, on_step)
        template, setting, seen, plans, *_ = trajectory
        self.victim = SimulatedVictim(template, setting, seen, plans, start=start, local_steps=settings.local_steps)

    def best(self, count: int, labels: Tensor | None, generator: torch.Generator) -> _Point:
        """Choose the most likely labels after a short fit each, then fit in stages with improved
        estimates of W.
        """
        rest = np.zeros(sum(each.numel() for each in self.victim.noise().values()))
        asked = self._candidates(count) if labels is None else [labels]
        points = [_Point(math.inf, self._start(each, generator), each, rest) for each in asked]
        if len(points) > 1:
            points = [self._fitted(point, self.settings.trial) for point in points]
        best = min(points, key=lambda point: point.value)
        for _ in range(FIT_STAGES):
            best = self._fitted(best, -(-self.settings.steps // FIT_STAGES))
            self.victim.believe(self.victim.changes(best.images, best.labels, self._noise(torch.from_numpy(best.rest))))
        return best

    def _start(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return the mean of the attacker's own images of each label. With several labels, average
        each mean with a random image.
        """
        own, found = self.trajectory.own, list[Tensor]()
        for label in labels:
            alike = own[self.trajectory.own_labels == label]
            alike = alike if len(alike) else own
            single = alike[torch.randint(len(alike), (), generator=generator)]
            found.append(alike.mean(dim=0) if len(labels) == 1 else (alike.mean(dim=0) + single) / 2)
        return torch.stack(found)

    def _candidates(self, count: int) -> list[Tensor]:
        """Return the most likely labels according to the output layer's bias: several candidates
        for one image, a single candidate for more images.
        """
        if self.output_bias is None:
            raise AuditError("labels cannot be guessed without a bias of the output layer: give them")
        likelihood = self.victim.likelihoods[self.output_bias]
        scores = self.label_scores(torch.ones(len(likelihood.at_zero), dtype=torch.float64), likelihood)
        if count == 1:
            return list(scores.topk(min(self.settings.candidates, len(scores))).indices.reshape(-1, 1))
        return [labels_of_gradient(None, -scores, count)]

    def _noise(self, rest: Tensor) -> dict[str, Tensor]:
        empty = self.victim.noise()
        parts = torch.split(rest, [each.numel() for each in empty.values()]) if empty else ()
        return {
            name: part.reshape(each.shape).to(each) for (name, each), part in zip(empty.items(), parts, strict=True)
        }

    def _fitted(self, point: _Point, steps: int) -> _Point:
        def objective(images: Tensor, rest: Tensor) -> Tensor:
            likeliness = self.victim(images, point.labels, self._noise(rest))
            prior = self.settings.simulated_tv * variation(images, self.trajectory.box).sum()
            return likeliness + prior + rest.square().sum() / 2

        return self.minimized(objective, point, (None, None), steps)


def variation(images: Tensor, box: tuple[float, float]) -> Tensor:
    """Sum of |x_ij - x_(i+1)j| + |x_ij - x_i(j+1)| for each image, with pixels scaled to [0, 1] and
    smoothed at 0.

    >>> variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]), (0.0, 1.0)).round(decimals=2)
    tensor([2.])
    """
    across, down = images.diff(dim=-1), images.diff(dim=-2)
    rough = sum((each.square() + 1e-6).sqrt().flatten(1).sum(dim=1) for each in (across, down))
    assert isinstance(rough, Tensor)
    return rough / (box[1] - box[0])


def _log_size(images: Tensor) -> Tensor:
    """Return the logarithm of the root mean square of each image's pixels."""
    return images.flatten(1).square().mean(dim=1).clamp(min=1e-12).log() / 2


def _dense_first_layer(trajectory: VictimsTrajectory) -> bool:
    first, *_ = tensors = trajectory.plans[0].tensors
    whole = len(first.shape) == 2 and first.shape[1] == math.prod(trajectory.setting.shape)
    return whole and any(part.name == first.name.removesuffix("weight") + "bias" for part in tensors)


def trajectory_image_findings(
    simulated_runs: Sequence[SimulatedRun],
    dataset: Dataset,
    settings: TrajectoryMatching | None = None,
    *,
    tell: OnProgress = lambda text: None,
    step: OnStep = lambda: None,
) -> list[Finding]:
    """Recover the victim's images in several simulated runs in which the victim has the same batch
    in every round.

    `step` is called after every iteration of a fit.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl import data
    >>> digits = data.load("digits")
    >>> played = example_batches("blind", rounds=4, fixed=True, model="dlg-lenet", lr=0.1)
    >>> few = TrajectoryMatching(steps=3, trial=1)
    >>> [finding.measure for finding in trajectory_image_findings([played], digits, few)]
    ['psnr', 'ssim', 'share above 20 dB', 'accuracy']
    """
    results, victims, adversary = list[Recovered | str](), list[int](), simulated_runs[0].adversary
    for number, simulated in enumerate(simulated_runs):
        tell(f"images, {adversary}, all rounds together: {number + 1} of {len(simulated_runs)}")
        rows = simulated.script[0, VICTIM]
        victims += rows.tolist()
        try:
            found = fit_images(
                trajectory_of(simulated, dataset), count=len(rows), settings=settings, seed=number, on_step=step
            )
        except (AuditError, ConfigError, RuntimeError) as error:
            results += [str(error).split("\n")[0]] * len(rows)
            continue
        results += _paired(found, dataset.x_train[torch.from_numpy(rows)].double(), image_quality.span(dataset))
    attack = Attack("fitting images to all rounds", adversary, "adaptive")
    note = "the victim trains on the same images in every round"
    findings = recovered_image_findings(attack, results, dataset, torch.tensor(victims))
    return [replace(each, note=f"{note}; {each.note}" if each.note else note) for each in findings]


def _paired(found: Recovered, truth: Tensor, span: image_quality.Span) -> list[Recovered | str]:
    """Split jointly recovered images into single results, in the order of the true images that they
    are paired with.
    """
    ordered = image_quality.pair(found.images, truth, span)
    places = [next(n for n, each in enumerate(found.images) if torch.equal(each, image)) for image in ordered]
    share = found.seconds / len(places)
    return [
        replace(found, images=found.images[n : n + 1], labels=found.labels[n : n + 1], seconds=share) for n in places
    ]
