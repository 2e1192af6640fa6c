"""Per-example gradient clipping: scale every example's gradient to a maximum norm before summation.

An example-level guarantee relies on this step, so `clipped_sum` is the only implementation for all
models. A faster path may compute the norms differently, but uses the factors of `clip_factors`.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl._torch import quiet_vmap, version
from dbcl.blinding import copied
from dbcl.data.examples import Batch, Examples
from dbcl.data.trees import Tree, call_with, map_tensors, tensors
from dbcl.errors import ConfigError
from dbcl.objective import Loss
from dbcl.privacy.dense_clipping import Gradients, clip_factors, dense_layers, dense_sum

CHUNK = 64
"""Number of examples whose gradients are held in memory at once."""
DENSE_CHUNK = 1024
"""Number of examples per chunk for stacks of dense layers, whose per-example gradients are not
materialised.
"""
NO_GRADIENT = (
    "the gradient of a single example cannot be computed for this model, so there is no guarantee for one example"
)
SAME = 1e-5
"""Relative tolerance between two gradients of the same example, for rounding differences on a GPU.
A CPU has none.
"""


def clipped_sum(model: nn.Module, batch: Batch, loss: Loss, clip: float) -> tuple[Gradients, float]:
    """Return the sum of a batch's per-example clipped gradients in float64, and the mean loss.

    The gradient of an example is computed with `loss` on a batch of this example alone, so no
    example affects another's gradient. Norms, factors and sums use float64: in float32, rounding
    could change a sum of many gradients by more than one gradient. Stacks of dense layers use
    `dense_clipping`, other models are batched by `torch.func`, and models that `torch.func` cannot
    batch run one example at a time.

    Args:
        model: The network.
        batch: Examples.
        loss: Batch loss.
        clip: Clipping norm of each example's gradient.

    Returns:
        The sum of the clipped gradients by parameter name, and the mean loss.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> examples = Batch(torch.ones(3, 1), torch.tensor([[1.0], [5.0], [-0.5]]))
    >>> gradients, _ = clipped_sum(model, examples, lambda outputs, targets: (outputs * targets).mean(), clip=1.0)
    >>> gradients["weight"].item()  # of 1, 5 and -0.5
    1.5
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    start = {name: parameter.detach().clone() for name, parameter in trained.items()}
    versions = {name: version(tensor) for name, tensor in start.items()}
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
    losses, dense = [], dense_layers(model)
    chunk = CHUNK if dense is None else DENSE_CHUNK
    for begin in range(0, len(next(tensors(batch.targets))), chunk):
        part = map_tensors(partial(_slice, begin, begin + chunk), tuple(batch))
        found = None if dense is None else dense_sum(model, dense, part, loss, clip)
        if found is None:
            found = _sum_of_each(model, loss, start, part, clip)
        sums, values = found
        for name, own in sums.items():
            total[name] += own
        losses.append(values.nan_to_num(0.0, 0.0, 0.0))
    for name, parameter in trained.items():
        same = torch.equal(start[name].nan_to_num(), parameter.detach().nan_to_num())  # not all kernels count versions
        if version(start[name]) != versions[name] or not same:
            raise ConfigError(f"{NO_GRADIENT}: a forward pass changes {name}, so examples act on one another")
    return total, float(torch.cat(losses).mean())


def _sum_of_each(
    model: nn.Module, loss: Loss, start: Gradients, part: tuple[Tree, Tree], clip: float
) -> tuple[Gradients, Tensor]:
    """Compute per-example gradients; return the sum of the clipped gradients, and the losses."""
    try:
        batched = torch.func.vmap(_gradient(model, loss), in_dims=(None, 0), randomness="different")
        with quiet_vmap():
            each, values = batched(start, part)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        each, values = _one_by_one(model, loss, start, part)
    if values.requires_grad:
        raise ConfigError(f"{NO_GRADIENT}: it uses a parameter that is not where PyTorch would look for it")
    squares = torch.stack([grad.double().reshape(len(grad), -1).square().sum(1) for grad in each.values()]).sum(0)
    factors = clip_factors(squares, clip)
    sums = {
        name: torch.tensordot(factors, grad.nan_to_num(0.0, 0.0, 0.0).double(), dims=1) for name, grad in each.items()
    }
    return sums, values


def clipped_step(model: nn.Module, batches: Sequence[Batch], loss: Loss, rate: float, clip: float) -> float:
    """Take one SGD step along the `clipped_sum` of all batches; return the mean loss before the
    step.

    Args:
        model: The network, changed in place.
        batches: Batches of the step.
        loss: Batch loss.
        rate: Learning rate.
        clip: Clipping norm of each example's gradient.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> examples = Batch(torch.ones(3, 1), torch.tensor([[1.0], [5.0], [-0.5]]))
    >>> clipped_step(model, [examples], lambda outputs, targets: (outputs * targets).mean(), 0.1, clip=1.0)
    0.0
    >>> model.weight.item()
    -0.15...
    """
    sums, mean = clipped_sums(model, batches, loss, clip)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in sums:
                parameter.sub_(sums[name].to(parameter), alpha=rate)
    return mean


def clipped_sums(model: nn.Module, batches: Sequence[Batch], loss: Loss, clip: float) -> tuple[Gradients, float]:
    """Return the `clipped_sum` over several batches, and the mean loss of their examples."""
    found = [clipped_sum(model, batch, loss, clip) for batch in batches]
    sizes = [len(next(tensors(batch.targets))) for batch in batches]
    total = {name: sum(sums[name] for sums, _ in found) for name in found[0][0]}
    return total, float(np.average([mean for _, mean in found], weights=sizes))  # type: ignore[return-value]


def check_alone(model: nn.Module, examples: Examples, loss: Loss) -> None:
    """Raise `ConfigError` if a gradient depends on previously processed examples. The model is
    unchanged.

    `clipped_sum` works on a copy of the model, so state written into modules is discarded. State
    outside the modules would let an example affect other examples' gradients beyond its clipping
    norm.

    Args:
        model: The network.
        examples: Examples to test with.
        loss: Batch loss.

    Raises:
        ConfigError: The gradient of an example depends on earlier examples.

    >>> from dbcl.data import examples_of
    >>> class Remembers(nn.Linear):
    ...     seen = [0.0]
    ...     def forward(self, x):
    ...         self.seen[0] = self.seen[0] + x.detach().sum()
    ...         return super().forward(x) * self.seen[0]
    ...     def __deepcopy__(self, memo):
    ...         return self
    >>> check_alone(Remembers(1, 1), examples_of((torch.ones(2, 1), torch.ones(2, 1))), nn.functional.mse_loss)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: the gradient of an example depends on those before it, so there is no guarantee for ...
    """
    own = copy.deepcopy(model).train()
    devices = sorted({each.device.index or 0 for each in own.parameters() if each.is_cuda})

    def gradient(row: int) -> Tensor:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            total, _ = clipped_sum(own, examples.take(np.asarray([row])), loss, clip=math.inf)
        return torch.cat([each.flatten() for each in total.values()])

    first, _, again = gradient(0), gradient(min(1, len(examples) - 1)), gradient(0)
    if float((again - first).norm()) > SAME * float(first.norm()):
        raise ConfigError(
            "the gradient of an example depends on those before it, so there is no guarantee for one example: the "
            "model remembers something of its inputs, or draws random values without PyTorch's generator"
        )


def _gradient(model: nn.Module, loss: Loss) -> Callable[..., tuple[Gradients, Tensor]]:
    """Return a function for one example's gradient and loss. It uses a copy of the model, so state
    changes do not reach other examples.
    """
    own: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return torch.func.grad_and_value(partial(_loss_of_one, copied(model, own), loss))


def _loss_of_one(model: nn.Module, loss: Loss, parameters: Gradients, example: tuple[Tree, Tree]) -> Tensor:
    inputs, targets = map_tensors(lambda tensor: tensor.unsqueeze(0), example)
    return loss(call_with(model, parameters, inputs), targets)


def _one_by_one(model: nn.Module, loss: Loss, start: Gradients, part: tuple[Tree, Tree]) -> tuple[Gradients, Tensor]:
    count = len(next(tensors(part[1])))
    try:
        found = [_gradient(model, loss)(start, map_tensors(itemgetter(row), part)) for row in range(count)]
    except Exception as error:  # of the user's model and loss
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{NO_GRADIENT}: {reason}") from error
    stacked = {name: torch.stack([each[name].to_dense() for each, _ in found]) for name in start}
    return stacked, torch.stack([value for _, value in found])


def _slice(start: int, end: int, tensor: Tensor) -> Tensor:
    return tensor[start:end]
