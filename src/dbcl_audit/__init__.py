"""Attacks on finished runs: what each party could work out from what it saw, and a report of it.

`suite.py` runs a whole audit: `rehearsal.py` plays short runs whose truth is known, `estimators/` and `attacks/` work
from transcripts, `scoring.py` compares with the truth, and `report/` writes `findings.py`'s findings as a page.
`guarantee.py` measures a guarantee, by `canaries.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbcl_audit import budget, findings, report, suite

__all__ = ["budget", "findings", "report", "suite"]


def __getattr__(name: str) -> Any:
    """Load on first use: the suite needs scikit-learn and SciPy, which are extras."""
    if name in __all__:
        return importlib.import_module(f"dbcl_audit.{name}")
    raise AttributeError(f"module 'dbcl_audit' has no attribute {name!r}")
