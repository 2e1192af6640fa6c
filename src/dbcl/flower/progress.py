"""The progress of a run: the metrics so far, and whether the last round was evaluated."""

import logging

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from dbcl.errors import ProtocolError
from dbcl.flower.nodes import RunNodes
from dbcl.protocol.inspection import is_count
from dbcl.state import State

log = logging.getLogger("flwr.dbcl")


class Progress:
    """Holds the metrics of the rounds that are done, beside the nodes that have played them.

    Args:
        nodes: The nodes of the run.
    """

    def __init__(self, nodes: RunNodes) -> None:
        self.nodes = nodes
        self.result = Result()
        self.evaluated = False
        """True if the last round was evaluated."""

    def trained(self, number: int, metrics: MetricRecord | None) -> None:
        """Note that a round was trained; `metrics` come from the nodes."""
        _note(self.result.train_metrics_clientapp, number, metrics)
        self.evaluated = False

    def evaluated_by_nodes(self, number: int, metrics: MetricRecord | None) -> None:
        """Note metrics of the nodes' evaluation."""
        _note(self.result.evaluate_metrics_clientapp, number, metrics)

    def evaluated_by_server(self, number: int, metrics: MetricRecord | None) -> None:
        """Note metrics of the server's evaluation."""
        _note(self.result.evaluate_metrics_serverapp, number, metrics)

    def state(self) -> State:
        """Return what a checkpoint keeps."""
        history = [[[number, dict(metrics)] for number, metrics in own.items()] for own in self._histories()]
        return State({"evaluated": self.evaluated, "history": history, **self.nodes.values()}, {})

    def load_state(self, state: State) -> None:
        """Restore what `state` returned.

        Raises:
            ProtocolError: The state is damaged.
        """
        evaluated, stored = state.values["evaluated"], state.values["history"]
        metrics = [each for own in stored for each in own]
        if not isinstance(evaluated, bool) or not all(is_count(n) and isinstance(own, dict) for n, own in metrics):
            raise ProtocolError("the checkpoint is damaged: its progress cannot be what it says")
        loaded = [{number: MetricRecord(metrics) for number, metrics in own} for own in stored]
        for own, kept in zip(self._histories(), loaded, strict=True):
            own.update(kept)
        self.nodes.load_values(state.values)
        self.evaluated = evaluated

    def _histories(self) -> list[dict[int, MetricRecord]]:
        result = self.result
        return [result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp]


def _note(history: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        log.info("round %s: %s", number, dict(metrics))
        history[number] = metrics
