"""Selection of a round's nodes by the inner strategy, among the nodes that may take part."""

import logging
import math

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower.grid import GUARANTEE_REMEDY, REMEDY, SECURE_REMEDY, TimeoutGrid
from dbcl.flower.identity import NodeNames
from dbcl.flower.inner import InnerStrategy
from dbcl.flower.records import holds_only, to_record
from dbcl.flower.secure_server import SecureExchange
from dbcl.protocol import Server

log = logging.getLogger("flwr.dbcl")


class NodeChoice:
    """Requests the messages of a round from the inner strategy, for nodes that may take part.

    Args:
        server: The server whose rounds are run.
        inner: The inner strategy.
        names: The names of the nodes.
        secure: The batches of nodes under secure aggregation.
    """

    def __init__(self, server: Server, inner: InnerStrategy, names: NodeNames, secure: SecureExchange | None) -> None:
        self.server, self.inner, self.names, self.secure = server, inner, names, secure
        self._ahead: tuple[int, list[Message]] | None = None  # a round that is to come, and its messages
        self._written: tuple[int, ArrayRecord] | None = None

    def to_train(self, server_round: int, config: ConfigRecord, grid: Grid, timeout: float) -> list[Message]:
        """Return the inner strategy's training messages for the open round.

        If `only_cohort` has already selected the cohort, return the same messages.
        """
        asked = self._cohort_messages(server_round, config, grid, timeout)
        self._ahead = None
        return self._checked(asked)

    def to_evaluate(self, server_round: int, config: ConfigRecord, grid: Grid, timeout: float) -> list[Message]:
        """Return the inner strategy's messages of an evaluation."""
        waiting = self._waiting(grid, timeout, "evaluate")
        with self.inner.repeatable("evaluate", server_round):
            asked = self.inner.strategy.configure_evaluate(server_round, self._arrays(), config, waiting)
            return self._checked(list(asked))

    def only_cohort(self, asked: list[Message], config: ConfigRecord, grid: Grid, timeout: float) -> list[Message]:
        """Return the evaluation messages to nodes of the open round's training cohort.

        These nodes receive the broadcast of the round anyway. This method selects the cohort with
        the training settings; `to_train` reuses the selection.
        """
        chosen = self._cohort_messages(self.server.round + 1, config, grid, timeout)
        self._ahead = self.server.round, chosen
        cohort = {message.metadata.dst_node_id for message in chosen}
        kept = [message for message in asked if message.metadata.dst_node_id in cohort]
        if len(kept) < len(asked):
            log.info(
                "of %s nodes that were chosen to evaluate, %s train in the next round, and only these are asked",
                len(asked),
                len(kept),
            )
        return kept

    def forget(self) -> None:
        """Discard a cohort selected for a later round."""
        self._ahead = None

    def _cohort_messages(self, server_round: int, config: ConfigRecord, grid: Grid, timeout: float) -> list[Message]:
        if self._ahead is not None and self._ahead[0] == self.server.round:
            return self._ahead[1]
        with self.inner.repeatable("configure", server_round):
            waiting = self._waiting(grid, timeout, "train")
            batch = None if self.secure is None else waiting.settle()
            with self.inner.waiting_for_at_most(math.inf if batch is None else len(batch)):
                asked = list(self.inner.strategy.configure_train(server_round, self._arrays(), config, waiting))
        if batch is not None and {message.metadata.dst_node_id for message in asked} != set(batch):
            raise ConfigError(
                f"{self.inner.name} takes {len(asked)} of the {len(batch)} nodes of this round, and under secure "
                "aggregation who adds up together stays together; take a strategy that asks all nodes it is shown"
            )
        return asked

    def _checked(self, asked: list[Message]) -> list[Message]:
        if any(not holds_only(message, self._arrays()) for message in asked):
            raise ProtocolError(
                f"{self.inner.name} sends other arrays than the model's; only the model can be blinded, so a strategy "
                "that sends more (control variates, for example) cannot be inside DoubleBlind"
            )
        return asked

    def _arrays(self) -> ArrayRecord:
        """Return the true weights for the inner strategy, in a record that it may modify.

        Under a guarantee the record holds the noisy weights. It is built once per round.
        """
        if self._written is None or self._written[0] != self.server.round:
            seen = self.server.weights() if self.server.privacy is None else self.server.noisy_weights()
            self._written = self.server.round, to_record(seen)
        return ArrayRecord(dict(self._written[1]))

    def _waiting(self, grid: Grid, timeout: float, phase: str) -> TimeoutGrid:
        """Return a grid with only the nodes that may take part and a limit on the waiting time."""
        secure = self.secure

        def may(names: list[str]) -> list[str]:
            return self.server.keeper.in_turn(self.server.round, names) if secure is None else secure.choose(names)

        def allowed(there: list[int]) -> list[int]:
            named = self.names.present(there, grid, timeout)
            return [named[name] for name in may(list(named))]

        planned = self.server.privacy is not None
        if secure is not None:
            remedy = GUARANTEE_REMEDY if planned else SECURE_REMEDY
            return TimeoutGrid(grid, timeout, lambda: secure.needed, allowed, remedy=remedy)
        fewest = self.inner.fewest(phase)
        remedy = GUARANTEE_REMEDY if planned else REMEDY
        needed = str(fewest or "more")
        return TimeoutGrid(grid, timeout, lambda: needed, allowed if planned else None, fewest=fewest, remedy=remedy)
