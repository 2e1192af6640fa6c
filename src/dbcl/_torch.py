"""Private PyTorch names that this package uses, each with a public fallback.

Each name is looked up once, at import time, so that a layer's forward pass calls PyTorch directly.
In a PyTorch version without the name, the fallback gives the same results more slowly.
`tests/test_torch.py` removes each name in turn. Look names up with `getattr(owner, name,
fallback)`, because the tests replace this call.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

_C: Any = getattr(torch, "_C", None)


def _assume_active() -> bool:
    return True


functorch_active: Callable[[], bool] = getattr(_C, "_are_functorch_transforms_active", _assume_active)
"""Return whether a `torch.func` transform (vmap, grad, ...) is active. The fallback returns True,
which is always safe: autograd then differentiates the gathers of a sketch one by one.
"""


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Suppress PyTorch's warning about `vmap` operations without a batching rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        yield


def _autocast_on_any_device() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "mps", "xpu"))


autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _autocast_on_any_device)
"""Return whether autocast is enabled for any device."""


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without the `torch.func` checks, which take a tenth of a small
    layer's time.

    Call `functorch_active` before using it.
    """
    apply: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return apply


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())


version: Callable[[Tensor], object] = attrgetter("_version") if getattr(Tensor, "_version", None) else _bytes
"""Return a value that changes when a tensor is modified in place: its version counter, or its
contents as a fallback.
"""

view_base: Callable[[Tensor], Tensor | None] = (
    attrgetter("_base") if getattr(Tensor, "_base", None) else lambda tensor: None
)
"""Return the base tensor of a view, or None for any other tensor. The fallback always returns None;
shared memory can also be detected through `untyped_storage()`.
"""

relu_backward: Callable[[Tensor, Tensor, float], Tensor] = getattr(
    torch.ops.aten, "threshold_backward", lambda grad, out, threshold: grad.masked_fill(out <= threshold, 0)
)
"""Gradient of a ReLU (threshold 0) from the gradient of its output and the output."""


# nn.Module's attribute access ends in a search through three dictionaries; in a small layer that is worth avoiding.
_probe: Any = nn.Module()


def _named_children(module: nn.Module) -> Mapping[str, nn.Module]:
    return dict(module.named_children())


def _named_parameters(module: nn.Module) -> Mapping[str, Tensor | None]:
    # A missing bias is None in the private dictionary and absent from the public list.
    return defaultdict(lambda: None, module.named_parameters(recurse=False))


children: Callable[[nn.Module], Mapping[str, Any]] = (
    _named_children if getattr(_probe, "_modules", None) is None else attrgetter("_modules")
)
"""Direct submodules of a module, by name."""
own_parameters: Callable[[nn.Module], Mapping[str, Any]] = (
    _named_parameters if getattr(_probe, "_parameters", None) is None else attrgetter("_parameters")
)
"""Parameters registered on a module itself, by name; None for a disabled parameter such as a bias.
"""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on a module. Returns True if this
    PyTorch version does not expose hooks.

    >>> layer = nn.Linear(2, 2)
    >>> has_hooks(layer)
    False
    >>> handle = layer.register_full_backward_pre_hook(lambda module, grad: None)
    >>> has_hooks(layer)
    True
    """
    return any(getattr(module, name, True) for name in _HOOKS)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside DataParallel, DistributedDataParallel or `torch.compile`.

    >>> layer = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    inner = getattr(module, "_orig_mod", None)  # of torch.compile
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = module.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def is_expanded(tensor: Tensor) -> bool:
    """Return whether a weight is an `ExpandedWeight` of PyTorch, which only layers accept.

    >>> is_expanded(torch.ones(2))
    False
    """
    return type(tensor).__name__ == "ExpandedWeight"


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the inner tensors of a tensor subclass, such as a quantised weight, by ".attribute". A
    plain tensor is returned under the empty name.

    >>> list(inner_tensors(torch.ones(2)))
    ['']
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {"": tensor.detach()}
    held = {name: getattr(tensor, name) for name in flatten()[0]}
    return {f".{name}{rest}": each for name, part in held.items() for rest, each in inner_tensors(part).items()}


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return a module's forward pre-hooks; empty if this PyTorch version does not expose them.

    >>> forward_pre_hooks(nn.Linear(2, 2))
    []
    """
    return list(getattr(module, "_forward_pre_hooks", {}).values())


def has_global_hooks() -> bool:
    """Return whether a global forward or backward hook is registered. Returns True if this PyTorch
    version does not expose global hooks.

    >>> has_global_hooks()
    False
    """
    return any(getattr(nn.modules.module, f"_global{name}", True) for name in _HOOKS)


def _kinds(owner: object, base: str, *public: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the private base class, which also matches custom layers, or else the public classes."""
    found = getattr(owner, base, None)
    return public if found is None else (found,)


TRANSPOSED_CONVOLUTIONS = _kinds(
    nn.modules.conv, "_ConvTransposeNd", nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)
CONVOLUTIONS = _kinds(
    nn.modules.conv,
    "_ConvNd",
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""All convolution classes, including transposed convolutions."""
DROPOUTS = _kinds(
    nn.modules.dropout,
    "_DropoutNd",
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
BATCH_NORMS = _kinds(
    nn.modules.batchnorm, "_BatchNorm", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
)


def queued(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for the work queued on the device.

    The tensor is pinned first: a copy from pageable memory would synchronise with the device.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
