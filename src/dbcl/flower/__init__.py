"""Flower integration: `DoubleBlind` wraps a strategy; clients call `blinded` and `reply`.

Requires the extra: pip install '.[flower]' in a clone of dbcl. A Flower mod cannot replace the two
calls in the client. An app that trains the full-size effective weight leaves the space of the
sketch with its first step, and the lift would no longer be exact.
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
