"""All clients of a round at once: the fast engine."""

from dbcl.engines.stacked.engine import StackedEngine

__all__ = ["StackedEngine"]
