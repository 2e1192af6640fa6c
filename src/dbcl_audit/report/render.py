"""Rendering of the Jinja2 templates in `templates/` to pages without external resources and
scripts.
"""

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dbcl_audit.report.rating import RANK

CSP = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MAX_NARROW_LENGTH = 40
"""Maximum length of text in a narrow table cell, in characters."""


def render(template: str, **values: Any) -> str:
    """Render a template. All text values are escaped.

    >>> "<b>" in render("comparison.html", title="<b>", no_proof="", heads=(), rows=(), drawings=(), glossary={})
    False
    """
    page: str = _environment().get_template(template).render(policy=CSP, **values)
    return re.sub(r">\s*\n\s*<", "><", page) + "\n"  # line breaks between tags are for readers of the templates


@cache
def _environment() -> Environment:
    loader = PackageLoader("dbcl_audit", "report/templates")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.filters["cell_class"] = _cell_class
    made.tests["rated"] = lambda text: bool(_cell_class(text))
    return made


def _cell_class(text: str) -> str:
    """Return the CSS class of a table cell: the colour of a rating, or the width."""
    if text in RANK:
        return f"w{RANK[text]}"
    return "long" if len(text) > MAX_NARROW_LENGTH else "num" if text.isdigit() else ""
