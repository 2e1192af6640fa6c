"""The progress of a run: the metrics so far, and the evaluation state of the last round."""

import logging

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from dbcl.errors import ProtocolError
from dbcl.flower.nodes import RunNodes
from dbcl.protocol.inspection import is_count
from dbcl.state import State

log = logging.getLogger("flwr.dbcl")


class Progress:
    """Stores the metrics of completed rounds and the nodes that took part.

    Args:
        nodes: The nodes of the run.
    """

    def __init__(self, nodes: RunNodes) -> None:
        self.nodes = nodes
        self.result = Result()
        self.evaluated = False
        """True if the last round was evaluated."""

    def trained(self, number: int, metrics: MetricRecord | None) -> None:
        """Record a training round. `metrics` are the nodes' metrics."""
        _note(self.result.train_metrics_clientapp, number, metrics)
        self.evaluated = False

    def evaluated_by_nodes(self, number: int, metrics: MetricRecord | None) -> None:
        """Record metrics of the nodes' evaluation."""
        _note(self.result.evaluate_metrics_clientapp, number, metrics)

    def evaluated_by_server(self, number: int, metrics: MetricRecord | None) -> None:
        """Record metrics of the server's evaluation."""
        _note(self.result.evaluate_metrics_serverapp, number, metrics)

    def state(self) -> State:
        """Return the state for a checkpoint."""
        history = [[[number, dict(metrics)] for number, metrics in own.items()] for own in self._histories()]
        return State({"evaluated": self.evaluated, "history": history, **self.nodes.values()}, {})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`.

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
