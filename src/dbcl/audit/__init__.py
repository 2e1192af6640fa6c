"""Attacks on finished runs: what each party could work out from what it saw, and a report of it.

`suite.py` runs a whole audit: `rehearsal.py` plays short runs whose truth is known, `estimators/` and `attacks/` work
from transcripts, `scoring.py` compares with the truth, and `report/` writes `findings.py`'s findings as a page.
"""
