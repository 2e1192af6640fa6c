"""What crosses Flower's wire: a broadcast as bytes in every message, an update as bytes in every answer to train."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from dbcl import protocol
from dbcl.errors import ProtocolError
from dbcl.privacy import UpdateNoise
from dbcl.protocol import Broadcast, decode_broadcast, encode

RECORD = "dbcl"
"""The name of the record that holds the bytes of a message, as one value that Flower's logs mask."""

EXAMPLES = "num-examples"
"""Flower's own name for how many examples an answer counts for."""


def blinded(module: nn.Module, message: Message) -> nn.Module:
    """Make a client's model from a message of `DoubleBlind`: a copy of `module` with the compact weights in it.

    Train it with any loop and any optimiser; see `dbcl.blinded` for learning rates.

    >>> import dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)  # messages can only be made where there is a grid
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), cover="all").open_round()
    >>> message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": encode(broadcast)})}), 1000, "train")
    >>> {name: tuple(parameter.shape) for name, parameter in blinded(nn.Linear(6, 2), message).named_parameters()}
    {'bias': (2,), 'parametrizations.weight.original': (2, 3)}
    """
    return protocol.blinded(module, received(message))


def reply(
    model: nn.Module | None,
    message: Message,
    *,
    examples: int,
    metrics: Mapping[str, float] | None = None,
    noise: UpdateNoise | None = None,
) -> Message:
    """Answer a message of `DoubleBlind`: to train with the change of the model, to evaluate with the metrics alone.

    In a function that evaluates, `model` may be None. With `noise` the client clips its update and adds noise to it.

    >>> import dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), cover="all").open_round()
    >>> message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": encode(broadcast)})}), 1000, "train")
    >>> answer = reply(blinded(nn.Linear(6, 2), message), message, examples=600, metrics={"loss": 0.5})
    >>> dbcl.decode_update(answer.content["dbcl"]["update"]).examples
    600
    """
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    if message.metadata.message_type.split(".")[0] != "train":
        return Message(RecordDict({"metrics": MetricRecord({EXAMPLES: examples, **numbers})}), reply_to=message)
    if model is None:
        raise ProtocolError("an answer to a train message needs the trained model, got None")
    update = protocol.update(model, received(message), examples=examples, metrics=numbers, noise=noise)
    return Message(RecordDict({RECORD: ConfigRecord({"update": encode(update)})}), reply_to=message)


def received(message: Message) -> Broadcast:
    """The broadcast in a message."""
    data = _data(message, "broadcast")
    if data is None:
        raise ProtocolError(
            "this message holds no dbcl broadcast; wrap the server's strategy: DoubleBlind(strategy, model)"
        )
    return _decoded(data)


def holds_only(message: Message, own: ArrayRecord) -> bool:
    """Whether the arrays in a strategy's message are those of the model and no others."""
    records = list(message.content.array_records.values())
    return len(records) == 1 and set(records[0]) == set(own)


def with_broadcast(message: Message, data: bytes, *, ttl: float) -> Message:
    """A strategy's message anew: to the same node, with the same configuration, and a broadcast instead of arrays."""
    configs = {key: ConfigRecord(dict(value)) for key, value in message.content.config_records.items()}
    content = RecordDict({**configs, RECORD: ConfigRecord({"broadcast": data})})
    meta = message.metadata
    return Message(content, meta.dst_node_id, meta.message_type, ttl=ttl, group_id=meta.group_id or None)


def update_of(message: Message) -> bytes:
    """The bytes of an update in an answer, not yet checked; a `ProtocolError` where there are none."""
    data = _data(message, "update")
    if data is None:
        raise ProtocolError(
            f"its answer holds no update; answer with dbcl.flower.reply (found {list(message.content)})"
        )
    return data


def _data(message: Message, name: str) -> bytes | None:
    record = message.content.get(RECORD)
    data = record.get(name) if isinstance(record, ConfigRecord) else None
    return data if isinstance(data, bytes) else None


@lru_cache(maxsize=1)
def _decoded(data: bytes) -> Broadcast:
    # A client reads its message twice, to begin and to answer; models and updates are made of copies.
    return decode_broadcast(data)


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower's strategies take them; NumPy has no bfloat16, and half precision is too little to average in.

    >>> to_record({"w": torch.ones(2, dtype=torch.bfloat16)})["w"].numpy()
    array([1., 1.], dtype=float32)
    """
    wide = {n: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for n, t in tensors.items()}
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in wide.items()})


def from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Flower's arrays as tensors of their own.

    >>> from_record(to_record({"w": torch.zeros(2)}))
    {'w': tensor([0., 0.])}
    """
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}
