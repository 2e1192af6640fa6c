"""Figures of training curves and privacy costs."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dbcl.objective import CLASSIFICATION, Objective

INK, MUTED, GRID = "#1c2733", "#5f6b78", "#e3e8ec"
SERVER, CLIENTS, THIRD = "#0b6e99", "#d08a2c", "#7d4f9e"


def curves(history: Sequence[Mapping[str, Any]], title: str, objective: Objective = CLASSIFICATION) -> bytes:
    """Plot the metric and the loss of W, and the clients' training loss, by round, as a PNG.

    If no round reports the clients' loss, as with a guarantee, the figure states this.

    Args:
        history: Lines of metrics.jsonl.
        title: Title of the figure.
        objective: Loss and metric.

    >>> line = {"round": 1, "accuracy": 0.5, "loss": 1.0, "train_loss": 1.2, "bytes_up": 10, "bytes_down": 10}
    >>> curves([line], "a run")[:4]
    b'\\x89PNG'
    """
    from matplotlib.figure import Figure  # imported here: slow to load, and needed only at the end of a run

    rounds = [line["round"] for line in history]
    marker = "o" if len(rounds) == 1 else None
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in history) / 1e6
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    percent = objective.name == "accuracy"
    scores = [_number(line[objective.name]) * (100 if percent else 1) for line in history]
    left.plot(rounds, scores, color=SERVER, linewidth=1.8, marker=marker)
    left.set_ylabel(f"{objective.name} of the model{', %' * percent}", color=MUTED)
    measured = [_number(line["train_loss"]) for line in history]
    told = not all(map(math.isnan, measured))
    if told:
        seen = "clients, through sketch and veil"
        right.plot(rounds, measured, color=CLIENTS, lw=1.2, marker=marker, label=seen)
    losses = [_number(line["loss"]) for line in history]
    right.plot(rounds, losses, color=SERVER, lw=1.8, marker=marker, label="the model, held-out")
    right.set_ylabel("loss", color=MUTED)
    right.legend(frameon=False, labelcolor=INK, title=None if told else "clients' losses are not shown")
    for axes in (left, right):
        axes.set_xlabel("round", color=MUTED)
        axes.set_xlim(left=0)
        _plain_axes(axes)
    score = f"{scores[-1]:.1f} %" if percent else f"{objective.name} {scores[-1]:.4g}"
    reached = f"{score} after {rounds[-1]} rounds, {sent:,.0f} MB sent"
    figure.suptitle(f"{title}: {reached}", color=INK)
    return _png(figure)


def loss_by_epsilon(losses: Mapping[str, Mapping[float, float]], chosen: float, title: str) -> bytes:
    """Plot the expected loss of accuracy against epsilon as a PNG, with one curve per trust model.

    Args:
        losses: Loss of accuracy by epsilon, for each trust model.
        chosen: Epsilon to highlight.
        title: Title of the figure.

    >>> loss_by_epsilon({"nobody is trusted": {1.0: 3.4, 2.0: 1.9}}, 2.0, "a plan")[:4]
    b'\\x89PNG'
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, NullLocator

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for (label, points), colour in zip(losses.items(), (SERVER, CLIENTS), strict=False):
        axes.plot(list(points), list(points.values()), color=colour, linewidth=1.8, marker="o", label=label)
    axes.axvline(chosen, color=MUTED, linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("epsilon", color=MUTED)
    axes.set_ylabel("expected loss of accuracy, points", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    _plain_axes(axes)
    figure.suptitle(title, color=INK, fontsize=10)
    return _png(figure)


def noise_by_epsilon(
    epsilons: Sequence[float], relative: Mapping[str, Sequence[float]], chosen: tuple[float, float], title: str
) -> bytes:
    """Plot the relative noise against epsilon as a PNG, with one curve per noise correlation.

    Args:
        epsilons: Values of epsilon.
        relative: Noise relative to the weights at each epsilon, for each correlation.
        chosen: Epsilon and relative noise of the plan, to highlight.
        title: Title of the figure.

    >>> noise_by_epsilon([1, 8], {"banded": [9.8, 1.6]}, (8, 1.6), "a plan")[:4]
    b'\\x89PNG'
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, NullFormatter

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (kind, values), color in zip(relative.items(), (SERVER, CLIENTS, THIRD), strict=False):
        axes.plot(epsilons, values, color=color, lw=1.8, label=f"{kind} noise")
    axes.plot(
        *chosen, color=INK, marker="o", linestyle="none", label=f"this plan: {chosen[1]:.3g} at epsilon {chosen[0]:g}"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("epsilon: to the left more is promised", color=MUTED)
    axes.set_ylabel("noise relative to the initial weights", color=MUTED)
    axes.legend(frameon=False, labelcolor=INK)
    _plain_axes(axes)
    figure.suptitle(title, color=INK)
    return _png(figure)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plain_axes(axes: Any) -> None:
    axes.grid(axis="y", color=GRID)
    axes.tick_params(colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c2cb")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
