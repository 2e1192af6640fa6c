"""Ratings of findings: severity of a leak, worst finding of each risk, and exceeded limits."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dbcl.errors import ConfigError
from dbcl_audit.findings import ADVERSARIES, ATTACKERS, Audit, Finding, Measure
from dbcl_audit.report.measures import chance_of, number_text

BAD, LEAKS, GUESS, FAILED, UNRATED = "as bad as no defence", "leaks", "close to guessing", "could not run", "not rated"
WIDE = f"{GUESS}, but the interval is wide"
UNSURE = "may leak, but the interval includes guessing"
BROKEN, DOUBTFUL, KEPT = (
    "above what is stated",
    "above what is stated, perhaps by chance",
    "consistent with what is stated",
)
SHORT = "below what is stated: the noise is not that of the plan, or canaries were not seen"
RANK = {
    BAD: 4,
    BROKEN: 4,
    LEAKS: 3,
    UNSURE: 2,
    WIDE: 2,
    DOUBTFUL: 2,
    SHORT: 2,
    GUESS: 1,
    KEPT: 1,
    UNRATED: 0,
    FAILED: 0,
}
CONFIDENT = ("share", "tpr", "auc", "accuracy")
"""Families of measures with confidence intervals. The intervals of other measures are the range
over rounds or images.
"""
LIMITS = tuple(dict.fromkeys(each.family for each in Measure if each is not Measure.ERROR))

RULES = {
    "cosine, ssim, accuracy, AUC": "a tenth of the way from guessing to perfect is a leak, nine tenths is as bad as no "
    "defence. A cosine below 0 and an AUC below 0.5 count as their mirror image: the attacker just turns it round.",
    "error": "relative to the size of the truth; below 0.9 of what guessing gives is a leak, below 0.1 is as bad as no "
    "defence.",
    "PSNR": "2 dB above guessing is a leak; 30 dB, or 10 dB above guessing if that is more, is as bad as no defence.",
    "share above 20 dB": "one in a hundred more than by guessing is a leak, nine in ten are as bad as no defence.",
    "members found": "twice the rate of false alarms is a leak; half of all members, or four times that rate "
    "if that is more, is as bad as no defence.",
    "epsilon": "consistent with what is stated where its interval reaches down to that. One audit in forty of a sound "
    "run is above by chance; one in a thousand is so far above that it is called a fault. Where clients add the noise, "
    "less than the canaries should reach is marked, too: then the measurement or the noise is not as planned.",
    "interval": "a share or an AUC that would be a leak may be luck where its 95 % interval includes guessing; and one "
    "that is close to guessing is no relief where its interval reaches a leak. Both are marked.",
    "guessing": "as the audit measured it; where it did not: cosine 0, AUC 0.5, accuracy 0, SSIM 0, share 0, error 1, "
    "PSNR 13 dB (about what the mean image of a class gives), true positives as many as false ones.",
}


@dataclass(frozen=True)
class Risk:
    """One target, adversary and measure, with the worst naive and the worst adaptive attack.

    >>> Risk("update", "client", Measure.COSINE, 0.0, None, None).adversary
    'client'
    """

    target: str
    adversary: str
    measure: Measure
    chance: float
    naive: Finding | None
    adaptive: Finding | None


def word(finding: Finding) -> str:
    """Rate a finding by `RULES`: compare its value with the chance level.

    >>> word(Finding("rewind", "client", "adaptive", "update", "cosine", 0.99))
    'as bad as no defence'
    >>> word(Finding("forest", "client", "naive", "property", "auc", 0.52, low=0.4, high=0.64))
    'close to guessing, but the interval is wide'
    """
    family = finding.measure.family
    if math.isnan(finding.value):
        return FAILED
    if family == "epsilon":
        return _against_stated(finding)
    leaks, bad = _levels(family, chance_of(finding))
    if _strength(finding) >= leaks:
        if family in CONFIDENT and includes_guessing(finding):
            return UNSURE
        return BAD if _strength(finding) >= bad else LEAKS
    ends = [end for end in (finding.low, finding.high) if end is not None]
    return WIDE if any(_as_strength(family, end) >= leaks for end in ends) else GUESS


def _against_stated(finding: Finding) -> str:
    """Rate a measured epsilon by comparing it with the stated epsilon."""
    if finding.budget.get("holds") is False:
        return BROKEN
    low, stated = finding.low, finding.budget.get("stated epsilon")
    if low is None or stated is None:
        return UNRATED
    if low > stated or finding.budget.get("exceeds") is True:
        return DOUBTFUL
    return SHORT if finding.budget.get("reached") is False else KEPT


def risks(audit: Audit) -> list[Risk]:
    """Return the worst attacks of an audit, grouped by target, adversary and measure in order of
    first appearance.

    >>> finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99, 0.98, 1.0, 0.0)
    >>> [(risk.naive, risk.adaptive.attack) for risk in risks(Audit("a", {}, {}, (), (finding,), 1.0))]
    [(None, 'rewind')]
    """
    groups: dict[tuple[str, str, Measure], list[Finding]] = {}
    for finding in audit.findings:
        groups.setdefault((finding.target, finding.adversary, finding.measure), []).append(finding)
    found = []
    for key, group in groups.items():
        naive, adaptive = (
            max((finding for finding in group if finding.attacker == side), key=severity, default=None)
            for side in ATTACKERS
        )
        found.append(Risk(*key, chance_of(max(group, key=severity)), naive, adaptive))
    return found


def worst_by_adversary(audit: Audit) -> dict[str, Finding | None]:
    """Return the worst finding of each adversary by `severity`, or None if no attack by the
    adversary gave a result.

    Colluders are omitted if none were simulated. With one lane, colluders observe no more than a
    single client.

    >>> finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99)
    >>> worst = worst_by_adversary(Audit("a", {}, {}, (), (finding,), 1.0))
    >>> {adversary: found and found.attack for adversary, found in worst.items()}
    {'client': 'rewind', 'server': None, 'anyone': None}
    """
    rated = [finding for finding in audit.findings if RANK[word(finding)]]
    adversaries = [
        adversary
        for adversary in ADVERSARIES
        if adversary != "colluders" or any(each.adversary == adversary for each in audit.findings)
    ]
    return {
        adversary: max((f for f in rated if f.adversary == adversary), key=severity, default=None)
        for adversary in adversaries
    }


def worst(audit: Audit, family: str, adversaries: Collection[str] = ADVERSARIES) -> float | None:
    """Return the largest value that attacks by the given adversaries reached, over all measures of
    a family.

    An AUC below 0.5 counts as 1 - AUC, and a cosine by its absolute value. The result is None
    without any finding.

    >>> found = [Finding("a", "client", "naive", "property", "auc", 0.6),
    ...     Finding("b", "colluders", "adaptive", "membership", "auc", 0.9)]
    >>> worst(Audit("a", {}, {}, (), tuple(found), 1.0), "auc", ("client", "colluders"))
    0.9
    """
    values = [
        _strength(each) for each in audit.findings if each.adversary in adversaries and each.measure.family == family
    ]
    return max((value for value in values if not math.isnan(value)), default=None)


def includes_guessing(finding: Finding) -> bool:
    """Return True if the interval of the finding includes the chance level.

    >>> includes_guessing(Finding("a", "client", "naive", "label", "accuracy", 0.5, 0.09, 0.91, chance=0.1))
    True
    """
    if finding.low is None or finding.high is None:
        return False
    return finding.low <= chance_of(finding) <= finding.high


def parse_limits(text: str) -> dict[str, float]:
    """Parse limits such as those of `--fail-above`: measure=number for all adversaries,
    adversary.measure=number for one adversary.

    >>> parse_limits("cosine=0.3, client.psnr=15")
    {'cosine': 0.3, 'client.psnr': 15.0}
    >>> parse_limits("speed=3")
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: unknown measure 'speed' in a limit; choose from share, tpr, auc, ...
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise ConfigError(
                "a limit is written measure=number or adversary.measure=number, as in cosine=0.3,client.psnr=15; "
                f"got {part.strip()!r}"
            )
        adversary, measure = _adversary_and_measure(name)
        if adversary is not None and adversary not in ADVERSARIES:
            raise ConfigError(
                f"unknown adversary {adversary!r} in a limit; choose from {', '.join(ADVERSARIES)}, or leave it out "
                "for all of them"
            )
        if measure == "error":
            raise ConfigError("a large error is good, so it cannot be limited from above; limit cosine instead")
        if measure not in LIMITS:
            raise ConfigError(
                f"unknown measure {measure!r} in a limit; choose from {', '.join(LIMITS)}, alone or after an "
                f"adversary ({', '.join(ADVERSARIES)}), as in client.psnr"
            )
        if name in limits:
            raise ConfigError(f"{name} has two limits; give one")
        try:
            limits[name] = float(number)
        except ValueError:
            raise ConfigError(f"the limit of {name} must be a number, got {number!r}") from None
        if not math.isfinite(limits[name]):
            raise ConfigError(f"the limit of {name} must be finite, got {number!r}")
    return limits


def _adversary_and_measure(name: str) -> tuple[str | None, str]:
    adversary, dot, measure = name.partition(".")
    return (adversary, measure) if dot else (None, name)


def exceeded(audit: Audit, limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for each limit that an attack exceeded or that has no finding to check.
    Empty if all limits are met.

    >>> audit = Audit("a", {}, {}, (), (Finding("rewind", "client", "adaptive", "update", "cosine", 0.99),), 1.0)
    >>> exceeded(audit, {"cosine": 0.3})
    ['cosine: rewind (client, adaptive) reached 0.990 on the update, above the limit 0.3']
    >>> exceeded(audit, {"client.cosine": 0.995})
    []
    """
    sentences = []
    for name, limit in limits.items():
        adversary, measure = _adversary_and_measure(name)
        of_adversary = [each for each in audit.findings if adversary in (None, each.adversary)]
        found = [each for each in of_adversary if each.measure.family == measure and not math.isnan(each.value)]
        if not found:
            whose = "no attack" if adversary is None else f"no attack by {adversary}"
            sentences.append(f"{name}: {whose} gave a value, so the limit {limit:g} could not be checked")
            continue
        worst = max(found, key=_strength)
        if _strength(worst) > limit:
            reached = f"{number_text(worst.value, worst.measure)} on the {worst.target}"
            mirror = (
                f", which turned round is {number_text(_strength(worst), worst.measure)}"
                if worst.value != _strength(worst)
                else ""
            )
            by = f"{worst.attack} ({worst.adversary}, {worst.attacker})"
            sentences.append(f"{name}: {by} reached {reached}{mirror}, above the limit {limit:g}")
    return sentences


def severity(finding: Finding) -> tuple[int, float]:
    """Return a sort key across measures: the rank of the rating, then the position between the
    levels of a leak and of no defence.

    For findings below the level of a leak, the second value is negative: the distance to this
    level, divided by the distance from the chance level to it.

    >>> severity(Finding("rewind", "client", "adaptive", "update", "cosine", 0.5))
    (3, 0.5)
    """
    rank = RANK[word(finding)]
    if rank == 0:
        return 0, -math.inf
    if finding.measure is Measure.EPSILON:
        return rank, finding.value
    family, chance = finding.measure.family, chance_of(finding)
    leaks, bad = _levels(family, chance)
    step = bad - leaks if rank >= RANK[LEAKS] else leaks - _as_strength(family, chance)
    return rank, (_strength(finding) - leaks) / max(step, 1e-9)


def _levels(family: str, chance: float) -> tuple[float, float]:
    """Return the minimum strength of a leak, and the minimum strength that is as bad as no
    defence.
    """
    special = {
        "error": (-0.9 * chance, -0.1 * chance),
        "psnr": (chance + 2, max(30.0, chance + 10)),
        "share": (chance + 0.01, 0.9),
        "tpr": (2 * chance, max(0.5, 4 * chance)),
    }
    return special.get(family, (chance + 0.1 * (1 - chance), chance + 0.9 * (1 - chance)))


def _as_strength(family: str, value: float) -> float:
    """Convert a value to a strength that increases with the leak. An AUC below 0.5 or a negative
    cosine is inverted, as an attacker could.
    """
    if family == "auc":
        return max(value, 1 - value)
    return {"cosine": abs(value), "error": -value}.get(family, value)


def _strength(finding: Finding) -> float:
    return _as_strength(finding.measure.family, finding.value)
