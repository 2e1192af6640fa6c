"""The nodes of a run: their numbers, and the participants of the open round."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message

from dbcl.errors import ProtocolError
from dbcl.flower.identity import NodeNames
from dbcl.flower.records import with_broadcast
from dbcl.protocol import Broadcast, Server, encode


class RunNodes:
    """Numbers nodes in order of first contact and records the recipients of the open round.

    Args:
        names: The server's names of the nodes.

    >>> nodes = RunNodes(NodeNames(by_key=False))
    >>> nodes.ask(["node 7"], there=[5, 7])
    >>> nodes.number("node 7"), nodes.asked, nodes.shown
    (1, ['node 7'], ['node 7'])
    """

    def __init__(self, names: NodeNames) -> None:
        self.names = names
        self.asked: list[str] = []
        """Recipients of the most recent messages."""
        self._numbers: dict[str, int] = {}
        self._shown: set[str] = set()

    @property
    def shown(self) -> list[str]:
        """Nodes that received the open round's broadcast, in order of first contact."""
        return sorted(self._shown, key=self._numbers.__getitem__)

    def number(self, name: str) -> int:
        """Return the number of a node."""
        return self._numbers[name]

    def named(self, messages: Iterable[Message]) -> dict[str, Message]:
        """Return messages to nodes, keyed by node name and ordered by node id."""
        in_order = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        return {name: each for each in in_order if (name := self.names.of(each.metadata.dst_node_id)) is not None}

    def ask(self, asked: Iterable[str], there: Iterable[int]) -> None:
        """Record the recipients of the open round's messages and number new nodes."""
        self.asked = list(asked)
        present = [name for node in sorted(there) if (name := self.names.of(node)) is not None]
        for name in [*present, *self.asked]:
            self._numbers.setdefault(name, len(self._numbers))
        self._shown.update(self.asked)

    def replies(self, replies: Iterable[Message]) -> dict[str, Message]:
        """Return each recipient's first reply, in the order of the requests.

        Sums must not depend on the order in which replies arrive.
        """
        came: dict[str, Message] = {}
        for message in replies:
            name = self.names.of(message.metadata.src_node_id)
            if name is not None:
                came.setdefault(name, message)
        return {name: came[name] for name in self.asked if name in came}

    def broadcasts(self, server: Server) -> dict[int, Broadcast]:
        """Return the broadcasts sent in the open round, by node number."""
        return {self.number(name): server.open_round(name) for name in self.shown}

    def close_round(self) -> None:
        """Clear the recipients of the closed round."""
        self._shown.clear()

    def values(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"nodes": list(self._numbers), "shown": self.shown}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore the values returned by `values`.

        Raises:
            ProtocolError: The values are damaged.
        """
        nodes, shown = values["nodes"], values["shown"]
        if not (_are_names(nodes) and _are_names(shown) and set(shown) <= set(nodes)):
            raise ProtocolError("the checkpoint is damaged: its list of nodes cannot be what it says")
        self._numbers, self._shown = {name: number for number, name in enumerate(nodes)}, set(shown)


def blind_messages(server: Server, asked: Mapping[str, Message], *, ttl: float, secure: bool) -> list[Message]:
    """Replace the arrays in the inner strategy's messages by broadcasts of the open round.

    Args:
        server: The server. The order of `asked` determines each node's lane.
        asked: The inner strategy's messages by node.
        ttl: Lifetime of a message, in seconds.
        secure: Request the updates under secure aggregation.

    Returns:
        The messages to send.
    """
    sent = {name: server.open_round(name) for name in asked}
    written = {id(broadcast): encode(broadcast) for broadcast in sent.values()}
    return [with_broadcast(each, written[id(sent[name])], ttl=ttl, secure=secure) for name, each in asked.items()]


def _are_names(values: object) -> bool:
    return (
        isinstance(values, list) and all(isinstance(each, str) for each in values) and len(set(values)) == len(values)
    )
