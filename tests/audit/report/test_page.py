"""The page of an audit: complete, escaped, and silent on the network."""

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from audit.report.example import HOSTILE, made_up
from dbcl.simulation.presets import PRESETS, preset
from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report import comparison, rating, wording
from dbcl_audit.report import page as report
from dbcl_audit.report.measures import cases_text, number_text, range_text
from dbcl_audit.report.rating import risks, word

STYLE = (Path(report.__file__).parent / "templates" / "style.css").read_text()
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Collects tags, attributes and text; refuses tags that close in the wrong order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.elements, self.text = [], [], [], [], ""
        self.feed(page)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.elements.append((tag, dict(attributes)))
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
    return comparison.comparison([made_up(), quiet, Audit("empty", {}, {}, (), (), 0.0)])


@pytest.mark.parametrize("which", ["page", "compared"])
def test_page_asks_for_nothing_and_runs_nothing(which, request):
    text = request.getfixturevalue(which)
    reader = Reader(text)
    assert "script" not in reader.tags
    assert "<script" not in text
    (policy,) = (each for tag, each in reader.elements if tag == "meta" and "http-equiv" in each)
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name in ("href", "action", "srcset")]
    assert all(value.startswith("data:image/") for name, value in reader.attributes if name == "src")
    assert re.findall(r"url\((?!#)", text) == []
    assert all(value.startswith("#") for name, value in reader.attributes if name.endswith(":href"))
    assert "@import" not in text
    outside = re.findall(r"https?://[^\s'\"<&]*", re.sub(r"https://example\.org", "", text))  # the hostile text's own
    assert outside == []


def test_hostile_text_is_shown_as_text(page):
    assert "alert('x')" not in page
    assert "aria-label='<" not in page
    assert HOSTILE in Reader(page).text
    assert Reader(page).text.count(HOSTILE) >= 8


@pytest.mark.parametrize(("which", "count"), [("page", 3), ("compared", 3)])
def test_figures_take_the_pages_colours_so_that_they_follow_dark_mode(which, count, request):
    figures = re.findall(r"<svg.*?</svg>", request.getfixturevalue(which), flags=re.DOTALL)
    assert len(figures) == count  # update by round, property ROC, membership ROC; or clients, server, anyone
    used = set()
    for figure in figures:
        assert re.findall(r"#[0-9a-f]{3,8}\b(?=[;\"'])", figure.split(">", 1)[1].replace('href="#', "")) == []
        used |= set(re.findall(r"var\(--(\w+)\)", figure))
    assert {"muted", "line", "c0"} <= used
    dark = STYLE.split("prefers-color-scheme:dark")[1].split("}}")[0]
    for variable in used:
        assert f"--{variable}:" in dark


@pytest.mark.parametrize("which", ["page", "compared"])
def test_names_inside_the_figures_are_unique_and_all_references_resolve(which, request):
    text = request.getfixturevalue(which)
    names = re.findall(r"\bid=[\"']([^\"']*)", text)
    assert len(set(names)) == len(names)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]*)", text)) <= set(names)


def test_every_finding_appears(page):
    text = Reader(page).text
    for finding in made_up().findings:
        assert f"{finding.attack} ({finding.adversary}, {finding.attacker}) on the {finding.target}" in text
        labels = (curve.label for curve in finding.curves)
        for part in (finding.measure.text, finding.note, *finding.failures, *labels, cases_text(finding)):
            assert part in text
        for caption, _ in finding.images:
            assert caption in text


def test_members_found_are_told_in_words(page):
    text = Reader(page).text
    assert "members found at 1 % false alarms" in text
    assert "900 members and 800 others" in text
    assert "fpr" not in text
    assert "membership: found (share) by false alarms (share)" in text


@pytest.mark.parametrize("which", ["page", "compared"])
def test_a_page_can_be_read_by_ear_and_walked_by_keyboard(which, request):
    reader = Reader(request.getfixturevalue(which))
    assert reader.tags.count("main") == 1
    assert all(attributes.get("alt") for tag, attributes in reader.elements if tag == "img")
    assert all(a.get("aria-label") and a["role"] == "img" for tag, a in reader.elements if tag == "svg")
    scrolling = [attributes for _, attributes in reader.elements if attributes.get("class") == "scroll"]
    assert len(scrolling) == reader.tags.count("table") > 0
    for attributes in scrolling:
        assert (attributes["tabindex"], attributes["role"]) == ("0", "region")
        assert attributes["aria-label"]
    assert all(attributes["scope"] for tag, attributes in reader.elements if tag == "th")
    levels = [int(tag[1]) for tag in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_images_have_different_alternatives(page):
    alternatives = [attributes["alt"] for tag, attributes in Reader(page).elements if tag == "img"]
    assert alternatives[0] == "true, by matching on rewind (client): 44.9 dB (38.0 to 93.0 dB)"
    assert len(set(alternatives)) == len(alternatives)


def test_bad_images_are_left_out(page):
    assert page.count("data:image/png;base64,") == 3
    assert "(not a PNG)" in page
    assert "onerror" not in page


def test_page_is_a_pure_function(page):
    assert report.page(made_up()) == page


def test_page_survives_json():
    assert "option I" in report.page(Audit.from_json(made_up().json()))


def verdicts_of(page: str) -> list[tuple[str, str]]:
    return re.findall(r"<li class='(w\d)'><p class='big'>([^<]*)", page)


def test_page_without_findings_says_that_nothing_is_known():
    said = verdicts_of(report.page(Audit("empty", {}, {}, (), (), 0.0)))
    assert [rank for rank, _ in said] == ["w0"] * 3
    assert all(wording.VERDICTS[0] in text for _, text in said)


def test_each_adversary_has_its_own_verdict_before_anything_else(page):
    """The server always wins; that must not be all that the page says about a run."""
    assert verdicts_of(page) == [
        ("w4", "A client got as much as if there were no defence."),
        ("w4", "The server got as much as if there were no defence."),
        ("w3", "Anyone who has the finished model got more than guessing gives."),
    ]
    hidden = Finding("smoother", "client", "adaptive", "update", "cosine", 0.02, -0.01, 0.05, 0.0)
    server = Finding("through the sketch", "server", "adaptive", "image", "psnr", 40.0, 38.0, 42.0, 12.8)
    calm = report.page(replace(made_up(), findings=(hidden, server)))
    assert [rank for rank, _ in verdicts_of(calm)] == ["w1", "w4", "w0"]
    text = Reader(calm).text
    assert (
        text.index("Verdict for each adversary")
        < text.index("recovered the others' update")
        < text.index("Who sees what")
    )
    assert "under every preset it must be trusted" in text
    assert wording.NO_VEIL in text
    assert wording.NO_VEIL not in report.page(replace(made_up(), settings={"veil": 0.2}))
    assert wording.NO_PROOF in text


def test_what_could_not_run_stands_beside_the_verdicts(page):
    beside = page[page.index("Verdict for each adversary") : page.index("What was found")]
    assert "This audit is incomplete. What could not run:" in beside
    assert "on the membership): no shadow models; &lt;script&gt;" in beside
    assert "incomplete" not in report.page(replace(made_up(), findings=made_up().findings[:2]))


def test_the_top_says_that_it_is_a_simulation_of_how_many_when_and_by_what(page):
    top = page[: page.index("<section>")]
    assert "These are simulated runs, most of them of 3 parties; they did not happen in the run." in top
    assert "About 2 clients share a round of this run: there is no larger crowd" in top
    assert "2026-01-31 09:05 UTC, dbcl 9.8.7" in top
    crowd = replace(made_up(), settings={"clients": 200, "fraction": 0.1})
    assert (
        "mixed with 18 others and usually gets less than here: dbcl audit --parties 20 simulates that"
        in report.page(crowd)
    )
    large = replace(made_up(), settings={"clients": 9000, "fraction": 0.1})
    assert "mixed with 898 others and usually gets less than here: dbcl audit --parties 20" in report.page(large)


def test_settings_of_run_and_audit_are_on_the_page(page):
    text = Reader(page).text
    for name, value in (("shadow_models", "16"), ("seed", "41"), ("dbcl version", "9.8.7"), ("norm_bound", "None")):
        assert f"{name}{value}" in text
    assert "parties of the simulated runs3" in text


def test_the_property_has_a_name(page):
    text = Reader(page).text
    assert f"the property “thick strokes {HOSTILE}”" in text
    assert "told batches with and without the property “thick strokes" in text


def test_comparison_holds_each_run(compared):
    text = Reader(compared).text
    for part in ("paper", "veiled", "empty", "92.3 %", "123.5 MB", "1.000", "exact", "0.790", "400", "500"):
        assert part in text


def test_comparison_says_what_guessing_gives_and_which_way_is_worse(compared):
    text = Reader(compared).text
    for head in ("client: cosine (higher is worse)", "server: AUC (higher is worse)", "accuracy (higher is better)"):
        assert head in text
    row = re.search(r"<td>guessing</td>(.*?)</tr>", compared)[1]
    assert re.findall(r"<td>([^<]*)", row) == [
        "",
        "",
        "",
        "",
        "0.000",
        "12.8 dB",
        "0.500",
        "12.8 dB",
        "—",
        "0.500",
        "",
        "",
        "",
    ]
    assert compared.index("<td>guessing</td>") < compared.index("<td>veiled</td>")


def test_comparison_keeps_the_adversaries_apart():
    found = tuple(
        Finding("an attack", adversary, "adaptive", "image", "psnr", value)
        for adversary, value in (("client", 9.5), ("server", 41.5))
    )
    audit = Audit("veiled", {}, {"accuracy": 0.9}, (), found, 0.0)
    assert [rating.worst(audit, "psnr", [adversary]) for adversary in ("client", "server", "anyone")] == [
        9.5,
        41.5,
        None,
    ]
    assert rating.worst(audit, "psnr") == 41.5
    text = Reader(comparison.comparison([audit])).text
    assert text.index("client: PSNR") < text.index("server: PSNR")
    assert text.index("9.5 dB") < text.index("41.5 dB")


@pytest.mark.parametrize("adversary", ["client", "colluders", "server", "anyone"])
@pytest.mark.parametrize("target", ["membership", "property"])
def test_comparison_shows_the_worst_of_an_audit_whatever_it_is_called(adversary, target):
    """Membership and properties are measured by AUC both; an AUC below 0.5 is as good as its mirror image."""
    mild = Finding("mild", adversary, "naive", "property", "auc", 0.7)
    for value in (0.962, 0.038):
        strong = Finding("strong", adversary, "adaptive", target, "auc", value)
        audit = Audit("a", {}, {"accuracy": 0.9}, (), (mild, strong), 0.0)
        shown = dict(zip(comparison.LEAKS, comparison.leaks(audit), strict=True))
        assert [text for leak, text in shown.items() if adversary in leak.adversaries and leak.measure == "auc"] == [
            "0.962"
        ]
        assert "0.962" in Reader(comparison.comparison([audit])).text


@pytest.mark.parametrize("name", PRESETS)
def test_each_cell_of_a_comparison_is_the_worst_of_the_runs_own_audit(name):
    """A verdict may rest on a label or on a true positive rate: then the comparison shows that."""
    settings = preset(name).options()
    guaranteed = name in ("private", "private-example", "guaranteed")
    measured = Finding("canaries", "client", "adaptive", "guarantee", "epsilon", 7.5, budget={"stated epsilon": 8.0})
    found = [
        Finding("rewind", "client", "adaptive", "update", "cosine", 0.4, chance=0.0),
        Finding("bias", "client", "naive", "label", "accuracy", 1.0, chance=0.1),
        Finding("pooled", "colluders", "adaptive", "property", "auc", 0.6, 0.55, 0.65),
        Finding("matching", "server", "adaptive", "image", "psnr", 14.0, chance=13.0),
        Finding("labels of one update", "server", "adaptive", "label", "accuracy", 0.95, chance=0.5),
        Finding("loss threshold", "anyone", "naive", "membership", "auc", 0.52),
        Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 1 % fpr", 0.7, chance=0.01),
    ]
    if guaranteed:
        found.append(measured)
    other = Audit("other", {}, {}, (), (Finding("x", "server", "naive", "image", "psnr", 40.0),), 1.0)
    audit = Audit(name, settings, {"accuracy": 0.9}, (), tuple(found), 1.0)
    expected = rating.worst_by_adversary(audit)
    together = max((expected["client"], expected["colluders"]), key=rating.severity)
    cells = comparison.worst_findings(audit)
    for who, worst, cell in zip(comparison.WHO, (together, expected["server"], expected["anyone"]), cells, strict=True):
        assert comparison.worst_finding(audit, who) is worst
        assert cell == f"{number_text(worst.value, worst.measure)} {comparison.worst_text(worst)}: {word(worst)}"
    assert "label accuracy" in cells[0]
    assert "label accuracy" in cells[1]
    assert "members found at 1 % false alarms" in cells[2]
    rows = re.findall(r"<tr>(<td.*?)</tr>", comparison.comparison([other, audit]))
    (row,) = (row for row in rows if f"<td>{name}</td>" in row)
    texts = [html.unescape(text) for text in re.findall(r"<td[^>]*>([^<]*)</td>", row)]
    assert texts[-3:] == cells
    assert texts[-9:-3] == comparison.leaks(audit)
    assert texts[5] == (f"{settings['epsilon']:g} (7.5)" if guaranteed else "—")


def test_comparison_says_what_a_private_run_promises():
    measured = Finding("canaries", "client", "adaptive", "guarantee", "epsilon", 7.52)
    audit = Audit("private", {"epsilon": 8.0}, {"accuracy": 0.9}, (), (measured,), 0.0)
    assert "8 (7.5)" in Reader(comparison.comparison([audit])).text


def test_comparison_without_a_measure_has_no_image():
    assert "<svg" not in comparison.comparison([Audit("empty", {}, {}, (), (), 0.0)])


def test_the_risk_table_sets_naive_and_adaptive_side_by_side_with_the_rating_last(page):
    text = Reader(page).text
    for risk in risks(made_up()):
        assert number_text(risk.chance, risk.measure) in text
        for worst in (risk.naive, risk.adaptive):
            if worst is None:
                assert "no such attack" in text
            else:
                rests_on = f"{cases_text(worst)}, {worst.attack}" if cases_text(worst) else worst.attack
                assert f"{range_text(worst)}{rests_on}{word(worst)}" in text
