"""What counts as a leak, which attack is the worst, and which limits were exceeded."""

import math

import pytest

from audit.report.example import made_up
from dbcl.errors import ConfigError
from dbcl_audit.findings import Audit, Finding, with_interval
from dbcl_audit.report.measures import range_text
from dbcl_audit.report.rating import (
    BAD,
    FAILED,
    GUESS,
    LEAKS,
    UNRATED,
    WIDE,
    exceeded,
    includes_guessing,
    parse_limits,
    risks,
    severity,
    word,
    worst_by_adversary,
)
from dbcl_audit.report.wording import sentence


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
    rated = [word(Finding("a", "client", "naive", "x", measure, v, chance=chance)) for v in values]
    assert rated == [GUESS, LEAKS, BAD]


def test_words_for_what_cannot_be_rated():
    assert word(Finding("a", "client", "naive", "x", "auc", math.nan)) == FAILED
    assert word(Finding("a", "client", "adaptive", "guarantee", "epsilon", 3.0)) == UNRATED
    with pytest.raises(ValueError, match="colour"):
        Finding("a", "client", "naive", "x", "colour", 3.0)
    assert word(Finding("a", "client", "naive", "x", "auc", 0.5, 0.3, 0.51)) == WIDE


def test_risks_hold_the_worst_naive_and_the_worst_adaptive_attack():
    found = {(risk.target, risk.adversary, risk.measure): risk for risk in risks(made_up())}
    update = found["update", "client", "cosine"]
    assert update.chance == 0.0
    assert f"{range_text(update.naive)}, {update.naive.attack}" == "0.002 (-0.010 to 0.012), option I"
    assert word(update.naive) == GUESS
    assert f"{range_text(update.adaptive)}, {update.adaptive.attack}" == "1.000 (0.990 to 1.000), rewind"
    assert word(update.adaptive) == BAD
    assert found["label", "client", "accuracy"].naive is None


def test_worst_error_is_the_smallest():
    findings = [
        Finding(str(v), "client", "adaptive", "update", "relative error", v) for v in (300.0, 0.2, math.nan, 0.8)
    ]
    (risk,) = risks(Audit("a", {}, {}, (), tuple(findings), 0.0))
    assert risk.adaptive.attack == "0.2"
    assert range_text(risk.adaptive) == "0.2 ×"


def test_limits():
    limits = parse_limits("cosine=0.3, psnr=15,auc=0.85")
    assert limits == {"cosine": 0.3, "psnr": 15.0, "auc": 0.85}
    broken = exceeded(made_up(), limits)
    assert len(broken) == 2
    assert broken[0] == "cosine: rewind (client, adaptive) reached 1.000 on the update, above the limit 0.3"
    assert "reached exact on the image" in broken[1]


def test_a_limit_of_one_adversary_leaves_the_others_alone():
    found = tuple(
        Finding("matching", adversary, "adaptive", "image", "psnr", value)
        for adversary, value in (("client", 9.5), ("server", 40.0))
    )
    audit = Audit("veiled", {}, {}, (), found, 0.0)
    assert exceeded(audit, parse_limits("client.psnr=15")) == []
    assert len(exceeded(audit, parse_limits("psnr=15"))) == 1
    broken = exceeded(audit, parse_limits("client.psnr=5, server.psnr=15"))
    assert broken == [
        "client.psnr: matching (client, adaptive) reached 9.5 dB on the image, above the limit 5",
        "server.psnr: matching (server, adaptive) reached 40.0 dB on the image, above the limit 15",
    ]
    (unknown,) = exceeded(audit, parse_limits("anyone.psnr=15"))
    assert unknown == "anyone.psnr: no attack by anyone gave a value, so the limit 15 could not be checked"


def test_the_worst_of_each_adversary():
    worst = worst_by_adversary(made_up())
    assert worst["client"].attack == "matching on rewind"
    assert worst["server"].attack == "through the sketch"
    assert worst["anyone"].attack == "LiRA"
    rates = [
        Finding("a", "anyone", "naive", "x", f"tpr at {p} % fpr", v, 0.0, 0.5) for p, v in ((0.1, 0.0), (1, 0.017))
    ]
    assert worst_by_adversary(Audit("a", {}, {}, (), tuple(rates), 0.0))["anyone"].value == 0.017  # both are unclear
    broken = Finding("a", "server", "naive", "x", "auc", math.nan)
    assert worst_by_adversary(Audit("a", {}, {}, (), (broken,), 0.0)) == {
        "client": None,
        "server": None,
        "anyone": None,
    }


def test_an_interval_that_includes_guessing_is_no_proof_of_a_leak():
    two = with_interval(Finding("a", "client", "naive", "label", "accuracy", 0.5, chance=0.1, budget={"images": 2}))
    many = with_interval(Finding("a", "client", "naive", "label", "accuracy", 0.5, chance=0.1, budget={"images": 200}))
    assert includes_guessing(two)
    assert not includes_guessing(many)
    assert sentence(two).endswith("From 2 images, by a (naive): may leak, but the interval includes guessing.")
    assert sentence(many).endswith("From 200 images, by a (naive): leaks.")
    assert severity(two) < severity(many)
    spread = Finding("a", "client", "naive", "update", "cosine", 0.95, -0.1, 1.0, 0.0)  # over the rounds
    assert word(spread) == BAD
    none = with_interval(Finding("a", "client", "naive", "label", "accuracy", 0.0, chance=0.1, budget={"images": 2}))
    assert word(none) == WIDE


def test_limit_without_a_value_is_not_kept():
    audit = Audit("a", {}, {}, (), (Finding("a", "client", "naive", "x", "auc", math.nan),), 0.0)
    assert exceeded(audit, {"auc": 0.6}) == ["auc: no attack gave a value, so the limit 0.6 could not be checked"]


def test_limit_sees_an_attack_that_is_always_wrong():
    audit = Audit("a", {}, {}, (), (Finding("a", "client", "naive", "x", "auc", 0.1),), 0.0)
    assert "0.100 on the x, which turned round is 0.900, above" in exceeded(audit, {"auc": 0.6})[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=3", "unknown measure 'speed' in a limit; choose from share, tpr, auc, accuracy, cosine, psnr, ssim"),
        ("speed=3", r"alone or after an adversary \(client, colluders, server, anyone\), as in client\.psnr"),
        ("client.speed=3", "unknown measure 'speed' in a limit"),
        ("peer.auc=0.6", "unknown adversary 'peer' in a limit; choose from client, colluders, server, anyone, or"),
        ("client.auc=0.6,client.auc=0.7", "client.auc has two limits"),
        ("server.auc=low", "the limit of server.auc must be a number, got 'low'"),
        ("client.error=1", "a large error is good"),
        ("cosine=high", "the limit of cosine must be a number, got 'high'"),
        ("cosine=nan", "the limit of cosine must be finite"),
        ("cosine", "a limit is written measure=number or adversary.measure=number"),
        ("", "a limit is written measure=number"),
        ("auc=0.5,auc=0.6", "auc has two limits"),
        ("error=1", "a large error is good"),
    ],
)
def test_nonsense_limits_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_limits(text)
