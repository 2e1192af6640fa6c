"""Per-step state of all clients that layers need in addition to parameters and inputs."""

from dataclasses import dataclass

from torch import Tensor

from dbcl.engines.stacked.dropout import DropoutMasks

Params = dict[str, Tensor]
"""Parameters by name, with a leading client axis."""


@dataclass
class Batch:
    """State of one step: number of clients, example weights, dropout masks and learning rate.

    `weight` has shape (clients, batch), with 1 / n for the n examples of a client's batch and 0 for
    padding. `rate` is a tensor, and all gradients are multiplied by it, so that a captured CUDA
    graph works for every learning rate.

    Plain SGD can update weights inside the backward pass without writing their gradients to memory.
    This mode is active if `dummy_leaf` is given. The dummy leaf requires grad, so that autograd
    calls the backward pass of a layer whose input and weights do not.
    """

    clients: int
    weight: Tensor
    dropout_masks: DropoutMasks
    rate: Tensor
    dummy_leaf: Tensor | None = None
    example_clip: float | None = None
    """Clipping norm of every example's gradient. If set, a step follows the sum of the clipped
    gradients instead of the mean.
    """

    @property
    def step_in_backward(self) -> bool:
        return self.dummy_leaf is not None
