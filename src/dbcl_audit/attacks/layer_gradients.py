"""Per-example gradients of single layers, as products of layer inputs and output gradients."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl.data import Examples
from dbcl.data.trees import call
from dbcl.objective import Objective
from dbcl.round_plan import RoundPlan


@dataclass(frozen=True, eq=False)
class LayerGradients:
    """Per-example gradients of one layer's weight and bias, stored as the factors of deltas x
    (inputs, 1).

    Args:
        name: name of the layer's weight.
        inputs: layer inputs, one row per example.
        deltas: gradients of the loss by the layer's outputs, one row per example.

    >>> each = LayerGradients("weight", torch.ones(2, 3), torch.tensor([[1.0], [2.0]]))
    >>> each.squares, each.products(1)
    (tensor([ 4., 16.]), tensor([[ 8.],
            [16.]]))
    """

    name: str
    inputs: Tensor
    deltas: Tensor

    def through(self, plan: RoundPlan) -> "LayerGradients":
        """Return the gradients by V of a sketched layer, whose inputs are x R D. Convolutions with
        sketched positions stay unchanged.
        """
        sketch = plan.sketches.get(self.name)
        if sketch is None or sketch.dim != self.inputs.shape[1]:
            return self
        return LayerGradients(self.name, sketch.project(self.inputs), self.deltas)

    @property
    def squares(self) -> Tensor:
        """Squared norms of the gradients."""
        return (self.inputs.square().sum(1) + 1) * self.deltas.square().sum(1)

    def products(self, start: int) -> Tensor:
        """Inner products of all gradients with the gradients from index `start` on."""
        return (self.inputs @ self.inputs[start:].T + 1) * (self.deltas @ self.deltas[start:].T)


def layer_gradients(model: nn.Module, examples: Examples, objective: Objective) -> list[LayerGradients]:
    """Compute the per-example gradients of every dense and convolutional layer in one backward
    pass.

    The gradients are exact for dense layers on vectors. For a layer that is applied at several
    positions of an example, the result combines the mean input and the summed delta.

    >>> from dbcl.data import examples_of
    >>> from dbcl.objective import CLASSIFICATION
    >>> examples = examples_of((torch.ones(5, 6), torch.arange(5) % 2))
    >>> [each.deltas.shape for each in layer_gradients(nn.Linear(6, 2), examples, CLASSIFICATION)]
    [torch.Size([5, 2])]
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and output.requires_grad:
                seen[name] = inputs[0].detach(), output

        return hook

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    hooks = [
        module.register_forward_hook(keep(f"{name}.weight" if name else "weight"))
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    training = model.training
    model.eval()
    batch = examples.take(np.arange(len(examples)))
    try:
        outputs = call(model, batch.inputs)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    if not seen:
        return []
    # The loss is a mean over the examples; each example's own gradient is as many times what the mean gives.
    deltas = torch.autograd.grad(objective.loss(outputs, batch.targets), [output for _, output in seen.values()])
    return [
        LayerGradients(name, _flat(inputs, name, model), len(examples) * _summed(delta, name, model))
        for (name, (inputs, _)), delta in zip(seen.items(), deltas, strict=True)
    ]


def _positions(tensor: Tensor, name: str, model: nn.Module) -> tuple[int, ...]:
    """Axes of the positions at which a layer is applied."""
    dense = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
    return tuple(range(1, tensor.ndim - 1)) if dense else tuple(range(2, tensor.ndim))


def _flat(inputs: Tensor, name: str, model: nn.Module) -> Tensor:
    axes = _positions(inputs, name, model)
    return inputs.float().mean(dim=axes) if axes else inputs.float()


def _summed(delta: Tensor, name: str, model: nn.Module) -> Tensor:
    axes = _positions(delta, name, model)
    return delta.float().sum(dim=axes) if axes else delta.float()
