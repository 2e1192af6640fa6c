"""The page of an audit: complete, escaped, and silent on the network."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from audit.report.example import HOSTILE, made_up
from dbcl.audit.findings import Audit, Finding
from dbcl.audit.report import page as report
from dbcl.audit.report import wording
from dbcl.audit.report.measures import number_text, range_text
from dbcl.audit.report.rating import risks, word

VOID = {"meta", "img", "br"}


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
    assert wording.HEADS[0] in report.page(Audit("empty", {}, {}, (), (), 0.0))


def test_headline_is_about_the_worst(page):
    assert wording.HEADS[4] in page
    calm = replace(made_up(), findings=made_up().findings[:2])
    assert wording.HEADS[1] in report.page(calm)
    assert wording.NO_PROOF in Reader(report.page(calm)).text


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


def test_the_risk_table_sets_naive_and_adaptive_side_by_side(page):
    text = Reader(page).text
    for risk in risks(made_up()):
        assert number_text(risk.chance, risk.measure) in text
        for worst in (risk.naive, risk.adaptive):
            assert ("no such attack" if worst is None else f"{word(worst)}{range_text(worst)}, {worst.attack}") in text
