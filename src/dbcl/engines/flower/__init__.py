"""Double-blind rounds on Flower: the only place of dbcl that imports flwr. `dbcl.flower` has its public names."""

import os

# Read once, when Flower and Ray are first imported; who wants their telemetry sets the variables to 1.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from dbcl.engines.flower.engine import FlowerEngine, SimulationEngine
from dbcl.engines.flower.grid import LocalGrid
from dbcl.engines.flower.records import blinded, reply
from dbcl.engines.flower.strategy import DoubleBlind

__all__ = ["DoubleBlind", "FlowerEngine", "LocalGrid", "SimulationEngine", "blinded", "reply"]
