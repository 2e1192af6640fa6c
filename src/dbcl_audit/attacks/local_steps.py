"""Differentiable replay of a client's local training with several SGD steps."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.model.parametrization import plan_name
from dbcl.objective import cross_entropy


@dataclass(frozen=True)
class LocalSteps:
    """Local training of a client in one round.

    The true order of the examples is unknown to the attacker, and `from_training` assumes an order.
    The order has no effect if all examples fit into one batch.

    Args:
        rate: learning rate.
        batches: indices of the examples in the batch of each step.
        momentum: momentum, as in `LocalTraining`.
        proximal: weight of the proximal term, as in `LocalTraining`.

    >>> LocalSteps.from_training(LocalTraining(lr=0.1, batch_size=2, epochs=2), examples=3)
    LocalSteps(rate=0.1, batches=((0, 1), (2,), (0, 1), (2,)), momentum=0.0, proximal=0.0)
    """

    rate: float
    batches: tuple[tuple[int, ...], ...]
    momentum: float = 0.0
    proximal: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"rate must be above 0, got {self.rate}")
        if not self.batches or not all(self.batches):
            raise ConfigError("there must be 1 or more batches of 1 or more examples each")

    @staticmethod
    def from_training(training: LocalTraining, examples: int, round: int = 0) -> "LocalSteps":
        """Return the steps of a client with `examples` examples, taken in the order 0, 1, 2, ... in
        every epoch.
        """
        if not training.is_sgd or training.example_clip is not None:
            raise ConfigError(
                "only the steps of SGD without clipping are replayed; other updates are read as a gradient"
            )
        each = [
            tuple(range(start, min(start + training.batch_size, examples)))
            for start in range(0, examples, training.batch_size)
        ]
        batches = tuple(each * training.epochs)[: training.steps]
        return LocalSteps(training.rate(round), batches, training.momentum, training.proximal)

    def mean_gradient(self, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Replay the steps and return the scaled change -(V_end - V_sent) / (rate * steps), as
        `as_gradient` does.

        The result is differentiable through all steps with respect to the images and to soft
        labels.

        >>> from dbcl_audit.attacks.gradients import gradients
        >>> model, x, y = nn.Linear(3, 2), torch.ones(1, 3), torch.tensor([1])
        >>> one, two = LocalSteps(0.1, ((0,),)), LocalSteps(0.1, ((0,), (0,)))
        >>> torch.allclose(one.mean_gradient(model, x, y)["weight"], gradients(model, x, y)["weight"])
        True
        >>> bool(two.mean_gradient(model, x, y)["bias"][0] < gradients(model, x, y)["bias"][0])  # a better fit, then
        True
        """
        sent = {full: p.detach().requires_grad_() for full, p in model.named_parameters() if p.requires_grad}
        now = sent
        velocity: dict[str, Tensor] = {}
        for batch in self.batches:
            rows = list(batch)
            value = cross_entropy(torch.func.functional_call(model, now, (images[rows],)), labels[rows])
            grads = torch.autograd.grad(value, list(now.values()), create_graph=True)
            step = dict(zip(now, grads, strict=True))
            if self.proximal:
                step = {full: g + self.proximal * (now[full] - sent[full]) for full, g in step.items()}
            if self.momentum:
                velocity = {full: self.momentum * velocity[full] + g if velocity else g for full, g in step.items()}
                step = velocity
            now = {full: now[full] - self.rate * g for full, g in step.items()}
        scale = -1 / (self.rate * len(self.batches))
        frozen = {plan_name(full): torch.zeros_like(p) for full, p in model.named_parameters() if full not in sent}
        return {plan_name(full): scale * (now[full] - tensor) for full, tensor in sent.items()} | frozen
