"""Records in Flower's messages: a broadcast as bytes in every message, an update as bytes in every reply to train."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from dbcl.errors import ProtocolError, shown

RECORD = "dbcl"
"""Name of the record that holds the bytes of a message, as one value that Flower's logs mask."""

SECURE = "secure"
"""Flag beside a broadcast: the server adds securely."""

STEP = "step"
"""Key of the bytes of a message of secure aggregation, in both directions."""

EXAMPLES = "num-examples"
"""Flower's own name of the number of examples of an answer."""


def node_name(node: int) -> str:
    """Return the name under which the server knows a node.

    >>> node_name(1000)
    'node 1000'
    """
    return f"node {node}"


def holds_only(message: Message, own: ArrayRecord) -> bool:
    """Return whether the arrays in a strategy's message are those of the model and no others."""
    records = list(message.content.array_records.values())
    return len(records) == 1 and set(records[0]) == set(own)


def with_broadcast(message: Message, data: bytes, *, ttl: float, secure: bool = False) -> Message:
    """Return a copy of a strategy's message with a broadcast in place of arrays."""
    record = ConfigRecord({"broadcast": data, SECURE: True} if secure else {"broadcast": data})
    configs = {key: ConfigRecord(dict(value)) for key, value in message.content.config_records.items()}
    content = RecordDict({**configs, RECORD: record})
    meta = message.metadata
    return Message(content, meta.dst_node_id, meta.message_type, ttl=ttl, group_id=meta.group_id or None)


def update_of(message: Message) -> bytes:
    """Return the bytes of an update in an answer, not yet validated, or raise `ProtocolError`."""
    data = message_bytes(message, "update")
    if data is None:
        raise ProtocolError(
            f"its answer holds no update; answer with dbcl.flower.reply (found {shown(list(message.content))})"
        )
    return data


def message_bytes(message: Message, name: str) -> bytes | None:
    """Return the bytes of a dbcl message in a Flower message, under a name, or None."""
    record = message.content.get(RECORD)
    data = record.get(name) if isinstance(record, ConfigRecord) else None
    return data if isinstance(data, bytes) else None


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert tensors for Flower's strategies; NumPy has no bfloat16, and half precision is too coarse to average in.

    >>> to_record({"w": torch.ones(2, dtype=torch.bfloat16)})["w"].numpy()
    array([1., 1.], dtype=float32)
    """
    wide = {n: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for n, t in tensors.items()}
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in wide.items()})


def from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Convert Flower's arrays to tensors with memory of their own.

    >>> from_record(to_record({"w": torch.zeros(2)}))
    {'w': tensor([0., 0.])}
    """
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}
