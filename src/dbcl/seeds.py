"""Deterministic random values, identical on the server and all clients.

Every random value is a pure function of a seed and labels. The words come from SHAKE-256 and are
therefore the same on every machine, operating system, device and library version. PyTorch's
generators do not guarantee this.
"""

import hashlib
import math
import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEED_BYTES = 32

Label = str | int


def fresh() -> bytes:
    """Return a fresh secret seed from the operating system.

    >>> len(fresh()), fresh() == fresh()
    (32, False)
    """
    return secrets.token_bytes(SEED_BYTES)


def derive(seed: bytes, *labels: Label) -> bytes:
    """Derive a seed from a seed and labels. Without knowledge of `seed`, the result is
    indistinguishable from a random seed.

    Args:
        seed: The parent seed.
        labels: Labels of the derived seed.

    >>> derive(bytes(32), "veil", 3).hex()[:16]
    '03d46df1d27055e4'
    """
    return _stream(seed, labels, SEED_BYTES)


def words(seed: bytes, *labels: Label, n: int) -> NDArray[np.uint64]:
    """Return `n` uniform 64-bit words.

    Args:
        seed: The seed.
        labels: Labels of the stream.
        n: Number of words.

    >>> words(bytes(32), "count-v1", 0, "fc1.weight", n=2)
    array([ 9664167622409975213, 10009747576958559294], dtype=uint64)
    """
    return np.frombuffer(_stream(seed, labels, 8 * n), dtype="<u8").astype(np.uint64)


def permutation(seed: bytes, *labels: Label, n: int) -> NDArray[np.int64]:
    """Return a uniform permutation of 0..n-1, computed by a stable sort of random words.

    Args:
        seed: The seed.
        labels: Labels of the stream.
        n: Length of the permutation.

    >>> permutation(bytes(32), "order", n=5)
    array([0, 1, 4, 3, 2])
    """
    return np.argsort(words(seed, *labels, n=n), kind="stable").astype(np.int64)


def normals(seed: bytes, *labels: Label, n: int) -> NDArray[np.float64]:
    """Return `n` standard normal values by the Box-Muller method. They are as secret as the seed.

    Args:
        seed: The seed.
        labels: Labels of the stream.
        n: Number of values.

    >>> normals(bytes(32), "veil", n=2).round(3)
    array([0.538, 0.925])
    """
    return _box_muller(words(seed, *labels, n=(n + 1) // 2), n)


def _box_muller(drawn: NDArray[np.uint64], n: int) -> NDArray[np.float64]:
    # One word for two numbers: 32 bits of radius, 32 of angle.
    radius = np.sqrt(-2.0 * np.log(((drawn >> np.uint64(32)) + np.uint64(1)) * 2.0**-32))  # of a number in (0, 1]
    angle = (drawn & np.uint64(0xFFFFFFFF)) * (2.0 * math.pi * 2.0**-32)
    turned = torch.from_numpy(angle)  # PyTorch's sine and cosine take a third of the time of NumPy's
    return np.concatenate([radius * turned.cos().numpy(), radius * turned.sin().numpy()])[:n]


def normals_on(device: torch.device, drawn: NDArray[np.uint64], n: int) -> Tensor:
    """Return the values that `normals` computes from the same words, computed on a device. Only the
    words are copied.

    On a GPU, sine and cosine may differ from the CPU's in the last digit.

    >>> normals_on(torch.device("cpu"), words(bytes(32), "veil", n=1), 2).round(decimals=3)
    tensor([0.5380, 0.9250], dtype=torch.float64)
    """
    if device.type == "cpu":
        return torch.from_numpy(_box_muller(drawn, n))
    # From memory that is locked in its place the copy is queued; else it would wait for all that the device has to do.
    there = torch.from_numpy(drawn.view(np.int64)).pin_memory().to(device, non_blocking=True)
    high = (there >> 32) & 0xFFFFFFFF
    radius = ((high + 1).double() * 2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = (there & 0xFFFFFFFF).double() * (2.0 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]


def fine_normals_on(device: torch.device, drawn: NDArray[np.uint64], n: int) -> Tensor:
    """Return `n` standard normal values on a device by Box-Muller, with 64 bits of radius.

    Each pair of values uses two words, n + n % 2 in total. With 64 bits the values reach 9.4
    standard deviations, which a guarantee at a delta of 1e-20 requires; `normals_on` has 32 bits
    and reaches 6.7. On a GPU the last digit may differ from the CPU's.

    >>> fine_normals_on(torch.device("cpu"), words(bytes(32), "fine", n=2), 2).shape
    torch.Size([2])
    >>> fine_normals_on(torch.device("cpu"), np.zeros(2, dtype=np.uint64), 2)[0].item()  # the smallest radius word
    9.419...
    """
    radius, angle = (_as_double(half, device) for half in np.split(drawn, 2))
    radius = radius.add_(1.0).mul_(2.0**-64).log_().mul_(-2.0).sqrt_()  # of a value in (0, 1]
    angle.mul_(2.0 * math.pi * 2.0**-64)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]


def _as_double(drawn: NDArray[np.uint64], device: torch.device) -> Tensor:
    """Return unsigned words as float64 on a device. PyTorch supports only signed 64-bit words."""
    if device.type == "cpu":
        return torch.from_numpy(drawn.astype(np.float64))
    there = torch.from_numpy(drawn.view(np.int64)).pin_memory().to(device, non_blocking=True)
    return ((there >> 32) & 0xFFFFFFFF).double() * 2.0**32 + (there & 0xFFFFFFFF).double()


def _stream(seed: bytes, labels: tuple[Label, ...], size: int) -> bytes:
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, got {len(seed)}")
    shake = hashlib.shake_256(b"dbcl" + seed)
    for label in labels:
        # A type letter and a length before each label: no two lists of labels give the same input.
        kind, text = (b"s", label.encode()) if isinstance(label, str) else (b"i", str(label).encode())
        shake.update(kind + len(text).to_bytes(4, "little") + text)
    return shake.digest(size)
