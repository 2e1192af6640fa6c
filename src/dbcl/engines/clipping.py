"""Per-example clipping: every example's gradient is scaled to a bound before it is added to the others.

A guarantee for one example rests on this step, so there is one implementation for any model, `clipped_sum`. A faster
path may compute the norms in its own way, where it can; it takes the factors from `clip_factors` all the same.
"""

from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.data.examples import Batch
from dbcl.data.trees import Tree, call_with, map_tensors, tensors
from dbcl.errors import ConfigError
from dbcl.objective import Loss

CHUNK = 64
"""Number of examples whose gradients are in memory at a time."""
SMALLEST_NORM = 1e-30

Gradients = dict[str, Tensor]


def clip_factors(squared_norms: Tensor, clip: float) -> Tensor:
    """Return the factor min(1, clip / norm) of each example's gradient, from the squared norms.

    An example whose gradient is not finite gets 0: it must not take the others' gradients with it.

    >>> clip_factors(torch.tensor([4.0, 0.25, float("nan"), float("inf")]), clip=1.0)
    tensor([0.5000, 1.0000, 0.0000, 0.0000])
    """
    return (clip / squared_norms.sqrt().clamp(min=SMALLEST_NORM)).clamp(max=1.0).nan_to_num(0.0)


def clipped_sum(model: nn.Module, batch: Batch, loss: Loss, clip: float) -> tuple[Gradients, float]:
    """Add up the gradients of a batch's examples, each clipped to the norm `clip`, and average their losses.

    The gradient of an example is that of `loss` on a batch of this example alone, so no example acts on another's.
    `torch.func` computes many of them at once; a model that it cannot batch is run once for every example.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> examples = Batch(torch.ones(3, 1), torch.tensor([[1.0], [5.0], [-0.5]]))
    >>> gradients, _ = clipped_sum(model, examples, lambda outputs, targets: (outputs * targets).mean(), clip=1.0)
    >>> gradients["weight"].item()  # of 1, 5 and -0.5
    1.5
    """
    start = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradient = torch.func.grad_and_value(partial(_loss_of_one, model, loss))
    batched = torch.func.vmap(gradient, in_dims=(None, 0), randomness="different")
    total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    losses = []
    for begin in range(0, len(next(tensors(batch.targets))), CHUNK):
        part = map_tensors(partial(_slice, begin, begin + CHUNK), tuple(batch))
        try:
            each, values = batched(start, part)
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            each, values = _one_by_one(gradient, start, part)
        squares = torch.stack([grad.flatten(1).square().sum(1) for grad in each.values()]).sum(0)
        factors = clip_factors(squares, clip)
        for name, grad in each.items():
            total[name] += torch.einsum("n,n...->...", factors, grad.nan_to_num(0.0, 0.0, 0.0))
        losses.append(values.detach().nan_to_num(0.0, 0.0, 0.0))
    return total, float(torch.cat(losses).mean())


def clipped_step(model: nn.Module, batch: Batch, loss: Loss, rate: float, clip: float) -> float:
    """Move a model by `rate` times minus the `clipped_sum` of a batch; return the mean loss before it.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> examples = Batch(torch.ones(3, 1), torch.tensor([[1.0], [5.0], [-0.5]]))
    >>> clipped_step(model, examples, lambda outputs, targets: (outputs * targets).mean(), 0.1, clip=1.0)
    0.0
    >>> model.weight.item()
    -0.15...
    """
    total, mean_loss = clipped_sum(model, batch, loss, clip)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in total:
                parameter.sub_(total[name], alpha=rate)
    return mean_loss


def _loss_of_one(model: nn.Module, loss: Loss, parameters: Gradients, example: tuple[Tree, Tree]) -> Tensor:
    inputs, targets = map_tensors(lambda tensor: tensor.unsqueeze(0), example)
    return loss(call_with(model, parameters, inputs), targets)


def _one_by_one(gradient: Any, start: Gradients, part: tuple[Tree, Tree]) -> tuple[Gradients, Tensor]:
    count = len(next(tensors(part[1])))
    try:
        found = [gradient(start, map_tensors(itemgetter(row), part)) for row in range(count)]
    except Exception as error:  # of the user's model and loss
        raise ConfigError(
            "the gradient of a single example cannot be computed for this model, so there is no guarantee for one "
            f"example: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    stacked = {name: torch.stack([each[name] for each, _ in found]) for name in start}
    return stacked, torch.stack([value.detach() for _, value in found])


def _slice(start: int, end: int, tensor: Tensor) -> Tensor:
    return tensor[start:end]
