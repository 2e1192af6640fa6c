"""The `dbcl` command: the only place that prints."""

from dbcl.cli.train import app, main

__all__ = ["app", "main"]
