"""Checkpoint contents: the plain values and tensors of several named parts."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class State(NamedTuple):
    """State of an object: JSON-serialisable values, and tensors by name.

    >>> import torch
    >>> whole = join(server=State({"round": 3}, {"W": torch.zeros(2)}), veil=State({}, {}))
    >>> whole.values, list(whole.tensors)
    ({'server': {'round': 3}, 'veil': {}}, ['server.W'])
    >>> whole.part("server").tensors
    {'W': tensor([0., 0.])}
    """

    values: dict[str, Any]
    tensors: dict[str, Tensor]

    def part(self, name: str) -> "State":
        """Return the state that `join` stored under a name.

        Raises:
            KeyError: No part has this name.
        """
        prefix = f"{name}."
        inside = {key.removeprefix(prefix): each for key, each in self.tensors.items() if key.startswith(prefix)}
        return State(self.values[name], inside)


def join(**parts: State) -> State:
    """Combine named states into one.

    >>> join(a=State({"x": 1}, {})).part("a").values
    {'x': 1}
    """
    tensors = {f"{name}.{key}": each for name, part in parts.items() for key, each in part.tensors.items()}
    return State({name: part.values for name, part in parts.items()}, tensors)


class Stateful(Protocol):
    """Interface of objects that save and restore their own state."""

    def state(self) -> State:
        """Return a copy of the state."""

    def load_state(self, state: State) -> None:
        """Restore a state returned by `state`."""


@contextlib.contextmanager
def restored_on_error(*parts: Stateful) -> Iterator[None]:
    """Restore the state of some objects if the block raises an exception."""
    before = [part.state() for part in parts]
    try:
        yield
    except BaseException:
        for part, state in zip(parts, before, strict=True):
            part.load_state(state)
        raise
