"""What is read from the nodes' replies, beside the update itself."""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from flwr.app import Message, RecordDict

from dbcl.errors import ProtocolError, shown
from dbcl.flower.records import EXAMPLES
from dbcl.protocol.codec import MAX_METRIC, MAX_METRICS


def common_names(metrics: Iterable[Collection[str]]) -> set[str]:
    """The metrics that more than half of the replies have, which are the ones that are averaged.

    Flower's strategies want the same names of all. No node is left out for what it reports or not: that is no reason to
    lose its update, and a node that reports nonsense could have others thrown out.

    >>> sorted(common_names([{"loss"}, {"loss", "time"}, {"accuracy"}]))
    ['loss']
    """
    listed = list(metrics)
    counts = Counter(name for names in listed for name in names)
    return {name for name, count in counts.items() if 2 * count > len(listed)}


def filled(metrics: Mapping[str, float], names: Iterable[str], known: Mapping[str, float]) -> dict[str, float]:
    """The metrics of these names: a reply's own, or where it lacks one, the mean of those that have it.

    >>> filled({"loss": 1.0, "odd": 2.0}, ["loss", "time"], {"loss": 3.0, "time": 4.0})
    {'loss': 1.0, 'time': 4.0}
    """
    return {name: metrics.get(name, known[name]) for name in names}


def with_content(message: Message, content: RecordDict) -> Message:
    """A copy of a message with another content: the original must not come to hold the true weights."""
    message = copy.copy(message)
    message.content = content
    return message


def metrics_of(message: Message, most: int) -> dict[str, float]:
    """The metrics of a reply, checked: finite numbers, and between 1 and `most` examples."""
    records = list(message.content.metric_records.values())
    if len(records) != 1:
        raise ProtocolError(f"its reply has {len(records)} MetricRecords and must have one; use dbcl.flower.reply")
    metrics = dict(records[0])
    if len(metrics) > MAX_METRICS:
        raise ProtocolError(f"has {len(metrics)} metrics, and {MAX_METRICS} are the most")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_METRIC:
            raise ProtocolError(f"metric {shown(name)} is {shown(value)}")
    if not 1 <= metrics.get(EXAMPLES, 0) <= most:  # type: ignore[operator]
        raise ProtocolError(f"{EXAMPLES} must be between 1 and {most}, got {metrics.get(EXAMPLES)}")
    return metrics  # type: ignore[return-value]
