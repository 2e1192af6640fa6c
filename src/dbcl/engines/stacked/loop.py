"""Training loop: local SGD for all clients of a chunk."""

import torch
from torch import Tensor

from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.stacked.dropout import DropoutMasks, client_masks
from dbcl.engines.stacked.path import Stack
from dbcl.engines.stacked.schedule import Schedule
from dbcl.engines.training import LocalTraining
from dbcl.errors import ConfigError


class TrainingLoop:
    """Local SGD for all clients of a chunk, with the tensors of all steps.

    All values that change between steps or rounds are stored in tensors that can be overwritten, so
    that `CudaGraphLoop` can capture the step once and replay it.
    """

    def __init__(
        self,
        stack: Stack,
        training: LocalTraining,
        rate: float,
        params: Params,
        x: Tensor,
        y: Tensor,
        schedule: Schedule,
    ) -> None:
        if training.example_clip is not None and not stack.clips_examples(training):
            raise ConfigError(f"{type(stack).__name__} does not clip the gradients of single examples")
        self.stack, self.training, self.params, self.x = stack, training, params, x
        self.clients, self.padded = schedule.clients, schedule.padded
        like = next(iter(params.values()))  # not x, which may be integers, such as words
        self.rate = like.new_tensor(rate)
        in_backward = stack.can_step_in_backward(training)
        self.dummy_leaf = like.new_zeros((), requires_grad=True) if in_backward else None
        self.trained = stack.trained_names(step_in_backward=in_backward)
        self.proximal_centre = {name: params[name].clone() for name in self.trained} if training.proximal else {}
        self.momentum = {name: torch.zeros_like(params[name]) for name in self.trained} if training.momentum else {}
        self.rows = schedule.index.flatten(1).to(x.device)  # (steps, clients * batch)
        self.labels = y[schedule.index.to(x.device)]  # (steps, clients, batch)
        self.weight = schedule.weight.to(like)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return the examples of one step, (clients, batch, ...)."""
        return self.x.index_select(0, rows).view(self.clients, -1, *self.x.shape[1:])

    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor, dropout_masks: DropoutMasks) -> Tensor:
        """Perform one step for every client; return the losses before the step."""
        training = self.training
        batch = Batch(self.clients, weight, dropout_masks, self.rate, self.dummy_leaf, training.example_clip)
        losses, grads = self.stack.gradients(self.params, inputs, labels, batch)
        active = (weight.amax(dim=1) > 0).to(weight.dtype) if self.padded else None
        with torch.no_grad():
            for name, grad in zip(self.trained, grads, strict=True):
                parameter = self.params[name]
                if training.proximal:
                    grad = grad + (parameter - self.proximal_centre[name]) * (self.rate * training.proximal)
                if training.momentum:
                    grad = self.momentum[name].mul_(training.momentum).add_(grad)
                if active is not None:
                    # A client without examples in this step has taken all of its steps: momentum must not move it.
                    grad = grad * active.view(-1, *(1,) * (grad.ndim - 1))
                parameter.sub_(grad)
        return losses

    def run(self, schedule: Schedule, dropout_seeds: list[int]) -> Tensor:
        """Perform all steps; return the losses, (steps, clients)."""
        masks = client_masks(schedule.counts, schedule.width, dropout_seeds, self.weight)
        inputs = (
            self.x.view(*schedule.index.shape, *self.x.shape[1:])
            if schedule.sequential
            else map(self.inputs, self.rows)
        )
        steps = zip(inputs, self.labels, self.weight, map(masks, range(schedule.steps)), strict=True)
        return torch.stack([self.step(*each) for each in steps])
