"""Tensors of a model: broadcast, not sent, or derived from other tensors."""

import hashlib
import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dbcl._torch import forward_pre_hooks, inner_tensors

STATISTICS = ("running_mean", "running_var")
"""Names of running statistics, buffers of normalisation layers that are sent."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a model's state dict, with tied tensors listed once.

    >>> list(named_tensors(nn.BatchNorm1d(3)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def broadcast_names(model: nn.Module, buffers: Sequence[str] = ()) -> list[str]:
    """Return the names of the broadcast tensors: trained parameters, normalisation statistics and
    selected buffers.

    Frozen parameters and constant buffers, such as a causal mask or a position table, are not sent.
    A client uses the values of its own copy of the network.

    Args:
        model: The network.
        buffers: Name patterns of further buffers to send.

    >>> broadcast_names(nn.BatchNorm1d(3))
    ['weight', 'bias', 'running_mean', 'running_var']
    """
    found = []
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, nn.Parameter):
            sent = tensor.requires_grad
        else:
            named = any(fnmatchcase(name, pattern) for pattern in buffers)
            sent = tensor.is_floating_point() and (named or name.rpartition(".")[2] in STATISTICS)
        if sent:
            found.append(name)
    return found


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors whose values must be equal on server and client: frozen parameters, packed
    weights and pruning masks.

    >>> layer = torch.nn.utils.prune.l1_unstructured(nn.Linear(2, 1), "weight", 1)
    >>> list(fixed_tensors(layer))
    ['weight_mask']
    """
    pruned = [path for path, module in model.named_modules() if old_hook(module) is BasePruningMethod]
    masks = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("_mask") and name.rpartition(".")[0] in pruned
    }
    return {**frozen_parameters(model), **packed_weights(model), **masks}


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that PyTorch's quantised layers store in their state instead of as
    parameters, by name.

    >>> packed_weights(nn.Linear(2, 1))
    {}
    """
    packed = {name: value for name, value in model.state_dict().items() if isinstance(value, tuple)}
    found = {f"{name}.{place}": each for name, value in packed.items() for place, each in enumerate(value)}
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.weight.requires_grad_(False)
    >>> list(frozen_parameters(layer))
    ['weight']
    """
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def fingerprint(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bytes. Equal tensors have equal digests on all
    machines.

    >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)) != fingerprint(torch.ones(2))
    True
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    for name, part in inner_tensors(tensor).items():
        plain = part.cpu()
        if name:
            digest.update(f"{name} {part.dtype} {tuple(part.shape)} ".encode())
        if plain.is_quantized:
            plain = plain.dequantize()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        if plain.numel():
            digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def plain_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and floating-point, and so can be veiled and sent.

    >>> plain_numbers(torch.ones(2)), plain_numbers(torch.ones(2, dtype=torch.complex64))
    (True, False)
    """
    return tensor.is_floating_point() and not tensor.is_quantized and inner_tensors(tensor).keys() == {""}


def cannot_be_sent(model: nn.Module) -> list[str]:
    """Return a complaint for each trained parameter that is not a dense floating-point tensor.

    >>> layer = nn.Linear(2, 2, dtype=torch.complex64, bias=False)
    >>> cannot_be_sent(layer)
    ['weight: is trained and complex64; freeze it, or keep its real and imaginary parts as two parameters']
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    complaints = []
    for name, parameter in trained.items():
        kind = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_complex():
            remedy = "freeze it, or keep its real and imaginary parts as two parameters"
            complaints.append(f"{name}: is trained and {kind}; {remedy}")
        elif not isinstance(parameter, UninitializedParameter) and not plain_numbers(parameter):
            kind = type(parameter.data).__name__
            complaints.append(f"{name}: is trained and a {kind}; freeze it, or make a plain tensor of it")
    return complaints


def lost_in_a_copy(model: nn.Module) -> list[str]:
    """Return a complaint for everything that a copy of a model would share with the original.
    Training the copy would not update shared objects correctly.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> original = model[0].forward
    >>> model[0].forward = lambda x: 2 * original(x)
    >>> lost_in_a_copy(model)
    ['0.forward is a function that holds a module, and a copy would run the original; use a method or a subclass']
    """
    parts = set(model.modules())
    complaints = []
    for path, module in model.named_modules():
        own = vars(module).get("forward")
        if own is not None and _holds(getattr(own, "__func__", getattr(own, "func", own)), parts):
            name = f"{path}.forward".lstrip(".")
            remedy = "use a method or a subclass"
            complaints.append(f"{name} is a function that holds a module, and a copy would run the original; {remedy}")
    return complaints


def _holds(function: object, modules: set[nn.Module]) -> bool:
    """Return whether a function's closure contains one of some modules, or a bound method of one."""
    if not isinstance(function, FunctionType):
        return False
    outside = inspect.getclosurevars(function)
    return any(
        getattr(held, "__self__", held) in modules
        if isinstance(held, nn.Module | MethodType)
        else name in outside.nonlocals and _holds(held, modules)
        for name, held in {**outside.globals, **outside.nonlocals}.items()
    )


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a tensor, and the tensor's name in this module.

    >>> owner(nn.Sequential(nn.Linear(2, 2)), "0.weight")
    (Linear(in_features=2, out_features=2, bias=True), 'weight')
    """
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def without_values(model: nn.Module) -> list[str]:
    """Return a complaint for each parameter without shape or values, and for a TorchScript model,
    whose parameters are inaccessible.

    >>> without_values(nn.LazyLinear(3, bias=False))
    ['weight: has no shape yet; run one batch through the model first']
    """
    if isinstance(model, torch.jit.ScriptModule):
        return ["a TorchScript model cannot be sketched; give the module that it was made of"]
    complaints = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            complaints.append(f"{name}: has no shape yet; run one batch through the model first")
        elif parameter.is_meta:
            complaints.append(f"{name}: has no numbers (device meta); use model.to_empty and load its weights")
    return complaints


def nothing_trained(model: nn.Module) -> list[str]:
    """Return a complaint if a model has no trainable parameters.

    >>> nothing_trained(nn.ReLU())
    ['the model has nothing to train: no parameter that requires a gradient']
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        return []
    return ["the model has nothing to train: no parameter that requires a gradient"]


OLD_HOOKS: dict[type[Any], str] = {
    WeightNorm: "torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: "torch.nn.utils.prune.remove, to make the pruning permanent",
}
"""Hooks that compute a weight before every forward pass, each with its recommended replacement."""


def old_hook(module: nn.Module) -> type | None:
    """Return the class of a module's old-style weight hook, or None."""
    return next((kind for hook in forward_pre_hooks(module) for kind in OLD_HOOKS if isinstance(hook, kind)), None)


POWER_STEPS = 15
"""Number of power iterations after a change of weights, equal to PyTorch's number for a new
spectral norm.
"""


@torch.no_grad()
def recompute(model: nn.Module) -> None:
    """Recompute the values that a model derives from its parameters: weights of old-style hooks,
    and spectral norms.

    A spectral norm keeps estimates of two singular vectors in buffers and performs one power
    iteration in each training pass. After the weights are replaced, one iteration is not enough.

    >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval()
    >>> with torch.no_grad():
    ...     _ = layer.parametrizations.weight.original.copy_(torch.diag(torch.tensor([1.0, 2.0, 8.0])))
    >>> recompute(layer)
    >>> layer.weight.diagonal().round(decimals=3).detach()
    tensor([0.1250, 0.2500, 1.0000])
    """
    for module in list(model.modules()):
        mode = module.training
        for hook in forward_pre_hooks(module):
            if any(isinstance(hook, kind) for kind in OLD_HOOKS):
                module.training = True
                for _ in range(POWER_STEPS if isinstance(hook, SpectralNorm) else 1):
                    hook(module, ())
        module.training = mode
        if isinstance(module, ParametrizationList):
            for each in module:
                if {"_u", "_v"} <= dict(each.named_buffers()).keys():
                    mode, each.training = each.training, True
                    for _ in range(POWER_STEPS):
                        module()
                    each.training = mode
