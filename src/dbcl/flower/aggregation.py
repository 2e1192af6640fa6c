"""Aggregation of lifted updates and of evaluation metrics by a Flower strategy."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from torch import Tensor

from dbcl.errors import ProtocolError
from dbcl.flower.inner import InnerStrategy
from dbcl.flower.records import EXAMPLES, from_record, to_record, update_of
from dbcl.flower.replies import bounded, common_names, filled, metrics_of, read_replies, with_content
from dbcl.protocol import Rejection, Server, ValidationResult
from dbcl.protocol.aggregation import Aggregate, mean_metrics, replacement


class StrategyAggregation:
    """Aggregates the accepted updates of a round with a Flower strategy, as full-size weights.

    A strategy that only averages receives only the metrics, because the server can average the
    updates first and lift the result once. Under a guarantee the strategy receives no metrics
    either, because the guarantee does not cover them.

    Args:
        server: The server, which validates and lifts the updates.
        inner: The inner strategy.
        server_round: Number of the round as counted by Flower.
        senders: The replies of the nodes.
    """

    def __init__(self, server: Server, inner: InnerStrategy, server_round: int, senders: Mapping[str, Message]) -> None:
        self.server, self.inner, self.server_round, self.senders = server, inner, server_round, senders
        self.metrics: MetricRecord | None = None
        """Metrics of the round, aggregated by the strategy."""

    def aggregate(self, result: ValidationResult) -> Aggregate:
        """Return the strategy's aggregate of the accepted updates.

        Args:
            result: The accepted updates and the rejections.

        Returns:
            The aggregate for the server's step.

        Raises:
            ProtocolError: The strategy returned no weights.
        """
        new = None
        if self.server.privacy is None:
            with self.inner.repeatable("aggregate", self.server_round):
                messages = self._messages(result)
                new, self.metrics = self.inner.strategy.aggregate_train(self.server_round, messages)
        if self.inner.averages:
            return self.server.averaging.aggregate(result)
        if not new:
            raise ProtocolError(
                f"round {result.round}: {self.inner.name} made no weights of {len(result.accepted)} good answers; its "
                "log says why, most often that it needs more of them"
            )
        return self._replaced(result, from_record(new))

    def _messages(self, result: ValidationResult) -> list[Message]:
        """Return updates as Flower messages with full-size weights, metrics and example counts."""
        accepted, key = result.accepted, self.inner.weight_key
        names, known = common_names(each.update.metrics for each in accepted.values()), result.stats().metrics
        own = [each.update.metrics.get(key, each.weight) for each in accepted.values()]
        counts = dict(zip(accepted, bounded(own, self.server.validator.max_influence), strict=True))
        messages = []
        for who, tensors in self._weights(result):
            metrics: dict[str, Any] = filled(accepted[who].update.metrics, names, known)
            metrics |= {EXAMPLES: round(accepted[who].weight), key: counts[who]}
            content = RecordDict({self.inner.array_key: to_record(tensors), "metrics": MetricRecord(metrics)})
            messages.append(with_content(self.senders[who], content))
        return messages

    def _weights(self, result: ValidationResult) -> Iterator[tuple[str, dict[str, Tensor]]]:
        return ((who, {}) for who in result.accepted) if self.inner.averages else self.server.averaging.lifted(result)

    def _replaced(self, result: ValidationResult, new: Mapping[str, Tensor]) -> Aggregate:
        """Return the strategy's new weights, with averaged normalisation statistics."""
        made = replacement(new, self.server.weights(), len(result.accepted))
        mean, statistics = self.server.averaging.aggregate(result).mean(), self.server.statistics
        kept = {name: tensor for name, tensor in made.sum.items() if name not in statistics}
        return replace(made, sum={**kept, **{name: mean[name] for name in statistics if name in mean}})


def validated(
    server: Server, came: Mapping[str, Message], asked: Iterable[str]
) -> tuple[ValidationResult, dict[str, bytes]]:
    """Validate the nodes' updates. Return the validation result and the encoded updates by node.

    Nodes that sent no update are listed as rejected.
    """
    answers, failed = read_replies(came, asked, update_of, quote_errors=server.privacy is None)
    result = server.validate(answers)
    return replace(result, rejected={**failed, **result.rejected}), answers


def aggregate_evaluation(
    server: Server, inner: InnerStrategy, server_round: int, came: Mapping[str, Message], asked: list[str]
) -> tuple[MetricRecord | None, dict[str, Rejection]]:
    """Aggregate the nodes' evaluation metrics with the strategy.

    The mean of a metric replaces missing values. Example counts are bounded as in training.

    Returns:
        The aggregated metrics, and a rejection for each node without a valid reply.
    """
    read = partial(metrics_of, most=server.validator.max_examples)
    good, rejected = read_replies(came, asked, read, quote_errors=server.privacy is None)
    if not good:
        return None, rejected
    counts = bounded([metrics.pop(EXAMPLES) for metrics in good.values()], server.validator.max_influence)
    names = common_names(good.values())
    known = mean_metrics([(metrics, count) for metrics, count in zip(good.values(), counts, strict=True)])
    messages = []
    for (name, metrics), count in zip(good.items(), counts, strict=True):
        record = MetricRecord({**filled(metrics, names, known), inner.weight_key: count})
        messages.append(with_content(came[name], RecordDict({"metrics": record})))
    return inner.strategy.aggregate_evaluate(server_round, messages), rejected
