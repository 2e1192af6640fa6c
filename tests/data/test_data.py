import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dbcl import data
from dbcl.data import fetch
from dbcl.data.fetch import SOURCES, Remote
from dbcl.errors import DataError

SEED = bytes(range(32))


def test_the_digits_come_with_the_package() -> None:
    digits = data.load("digits", "/nowhere")
    assert digits.y_train.bincount().tolist() == [400] * 10
    assert digits.y_test.bincount().tolist() == [100] * 10
    assert abs(digits.x_train.mean()) < 1e-3
    assert abs(digits.x_train.std() - 1) < 1e-3
    pixels = (digits.x_train * digits.std + digits.mean) * 255
    assert pixels.min() > -0.1
    assert pixels.max() < 255.1
    # No held-out digit is among those to learn from.
    train = {hashlib.sha256(image.numpy().tobytes()).digest() for image in digits.x_train}
    test = {hashlib.sha256(image.numpy().tobytes()).digest() for image in digits.x_test}
    assert not train & test


@pytest.mark.parametrize(
    ("name", "relative", "train", "test", "outputs"),
    [
        ("mnist", "MNIST/raw", (60000, 1, 28, 28), (10000, 1, 28, 28), 10),
        ("cifar10", "cifar-10-batches-bin", (50000, 3, 32, 32), (10000, 3, 32, 32), 10),
        ("lfw", "lfw/lfw.npz", (9228, 3, 62, 47), (3955, 3, 62, 47), 1),
    ],
)
def test_real_datasets(
    name: str, relative: str, train: tuple, test: tuple, outputs: int, real_data: Callable[[str], Path]
) -> None:
    real_data(relative)
    found = data.load(name)
    assert tuple(found.x_train.shape) == train
    assert tuple(found.x_test.shape) == test
    assert found.outputs == outputs
    assert torch.isfinite(found.x_train).all()


def test_the_embedded_digits_are_real_mnist(real_data: Callable[[str], Path]) -> None:
    real_data("MNIST/raw")
    mnist, digits = data.load("mnist"), data.load("digits")

    def images(dataset: data.Dataset) -> set[bytes]:
        pixels = torch.cat([dataset.x_train, dataset.x_test]) * dataset.std + dataset.mean
        return {image.tobytes() for image in (pixels * 255).round().byte().numpy()}

    assert images(digits) <= images(mnist)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def write_mnist(root: Path, zipped: bool = True) -> Path:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images, labels = np.arange(5 * 784).astype(np.uint8).reshape(5, 28, 28), np.arange(5).astype(np.uint8)
    for part in ("train", "t10k"):
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return folder


def zipped(data: bytes) -> bytes:
    """Without the time of day, which would give the tests other names in every process that collects them."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_is_read_zipped_or_not(tmp_path: Path, zipped: bool) -> None:
    write_mnist(tmp_path, zipped)
    found = data.load("mnist", tmp_path)
    assert found.y_test.tolist() == [0, 1, 2, 3, 4]
    assert tuple(found.x_train.shape) == (5, 1, 28, 28)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-images-idx3-ubyte.gz", b"no gzip", "damaged"),
        ("train-images-idx3-ubyte.gz", zipped(b"\0\0\x08\x03abc"), "is no idx file of 3-dimensional bytes"),
        ("t10k-labels-idx1-ubyte.gz", zipped(idx(np.arange(4, dtype=np.uint8))), "5 images and 4 labels"),
        (
            "t10k-labels-idx1-ubyte.gz",
            zipped(idx(np.full(5, 11, dtype=np.uint8))),
            "label 11 and only 10 classes",
        ),
    ],
)
def test_damaged_mnist_is_refused(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    (write_mnist(tmp_path) / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.load("mnist", tmp_path)


def test_damaged_cifar_and_lfw_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (folder / name).write_bytes(bytes(3073 * 2))
    assert len(data.load("cifar10", tmp_path).x_train) == 10
    (folder / "data_batch_3.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, match="3072 bytes are no whole number of records"):
        data.load("cifar10", tmp_path)
    (tmp_path / "lfw").mkdir()
    for content in (b"junk", b"PK\x03\x04broken"):
        (tmp_path / "lfw" / "lfw.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"is not in the lfw\.npz layout"):
            data.load("lfw", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "lfw"])
def test_a_missing_dataset_says_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"is missing; .*`data_dir` or DBCL_DATA"):
        data.load(name, tmp_path)


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="no dataset 'imagenet'; choose digits, mnist, cifar10, lfw"):
        data.load("imagenet")


def served(path: Path, content: bytes, to: str) -> Remote:
    path.write_bytes(content)
    return Remote(path.as_uri(), f"sha256:{hashlib.sha256(content).hexdigest()}", to)


def test_fetch_downloads_checks_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_mnist(tmp_path / "source")
    remotes = tuple(served(path, path.read_bytes(), f"MNIST/raw/{path.name}") for path in sorted(source.iterdir()))
    monkeypatch.setitem(SOURCES, "mnist", remotes)
    seen = []
    written = fetch("mnist", tmp_path / "data", progress=lambda *step: seen.append(step))
    assert len(written) == 4
    assert seen[0][0].endswith(".gz")
    assert len(data.load("mnist", tmp_path / "data").x_train) == 5
    seen.clear()
    fetch("mnist", tmp_path / "data", progress=lambda *step: seen.append(step))
    assert seen == []  # what is there is left alone


def test_fetch_unpacks_an_archive_by_last_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("cifar-10-batches-bin/test_batch.bin", "../../evil.bin", "cifar-10-batches-bin/readme.html"):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    monkeypatch.setitem(SOURCES, "cifar10", (served(tmp_path / "x.tar.gz", buffer.getvalue(), "cifar-10-batches-bin"),))
    fetch("cifar10", tmp_path / "data")
    assert sorted(p.name for p in (tmp_path / "data" / "cifar-10-batches-bin").iterdir()) == [
        "evil.bin",
        "test_batch.bin",
    ]
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["cifar-10-batches-bin"]


def test_fetch_keeps_nothing_that_does_not_fit_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = served(tmp_path / "file.gz", b"right", "MNIST/raw/file.gz")
    (tmp_path / "file.gz").write_bytes(b"wrong")
    monkeypatch.setitem(SOURCES, "mnist", (remote,))
    with pytest.raises(DataError, match=r"and must be .*; nothing was kept"):
        fetch("mnist", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_fetch_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "mnist", (Remote((tmp_path / "gone.gz").as_uri(), "sha256:00", "MNIST/raw/x.gz"),))
    with pytest.raises(DataError, match=r"cannot download .*without a network, put the file at MNIST/raw/x.gz"):
        fetch("mnist", tmp_path)
    with pytest.raises(DataError, match="LFW cannot be fetched"):
        fetch("lfw", tmp_path)


LABELS = np.arange(1000) % 10


@pytest.mark.parametrize(
    "parts",
    [
        data.iid(LABELS, 7, seed=SEED),
        data.dirichlet(LABELS, 7, alpha=0.3, seed=SEED),
        data.dirichlet(LABELS, 300, alpha=0.01, seed=SEED),
        data.shards(LABELS, 7, seed=SEED),
    ],
    ids=["iid", "dirichlet", "dirichlet-extreme", "shards"],
)
def test_a_partition_deals_every_example_once(parts: list[np.ndarray]) -> None:
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    assert min(map(len, parts)) >= 1


def test_partitions_are_as_uneven_as_asked() -> None:
    def classes(parts: list[np.ndarray]) -> float:
        return float(np.mean([len(np.unique(LABELS[part])) for part in parts]))

    assert classes(data.iid(LABELS, 10, seed=SEED)) == 10
    assert classes(data.shards(LABELS, 10, seed=SEED)) <= 2
    uneven, even = (classes(data.dirichlet(LABELS, 10, alpha=alpha, seed=SEED)) for alpha in (0.05, 100))
    assert uneven < 5 < 9.5 < even
    assert [len(part) for part in data.iid(LABELS, 3, seed=SEED)] == [334, 333, 333]


@pytest.mark.parametrize("clients", [0, 1001])
def test_a_partition_that_cannot_be_is_refused(clients: int) -> None:
    with pytest.raises(DataError, match=f"1000 examples cannot be divided into {clients} parts"):
        data.iid(LABELS, clients, seed=SEED)
    with pytest.raises(DataError, match="alpha must be above 0"):
        data.dirichlet(LABELS, 2, alpha=0, seed=SEED)
