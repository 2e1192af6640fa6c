"""Fast engine that trains all clients of a round at once."""

from dbcl.engines.stacked.engine import StackedEngine

__all__ = ["StackedEngine"]
