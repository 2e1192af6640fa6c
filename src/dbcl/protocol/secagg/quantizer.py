"""Quantization for secure aggregation: integers modulo a power of two, for adding masked vectors.

A value in [-clip, clip] is stochastically rounded, without bias, to an integer of absolute value at
most L = 2^15 - 1. Sums of n honest clients lie in [-n L, n L]. The modulus is at least 4 n L. Sums
outside the interval are folded back towards zero (`Quantizer.steps`), so decoding is continuous
everywhere. Whatever malicious clients add, an honest client therefore changes the decoded sum by at
most the norm of its own vector.

Stochastic rounding can increase the norm of a vector. It is repeated until the norm is at most
`Quantizer.longest`; each trial succeeds with probability at least 1 - 1/sqrt(e). The resulting bias
is too small to measure here.
"""

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dbcl.errors import ConfigError, ProtocolError
from dbcl.privacy.distributed import longest_rounded

Words = NDArray[np.uint32]
LEVELS = (1 << 15) - 1
"""Integer value of the clip; values have 16 bits including the sign."""
MAX_CLIENTS = 1 << 10
_TRIES = 200


@dataclass(frozen=True)
class Quantizer:
    """Quantizer for sums of `clients` vectors with values and norms of at most `clip`.

    >>> quantizer = Quantizer(clip=4.0, clients=32)
    >>> quantizer.bits, quantizer.longest(1 << 20) / quantizer.clip < 1.0003
    (22, True)
    """

    clip: float
    clients: int

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf or not 1 <= self.clients <= MAX_CLIENTS:
            raise ConfigError(
                f"a quantizer has a bound above 0 and at most {MAX_CLIENTS} clients, got {self.clip} and {self.clients}"
            )

    @property
    def bits(self) -> int:
        """Bits per word, for the smallest modulus of at least four times the largest honest sum."""
        return word_bits(self.largest)

    @property
    def largest(self) -> int:
        """Maximum absolute value of a sum over honest clients, in steps."""
        return self.clients * LEVELS

    @property
    def step(self) -> float:
        """Value of one quantization step."""
        return self.clip / LEVELS

    def longest(self, count: int) -> float:
        """Return the largest norm after rounding of `count` values with norm at most `clip`.

        >>> Quantizer(clip=1.0, clients=2).longest(100) > 1.0
        True
        """
        return self.step * longest_rounded(LEVELS, count)

    def quantized(self, values: NDArray[np.float64], rng: np.random.Generator | None = None) -> Words:
        """Stochastically round values to integers.

        Raises:
            ProtocolError: The norm is above `clip`.

        >>> Quantizer(clip=1.0, clients=2).quantized(np.array([0.0, -0.5])).shape
        (2,)
        """
        length = float(np.linalg.norm(values))
        if not math.isfinite(length) and not np.isfinite(values).all():
            raise ProtocolError("the update holds NaN or infinity: nothing is sent")
        if length > self.clip * (1 + 1e-9):
            raise ProtocolError(f"the update is {length:.4g} long, and the bound is {self.clip:.4g}: nothing is sent")
        rounded = rounded_at_random(values / self.step, self.longest(len(values)) / self.step, rng)
        words: Words = np.clip(rounded, -LEVELS, LEVELS, out=rounded).astype(np.int32).view(np.uint32)
        words &= self.mask
        return words

    @property
    def mask(self) -> np.uint32:
        """Bit mask of a word."""
        return np.uint32((1 << self.bits) - 1)

    def steps(self, total: Words) -> NDArray[np.int64]:
        """Decode a sum as a number of steps: s if |s| <= n L, else sign(s) max(0, 2 n L - |s|).

        Sums of honest clients are never folded. The folding is 1-Lipschitz, including at the
        wrap-around of the modulus.

        >>> sums = np.array([2 * LEVELS, 3 * LEVELS, 4 * LEVELS], dtype=np.uint32)
        >>> Quantizer(clip=1.0, clients=2).steps(sums) / LEVELS
        array([2., 1., 0.])
        """
        return folded(total, self.bits, self.largest)

    def values(self, total: Words) -> NDArray[np.float64]:
        """Decode a sum of quantized vectors as floating-point values.

        >>> quantizer = Quantizer(clip=1.0, clients=2)
        >>> quantizer.values(quantizer.quantized(np.array([1.0, 0.0])) + quantizer.quantized(np.array([0.0, -1.0])))
        array([ 1., -1.])
        """
        decoded: NDArray[np.float64] = self.steps(total) * np.float64(self.step)
        return decoded


def word_bits(largest: int) -> int:
    """Return the bits per word for a modulus of at least four times the largest honest sum.

    `folded` requires this modulus.

    >>> word_bits(255), word_bits(256)
    (10, 10)
    """
    return (4 * largest - 1).bit_length()


def folded(total: Words, bits: int, largest: int) -> NDArray[np.int64]:
    """Decode words: s if |s| <= largest, else sign(s) max(0, 2 largest - |s|).

    The decoding is 1-Lipschitz everywhere.

    >>> folded(np.array([10, 15, 20, 54], dtype=np.uint32), bits=6, largest=10)
    array([ 10,   5,   0, -10])
    """
    half, whole = 1 << (bits - 1), 1 << bits
    numbers = total.astype(np.int64) & (whole - 1)
    numbers -= np.where(numbers >= half, whole, 0)
    sizes = np.abs(numbers)
    decoded: NDArray[np.int64] = np.sign(numbers) * np.minimum(sizes, np.maximum(2 * largest - sizes, 0))
    return decoded


def rounded_at_random(
    values: NDArray[np.float64], longest: float, rng: np.random.Generator | None = None
) -> NDArray[np.float64]:
    """Stochastically round values, without bias, until the norm is at most `longest`.

    >>> bool((rounded_at_random(np.array([1.0, 0.0]), longest=1.0) == [1.0, 0.0]).all())
    True
    """
    rng = rng or np.random.default_rng(secrets.randbits(128))
    low = np.floor(values)
    rest = (values - low).astype(np.float32)
    for _ in range(_TRIES):
        rounded: NDArray[np.float64] = low + (rng.random(len(values), dtype=np.float32) < rest)
        if float(np.linalg.norm(rounded)) <= longest:
            return rounded
    raise ProtocolError("no rounding of this update is short enough")  # below 1e-40


def packed(words: Words, bits: int) -> bytes:
    """Pack words of `bits` bits without gaps, least significant bit first.

    >>> len(packed(np.arange(8, dtype=np.uint32), 21))
    21
    """
    rows = np.zeros((-(-len(words) // 8), 8), dtype=np.uint32)  # eight words are `bits` whole bytes
    rows.reshape(-1)[: len(words)] = words
    out = np.zeros((len(rows), bits), dtype=np.uint8)
    for byte in range(bits):
        for word in range(8 * byte // bits, min(7, (8 * byte + 7) // bits) + 1):
            shift = word * bits - 8 * byte
            part = rows[:, word] << np.uint32(shift) if shift >= 0 else rows[:, word] >> np.uint32(-shift)
            out[:, byte] |= part.astype(np.uint8)
    return out.tobytes()[: -(-len(words) * bits // 8)]


def unpacked(data: bytes, bits: int, count: int) -> Words:
    """Unpack the words written by `packed`.

    Raises:
        ProtocolError: The data has the wrong length.

    >>> unpacked(packed(np.arange(5, dtype=np.uint32), 21), 21, 5)
    array([0, 1, 2, 3, 4], dtype=uint32)
    """
    if len(data) != -(-count * bits // 8):
        raise ProtocolError(f"{len(data)} bytes are not {count} words of {bits} bits")
    rows = -(-count // 8)  # eight words are `bits` whole bytes, and a word lies within the eight bytes where it begins
    padded = data + bytes((rows + 1) * bits - len(data) + 8)
    words = np.empty((rows, 8), dtype=np.uint32)
    for word in range(8):
        start, shift = divmod(word * bits, 8)
        eight = np.ndarray((rows,), dtype="<u8", buffer=padded, offset=start, strides=(bits,))
        words[:, word] = eight >> np.uint64(shift)
    words &= np.uint32((1 << bits) - 1)
    return words.reshape(-1)[:count]
