"""The `dbcl` command: answers Ctrl-C and SIGTERM from the first moment, before anything is loaded."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Load the commands and run one; an interruption is a short word and status 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        os.getcwd()
    except FileNotFoundError:  # here, since libraries that are loaded without one end the process
        print("error the current folder is gone; change into another one", file=sys.stderr)
        sys.exit(2)
    try:
        from dbcl.cli import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
