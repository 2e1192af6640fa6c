"""An audit, or several side by side, as one page that opens without a network."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dbcl.audit.findings import Audit, Finding
from dbcl.audit.report.figures import escape, figures, trade_off
from dbcl.audit.report.rating import (
    FAILED,
    GLOSSARY,
    HEADS,
    NO_PROOF,
    RANK,
    RULES,
    accuracy_text,
    advice,
    chance_of,
    leak_text,
    number_text,
    plain_text,
    range_text,
    risk_rows,
    sentence,
    severity,
    size_text,
    word,
)


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
        ("Curves", figures(audit.findings)),
        ("Pictures", _pictures(audit.findings)),
        ("Each attack", _attacks(audit.findings)),
        ("The run that was attacked", _settings("Results", audit.run) + _settings("Settings", audit.settings, True)),
        ("Words", _details("Glossary", _definitions(GLOSSARY))),
    ]
    lead = f"Leakage audit of {audit.name}"
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return _document(lead, f"<p class='muted'>{len(audit.findings)} findings in {audit.seconds:.0f} s</p>{body}")


LEAKS = (
    ("client", "cosine", "cosine"),
    ("client", "psnr", "PSNR"),
    ("client", "auc", "AUC"),
    ("server", "psnr", "PSNR"),
    ("server", "auc", "AUC"),
)
"""What a comparison shows: seat, measure and its name in a heading. The server has the updates and needs no cosine."""


def comparison(audits: Sequence[Audit]) -> str:
    """The page that sets runs side by side: accuracy and cost against the worst leak to a client and to the server.

    >>> "paper" in comparison([Audit("paper", {}, {"accuracy": 0.9}, (), (), 1.0)])
    True
    """
    heads = ("", "run", "accuracy", "rounds", "bytes", *(f"{seat}: {name}" for seat, _, name in LEAKS))
    rows = []
    for number, audit in enumerate(audits, 1):
        cost = [accuracy_text(audit), plain_text(audit.run.get("rounds", "—")), size_text(audit.run.get("bytes"))]
        leaks = [leak_text(audit, seat, measure) for seat, measure, _ in LEAKS]
        rows.append([str(number), audit.name, *cost, *leaks])
    table = _table(heads, rows)
    pictures = [(seat, trade_off(audits, seat)) for seat in ("client", "server")]
    intro = (
        f"<p class='warn'>{escape(NO_PROOF)} A dash: not measured.</p>"
        "<p>The worst that any attack reached, from a client's seat and from the server's. A sketch and a veil are "
        "against clients. The server holds every client's update: against it only noise on the updates or secure "
        "aggregation help.</p>"
    )
    body = f"<section><h2>Side by side</h2>{intro}{table}</section>"
    shown = "".join(
        f"<figure class='plot'><figcaption>to the {seat}</figcaption>"
        f"<img src='{picture}' alt='Worst leak to the {seat} against accuracy for each run'></figure>"
        for seat, picture in pictures
        if picture
    )
    if shown:
        note = "<p>Right and low is better: more accuracy, less leak. Numbers as in the table.</p>"
        body += f"<section><h2>Leak against accuracy</h2>{note}<div class='plots'>{shown}</div></section>"
    return _document(
        "Leakage audits compared", body + f"<section>{_details('Glossary', _definitions(GLOSSARY))}</section>"
    )


# How a value is read.


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
.grid{display:flex;flex-wrap:wrap;gap:.9rem}.grid figure{max-width:100%}
.grid img{max-width:100%;background:#fff;border:1px solid var(--line)}
figcaption{font-size:.82rem;color:var(--muted)}
@media (max-width:600px){th,td{padding:.4rem .5rem;min-width:3.6rem}td.long{min-width:8rem}}
@media print{:root{--ink:#000;--muted:#444;--line:#bbb;--paper:#fff;--soft:#f2f2f2;--bad:#b3261e;--leak:#8a5300;
--ok:#2d6a3e;--warn:#fff}body{max-width:none;font-size:10pt;padding:0}.scroll{overflow:visible}th,td,td.long{min-width:0}
details::details-content{content-visibility:visible;display:block}
figure,tr,.plot{break-inside:avoid}h2,h3{break-after:avoid}}
"""


def _document(title: str, body: str) -> str:
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='referrer' content='no-referrer'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; a cell that is one of our words gets its colour."""
    lines = ["".join(_cell(cell) for cell in row) for row in rows]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>" if lines else ""
    )


def _cell(text: str) -> str:
    style = f"w{RANK[text]}" if text in RANK else "long" if len(text) > 40 else "num" if text.isdigit() else ""
    return f"<td class='{style}'>{escape(text)}</td>" if style else f"<td>{escape(text)}</td>"


def _list(entries: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(entry)}</li>" for entry in entries)
    return f"<ul>{lines}</ul>" if lines else ""


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _definitions(entries: Mapping[str, Any]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in entries.items())}</dl>"


def _settings(title: str, entries: Mapping[str, Any], folded: bool = False) -> str:
    if not entries:
        return ""
    table = _table(("name", "value"), [(str(key), plain_text(value)) for key, value in entries.items()])
    return _details(title, table) if folded else f"<h3>{title}</h3>{table}"


def _headline(audit: Audit) -> str:
    worst: dict[tuple[str, str], Finding] = {}
    for finding in audit.findings:
        key = (finding.target, finding.seat)
        if key not in worst or severity(finding) > severity(worst[key]):
            worst[key] = finding
    ranked = sorted((each for each in worst.values() if word(each) != FAILED), key=severity, reverse=True)
    rank = RANK[word(ranked[0])] if ranked else 0
    lines = _list(sentence(finding) for finding in ranked)
    return f"<p class='big w{rank}'>{HEADS[rank]}</p>{lines}<p class='warn'>{escape(NO_PROOF)}</p>"


def _risks(audit: Audit) -> str:
    lines = []
    for row in risk_rows(audit):
        what = f"<b>{escape(row.target)}</b><br>{escape(row.measure)}<br><span class='muted'>{escape(row.seat)}</span>"
        pairs = ((row.naive, row.naive_word), (row.adaptive, row.adaptive_word))
        cells = "".join(
            f"<td class='long'><span class='w{RANK.get(label, 0)}'>{escape(label)}</span><br>{escape(text)}</td>"
            if label
            else f"<td class='long muted'>{escape(text)}</td>"
            for text, label in pairs
        )
        lines.append(f"<tr><td>{what}</td><td>{escape(row.guessing)}</td>{cells}</tr>")
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
            (f.measure, range_text(f), number_text(chance_of(f), f.measure), word(f), f.note)
            for f in sorted(group, key=severity, reverse=True)
        ]
        content = _table(("measure", "value", "guessing", "", "note"), rows)
        for budget in _unique(plain_text(f.budget) for f in group if f.budget):
            content += f"<p><b>Settings and budget:</b> {escape(budget)}</p>"
        failures = _unique(failure for f in group for failure in f.failures)
        content += f"<p><b>Failures:</b></p>{_list(failures)}" if failures else "<p class='muted'>No failures.</p>"
        worst = max(group, key=severity)
        parts.append(_details(f"{attack} ({seat}, {attacker}) on the {target}: {word(worst)}", content))
    return "".join(parts)


def _unique(entries: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(entries))


def _pictures(findings: Sequence[Finding]) -> str:
    parts = []
    for finding in findings:
        cells = "".join(
            f"<figure>{_png(data)}<figcaption>{escape(caption)}</figcaption></figure>"
            for caption, data in finding.images
        )
        if cells:
            title = f"{finding.attack} ({finding.seat}, {finding.attacker}): {finding.measure} {range_text(finding)}"
            parts.append(f"<h3>{escape(title)}</h3><div class='grid'>{cells}</div>")
    return "".join(parts)


def _png(data: str) -> str:
    try:
        real = base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    except ValueError:
        real = False
    return f"<img src='data:image/png;base64,{data}' alt=''>" if real else "<p class='muted'>(not a PNG)</p>"


# Figures. Legends are HTML: they wrap on a small screen, and text of others never reaches matplotlib's parser.
