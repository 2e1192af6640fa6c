"""An audit, or several side by side, as one page that opens without a network."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report.figures import escape, figures
from dbcl_audit.report.measures import (
    cases_text,
    chance_of,
    measure_text,
    number_text,
    plain_text,
    range_text,
)
from dbcl_audit.report.rating import FAILED, RANK, RULES, risks, severity, word
from dbcl_audit.report.style import CSP, STYLE
from dbcl_audit.report.wording import (
    GLOSSARY,
    NO_PROOF,
    advice,
    promised,
    rehearsal_text,
    sentence,
    target_text,
    verdicts,
)


def page(audit: Audit) -> str:
    """One HTML page that holds everything: it loads nothing from the network and runs no script.

    >>> page(Audit("<b>", {}, {}, (), (), 1.0)).count("<b>")
    0
    """
    sections = [
        ("Verdict" if promised(audit) else "Verdict for each seat", _verdicts(audit)),
        ("What was found", "" if promised(audit) else _found(audit)),
        ("Who sees what", table("Who sees what", ("party", "receives or holds", "does not receive"), audit.seats)),
        ("From the worst case to the run itself", _by_rehearsal(audit)),
        ("Risks", _risks(audit)),
        ("What it means, and what to change", _list(advice(audit))),
        ("Curves", figures(audit.findings)),
        ("Pictures", _pictures(audit.findings)),
        ("Each attack", _attacks(audit.findings)),
        (
            "The run that was attacked",
            _settings("Results", audit.run) + _settings("Its settings", audit.settings),
        ),
        ("The audit", _settings("Settings of the audit", _made(audit))),
        ("Words", details("Glossary", definitions(GLOSSARY))),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    when = f"{audit.date or 'Date unknown'}, dbcl {audit.version or 'of an unknown version'}"
    made = f"<p class='muted'>{escape(when)}; {_counted(audit.findings)} in {audit.seconds:.0f} s.</p>"
    first, *more = (f"<p>{escape(each)}</p>" for each in rehearsal_text(audit))
    return document(f"Leakage audit of {audit.name}", f"{made}<div class='warn'>{first}{''.join(more)}</div>{body}")


def _counted(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' * (len(findings) != 1)}"


def _made(audit: Audit) -> dict[str, Any]:
    """How the audit was made; what an old one does not say is left out."""
    known = {
        "date": audit.date,
        "dbcl version": audit.version,
        "parties of the rehearsals": audit.parties,
        "property that was looked for": audit.property_name,
        **audit.budget,
        "seconds": round(audit.seconds, 1),
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def document(title: str, body: str) -> str:
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='referrer' content='no-referrer'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text; cells that hold a rating get its colour."""
    return _frame(label, heads, ["".join(_cell(cell) for cell in row) for row in rows])


def _frame(label: str, heads: Sequence[str], lines: Sequence[str]) -> str:
    """A table that scrolls by itself where it is too wide, by keyboard too; `lines` are the cells of each row."""
    if not lines:
        return ""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(label)}'>{table}</div>"


def _cell(text: str) -> str:
    style = f"w{RANK[text]}" if text in RANK else "long" if len(text) > 40 else "num" if text.isdigit() else ""
    return f"<td class='{style}'>{escape(text)}</td>" if style else f"<td>{escape(text)}</td>"


def _list(entries: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(entry)}</li>" for entry in entries)
    return f"<ul>{lines}</ul>" if lines else ""


def details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def definitions(entries: Mapping[str, Any]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in entries.items())}</dl>"


def _settings(title: str, entries: Mapping[str, Any]) -> str:
    rows = [(str(key), plain_text(value)) for key, value in entries.items()]
    return details(title, table(title, ("name", "value"), rows)) if rows else ""


def _verdicts(audit: Audit) -> str:
    lines = []
    for rank, verdict, found, note in verdicts(audit):
        worst = f"<p>{escape(found)}</p>" if found else ""
        lines.append(
            f"<li class='w{rank}'><p class='big'>{escape(verdict)}</p>{worst}<p class='muted'>{escape(note)}</p></li>"
        )
    failed = [finding for finding in audit.findings if word(finding) == FAILED]
    missing = [
        f"{f.attack} ({f.seat}, on the {f.target}): {'; '.join(f.failures) or 'no reason given'}" for f in failed
    ]
    gaps = (
        f"<div class='warn'><p>This audit is incomplete. What could not run:</p>{_list(missing)}</div>"
        if failed
        else ""
    )
    if audit.not_attacked:
        why = _list(f"{what}: {reason}" for what, reason in audit.not_attacked.items())
        gaps += f"<p>Not attacked:</p>{why}"
    proof = "" if promised(audit) else f"<p class='warn'>{escape(NO_PROOF)}</p>"  # the verdict says what it proves
    return f"<ul class='verdicts'>{''.join(lines)}</ul>{gaps}{proof}"


def _found(audit: Audit) -> str:
    """The worst of each target and seat in words."""
    worst: dict[tuple[str, str], Finding] = {}
    for finding in audit.findings:
        key = (finding.target, finding.seat)
        if key not in worst or severity(finding) > severity(worst[key]):
            worst[key] = finding
    ranked = sorted((each for each in worst.values() if word(each) != FAILED), key=severity, reverse=True)
    return _list(sentence(finding, audit.property_name) for finding in ranked)


def _risks(audit: Audit) -> str:
    lines = []
    for risk in risks(audit):
        seat = f"<span class='muted'>{escape(risk.seat)}</span>"
        target = escape(target_text(risk.target, audit.property_name))
        what = f"<b>{target}</b><br>{escape(measure_text(risk.measure))}<br>{seat}"
        guessing = escape(number_text(risk.chance, risk.measure))
        lines.append(f"<th scope='row'>{what}</th><td>{guessing}</td>{_worst(risk.naive)}{_worst(risk.adaptive)}")
    table = _frame("Risks", ("risk", "guessing", "naive attacker", "adaptive attacker"), lines)
    intro = (
        "<p>Each risk by target, measure and seat. In each cell: the value with its interval in brackets, how many "
        "cases it rests on, the attack, and only then the rating. Where there were several attacks, the worst; all "
        "of them are further below.</p>"
    )
    return intro + table + details("How the words are chosen", definitions(RULES)) if lines else ""


def _by_rehearsal(audit: Audit) -> str:
    """For each rehearsal the worst of what it was about: the worst case and the run itself, told apart."""
    worst: dict[tuple[str, str, str], Finding] = {}
    for finding in audit.findings:
        key = finding.rehearsal, finding.target, finding.seat
        if finding.rehearsal and (key not in worst or severity(finding) > severity(worst[key])):
            worst[key] = finding
    if len({rehearsal for rehearsal, _, _ in worst}) < 2:
        return ""
    rows = [
        (
            rehearsal,
            target_text(target, audit.property_name),
            seat,
            f"{measure_text(found.measure)} {range_text(found)}",
            number_text(chance_of(found), found.measure),
            word(found),
        )
        for (rehearsal, target, seat), found in worst.items()
    ]
    intro = (
        "<p>The same settings, rehearsed in several ways. With few parties that take part in every round an attacker "
        "sees most; a row that begins with “as the run is” has the run's own clients, cohort, local steps and "
        "participation.</p>"
    )
    heads = ("rehearsal", "what", "seat", "worst finding", "guessing", "rating")
    return intro + table("Rehearsals", heads, rows)


def _worst(finding: Finding | None) -> str:
    if finding is None:
        return "<td class='long muted'>no such attack</td>"
    label = f"<span class='w{RANK[word(finding)]}'>{escape(word(finding))}</span>"
    rests_on = ", ".join(text for text in (cases_text(finding), finding.attack, finding.rehearsal) if text)
    return f"<td class='long'>{escape(range_text(finding))}<br>{escape(rests_on)}<br>{label}</td>"


def _attacks(findings: Sequence[Finding]) -> str:
    groups: dict[tuple[str, str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = finding.attack, finding.seat, finding.attacker, finding.target, finding.rehearsal
        groups.setdefault(key, []).append(finding)
    parts = []
    for (attack, seat, attacker, target, rehearsal), group in groups.items():
        rows = [
            (
                measure_text(f.measure),
                cases_text(f) or "—",
                range_text(f),
                number_text(chance_of(f), f.measure),
                word(f),
                f.note,
            )
            for f in sorted(group, key=severity, reverse=True)
        ]
        name = f"{attack} ({seat}, {attacker}) on the {target}{f', {rehearsal}' if rehearsal else ''}"
        content = table(name, ("measure", "cases", "value (interval)", "guessing", "rating", "note"), rows)
        for budget in _unique(plain_text(f.budget) for f in group if f.budget):
            content += f"<p><b>Settings and budget:</b> {escape(budget)}</p>"
        failures = _unique(failure for f in group for failure in f.failures)
        content += f"<p><b>Failures:</b></p>{_list(failures)}" if failures else "<p class='muted'>No failures.</p>"
        worst = max(group, key=severity)
        parts.append(details(f"{name}: {word(worst)}", content))
    return "".join(parts)


def _unique(entries: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(entries))


def _pictures(findings: Sequence[Finding]) -> str:
    parts = []
    for finding in findings:
        cells = "".join(
            f"<figure>{_png(data, f'{caption}, by {finding.attack} ({finding.seat}): {range_text(finding)}')}"
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for caption, data in finding.images
        )
        if cells:
            named = f"{finding.attack} ({finding.seat}, {finding.attacker})"
            title = f"{named}: {measure_text(finding.measure)} {range_text(finding)}"
            parts.append(f"<h3>{escape(title)}</h3><div class='grid'>{cells}</div>")
    return "".join(parts)


def _png(data: str, alternative: str) -> str:
    try:
        real = base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    except ValueError:
        real = False
    if not real:
        return "<p class='muted'>(not a PNG)</p>"
    return f"<img src='data:image/png;base64,{data}' alt='{escape(alternative)}'>"
