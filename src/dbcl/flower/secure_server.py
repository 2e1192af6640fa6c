"""Server side of secure aggregation in Flower: node selection and the five exchanges of a round."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from dbcl.errors import plain
from dbcl.flower.identity import KeyRegistry, NodeNames
from dbcl.flower.records import RECORD, STEP, message_bytes
from dbcl.protocol import RoundReport, Server
from dbcl.protocol.secagg import SecAggConfig, SecureRounds
from dbcl.protocol.secagg.groups import GROUP
from dbcl.state import State, join

log = logging.getLogger("flwr.dbcl")


class SecureExchange:
    """Runs secure aggregation rounds with the nodes of a grid.

    Nodes take part in fixed batches that take turns. The first nodes are divided into `batches`
    batches. Later nodes form a new batch once there are enough of them.

    Args:
        server: The server whose rounds are run.
        config: Secure aggregation settings that the nodes require.
        names: The nodes' names, derived from their keys.
        batches: Number of batches for the first nodes.
        fewest: Minimum number of nodes in a batch.
        persist: Function that saves the run, called before nodes sign the list of contributors to a
            sum.
    """

    def __init__(
        self,
        server: Server,
        config: SecAggConfig,
        names: NodeNames,
        *,
        batches: int,
        fewest: int,
        persist: Callable[[], None] = lambda: None,
    ) -> None:
        self.rounds = SecureRounds(server, config, KeyRegistry(), persist=persist)
        self.server, self.names, self._count = server, names, batches
        self.fewest = max(fewest, config.min_cohort * server.plan.lanes)
        self._batches: list[list[str]] = []
        self._away: list[str] = []

    @property
    def needed(self) -> str:
        """Describe the required nodes."""
        if self._away:
            return (
                f"all nodes of a group, which adds up with all its nodes or not at all: {plain(self._whose(), 500)} "
                "away, and must start again, each with its own folder"
            )
        if self.rounds.encoding.noisy:
            assert self.server.privacy is not None
            return f"{self.server.privacy.least}, as the guarantee is planned for,"
        lanes, least = self.server.plan.lanes, self.rounds.config.min_cohort
        count = self.fewest if self._batches else self._count * self.fewest
        return f"{count} ({least} or more in each of {lanes} lanes)"

    def _whose(self) -> str:
        return f"{', '.join(self._away)} {'is' if len(self._away) == 1 else 'are'}"

    def choose(self, there: Sequence[str]) -> list[str]:
        """Return the nodes of a round: the next batch that can compute a sum, or no nodes."""
        if self.rounds.encoding.noisy:
            return self._in_turn(there)
        self._divide(there)
        self._away = []
        for batch in self._order():
            for name in batch:  # in a fixed order, also those who are away: lanes follow it
                self.server.open_round(name)
            here = [name for name in batch if name in there and self._may(name)]
            settled = any(map(self.rounds.history.group_of, batch))
            enough = settled or len(here) >= min(self.fewest, len(batch))
            if enough and (chosen := self.rounds.ready(here)):
                return chosen
            self._away += [name for name in batch if name not in there]
        return []

    def _order(self) -> list[list[str]]:
        """Return the batches in the order in which to try them in this round.

        If the participation limits leave no spare batch, only the scheduled batch can run. Its
        nodes record a failed round as a participation. A round that used up two batches would leave
        no batch for the next round.
        """
        turn, privacy = self.server.round % max(1, len(self._batches)), self.server.privacy
        order = self._batches[turn:] + self._batches[:turn]
        tight = privacy is not None and privacy.separation >= privacy.clients // privacy.cohort
        return order[:1] if tight else order

    def _in_turn(self, there: Sequence[str]) -> list[str]:
        """With distributed noise, return the present nodes with the fewest participations."""
        privacy = self.server.privacy
        assert privacy is not None
        chosen = self.server.keeper.in_turn(self.server.round, there)
        return chosen if len(chosen) >= privacy.least else []

    def play(self, messages: Sequence[Message], grid: Grid, timeout: float, *, partial: bool) -> RoundReport:
        """Run a round with the recipients of these messages; see `SecureRounds.play`."""
        first = {name: message for message in messages if (name := self.names.of(message.metadata.dst_node_id))}

        def further(name: str, data: bytes) -> Message:
            meta = first[name].metadata
            content = RecordDict({RECORD: ConfigRecord({STEP: data})})
            return Message(content, meta.dst_node_id, meta.message_type, ttl=timeout, group_id=meta.group_id or None)

        def carried(sent: Iterable[Message]) -> dict[str, bytes]:
            return self._answers(grid.send_and_receive(list(sent), timeout=timeout))

        def begin(sent: Mapping[str, bytes]) -> dict[str, bytes]:
            return carried(first[name] for name in sent)

        def ask(sent: Mapping[str, bytes]) -> dict[str, bytes]:
            return carried(further(name, data) for name, data in sent.items())

        return self.rounds.play(list(first), begin, ask, partial=partial)

    def _divide(self, there: Sequence[str]) -> None:
        """Form a new batch if enough nodes belong to no batch."""
        known = {name for batch in self._batches for name in batch}
        new = [name for name in there if name not in known]
        privacy = self.server.privacy
        if privacy is not None:  # the plan has a fixed number of nodes in a round
            count = len(new) // privacy.cohort
            new = new[: count * privacy.cohort]
        else:
            count = 1 if self._batches else self._count
            if len(new) < count * self.fewest:
                return
            count = max(count, -(-len(new) // (GROUP * self.server.plan.lanes)))
        self._batches += [new[number::count] for number in range(count)]

    def _may(self, name: str) -> bool:
        return self.server.keeper.rejection(self.server.round, name, ()) is None

    def _answers(self, replies: Iterable[Message]) -> dict[str, bytes]:
        """Return each node's first reply, by name."""
        answers: dict[str, bytes] = {}
        for reply in replies:
            name = self.names.of(reply.metadata.src_node_id)
            if name is None:
                continue
            if reply.has_error():
                # The text of an error may quote data, which a guarantee does not cover.
                told = self.server.privacy is None and reply.error.reason
                log.warning("%s failed: %s", name, plain(str(told or "its own log says why"), 300))
                continue
            data = message_bytes(reply, STEP)
            if data is not None:
                answers.setdefault(name, data)
        return answers

    def state(self) -> State:
        """Return the aggregation groups and the batch of each node, for a checkpoint."""
        batches = State({"names": [list(batch) for batch in self._batches]}, {})
        return join(sums=self.rounds.state(), batches=batches)

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        self.rounds.load_state(state.part("sums"))
        self._batches = [list(map(str, batch)) for batch in state.values["batches"]["names"]]
