"""Report of findings as an HTML page: values (`measures`), ratings (`rating`), sentences
(`wording`), figures and HTML (`render`).
"""

from dbcl_audit.report import page, rating

__all__ = ["page", "rating"]
