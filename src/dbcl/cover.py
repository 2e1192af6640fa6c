"""Which tensors of a model leave the server, which stay at home, and which can be sketched."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dbcl._torch import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, forward_pre_hooks, inner_tensors
from dbcl.errors import PlanError
from dbcl.layout import Layout

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    *CONVOLUTIONS,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
"""PyTorch's layers that the words in `cover` know. Their outputs come first, but for transposed convolutions."""

ELSEWHERE = {
    "transformers.pytorch_utils.Conv1D": 0,
    "torch_geometric.nn.dense.linear.Linear": 1,
    "torch_geometric.nn.dense.linear.HeteroLinear": 1,
}
"""Layers of other libraries that the words know, by the name of their class, and the axis of their weight's inputs."""

Layers = Mapping[type[nn.Module] | str, int | tuple[int, ...]]
"""Layers of one's own: a class or a pattern of parameter names, and the axis (or axes) of the weight's inputs."""

WORDS = ("hidden", "large", "all")
"""What may stand in `cover` beside patterns: all known layers but the last, the large ones of those, and all."""

LARGE = 0.01
"""The share of the model's parameters from which on "large" covers a layer."""

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


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a client must have with the server's values: what is not trained, packed weights, the masks of pruning.

    >>> layer = torch.nn.utils.prune.l1_unstructured(nn.Linear(2, 1), "weight", 1)
    >>> list(fixed_tensors(layer))
    ['weight_mask']
    """
    pruned = [path for path, module in model.named_modules() if _old_hook(module) is BasePruningMethod]
    masks = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("_mask") and name.rpartition(".")[0] in pruned
    }
    return {**frozen_parameters(model), **packed_weights(model), **masks}


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that a quantised layer of PyTorch keeps in its state and that are no parameters; by name and place.

    >>> packed_weights(nn.Linear(2, 1))
    {}
    """
    packed = {name: value for name, value in model.state_dict().items() if isinstance(value, tuple)}
    found = {f"{name}.{place}": each for name, value in packed.items() for place, each in enumerate(value)}
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


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
    """Whether a tensor is made of floating-point numbers and nothing else, so that it can be veiled and sent.

    >>> plain_numbers(torch.ones(2)), plain_numbers(torch.ones(2, dtype=torch.complex64))
    (True, False)
    """
    return tensor.is_floating_point() and not tensor.is_quantized and inner_tensors(tensor).keys() == {""}


def cannot_be_sent(model: nn.Module) -> list[str]:
    """A complaint for each trained parameter that is no plain tensor of floating-point numbers.

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
    """A complaint for whatever in a model would still belong to the original in a copy of it, and so not be trained.

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
    """Whether a function uses one of some modules, or a method of one, as a variable from outside."""
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
    """The module that holds a tensor, and the tensor's name in it.

    >>> owner(nn.Sequential(nn.Linear(2, 2)), "0.weight")
    (Linear(in_features=2, out_features=2, bias=True), 'weight')
    """
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


class Covered(NamedTuple):
    """The names to sketch and the axes of their inputs, those of them that no pattern named, what is left out and why,
    and all problems."""

    names: dict[str, tuple[int, ...]]
    by_word: set[str]
    left_out: dict[str, str]
    problems: list[str]


def covered_names(model: nn.Module, cover: Cover, layers: Layers | None = None) -> Covered:
    """Choose what is sketched by `WORDS` and name patterns, in their order; "!pattern" takes away.

    What a word covers and cannot be sketched is left out; what a pattern names and cannot be sketched is a problem.
    `layers` are further layers for the words to know, as for `SketchPlan.of`.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> covered_names(model, "hidden").names, sorted(covered_names(model, ["hidden", "3.*"]).names)
    ({'0.weight': ()}, ['0.weight', '3.weight'])
    """
    names = dict(model.named_parameters())
    if isinstance(cover, str) and cover not in WORDS:
        raise PlanError(f"cover must be 'hidden', 'large', 'all' or a list of words and name patterns, got {cover!r}")
    patterns = [cover] if isinstance(cover, str) else list(cover)
    by_word, matched = set[str](), set[str]()
    inputs, problems = _layouts(model, layers or {})
    for pattern in patterns:
        if pattern in WORDS:
            found, trouble = _by_word(model, pattern, inputs)
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
    reasons = {
        name: _not_coverable(model, name, names[name], aliases[name], inputs) for name in sorted(by_word | matched)
    }
    bad = {name: reason for name, reason in reasons.items() if reason}
    out = "leave it out with '!{0}' in cover"
    problems += [f"{name}: {reason}; or {out.format(name)}" for name, reason in bad.items() if name in matched]
    left_out = {name: reason for name, reason in bad.items() if name not in matched}
    chosen = {name: inputs.get(name, ()) for name in reasons if names[name].ndim >= 2 and name not in bad}
    if not chosen and not problems:
        problems.append(nothing_left(left_out))
    return Covered(chosen, chosen.keys() - matched, left_out, problems)


def without_values(model: nn.Module) -> list[str]:
    """A complaint for each parameter that has no shape or no numbers yet, and for a compiled script, which hides them.

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


def _by_word(model: nn.Module, word: str, inputs: Mapping[str, tuple[int, ...]]) -> tuple[set[str], list[str]]:
    weights = dict[str, list[str]]()  # of every layer; what another parametrization computes is that layer's weight
    for name in inputs:
        path, _, _ = name.partition(".parametrizations.")
        weights.setdefault(path if path != name else name.rpartition(".")[0], []).append(name)
    layers = [weights[path] for path, _ in model.named_modules() if path in weights]
    if word != "all" and len(layers) == 1:
        return set(), [f"{layers[0][0]} is the output layer and nothing else can be covered; use cover='all'"]
    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    hidden = layers if word == "all" else layers[:-1]
    if word == "large":
        total = sum(parameter.numel() for parameter in model.parameters())
        sizes = [sum(model.get_parameter(name).numel() for name in weights) for weights in hidden]
        hidden = [weights for weights, size in zip(hidden, sizes, strict=True) if size >= LARGE * total]
        if layers and not hidden:
            return set(), [f"no layer but the output layer holds {LARGE:.0%} of the parameters; use cover='hidden'"]
    picked = [name for weights in hidden for name in weights]
    return {first[id(model.get_parameter(name))] for name in picked}, []  # a tied weight by its first name


def nothing_left(left_out: dict[str, str]) -> str:
    """What to say where nothing is covered: why each candidate is left out.

    >>> nothing_left({"0.weight": "has 1 inputs, too few for the ratio 2"})
    'nothing is left to cover: 0.weight has 1 inputs, too few for the ratio 2'
    """
    if left_out:
        return "nothing is left to cover: " + "; ".join(f"{name} {reason}" for name, reason in left_out.items())
    return "the model has nothing to cover: no dense, convolutional, attention or recurrent weight"


def _layouts(model: nn.Module, layers: Layers) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The weights of all layers that are known, each with the axes of its inputs; and what is wrong with `layers`."""
    found, problems, used = dict[str, tuple[int, ...]](), list[str](), set[type | str]()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for local, parameter in _own_parameters(module):
            name = prefix + local
            given = [k for k in layers if (fnmatchcase(name, k) if isinstance(k, str) else isinstance(module, k))]
            used.update(given)
            if parameter.ndim < 2 or not (given or "weight" in local):
                continue
            axes = layers[given[-1]] if given else _known_inputs(module, parameter.ndim)
            if axes is None:
                continue
            try:
                found[name] = Layout.of(tuple(parameter.shape), axes).inputs
            except ValueError as error:
                problems.append(f"layers: {name}: {error}; name one axis or a tuple of them")
    missing = [key if isinstance(key, str) else key.__name__ for key in layers if key not in used]
    problems += [f"layers: {key!r} is no layer and no parameter of this model" for key in missing]
    return found, problems


def _own_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a module itself, those under its parametrizations too."""
    own = list[tuple[str, Tensor]](module.named_parameters(recurse=False))
    if is_parametrized(module):
        own += module.get_submodule("parametrizations").named_parameters("parametrizations")
    return own


def _known_inputs(module: nn.Module, ndim: int) -> int | tuple[int, ...] | None:
    """On which axes of their weights a kind of layer has its inputs; None where the kind is not known."""
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return (0, *range(2, ndim))
    if isinstance(module, LAYERS):
        return tuple(range(1, ndim))
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((ELSEWHERE[kind] for kind in kinds if kind in ELSEWHERE), None)


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """For every parameter, all its names in the model; tied parameters have several."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return {name: places[id(parameter)] for name, parameter in model.named_parameters()}


OLD_HOOKS: dict[type[Any], str] = {
    WeightNorm: "torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: "torch.nn.utils.prune.remove, to make the pruning permanent",
}
"""Hooks that compute a weight before every forward pass, and what to use instead."""


def _old_hook(module: nn.Module) -> type | None:
    """The kind of old-style hook that a module has."""
    return next((kind for hook in forward_pre_hooks(module) for kind in OLD_HOOKS if isinstance(hook, kind)), None)


POWER_STEPS = 15
"""Steps of power iteration after a change of weights: as many as PyTorch takes for a new spectral norm."""


@torch.no_grad()
def recompute(model: nn.Module) -> None:
    """Bring up to date what a model derives from its parameters: the weights of old-style hooks, and spectral norms.

    A spectral norm keeps an estimate of two singular vectors in buffers, and takes one step towards them in each
    training pass. Weights that came from elsewhere need more than one.

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


def _not_coverable(
    model: nn.Module, name: str, parameter: Tensor, aliases: list[str], inputs: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Why a parameter cannot be sketched; None where it can, and for vectors, which never are."""
    module, _ = owner(model, name)
    if parameter.ndim < 2:
        return None
    if not parameter.requires_grad:
        return "is frozen and stays at home"
    if len(aliases) > 1:
        return f"is one tensor with {', '.join(aliases[1:])}, and tied weights cannot be covered; untie them"
    if isinstance(module, ParametrizationList):
        return "belongs to another parametrization; remove that one"
    hook = _old_hook(module)
    if hook is not None:
        return f"is computed by an old-style hook ({hook.__name__}) and cannot be covered; use {OLD_HOOKS[hook]}"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
        return "an embedding with sparse gradients or max_norm cannot be covered"
    if parameter.ndim > 2 and name not in inputs:
        shape = tuple(parameter.shape)
        return f"has shape {shape} in a layer that is not known; say which axis has its inputs: layers={{{name!r}: -1}}"
    return None
