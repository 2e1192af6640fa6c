"""What is read from the nodes' replies, beside the update itself."""

import copy
import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from flwr.app import Message, RecordDict

from dbcl.errors import ProtocolError
from dbcl.flower.records import EXAMPLES

T = TypeVar("T")


def same_metrics(replies: Mapping[str, tuple[T, set[str]]]) -> tuple[dict[str, T], dict[str, str]]:
    """Keep the replies whose metric names are the most common: Flower drops the whole round if they differ."""
    if not replies:
        return {}, {}
    usual = Counter(frozenset(names) for _, names in replies.values()).most_common(1)[0][0]
    kept = {who: reply for who, (reply, names) in replies.items() if names == usual}
    odd = {
        who: f"has the metrics {sorted(names)}, and most have {sorted(usual)}"
        for who, (_, names) in replies.items()
        if names != usual
    }
    return kept, odd


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
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ProtocolError(f"metric {name} is {value!r}")
    if not 1 <= metrics.get(EXAMPLES, 0) <= most:  # type: ignore[operator]
        raise ProtocolError(f"{EXAMPLES} must be between 1 and {most}, got {metrics.get(EXAMPLES)}")
    return metrics  # type: ignore[return-value]
