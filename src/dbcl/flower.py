"""Flower apps, double-blind: `DoubleBlind` around the strategy, `blinded` and `reply` in the client.

Needs the extra: pip install 'dbcl[flower]'. There is no mod that does it without the client's two lines: an app that
trains the full-size effective weight leaves the space of the sketch with its first step, so it could not be exact.
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("dbcl.flower needs Flower, which is not installed; the remedy: pip install 'dbcl[flower]'")

from dbcl.engines.flower import DoubleBlind, LocalGrid, blinded, reply

__all__ = ["DoubleBlind", "LocalGrid", "blinded", "reply"]
