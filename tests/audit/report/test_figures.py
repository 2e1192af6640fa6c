"""Curves are thinned where the eye cannot tell, and labels never overlap."""

import math
from itertools import pairwise

from dbcl_audit.findings import Curve
from dbcl_audit.report import figures


def test_thinned_curves_keep_the_low_rates():
    curve = Curve(
        "roc", tuple(i / 100_000 for i in range(100_001)), tuple((i / 100_000) ** 0.5 for i in range(100_001))
    )
    x, y = figures._points(curve, 1e-4)  # four decades, so that a step of a 400th is 0.01 decades
    assert len(x) < 1000
    assert sum(rate <= 1e-3 for rate in x) > 50
    assert (x[-1], y[-1]) == (1.0, 1.0)
    steps = [math.log10(b / a) for a, b in pairwise(x) if a >= 1e-3]
    assert max(steps) < 0.015  # and at most one point of the original more, which is 0.005 at 0.001


def test_labels_keep_their_distance():
    places = figures._spread([0.0, 0.5, 0.5, 0.5, 0.99, 1.0], gap=0.15)
    assert min(b - a for a, b in pairwise(places)) > 0.1499
    assert places[0] > -1e-9
    assert places[-1] <= 1


def test_log_axis_starts_at_the_first_rate_above_zero():
    x, y = figures._points(Curve("roc", (0.0, 0.0, 0.01, 1.0), (0.0, 0.02, 0.1, 1.0)), 1e-4)
    assert (x, y) == ([1e-4, 0.01, 1.0], [0.02, 0.1, 1.0])
