"""Pictures of a run."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

INK, MUTED, LINE = "#1c2733", "#6b7785", "#0b6e99"


def curves(history: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Accuracy of W by round and by megabytes sent, as a PNG.

    >>> curves([{"round": 1, "accuracy": 0.5, "bytes_up": 10, "bytes_down": 10}], "a run")[:4]
    b'\\x89PNG'
    """
    from matplotlib.figure import Figure  # here, so that training itself needs no matplotlib

    accuracy = [100 * line["accuracy"] for line in history]
    sent, total = [], 0.0
    for line in history:
        total += (line["bytes_up"] + line["bytes_down"]) / 1e6
        sent.append(total)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, x, label in ((left, [line["round"] for line in history], "round"), (right, sent, "MB sent, both ways")):
        axes.plot(x, accuracy, color=LINE, linewidth=1.8, marker="o" if len(x) == 1 else None)
        axes.set_xlabel(label, color=MUTED)
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#e3e8ec")
        axes.tick_params(colors=MUTED)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b8c2cb")
    left.set_ylabel("accuracy of the model W, %", color=MUTED)
    figure.suptitle(f"{title}: {accuracy[-1]:.1f} % after {history[-1]['round']} rounds", color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
