"""Attacks on recorded training runs, and a report of what each party can infer from its
observations.

`audit.py` runs a complete audit. `simulated_run.py` simulates short runs with known ground truth,
`estimators/` and `attacks/` process the transcripts, `scoring.py` compares the results with the
ground truth, and `report/` renders the findings (`findings.py`) as a page. `guarantee.py` uses
canaries (`canaries.py`) to measure the epsilon of a differential-privacy guarantee.
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
