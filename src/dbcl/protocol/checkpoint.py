"""Checkpoints: written whole or not at all, checked on the way back, never unpickled."""

import logging
import re
from pathlib import Path

from dbcl.errors import ProtocolError
from dbcl.files import write_atomic
from dbcl.protocol.codec import CHECKPOINT, pack, unpack
from dbcl.state import State

log = logging.getLogger(__name__)

KEEP = 2
_NAME = re.compile(r"round-(\d{8})\.dbcl")


def save(folder: Path, round: int, state: State) -> Path:
    """Write the checkpoint of a round and delete all but the last two.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     save(Path(name), 7, State({}, {})).name
    'round-00000007.dbcl'
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{round:08d}.dbcl"
    write_atomic(path, pack(CHECKPOINT, state.values, state.tensors), mode=0o600)  # it holds W and the round's secrets
    for old in _all(folder)[KEEP:]:
        old.unlink(missing_ok=True)
    return path


def load(folder: Path) -> State:
    """Read the newest checkpoint that is whole; a damaged one is named in the log and passed over.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     _ = save(Path(name), 7, State({"round": 7}, {}))
    ...     _ = Path(name, "round-00000008.dbcl").write_bytes(b"half a file")
    ...     load(Path(name))
    State(values={'round': 7}, tensors={})
    """
    for path in _all(folder):
        try:
            return State(*unpack(CHECKPOINT, path.read_bytes()))
        except ProtocolError as error:
            log.warning("passed over %s: %s", path.name, error)
    raise ProtocolError(f"no whole checkpoint in {folder}")


def _all(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("round-*.dbcl") if _NAME.fullmatch(path.name)), reverse=True)
