"""A grid that keeps all messages between a ServerApp and its nodes; a test copies this file into the app that it runs.

Flower's grids carry whatever a server sends and receives, so nothing that a server learns is missing here.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

RECORD = "dbcl"


class Kept(NamedTuple):
    """One message: whether a node sent it, the node, the values of dbcl's record, and names of other records."""

    up: bool
    node: int
    values: dict[str, bytes]
    others: list[str]


def recorded(grid: Grid, path: str) -> Grid:
    """Let a grid append all its messages to a file, those to the nodes before they leave."""
    inner = grid.send_and_receive

    def send_and_receive(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        _append(path, sent, up=False)
        came = list(inner(sent, timeout=timeout))
        _append(path, came, up=True)
        return came

    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    return grid


def read(path: Path) -> list[Kept]:
    """Return the messages of a file in the order in which they were sent and came."""
    found = []
    for line in path.read_text().splitlines():
        up, node, values, others = json.loads(line)
        found.append(Kept(up, node, {name: bytes.fromhex(text) for name, text in values.items()}, others))
    return found


def _append(path: str, messages: Iterable[Message], *, up: bool) -> None:
    with open(path, "a") as file:
        for message in messages:
            node = message.metadata.src_node_id if up else message.metadata.dst_node_id
            record = None if message.has_error() else message.content.get(RECORD)
            values = _bytes_of(record) if isinstance(record, ConfigRecord) else {}
            others = ["error"] if message.has_error() else [name for name in message.content if name != RECORD]
            file.write(json.dumps([up, node, values, others]) + "\n")


def _bytes_of(record: ConfigRecord) -> dict[str, Any]:
    return {name: (value if isinstance(value, bytes) else str(value).encode()).hex() for name, value in record.items()}
