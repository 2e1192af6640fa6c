"""The page of an audit: complete, escaped, and silent on the network."""

import base64
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from dbcl.audit.findings import Audit, Curve, Finding
from dbcl.audit.report import figures as drawings
from dbcl.audit.report import page as report
from dbcl.audit.report import rating as words
from dbcl.errors import ConfigError

HOSTILE = "<script>alert('x')</script> & \"quoted\" https://example.org"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # one pixel
VOID = {"meta", "img", "br"}


def made_up() -> Audit:
    """Every kind of finding once, with curves, pictures, failures, holes and hostile text."""
    rounds = tuple(float(t) for t in range(1, 101))
    rise = Curve("cosine of one update", rounds, tuple(1 - 0.7**t for t in rounds))
    flat = Curve(HOSTILE + " $x_", rounds, (0.01,) * 99 + (math.nan,))
    roc = Curve("2,000 examples", tuple(i / 2000 for i in range(2001)), tuple((i / 2000) ** 0.5 for i in range(2001)))
    by_round = ("round", "cosine")
    rates = ("false positive rate", "true positive rate")
    grid = (("true", PIXEL), ("worst case: 44.9 dB", PIXEL), (HOSTILE, PIXEL), ("broken", "' onerror='x"))
    budget = {"rounds seen": 100, "steps": 300, "restarts": 3, "priors": ["none", "total variation"]}
    findings = (
        Finding(
            "option I", "client", "naive", "update", "cosine", 0.002, -0.01, 0.012, 0.0, curves=(flat,), axes=by_round
        ),
        Finding("option I", "client", "naive", "update", "relative error", 290.0, chance=1.0),
        Finding(
            "rewind",
            "client",
            "adaptive",
            "update",
            "cosine",
            0.9999,
            0.99,
            1.0,
            0.0,
            budget,
            curves=(rise,),
            axes=by_round,
        ),
        Finding("rewind", "client", "adaptive", "update", "relative error", 1e-5, chance=1.0, budget=budget),
        Finding("matching", "client", "naive", "image", "psnr", 3.1, 2.0, 4.0, 12.8, failures=("diverged twice",)),
        Finding(
            "matching on rewind", "client", "adaptive", "image", "psnr", 44.9, 38.0, 93.0, 12.8, budget, images=grid
        ),
        Finding("matching on rewind", "client", "adaptive", "image", "ssim", 0.93, chance=0.2),
        Finding("matching on rewind", "client", "adaptive", "image", "share above 20 dB", 1.0, chance=0.0),
        Finding("through the sketch", "server", "adaptive", "image", "psnr", math.inf, chance=12.8),
        Finding("clear tensors", "client", "adaptive", "label", "accuracy", 0.98, 0.9, 1.0, 0.1),
        Finding("forest", "client", "naive", "property", "auc", 0.484, 0.43, 0.53, 0.5),
        Finding(
            "matched filter", "client", "adaptive", "property", "auc", 0.79, 0.74, 0.84, 0.5, curves=(roc,), axes=rates
        ),
        Finding(
            "loss threshold", "anyone", "naive", "membership", "auc", 0.56, 0.5, 0.62, 0.5, curves=(roc,), axes=rates
        ),
        Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.031, 0.02, 0.05),
        Finding(HOSTILE, "client", "adaptive", "membership", "auc", math.nan, failures=("no shadow models", HOSTILE)),
        Finding("odd", "client", "naive", "update", HOSTILE, 3.0, note=HOSTILE),
    )
    seats = (
        ("client", "for each of its rounds: seed, plan, all V; its own data and updates", "W, other clients' updates"),
        ("server", "W, all seeds, each client's dV", HOSTILE),
    )
    settings = {"veil": 0.0, "sketch": "count-v1", "ratio": 2.0, "clients": 10, "fraction": 0.2, "data": HOSTILE}
    settings |= {"clear": ["fc3.weight", "fc3.bias"], "fixed_secrets": True, "norm_bound": None}
    run = {"accuracy": 0.923, "rounds": 400, "bytes": 123_456_789}
    return Audit(f"paper {HOSTILE}", settings, run, seats, findings, 73.2)


class Reader(HTMLParser):
    """Collects tags, attributes and text; refuses tags that close in the wrong order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(page)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    return report.page(made_up())


@pytest.fixture(scope="module")
def compared() -> str:
    quiet = replace(made_up(), name="veiled", findings=made_up().findings[:1], run={"accuracy": 0.91, "rounds": 500})
    return report.comparison([made_up(), quiet, Audit("empty", {}, {}, (), (), 0.0)])


@pytest.mark.parametrize("which", ["page", "compared"])
def test_page_asks_for_nothing_and_runs_nothing(which, request):
    text = request.getfixturevalue(which)
    reader = Reader(text)
    assert "script" not in reader.tags
    assert "<script" not in text
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("href", "action", "srcset")]
    assert all(value.startswith("data:image/") for name, value in reader.attributes if name == "src")
    assert "url(" not in text
    assert "@import" not in text
    outside = re.findall(r"https?://[^\s'\"<&]*", re.sub(r"https://example\.org", "", text))  # the hostile text's own
    assert outside == []


def test_hostile_text_is_shown_as_text(page):
    assert "alert('x')" not in page
    assert HOSTILE in Reader(page).text
    assert Reader(page).text.count(HOSTILE) >= 8


def test_figures_hold_no_reference_but_names_of_formats(page):
    figures = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    assert len(figures) == 3  # update by round, property ROC, membership ROC
    for figure in figures:
        svg = base64.b64decode(figure).decode()
        assert "<script" not in svg
        links = re.findall(r"(?:xlink:)?href=\"([^\"]*)\"", svg)
        assert all(link.startswith("#") for link in links)


def test_every_finding_appears(page):
    text = Reader(page).text
    for finding in made_up().findings:
        assert f"{finding.attack} ({finding.seat}, {finding.attacker}) on the {finding.target}" in text
        for part in (finding.measure, finding.note, *finding.failures, *(curve.label for curve in finding.curves)):
            assert part in text
        for caption, _ in finding.images:
            assert caption in text


def test_bad_pictures_are_left_out(page):
    assert page.count("data:image/png;base64,") == 3
    assert "(not a PNG)" in page
    assert "onerror" not in page


def test_page_is_a_pure_function(page):
    assert report.page(made_up()) == page


def test_page_survives_json():
    assert "option I" in report.page(Audit.from_json(made_up().json()))


def test_page_without_findings_says_that_nothing_is_known():
    assert words.HEADS[0] in report.page(Audit("empty", {}, {}, (), (), 0.0))


def test_headline_is_about_the_worst(page):
    assert words.HEADS[4] in page
    calm = replace(made_up(), findings=made_up().findings[:2])
    assert words.HEADS[1] in report.page(calm)
    assert words.NO_PROOF in Reader(report.page(calm)).text


@pytest.mark.parametrize(
    ("measure", "chance", "values"),
    [
        ("cosine", None, (0.09, 0.11, 0.91)),
        ("cosine", None, (-0.09, -0.11, -0.91)),
        ("relative error", 1.0, (0.95, 0.5, 0.05)),
        ("psnr", 12.8, (14.7, 14.9, 30.0)),
        ("psnr", None, (14.9, 15.1, math.inf)),
        ("psnr", 25.0, (26.0, 31.0, 35.0)),
        ("ssim", 0.2, (0.27, 0.29, 0.93)),
        ("share above 20 dB", 0.0, (0.0, 0.02, 0.9)),
        ("accuracy", 0.1, (0.18, 0.2, 0.92)),
        ("auc", None, (0.54, 0.56, 0.96)),
        ("auc", None, (0.46, 0.44, 0.04)),
        ("tpr at 0.1 % fpr", None, (0.0019, 0.0021, 0.5)),
    ],
)
def test_words(measure, chance, values):
    rated = [words.word(Finding("a", "client", "naive", "x", measure, v, chance=chance)) for v in values]
    assert rated == [words.GUESS, words.LEAKS, words.BAD]


def test_words_for_what_cannot_be_rated():
    assert words.word(Finding("a", "client", "naive", "x", "auc", math.nan)) == words.FAILED
    assert words.word(Finding("a", "client", "naive", "x", "colour", 3.0)) == words.UNRATED
    assert words.word(Finding("a", "client", "naive", "x", "auc", 0.5, 0.3, 0.51)) == words.WIDE


def test_risk_rows_set_naive_and_adaptive_side_by_side(page):
    rows = words.risk_rows(made_up())
    update = next(row for row in rows if row[:3] == ("update", "client", "cosine"))
    assert update.naive == "0.002 (-0.010 to 0.012), option I"
    assert update[5:] == (words.GUESS, "1.000 (0.990 to 1.000), rewind", words.BAD)
    text = Reader(page).text
    assert all(cell in text for row in rows for cell in row)


def test_worst_error_is_the_smallest():
    findings = [Finding(str(v), "client", "adaptive", "update", "error", v) for v in (300.0, 0.2, math.nan, 0.8)]
    (row,) = words.risk_rows(Audit("a", {}, {}, (), tuple(findings), 0.0))
    assert row.adaptive == "0.2 ×, 0.2"


def test_advice_follows_from_settings_and_findings():
    notes = " ".join(words.advice(made_up()))
    for part in ("with a memory", "fc3.weight, fc3.bias", "About 2 clients", "from its seed", "The server is trusted"):
        assert part in notes
    assert "Published attacks fail on update, image, property while" in notes
    safer = {"veil": 0.2, "sketch": "identity-v1", "clients": 100, "fraction": 0.5, "secure_aggregation": True}
    assert len(words.advice(Audit("a", safer, {}, (), (), 0.0))) == 1
    naive = Audit("a", safer, {}, (), (Finding("forest", "client", "naive", "property", "auc", 0.5),), 0.0)
    assert "No attack that knows the defence gave a result on property" in " ".join(words.advice(naive))


def test_limits():
    limits = words.parse_limits("cosine=0.3, psnr=15,auc=0.85")
    assert limits == {"cosine": 0.3, "psnr": 15.0, "auc": 0.85}
    broken = words.exceeded(made_up(), limits)
    assert len(broken) == 2
    assert broken[0] == "cosine: rewind (client, adaptive) reached 1.000 on the update, above the limit 0.3"
    assert "reached exact on the image" in broken[1]


def test_limit_without_a_value_is_not_kept():
    audit = Audit("a", {}, {}, (), (Finding("a", "client", "naive", "x", "auc", math.nan),), 0.0)
    assert words.exceeded(audit, {"auc": 0.6}) == ["auc: no attack gave a value, so the limit 0.6 could not be checked"]


def test_limit_sees_an_attack_that_is_always_wrong():
    audit = Audit("a", {}, {}, (), (Finding("a", "client", "naive", "x", "auc", 0.1),), 0.0)
    assert "0.100 on the x, which turned round is 0.900, above" in words.exceeded(audit, {"auc": 0.6})[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=3", "unknown measure 'speed' in a limit; choose from share, tpr, auc, accuracy, cosine, psnr, ssim"),
        ("cosine=high", "the limit of cosine must be a number, got 'high'"),
        ("cosine=nan", "the limit of cosine must be finite"),
        ("cosine", "a limit is written measure=number"),
        ("", "a limit is written measure=number"),
        ("auc=0.5,auc=0.6", "auc has two limits"),
        ("error=1", "a large error is good"),
    ],
)
def test_nonsense_limits_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        words.parse_limits(text)


def test_comparison_holds_each_run(compared):
    text = Reader(compared).text
    for part in ("paper", "veiled", "empty", "92.3 %", "123.5 MB", "1.000", "exact", "0.790", "400", "500"):
        assert part in text
    assert compared.count("data:image/svg+xml") == 2  # one for each seat


def test_comparison_keeps_the_seats_apart():
    found = tuple(
        Finding("an attack", seat, "adaptive", "image", "psnr", value)
        for seat, value in (("client", 9.5), ("server", 41.5))
    )
    audit = Audit("veiled", {}, {"accuracy": 0.9}, (), found, 0.0)
    assert (audit.worst("psnr", "client"), audit.worst("psnr", "server"), audit.worst("psnr")) == (9.5, 41.5, 41.5)
    assert audit.worst("psnr", "anyone") is None
    text = Reader(report.comparison([audit])).text
    assert text.index("client: PSNR") < text.index("server: PSNR")
    assert text.index("9.5 dB") < text.index("41.5 dB")


def test_comparison_without_a_measure_has_no_picture():
    assert "<img" not in report.comparison([Audit("empty", {}, {}, (), (), 0.0)])


def test_thinned_curves_keep_the_low_rates():
    curve = Curve(
        "roc", tuple(i / 100_000 for i in range(100_001)), tuple((i / 100_000) ** 0.5 for i in range(100_001))
    )
    x, y = drawings._points(curve, 1e-4)  # four decades, so that a step of a 400th is 0.01 decades
    assert len(x) < 1000
    assert sum(rate <= 1e-3 for rate in x) > 50
    assert (x[-1], y[-1]) == (1.0, 1.0)
    steps = [math.log10(b / a) for a, b in pairwise(x) if a >= 1e-3]
    assert max(steps) < 0.015  # and at most one point of the original more, which is 0.005 at 0.001


def test_labels_keep_their_distance():
    places = drawings._spread([0.0, 0.5, 0.5, 0.5, 0.99, 1.0], gap=0.15)
    assert min(b - a for a, b in pairwise(places)) > 0.1499
    assert places[0] > -1e-9
    assert places[-1] <= 1


def test_log_axis_starts_at_the_first_rate_above_zero():
    x, y = drawings._points(Curve("roc", (0.0, 0.0, 0.01, 1.0), (0.0, 0.02, 0.1, 1.0)), 1e-4)
    assert (x, y) == ([1e-4, 0.01, 1.0], [0.02, 0.1, 1.0])
