"""Descriptions of findings and settings in sentences, recommendations, and a glossary."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dbcl.engines import cohort_size
from dbcl_audit.findings import ATTACKERS, Audit, Finding, Measure
from dbcl_audit.report.measures import cases_text, chance_of, number_text, plain_text, range_text
from dbcl_audit.report.promises import (
    PROMISED_SIMULATION,
    SEEDED,
    SEEDED_NOTE,
    SHARED_SIMULATION,
    about_promise,
    promise_subject,
    promise_verdict,
    promised,
    shared_by,
)
from dbcl_audit.report.rating import RANK, word, worst_by_adversary

GLOSSARY = {
    "adaptive attacker": "knows how the defence works and uses it. Judge by this one.",
    "adversary": "a client of the run, several clients that collude, its server, or anyone with the final model.",
    "AUC": "chance that a true case is ranked above a false one: 0.5 is a coin, 1 is certain.",
    "canary": "a made-up client or example that contributes as much as the settings allow, in a direction of its own: "
    "its trace can be tested for.",
    "colluders": "clients that pool what they observe: one of each lane or, where clients add the noise, some of them "
    "together with the server.",
    "cosine": "angle between an estimated update and the true one: 1 is the exact direction, 0 is nothing.",
    "epsilon": "any conclusion is at most e^epsilon times more probable with one client (or example) than without it, "
    "but for an event of probability delta. Measured: the epsilon of noise in which canaries are told as well.",
    "error": "norm of the error divided by the norm of the true update; guessing zero gives 1.",
    "interval": "the range in which the value would fall with other examples: 95 % of the rounds for updates, the "
    "worst and the best image for images, and for all else a 95 % confidence interval (bootstrap, or from the "
    "number of cases).",
    "lanes": "complementary sketches of one round; each client trains in one of them.",
    "members found at 1 % false alarms": "share of the training examples that an attacker finds who wrongly accuses "
    "1 % of the others (true positives at 1 % false positives).",
    "naive attacker": "an attack as its paper published it, unaware of the defence.",
    "PSNR": "likeness to the original in decibels; above 20 a person recognises it, above 30 it looks the same.",
    "share of noise": "noise that one client adds by itself, so that nobody has to trust the server with it.",
    "secure aggregation": "a protocol by which the server learns the sum of many updates and no single one.",
    "sketch": "a random projection of the weights, made from a seed that every client knows.",
    "SSIM": "likeness of two images to the eye, 1 for equal ones.",
    "unprotected": "sent to every client without sketch and without noise.",
    "update": "what one round changed in the weights: the average over the clients of that round.",
    "veil": "secret noise that the server adds to everything it sends; its size is relative to the weights.",
}

WHO = {
    "client": "A client that remembers what it received",
    "colluders": "Clients of all lanes that pool their observations",
    "server": "The server",
    "anyone": "Anyone who has the finished model",
}
PHRASES = {
    "share": "rebuilt {1} of the {0} so that a person recognises them",
    "tpr": "found {1} of {2}",
    "auc": "told {0} apart with AUC {1}, where 1 is certainty",
    "accuracy": "named the {0} correctly in {1} of the cases",
    "cosine": "recovered the {0} with cosine {1}, where 1 is exact",
    "psnr": "rebuilt the {0} at {1}, where 20 dB is recognisable",
    "ssim": "rebuilt the {0} with likeness {1}, where 1 is equal",
    "error": "recovered the {0} with an error of {1} its size",
    "epsilon": "told canaries as well as an epsilon of {1} allows",
}
TARGETS = {"update": "others' update", "image": "images", "label": "labels"}
VERDICTS = {
    4: "got as much as if there were no defence",
    3: "got more than guessing gives",
    2: "did not clearly do better than guessing, but the figures are too few to rule it out",
    1: "did no better than guessing in any attack of this audit",
    0: "got nothing that can be rated, so this audit says nothing about this adversary",
}
ADVERSARY_NOTES = {
    "client": "The veil is there to stop clients.",
    "colluders": "Together they see through the sketch in every round; all lanes show the same veil, which stays.",
    "server": "Sketch and veil do not stop the server, which makes both: under every preset it must be trusted.",
    "anyone": "Sketch and veil do not protect a model that is given away; only a guarantee (--epsilon) does.",
}
NO_VEIL = "There is no veil here, and a sketch alone does not stop a client that remembers what it received."
NO_VEIL_TOGETHER = "There is no veil here, and clients of all lanes together receive the weights themselves."
TRUSTED = (
    "The server is trusted: it sees each client's update and knows sketch and veil, so neither protects from it. "
    "Secure aggregation over many clients would, and it does nothing about the clients themselves."
)
SUMS = (
    "Under secure aggregation the server sees sums of several clients' updates, and the fewer they are, the more it "
    "gets. It does nothing about the clients themselves."
)
SUMS_NOTE = "It has sums alone here, of as few clients as the settings allow; sketch and veil do not stop it."
NO_PROOF = (
    "Nothing is safe because an attack failed. Every figure on this page is what these attacks got with this budget, "
    "so it is a lower bound: a better attacker gets as much or more."
)


def sentence(finding: Finding, property_name: str = "", *, subject: str = "") -> str:
    """Describe a finding: value and interval, chance level, number of cases, and rating.

    >>> found = Finding("LiRA", "anyone", "adaptive", "membership", "tpr at 0.1 % fpr", 0.007, budget={"members": 1000})
    >>> sentence(found)  # doctest: +NORMALIZE_WHITESPACE
    'Anyone who has the finished model found 0.7 % of members at 0.1 % false alarms; guessing gives 0.1 %.
    From 1,000 members, by LiRA (adaptive): leaks.'
    """
    phrase = PHRASES[finding.measure.family]
    phrase = "rebuilt the {0} exactly" if math.isinf(finding.value) else phrase
    if finding.measure is Measure.AUC:
        what = {"membership": "members and others"}.get(finding.target, target_text(finding.target, property_name))
        if finding.target == "property":
            what = f"batches with and without {what if property_name else 'a property'}"
    else:
        what = TARGETS.get(finding.target, finding.target)
    measure = finding.measure.text.replace("members found", "members")
    got = phrase.format(what, range_text(finding), measure)
    chance = chance_of(finding)
    guess = "" if math.isnan(chance) else f"; guessing gives {number_text(chance, finding.measure)}"
    if finding.measure is Measure.EPSILON:
        guess = _stated_text(finding)
    count = cases_text(finding)
    by = f"{f'From {count}, by' if count else 'By'} {finding.attack} ({finding.attacker})"
    by += f", {finding.simulated_run}" if finding.simulated_run else ""
    return f"{subject or WHO.get(finding.adversary, finding.adversary)} {got}{guess}. {by}: {word(finding)}."


def _stated_text(finding: Finding) -> str:
    """Describe the stated epsilon and the bound of the AUC. Empty if the budget does not contain
    both.
    """
    own = finding.budget
    try:
        return (
            f"; {own['stated epsilon']:.2f} is stated for these {own['rounds']} rounds, at delta {own['delta']:g}. AUC "
            f"{own['auc']:.3f} ({own['auc low']:.3f} to {own['auc high']:.3f}), and the stated epsilon allows "
            f"{own['auc bound']:.3f}"
        )
    except (KeyError, TypeError, ValueError):
        return ""


def target_text(target: str, property_name: str = "") -> str:
    """Return the target of an attack as text, including the name of a property.

    >>> target_text("property", "thick strokes"), target_text("image")
    ('the property “thick strokes”', 'image')
    """
    return f"the property “{property_name}”" if target == "property" and property_name else target


def verdicts(audit: Audit) -> list[tuple[int, str, str, str]]:
    """Return for each adversary its rank (4 to 0), the verdict, the worst finding in words, and a
    note about the defence.

    >>> finding = Finding("rewind", "client", "adaptive", "update", "cosine", 0.99)
    >>> [(rank, verdict) for rank, verdict, _, _ in verdicts(Audit("a", {}, {}, (), (finding,), 1.0))][0]
    (4, 'A client got as much as if there were no defence.')
    """
    measured = [finding for finding in audit.findings if finding.measure is Measure.EPSILON]
    if measured:
        seeded = [(3, SEEDED, "", SEEDED_NOTE)] if audit.settings.get("seed") is not None else []
        made = [
            (*promise_verdict(each, audit), sentence(each, subject=promise_subject(each, audit))) for each in measured
        ]
        return [*seeded, *((rank, said, text if rank else "", note) for rank, said, note, text in made)]
    who = {**WHO, "client": "A client"}
    no_veil = {"client": NO_VEIL, "colluders": NO_VEIL_TOGETHER}
    notes = {**ADVERSARY_NOTES, **no_veil} if audit.settings.get("veil") == 0 else ADVERSARY_NOTES
    if audit.settings.get("secure_aggregation"):
        notes = {**notes, "server": SUMS_NOTE}
    lines = []
    for adversary, worst in worst_by_adversary(audit).items():
        rank = RANK[word(worst)] if worst else 0
        found = f"Worst finding: {sentence(worst, audit.property_name, subject='it')}" if worst else ""
        lines.append((rank, f"{who[adversary]} {VERDICTS[rank]}.", found, notes[adversary]))
    return lines


def simulation_text(audit: Audit) -> list[str]:
    """Describe, in paragraphs, the evidence on the page and its meaning for a run with more
    clients.

    >>> simulation_text(Audit("a", {"clients": 100, "fraction": 0.1}, {}, (), (), 1.0, parties=2))[0][:47]
    'These are simulated runs, most of them of 2 par'
    """
    if promised(audit):
        return [PROMISED_SIMULATION] if shared_by(audit) is None else [PROMISED_SIMULATION, SHARED_SIMULATION]
    parties, cohort = audit.parties, _cohort(audit.settings)
    others = "a single victim" if parties == 2 else "a victim among the others"
    first = (
        f"These are simulated runs, most of them of {parties or 'a few'} parties; they did not happen in the run. "
        f"The auditor plays short runs under the same settings with an attacker and {others}, so that the truth is "
        "known: with single steps on fresh batches, with clients that train on the same examples in every round, as "
        "FedAvg does, and as the run is. Each finding names its simulated run. Only attacks on the finished model, and "
        "those marked “of the run”, are about the run itself."
    )
    if cohort is None:
        return [first]
    if cohort > (parties or 2):
        server = "The server sees each client's update by itself, however many there are, so its figures do not shrink."
        if audit.settings.get("secure_aggregation"):
            server = "The server gets less from larger sums, too."
        crowd = f"--parties {cohort} simulates that" if cohort <= 20 else "--parties 20 simulates a larger group"
        second = (
            f"About {cohort} clients share a round of this run. A client's attack then sees the victim mixed with "
            f"{cohort - 2} others and usually gets less than here: dbcl audit {crowd}. {server}"
        )
    else:
        second = f"About {cohort} clients share a round of this run: there is no larger crowd to hide one of them."
    return [first, second]


def advice(audit: Audit) -> list[str]:
    """Explain the settings and the findings, and recommend changes, as sentences.

    >>> advice(Audit("a", {"veil": 0.0, "sketch": "count-v1"}, {}, (), (), 1.0))[0][:41]
    'There is no veil, and the sketch is publi'
    """
    if promised(audit):
        return about_promise(audit, _server(audit.settings))
    return [*_about_settings(audit.settings), *_about_findings(audit.findings)]


def _about_settings(settings: Mapping[str, Any]) -> list[str]:
    veil, sketch, open_ = settings.get("veil"), str(settings.get("sketch", "")), settings.get("unprotected")
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
    if open_:
        named = f"{len(open_)} tensors go" if isinstance(open_, list | tuple) else "Some tensors go"
        notes.append(
            f"{named} out unprotected: {plain_text(open_)}. Clients get their updates exactly. A veil covers them."
        )
    elif veil == 0 and open_ is None and settings.get("coverage") not in (None, "all"):
        notes.append(
            "Tensors outside the coverage go out unprotected, usually output layer and biases. A veil covers it."
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
        _server(settings),
        "No formal guarantee (differential privacy) follows from these settings or from this audit.",
    ]


def _server(settings: Mapping[str, Any]) -> str:
    return SUMS if settings.get("secure_aggregation") else TRUSTED


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
            f"The {' and the '.join(weak)} can be inferred from many weak traces at once, which a small veil does not "
            "hide. More clients in a round help most, then a larger veil and fewer rounds."
        )
    leaking = {f.adversary for f in findings if f.target == "membership" and RANK[word(f)] >= 3}
    if leaking & {"client", "colluders"}:
        notes.append(
            "Clients that train on the same examples in every round show them again and again, and a veil that is "
            "drawn anew each time averages out. More clients in a round help, fewer rounds too; only noise that is "
            "accounted over all rounds bounds it (--epsilon)."
        )
    if "anyone" in leaking:
        notes.append("Membership leaks from the model itself, so it does from the finished model too. Overfit less.")
    return notes
