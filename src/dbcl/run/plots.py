"""Pictures of a run."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from dbcl.objective import CLASSIFICATION, Objective

INK, MUTED, GRID = "#1c2733", "#5f6b78", "#e3e8ec"
SERVER, CLIENTS = "#0b6e99", "#d08a2c"


def curves(history: Sequence[Mapping[str, Any]], title: str, objective: Objective = CLASSIFICATION) -> bytes:
    """The metric and the loss of W by round, and the clients' loss through sketch and veil beside it, as a PNG.

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
    scores = [line[objective.name] * (100 if percent else 1) for line in history]
    left.plot(rounds, scores, color=SERVER, linewidth=1.8, marker=marker)
    left.set_ylabel(f"{objective.name} of the model{', %' * percent}", color=MUTED)
    seen = "clients, through sketch and veil"
    right.plot(rounds, [line["train_loss"] for line in history], color=CLIENTS, lw=1.2, marker=marker, label=seen)
    right.plot(
        rounds, [line["loss"] for line in history], color=SERVER, lw=1.8, marker=marker, label="the model, held-out"
    )
    right.set_ylabel("loss", color=MUTED)
    right.legend(frameon=False, labelcolor=INK)
    for axes in (left, right):
        axes.set_xlabel("round", color=MUTED)
        axes.set_xlim(left=0)
        axes.grid(axis="y", color=GRID)
        axes.tick_params(colors=MUTED)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b8c2cb")
    score = f"{scores[-1]:.1f} %" if percent else f"{objective.name} {scores[-1]:.4g}"
    reached = f"{score} after {rounds[-1]} rounds, {sent:,.0f} MB sent"
    figure.suptitle(f"{title}: {reached}", color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
