"""Engines: train the clients of a round and exchange messages with the server."""

from dbcl.engines.cohort import cohort_size, draw_cohort
from dbcl.engines.engine import Engine, RoundObserver, RoundResult
from dbcl.engines.local import LocalEngine
from dbcl.engines.stacked import StackedEngine
from dbcl.engines.training import Evaluation, LocalTraining, evaluate
from dbcl.engines.training_server import TrainingServer

__all__ = [
    "Engine",
    "Evaluation",
    "LocalEngine",
    "LocalTraining",
    "RoundObserver",
    "RoundResult",
    "StackedEngine",
    "TrainingServer",
    "cohort_size",
    "draw_cohort",
    "evaluate",
]
