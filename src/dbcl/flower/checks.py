"""What cannot be inside DoubleBlind, and what is checked of answers beside the update itself."""

import copy
import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower.records import EXAMPLES
from dbcl.flower.state import chain

CLIENT_SIDE = (
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)
TREES = (flower.FedXgbBagging, flower.FedXgbCyclic)

T = TypeVar("T")


def refuse(strategy: Strategy, *, outer: type[Strategy], resumes: bool) -> None:
    """Say what to do instead of a composition that cannot work."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{type(strategy).__name__} is no strategy of Flower's Message API; take one of flwr.serverapp.strategy or "
            "a subclass of its Strategy (those of flwr.server.strategy are the old generation)"
        )
    for each in chain(strategy):
        name = type(each).__name__
        if isinstance(each, outer):
            raise ConfigError(f"a {name} is inside a {name}; one is enough")
        if isinstance(each, CLIENT_SIDE):
            raise ConfigError(
                f"{name} leaves the clipping to a client mod, which does not see a blinded update; "
                f"take {name.replace('Client', 'Server')}: lifting keeps lengths, so it clips the same"
            )
        if isinstance(each, TREES):
            raise ConfigError(f"{name} trains trees; only the weights of a PyTorch model can be blinded")
        if resumes and getattr(each, "accountant", None) is not None:
            raise ConfigError(
                f"{name} has a privacy accountant, whose spending a checkpoint cannot keep: a run that goes on would "
                "count from zero; leave out accountant or checkpoint"
            )


def same_metrics(answers: Mapping[str, tuple[T, set[str]]]) -> tuple[dict[str, T], dict[str, str]]:
    """Keep the answers with the metrics that most of them have: Flower would drop the whole round for one other."""
    if not answers:
        return {}, {}
    usual = Counter(frozenset(names) for _, names in answers.values()).most_common(1)[0][0]
    kept = {who: answer for who, (answer, names) in answers.items() if names == usual}
    odd = {
        who: f"has the metrics {sorted(names)}, and most have {sorted(usual)}"
        for who, (_, names) in answers.items()
        if names != usual
    }
    return kept, odd


def with_content(message: Message, content: RecordDict) -> Message:
    """The same message with another content; whoever else holds the message must not find the true weights in it."""
    message = copy.copy(message)
    message.content = content
    return message


def metrics_of(message: Message, most: int) -> dict[str, float]:
    records = list(message.content.metric_records.values())
    if len(records) != 1:
        raise ProtocolError(f"its answer has {len(records)} MetricRecords and must have one; use dbcl.flower.reply")
    metrics = dict(records[0])
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ProtocolError(f"metric {name} is {value!r}")
    if not 1 <= metrics.get(EXAMPLES, 0) <= most:  # type: ignore[operator]
        raise ProtocolError(f"{EXAMPLES} must be between 1 and {most}, got {metrics.get(EXAMPLES)}")
    return metrics  # type: ignore[return-value]
