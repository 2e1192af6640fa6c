"""Secret noise and clipping, and what each of them promises."""

from dbcl.privacy.accounting import PrivacyPlan, Spent, epsilon_of, mu_of
from dbcl.privacy.clipping import UpdateNoise, clip_factor, norm
from dbcl.privacy.correlated import CorrelatedVeil
from dbcl.privacy.factorization import (
    Mechanism,
    Memory,
    Strategy,
    Workload,
    banded,
    buffered,
    independent,
    sensitivity,
    white,
)
from dbcl.privacy.participation import Ledger, cyclic_batch, cyclic_cohort, share
from dbcl.privacy.planning import plan_blt
from dbcl.privacy.veil import Veil, WhiteVeil, veil_sizes

__all__ = [
    "CorrelatedVeil",
    "Ledger",
    "Mechanism",
    "Memory",
    "PrivacyPlan",
    "Spent",
    "Strategy",
    "UpdateNoise",
    "Veil",
    "WhiteVeil",
    "Workload",
    "banded",
    "buffered",
    "clip_factor",
    "cyclic_batch",
    "cyclic_cohort",
    "epsilon_of",
    "independent",
    "mu_of",
    "norm",
    "plan_blt",
    "sensitivity",
    "share",
    "veil_sizes",
    "white",
]
