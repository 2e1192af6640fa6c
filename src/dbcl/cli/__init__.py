"""The `dbcl` command, with one module per subcommand. No other package prints to the terminal."""

from dbcl.cli.app import app, main

__all__ = ["app", "main"]
