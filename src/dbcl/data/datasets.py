"""Public datasets in their original file formats, and an embedded digits dataset."""

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl import seeds
from dbcl.errors import DataError
from dbcl.files import user_path

Bytes = NDArray[np.uint8]
EMBEDDED = "digits"
"""Dataset embedded in the package. All other datasets are read from files."""
DAMAGED = (ValueError, TypeError, LookupError, OSError, EOFError, zipfile.BadZipFile, zlib.error)
"""Exceptions that reading a damaged file can raise."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and held-out images of a dataset.

    Pixels are scaled to [0, 1] and standardised by `mean` and `std` of the training pixels.

    >>> digits = load("digits")
    >>> tuple(digits.x_train.shape), tuple(digits.x_test.shape), digits.outputs
    ((4000, 1, 28, 28), (1000, 1, 28, 28), 10)
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    outputs: int
    mean: float
    std: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one example: (channels, height, width)."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a dataset from local files, without any download.

    Args:
        name: Name of the dataset.
        data_dir: Folder of the datasets; by default the environment variable DBCL_DATA, or
            ~/.cache/dbcl.

    Raises:
        DataError: The dataset is unknown, missing or damaged.
    """
    if name not in LOADERS:
        raise DataError(f"no dataset {name!r}; choose {', '.join(LOADERS)}")
    return LOADERS[name](data_root(data_dir))


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the root folder of the datasets.

    >>> data_root("/data").as_posix()
    '/data'
    """
    named = data_dir or os.environ.get("DBCL_DATA")
    if named:
        return user_path(named)
    try:
        return Path.home() / ".cache" / "dbcl"
    except RuntimeError:
        raise DataError("there is no home folder here: say by `data_dir` or DBCL_DATA where datasets lie") from None


def _digits(root: Path) -> Dataset:
    # 5,000 digits of MNIST, 500 of each kind, in order; every fifth is held out.
    with resources.as_file(resources.files("dbcl.data") / "digits.npz") as path, np.load(path) as file:
        images, labels = file["images"][:, None], file["labels"]
    held_out = np.arange(len(labels)) % 5 == 4
    return _dataset("digits", images[~held_out], labels[~held_out], images[held_out], labels[held_out], 10)


def _mnist(root: Path) -> Dataset:
    folder = root / "MNIST" / "raw"
    x_train, x_test = (_idx(folder, f"{part}-images-idx3-ubyte", 3)[:, None] for part in ("train", "t10k"))
    y_train, y_test = (_idx(folder, f"{part}-labels-idx1-ubyte", 1) for part in ("train", "t10k"))
    return _dataset("mnist", x_train, y_train, x_test, y_test, 10)


def _cifar10(root: Path) -> Dataset:
    folder = root / "cifar-10-batches-bin"
    parts = []
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        data = np.frombuffer(_read(folder / name, "cifar10"), dtype=np.uint8)
        if data.size == 0 or data.size % 3073:
            raise DataError(f"{folder / name}: {data.size} bytes are no whole number of records of 3073 bytes")
        parts.append(data.reshape(-1, 3073))
    train, test = np.concatenate(parts[:-1]), parts[-1]
    images = [part[:, 1:].reshape(-1, 3, 32, 32) for part in (train, test)]
    return _dataset("cifar10", images[0], train[:, 0], images[1], test[:, 0], 10)


def _lfw(root: Path) -> Dataset:
    path = root / "lfw" / "lfw.npz"
    if not path.exists():
        raise _missing(path, "lfw")
    try:
        with open(path, "rb") as stream, np.load(stream) as file:  # allow_pickle is False unless asked for
            known = file["black"] >= 0
            images, gender = file["images"][known].transpose(0, 3, 1, 2), file["gender"][known]
    except DAMAGED as error:
        raise DataError(f"{path}: is not in the lfw.npz layout of docs/data.md ({error})") from error
    order = seeds.permutation(bytes(32), "lfw-split", n=len(gender))
    train, test = np.split(order, [int(0.7 * len(order))])
    return _dataset("lfw", images[train], gender[train], images[test], gender[test], 1)


LOADERS: dict[str, Callable[[Path], Dataset]] = {"digits": _digits, "mnist": _mnist, "cifar10": _cifar10, "lfw": _lfw}


def _dataset(name: str, x_train: Bytes, y_train: Bytes, x_test: Bytes, y_test: Bytes, outputs: int) -> Dataset:
    for images, labels in ((x_train, y_train), (x_test, y_test)):
        if not len(labels):
            raise DataError(f"{name}: there is not one example to learn from, or none held out")
        if len(images) != len(labels):
            raise DataError(f"{name}: {len(images)} images and {len(labels)} labels")
        if labels.max(initial=0) >= max(outputs, 2):
            raise DataError(f"{name}: label {labels.max()} and only {max(outputs, 2)} classes")
    pixels = [torch.from_numpy(np.array(images)).float().div_(255) for images in (x_train, x_test)]
    mean, std = round(float(pixels[0].mean()), 4), round(float(pixels[0].std()), 4)
    train, test = (part.sub_(mean).div_(std) for part in pixels)
    classes = [torch.from_numpy(labels.astype(np.int64)) for labels in (y_train, y_test)]
    return Dataset(name, train, classes[0], test, classes[1], outputs, mean, std)


def _idx(folder: Path, name: str, ndim: int) -> Bytes:
    path = folder / f"{name}.gz"
    if not path.exists() and (folder / name).exists():
        path = folder / name
    data = _read(path, "mnist")
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged ({error})") from error
    start = 4 + 4 * ndim
    sizes = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
    if data[:4] != bytes([0, 0, 8, ndim]) or len(data) != start + math.prod(sizes):
        raise DataError(f"{path}: is no idx file of {ndim}-dimensional bytes, or is cut short")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(sizes)


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise _missing(path, name) from None


def _missing(path: Path, name: str) -> DataError:
    remedy = "docs/data.md says how to make it" if name == "lfw" else f"try `dbcl data fetch {name}`"
    return DataError(f"{path} is missing; {remedy}, or point `data_dir` or DBCL_DATA to where it lies")
