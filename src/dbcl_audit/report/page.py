"""Report of an audit as one HTML page without external resources."""

import base64
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dbcl_audit.findings import Audit, Finding
from dbcl_audit.report.figures import figures
from dbcl_audit.report.measures import cases_text, chance_of, number_text, plain_text, range_text
from dbcl_audit.report.promises import promised
from dbcl_audit.report.rating import FAILED, RANK, RULES, Risk, risks, severity, word
from dbcl_audit.report.render import render
from dbcl_audit.report.wording import (
    GLOSSARY,
    NO_PROOF,
    advice,
    sentence,
    simulation_text,
    target_text,
    verdicts,
)

Key = TypeVar("Key", bound=Hashable)


def page(audit: Audit) -> str:
    """Return one HTML page with the whole audit. The page loads no external resources and runs no
    script.

    >>> page(Audit("<b>", {}, {}, (), (), 1.0)).count("<b>")
    0
    """
    guaranteed, count = promised(audit), len(audit.findings)
    made = f"{audit.date or 'Date unknown'}, dbcl {audit.version or 'of an unknown version'}"
    failed = [finding for finding in audit.findings if word(finding) == FAILED]
    run = [("Results", _rows(audit.run)), ("Its settings", _rows(audit.settings))]
    settings = [
        ("The run that was attacked", [(name, rows) for name, rows in run if rows]),
        ("The audit", [("Settings of the audit", _rows(_made(audit)))]),
    ]
    return render(
        "page.html",
        title=f"Leakage audit of {audit.name}",
        made=f"{made}; {count} finding{'s' * (count != 1)} in {audit.seconds:.0f} s.",
        paragraphs=simulation_text(audit),
        verdict_title="Verdict" if guaranteed else "Verdict for each adversary",
        verdicts=verdicts(audit),
        missing=[
            f"{f.attack} ({f.adversary}, on the {f.target}): {'; '.join(f.failures) or 'no reason given'}"
            for f in failed
        ],
        not_attacked=[f"{what}: {reason}" for what, reason in audit.not_attacked.items()],
        no_proof="" if guaranteed else NO_PROOF,
        found=[] if guaranteed else _found(audit),
        adversaries=audit.adversaries,
        by_simulated_run=_by_simulated_run(audit),
        risks=[_risk(risk, audit) for risk in risks(audit)],
        rules=RULES,
        advice=advice(audit),
        plots=figures(audit.findings),
        images=_images(audit.findings),
        attacks=_attacks(audit.findings),
        settings=[(title, groups) for title, groups in settings if groups],
        glossary=GLOSSARY,
    )


def _made(audit: Audit) -> dict[str, Any]:
    """Return the settings of the audit. Audits of older versions have fewer settings."""
    known = {
        "date": audit.date,
        "dbcl version": audit.version,
        "parties of the simulated runs": audit.parties,
        "property that was inferred": audit.property_name,
        **audit.budget,
        "seconds": round(audit.seconds, 1),
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def _rows(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), plain_text(value)) for key, value in entries.items()]


def _worst_by(findings: Iterable[Finding], key_of: Callable[[Finding], Key]) -> dict[Key, Finding]:
    """Return the worst finding of each group."""
    worst: dict[Key, Finding] = {}
    for finding in findings:
        key = key_of(finding)
        if key not in worst or severity(finding) > severity(worst[key]):
            worst[key] = finding
    return worst


def _found(audit: Audit) -> list[str]:
    """Describe the worst finding of each target and adversary in a sentence, in descending order of
    severity.
    """
    worst = _worst_by(audit.findings, lambda each: (each.target, each.adversary))
    ranked = sorted((each for each in worst.values() if word(each) != FAILED), key=severity, reverse=True)
    return [sentence(finding, audit.property_name) for finding in ranked]


def _by_simulated_run(audit: Audit) -> list[tuple[str, ...]]:
    """Return the worst finding of each simulated run, target and adversary as table rows."""
    simulated = [finding for finding in audit.findings if finding.simulated_run]
    worst = _worst_by(simulated, lambda each: (each.simulated_run, each.target, each.adversary))
    if len({run for run, _, _ in worst}) < 2:
        return []
    return [
        (
            run,
            target_text(target, audit.property_name),
            adversary,
            f"{found.measure.text} {range_text(found)}",
            number_text(chance_of(found), found.measure),
            word(found),
        )
        for (run, target, adversary), found in worst.items()
    ]


def _risk(risk: Risk, audit: Audit) -> dict[str, Any]:
    return {
        "target": target_text(risk.target, audit.property_name),
        "measure": risk.measure.text,
        "adversary": risk.adversary,
        "guessing": number_text(risk.chance, risk.measure),
        "naive": _worst(risk.naive),
        "adaptive": _worst(risk.adaptive),
    }


def _worst(finding: Finding | None) -> dict[str, Any] | None:
    if finding is None:
        return None
    rests_on = ", ".join(text for text in (cases_text(finding), finding.attack, finding.simulated_run) if text)
    return {"value": range_text(finding), "rests_on": rests_on, "word": word(finding), "rank": RANK[word(finding)]}


def _attacks(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = finding.attack, finding.adversary, finding.attacker, finding.target, finding.simulated_run
        groups.setdefault(key, []).append(finding)
    found = []
    for (attack, adversary, attacker, target, run), group in groups.items():
        rows = [
            (
                each.measure.text,
                cases_text(each) or "—",
                range_text(each),
                number_text(chance_of(each), each.measure),
                word(each),
                each.note,
            )
            for each in sorted(group, key=severity, reverse=True)
        ]
        found.append(
            {
                "name": f"{attack} ({adversary}, {attacker}) on the {target}{f', {run}' if run else ''}",
                "word": word(max(group, key=severity)),
                "rows": rows,
                "budgets": _unique(plain_text(each.budget) for each in group if each.budget),
                "failures": _unique(failure for each in group for failure in each.failures),
            }
        )
    return found


def _unique(entries: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(entries))


def _images(findings: Sequence[Finding]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return for each finding with images its title and, for each image, the caption, the PNG and
    the alternative text.
    """
    found = []
    for finding in findings:
        value = range_text(finding)
        grids = [
            (caption, data if _is_png(data) else "", f"{caption}, by {finding.attack} ({finding.adversary}): {value}")
            for caption, data in finding.images
        ]
        if grids:
            title = f"{finding.attack} ({finding.adversary}, {finding.attacker}): {finding.measure.text} {value}"
            found.append((title, grids))
    return found


def _is_png(data: str) -> bool:
    try:
        return base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    except ValueError:
        return False
