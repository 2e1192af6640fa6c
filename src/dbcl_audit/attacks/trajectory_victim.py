"""Simulation of a victim with given images over all rounds. Reads: tensor observations and plans."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.objective import cross_entropy
from dbcl.round_plan import RoundPlan
from dbcl.sketch import Identity, Sketch
from dbcl.transcripts import Setting
from dbcl_audit.attacks.trajectory_likelihood import TensorLikelihood, projection
from dbcl_audit.estimators.observations import TensorObservations
from dbcl_audit.estimators.smoother import known_scales

Stacks = dict[str, Tensor]
"""Values of each tensor, stacked over all rounds."""
MAX_HIDDEN_VALUES = 1_000_000
"""Maximum number of unknown noise values. With more, the noise is not estimated, because the fit
would take minutes per image.
"""


def likelihood_of(
    view: TensorObservations, setting: Setting, plans: Sequence[RoundPlan], start: Mapping[str, Tensor] | None = None
) -> TensorLikelihood:
    """Return the likelihood of a tensor's broadcasts, given the other client's gradients dL/dW_eff
    in every round.

    `plans` are the plans sent to the other client in all rounds except the last. `start` holds W_0,
    if known.
    """
    sketches = [plan.sketches.get(view.name) or Identity(view.dim) for plan in plans]
    maps = [projection(sketch, 1, -setting.local.lr / setting.cohort) for sketch in sketches]
    return TensorLikelihood(view, known_scales(view, setting.veil), (start or {}).get(view.name), maps)


class SimulatedVictim:
    """Simulation of the only other client of a run, which trains on the same images in every round.

    The gradients of all rounds are computed in one batch, at the effective weights V D R^T of the
    victim's broadcasts. In the attacker's own lane the broadcasts are known. In another lane a
    broadcast is (W + N) R with unknown noise N. W is computed from the current estimate of the
    changes (`believe`). The noise N R of the tensors in `hidden` is estimated together with the
    images. With more than `MAX_HIDDEN_VALUES` noise values, the noise is assumed to be 0. `plans`
    are the victim's plans for all rounds except the last.
    """

    def __init__(
        self,
        template: nn.Module,
        setting: Setting,
        seen: Mapping[str, TensorObservations],
        plans: Sequence[RoundPlan],
        *,
        start: Mapping[str, Tensor] | None = None,
        local_steps: int = 1,
    ) -> None:
        self.rate, self.local_steps, self.seen = setting.local.lr, local_steps, dict(seen)
        self.layouts = {part.name: part.layout for part in plans[0].tensors if part.sketched}
        self.shapes = {part.name: part.shape for part in plans[0].tensors}
        self.sketches = {name: [plan.sketches[name] for plan in plans] for name in self.layouts}
        self.likelihoods = {name: likelihood_of(view, setting, plans, start) for name, view in seen.items()}
        single = all(each.dtype == torch.float32 for each in self.likelihoods.values())
        self.dtype = torch.float32 if single else torch.float64
        self.unknown = {
            name: torch.tensor([not _shows(*pair) for pair in zip(seen[name].sketches, sketches, strict=False)])
            for name, sketches in self.sketches.items()
        }
        hidden = [name for name, rounds in self.unknown.items() if setting.veil and rounds.any()]
        numbers = sum(
            likelihood.view.seen[0].numel() * len(plans)
            for name, likelihood in self.likelihoods.items()
            if name in hidden
        )
        self.hidden = hidden if numbers <= MAX_HIDDEN_VALUES else []
        self.model = template.to(self.dtype)
        self.of_rounds = torch.func.vmap(torch.func.grad(self._loss), in_dims=(0, None, None))
        self.believe({})

    def _loss(self, weights: Stacks, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(self.model, weights, (images,)), labels)

    def believe(self, changes: Mapping[str, Tensor]) -> None:
        """Recompute the broadcasts the victim would have received, given estimated weight
        changes.
        """
        self.sent = {}
        for name, view in self.seen.items():
            likelihood = self.likelihoods[name]
            if name not in self.sketches or not self.unknown[name].any():
                sent = torch.stack([each.to(self.dtype) for each in view.seen[:-1]])
                self.sent[name] = self._effective(name, sent) if name in self.sketches else self._shaped(name, sent)
                continue
            zero = likelihood.at_zero.new_zeros(()).expand_as(likelihood.at_zero)
            guesses = []
            for t, weights in enumerate(likelihood.weights(changes.get(name, zero))[:-1]):
                mine = view.sketches[t]
                guess = weights + mine.lift(view.seen[t].to(weights) - mine.apply(weights))
                guesses.append(self.sketches[name][t].apply(guess).to(self.dtype))
            self.sent[name] = self._effective(name, _stack(guesses))

    def noise(self) -> Stacks:
        """Return zero noise for each tensor in `hidden`, in the space of V."""
        found = {}
        for name in self.hidden:
            width = max(sketch.width for sketch in self.sketches[name])
            found[name] = torch.zeros(len(self.sketches[name]), self.layouts[name].rows, width, dtype=self.dtype)
        return found

    def changes(self, images: Tensor, labels: Tensor, noise: Mapping[str, Tensor] | None = None) -> Stacks:
        """Return the summed gradients of every round, as matrices over the columns of W."""
        found = self._gradients(self.held(noise or {}), images.to(self.dtype), labels)
        return {name: self.matrices(name, found[name]) for name in self.likelihoods}

    def __call__(self, images: Tensor, labels: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Return -log p of the broadcasts given images and noise, up to a constant. Differentiable
        by autograd.
        """
        found = self._gradients(self.held(noise), images.to(self.dtype), labels)
        value = torch.zeros((), dtype=torch.float64)
        for name, likelihood in self.likelihoods.items():
            part: Tensor = _LogLikelihood.apply(self.matrices(name, found[name]), likelihood)  # type: ignore[no-untyped-call]
            value = value + part
        return value

    def held(self, noise: Mapping[str, Tensor]) -> Stacks:
        """Return the effective weights of all rounds for the given noise."""
        held = dict(self.sent)
        for name, each in noise.items():
            size = self.likelihoods[name].precision ** -0.5 * self.unknown[name].to(self.dtype)
            held[name] = held[name] + self._effective(name, size[:, None, None] * each)
        return held

    def _gradients(self, held: Stacks, images: Tensor, labels: Tensor) -> Stacks:
        """Return the sum of dL/dW_eff over the local steps, for all rounds."""
        total: Stacks = self.of_rounds(held, images, labels)
        last = total
        for _ in range(self.local_steps - 1):
            moved = {}
            for name, gradient in last.items():
                step = self.matrices(name, gradient)
                if name in self.sketches:  # a step of V moves V D R^T by as much through D R^T
                    step = torch.stack([projection(s, 2)(g) for s, g in zip(self.sketches[name], step, strict=True)])
                moved[name] = held[name] - self.rate * self._shaped(name, step)
            held = moved
            last = self.of_rounds(held, images, labels)
            total = {name: total[name] + last[name] for name in total}
        return total

    def _effective(self, name: str, compact: Tensor) -> Tensor:
        pairs = zip(self.sketches[name], compact, strict=True)
        return self._shaped(name, torch.stack([sketch.expand(V[..., : sketch.width]) for sketch, V in pairs]))

    def matrices(self, name: str, stacked: Tensor) -> Tensor:
        """Reshape the values of a tensor in all rounds to matrices."""
        layout = self.layouts.get(name)
        if layout is None or not layout.inputs:
            return stacked.reshape(len(stacked), -1, self.likelihoods[name].view.dim)
        return torch.stack([layout.matrix(each) for each in stacked])

    def _shaped(self, name: str, matrices: Tensor) -> Tensor:
        layout = self.layouts.get(name)
        if layout is None or not layout.inputs:
            return matrices.reshape(len(matrices), *self.shapes[name])
        return torch.stack([layout.weight(each) for each in matrices])


class _LogLikelihood(torch.autograd.Function):
    """Negative log-likelihood of a tensor as a function of its changes, with its gradient."""

    @staticmethod
    def forward(ctx: Any, changes: Tensor, likelihood: TensorLikelihood) -> Tensor:
        value, slope = likelihood(changes.detach().to(likelihood.dtype))
        ctx.slope = slope.to(changes.dtype)
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.slope * gradient.to(ctx.slope.dtype), None


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """Stack matrices of different widths, padded with zeros."""
    width = max(each.shape[-1] for each in matrices)
    return torch.stack([torch.nn.functional.pad(each, (0, width - each.shape[-1])) for each in matrices])


def _shows(held: Sketch, asked: Sketch) -> bool:
    """Return True if `held` preserves the range of `asked`."""
    probe = asked.lift(torch.linspace(1, 2, asked.width, dtype=torch.float64))
    return bool(torch.allclose(held.lift(held.apply(probe)), probe))
