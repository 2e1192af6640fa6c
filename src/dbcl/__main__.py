"""Entry point of the `dbcl` command. Handles Ctrl-C and SIGTERM before any import."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Load and run a command. After an interruption print a short message and return status 130."""
    # While libraries load there is nothing to end in order, and some of them lose an exception that comes in between.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        os.getcwd()
    except FileNotFoundError:  # here, since libraries that are loaded without one end the process
        print("error the current folder is gone; change into another one", file=sys.stderr)
        sys.exit(2)
    # Threads that wait for others sleep; where they spin, a busy neighbour costs three times the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from dbcl.cli import main as run

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped\n")
    os._exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
