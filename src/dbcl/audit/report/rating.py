"""How findings are read: what counts as a leak, in which words, which limits were broken, and what to change."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dbcl.audit.findings import ATTACKERS, Audit, Finding
from dbcl.errors import ConfigError

BAD, LEAKS, GUESS, FAILED, UNRATED = "as bad as no defence", "leaks", "close to guessing", "could not run", "not rated"
WIDE = f"{GUESS}, but the interval is wide"
RANK = {BAD: 4, LEAKS: 3, WIDE: 2, GUESS: 1, UNRATED: 0, FAILED: 0}
KINDS = ("share", "tpr", "auc", "accuracy", "cosine", "psnr", "ssim", "error")
CHANCE = {"share": 0.0, "auc": 0.5, "accuracy": 0.0, "cosine": 0.0, "psnr": 13.0, "ssim": 0.0, "error": 1.0}
LIMITS = tuple(kind for kind in KINDS if kind != "error")

RULES = {
    "cosine, ssim, accuracy, AUC": "a tenth of the way from guessing to perfect is a leak, nine tenths is as bad as no "
    "defence. A cosine below 0 and an AUC below 0.5 count as their mirror image: the attacker just turns it round.",
    "error": "relative to the size of the truth; below 0.9 of what guessing gives is a leak, below 0.1 is as bad as no "
    "defence.",
    "PSNR": "2 dB above guessing is a leak; 30 dB, or 10 dB above guessing if that is more, is as bad as no defence.",
    "share above 20 dB": "one in a hundred more than by guessing is a leak, nine in ten are as bad as no defence.",
    "true positives (tpr)": "twice the rate of false alarms is a leak; half of all members, or four times that rate "
    "if that is more, is as bad as no defence.",
    "guessing": "as the audit measured it; where it did not: cosine 0, AUC 0.5, accuracy 0, SSIM 0, share 0, error 1, "
    "PSNR 13 dB (about what the mean picture of a class gives), true positives as many as false ones.",
}

GLOSSARY = {
    "adaptive attacker": "knows how the defence works and uses it. Judge by this one.",
    "AUC": "chance that a true case is ranked above a false one: 0.5 is a coin, 1 is certain.",
    "cosine": "angle between an estimated update and the true one: 1 is the exact direction, 0 is nothing.",
    "error": "length of the mistake divided by the length of the truth; guessing zero gives 1.",
    "in clear": "sent to every client without sketch and without noise.",
    "interval": "the range in which the value would fall with other examples, as far as the attack could tell.",
    "naive attacker": "an attack as its paper published it, unaware of the defence.",
    "PSNR": "likeness to the original in decibels; above 20 a person recognises it, above 30 it looks the same.",
    "secure aggregation": "a protocol by which the server learns the sum of many updates and no single one.",
    "sketch": "a random projection of the weights, made from a seed that every client knows.",
    "SSIM": "likeness of two pictures to the eye, 1 for equal ones.",
    "true positives at 1 % false ones": "share of members found by an attacker who wrongly accuses 1 % of the others.",
    "update": "what one round changed in the weights: the average over the clients of that round.",
    "veil": "secret noise that the server adds to everything it sends; its size is relative to the weights.",
}

WHO = {"client": "A client that remembers what it received", "server": "The server", "anyone": "Anyone"}
PHRASES = {
    "share": "rebuilt the {0} recognisably in {1} of the cases",
    "tpr": "found {1} by {2}",
    "auc": "inferred the {0} with AUC {1}, where 1 is certainty",
    "accuracy": "named the {0} correctly in {1} of the cases",
    "cosine": "recovered the {0} with cosine {1}, where 1 is exact",
    "psnr": "rebuilt the {0} at {1}, where 20 dB is recognisable",
    "ssim": "rebuilt the {0} with likeness {1}, where 1 is equal",
    "error": "recovered the {0} with an error of {1} its size",
}
HEADS = {
    4: "The worst attacker got as much as if there were no defence.",
    3: "The worst attacker got more than guessing gives.",
    2: "No attack did clearly better than guessing, but at least one cannot rule it out.",
    1: "No attack of this audit did better than guessing.",
    0: "No attack gave a result that can be rated, so this audit says nothing.",
}
NO_PROOF = (
    "Nothing is safe because an attack failed. Every figure on this page is what these attacks got with this budget, "
    "so it is a lower bound: a better attacker gets as much or more."
)


class RiskRow(NamedTuple):
    """One line of the risk table, all text: the worst naive and the worst adaptive attack side by side."""

    target: str
    seat: str
    measure: str
    guessing: str
    naive: str
    naive_word: str
    adaptive: str
    adaptive_word: str


def kind(measure: str) -> str:
    """The family of a measure, which decides how it is read; empty where it is unknown.

    >>> kind("tpr at 1 % fpr"), kind("share above 20 dB"), kind("colour")
    ('tpr', 'share', '')
    """
    return next((name for name in KINDS if name in measure.lower()), "")


def word(finding: Finding) -> str:
    """What a finding means in a word, by `RULES`: its value against what guessing gives.

    >>> word(Finding("rewind", "client", "adaptive", "update", "cosine", 0.99))
    'as bad as no defence'
    >>> word(Finding("forest", "client", "naive", "property", "auc", 0.52, low=0.4, high=0.64))
    'close to guessing, but the interval is wide'
    """
    family = kind(finding.measure)
    if math.isnan(finding.value):
        return FAILED
    if not family:
        return UNRATED
    leaks, bad = _levels(family, chance_of(finding))
    if _strength(finding) >= bad:
        return BAD
    if _strength(finding) >= leaks:
        return LEAKS
    ends = [end for end in (finding.low, finding.high) if end is not None]
    return WIDE if any(_fold(family, end) >= leaks for end in ends) else GUESS


def risk_rows(audit: Audit) -> list[RiskRow]:
    """The risk table as text: for each target, seat and measure the worst naive and the worst adaptive attack.

    >>> finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99, 0.98, 1.0, 0.0)
    >>> risk_rows(Audit("a", {}, {}, (), (finding,), 1.0))[0].adaptive
    '0.990 (0.980 to 1.000), rewind'
    """
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in audit.findings:
        groups.setdefault((finding.target, finding.seat, finding.measure), []).append(finding)
    rows = []
    for key, group in groups.items():
        cells = []
        for attacker in ATTACKERS:
            found = [finding for finding in group if finding.attacker == attacker]
            worst = max(found, key=severity, default=None)
            cells += ["no such attack", ""] if worst is None else [f"{range_text(worst)}, {worst.attack}", word(worst)]
        rows.append(RiskRow(*key, number_text(chance_of(max(group, key=severity)), key[2]), *cells))
    return rows


def parse_limits(text: str) -> dict[str, float]:
    """Read limits such as those of `--fail-above`.

    >>> parse_limits("cosine=0.3, psnr=15")
    {'cosine': 0.3, 'psnr': 15.0}
    >>> parse_limits("speed=3")
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: unknown measure 'speed' in a limit; choose from share, tpr, auc, ...
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise ConfigError(f"a limit is written measure=number, as in cosine=0.3,psnr=15; got {part.strip()!r}")
        if name == "error":
            raise ConfigError("a large error is good, so it cannot be limited from above; limit cosine instead")
        if name not in LIMITS:
            raise ConfigError(f"unknown measure {name!r} in a limit; choose from {', '.join(LIMITS)}")
        if name in limits:
            raise ConfigError(f"{name} has two limits; give one")
        try:
            limits[name] = float(number)
        except ValueError:
            raise ConfigError(f"the limit of {name} must be a number, got {number!r}") from None
        if not math.isfinite(limits[name]):
            raise ConfigError(f"the limit of {name} must be finite, got {number!r}")
    return limits


def exceeded(audit: Audit, limits: Mapping[str, float]) -> list[str]:
    """Each limit that an attack broke, or that nothing was measured for, as a sentence; empty means all were kept.

    >>> audit = Audit("a", {}, {}, (), (Finding("rewind", "client", "adaptive", "update", "cosine", 0.99),), 1.0)
    >>> exceeded(audit, {"cosine": 0.3})
    ['cosine: rewind (client, adaptive) reached 0.990 on the update, above the limit 0.3']
    """
    sentences = []
    for name, limit in limits.items():
        found = [each for each in audit.findings if kind(each.measure) == name and not math.isnan(each.value)]
        if not found:
            sentences.append(f"{name}: no attack gave a value, so the limit {limit:g} could not be checked")
            continue
        worst = max(found, key=_strength)
        if _strength(worst) > limit:
            reached = f"{number_text(worst.value, worst.measure)} on the {worst.target}"
            mirror = (
                f", which turned round is {number_text(_strength(worst), name)}"
                if worst.value != _strength(worst)
                else ""
            )
            by = f"{worst.attack} ({worst.seat}, {worst.attacker})"
            sentences.append(f"{name}: {by} reached {reached}{mirror}, above the limit {limit:g}")
    return sentences


def advice(audit: Audit) -> list[str]:
    """What the settings and the findings mean and what to change, as sentences.

    >>> advice(Audit("a", {"veil": 0.0, "sketch": "count-v1"}, {}, (), (), 1.0))[0][:41]
    'There is no veil, and the sketch is publi'
    """
    return [*_about_settings(audit.settings), *_about_findings(audit.findings)]


def chance_of(finding: Finding) -> float:
    if finding.chance is not None:
        return finding.chance
    family = kind(finding.measure)
    if family == "tpr":
        rate = re.search(r"([\d.]*\d)\s*%", finding.measure)
        return float(rate[1]) / 100 if rate else 0.01
    return CHANCE.get(family, math.nan)


def _levels(family: str, chance: float) -> tuple[float, float]:
    """From where on a value leaks, and from where on it is as bad as no defence."""
    special = {
        "error": (-0.9 * chance, -0.1 * chance),
        "psnr": (chance + 2, max(30.0, chance + 10)),
        "share": (chance + 0.01, 0.9),
        "tpr": (2 * chance, max(0.5, 4 * chance)),
    }
    return special.get(family, (chance + 0.1 * (1 - chance), chance + 0.9 * (1 - chance)))


def _fold(family: str, value: float) -> float:
    """The value as strength of an attack: more is worse."""
    if family == "auc":
        return max(value, 1 - value)
    return {"cosine": abs(value), "error": -value}.get(family, value)


def _strength(finding: Finding) -> float:
    return _fold(kind(finding.measure), finding.value)


def severity(finding: Finding) -> tuple[int, float]:
    """By word, then by how far it is on the way from a leak to no defence, which compares across measures."""
    rank = RANK[word(finding)]
    if rank == 0:
        return 0, -math.inf
    leaks, bad = _levels(kind(finding.measure), chance_of(finding))
    return rank, (_strength(finding) - leaks) / max(bad - leaks, 1e-9)


def number_text(value: float, measure: str) -> str:
    family = kind(measure)
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "exact" if family == "psnr" else str(value)
    if family in ("share", "tpr", "accuracy"):
        return f"{100 * value:.1f} %"
    return f"{value:.1f} dB" if family == "psnr" else f"{value:.3g} ×" if family == "error" else f"{value:.3f}"


def range_text(finding: Finding) -> str:
    value = number_text(finding.value, finding.measure)
    if finding.low is None or finding.high is None:
        return value
    low, high = (number_text(end, finding.measure) for end in (finding.low, finding.high))
    return f"{value} ({low.split(' ')[0]} to {high})"


def plain_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain_text(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain_text(entry) for entry in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def size_text(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "—"
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value:,.0f} B"


def accuracy_text(audit: Audit) -> str:
    value = audit.run.get("accuracy")
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and math.isfinite(value) else "—"


def leak_text(audit: Audit, seat: str, measure: str) -> str:
    worst = audit.worst(measure, seat)
    return "—" if worst is None else number_text(worst, measure)


# What it means.


def sentence(finding: Finding) -> str:
    phrase = PHRASES.get(kind(finding.measure), "reached {1} by {2} on the {0}")
    phrase = "rebuilt the {0} exactly" if math.isinf(finding.value) else phrase
    got = phrase.format(finding.target, number_text(finding.value, finding.measure), finding.measure)
    chance = chance_of(finding)
    guess = "" if math.isnan(chance) else f" Guessing gives {number_text(chance, finding.measure)}."
    return (
        f"{WHO.get(finding.seat, finding.seat)} {got} ({finding.attack}, {finding.attacker}): {word(finding)}.{guess}"
    )


def _about_settings(settings: Mapping[str, Any]) -> list[str]:
    veil, sketch, clear = settings.get("veil"), str(settings.get("sketch", "")), settings.get("clear")
    notes = []
    if veil == 0 and sketch.startswith("identity"):
        notes.append("There is neither sketch nor veil: every client receives the weights themselves. Set a veil.")
    elif veil == 0:
        notes.append(
            "There is no veil, and the sketch is public: a client with a memory undoes it, because it knows every "
            "projection and can put the rounds together (rewind, smoother). Set a veil; 0.2 is the default."
        )
    elif veil and sketch and not sketch.startswith("identity"):
        notes.append(
            "The veil hides, the sketch does not add to it. Without a sketch the same veil costs fewer rounds."
        )
    if clear:
        named = f"{len(clear)} tensors go" if isinstance(clear, list | tuple) else "Some tensors go"
        notes.append(
            f"{named} out in clear: {plain_text(clear)}. Clients get their updates exactly. A veil covers them."
        )
    elif veil == 0 and clear is None and settings.get("cover") not in (None, "all"):
        notes.append(
            "What the plan does not cover goes out in clear, usually output layer and biases. A veil covers it."
        )
    cohort = _cohort(settings)
    if cohort is not None and cohort < 10:
        notes.append(
            f"About {cohort:g} clients share a round, so each is a large part of the average, and with two it is the "
            "other's update. Have more in a round and set min_updates to say so."
        )
    if settings.get("fixed_secrets"):
        notes.append("The secrets of this run follow from its seed: fit for an experiment, never for real data.")
    if not settings.get("secure_aggregation"):
        notes.append(
            "The server is trusted: it sees each client's update and knows sketch and veil, so neither protects from "
            "it. Secure aggregation over many clients would, and it does nothing about the clients themselves."
        )
    notes.append("No formal guarantee (differential privacy) follows from these settings or from this audit.")
    return notes


def _cohort(settings: Mapping[str, Any]) -> float | None:
    clients, fraction = settings.get("clients"), settings.get("fraction", 1.0)
    return (
        max(1.0, round(clients * fraction)) if isinstance(clients, int) and isinstance(fraction, int | float) else None
    )


def _about_findings(findings: Sequence[Finding]) -> list[str]:
    notes = []
    ranks = {side: {f.target: 0 for f in findings} for side in ATTACKERS}
    for finding in findings:
        side = ranks.setdefault(finding.attacker, {})
        side[finding.target] = max(side.get(finding.target, 0), RANK[word(finding)])
    hidden = [target for target, rank in ranks["naive"].items() if 0 < rank < 3 <= ranks["adaptive"].get(target, 0)]
    if hidden:
        notes.append(
            f"Published attacks fail on {plain_text(hidden)} while attacks that know the defence succeed. The first "
            "alone would have called this run safe."
        )
    untried = [target for target, rank in ranks["adaptive"].items() if rank == 0]
    if untried:
        notes.append(f"No attack that knows the defence gave a result on {plain_text(untried)}: that risk is unknown.")
    weak = [t for t in ("property", "label") if max(side.get(t, 0) for side in ranks.values()) >= 3]
    if weak:
        notes.append(
            f"The {' and the '.join(weak)} can be told from many weak traces at once, which a small veil does not "
            "hide. More clients in a round help most, then a larger veil and fewer rounds."
        )
    if any(finding.target == "membership" and RANK[word(finding)] >= 3 for finding in findings):
        notes.append("Membership leaks from the model itself, so it does from the finished model too. Overfit less.")
    return notes


# HTML.
