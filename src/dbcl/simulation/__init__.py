"""Simulated training runs: settings, construction of model, server and engine, and run folders."""

from dbcl.simulation.config import RunConfig
from dbcl.simulation.metrics import RoundMetrics, read_metrics
from dbcl.simulation.presets import PRESETS, from_toml, preset, to_toml
from dbcl.simulation.run import RESUMABLE, Run, message_bytes, transcript_bytes
from dbcl.simulation.simulated import simulate
from dbcl.simulation.task import Task, task_of

__all__ = [
    "PRESETS",
    "RESUMABLE",
    "RoundMetrics",
    "Run",
    "RunConfig",
    "Task",
    "from_toml",
    "message_bytes",
    "preset",
    "read_metrics",
    "simulate",
    "task_of",
    "to_toml",
    "transcript_bytes",
]
