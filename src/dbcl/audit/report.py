"""An audit as a page that opens without a network, as rows for a terminal, and as limits that may not be broken."""

import base64
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dbcl.audit.findings import ATTACKERS, Audit, Curve, Finding
from dbcl.errors import ConfigError
from dbcl.plots import GRID, INK, MUTED

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
    leaks, bad = _levels(family, _chance(finding))
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
            worst = max(found, key=_severity, default=None)
            cells += ["no such attack", ""] if worst is None else [f"{_range(worst)}, {worst.attack}", word(worst)]
        rows.append(RiskRow(*key, _number(_chance(max(group, key=_severity)), key[2]), *cells))
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
            reached = f"{_number(worst.value, worst.measure)} on the {worst.target}"
            mirror = (
                f", which turned round is {_number(_strength(worst), name)}" if worst.value != _strength(worst) else ""
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


def page(audit: Audit) -> str:
    """One HTML page that holds everything, asks the network for nothing and runs no script.

    >>> page(Audit("<b>", {}, {}, (), (), 1.0)).count("<b>")
    0
    """
    sections = [
        ("What was found", _headline(audit)),
        ("Who sees what", _table(("party", "receives or holds", "does not receive"), audit.seats)),
        ("Risks", _risks(audit)),
        ("What it means, and what to change", _list(advice(audit))),
        ("Curves", _figures(audit.findings)),
        ("Pictures", _pictures(audit.findings)),
        ("Each attack", _attacks(audit.findings)),
        ("The run that was attacked", _settings("Results", audit.run) + _settings("Settings", audit.settings, True)),
        ("Words", _details("Glossary", _definitions(GLOSSARY))),
    ]
    lead = f"Leakage audit of {audit.name}"
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return _document(lead, f"<p class='muted'>{len(audit.findings)} findings in {audit.seconds:.0f} s</p>{body}")


def comparison(audits: Sequence[Audit]) -> str:
    """The page that sets runs side by side: accuracy and cost against the worst leak by cosine, PSNR and AUC.

    >>> "paper" in comparison([Audit("paper", {}, {"accuracy": 0.9}, (), (), 1.0)])
    True
    """
    heads = ("", "run", "accuracy", "rounds", "bytes", "worst cosine", "worst PSNR", "worst AUC")
    rows = []
    for number, audit in enumerate(audits, 1):
        cost = [_accuracy(audit), _plain(audit.run.get("rounds", "—")), _size(audit.run.get("bytes"))]
        leaks = [_leak(audit, measure) for measure in ("cosine", "psnr", "auc")]
        rows.append([str(number), audit.name, *cost, *leaks])
    table = _table(heads, rows)
    picture = _trade_off(audits)
    intro = f"<p class='warn'>{_e(NO_PROOF)} A dash: not measured.</p>"
    body = f"<section><h2>Side by side</h2>{intro}{table}</section>"
    if picture:
        note = "<p>Right and low is better: more accuracy, less leak. Numbers as in the table.</p>"
        shown = f"<figure class='plot'><img src='{picture}' alt='Worst leak against accuracy for each run'></figure>"
        body += f"<section><h2>Leak against accuracy</h2>{note}{shown}</section>"
    return _document(
        "Leakage audits compared", body + f"<section>{_details('Glossary', _definitions(GLOSSARY))}</section>"
    )


# How a value is read.


def _chance(finding: Finding) -> float:
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


def _severity(finding: Finding) -> tuple[int, float]:
    """By word, then by how far it is on the way from a leak to no defence, which compares across measures."""
    rank = RANK[word(finding)]
    if rank == 0:
        return 0, -math.inf
    leaks, bad = _levels(kind(finding.measure), _chance(finding))
    return rank, (_strength(finding) - leaks) / max(bad - leaks, 1e-9)


def _number(value: float, measure: str) -> str:
    family = kind(measure)
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "exact" if family == "psnr" else str(value)
    if family in ("share", "tpr", "accuracy"):
        return f"{100 * value:.1f} %"
    return f"{value:.1f} dB" if family == "psnr" else f"{value:.3g} ×" if family == "error" else f"{value:.3f}"


def _range(finding: Finding) -> str:
    value = _number(finding.value, finding.measure)
    if finding.low is None or finding.high is None:
        return value
    low, high = (_number(end, finding.measure) for end in (finding.low, finding.high))
    return f"{value} ({low.split(' ')[0]} to {high})"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(entry) for entry in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _size(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "—"
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value:,.0f} B"


def _accuracy(audit: Audit) -> str:
    value = audit.run.get("accuracy")
    return f"{100 * value:.1f} %" if isinstance(value, int | float) and math.isfinite(value) else "—"


def _leak(audit: Audit, measure: str) -> str:
    worst = audit.worst(measure)
    return "—" if worst is None else _number(worst, measure)


# What it means.


def _sentence(finding: Finding) -> str:
    phrase = PHRASES.get(kind(finding.measure), "reached {1} by {2} on the {0}")
    phrase = "rebuilt the {0} exactly" if math.isinf(finding.value) else phrase
    got = phrase.format(finding.target, _number(finding.value, finding.measure), finding.measure)
    chance = _chance(finding)
    guess = "" if math.isnan(chance) else f" Guessing gives {_number(chance, finding.measure)}."
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
        notes.append(f"{named} out in clear: {_plain(clear)}. Clients get their updates exactly. A veil covers them.")
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
            f"Published attacks fail on {_plain(hidden)} while attacks that know the defence succeed. The first alone "
            "would have called this run safe."
        )
    untried = [target for target, rank in ranks["adaptive"].items() if rank == 0]
    if untried:
        notes.append(f"No attack that knows the defence gave a result on {_plain(untried)}: that risk is unknown.")
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

CSP = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--muted:#5a6673;--line:#d5dce2;--paper:#fff;--soft:#f4f6f8;
--bad:#b3261e;--leak:#8a5300;--ok:#2d6a3e;--warn:#fff4dc}
@media (prefers-color-scheme:dark){:root{--ink:#e6ebf0;--muted:#a3afbb;--line:#3a4550;--paper:#14191e;--soft:#1f262d;
--bad:#ff8a80;--leak:#ffc06a;--ok:#8fd3a2;--warn:#3a2f17}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem clamp(.8rem,3vw,2.5rem) 3rem;background:var(--paper);color:var(--ink);
font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.6rem 0 0}h2{font-size:1.2rem;margin:2.2rem 0 .6rem}
h3{font-size:1rem;margin:1.2rem 0 .4rem}
p,ul{max-width:52rem}.muted{color:var(--muted)}.big{font-size:1.25rem;font-weight:650;margin:.4rem 0}
.warn{background:var(--warn);border-left:4px solid var(--leak);padding:.6rem .9rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;margin:.5rem 0 1rem}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.45rem .7rem;border-bottom:1px solid var(--line);min-width:4.5rem;
overflow-wrap:break-word}
td.long{min-width:11rem}td.w1,td.w2,td.w3,td.w4{min-width:10.5rem}td:empty,th:empty,td.num{min-width:0}tr:last-child>*{border-bottom:0}
thead th{background:var(--soft);white-space:nowrap}
.w4{color:var(--bad);font-weight:650}.w3{color:var(--leak);font-weight:650}.w2{color:var(--leak)}.w1{color:var(--ok)}.w0{color:var(--muted)}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:.3rem .8rem}
summary{cursor:pointer;padding:.25rem 0}
dl{margin:.4rem 0}dt{font-weight:650;margin-top:.5rem}dd{margin:0 0 0 1rem;max-width:52rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0}.plot img{width:100%;max-width:44rem;background:#fff;border-radius:6px;border:1px solid var(--line)}
.key{list-style:none;margin:.3rem 0;padding:0;font-size:.88rem}
.key i{display:inline-block;width:2rem;border-top:3px solid;margin-right:.5rem;vertical-align:middle}
.key .sign{background:#fff;border-radius:3px;padding:.35rem .3rem;display:inline-flex;margin-right:.4rem}
.key .sign i{margin:0}
.grid{display:flex;flex-wrap:wrap;gap:.9rem}.grid figure{width:8.5rem}
.grid img{width:100%;image-rendering:pixelated;border:1px solid var(--line)}
figcaption{font-size:.82rem;color:var(--muted)}
@media (max-width:600px){th,td{padding:.4rem .5rem;min-width:3.6rem}td.long{min-width:8rem}}
@media print{:root{--ink:#000;--muted:#444;--line:#bbb;--paper:#fff;--soft:#f2f2f2;--bad:#b3261e;--leak:#8a5300;
--ok:#2d6a3e;--warn:#fff}body{max-width:none;font-size:10pt;padding:0}.scroll{overflow:visible}th,td,td.long{min-width:0}
details::details-content{content-visibility:visible;display:block}
figure,tr,.plot{break-inside:avoid}h2,h3{break-after:avoid}}
"""


def _e(value: Any) -> str:
    return html.escape(_plain(value), quote=True)


def _document(title: str, body: str) -> str:
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='referrer' content='no-referrer'>"
        f"<title>{_e(title)}</title><style>{STYLE}</style></head><body><h1>{_e(title)}</h1>{body}</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; a cell that is one of our words gets its colour."""
    lines = ["".join(_cell(cell) for cell in row) for row in rows]
    head = "".join(f"<th>{_e(name)}</th>" for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>" if lines else ""
    )


def _cell(text: str) -> str:
    style = f"w{RANK[text]}" if text in RANK else "long" if len(text) > 40 else "num" if text.isdigit() else ""
    return f"<td class='{style}'>{_e(text)}</td>" if style else f"<td>{_e(text)}</td>"


def _list(entries: Iterable[str]) -> str:
    lines = "".join(f"<li>{_e(entry)}</li>" for entry in entries)
    return f"<ul>{lines}</ul>" if lines else ""


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{_e(summary)}</summary>{content}</details>"


def _definitions(entries: Mapping[str, Any]) -> str:
    return f"<dl>{''.join(f'<dt>{_e(key)}</dt><dd>{_e(value)}</dd>' for key, value in entries.items())}</dl>"


def _settings(title: str, entries: Mapping[str, Any], folded: bool = False) -> str:
    if not entries:
        return ""
    table = _table(("name", "value"), [(str(key), _plain(value)) for key, value in entries.items()])
    return _details(title, table) if folded else f"<h3>{title}</h3>{table}"


def _headline(audit: Audit) -> str:
    worst: dict[tuple[str, str], Finding] = {}
    for finding in audit.findings:
        key = (finding.target, finding.seat)
        if key not in worst or _severity(finding) > _severity(worst[key]):
            worst[key] = finding
    ranked = sorted((each for each in worst.values() if word(each) != FAILED), key=_severity, reverse=True)
    rank = RANK[word(ranked[0])] if ranked else 0
    lines = _list(_sentence(finding) for finding in ranked)
    return f"<p class='big w{rank}'>{HEADS[rank]}</p>{lines}<p class='warn'>{_e(NO_PROOF)}</p>"


def _risks(audit: Audit) -> str:
    lines = []
    for row in risk_rows(audit):
        what = f"<b>{_e(row.target)}</b><br>{_e(row.measure)}<br><span class='muted'>{_e(row.seat)}</span>"
        pairs = ((row.naive, row.naive_word), (row.adaptive, row.adaptive_word))
        cells = "".join(
            f"<td class='long'><span class='w{RANK.get(label, 0)}'>{_e(label)}</span><br>{_e(text)}</td>"
            if label
            else f"<td class='long muted'>{_e(text)}</td>"
            for text, label in pairs
        )
        lines.append(f"<tr><td>{what}</td><td>{_e(row.guessing)}</td>{cells}</tr>")
    heads = "<th>risk</th><th>guessing</th><th>naive attacker</th><th>adaptive attacker</th>"
    table = f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    intro = (
        "<p>Each risk by target, measure and seat; in brackets the interval. Where there were several attacks, the "
        "worst; all of them are further below.</p>"
    )
    return intro + table + _details("How the words are chosen", _definitions(RULES)) if lines else ""


def _attacks(findings: Sequence[Finding]) -> str:
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.attack, finding.seat, finding.attacker, finding.target), []).append(finding)
    parts = []
    for (attack, seat, attacker, target), group in groups.items():
        rows = [
            (f.measure, _range(f), _number(_chance(f), f.measure), word(f), f.note)
            for f in sorted(group, key=_severity, reverse=True)
        ]
        content = _table(("measure", "value", "guessing", "", "note"), rows)
        for budget in _unique(_plain(f.budget) for f in group if f.budget):
            content += f"<p><b>Settings and budget:</b> {_e(budget)}</p>"
        failures = _unique(failure for f in group for failure in f.failures)
        content += f"<p><b>Failures:</b></p>{_list(failures)}" if failures else "<p class='muted'>No failures.</p>"
        worst = max(group, key=_severity)
        parts.append(_details(f"{attack} ({seat}, {attacker}) on the {target}: {word(worst)}", content))
    return "".join(parts)


def _unique(entries: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(entries))


def _pictures(findings: Sequence[Finding]) -> str:
    parts = []
    for finding in findings:
        cells = "".join(
            f"<figure>{_png(data)}<figcaption>{_e(caption)}</figcaption></figure>" for caption, data in finding.images
        )
        if cells:
            title = f"{finding.attack} ({finding.seat}, {finding.attacker}): {finding.measure} {_range(finding)}"
            parts.append(f"<h3>{_e(title)}</h3><div class='grid'>{cells}</div>")
    return "".join(parts)


def _png(data: str) -> str:
    try:
        real = base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    except ValueError:
        real = False
    return f"<img src='data:image/png;base64,{data}' alt=''>" if real else "<p class='muted'>(not a PNG)</p>"


# Figures. Legends are HTML: they wrap on a small screen, and text of others never reaches matplotlib's parser.

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#000000")
EXACT = 100.0  # dB at which an exact copy is drawn
LIMIT = 400  # steps that the eye can tell along an axis; a ROC curve may come with a point for each example


def _figures(findings: Sequence[Finding]) -> str:
    groups: dict[tuple[str, tuple[str, str]], list[Finding]] = {}
    for finding in findings:
        if finding.curves:
            groups.setdefault((finding.target, finding.axes), []).append(finding)
    return f"<div class='plots'>{''.join(_plot(*key, group) for key, group in groups.items())}</div>" if groups else ""


def _plot(target: str, labels: tuple[str, str], group: Sequence[Finding]) -> str:
    from matplotlib.figure import Figure  # here, so that an audit without pictures needs no matplotlib

    figure = Figure(figsize=(5.4, 3.5), layout="constrained")
    axes = figure.subplots()
    keys = []
    roc = "false positive" in labels[0].lower() or all(kind(f.measure) in ("auc", "tpr") for f in group)
    log = roc and target == "membership"
    lines = [(finding, curve) for finding in group for curve in finding.curves]
    for index, (finding, curve) in enumerate(lines):
        colour, style = COLOURS[index % len(COLOURS)], "solid" if finding.attacker == "adaptive" else "dashed"
        points = _points(curve, 1e-4 if log else -math.inf)
        axes.plot(*points, color=colour, linestyle=style, linewidth=1.7, marker="o" if len(points[0]) == 1 else None)
        sign = f"<span class='sign'><i style='border-top-color:{colour};border-top-style:{style}'></i></span>"
        named = f"{finding.attack} ({finding.seat}, {finding.attacker})"
        keys.append(f"<li>{sign}{_e(f'{named}: {curve.label}' if curve.label else named)}</li>")
    if roc:
        ends = [10 ** (-4 + 4 * step / 50) for step in range(51)] if log else [0.0, 1.0]
        axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="dotted")
        axes.set(xlim=(1e-4 if log else 0, 1), ylim=(1e-4 if log else 0, 1.02))
        keys.append("<li class='muted'>dotted: guessing</li>")
    if log:
        axes.set(xscale="log", yscale="log")
    names = [name or fallback for name, fallback in zip(labels, ("", group[0].measure), strict=True)]
    _dress(axes, names[0], names[1])
    title = f"{target}: {names[1]}" + (f" by {names[0]}" if names[0] else "")
    image = f"<img src='{_svg(figure)}' alt='{_e(title)}'>"
    return (
        f"<figure class='plot'><figcaption>{_e(title)}</figcaption>{image}<ul class='key'>{''.join(keys)}</ul></figure>"
    )


def _points(curve: Curve, least: float) -> tuple[list[float], list[float]]:
    whole = (pair for pair in zip(curve.x, curve.y, strict=False) if None not in pair)  # what JSON makes of NaN
    pairs = [(x, y) for x, y in whole if math.isfinite(x) and math.isfinite(y)]
    shown = [(max(x, least), max(y, least)) for x, y in pairs if y > 0 or least <= 0]  # no log of a rate of zero
    if len(shown) > LIMIT:
        shown = _thin(shown, math.log10 if least > 0 else float)
    return [x for x, _ in shown], [y for _, y in shown]


def _thin(points: Sequence[tuple[float, float]], scale: Callable[[float], float]) -> list[tuple[float, float]]:
    """Leave out points that the eye could not tell from the one before; low rates stay on a log axis."""
    spans = [(max(map(scale, axis)) - min(map(scale, axis))) or 1.0 for axis in zip(*points, strict=True)]
    kept = [points[0]]
    for point in points[1:-1]:
        moved = [abs(scale(new) - scale(old)) for new, old in zip(point, kept[-1], strict=True)]
        if max(moved[0] / spans[0], moved[1] / spans[1]) * LIMIT >= 1:
            kept.append(point)
    return [*kept, points[-1]]


def _trade_off(audits: Sequence[Audit]) -> str:
    """Worst leak against accuracy, a panel for each measure; names stand in a column at the right and never collide."""
    from matplotlib.figure import Figure

    panels = []
    for measure, name in (
        ("cosine", "worst cosine"),
        ("psnr", f"worst PSNR, dB (to {EXACT:.0f})"),
        ("auc", "worst AUC"),
    ):
        points = [
            (audit.run["accuracy"], min(leak, EXACT), f"{number}  {_printable(audit.name)}")
            for number, audit in enumerate(audits, 1)
            if _accuracy(audit) != "—" and (leak := audit.worst(measure)) is not None
        ]
        if points:
            panels.append((name, sorted(points, key=lambda point: (point[1], -point[0]))))
    if not panels:
        return ""
    height = sum(max(2.4, 0.9 + 0.24 * len(points)) for _, points in panels)
    figure = Figure(figsize=(6.6, height), layout="constrained")
    ratios = [max(2.4, 0.9 + 0.24 * len(points)) for _, points in panels]
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=ratios)
    for (name, points), axes in zip(panels, grid[:, 0], strict=True):
        axes.margins(0.08, 0.12)
        axes.scatter([100 * x for x, _, _ in points], [y for _, y, _ in points], color=COLOURS[0], s=28, zorder=3)
        low, high = axes.get_ylim()
        places = _spread([(y - low) / (high - low) for _, y, _ in points], gap=1 / max(7, len(points)))
        for place, (x, y, label) in zip(places, points, strict=True):
            at = (1.06, place)
            arrow = {"arrowstyle": "-", "color": "#b8c2cb", "linewidth": 0.8, "shrinkB": 3}
            where = {"xy": (100 * x, y), "xytext": at, "textcoords": "axes fraction", "arrowprops": arrow}
            axes.annotate(label, **where, va="center", color=INK, fontsize=9, parse_math=False)
        _dress(axes, "accuracy, %", name)
    return _svg(figure)


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted places in [0, 1] apart until neighbours keep a gap."""
    apart: list[float] = []
    for place in places:
        apart.append(max(place, apart[-1] + gap) if apart else place)
    over = 1.0
    for index in reversed(range(len(apart))):
        apart[index] = min(apart[index], over)
        over = apart[index] - gap
    return apart


def _dress(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(_printable(across), color=MUTED, parse_math=False)
    axes.set_ylabel(_printable(up), color=MUTED, parse_math=False)
    axes.grid(color=GRID)
    axes.tick_params(colors=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c2cb")


def _printable(text: str) -> str:
    """Text that the built-in font has, of a length that fits a figure."""
    kept = "".join(letter if letter.isprintable() and ord(letter) < 0x500 else "?" for letter in text)
    return kept if len(kept) <= 28 else kept[:27] + "…"


def _svg(figure: Any) -> str:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dbcl"}):  # the same audit gives the same page
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
