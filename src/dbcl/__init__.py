"""Double-Blind Collaborative Learning: train one PyTorch model together over random sketches of its weights."""

import importlib
from typing import TYPE_CHECKING, Any

from dbcl._version import __version__

if TYPE_CHECKING:
    from dbcl.config import PrivacyConfig, SecAggConfig, SketchConfig
    from dbcl.errors import DbclError
    from dbcl.plan import SketchPlan
    from dbcl.protocol import Broadcast, RoundReport, Server, Update, blinded, decode, encode, make_update
    from dbcl.simulation import simulate

HOMES = {
    "config": ("PrivacyConfig", "SecAggConfig", "SketchConfig"),
    "errors": ("DbclError",),
    "plan": ("SketchPlan",),
    "protocol": ("Broadcast", "RoundReport", "Server", "Update", "blinded", "decode", "encode", "make_update"),
    "simulation": ("simulate",),
}
"""Public names by the module that defines them. They are imported on first use, so `import dbcl` is quick."""
MODULES = (
    "config",
    "data",
    "engines",
    "errors",
    "features",
    "flower",
    "model",
    "optim",
    "plan",
    "privacy",
    "protocol",
    "simulation",
    "sketch",
    "state",
    "testing",
    "trackers",
    "transcripts",
)
"""Modules that are imported on first use: `import dbcl` is enough for `dbcl.flower.DoubleBlind`."""


def __getattr__(name: str) -> Any:
    home = next((home for home, names in HOMES.items() if name in names), None)
    if home is None and name not in MODULES:
        raise AttributeError(f"module 'dbcl' has no attribute {name!r}")
    found = importlib.import_module(f"dbcl.{home or name}")
    globals()[name] = found = found if home is None else getattr(found, name)
    return found


def __dir__() -> list[str]:
    return [*__all__, *MODULES]


__all__ = [
    "Broadcast",
    "DbclError",
    "PrivacyConfig",
    "RoundReport",
    "SecAggConfig",
    "Server",
    "SketchConfig",
    "SketchPlan",
    "Update",
    "__version__",
    "blinded",
    "decode",
    "encode",
    "make_update",
    "simulate",
]
