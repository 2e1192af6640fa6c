"""Whatever carries the messages between the server and its clients."""

from dbcl.engines.engine import Engine, RoundResult, UpdateNoise
from dbcl.engines.local import LocalEngine
from dbcl.engines.stacked import StackedEngine
from dbcl.engines.training import Evaluation, LocalTraining, evaluate

__all__ = [
    "Engine",
    "Evaluation",
    "LocalEngine",
    "LocalTraining",
    "RoundResult",
    "StackedEngine",
    "UpdateNoise",
    "evaluate",
]
