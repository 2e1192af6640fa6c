"""Findings as a page: what each value means (`measures`, `rating`), in sentences (`wording`), figures and HTML."""
