"""Figures of experiments in the colours of the other figures; the only module here that needs matplotlib."""

import io
import math
from pathlib import Path
from typing import Any

from dbcl.files import write_atomic
from dbcl.simulation.plots import GRID, INK, MUTED

COLOURS = {
    "plain": "#5f6b78", "plain-adam": "#a9b4bf", "paper": "#b3261e", "paper-adam": "#d08a2c", "blind": "#0b6e99",
    "private": "#7d4f9e",
}  # fmt: skip
"""Colour of each preset and of each other row of `table1`, the same in every figure."""
MORE = ("#0b6e99", "#d08a2c", "#7d4f9e", "#2d6a3e", "#b3261e", "#5f6b78")


def new(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its panels, (rows, columns) of them.

    >>> figure, panels = new(4, 3)
    >>> panels.shape
    (1, 1)
    """
    from matplotlib.figure import Figure  # imported here: slow to load, and not needed to play jobs

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.grid(color=GRID, linewidth=0.8)
        axes.tick_params(which="both", colors=MUTED)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b8c2cb")
    return figure, panels


def label(axes: Any, x: str, y: str, title: str = "") -> None:
    """Label the axes of a panel, and its lines if they have names."""
    axes.set_xlabel(x, color=MUTED)
    axes.set_ylabel(y, color=MUTED)
    if title:
        axes.set_title(title, color=INK, fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def log_scale(axes: Any, *names: str, base: int = 10) -> None:
    """Make the axes x or y of a panel logarithmic, with plain numbers; an axis without data stays as it is.

    >>> figure, panels = new(2, 2)
    >>> log_scale(panels[0, 0], "x")
    """
    from matplotlib.ticker import FormatStrFormatter, LogFormatter, NullFormatter

    for name in names:
        if not math.isfinite(getattr(axes.dataLim, f"minpos{name}")):
            continue
        getattr(axes, f"set_{name}scale")("log", base=base)
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)) if base == 10 else NullFormatter())


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG; the same figure gives the same bytes.

    >>> import tempfile
    >>> save(new(2, 2)[0], Path(tempfile.mkdtemp(), "curves")).name
    'curves.png'
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    written = path.with_name(f"{path.name}.png")
    write_atomic(written, buffer.getvalue())
    return written
