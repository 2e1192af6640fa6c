"""Findings as words, tables, figures and a page."""
