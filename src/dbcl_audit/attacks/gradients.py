"""Gradients of a received model, keyed by the tensor names of the plan."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dbcl.data.trees import Tree, call, map_tensors, tensors
from dbcl.errors import AuditError
from dbcl.model.parametrization import compact_parameter, plan_name
from dbcl.model.tensors import owner
from dbcl.objective import Loss, cross_entropy


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters keyed by the plan's names: W of an unsketched model, V of a sketched
    model.

    >>> import dbcl
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> {name: tuple(tensor.shape) for name, tensor in parameters(dbcl.blinded(nn.Linear(6, 2), broadcast)).items()}
    {'bias': (2,), 'weight': (2, 3)}
    """
    found = {}
    for full, parameter in model.named_parameters():
        name = plan_name(full)
        home, last = owner(model, name)
        found[name] = compact_parameter(home, last) if is_parametrized(home, last) else parameter
    return found


def gradients(
    model: nn.Module, inputs: Tree, targets: Tree, *, loss: Loss = cross_entropy, create_graph: bool = False
) -> dict[str, Tensor]:
    """Return the gradient of the loss of a batch, dL/dV, keyed by the plan's names.

    The default loss is the mean cross entropy. Its targets are classes or soft labels: one row of
    probabilities per image, or one probability per image for a single output.

    >>> found = gradients(nn.Linear(3, 2), torch.ones(1, 3), torch.tensor([1]))
    >>> {name: tuple(gradient.shape) for name, gradient in found.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    held = parameters(model)
    value = loss(call(model, inputs), targets)
    return dict(zip(held, torch.autograd.grad(value, list(held.values()), create_graph=create_graph), strict=True))


def example_gradients(
    model: nn.Module, inputs: Tree, targets: Tree, *, loss: Loss = cross_entropy, together: int = 50
) -> dict[str, Tensor]:
    """Return the gradient of every example, keyed by the plan's names, with a leading axis for the
    examples.

    >>> found = example_gradients(nn.Linear(3, 2), torch.ones(5, 3), torch.zeros(5, dtype=torch.long))
    >>> {name: tuple(gradient.shape) for name, gradient in found.items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """
    held = {full: parameter.detach() for full, parameter in model.named_parameters()}

    def of_one(values: dict[str, Tensor], example: Tree, target: Tree) -> Tensor:
        example, target = map_tensors(lambda tensor: tensor.unsqueeze(0), (example, target))
        with_values = _Called(model, values)
        return loss(call(with_values, example), target)

    each = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0), randomness="different")
    count = len(next(tensors(targets)))
    try:
        parts = [
            each(held, *map_tensors(lambda tensor: tensor[start : start + together], (inputs, targets)))  # noqa: B023
            for start in range(0, count, together)
        ]
    except (RuntimeError, ValueError) as error:
        raise AuditError(f"this network has no gradient of one example alone: {error}") from error
    return {plan_name(full): torch.cat([part[full] for part in parts]) for full in held}


class _Called(nn.Module):
    """Module that calls a model with substituted parameter values."""

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.run = partial(torch.func.functional_call, model, dict(values))

    def forward(self, *inputs: Tree, **named: Tree) -> Tree:
        return self.run(inputs, named)


def as_gradient(changes: Mapping[str, Tensor], lr: float, steps: int = 1) -> dict[str, Tensor]:
    """Convert a client's update to a gradient: g = -dV / (lr steps).

    The result is exact for one step of plain SGD. For several local steps it is an approximation:
    all batches together count as one batch, and every gradient is evaluated at the broadcast
    weights.

    >>> as_gradient({"bias": torch.tensor([-0.2])}, lr=0.1)["bias"]
    tensor([2.])
    """
    return {name: change / -(lr * steps) for name, change in changes.items()}
