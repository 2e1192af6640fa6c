"""Checkpoints: atomic writes, integrity checks when reading, and no pickle."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbcl.errors import ProtocolError
from dbcl.files import SECRET, make_folder, write_atomic
from dbcl.protocol.codec import CHECKPOINT, pack, unpack
from dbcl.state import State

log = logging.getLogger(__name__)

KEEP = 2
_NAME = re.compile(r"round-(\d{8})\.dbcl")


def save(folder: Path, round: int, state: State) -> Path:
    """Write the checkpoint of a round atomically, and delete all but the two newest checkpoints.

    Args:
        folder: The folder of the checkpoints.
        round: Number of the round.
        state: The state to save.

    Returns:
        The path of the new checkpoint.

    Raises:
        ProtocolError: The folder holds a later round and so belongs to another run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save(Path(name), 7, State({}, {})).name
    'round-00000007.dbcl'
    """
    path = folder / f"round-{round:08d}.dbcl"
    make_folder(folder, secret=True)
    for later in [each for each in _all(folder) if each.name > path.name]:
        if _read(later) is not None:
            raise ProtocolError(
                f"{folder} holds round {_round(later)} already, and this is round {round}: of another run?"
            )
        later.unlink()  # half a file, which `load` has passed over
    write_atomic(path, pack(CHECKPOINT, state.values, state.tensors), mode=SECRET)  # it holds W and the round's secrets
    prune(folder)
    return path


def prune(folder: Path) -> None:
    """Delete all but the two newest checkpoints, including leftovers of interrupted processes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     for round in range(4):
    ...         Path(name, f"round-{round:08d}.dbcl").touch()
    ...     prune(Path(name))
    ...     sorted(path.name for path in Path(name).iterdir())
    ['round-00000002.dbcl', 'round-00000003.dbcl']
    """
    for old in _all(folder)[KEEP:]:
        old.unlink(missing_ok=True)


def load(folder: Path) -> State:
    """Read the newest undamaged checkpoint. Damaged checkpoints are skipped with a log message.

    Args:
        folder: The folder of the checkpoints.

    Returns:
        The saved state.

    Raises:
        ProtocolError: The folder has no checkpoint that can be loaded.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     _ = save(Path(name), 7, State({"round": 7}, {}))
    ...     _ = Path(name, "round-00000008.dbcl").write_bytes(b"half a file")
    ...     load(Path(name))
    State(values={'round': 7}, tensors={})
    """
    found = _all(folder)
    for path in found:
        state = _read(path)
        if state is None:
            continue
        if path != found[0] and _guarded(state.values):
            raise ProtocolError(
                f"{found[0]} is damaged, and {path.name} has a guarantee: going back to it would use a round's updates "
                "twice. Only if nothing of the later round has left the server, remove the damaged file and go on"
            )
        return state
    raise ProtocolError(f"no whole checkpoint in {folder}")


def _guarded(values: Any) -> bool:
    """Return True if a state or one of its parts belongs to a server with a guarantee."""
    # A server without a guarantee has an empty part of this name.
    return isinstance(values, Mapping) and (bool(values.get("guarantee")) or any(map(_guarded, values.values())))


def newest(folder: Path) -> int | None:
    """Return the round of the newest checkpoint in a folder, even if damaged, or None.

    >>> newest(Path("nowhere")) is None
    True
    """
    return next((_round(path) for path in _all(folder)), None)


def _read(path: Path) -> State | None:
    try:
        return State(*unpack(CHECKPOINT, path.read_bytes()))
    except ProtocolError as error:
        log.warning("passed over %s: %s", path.name, error)
        return None


def _round(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))


def _all(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("round-*.dbcl") if _NAME.fullmatch(path.name)), reverse=True)
