"""Interface of a path: a client's network with a client axis, for the training loop."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from dbcl.engines.stacked.batch import Batch, Params
from dbcl.engines.training import LocalTraining
from dbcl.objective import cross_entropies
from dbcl.protocol import Broadcast

MAX_CHUNK = 10
"""On a CPU, more clients than this in a chunk gain nothing."""


class Stack:
    """A network with a client axis: `StageStack` where it is a plain sequence of layers, else `VmapStack`."""

    def clips_examples(self, training: LocalTraining) -> bool:
        """Return whether `gradients` clips every example's gradient; a path that does not say so is not used for it."""
        return False

    def fits(self, broadcast: Broadcast) -> bool:
        """Return whether the stack can be used for this broadcast, or must be built again."""
        raise NotImplementedError

    def shares(self, broadcast: Broadcast) -> object:
        """Clients whose broadcasts have this in common can be in one chunk."""
        raise NotImplementedError

    def load(self, sent: Sequence[Broadcast]) -> None:
        """Take the sketches and tensors that the clients of a chunk were sent."""
        raise NotImplementedError

    def start(self) -> Params:
        """A copy of what each client of the chunk was sent, with a client axis."""
        raise NotImplementedError

    def trained_names(self, *, step_in_backward: bool) -> list[str]:
        """The names that the training loop changes: not buffers, nor what takes its step in the backward pass."""
        raise NotImplementedError

    def can_step_in_backward(self, training: LocalTraining) -> bool:
        """Return whether SGD steps happen inside the backward pass: for plain SGD, on paths that can do it."""
        return False

    def examples(self, x: Tensor, rows: Tensor, clients: Tensor) -> Tensor:
        """These rows of the data, as the first layer wants them; `clients` says whose each is, by its place."""
        return x.index_select(0, rows)

    def gradients(self, params: Params, x: Tensor, y: Tensor, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss of every client, and `batch.rate` times the gradients of the `trained_names`, in their order."""
        raise NotImplementedError

    def check(self, counts: Tensor) -> None:
        """Refuse steps that plain PyTorch refuses; `counts`, (steps, clients): how many examples each batch had."""

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
    """`cross_entropy` of every client: the mean over the examples of its batch that count."""
    each = cross_entropies(logits.flatten(0, 1), y.flatten())
    return (each.view(weight.shape) * weight).sum(dim=1)
