"""Which tensors of a model leave the server, which stay at home, and which can be sketched."""

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dbcl._torch import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, forward_pre_hooks
from dbcl.errors import PlanError

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    *CONVOLUTIONS,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
"""The layers that the words in `cover` know; any other matrix is covered by naming it."""

WORDS = ("hidden", "all")
"""What may stand in `cover` beside patterns: all known layers but the last one, and all known layers."""

STATISTICS = ("running_mean", "running_var")
"""The buffers of normalisation layers, which are sent."""

Cover = str | Sequence[str]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model that a state dict holds, tied ones once.

    >>> list(named_tensors(nn.BatchNorm1d(3)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def broadcast_names(model: nn.Module, buffers: Sequence[str] = ()) -> list[str]:
    """The tensors of a model that leave the server: what is trained, normalisation statistics, and named buffers.

    `buffers` are patterns. Everything else stays at home: frozen parameters, and buffers that are constants, such as
    a causal mask or a table of positions. A client has those of its own copy of the network.

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


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, by name.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.weight.requires_grad_(False)
    >>> list(frozen_parameters(layer))
    ['weight']
    """
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def fingerprint(tensor: Tensor) -> str:
    """A digest of a tensor's dtype, shape and bytes: equal on two machines where the tensors are equal.

    >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)) != fingerprint(torch.ones(2))
    True
    """
    plain = tensor.detach().cpu()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    if plain.numel():
        digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name in it.

    >>> owner(nn.Sequential(nn.Linear(2, 2)), "0.weight")
    (Linear(in_features=2, out_features=2, bias=True), 'weight')
    """
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


class Covered(NamedTuple):
    """The names to sketch, those of them that no pattern named, what is left out and why, and all problems."""

    names: set[str]
    by_word: set[str]
    left_out: dict[str, str]
    problems: list[str]


def covered_names(model: nn.Module, cover: Cover) -> Covered:
    """Choose what is sketched by words ("hidden", "all") and name patterns, in their order; "!pattern" takes away.

    What a word covers and cannot be sketched is left out; what a pattern names and cannot be sketched is a problem.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> covered_names(model, "hidden").names, sorted(covered_names(model, ["hidden", "3.*"]).names)
    ({'0.weight'}, ['0.weight', '3.weight'])
    """
    names = dict(model.named_parameters())
    if isinstance(cover, str) and cover not in WORDS:
        raise PlanError(f"cover must be 'hidden', 'all' or a list of words and name patterns, got {cover!r}")
    patterns = [cover] if isinstance(cover, str) else list(cover)
    by_word, matched, problems = set[str](), set[str](), list[str]()
    for pattern in patterns:
        if pattern in WORDS:
            found, trouble = _by_word(model, pattern)
            by_word |= found
            problems += trouble
            continue
        found = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not found:
            problems.append(f"pattern {pattern!r} matches no parameter; there are {', '.join(names)}")
        if pattern.startswith("!"):
            by_word, matched = by_word - found, matched - found
        else:
            matched |= found
    aliases = _names_of(model)
    reasons = {name: _not_coverable(model, name, names[name], aliases[name]) for name in sorted(by_word | matched)}
    bad = {name: reason for name, reason in reasons.items() if reason}
    out = "leave it out with '!{0}' in cover"
    problems += [f"{name}: {reason}; or {out.format(name)}" for name, reason in bad.items() if name in matched]
    left_out = {name: reason for name, reason in bad.items() if name not in matched}
    chosen = {name for name in reasons if names[name].ndim >= 2 and name not in bad}
    if not chosen and not problems:
        problems.append(nothing_left(left_out))
    return Covered(chosen, chosen - matched, left_out, problems)


def without_shape(model: nn.Module) -> list[str]:
    """A complaint for each lazy parameter, which has no shape to plan for.

    >>> without_shape(nn.LazyLinear(3))
    ['weight: has no shape yet; run one batch through the model first']
    """
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter) and "weight" in name]
    return [f"{name}: has no shape yet; run one batch through the model first" for name in lazy]


def _by_word(model: nn.Module, word: str) -> tuple[set[str], list[str]]:
    layers = [_weights_of(path, module) for path, module in model.named_modules() if isinstance(module, LAYERS)]
    layers = [weights for weights in layers if weights]
    if word == "hidden" and len(layers) == 1:
        return set(), [f"{layers[0][0]} is the output layer and nothing else can be covered; use cover='all'"]
    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    picked = [name for weights in layers[: len(layers) - (word == "hidden")] for name in weights]
    return {first[id(model.get_parameter(name))] for name in picked}, []  # a tied weight by its first name


def nothing_left(left_out: dict[str, str]) -> str:
    """What to say where nothing is covered: why each candidate is left out.

    >>> nothing_left({"0.weight": "has 1 inputs, too few for the ratio 2"})
    'nothing is left to cover: 0.weight has 1 inputs, too few for the ratio 2'
    """
    if left_out:
        return "nothing is left to cover: " + "; ".join(f"{name} {reason}" for name, reason in left_out.items())
    return "the model has nothing to cover: no dense, convolutional, attention or recurrent weight"


def _weights_of(path: str, module: nn.Module) -> list[str]:
    prefix = f"{path}." if path else ""
    own = module.named_parameters(recurse=False)
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return []
    return [prefix + name for name, parameter in own if "weight" in name and parameter.ndim >= 2]


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """For every parameter, all its names in the model; tied parameters have several."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return {name: places[id(parameter)] for name, parameter in model.named_parameters()}


OLD_HOOKS: tuple[tuple[type, str], ...] = (
    (WeightNorm, "torch.nn.utils.parametrizations.weight_norm"),
    (SpectralNorm, "torch.nn.utils.parametrizations.spectral_norm"),
    (BasePruningMethod, "torch.nn.utils.prune.remove, to make the pruning permanent"),
)
"""Hooks that compute a weight before every forward pass, and what to use instead."""


def _not_coverable(model: nn.Module, name: str, parameter: Tensor, aliases: list[str]) -> str | None:
    """Why a parameter cannot be sketched; None where it can, and for vectors, which never are."""
    module, _ = owner(model, name)
    if parameter.ndim < 2:
        return None
    if not parameter.requires_grad:
        return "is frozen and stays at home"
    if len(aliases) > 1:
        return f"is one tensor with {', '.join(aliases[1:])}, and tied weights cannot be covered; untie them"
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return "a transposed convolution's weight has its inputs first and cannot be covered"
    if isinstance(module, ParametrizationList):
        return "belongs to another parametrization; remove that one"
    for hook in forward_pre_hooks(module):
        for kind, instead in OLD_HOOKS:
            if isinstance(hook, kind):
                return f"is computed by an old-style hook ({kind.__name__}) and cannot be covered; use {instead}"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
        return "an embedding with sparse gradients or max_norm cannot be covered"
    return None
