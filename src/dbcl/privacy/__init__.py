"""Noise mechanisms, clipping and privacy accounting."""

from dbcl.privacy.accounting import PrivacyPlan, Spent
from dbcl.privacy.attendance import AttendanceLog, attendance_mu
from dbcl.privacy.clipping import UpdateNoise, clip_factor, norm
from dbcl.privacy.conversion import epsilon_of, mu_of
from dbcl.privacy.correlated import CorrelatedNoise
from dbcl.privacy.dense_clipping import clip_factors
from dbcl.privacy.distributed import NoiseShares, NoiseStream
from dbcl.privacy.example_clipping import check_alone, clipped_step, clipped_sum, clipped_sums
from dbcl.privacy.factorization import (
    Mechanism,
    Memory,
    Strategy,
    Workload,
    banded,
    independent,
    sensitivity,
    white,
)
from dbcl.privacy.noise import IndependentNoise, NoiseMechanism, veil_sizes
from dbcl.privacy.participation import ParticipationTracker, cyclic_batch, cyclic_cohort, share

__all__ = [
    "AttendanceLog",
    "CorrelatedNoise",
    "IndependentNoise",
    "Mechanism",
    "Memory",
    "NoiseMechanism",
    "NoiseShares",
    "NoiseStream",
    "ParticipationTracker",
    "PrivacyPlan",
    "Spent",
    "Strategy",
    "UpdateNoise",
    "Workload",
    "attendance_mu",
    "banded",
    "check_alone",
    "clip_factor",
    "clip_factors",
    "clipped_step",
    "clipped_sum",
    "clipped_sums",
    "cyclic_batch",
    "cyclic_cohort",
    "epsilon_of",
    "independent",
    "mu_of",
    "norm",
    "sensitivity",
    "share",
    "veil_sizes",
    "white",
]
