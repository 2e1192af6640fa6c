"""Every private name of PyTorch that this package uses, each with a public fallback.

A name is looked up once, when this module is imported, so that a layer's forward pass calls PyTorch without a detour.
A version of PyTorch that lacks one gives the same results with its fallback, only more slowly; `tests/test_torch.py`
takes each name away in turn. Look names up with `getattr(owner, name, fallback)` here: that is what the tests replace.
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
"""True while `torch.func` (vmap, grad, ...) runs the current call. No public function tells; True is always safe, since
it only makes autograd differentiate the gathers of a sketch one by one.
"""


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Hold back PyTorch's warning that `vmap` has no batched form of an operation and loops over it, until the end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        yield


def _autocast_on_any_device() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "mps", "xpu"))


autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", _autocast_on_any_device)
"""True while autocast is on for any device."""


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the preparations for `torch.func`, which take a tenth of a small layer's time.

    Only for code that has asked `functorch_active` first.
    """
    apply: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return apply


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())


version: Callable[[Tensor], object] = attrgetter("_version") if getattr(Tensor, "_version", None) else _bytes
"""Return a value that changes when a tensor is changed in place: its version counter, or else its contents."""

view_base: Callable[[Tensor], Tensor | None] = (
    attrgetter("_base") if getattr(Tensor, "_base", None) else lambda tensor: None
)
"""The tensor that a view was made of, which is None for others; without the private name, None for all: what a view
shares is in its `untyped_storage()` too."""

relu_backward: Callable[[Tensor, Tensor, float], Tensor] = getattr(
    torch.ops.aten, "threshold_backward", lambda grad, out, threshold: grad.masked_fill(out <= threshold, 0)
)
"""The gradient of a ReLU (threshold 0) from that of its output and the output itself."""


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
"""The submodules of a module, by name."""
own_parameters: Callable[[nn.Module], Mapping[str, Any]] = (
    _named_parameters if getattr(_probe, "_parameters", None) is None else attrgetter("_parameters")
)
"""The parameters of a module itself, by name; None for one that was switched off, such as a bias."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on a module; True if PyTorch does not tell.

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
    """Return whether a weight is one of PyTorch's expanded weights, which only layers accept.

    >>> is_expanded(torch.ones(2))
    False
    """
    return type(tensor).__name__ == "ExpandedWeight"


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the inner tensors of a tensor subclass (quantised weights) by ".attribute"; a plain tensor has none.

    >>> list(inner_tensors(torch.ones(2)))
    ['']
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {"": tensor.detach()}
    held = {name: getattr(tensor, name) for name in flatten()[0]}
    return {f".{name}{rest}": each for name, part in held.items() for rest, each in inner_tensors(part).items()}


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before a module's forward pass; none if PyTorch does not tell.

    >>> forward_pre_hooks(nn.Linear(2, 2))
    []
    """
    return list(getattr(module, "_forward_pre_hooks", {}).values())


def has_global_hooks() -> bool:
    """Return whether a forward or backward hook is registered for all modules; True if PyTorch does not tell.

    >>> has_global_hooks()
    False
    """
    return any(getattr(nn.modules.module, f"_global{name}", True) for name in _HOOKS)


def _kinds(owner: object, base: str, *public: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return a common base class, so that custom layers count too, or the public classes."""
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
"""All convolutions, transposed ones too."""
DROPOUTS = _kinds(
    nn.modules.dropout,
    "_DropoutNd",
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
BATCH_NORMS = _kinds(
    nn.modules.batchnorm, "_BatchNorm", nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
)


def queued(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device, without waiting for the device's queued work.

    A copy from ordinary memory waits; one from memory that is locked in its place is queued like any other work.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
