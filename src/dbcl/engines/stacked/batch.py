"""State of one step of all clients that the layers need beside parameters and examples."""

from dataclasses import dataclass

from torch import Tensor

from dbcl.engines.stacked.dropout import DropoutMasks

Params = dict[str, Tensor]
"""Parameters by name, each with a leading client axis."""


@dataclass
class Batch:
    """One step's number of clients, weights of the examples, dropout masks and learning rate.

    `weight` is (clients, batch): 1 / n for the n examples of a client's batch and 0 for padding. `rate` is a tensor,
    and all gradients come multiplied by it, so that a captured CUDA graph serves every learning rate.

    Plain SGD can happen inside the backward pass, where a weight's gradient is never written to memory. It does so if
    `dummy_leaf` is given: a leaf that requires grad, so that autograd calls the backward pass of a layer whose input
    and weights do not require grad.
    """

    clients: int
    weight: Tensor
    dropout_masks: DropoutMasks
    rate: Tensor
    dummy_leaf: Tensor | None = None
    example_clip: float | None = None
    """Norm to which every example's gradient is clipped; a step then follows their sum, not their mean."""

    @property
    def step_in_backward(self) -> bool:
        return self.dummy_leaf is not None
