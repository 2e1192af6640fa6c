"""Double-Blind Collaborative Learning: train one PyTorch model together over random sketches of its weights."""

import importlib
from typing import TYPE_CHECKING, Any

from dbcl import optim
from dbcl._version import __version__
from dbcl.errors import (
    AuditError,
    ConfigError,
    DataError,
    DbclError,
    PlanError,
    ProtocolError,
    SketchError,
)
from dbcl.plan import SketchPlan
from dbcl.privacy import UpdateNoise, Veil, WhiteVeil
from dbcl.products import find_layers
from dbcl.protocol import (
    Aggregate,
    Base,
    Broadcast,
    Door,
    RoundReport,
    Server,
    Update,
    blinded,
    decode_base,
    decode_broadcast,
    decode_update,
    encode,
    load_base,
    update,
)
from dbcl.sketch import CountSketch, Identity, Sketch, UniformSampling
from dbcl.state import State

if TYPE_CHECKING:
    from dbcl import audit, data, engines, flower, run, statistics, testing, trackers, transcripts
    from dbcl.run import simulate

ROOMS = ("audit", "data", "engines", "flower", "run", "statistics", "testing", "trackers", "transcripts")
"""Loaded when they are first used: `import dbcl` is enough for `dbcl.flower.DoubleBlind`."""


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"dbcl.{name}")
    if name == "simulate":
        return importlib.import_module("dbcl.run").simulate
    raise AttributeError(f"module 'dbcl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Aggregate",
    "AuditError",
    "Base",
    "Broadcast",
    "ConfigError",
    "CountSketch",
    "DataError",
    "DbclError",
    "Door",
    "Identity",
    "PlanError",
    "ProtocolError",
    "RoundReport",
    "Server",
    "Sketch",
    "SketchError",
    "SketchPlan",
    "State",
    "UniformSampling",
    "Update",
    "UpdateNoise",
    "Veil",
    "WhiteVeil",
    "__version__",
    "audit",
    "blinded",
    "data",
    "decode_base",
    "decode_broadcast",
    "decode_update",
    "encode",
    "engines",
    "find_layers",
    "flower",
    "load_base",
    "optim",
    "run",
    "simulate",
    "statistics",
    "testing",
    "trackers",
    "transcripts",
    "update",
]
