"""The server under secure aggregation: which nodes take part together, and the five exchanges of a round."""

import logging
from collections.abc import Iterable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from dbcl.errors import ProtocolError, plain
from dbcl.flower.records import RECORD, STEP, message_bytes, node_name
from dbcl.protocol import RoundReport, Server
from dbcl.protocol.secagg import SecureRounds, Terms
from dbcl.protocol.secagg.messages import MAX_GROUP
from dbcl.protocol.secagg.pins import FirstUse
from dbcl.state import State, join

log = logging.getLogger("flwr.dbcl")


class SecureExchange:
    """Plays rounds of a server with the nodes of a grid.

    Nodes take part in batches that stay together, in turns: the first nodes that come are divided into `batches`, and
    newcomers form a batch of their own once there are enough of them. `fewest` is how many a batch must have.
    """

    def __init__(self, server: Server, terms: Terms, *, batches: int, fewest: int) -> None:
        self.rounds = SecureRounds(server, terms, FirstUse())
        self.server, self._count = server, batches
        self.fewest = max(fewest, terms.min_cohort * server.plan.lanes)
        self._batches: list[list[int]] = []
        self.left_out: set[str] = set()
        """Who is not asked again in this round: it failed in it."""

    @property
    def needed(self) -> str:
        """How many nodes must be there, in words."""
        lanes, least = self.server.plan.lanes, self.rounds.terms.min_cohort
        count = self.fewest if self._batches else self._count * self.fewest
        return f"{count} ({least} or more in each of {lanes} lanes, and none missing that was in a sum before)"

    def choose(self, there: Sequence[int]) -> list[int]:
        """The nodes of a round, of those that are there: the next batch that can add up; none where there is none."""
        self._divide(there)
        turn = self.server.round % max(1, len(self._batches))
        for batch in self._batches[turn:] + self._batches[:turn]:
            for node in batch:  # in a fixed order, also those who are away: lanes follow it
                self.server.open_round(node_name(node))
            may = {node_name(node): node for node in batch if node in there and self._may(node_name(node))}
            chosen = [may[name] for name in self.rounds.harmless(list(may))]
            if chosen:
                return chosen
        return []

    def play(self, messages: Sequence[Message], grid: Grid, timeout: float) -> RoundReport:
        """Play a round with the nodes that are sent these messages."""
        first = {node_name(message.metadata.dst_node_id): message for message in messages}

        def further(name: str, data: bytes) -> Message:
            meta = first[name].metadata
            content = RecordDict({RECORD: ConfigRecord({STEP: data})})
            return Message(content, meta.dst_node_id, meta.message_type, ttl=timeout, group_id=meta.group_id or None)

        def carried(sent: Iterable[Message]) -> dict[str, bytes]:
            return _answers(grid.send_and_receive(list(sent), timeout=timeout))

        try:
            report = self.rounds.play(
                list(first),
                lambda sent: carried(first[name] for name in sent),
                lambda sent: carried(further(name, data) for name, data in sent.items()),
            )
        except ProtocolError:
            self.left_out |= set(self.rounds.lost)
            raise
        return report

    def _divide(self, there: Sequence[int]) -> None:
        """Put nodes that are in no batch into one, where there are enough of them."""
        known = {node for batch in self._batches for node in batch}
        new = sorted(node for node in there if node not in known)
        privacy = self.server.privacy
        if privacy is not None:  # it is planned for so many in a round, and no more
            count = len(new) // privacy.cohort
            new = new[: count * privacy.cohort]
        else:
            count = 1 if self._batches else self._count
            if len(new) < count * self.fewest:
                return
            count = max(count, -(-len(new) // (MAX_GROUP * self.server.plan.lanes)))
        self._batches += [new[number::count] for number in range(count)]

    def _may(self, name: str) -> bool:
        ledger = self.server.ledger
        return name not in self.left_out and (ledger is None or ledger.refusal(self.server.round, name) is None)

    def state(self) -> State:
        """What a checkpoint keeps: who was in which sum, who is known by which key, and who is in which batch."""
        assert isinstance(self.rounds.registry, FirstUse)
        batches = State({"nodes": [[str(node) for node in batch] for batch in self._batches]}, {})
        return join(rosters=self.rounds.state(), known=self.rounds.registry.state(), batches=batches)

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave."""
        assert isinstance(self.rounds.registry, FirstUse)
        self.rounds.load_state(state.part("rosters"))
        self.rounds.registry.load_state(state.part("known"))
        self._batches = [[int(node) for node in batch] for batch in state.values["batches"]["nodes"]]


def _answers(replies: Iterable[Message]) -> dict[str, bytes]:
    """What nodes have answered, by name, each with its first reply."""
    answers: dict[str, bytes] = {}
    for reply in replies:
        name = node_name(reply.metadata.src_node_id)
        if reply.has_error():
            log.warning("%s failed: %s", name, plain(str(reply.error.reason or "without a reason"), 300))
            continue
        data = message_bytes(reply, STEP)
        if data is None:
            log.warning("%s does not add securely; its app needs ClientApp(mods=[dbcl.flower.SecureMod(terms)])", name)
            continue
        answers.setdefault(name, data)
    return answers
