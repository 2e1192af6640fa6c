"""Findings as a page: what each value means (`measures`, `rating`), in sentences (`wording`), figures and HTML."""

from dbcl_audit.report import page, rating

__all__ = ["page", "rating"]
