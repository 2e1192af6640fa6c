"""Interface of a training path: a network with a client axis."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.training import LocalTraining
from dbcl.objective import cross_entropies
from dbcl.protocol import Broadcast

MAX_CHUNK = 10
"""Maximum number of clients in a chunk on a CPU. Larger chunks are not faster."""


class Stack:
    """Network with a client axis: `StageStack` for a sequence of supported layers, otherwise
    `VmapStack`.
    """

    def clips_examples(self, training: LocalTraining) -> bool:
        """Return whether `gradients` clips per-example gradients. Paths that return False are not
        used for it.
        """
        return False

    def fits(self, broadcast: Broadcast) -> bool:
        """Return whether the stack supports this broadcast. Otherwise it must be rebuilt."""
        raise NotImplementedError

    def shares(self, broadcast: Broadcast) -> object:
        """Return a key of a broadcast. Clients whose broadcasts have equal keys can share a chunk."""
        raise NotImplementedError

    def load(self, sent: Sequence[Broadcast]) -> None:
        """Load the sketches and tensors of the broadcasts to a chunk's clients."""
        raise NotImplementedError

    def start(self) -> Params:
        """Return a copy of the broadcast tensors of the chunk's clients, with a client axis."""
        raise NotImplementedError

    def trained_names(self, *, step_in_backward: bool) -> list[str]:
        """Return the names of the tensors that the loop updates.

        Excludes buffers, and parameters that are updated in the backward pass.
        """
        raise NotImplementedError

    def can_step_in_backward(self, training: LocalTraining) -> bool:
        """Return whether SGD steps run inside the backward pass: for plain SGD, on paths with
        support for it.
        """
        return False

    def examples(self, x: Tensor, rows: Tensor, clients: Tensor) -> Tensor:
        """Return data rows in the format of the first layer's input.

        Args:
            x: The data.
            rows: Row indices.
            clients: Index, within the chunk, of each row's client.
        """
        return x.index_select(0, rows)

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of every client, and the gradients of the `trained_names` multiplied by
        `batch.rate`.
        """
        raise NotImplementedError

    def check(self, counts: Tensor) -> None:
        """Raise the errors that plain PyTorch would raise for these steps.

        Args:
            counts: Batch sizes, (steps, clients).
        """

    def changes(self, params: Params, steps: Tensor) -> Params:
        """Return the change of every tensor of the plan in its broadcast dtype; for statistics,
        their values.

        Args:
            params: Parameters after training.
            steps: Number of steps of each client.
        """
        raise NotImplementedError

    def chunk_size(self, training: LocalTraining, sent: Mapping[int, Broadcast]) -> int:
        """Return the optimal number of clients to train together."""
        raise NotImplementedError


def weighted_losses(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:  # (c, b, k), (c, b), (c, b) -> (c,)
    """Return the `cross_entropy` of every client: the mean over its batch, excluding padding."""
    each = cross_entropies(logits.flatten(0, 1), y.flatten())
    return (each.view(weight.shape) * weight).sum(dim=1)
