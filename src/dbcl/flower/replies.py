"""Reading of metrics and errors in the nodes' replies."""

import copy
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message, RecordDict

from dbcl.errors import ProtocolError, plain, shown
from dbcl.flower.records import EXAMPLES
from dbcl.protocol import Reason, Rejection
from dbcl.protocol.codec import MAX_METRIC, MAX_METRICS
from dbcl.protocol.rejection import rejection_of

log = logging.getLogger("flwr.dbcl")

T = TypeVar("T")


def read_replies(
    came: Mapping[str, Message], asked: Iterable[str], read: Callable[[Message], T], *, quote_errors: bool = True
) -> tuple[dict[str, T], dict[str, Rejection]]:
    """Read the replies of the selected nodes; unreadable replies become rejections.

    Args:
        came: The replies by node.
        asked: The selected nodes.
        read: Reads one reply.
        quote_errors: Include the text of a node's error in the rejection. The text may contain
            data.

    Returns:
        The values read, by node, and a rejection for each other selected node.

    >>> answers, rejected = read_replies({}, ["node 7"], dict)
    >>> rejected["node 7"].reason.name, str(rejected["node 7"])
    ('NO_ANSWER', 'did not answer in time; see round_timeout')
    """
    late = Rejection(Reason.NO_ANSWER, "did not answer in time; see round_timeout")
    rejected = {name: late for name in asked if name not in came}
    for name in [name for name, message in came.items() if message.has_error()]:
        reason = f": {plain(str(came[name].error.reason or 'without a reason'))}"
        said = reason if quote_errors else ", and its own log says why"
        rejected[name] = Rejection(Reason.NO_ANSWER, f"failed{said}")
    answers = {}
    for name, message in came.items():
        if name in rejected:
            continue
        try:
            answers[name] = read(message)
        except Exception as error:
            log.debug("%s", name, exc_info=True)
            rejected[name] = rejection_of(error)
    return answers, rejected


def common_names(metrics: Iterable[Collection[str]]) -> set[str]:
    """Return the names of the metrics reported by more than half of the replies.

    Flower's strategies need the same metric names in all replies. Metrics never lead to a
    rejection: otherwise one node could have other nodes rejected by reporting unusual names.

    >>> sorted(common_names([{"loss"}, {"loss", "time"}, {"accuracy"}]))
    ['loss']
    """
    listed = list(metrics)
    counts = Counter(name for names in listed for name in names)
    return {name for name, count in counts.items() if 2 * count > len(listed)}


def filled(metrics: Mapping[str, float], names: Iterable[str], known: Mapping[str, float]) -> dict[str, float]:
    """Return the named metrics of a reply, with the mean over other replies for missing metrics.

    >>> filled({"loss": 1.0, "odd": 2.0}, ["loss", "time"], {"loss": 3.0, "time": 4.0})
    {'loss': 1.0, 'time': 4.0}
    """
    return {name: metrics.get(name, known[name]) for name in names}


def bounded(weights: Sequence[float], limit: float | None) -> list[int | float]:
    """Clip the weights of replies to the range from 0 to a multiple of their median.

    >>> bounded([10, 20, 900, -5], limit=2.0)
    [10, 20, 30, 0]
    """
    positive = [max(0.0, weight) for weight in weights]
    middle = statistics.median(positive)
    capped = [min(weight, limit * middle) if limit and middle > 0 else weight for weight in positive]
    return [int(weight) if float(weight).is_integer() else weight for weight in capped]


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a copy of a message with other content.

    The original must not hold the true weights.
    """
    message = copy.copy(message)
    message.content = content
    return message


def metrics_of(message: Message, most: int) -> dict[str, float]:
    """Return the metrics of a reply.

    Args:
        message: The reply.
        most: Maximum number of examples.

    Returns:
        The metrics by name.

    Raises:
        ProtocolError: A metric is not finite, or the number of examples is not between 1 and
            `most`.
    """
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
