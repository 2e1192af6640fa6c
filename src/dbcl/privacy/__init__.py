"""Secret noise and clipping, and what each of them promises."""

from dbcl.privacy.clipping import UpdateNoise, clip_factor, norm
from dbcl.privacy.veil import Veil, WhiteVeil, veil_sizes

__all__ = ["UpdateNoise", "Veil", "WhiteVeil", "clip_factor", "norm", "veil_sizes"]
