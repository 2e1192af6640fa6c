"""The server's view of a run under secure aggregation, from its recorded messages, and a search for repeated sums."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dbcl.protocol import Broadcast, decode_broadcast
from dbcl.protocol.codec import KINDS
from dbcl.protocol.secagg import messages
from dbcl.protocol.secagg.messages import Agreement, Masked, Reveal, Roster, Survivors, decode_message
from dbcl.protocol.secagg.vectors import broadcast_digest
from flower.recording import Kept

UP = (messages.Advert, messages.Shares, Masked, Agreement, Reveal)
"""Messages of nodes."""


@dataclass
class ServerView:
    """Messages by round, as the server sent and received them; the senders are Flower's node ids."""

    broadcasts: dict[int, dict[bytes, Broadcast]] = field(default_factory=lambda: defaultdict(dict))
    rosters: dict[int, dict[bytes, Roster]] = field(default_factory=lambda: defaultdict(dict))
    lists: dict[int, list[Survivors]] = field(default_factory=lambda: defaultdict(list))
    masked: dict[int, list[tuple[int, Masked]]] = field(default_factory=lambda: defaultdict(list))
    signed: dict[int, list[tuple[int, Agreement]]] = field(default_factory=lambda: defaultdict(list))
    reveals: dict[int, list[tuple[int, Reveal]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, kept: Sequence[Kept]) -> "ServerView":
        """Sort recorded messages, and fail if a node has sent anything but its key and messages of the protocol."""
        view = cls()
        for message in kept:
            if message.up and message.others == ["error"]:
                continue
            assert message.others == ([] if message.up else ["config"] * ("broadcast" in message.values))
            assert set(message.values) in ({"hello"}, {"step"}, {"broadcast", "secure"})
            if "broadcast" in message.values:
                assert not message.up
                broadcast = decode_broadcast(message.values["broadcast"])
                view.broadcasts[broadcast.round][broadcast_digest(broadcast)] = broadcast
            elif "step" in message.values:
                view._add(message.node, message.values["step"], message.up)
        return view

    def _add(self, node: int, data: bytes, up: bool) -> None:
        kind = getattr(messages, KINDS[data[5]].capitalize())
        read = decode_message(kind, data)
        assert up == (kind in UP)
        if kind is Roster:
            self.rosters[read.round][read.binding] = read
        elif kind is Survivors:
            self.lists[read.round].append(read)
        for own, where in ((Masked, self.masked), (Agreement, self.signed), (Reveal, self.reveals)):
            if kind is own:
                where[read.round].append((node, read))

    def assert_nothing_is_revealed_twice(self, names: Sequence[str], rounds: int) -> None:
        """Fail unless each round has one broadcast, one list of all nodes, signed once by each, and one sum.

        An attempt at a round has a roster of its own; those that failed left masked vectors and no signature.
        """
        everybody = tuple(sorted(names))
        assert list(self.broadcasts) == list(range(rounds))
        for round in range(rounds):
            (sent,) = self.broadcasts[round]
            rosters = self.rosters[round]
            assert {roster.names for roster in rosters.values()} == {everybody}
            assert {roster.broadcast for roster in rosters.values()} == {sent}
            assert {each.survivors for each in self.lists[round]} == {everybody}
            ((binding, count),) = Counter(reveal.binding for _, reveal in self.reveals[round]).items()
            assert count >= rosters[binding].threshold
            masked = [(node, each.binding) for node, each in self.masked[round]]
            assert len(set(masked)) == len(masked)
            assert {each for _, each in masked} <= set(rosters)
            signers = Counter(node for node, _ in self.signed[round])
            assert set(signers.values()) == {1}
            assert signers.keys() <= {node for node, each in masked if each == binding}
            assert {each.binding for _, each in self.signed[round]} == {binding}
