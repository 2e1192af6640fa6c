"""Flower apps, double-blind: `DoubleBlind` around the strategy, `blinded` and `reply` in the client.

Needs the extra: pip install '.[flower]' in a clone of dbcl. There is no mod that does it without the client's two
lines: an app that trains the full-size effective weight leaves the space of the sketch with its first step, so it could
not be exact.
"""

import os
from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError(
        "dbcl.flower needs Flower, which is not installed; the remedy: pip install '.[flower]' in a clone of dbcl"
    )

# Read once, when Flower and Ray are first imported. To enable their telemetry, set the variables to 1.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from dbcl.flower.client import blinded, clipped_reply, reply
from dbcl.flower.grid import LocalGrid
from dbcl.flower.guarantee_node import GuaranteeMod
from dbcl.flower.identity import KeyRegistry, make_key
from dbcl.flower.secure_node import SecureMod
from dbcl.flower.strategy import DoubleBlind
from dbcl.flower.weights import secret_weights

__all__ = [
    "DoubleBlind",
    "GuaranteeMod",
    "KeyRegistry",
    "LocalGrid",
    "SecureMod",
    "blinded",
    "clipped_reply",
    "make_key",
    "reply",
    "secret_weights",
]
