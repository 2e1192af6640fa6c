"""State of a Flower strategy as plain values and tensors for a checkpoint, without pickle."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from dbcl.errors import ProtocolError, shown
from dbcl.state import State


class StrategyState:
    """Saves the attributes that strategies changed since construction.

    Covers a strategy and the strategies that it wraps. Supported values are arrays, numbers,
    strings, Flower's records, and lists, tuples and dicts of these values. Unchanged settings are
    not saved, because the constructor sets them again. A resumed run may therefore use other
    settings.

    Args:
        strategy: A newly constructed strategy.

    >>> from flwr.serverapp.strategy import FedAdam
    >>> strategy = FedAdam()
    >>> kept = StrategyState(strategy)
    >>> strategy.m_t = {"w": np.ones(2)}
    >>> StrategyState(again := FedAdam()).load_state(kept.state())
    >>> again.m_t
    {'w': array([1., 1.])}
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategies = chain(strategy)
        self._first = [self._texts(each) for each in self.strategies]

    @property
    def names(self) -> list[str]:
        """Class names of the strategies, outermost first."""
        return [type(strategy).__name__ for strategy in self.strategies]

    def forgotten(self) -> list[str]:
        """Return the attributes that a checkpoint cannot store.

        Functions are settings and not listed.
        """
        found = []
        for strategy in self.strategies:
            for name, value in vars(strategy).items():
                if not callable(value) and not isinstance(value, Strategy) and not _storable(value):
                    found.append(f"{type(strategy).__name__}.{name} (a {type(value).__name__})")
        return found

    def state(self) -> State:
        """Return the attributes that changed since the strategy was built."""
        tensors: dict[str, Tensor] = {}
        attributes = []
        for number, (strategy, first) in enumerate(zip(self.strategies, self._first, strict=True)):
            values = {}
            for name, value in vars(strategy).items():
                if not _storable(value) or (name in first and first[name] == _text(value)):
                    continue
                values[name] = _put(value, f"{number}.{name}", tensors)
            attributes.append(values)
        return State({"names": self.names, "attributes": attributes}, tensors)

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`. After an error, nothing has changed.

        Raises:
            ProtocolError: The state belongs to other strategies.
        """
        values = state.values
        if values["names"] != self.names:
            raise ProtocolError(
                f"the checkpoint is of {' around '.join(map(str, values['names']))} and the strategy is "
                f"{' around '.join(self.names)}; use the same, or another checkpoint folder"
            )
        restored = [
            {name: _get(stored, state.tensors) for name, stored in attributes.items()}
            for attributes in values["attributes"]
        ]
        for strategy, attributes in zip(self.strategies, restored, strict=True):
            if wrong := [name for name in attributes if callable(getattr(strategy, name, None))]:
                raise ProtocolError(f"the checkpoint is damaged: {shown(wrong[0])} is a method of the strategy")
        for strategy, attributes in zip(self.strategies, restored, strict=True):
            for name, value in attributes.items():
                setattr(strategy, name, value)

    @contextlib.contextmanager
    def waiting_for_at_most(self, nodes: float) -> Iterator[None]:
        """Context manager that lowers the numbers of nodes for which the strategies wait.

        A secure aggregation group that has permanently lost a node can only have the remaining
        nodes.

        >>> from flwr.serverapp.strategy import FedAvg
        >>> strategy = FedAvg(min_available_nodes=10)
        >>> with StrategyState(strategy).waiting_for_at_most(9):
        ...     strategy.min_available_nodes
        9
        """
        before = [
            (strategy, name, value)
            for strategy in self.strategies
            for name in ("min_available_nodes", "min_train_nodes")
            if (value := getattr(strategy, name, 0)) > nodes
        ]
        for strategy, name, _ in before:
            setattr(strategy, name, nodes)
        try:
            yield
        finally:
            for strategy, name, value in before:
                setattr(strategy, name, value)

    @staticmethod
    def _texts(strategy: Strategy) -> dict[str, str | None]:
        return {name: _text(value) for name, value in vars(strategy).items() if _storable(value)}


def chain(strategy: Strategy) -> list[Strategy]:
    """Return a strategy and its wrapped strategies, outermost first.

    >>> from flwr.serverapp.strategy import FedAvg, DifferentialPrivacyServerSideFixedClipping as Clipping
    >>> [type(each).__name__ for each in chain(Clipping(FedAvg(), 1.0, 1.0, 2))]
    ['DifferentialPrivacyServerSideFixedClipping', 'FedAvg']
    """
    found = [strategy]
    while isinstance(inner := getattr(found[-1], "strategy", None), Strategy):
        found.append(inner)
    return found


def _storable(value: Any) -> bool:
    if isinstance(value, dict | ConfigRecord | MetricRecord):
        return all(isinstance(key, str | int) for key in value) and all(map(_storable, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_storable, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiub"
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain or isinstance(value, bytes | np.generic | Tensor | ArrayRecord)


def _text(value: Any) -> str | None:
    """Return a string for comparing values without tensors, or None for a value with tensors."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_put(value, "", tensors))
    return None if tensors else text


def _put(value: Any, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    """Convert a value to JSON with a type tag; its arrays are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().clone()
        return ["tensor", path]
    if isinstance(value, np.ndarray | np.generic):
        tensors[path] = torch.from_numpy(np.array(value))
        return ["array" if isinstance(value, np.ndarray) else "number", path]
    if isinstance(value, ArrayRecord):
        return ["arrays", [[key, _put(array.numpy(), f"{path}.{key}", tensors)] for key, array in value.items()]]
    for kind, kept in (("config", ConfigRecord), ("metrics", MetricRecord), ("dict", dict)):
        if isinstance(value, kept):
            return [kind, [[key, _put(item, f"{path}.{key}", tensors)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        items = [_put(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
        return ["list" if isinstance(value, list) else "tuple", items]
    return ["bytes", value.hex()] if isinstance(value, bytes) else ["plain", value]


def _get(stored: list[Any], tensors: Mapping[str, Tensor]) -> Any:
    kind, value = stored
    if kind in ("tensor", "array", "number"):
        tensor = tensors[value].clone()
        return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[()]
    if kind in ("arrays", "config", "metrics", "dict"):
        items = {key: _get(item, tensors) for key, item in value}
        if kind == "arrays":
            return ArrayRecord({key: Array(array) for key, array in items.items()})
        return ConfigRecord(items) if kind == "config" else MetricRecord(items) if kind == "metrics" else items
    if kind in ("list", "tuple"):
        return [_get(item, tensors) for item in value] if kind == "list" else tuple(_get(i, tensors) for i in value)
    if kind not in ("bytes", "plain") or isinstance(value, list | dict):
        raise ProtocolError(f"the checkpoint is damaged: {shown(kind)} is no kind of value")
    return bytes.fromhex(value) if kind == "bytes" else value
