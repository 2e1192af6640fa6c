"""W to V on the server, V into a client's model, and a change of V back to a change of W."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl.cover import broadcast_tensors, owner
from dbcl.errors import PlanError
from dbcl.nn import compact_parameter, sketch_parameter
from dbcl.plan import RoundPlan, SketchPlan


def blind(model: nn.Module, plan: RoundPlan, *, taus: Mapping[str, float], veil_key: bytes) -> dict[str, Tensor]:
    """V = W R + tau Z for every tensor that leaves the server.

    Z is standard normal and comes from a stream that only the holder of `veil_key` can make.

    >>> from dbcl.plan import RoundTensor
    >>> parts = RoundTensor("weight", (2, 6), "count-v1", 3, 3), RoundTensor("bias", (2,), "identity-v1", 1, 1)
    >>> plan = RoundPlan(0, bytes(32), parts)
    >>> sent = blind(nn.Linear(6, 2), plan, taus={"weight": 0.1, "bias": 0.1}, veil_key=bytes(32))
    >>> {name: tuple(tensor.shape) for name, tensor in sent.items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    tensors = broadcast_tensors(model)
    sent = {}
    for part in plan.tensors:
        weight = tensors[part.name].detach()
        compact = plan.sketches[part.name].apply(weight.reshape(part.shape[0], -1)) if part.sketched else weight.clone()
        if taus[part.name] > 0:
            noise = seeds.normals(veil_key, "veil-v1", part.name, n=compact.numel())
            compact += taus[part.name] * torch.from_numpy(noise).to(compact).reshape(compact.shape)
            if part.name.endswith("running_var"):
                compact.clamp_(min=0)  # a variance must not turn negative; a running mean may
        sent[part.name] = compact
    return sent


def veil_sizes(model: nn.Module, plan: SketchPlan) -> dict[str, float]:
    """tau for every tensor: its rho times the root mean square of its entries.

    A tensor that is still (nearly) zero, such as a fresh bias, would get no noise and show its updates in clear. So its
    size counts as at least that of its module's parameters together, or of the whole model's where those are zero too.

    >>> layer = nn.Linear(4, 2)
    >>> nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias) # doctest: +ELLIPSIS
    (...)
    >>> veil_sizes(layer, SketchPlan.of(layer, cover="all", veil=0.2))["bias"]
    0.178...
    """
    tensors = broadcast_tensors(model)
    whole = _rms(list(model.parameters()))
    taus = {}
    for planned in plan.tensors:
        module, _ = owner(model, planned.name)
        floor = _rms(list(module.parameters(recurse=False))) or whole
        taus[planned.name] = planned.veil * max(_rms([tensors[planned.name]]), floor) if planned.veil else 0.0
    return taus


def build_client(module: nn.Module, plan: RoundPlan, received: Mapping[str, Tensor]) -> nn.Module:
    """Copy a module and put into the copy what the server sent; the module itself is not touched.

    Everything is checked before anything is copied, and all problems are named at once.

    >>> from dbcl.plan import RoundTensor
    >>> parts = RoundTensor("weight", (2, 6), "count-v1", 3, 3), RoundTensor("bias", (2,), "identity-v1", 1, 1)
    >>> plan = RoundPlan(0, bytes(32), parts)
    >>> client = build_client(nn.Linear(6, 2), plan, {"weight": torch.zeros(2, 3), "bias": torch.ones(2)})
    >>> client(torch.ones(1, 6)).detach()
    tensor([[1., 1.]])
    """
    own = {name: tuple(tensor.shape) for name, tensor in broadcast_tensors(module).items()}
    asked = {part.name: part.shape for part in plan.tensors}
    problems = [f"{name}: the broadcast has it, this model does not" for name in asked if name not in own]
    problems += [f"{name}: this model has it, the broadcast does not" for name in own if name not in asked]
    problems += [
        f"{name}: shape {own[name]} here and {asked[name]} in the broadcast"
        for name in asked
        if name in own and own[name] != asked[name]
    ]
    if problems:
        raise PlanError("\n  - ".join(["this model is not the one that the server trains:", *problems]))
    client = copy.deepcopy(module)
    for part in plan.tensors:
        home, name = owner(client, part.name)
        if part.sketched:
            sketch_parameter(home, name, plan.sketches[part.name], received[part.name])
        else:
            with torch.no_grad():
                getattr(home, name).copy_(received[part.name])
    return client


def client_tensors(client: nn.Module, plan: RoundPlan) -> dict[str, Tensor]:
    """What a client's model holds now, by the names of the plan."""
    current = {}
    for part in plan.tensors:
        home, name = owner(client, part.name)
        current[part.name] = (compact_parameter(home, name) if part.sketched else getattr(home, name)).detach()
    return current


def lift(plan: RoundPlan, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A change of every V as a change of every W: dW = dV R^T.

    >>> from dbcl.plan import RoundTensor
    >>> plan = RoundPlan(0, bytes(32), (RoundTensor("weight", (2, 2, 3), "count-v1", 3, 3),))
    >>> lift(plan, {"weight": torch.ones(2, 3)})["weight"].shape
    torch.Size([2, 2, 3])
    """
    return {
        part.name: plan.sketches[part.name].lift(changes[part.name]).reshape(part.shape)
        if part.sketched
        else changes[part.name]
        for part in plan.tensors
    }


def _rms(tensors: list[Tensor]) -> float:
    count = sum(tensor.numel() for tensor in tensors)
    lengths = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(lengths))) / math.sqrt(count) if count else 0.0
