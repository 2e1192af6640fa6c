"""Findings and settings in sentences: what each means, what to change, and a glossary."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dbcl.audit.findings import ATTACKERS, Audit, Finding
from dbcl.audit.report.measures import chance_of, kind, number_text, plain_text
from dbcl.audit.report.rating import RANK, word
from dbcl.engines import cohort_size

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


def sentence(finding: Finding) -> str:
    """A finding as a sentence.

    >>> sentence(Finding("rewind", "client", "adaptive", "update", "cosine", 0.99))[:72]
    'A client that remembers what it received recovered the update with cosin'
    """
    phrase = PHRASES.get(kind(finding.measure), "reached {1} by {2} on the {0}")
    phrase = "rebuilt the {0} exactly" if math.isinf(finding.value) else phrase
    got = phrase.format(finding.target, number_text(finding.value, finding.measure), finding.measure)
    chance = chance_of(finding)
    guess = "" if math.isnan(chance) else f" Guessing gives {number_text(chance, finding.measure)}."
    return (
        f"{WHO.get(finding.seat, finding.seat)} {got} ({finding.attack}, {finding.attacker}): {word(finding)}.{guess}"
    )


def advice(audit: Audit) -> list[str]:
    """What the settings and the findings mean and what to change, as sentences.

    >>> advice(Audit("a", {"veil": 0.0, "sketch": "count-v1"}, {}, (), (), 1.0))[0][:41]
    'There is no veil, and the sketch is publi'
    """
    return [*_about_settings(audit.settings), *_about_findings(audit.findings)]


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
            f"About {cohort} clients share a round, so each is a large part of the average, and with two it is the "
            "other's update. Have more in a round and set min_updates to say so."
        )
    if settings.get("seed") is not None:
        notes.append("The secrets of this run follow from its seed: fit for an experiment, never for real data.")
    return [
        *notes,
        "The server is trusted: it sees each client's update and knows sketch and veil, so neither protects from it. "
        "Secure aggregation over many clients would, and it does nothing about the clients themselves.",
        "No formal guarantee (differential privacy) follows from these settings or from this audit.",
    ]


def _cohort(settings: Mapping[str, Any]) -> int | None:
    clients, fraction = settings.get("clients"), settings.get("fraction", 1.0)
    if not isinstance(clients, int) or not isinstance(fraction, int | float):
        return None
    return cohort_size(clients, fraction)


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
