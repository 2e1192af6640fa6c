"""Coverage: selection of the weights to sketch."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from dbcl._torch import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from dbcl.config import COVERAGE_WORDS, Coverage, Layers
from dbcl.errors import PlanError
from dbcl.model.layout import Layout
from dbcl.model.tensors import OLD_HOOKS, STATISTICS, old_hook, owner, plain_numbers

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    *CONVOLUTIONS,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
"""PyTorch layers that the keywords in `coverage` select. Except for transposed convolutions, the
first axis of their weights is the output.
"""


ELSEWHERE = {
    "transformers.pytorch_utils.Conv1D": 0,
    "torch_geometric.nn.dense.linear.Linear": 1,
    "torch_geometric.nn.dense.linear.HeteroLinear": 1,
}
"""Layers of other libraries that the keywords select: class name, and the input axis of the weight.
"""


WORDS = COVERAGE_WORDS
"""Keywords of `coverage`: all known layers except the last, the large ones among them, and all.

"auto" is "large" without layers whose accuracy a sketch would reduce, and may select no layer.
"""


MIN_INPUTS = 32
"""Minimum number of inputs of a layer for "auto". Sketching smaller layers costs too much accuracy.
"""


MIN_LARGE_SHARE = 0.01
"""Minimum share of the model's parameters in a layer for "large"."""


def shared_memory(model: nn.Module) -> list[str]:
    """Return a complaint for each trained parameter that shares memory with another parameter. An
    optimiser step on either parameter would change both.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight.data = model[0].weight.data
    >>> shared_memory(model)
    ["1.weight: lies in the memory of 0.weight; tie them, '1.weight = 0.weight', or give it a clone"]
    """
    first, complaints = dict[tuple[torch.device, int], str](), []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta or not parameter.numel():
            continue
        if parameter.requires_grad and plain_numbers(parameter):
            other = first.setdefault((parameter.device, parameter.data_ptr()), name)
            if other != name:
                remedy = f"tie them, '{name} = {other}', or give it a clone"
                complaints.append(f"{name}: lies in the memory of {other}; {remedy}")
    return complaints


class Covered(NamedTuple):
    """Result of the selection: the weights to sketch with their input axes, the names selected only
    by a keyword, the skipped weights with reasons, and the problems.
    """

    names: dict[str, tuple[int, ...]]
    by_word: set[str]
    left_out: dict[str, str]
    problems: list[str]


def covered_names(model: nn.Module, coverage: Coverage, layers: Layers | None = None) -> Covered:
    """Select the weights to sketch by `WORDS` and name patterns, applied in order; "!pattern"
    removes.

    A weight that cannot be sketched is skipped if a keyword selects it, and reported as a problem
    if a name pattern selects it.

    Args:
        model: The network.
        coverage: Keywords and name patterns.
        layers: Custom layers for the keywords, as in `SketchConfig.layers`.

    Returns:
        The selection.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> covered_names(model, "hidden").names, sorted(covered_names(model, ["hidden", "3.*"]).names)
    ({'0.weight': ()}, ['0.weight', '3.weight'])
    """
    names = dict(model.named_parameters())
    if isinstance(coverage, str) and coverage not in WORDS:
        words = ", ".join(map(repr, WORDS))
        raise PlanError(f"coverage must be one of {words} or a list of words and name patterns, got {coverage!r}")
    patterns = [coverage] if isinstance(coverage, str) else list(coverage)
    by_word, matched, harmed = set[str](), set[str](), dict[str, str]()
    inputs, problems = _layouts(model, layers or {})
    for pattern in patterns:
        if pattern == "auto":
            large, _ = _by_word(model, "large", inputs)
            harmed = {name: why for name in sorted(large) if (why := _harmed(model, name, inputs)) is not None}
            by_word |= large - harmed.keys()
            continue
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
    out = "leave it out with '!{0}' in coverage"
    problems += [f"{name}: {reason}; or {out.format(name)}" for name, reason in bad.items() if name in matched]
    left_out = {name: reason for name, reason in {**harmed, **bad}.items() if name not in matched}
    chosen = {name: inputs.get(name, ()) for name in reasons if names[name].ndim >= 2 and name not in bad}
    if not chosen and not problems and "auto" not in patterns:
        problems.append(nothing_left(left_out))
    return Covered(chosen, chosen.keys() - matched, left_out, problems)


def _by_word(model: nn.Module, word: str, inputs: Mapping[str, tuple[int, ...]]) -> tuple[set[str], list[str]]:
    weights = dict[str, list[str]]()  # of every layer; what another parametrization computes is that layer's weight
    for name in inputs:
        path, _, _ = name.partition(".parametrizations.")
        weights.setdefault(path if path != name else name.rpartition(".")[0], []).append(name)
    layers = [weights[path] for path, _ in model.named_modules() if path in weights]
    if word != "all" and len(layers) == 1:
        return set(), [f"{layers[0][0]} is the output layer and nothing else can be covered; use coverage='all'"]
    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    hidden = layers if word == "all" else layers[:-1]
    if word == "large":
        hidden = _large(model, hidden)
        if layers and not hidden:
            return set(), [
                f"no layer but the output layer holds {MIN_LARGE_SHARE:.0%} of the parameters; use coverage='hidden'"
            ]
    picked = [name for weights in hidden for name in weights]
    return {first[id(model.get_parameter(name))] for name in picked}, []  # a tied weight by its first name


def _large(model: nn.Module, layers: Sequence[list[str]]) -> list[list[str]]:
    """Return the layers with at least `MIN_LARGE_SHARE` of the trained parameters."""

    def trained(parameters: Iterable[Tensor]) -> int:
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    least = MIN_LARGE_SHARE * trained(model.parameters())
    return [weights for weights in layers if trained(map(model.get_parameter, weights)) >= max(1, least)]


def _harmed(model: nn.Module, name: str, inputs: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the reason why sketching a layer would reduce accuracy, or None."""
    parameters = list(model.parameters())
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    if frozen > sum(parameter.numel() for parameter in parameters) / 2:
        return "is a small part of a network that is mostly frozen"
    if any(buffer.rpartition(".")[2] in STATISTICS for buffer, _ in model.named_buffers()):
        return "feeds a normalisation layer, whose statistics would be those of sketched weights"
    dim = Layout(tuple(model.get_parameter(name).shape), inputs.get(name, ())).dim
    return f"has {dim} inputs, and a sketch of fewer than {MIN_INPUTS} loses too much" if dim < MIN_INPUTS else None


def nothing_left(left_out: dict[str, str]) -> str:
    """Explain an empty coverage: the reason for skipping each candidate.

    >>> nothing_left({"0.weight": "has 1 inputs, too few for the ratio 2"})
    'nothing is left to cover: 0.weight has 1 inputs, too few for the ratio 2'
    """
    if left_out:
        return "nothing is left to cover: " + "; ".join(f"{name} {reason}" for name, reason in left_out.items())
    return "the model has nothing to cover: no dense, convolutional, attention or recurrent weight"


def _layouts(model: nn.Module, layers: Layers) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the weights of all known layers with their input axes, and the problems with `layers`."""
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
                found[name] = Layout.from_axes(tuple(parameter.shape), axes).inputs
            except ValueError as error:
                problems.append(f"layers: {name}: {error}; name one axis or a tuple of them")
    missing = [key if isinstance(key, str) else key.__name__ for key in layers if key not in used]
    problems += [f"layers: {key!r} is no layer and no parameter of this model" for key in missing]
    return found, problems


def _own_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters registered on a module itself, including parametrized ones."""
    own = list[tuple[str, Tensor]](module.named_parameters(recurse=False))
    if is_parametrized(module):
        own += module.get_submodule("parametrizations").named_parameters("parametrizations")
    return own


def _known_inputs(module: nn.Module, ndim: int) -> int | tuple[int, ...] | None:
    """Return the input axes of a layer's weights; None for unknown layers."""
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return (0, *range(2, ndim))
    if isinstance(module, LAYERS):
        return tuple(range(1, ndim))
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((ELSEWHERE[kind] for kind in kinds if kind in ELSEWHERE), None)


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of every parameter of the model. A tied parameter has several names."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return {name: places[id(parameter)] for name, parameter in model.named_parameters()}


def _not_coverable(
    model: nn.Module, name: str, parameter: Tensor, aliases: list[str], inputs: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Return the reason why a parameter cannot be sketched.

    Return None if it can be sketched, and for vectors, which are never sketched.
    """
    module, _ = owner(model, name)
    if parameter.ndim < 2:
        return None
    if not parameter.requires_grad:
        return "is frozen and is not sent"
    if len(aliases) > 1:
        return f"is one tensor with {', '.join(aliases[1:])}, and tied weights cannot be covered; untie them"
    if isinstance(module, ParametrizationList):
        return "belongs to another parametrization; remove that one"
    hook = old_hook(module)
    if hook is not None:
        return f"is computed by an old-style hook ({hook.__name__}) and cannot be covered; use {OLD_HOOKS[hook]}"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
        return "an embedding with sparse gradients or max_norm cannot be covered"
    if parameter.ndim > 2 and name not in inputs:
        shape = tuple(parameter.shape)
        return f"has shape {shape} in a layer that is not known; say which axis has its inputs: layers={{{name!r}: -1}}"
    return None
