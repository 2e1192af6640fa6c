"""Metrics of a run's rounds, and the file metrics.jsonl."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dbcl.settings import fits


@dataclass(frozen=True)
class RoundMetrics:
    """Metrics of one round, stored as a line of metrics.jsonl with the score under its metric's
    name.

    The server measures score and loss of W on held-out examples; of the exponential moving average
    of W if `ema_decay` is set; with a guarantee, of the released mean of noisy models. With a
    guarantee, client measurements are not reported: `train_loss` is NaN (null in the file) and
    `clipped` is None.
    """

    round: int
    score: float
    loss: float
    train_loss: float
    bytes_down: int
    bytes_up: int
    accepted: int
    refused: list[str]
    clipped: int | None
    seconds: float
    metric: str = "accuracy"

    def line(self) -> dict[str, Any]:
        """Return the metrics as a dictionary for metrics.jsonl.

        >>> list(RoundMetrics(1, 0.5, 1.0, 1.2, 10, 10, 3, [], 0, 0.1).line())[:3]
        ['round', 'accuracy', 'loss']
        """
        values = asdict(self)
        metric = values.pop("metric")
        values = {name: None if _is_nan(value) else value for name, value in values.items()}  # JSON has no NaN
        return {metric if name == "score" else name: value for name, value in values.items()}

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> "RoundMetrics":
        """Parse a dictionary returned by `line`.

        >>> metrics = RoundMetrics(1, 0.5, 0.5, 1.2, 10, 10, 3, [], 0, 0.1, metric="loss")
        >>> RoundMetrics.of_line(metrics.line()) == metrics
        True
        """
        known = {field.name for field in fields(cls)}
        metric = next((name for name in line if name not in known), "loss")
        values = {name: value for name, value in line.items() if name in known}
        values["score"] = line[metric]
        for name in ("score", "loss", "train_loss"):
            values[name] = math.nan if values[name] is None else values[name]
        return cls(**values, metric=metric)

    def numbers(self) -> dict[str, float]:
        """Return the metrics that can be plotted, including the number of rejected updates.

        Client measurements are omitted if they are not reported.

        >>> RoundMetrics(1, 0.5, 1.0, 1.2, 10, 10, 3, ["update 0: is late"], 0, 0.1).numbers()["refused"]
        1
        """
        numbers = {**self.line(), self.metric: self.score, "loss": self.loss, "refused": len(self.refused)}
        del numbers["round"]
        return {name: value for name, value in numbers.items() if value is not None}


def as_text(history: Iterable[RoundMetrics]) -> str:
    """Return the contents of metrics.jsonl.

    >>> as_text([])
    ''
    """
    return "".join(json.dumps(metrics.line()) + "\n" for metrics in history)


def read_metrics(folder: Path) -> list[RoundMetrics]:
    """Read metrics.jsonl up to the first damaged line. A crash can leave an incomplete last line."""
    history = []
    for line in (folder / "metrics.jsonl").read_text("utf-8", errors="replace").splitlines():
        try:
            metrics = RoundMetrics.of_line(json.loads(line))
            if not fits(metrics, RoundMetrics):
                break
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            break
        history.append(metrics)
    return history


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
