"""Explicit downloads of datasets, verified by digest."""

import hashlib
import http.client
import io
import shutil
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dbcl.errors import DataError
from dbcl.files import file_in_the_way, write_atomic

Progress = Callable[[str, int, int], None]
"""Callback with a file name, the number of downloaded bytes, and the total number of bytes (0 if
unknown).
"""


@dataclass(frozen=True)
class Remote:
    """File to download: URL, SHA-256 digest, and path under the data folder."""

    url: str
    digest: str  # algorithm:hex
    to: str


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SOURCES: dict[str, tuple[Remote, ...]] = {
    "mnist": tuple(
        Remote(f"{_MNIST}{name}.gz", f"sha256:{digest}", f"MNIST/raw/{name}.gz")
        for name, digest in (
            ("train-images-idx3-ubyte", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            ("train-labels-idx1-ubyte", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            ("t10k-images-idx3-ubyte", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            ("t10k-labels-idx1-ubyte", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        )
    ),
    "cifar10": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
        ),
    ),
}

_LFW = (
    "LFW cannot be fetched: its pictures have an official address, but the gender and other labels that the task needs"
    " are hand-made additions without one. Build lfw/lfw.npz yourself; docs/data.md gives the layout."
)


def fetch(name: str, root: Path, *, progress: Progress = lambda *_: None) -> list[Path]:
    """Download a dataset from its official URL. Existing files are kept.

    Args:
        name: Name of the dataset.
        root: Root folder of the datasets.
        progress: Callback for the progress of each file.

    Returns:
        Paths of the files.

    Raises:
        DataError: The dataset has no download, or a download failed.

    >>> fetch("digits", Path("data"))
    Traceback (most recent call last):
        ...
    dbcl.errors.DataError: the digits come with dbcl; there is nothing to fetch
    """
    if name == "digits":
        raise DataError("the digits come with dbcl; there is nothing to fetch")
    if name == "lfw":
        raise DataError(_LFW)
    if name not in SOURCES:
        raise DataError(f"no dataset {name!r}; choose {', '.join(SOURCES)}")
    if taken := file_in_the_way(root):
        raise DataError(f"datasets cannot lie under {root}: {taken} is a file")
    written = []
    for remote in SOURCES[name]:
        path = root / remote.to
        if not path.exists():
            data = download(remote, progress)
            if remote.url.endswith(".tar.gz"):
                _unpack(data, path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, data)
        written.append(path)
    return written


def download(remote: Remote, progress: Progress) -> bytes:
    """Download one file into memory and verify its digest."""
    name = remote.url.rsplit("/", 1)[-1]
    try:
        with urllib.request.urlopen(remote.url, timeout=30) as answer:
            told = answer.headers.get("Content-Length") or ""
            size = int(told) if told.isdecimal() else 0
            data = bytearray()
            while chunk := answer.read(1 << 18):
                data += chunk
                progress(name, len(data), size)
    except (OSError, http.client.HTTPException) as error:  # the first is also what urllib raises
        raise DataError(
            f"cannot download {remote.url} ({error}); without a network, put the file at {remote.to}"
            " under `data_dir` or DBCL_DATA by hand"
        ) from error
    algorithm, _, expected = remote.digest.partition(":")
    found = hashlib.new(algorithm, bytes(data), usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(f"{remote.url}: its {algorithm} is {found} and must be {expected}; nothing was kept")
    return bytes(data)


def _unpack(data: bytes, folder: Path) -> None:
    """Extract the .bin and .txt members of an archive to a folder under their base names. Extracts
    all members or none.
    """
    scratch = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            name = Path(member.name).name
            file = archive.extractfile(member) if member.isfile() and name.endswith((".bin", ".txt")) else None
            if file is not None:
                write_atomic(scratch / name, file.read())
    scratch.rename(folder)
