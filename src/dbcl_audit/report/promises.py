"""Sentences about runs with a guarantee: its statement, its adversaries, and the meaning of a
measurement.
"""

from dbcl_audit.findings import Audit, Finding, Measure
from dbcl_audit.report.measures import plain_text
from dbcl_audit.report.rating import RANK, SHORT, word

PROMISES = {
    4: "The guarantee does not hold: there is a fault in the code or in the setting.",
    2: "More was measured than is stated. Of forty audits of a sound run one says so by chance: repeat it.",
    1: "Nothing speaks against the guarantee: what was measured is consistent with what is stated.",
    0: "The guarantee was not measured.",
}
NOT_REACHED = (
    "Less was measured than canaries should reach: the noise is not that of the plan, or this audit does not see them."
)
NO_PROMISE = "A measurement finds faults and proves nothing: the promise is a theorem with its conditions, {against}."
SEEDED = "This run itself promises nothing: its secrets, the noise included, follow from its seed."
SEEDED_NOTE = "What was measured is about its settings, in a simulated run with fresh secrets."
PROMISED_SIMULATION = (
    "The settings of this run state a guarantee, and this is a simulated run of them with fresh secrets: the same "
    "clients, and "
    "canaries that contribute as much and as often as the guarantee allows. The epsilon at which they can be told "
    "apart is measured and compared with the stated one. Recordings of the run itself are not examined."
)
SHARED_SIMULATION = (
    "Every client adds its share of the noise before anything leaves it, so each adversary has another part of the "
    "noise against it and gets a row of its own: the server sees sums with all shares, colluding clients know their "
    "own and subtract them, and anyone else has the model."
)
SHARED_WHO = {
    "server": "The server, knowing all other examples,",
    "colluders": "The server and {colluders}, knowing all other examples,",
    "anyone": "Anyone who has the finished model and knows all other examples",
}
SHARED_VERDICTS = {
    "server": "The server",
    "colluders": "The server with {colluders}",
    "anyone": "Anyone with the model",
}
SHARED_NOTES = {
    "server": "It sees sums with the noise of all clients.",
    "colluders": "They know their own shares of the noise, so that only those of the others protect. The guarantee is "
    "stated for this case.",
    "anyone": "The model is a function of noisy sums, so that it may be published.",
}
SHARED = (
    "The server need not be trusted: it learns sums that carry the noise of all clients, and may publish them. A "
    "client is protected if it runs this software and no more clients collude than planned; that it takes part, and "
    "how many examples it has, is not hidden."
)


def promised(audit: Audit) -> bool:
    """Return True if the audited run has a guarantee.

    >>> promised(Audit("a", {"epsilon": 8.0}, {}, (), (), 1.0))
    True
    """
    return audit.settings.get("epsilon") is not None


def shared_by(audit: Audit) -> int | None:
    """Return the number of tolerated colluding clients if clients add the noise of a guarantee,
    otherwise None.

    >>> shared_by(Audit("a", {"epsilon": 2.0, "noise_by": "clients", "colluders": 2}, {}, (), (), 1.0))
    2
    """
    if not promised(audit) or audit.settings.get("noise_by") != "clients":
        return None
    colluders = audit.settings.get("colluders")
    return colluders if isinstance(colluders, int) else 0


def colluding(count: int) -> str:
    """Return a number of colluding clients as text.

    >>> colluding(1), colluding(2)
    ('1 colluding client', '2 colluding clients')
    """
    return f"{count} colluding client{'s' * (count != 1)}"


def proof_text(audit: Audit) -> str:
    """Describe what a measured epsilon shows, and the adversaries for which the theorem holds.

    >>> proof_text(Audit("a", {"epsilon": 2.0, "noise_by": "clients", "colluders": 2}, {}, (), (), 1.0))[-70:]
    'the server, up to 2 colluding clients and everyone who gets the model.'
    """
    colluders = shared_by(audit)
    if colluders is None:
        return NO_PROMISE.format(against="against clients and the public, with a trusted server")
    others = f"up to {colluding(colluders)}" if colluders else "other clients"
    return NO_PROMISE.format(against=f"against the server, {others} and everyone who gets the model")


def promise_subject(finding: Finding, audit: Audit) -> str:
    """Return the subject of the sentence about a measured epsilon.

    >>> made = Finding("matched filter", "colluders", "adaptive", "guarantee", "epsilon", 1.9)
    >>> promise_subject(made, Audit("a", {"epsilon": 2.0, "noise_by": "clients", "colluders": 2}, {}, (), (), 1.0))
    'The server and 2 colluding clients, knowing all other examples,'
    """
    colluders = shared_by(audit)
    if colluders is None:
        return "A client that knows all others' updates"
    return SHARED_WHO.get(finding.adversary, "").format(colluders=colluding(colluders))


def promise_verdict(finding: Finding, audit: Audit) -> tuple[int, str, str]:
    """Return the rank of a measured epsilon, the verdict, and a note about the adversary.

    >>> made = Finding("matched filter", "server", "adaptive", "guarantee", "epsilon", 1.9)
    >>> promise_verdict(made, Audit("a", {"epsilon": 2.0, "noise_by": "clients"}, {}, (), (), 1.0))[:2]
    (0, 'The server: the guarantee was not measured.')
    """
    rank, colluders = RANK[word(finding)], shared_by(audit)
    own = NOT_REACHED if word(finding) == SHORT else PROMISES[rank]
    if colluders is None:
        return rank, own, proof_text(audit)
    who = SHARED_VERDICTS.get(finding.adversary, "The guarantee").format(colluders=colluding(colluders))
    quiet = finding.budget.get("clients with too little noise")
    missing = f" Less noise than planned was added by: {plain_text(quiet)}." if quiet else ""
    return rank, f"{who}: {own[0].lower()}{own[1:]}{missing}", SHARED_NOTES.get(finding.adversary, "")


def about_promise(audit: Audit, server: str) -> list[str]:
    """Explain a measured guarantee. `server` describes the data that a trusted server receives.

    >>> about_promise(Audit("a", {"epsilon": 2.0, "sketch": "identity-v1"}, {}, (), (), 1.0), "It is trusted.")
    ['It is trusted.']
    """
    settings = audit.settings
    measured = [RANK[word(finding)] for finding in audit.findings if finding.measure is Measure.EPSILON]
    notes = []
    if max(measured, default=0) == 4:
        notes.append(
            f"Do not release this model nor go on with the run: more can be inferred about one "
            f"{settings.get('privacy_unit', 'client')} than is promised."
        )
    if settings.get("seed") is not None:
        notes.append(
            "The secrets of this run follow from its seed, so it promises nothing itself: fit for an experiment, never "
            "for real data. The simulated run has fresh secrets."
        )
    if settings.get("privacy_unit") == "example":
        notes.append(
            "Each client must clip the gradients of its own examples. Extreme examples went through this software, "
            "which does; a client that runs other software is not measured here."
        )
    server = server if shared_by(audit) is None else SHARED
    if str(settings.get("sketch", "")).startswith("identity"):
        return [*notes, server]
    return [
        *notes,
        "The canaries are in tensors that are not sketched: noise on the others is not measured here.",
        server,
    ]
