"""Double-Blind Collaborative Learning: train one PyTorch model together over random sketches of its weights."""

from dbcl import optim
from dbcl._version import __version__
from dbcl.errors import DbclError, PlanError, ProtocolError, SketchError
from dbcl.plan import SketchPlan
from dbcl.protocol import (
    Broadcast,
    Door,
    RoundReport,
    Server,
    Update,
    blinded,
    decode_broadcast,
    decode_update,
    encode,
    update,
)
from dbcl.sketch import CountSketch, Identity, Sketch, UniformSampling

__all__ = [
    "Broadcast",
    "CountSketch",
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
    "UniformSampling",
    "Update",
    "__version__",
    "blinded",
    "decode_broadcast",
    "decode_update",
    "encode",
    "optim",
    "update",
]
