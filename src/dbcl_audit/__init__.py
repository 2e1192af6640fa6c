"""Attacks on finished runs: what each party could infer from what it observed, and a report of it.

`audit.py` runs a whole audit: `simulated_run.py` plays short runs with known ground truth,
`estimators/` and `attacks/` work from transcripts, `scoring.py` compares with the ground truth, and
`report/` renders the findings (`findings.py`) as a page. `guarantee.py` measures the epsilon of a
guarantee with canaries (`canaries.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbcl_audit import audit, effort, findings, report

__all__ = ["audit", "effort", "findings", "report"]


def __getattr__(name: str) -> Any:
    """Import a submodule on first use: `audit` needs scikit-learn and SciPy, which are extras."""
    if name in __all__:
        return importlib.import_module(f"dbcl_audit.{name}")
    raise AttributeError(f"module 'dbcl_audit' has no attribute {name!r}")
