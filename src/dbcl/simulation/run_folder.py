"""Folder of a run: its settings, the digest of its data, and its atomic creation."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dbcl import seeds
from dbcl.data import DatasetExamples, Examples
from dbcl.errors import ConfigError, ProtocolError
from dbcl.files import LOCK, locked, make_folder
from dbcl.simulation.config import RunConfig
from dbcl.simulation.presets import read_toml

SAMPLE = 32
"""Number of examples read to recognise a dataset when a run is resumed. Tensors in memory are read
completely.
"""


def data_digest(sets: Sequence[Examples], *, exact: bool) -> str | None:
    """Return a digest of sets of examples; None if repeated reading gives different values.

    Args:
        sets: Sets of examples.
        exact: Read all examples. Otherwise only a sample of each dataset is read, because reading
            may be slow; datasets may also apply random augmentation.

    >>> import torch
    >>> from dbcl.data import examples_of
    >>> one, other = ([examples_of((torch.full((3, 2), value), torch.zeros(3)))] for value in (1.0, 2.0))
    >>> data_digest(one, exact=False) == data_digest(other, exact=False)
    False
    """

    def digest() -> str:
        held = (each.digest(SAMPLE if lazy(each) and not exact else None) for each in sets)
        return hashlib.sha256(b"".join(held)).hexdigest()

    def lazy(each: Examples) -> bool:
        return isinstance(each, DatasetExamples)

    first = digest()
    random = not exact and any(map(lazy, sets)) and digest() != first
    return None if random else first


def own_values(held: Any) -> tuple[bytes, Any]:
    """Return a run's seed and data digest from the values of a checkpoint."""
    try:
        seed, digest = bytes.fromhex(held["seed"]), held["data"]
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"the checkpoint is damaged: the run's seed and data cannot be read ({error!r})") from None
    if len(seed) != seeds.SEED_BYTES:
        raise ProtocolError(f"the checkpoint is damaged: the run's seed has {len(seed)} bytes, not {seeds.SEED_BYTES}")
    return seed, digest


def read_config(folder: Path) -> RunConfig:
    """Read the settings of a run from its folder.

    >>> read_config(Path("nowhere"))
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: nowhere holds no run: it has no config.toml
    """
    try:
        return read_toml(folder / "config.toml")
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no run: it has no config.toml") from None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is a file, and the run is its folder") from None
    except OSError as error:
        raise ConfigError(f"{folder / 'config.toml'} cannot be read: {error.strerror}") from None


def refuse_old(folder: Path) -> None:
    """Raise `ConfigError` for a non-empty folder, so that a new run cannot mix its files with old
    ones.

    >>> refuse_old(Path("nowhere"))
    """
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a run already; go on with it by `resume`, or choose another `folder`")
    if folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose another `folder`, or empty it")


@contextlib.contextmanager
def beginning(folder: Path) -> Iterator[None]:
    """Lock a new folder while a run is created in it. If the creation fails, remove all created
    files.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    ours = False
    try:
        make_folder(folder)
        with locked(folder):
            refuse_old(folder)  # of two that start at once, the second
            ours = True
            yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            if ours:  # it was empty, and was locked since
                for path in (*folder.glob("*"), folder / LOCK):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            elif isinstance(error, OSError) and folder in made and not any(folder.glob("*")):
                (folder / LOCK).unlink(missing_ok=True)
        for each in made:
            with contextlib.suppress(OSError):  # another process has put something there
                each.rmdir()
        raise
