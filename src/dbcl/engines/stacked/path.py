"""Interface of a path: a client's network with a client axis, for the training loop."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.training import LocalTraining
from dbcl.objective import cross_entropies
from dbcl.protocol import Broadcast

MAX_CHUNK = 10
"""Number of clients of a chunk on a CPU above which nothing is gained."""


class Stack:
    """Network with a client axis: `StageStack` for a plain sequence of layers, else `VmapStack`."""

    def clips_examples(self, training: LocalTraining) -> bool:
        """Return whether `gradients` clips every example's gradient; a path that does not say so is not used for it."""
        return False

    def fits(self, broadcast: Broadcast) -> bool:
        """Return whether the stack can be used for this broadcast, or must be built again."""
        raise NotImplementedError

    def shares(self, broadcast: Broadcast) -> object:
        """Return a key of a broadcast; clients whose broadcasts have the same key can be in one chunk."""
        raise NotImplementedError

    def load(self, sent: Sequence[Broadcast]) -> None:
        """Load the sketches and tensors that the clients of a chunk were sent."""
        raise NotImplementedError

    def start(self) -> Params:
        """Return a copy of the tensors that each client of the chunk was sent, with a client axis."""
        raise NotImplementedError

    def trained_names(self, *, step_in_backward: bool) -> list[str]:
        """Names of the tensors that the loop updates: not buffers, nor parameters that take their step in the backward
        pass.
        """
        raise NotImplementedError

    def can_step_in_backward(self, training: LocalTraining) -> bool:
        """Return whether SGD steps happen inside the backward pass: for plain SGD, on paths that can do it."""
        return False

    def examples(self, x: Tensor, rows: Tensor, clients: Tensor) -> Tensor:
        """Return these rows of the data as the first layer expects them; `clients` has the client of each row, by its
        place.
        """
        return x.index_select(0, rows)

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of every client, and `batch.rate` times the gradients of the `trained_names`, in order."""
        raise NotImplementedError

    def check(self, counts: Tensor) -> None:
        """Raise the errors of plain PyTorch for these steps; `counts`, (steps, clients), are the batch sizes."""

    def changes(self, params: Params, steps: Tensor) -> Params:
        """Return the change of every tensor of the plan, in the dtype in which it was sent; for statistics their
        values.

        `steps` is how many steps each client took.
        """
        raise NotImplementedError

    def chunk_size(self, training: LocalTraining, sent: Mapping[int, Broadcast]) -> int:
        """Return the number of clients with this broadcast that are best trained together."""
        raise NotImplementedError


def weighted_losses(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:  # (c, b, k), (c, b), (c, b) -> (c,)
    """Return the `cross_entropy` of every client: the mean over the examples of its batch that count."""
    each = cross_entropies(logits.flatten(0, 1), y.flatten())
    return (each.view(weight.shape) * weight).sum(dim=1)
