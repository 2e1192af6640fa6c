"""An audit, or several side by side, as one page that opens without a network."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dbcl.audit.findings import Audit, Finding
from dbcl.audit.report.figures import escape, figures, trade_off
from dbcl.audit.report.measures import (
    accuracy_text,
    chance_of,
    leak_text,
    number_text,
    plain_text,
    range_text,
    size_text,
)
from dbcl.audit.report.rating import FAILED, RANK, RULES, risks, severity, word
from dbcl.audit.report.style import CSP, STYLE
from dbcl.audit.report.wording import GLOSSARY, HEADS, NO_PROOF, advice, sentence


def page(audit: Audit) -> str:
    """One HTML page that holds everything: it loads nothing from the network and runs no script.

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


def _document(title: str, body: str) -> str:
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='referrer' content='no-referrer'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; cells that hold a rating get its colour."""
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
    for risk in risks(audit):
        seat = f"<span class='muted'>{escape(risk.seat)}</span>"
        what = f"<b>{escape(risk.target)}</b><br>{escape(risk.measure)}<br>{seat}"
        guessing = escape(number_text(risk.chance, risk.measure))
        lines.append(f"<tr><td>{what}</td><td>{guessing}</td>{_worst(risk.naive)}{_worst(risk.adaptive)}</tr>")
    heads = "<th>risk</th><th>guessing</th><th>naive attacker</th><th>adaptive attacker</th>"
    table = f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    intro = (
        "<p>Each risk by target, measure and seat; in brackets the interval. Where there were several attacks, the "
        "worst; all of them are further below.</p>"
    )
    return intro + table + _details("How the words are chosen", _definitions(RULES)) if lines else ""


def _worst(finding: Finding | None) -> str:
    if finding is None:
        return "<td class='long muted'>no such attack</td>"
    label = f"<span class='w{RANK[word(finding)]}'>{escape(word(finding))}</span>"
    return f"<td class='long'>{label}<br>{escape(f'{range_text(finding)}, {finding.attack}')}</td>"


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
