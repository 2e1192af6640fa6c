"""Per-example gradient clipping for stacks of dense layers without materialising per-example
gradients.

For a dense layer, the gradient of one example is the outer product of its output gradient and its
input. Its norm is the product of their norms, and the sum of clipped gradients is one matrix
product (Goodfellow 2015).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from dbcl._torch import has_global_hooks, has_hooks, quiet_vmap
from dbcl.data.trees import Tree
from dbcl.objective import Loss

Gradients = dict[str, Tensor]
SMALLEST_NORM = 1e-30
ROW_WISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.GELU,
    nn.ELU,
    nn.SiLU,
    nn.Softplus,
    nn.Identity,
    nn.MaxPool2d,
    nn.AvgPool2d,
)
"""Parameter-free layers that process each example independently."""


def clip_factors(squared_norms: Tensor, clip: float) -> Tensor:
    """Return the clipping factor min(1, clip / norm) of each example's gradient.

    An example with a non-finite gradient gets factor 0, so that it cannot invalidate the sum.

    Args:
        squared_norms: Squared gradient norm of each example.
        clip: Clipping norm.

    >>> clip_factors(torch.tensor([4.0, 0.25, float("nan"), float("inf")]), clip=1.0)
    tensor([0.5000, 1.0000, 0.0000, 0.0000])
    """
    return (clip / squared_norms.sqrt().clamp(min=SMALLEST_NORM)).clamp(max=1.0).nan_to_num(0.0)


def dense_layers(model: nn.Module) -> dict[str, nn.Linear] | None:
    """Return the dense layers of a plain stack by the prefix of their parameter names; None for any
    other model.

    >>> stack = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> list(dense_layers(stack)), dense_layers(nn.LSTM(4, 3))
    (['1.', '3.'], None)
    """
    layers: dict[str, nn.Linear] = {}
    if has_global_hooks():
        return None
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)  # not isinstance: a subclass may compute something else
        changes_inputs = getattr(module, "inplace", False) or getattr(module, "return_indices", False)
        if "forward" in vars(module) or has_hooks(module) or changes_inputs:
            return None
        whole = kind is not nn.Flatten or (module.start_dim, module.end_dim) == (1, -1)
        if kind is nn.Linear:
            layers[f"{name}." if name else ""] = module
        elif not whole or kind not in (nn.Sequential, nn.Flatten, *ROW_WISE):
            return None
    own = {prefix + name for prefix, layer in layers.items() for name, _ in layer.named_parameters()}
    every = [id(parameter) for layer in layers.values() for parameter in layer.parameters()]
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return layers if layers and own == named and len(set(every)) == len(every) else None


def dense_sum(
    model: nn.Module, layers: dict[str, nn.Linear], part: tuple[Tree, Tree], loss: Loss, clip: float
) -> tuple[Gradients, Tensor] | None:
    """Return the float64 sum of the clipped gradients and the per-example losses.

    Returns None if the model or the loss requires another implementation.

    Args:
        model: A plain stack.
        layers: Result of `dense_layers` for the model.
        part: Inputs and targets.
        loss: Batch loss, called on batches of one example.
        clip: Clipping norm of each example's gradient.

    >>> model = nn.Sequential(nn.Linear(2, 1))
    >>> part = torch.ones(3, 2), torch.zeros(3, 1)
    >>> sums, losses = dense_sum(model, dense_layers(model), part, nn.functional.mse_loss, clip=0.5)
    >>> sums["0.weight"].dtype, len(losses)
    (torch.float64, 3)
    """
    inputs, targets = part
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return None
    saved: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [layer.register_forward_hook(partial(_save, saved, prefix)) for prefix, layer in layers.items()]
    try:
        with torch.enable_grad():
            outputs = model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if any(each.ndim != 2 for pair in saved.values() for each in pair) or not outputs.requires_grad:
        return None
    last = _gradients_of_outputs(loss, outputs.detach(), targets)
    if last is None:
        return None
    values, gradient = last
    used = {prefix: pair for prefix, pair in saved.items() if pair[1].requires_grad}
    deltas = torch.autograd.grad(outputs, [pair[1] for pair in used.values()], gradient, allow_unused=True)
    rows = {
        prefix: (pair[0].detach().double(), delta.double())
        for (prefix, pair), delta in zip(used.items(), deltas, strict=True)
        if delta is not None
    }
    squares = torch.zeros(len(outputs), dtype=torch.float64, device=outputs.device)
    for prefix, (x, delta) in rows.items():
        layer = layers[prefix]
        of_input = x.square().sum(1) * layer.weight.requires_grad
        squares += delta.square().sum(1) * (of_input + (layer.bias is not None and layer.bias.requires_grad))
    factors = clip_factors(squares, clip)
    sums: Gradients = {}
    for prefix, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                sums[prefix + name] = torch.zeros_like(parameter, dtype=torch.float64)
        if prefix in rows:
            # An example without a finite gradient counts as none: it must not take the others' with it.
            x, delta = (torch.where(factors[:, None] > 0, each, 0.0) for each in rows[prefix])
            delta = delta * factors[:, None]
            if layer.weight.requires_grad:
                sums[prefix + "weight"] = delta.T @ x
            if layer.bias is not None and layer.bias.requires_grad:
                sums[prefix + "bias"] = delta.sum(0)
    return sums, values


def _save(
    saved: dict[str, tuple[Tensor, Tensor]], prefix: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor
) -> None:
    saved[prefix] = inputs[0], output


def _gradients_of_outputs(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the per-example losses and their gradients with respect to the outputs; None if the
    loss cannot be batched.
    """

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0))

    gradient: Callable[..., tuple[Tensor, Tensor]] = torch.func.vmap(torch.func.grad_and_value(of_one))
    try:
        with quiet_vmap():
            found, values = gradient(outputs, targets)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    return values, found
