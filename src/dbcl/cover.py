"""Which tensors of a model leave the server, and which of them can be sketched."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from dbcl._torch import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from dbcl.errors import PlanError

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    *CONVOLUTIONS,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
"""The layers that `cover="hidden"` and `cover="all"` know; any other matrix is covered by naming it."""

Cover = str | Sequence[str]


def broadcast_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that leave the server: parameters, and floating-point buffers that a state dict holds.

    Tied parameters appear once. Integer buffers (a batch counter, an index table) are not sent: a client has those of
    its own copy of the network.

    >>> list(broadcast_tensors(nn.BatchNorm1d(3)))
    ['weight', 'bias', 'running_mean', 'running_var']
    """
    kept = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in kept and b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name in it.

    >>> owner(nn.Sequential(nn.Linear(2, 2)), "0.weight")
    (Linear(in_features=2, out_features=2, bias=True), 'weight')
    """
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def covered_names(model: nn.Module, cover: Cover) -> tuple[set[str], list[str]]:
    """The names to sketch, and all the problems with them.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    >>> covered_names(model, "hidden")
    ({'0.weight'}, [])
    """
    names = dict(model.named_parameters())
    if isinstance(cover, str):
        if cover not in ("hidden", "all"):
            raise PlanError(f"cover must be 'hidden', 'all' or a list of name patterns, got {cover!r}")
        layers = [_weights_of(path, module) for path, module in model.named_modules() if isinstance(module, LAYERS)]
        layers = [weights for weights in layers if weights]
        if cover == "hidden" and len(layers) == 1:
            return set(), [f"{layers[0][0]} is the output layer and nothing else can be covered; use cover='all'"]
        first = {id(parameter): name for name, parameter in reversed(names.items())}
        picked = [name for weights in layers[: len(layers) - (cover == "hidden")] for name in weights]
        chosen = {first[id(model.get_parameter(name))] for name in picked}  # a tied weight by its first name
        matched, problems = chosen, list[str]()
    else:
        matched, problems = _match(list(names), cover)
        chosen = {name for name in matched if names[name].ndim >= 2}
    aliases = _names_of(model)
    for name in sorted(matched):
        reason = _not_coverable(model, name, names[name], aliases[name])
        if reason:
            problems.append(reason)
    if not chosen and not problems:
        problems.append("the model has nothing to cover: no dense, convolutional, attention or recurrent weight")
    return chosen, problems


def without_shape(model: nn.Module) -> list[str]:
    """A complaint for each lazy parameter, which has no shape to plan for.

    >>> without_shape(nn.LazyLinear(3))
    ['weight: has no shape yet; run one batch through the model first']
    """
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter) and "weight" in name]
    return [f"{name}: has no shape yet; run one batch through the model first" for name in lazy]


def _weights_of(path: str, module: nn.Module) -> list[str]:
    prefix = f"{path}." if path else ""
    own = module.named_parameters(recurse=False)
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return []
    return [prefix + name for name, parameter in own if "weight" in name and parameter.ndim >= 2]


def _match(names: list[str], patterns: Sequence[str]) -> tuple[set[str], list[str]]:
    matched: set[str] = set()
    problems = []
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern.removeprefix("!"))}
        if not found:
            problems.append(f"pattern {pattern!r} matches no parameter; there are {', '.join(names)}")
        matched = matched - found if pattern.startswith("!") else matched | found
    return matched, problems


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """For every parameter, all its names in the model; tied parameters have several."""
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return {name: places[id(parameter)] for name, parameter in model.named_parameters()}


def _not_coverable(model: nn.Module, name: str, parameter: Tensor, aliases: list[str]) -> str | None:
    """Why a parameter that was asked for cannot be sketched; None where it can, and for vectors, which never are."""
    module, _ = owner(model, name)
    out = f"leave it out with '!{name}' in cover"
    if parameter.ndim < 2:
        return None
    if len(aliases) > 1:
        others = ", ".join(aliases[1:])
        return f"{name}: is one tensor with {others}, and tied weights cannot be covered; untie them or {out}"
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return f"{name}: a transposed convolution's weight has its inputs first and cannot be covered; {out}"
    if isinstance(module, ParametrizationList):
        return f"{name}: belongs to another parametrization; remove that one or {out}"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.sparse or module.max_norm is not None):
        return f"{name}: an embedding with sparse gradients or max_norm cannot be covered; {out}"
    if not parameter.is_floating_point():
        return f"{name}: {parameter.dtype} cannot be covered; {out}"
    return None
