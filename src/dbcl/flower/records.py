"""Encoding of broadcasts and updates in the records of Flower messages."""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from dbcl.errors import ProtocolError, shown

RECORD = "dbcl"
"""Name of the record with a message's bytes, stored as one value that Flower's logs mask."""

SECURE = "secure"
"""Flag of a broadcast under secure aggregation."""

STEP = "step"
"""Record key of a secure aggregation message, in both directions."""

EXAMPLES = "num-examples"
"""Flower's name for the number of examples of a reply."""


def node_name(node: int) -> str:
    """Return the server's name for a Flower node id.

    >>> node_name(1000)
    'node 1000'
    """
    return f"node {node}"


def holds_only(message: Message, own: ArrayRecord) -> bool:
    """Return True if a strategy's message holds the model's arrays and no others."""
    records = list(message.content.array_records.values())
    return len(records) == 1 and set(records[0]) == set(own)


def with_broadcast(message: Message, data: bytes, *, ttl: float, secure: bool = False) -> Message:
    """Return a copy of a strategy's message with a broadcast instead of arrays."""
    record = ConfigRecord({"broadcast": data, SECURE: True} if secure else {"broadcast": data})
    configs = {key: ConfigRecord(dict(value)) for key, value in message.content.config_records.items()}
    content = RecordDict({**configs, RECORD: record})
    meta = message.metadata
    return Message(content, meta.dst_node_id, meta.message_type, ttl=ttl, group_id=meta.group_id or None)


def update_of(message: Message) -> bytes:
    """Return the encoded update in a reply, without validating it.

    Raises:
        ProtocolError: The reply holds no update.
    """
    data = message_bytes(message, "update")
    if data is None:
        raise ProtocolError(
            f"its answer holds no update; answer with dbcl.flower.reply (found {shown(list(message.content))})"
        )
    return data


def message_bytes(message: Message, name: str) -> bytes | None:
    """Return the bytes of a dbcl message stored under a name in a Flower message, or None."""
    record = message.content.get(RECORD)
    data = record.get(name) if isinstance(record, ConfigRecord) else None
    return data if isinstance(data, bytes) else None


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert tensors to Flower arrays; half-precision tensors become float32.

    NumPy has no bfloat16, and averaging in half precision loses accuracy.

    >>> to_record({"w": torch.ones(2, dtype=torch.bfloat16)})["w"].numpy()
    array([1., 1.], dtype=float32)
    """
    wide = {n: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for n, t in tensors.items()}
    return ArrayRecord({name: Array(tensor.detach().cpu().numpy()) for name, tensor in wide.items()})


def from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Convert Flower arrays to tensors that own their memory.

    >>> from_record(to_record({"w": torch.zeros(2)}))
    {'w': tensor([0., 0.])}
    """
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}
