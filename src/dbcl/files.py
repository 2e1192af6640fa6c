"""Atomic file writes, folder locks between processes, and secret files."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from dbcl.errors import ConfigError

SECRET = 0o600
"""Mode of a file that only its owner may read; its folder has mode 0o700."""
SCRATCH = ".dbcl-"
"""Prefix of temporary files during an atomic write."""
LOCK = ".lock"


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path from user input, with a leading `~` expanded to the home folder.

    A shell does not expand `~` in quotes and after `=`.

    >>> user_path("runs/mine").as_posix(), user_path("~/mine") == Path.home() / "mine"
    ('runs/mine', True)
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}") from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to operating system errors without a path, such as the error of a full disk.

    >>> with naming(Path("runs/metrics.jsonl")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
        ...
    OSError: [Errno 28] No space left on device: 'runs/metrics.jsonl'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file atomically: after a crash, a reader finds either the old or the new content.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder, "a.txt"), b"whole")
    ...     Path(folder, "a.txt").read_bytes()
    b'whole'
    """
    # A fresh name that must not exist yet: there can be no link at it.
    scratch = path.with_name(f"{SCRATCH}{path.name}-{secrets.token_hex(8)}")
    try:
        with naming(path), open(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def make_folder(path: Path, *, secret: bool = False) -> None:
    """Create a folder and its parents and flush them to disk. A secret folder is readable only by
    its owner.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     make_folder(Path(name, "a", "b"), secret=True)
    ...     oct(Path(name, "a", "b").stat().st_mode & 0o777)
    '0o700'
    """
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700 if secret else 0o777)
        _sync_folder(path.parent)
    if secret:
        path.chmod(0o700)


def file_in_the_way(folder: Path) -> Path | None:
    """Return the file that occupies the path of a folder or of one of its parents, or None.

    >>> file_in_the_way(Path("nowhere")) is None
    True
    """
    return next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None)


def remove_scratch(folder: Path) -> None:
    """Remove the temporary files of a crashed process in a folder, recursively. The caller must
    hold the folder's lock.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     Path(name, ".dbcl-a.txt-0011").touch()
    ...     remove_scratch(Path(name))
    ...     list(Path(name).iterdir())
    []
    """
    for path in folder.rglob(f"{SCRATCH}*"):
        if path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes. The error names the process that holds the lock.

    The operating system releases the lock when the process ends, including after a crash.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name, locked(Path(name)):
    ...     with locked(Path(name)):
    ...         pass
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: ... is in use by process ...
    """
    handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), SECRET)
    try:
        holder = _holder(handle)
        if holder:
            raise ConfigError(f"{folder} is in use by {holder}")
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the name of one that is gone must not be taken for the next one's
                os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    """Lock a file, or return a description of the process that holds the lock."""
    for _ in range(100):
        if _try_lock(handle):
            return ""
        named = os.pread(handle, 200, 0).decode(errors="replace").strip()
        if named:
            return named
        time.sleep(0.01)
    return "another process"


def _try_lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system, which has no such lock: nothing is held
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot sync a folder
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
