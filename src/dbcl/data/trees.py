"""Trees: nested tuples, lists and dictionaries of tensors, as model inputs, outputs and targets."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any
"""A tensor, or a tuple, list or dictionary of trees. The type is `Any` because libraries define
their own output types.
"""


def call(model: nn.Module, inputs: Tree) -> Tree:
    """Call a model with a dictionary as keyword arguments, or a tuple or list as positional
    arguments.

    >>> call(nn.Bilinear(2, 3, 4), (torch.zeros(5, 2), torch.zeros(5, 3))).shape
    torch.Size([5, 4])
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def call_with(model: nn.Module, values: Mapping[str, Tensor], inputs: Tree) -> Tree:
    """Call a model with the given values in place of its parameters and buffers.

    Unlike `torch.func.functional_call`, it supports models that register one module under two
    names. For these models PyTorch replaces the value twice and restores it once.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> call_with(nn.Sequential(layer, layer), {"0.weight": 2 * torch.eye(2)}, torch.ones(1, 2))
    tensor([[4., 4.]])
    """
    arguments = inputs if isinstance(inputs, Mapping | tuple | list) else (inputs,)
    positional, named = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    own = {name: tensor for name, tensor in _all_named(model) if name in values}
    given = {id(tensor): values[name] for name, tensor in own.items()}
    tied = {
        f"{path}.{name}".lstrip("."): given[id(tensor)]
        for path, module in model.named_modules()  # each module by its first name
        for name, tensor in _all_named(module, recurse=False)
        if id(tensor) in given
    }
    return torch.func.functional_call(model, {**values, **tied}, positional, named, tie_weights=False)


def _all_named(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply a function to the tensors of a tree; other values are unchanged.

    >>> map_tensors(len, {"ids": torch.zeros(3, 8), "mask": (torch.zeros(3), None)})
    {'ids': 3, 'mask': (3, None)}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {name: map_tensors(function, part) for name, part in tree.items()}
        return mapped if type(tree) is dict else type(tree)(**mapped)  # such as transformers' outputs
    if isinstance(tree, tuple | list):
        parts = [map_tensors(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        named = {field.name: map_tensors(function, getattr(tree, field.name)) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **named)
    return tree


def tensors(tree: Tree) -> Iterator[Tensor]:
    """Iterate over the tensors of a tree in order.

    >>> [len(tensor) for tensor in tensors({"ids": torch.zeros(3), "more": [torch.zeros(4)]})]
    [3, 4]
    """
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, tree)
    return iter(found)


def join(trees: Sequence[Tree]) -> Tree:
    """Concatenate trees of equal structure along the first axis of each tensor. Numbers, such as a
    loss, are averaged.

    >>> join([{"out": torch.zeros(2, 3)}, {"out": torch.ones(1, 3)}])["out"].shape
    torch.Size([3, 3])
    """
    columns = zip(*map(tensors, trees), strict=True)
    joined = iter([torch.cat(parts) if parts[0].ndim else torch.stack(parts).mean() for parts in columns])
    return map_tensors(lambda tensor: next(joined), trees[0])
