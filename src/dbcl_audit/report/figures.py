"""Figures of a page as inline SVG: curves, and the trade-off between several audits.

The colours are CSS variables of the page (`templates/style.css`), and follow dark mode and print.
Legends are HTML. They wrap on a small screen, and untrusted text is not parsed by matplotlib.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from dbcl.simulation.plots import GRID, INK, MUTED
from dbcl_audit.findings import Audit, Curve, Finding, Measure
from dbcl_audit.report.measures import (
    AXES,
    accuracy_text,
    chance_of,
    number_text,
    range_text,
)
from dbcl_audit.report.rating import worst

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#8c564b", "#7a3e9d")
AXIS = "#b8c2cb"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "line", AXIS: "line"} | {c: f"c{n}" for n, c in enumerate(COLOURS)}
"""CSS variable of the page that replaces each colour."""
EXACT = 100.0
"""PSNR in dB at which exact copies are plotted."""
STEPS_PER_AXIS = 400
"""Resolution of an axis in visible steps. Points that are closer are omitted; a ROC curve may have
one point per example.
"""
MAX_LABEL_LENGTH = 28
"""Maximum length of a label in a figure, in characters."""


@dataclass(frozen=True)
class Drawing:
    """An SVG element: its alternative text for screen readers, its view box, and its content with
    the closing tag.
    """

    alternative: str
    box: str
    content: Markup


@dataclass(frozen=True)
class Key:
    """One entry of a legend: its text, the CSS variable of its colour, and its line style."""

    text: str
    colour: str
    style: str


@dataclass(frozen=True)
class Plot:
    """A drawing with a title and a legend. With `diagonal`, a dotted line marks the chance
    level.
    """

    title: str
    drawing: Drawing
    keys: tuple[Key, ...]
    diagonal: bool


def figures(findings: Sequence[Finding]) -> list[Plot]:
    """Return one plot per target and pair of axes, with one line per curve.

    >>> figures([Finding("rewind", "client", "adaptive", "update", "cosine", 0.99)])
    []
    """
    groups: dict[tuple[str, tuple[str, str]], list[Finding]] = {}
    for finding in findings:
        if finding.curves:
            groups.setdefault((finding.target, finding.axes), []).append(finding)
    return [_plot(f"plot{n}", *key, group) for n, (key, group) in enumerate(groups.items(), 1)]


def _plot(name: str, target: str, labels: tuple[str, str], group: Sequence[Finding]) -> Plot:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(5.4, 3.5), layout="constrained")
    axes = figure.subplots()
    keys = []
    roc = "false positive" in labels[0].lower() or all(f.measure.family in ("auc", "tpr") for f in group)
    log = roc and target == "membership"
    lines = [(finding, curve) for finding in group for curve in finding.curves]
    for index, (finding, curve) in enumerate(lines):
        solid = finding.attacker == "adaptive" and not curve.dashed
        colour, style = COLOURS[index % len(COLOURS)], "solid" if solid else "dashed"
        points = _points(curve, 1e-4 if log else -math.inf)
        axes.plot(*points, color=colour, linestyle=style, linewidth=1.7, marker="o" if len(points[0]) == 1 else None)
        named = f"{finding.attack} ({finding.adversary}, {finding.attacker})"
        keys.append(Key(f"{named}: {curve.label}" if curve.label else named, VARIABLES[colour], style))
    if roc:
        ends = [10 ** (-4 + 4 * step / 50) for step in range(51)] if log else [0.0, 1.0]
        axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="dotted")
        axes.set(xlim=(1e-4 if log else 0, 1), ylim=(1e-4 if log else 0, 1.02))
    if log:
        axes.set(xscale="log", yscale="log")
    across, up = (AXES.get(label, label) for label in (labels[0], labels[1] or group[0].measure))
    _style(axes, across, up)
    title = f"{target}: {up}" + (f" by {across}" if across else "")
    values = "; ".join(f"{f.attack} ({f.adversary}, {f.attacker}): {f.measure.text} {range_text(f)}" for f in group)
    return Plot(title, _svg(figure, name, f"Plot of {title}. {values}."), tuple(keys), roc)


def _points(curve: Curve, least: float) -> tuple[list[float], list[float]]:
    whole = (pair for pair in zip(curve.x, curve.y, strict=False) if None not in pair)  # JSON has null for NaN
    pairs = [(x, y) for x, y in whole if math.isfinite(x) and math.isfinite(y)]
    shown = [(max(x, least), max(y, least)) for x, y in pairs if y > 0 or least <= 0]  # zero has no logarithm
    if len(shown) > STEPS_PER_AXIS:
        shown = _thin(shown, math.log10 if least > 0 else float)
    return [x for x, _ in shown], [y for _, y in shown]


def _thin(points: Sequence[tuple[float, float]], scale: Callable[[float], float]) -> list[tuple[float, float]]:
    """Remove points that are visually indistinguishable from the previous point. On a log axis,
    points at low rates are kept.
    """
    spans = [(max(map(scale, axis)) - min(map(scale, axis))) or 1.0 for axis in zip(*points, strict=True)]
    kept = [points[0]]
    for point in points[1:-1]:
        moved = [abs(scale(new) - scale(old)) for new, old in zip(point, kept[-1], strict=True)]
        if max(moved[0] / spans[0], moved[1] / spans[1]) * STEPS_PER_AXIS >= 1:
            kept.append(point)
    return [*kept, points[-1]]


def trade_off(audits: Sequence[Audit], who: str, adversaries: Sequence[str]) -> Drawing | None:
    """Plot the worst leak to some adversaries against accuracy, with one panel per measure and
    non-overlapping labels.

    >>> trade_off([Audit("a", {}, {}, (), (), 1.0)], "clients", ["client", "colluders"]) is None
    True
    """
    from matplotlib.figure import Figure

    panels, said = [], []
    for measure, name in (
        (Measure.COSINE, "worst cosine"),
        (Measure.PSNR, f"worst PSNR, dB (to {EXACT:.0f})"),
        (Measure.AUC, "worst AUC"),
    ):
        points = [
            (audit.run["accuracy"], min(leak, EXACT), f"{number}  {_printable(audit.name)}")
            for number, audit in enumerate(audits, 1)
            if accuracy_text(audit) != "—" and (leak := worst(audit, measure.family, adversaries)) is not None
        ]
        if points:
            every = [each for audit in audits for each in audit.findings if each.adversary in adversaries]
            chance = max(chance_of(each) for each in every if each.measure is measure)
            panels.append((name, chance, sorted(points, key=lambda point: (point[1], -point[0]))))
            each = (f"{label}: {number_text(y, measure)} at {x:.1%}" for x, y, label in points)
            said.append(f"{name}: {', '.join(each)}, guessing: {number_text(chance, measure)}")
    if not panels:
        return None
    ratios = [max(2.4, 0.9 + 0.24 * len(points)) for _, _, points in panels]
    figure = Figure(figsize=(6.6, sum(ratios)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=ratios)
    for (name, chance, points), axes in zip(panels, grid[:, 0], strict=True):
        axes.margins(0.08, 0.12)
        if math.isfinite(chance):
            axes.axhline(chance, color=MUTED, linewidth=1, linestyle="dotted")
            axes.annotate(
                "guessing", (0.01, chance), xycoords=("axes fraction", "data"), va="bottom", color=MUTED, fontsize=8
            )
        axes.scatter([100 * x for x, _, _ in points], [y for _, y, _ in points], color=COLOURS[0], s=28, zorder=3)
        low, high = axes.get_ylim()
        places = _spread([(y - low) / (high - low) for _, y, _ in points], gap=1 / max(7, len(points)))
        for place, (x, y, label) in zip(places, points, strict=True):
            at = (1.06, place)
            arrow = {"arrowstyle": "-", "color": AXIS, "linewidth": 0.8, "shrinkB": 3, "relpos": (0, 0.5)}
            where = {"xy": (100 * x, y), "xytext": at, "textcoords": "axes fraction", "arrowprops": arrow}
            axes.annotate(label, **where, va="center", color=INK, fontsize=9, parse_math=False)
        _style(axes, "accuracy, %", name)
    return _svg(figure, f"to-{who}", f"Plot of the worst leak to {who} against accuracy. {'. '.join(said)}.")


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted positions in [0, 1] apart until neighbours have a minimum distance of `gap`."""
    apart: list[float] = []
    for place in places:
        apart.append(max(place, apart[-1] + gap) if apart else place)
    over = 1.0
    for index in reversed(range(len(apart))):
        apart[index] = min(apart[index], over)
        over = apart[index] - gap
    return apart


def _style(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(_printable(across), color=MUTED, parse_math=False)
    axes.set_ylabel(_printable(up), color=MUTED, parse_math=False)
    axes.grid(color=GRID)
    axes.tick_params(which="both", colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)


def _printable(text: str) -> str:
    """Return text restricted to characters of the built-in font and shortened to fit a figure."""
    kept = "".join(letter if letter.isprintable() and ord(letter) < 0x500 else "?" for letter in text)
    return kept if len(kept) <= MAX_LABEL_LENGTH else kept[: MAX_LABEL_LENGTH - 1] + "…"


def _svg(figure: Any, name: str, alternative: str) -> Drawing:
    """Convert a figure to SVG without background, with the page's colours, and with ids that begin
    with `name`.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dbcl"}):  # the same audit gives the same page
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    drawn = buffer.getvalue().decode()
    box = re.search(r'viewBox="([^"]*)"', drawn)
    assert box is not None
    inner = drawn[drawn.index(">", drawn.index("<svg")) + 1 :]  # without the root and its names of formats
    inner = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", inner, flags=re.DOTALL)
    inner = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", inner)
    for colour, variable in VARIABLES.items():
        inner = inner.replace(colour, f"var(--{variable})")
    return Drawing(alternative, box[1], Markup(inner.strip()))  # matplotlib escapes the labels
