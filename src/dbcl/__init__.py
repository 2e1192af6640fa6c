"""Double-Blind Collaborative Learning: train one PyTorch model together over random sketches of its weights."""

import importlib
from typing import TYPE_CHECKING, Any

from dbcl._version import __version__

if TYPE_CHECKING:
    from dbcl import audit, data, engines, flower, optim, run, statistics, testing, trackers, transcripts
    from dbcl.errors import AuditError, ConfigError, DataError, DbclError, PlanError, ProtocolError, SketchError
    from dbcl.plan import SketchPlan
    from dbcl.privacy import UpdateNoise, Veil, WhiteVeil
    from dbcl.products import find_layers
    from dbcl.protocol import (
        Aggregate,
        Base,
        Broadcast,
        Door,
        Policy,
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
    from dbcl.run import simulate
    from dbcl.sketch import CountSketch, Identity, LaneSketch, Sketch, UniformSampling
    from dbcl.state import State

HOMES = {
    "": "audit data engines flower optim run statistics testing trackers transcripts",
    "errors": "AuditError ConfigError DataError DbclError PlanError ProtocolError SketchError",
    "plan": "SketchPlan",
    "privacy": "UpdateNoise Veil WhiteVeil",
    "products": "find_layers",
    "protocol": "Aggregate Base Broadcast Door Policy RoundReport Server Update blinded decode_base decode_broadcast "
    "decode_update encode load_base update",
    "run": "simulate",
    "sketch": "CountSketch Identity LaneSketch Sketch UniformSampling",
    "state": "State",
}
"""The public names by the module that they live in; the first line has modules themselves. All are loaded on first use:
`import dbcl` is enough for `dbcl.flower.DoubleBlind`, and costs nothing where it is not used."""


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names.split():
            found = getattr(importlib.import_module(f"dbcl.{home}"), name) if home else None
            globals()[name] = found = found or importlib.import_module(f"dbcl.{name}")
            return found
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
    "LaneSketch",
    "PlanError",
    "Policy",
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
