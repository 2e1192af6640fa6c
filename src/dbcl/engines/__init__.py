"""Whatever carries the messages between the server and its clients."""

from dbcl.engines.local import LocalEngine, RoundResult
from dbcl.engines.training import Evaluation, LocalTraining, evaluate

__all__ = ["Evaluation", "LocalEngine", "LocalTraining", "RoundResult", "evaluate"]
