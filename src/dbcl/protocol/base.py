"""Frozen parameters, sent once under constant noise."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl._torch import unwrapped
from dbcl.errors import PlanError, listed
from dbcl.model.tensors import fingerprint, fixed_tensors
from dbcl.plan import TensorPlan
from dbcl.privacy import norm
from dbcl.protocol.messages import Base
from dbcl.round_plan import mismatches

SCHEME = "base-v1"
"""Label of the noise on frozen parameters."""


def veiled_base(frozen: Mapping[str, Tensor], base: Sequence[TensorPlan], key: bytes) -> dict[str, Tensor]:
    """Return W + N for every frozen tensor that is sent.

    N is veil * rms(W) * standard normal, and depends only on the key and W. It is the same in every
    round, so averaging over rounds does not reduce it. For a tensor of zeros, the rms over all
    tensors is used.

    >>> planned = TensorPlan("w", (2,), "identity-v1", (2.0, 2.0), veil=0.5)
    >>> one, two = (veiled_base({"w": torch.ones(2)}, [planned], bytes(32)) for _ in range(2))
    >>> one["w"], torch.equal(one["w"], two["w"])
    (tensor([0.5335, 1.9872]), True)
    """
    whole = _rms(frozen[tensor.name] for tensor in base)
    veiled = {}
    for tensor in base:
        value = frozen[tensor.name].detach()
        if tensor.veil:
            drawn = torch.from_numpy(seeds.normals(key, SCHEME, tensor.name, n=value.numel()))
            noise = drawn.reshape(value.shape) * (tensor.veil * (_rms([value]) or whole))
            value = value + noise.to(value)
        veiled[tensor.name] = value
    return veiled


def fingerprints(model: nn.Module, base: Base | None) -> tuple[tuple[str, str], ...]:
    """Return digests of the tensors that a client must already hold.

    These are the tensors that are not sent and, after `load_base`, the frozen parameters.
    """
    sent = {} if base is None else base.tensors
    held = {name: sent[name].to(own.dtype) if name in sent else own for name, own in fixed_tensors(model).items()}
    return tuple((name, fingerprint(tensor)) for name, tensor in held.items())


def load_base(module: nn.Module, base: Base) -> nn.Module:
    """Load the server's frozen parameters into a client's module, in place.

    Args:
        module: The client's module.
        base: The server's frozen parameters.

    Returns:
        The module.

    Raises:
        PlanError: The parameters do not fit the module.

    >>> import dbcl
    >>> def adapted():
    ...     return nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6), nn.Linear(6, 2))
    >>> server = dbcl.Server(adapted(), dbcl.SketchConfig(send_frozen=True))
    >>> mine = dbcl.protocol.load_base(adapted(), dbcl.protocol.decode_base(dbcl.encode(server.base())))
    >>> dbcl.blinded(mine, server.open_round())[0].weight.requires_grad
    False
    """
    own = dict(unwrapped(module).named_parameters())
    sent = {name: tuple(tensor.shape) for name, tensor in base.tensors.items()}
    problems = mismatches(sent, {name: parameter for name, parameter in own.items() if name in sent})
    if problems:
        raise PlanError(listed("this model has not the frozen parameters that the server sends:", problems))
    with torch.no_grad():
        for name, tensor in base.tensors.items():
            own[name].copy_(tensor)
    return module


def _rms(tensors: Iterable[Tensor]) -> float:
    listed = {str(number): tensor.detach() for number, tensor in enumerate(tensors)}
    return norm(listed) / math.sqrt(sum(tensor.numel() for tensor in listed.values()))
