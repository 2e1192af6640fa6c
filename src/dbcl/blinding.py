"""Transformations between W and V: broadcast, client model, and update.

The server sketches W to V, a client builds its model from V, and the server lifts a change of V
back to a change of W.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dbcl._torch import unwrapped
from dbcl.errors import PlanError, listed, plain
from dbcl.model.coverage import shared_memory
from dbcl.model.norm_stats import restart
from dbcl.model.parametrization import compact_parameter, share_class, sketch_parameter
from dbcl.model.tensors import (
    broadcast_names,
    fingerprint,
    lost_in_a_copy,
    named_tensors,
    owner,
    packed_weights,
    recompute,
    without_values,
)
from dbcl.round_plan import RoundPlan, mismatches

Noise = Callable[[str, tuple[int, ...]], Tensor | None]
"""Function of a tensor's name and shape that returns its noise."""


SAME = "start from the same file, or load what server.base() sends (send_frozen=True)"
"""Remedy in the error message for a frozen tensor with different values."""


def veiled(weights: Mapping[str, Tensor], noise: Noise, grid: float | None = None) -> dict[str, Tensor]:
    """Return W + N for every tensor that leaves the server.

    All lanes of a round share the same noise N. Clients only see W + N after sketching. With a
    `grid`, the sum is computed in float64 and rounded to multiples of `grid`, so that low-order
    digits leak nothing.

    >>> veiled({"bias": torch.zeros(2)}, lambda name, shape: torch.ones(shape))
    {'bias': tensor([1., 1.])}
    """
    hidden = {}
    for name, weight in weights.items():
        drawn = noise(name, tuple(weight.shape))
        if drawn is None:
            hidden[name] = weight.detach().clone()
            continue
        if grid is None:
            hidden[name] = weight.detach() + drawn.to(weight)
        else:
            hidden[name] = ((weight.detach() + drawn) / grid).round_().mul_(grid).to(weight)
        if name.endswith("running_var"):
            hidden[name].clamp_(min=0)  # a variance must not turn negative; a running mean may
    return hidden


def sketched(weights: Mapping[str, Tensor], plan: RoundPlan) -> dict[str, Tensor]:
    """Return each tensor as the broadcast contains it: sketched if the plan has a sketch for it.

    >>> from dbcl.round_plan import RoundTensor
    >>> plan = RoundPlan(0, bytes(32), (RoundTensor("weight", (2, 6), "count-v1", 3, 3),))
    >>> sketched({"weight": torch.ones(2, 6)}, plan)["weight"].shape
    torch.Size([2, 3])
    """
    return {
        tensor.name: plan.sketches[tensor.name].apply(tensor.layout.matrix(weights[tensor.name]))
        if tensor.sketched
        else weights[tensor.name]
        for tensor in plan.tensors
    }


def check_module(module: nn.Module, plan: RoundPlan) -> None:
    """Raise `PlanError` with all differences if a client's module does not match the plan.

    Broadcast tensors must exist with the same shape. Frozen tensors are not sent and must exist
    with the same values.

    >>> from dbcl.round_plan import RoundTensor
    >>> check_module(nn.Linear(6, 2), RoundPlan(0, bytes(32), (RoundTensor("weight", (2, 6), "count-v1", 3, 3),)))
    Traceback (most recent call last):
        ...
    dbcl.errors.PlanError: this model is not the one that the server trains:
      - 'bias' was not asked for
    """
    problems = without_values(module) or shared_memory(module)
    if problems:
        raise PlanError("\n  - ".join(["this model is not ready:", *problems]))
    own, frozen = named_tensors(module), dict(plan.frozen)
    if frozen:
        own |= packed_weights(module)
    asked = {tensor.name: tensor.shape for tensor in plan.tensors}
    expected = asked.keys() | (set(broadcast_names(module)) - frozen.keys())
    problems = mismatches(asked, {name: tensor for name, tensor in own.items() if name in expected})
    for name, digest in frozen.items():
        if name not in own:
            problems.append(f"{plain(name, 100)} is missing; it is frozen, so the server does not send it")
        elif fingerprint(own[name]) != digest:
            problems.append(f"{plain(name, 100)} is frozen, and this model's copy differs from the server's: {SAME}")
    if problems:
        raise PlanError(listed("this model is not the one that the server trains:", problems))
    sketched = {id(own[tensor.name]): tensor.name for tensor in plan.tensors if tensor.sketched}
    problems = lost_in_a_copy(module) + _kept_elsewhere(module, sketched)
    if problems:
        raise PlanError("\n  - ".join(["this model cannot be copied:", *problems]))


def _kept_elsewhere(module: nn.Module, sketched: Mapping[int, str]) -> list[str]:
    """Return a complaint for each sketched weight that a module also references in a list. The
    reference would keep the old weight.
    """
    problems = []
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, list | tuple) and not isinstance(part, nn.RNNBase):
                place = f"{path}.{name}".lstrip(".")
                found = [sketched[id(each)] for each in value if id(each) in sketched]
                problems += [
                    f"{each} is in the list {place} too, where it would stay; take it out of cover" for each in found
                ]
    return problems


def build_client(module: nn.Module, plan: RoundPlan, received: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module with the broadcast tensors as its weights. The module itself is
    unchanged.

    The plan and the tensors are validated before anything is copied.

    Args:
        module: The client's network.
        plan: Public plan of the round.
        received: Broadcast tensors by name.

    Raises:
        PlanError: The module or the tensors do not match the plan. The message lists every problem.

    >>> from dbcl.round_plan import RoundTensor
    >>> tensors = RoundTensor("weight", (2, 6), "count-v1", 3, 3), RoundTensor("bias", (2,), "identity-v1", 1, 1)
    >>> plan = RoundPlan(0, bytes(32), tensors)
    >>> client = build_client(nn.Linear(6, 2), plan, {"weight": torch.zeros(2, 3), "bias": torch.ones(2)})
    >>> client(torch.ones(1, 6)).detach()
    tensor([[1., 1.]])
    """
    module = unwrapped(module)
    check_module(module, plan)
    client = copied(module)
    restart(client)
    frozen = dict(plan.frozen)
    for name, parameter in client.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    for tensor in plan.tensors:
        module, name = owner(client, tensor.name)
        if tensor.sketched:
            sketch_parameter(module, name, plan.sketches[tensor.name], received[tensor.name], tensor.inputs)
        else:
            with torch.no_grad():
                getattr(module, name).copy_(received[tensor.name])
    for part in client.modules():
        share_class(part)
    recompute(client)
    return client


def copied(module: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy. Non-leaf tensors stored in attributes by the last forward pass are copied
    by value.

    Objects whose `id` is in `shared` are not copied.

    >>> copied(nn.Linear(2, 1))
    Linear(in_features=2, out_features=1, bias=True)
    """
    memo: dict[int, Any] = dict(shared or {})
    for part in module.modules():
        for value in vars(part).values():
            for each in value if isinstance(value, list | tuple) else [value]:  # a list: weights of a recurrent layer
                if isinstance(each, Tensor) and not each.is_leaf:
                    memo[id(each)] = each.detach().clone()
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"this model cannot be copied ({error}); give one that has not been run yet") from error


def client_tensors(client: nn.Module, plan: RoundPlan) -> dict[str, Tensor]:
    """Return the tensors of a client's model by their plan names."""
    current = {}
    for tensor in plan.tensors:
        module, name = owner(client, tensor.name)
        now = compact_parameter(module, name) if tensor.sketched else getattr(module, name)
        current[tensor.name] = now.detach()
    return current


def lift(plan: RoundPlan, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Lift changes of V to changes of W: dW = dV R^T. Normalisation statistics pass unchanged and
    may be missing.

    >>> from dbcl.round_plan import RoundTensor
    >>> plan = RoundPlan(0, bytes(32), (RoundTensor("weight", (2, 2, 3), "count-v1", 3, 3),))
    >>> lift(plan, {"weight": torch.ones(2, 3)})["weight"].shape
    torch.Size([2, 2, 3])
    """
    return {
        tensor.name: tensor.layout.weight(plan.sketches[tensor.name].lift(changes[tensor.name]))
        if tensor.sketched
        else changes[tensor.name]
        for tensor in plan.tensors
        if tensor.name in changes
    }
