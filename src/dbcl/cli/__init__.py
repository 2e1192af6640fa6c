"""The `dbcl` command: one file for each of its commands. Only this package prints."""

from dbcl.cli.app import app, main

__all__ = ["app", "main"]
