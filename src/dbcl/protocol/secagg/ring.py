"""Numbers as whole numbers that can be added under masks: fixed point in a ring of a power of two.

A value in [-bound, bound] becomes a whole number of at most 2^15 - 1 in size, by rounding up or down at random so that
its mean is the value. The ring has as many bits as the sum of all clients needs, so that no sum can overflow, whatever
honest clients send; and a client cannot send a number outside of the ring, so that what one bad client can do to a
coordinate is bounded by half the ring.

Rounding makes a vector longer. It is drawn again until it is not longer than `Ring.longest`, which happens with a
probability of at least 1 - 1/sqrt(e) at each try; the mean is then off by an amount that no test here can see.
"""

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dbcl.errors import ConfigError, ProtocolError

Words = NDArray[np.uint32]
LEVELS = (1 << 15) - 1
"""The bound becomes this number: values have 16 bits with their sign."""
MOST_CLIENTS = 1 << 10
_TRIES = 200


@dataclass(frozen=True)
class Ring:
    """The ring in which `clients` vectors are added whose values, and whose length, are at most `bound`.

    >>> ring = Ring(bound=4.0, clients=32)
    >>> ring.bits, ring.longest(1 << 20) / ring.bound < 1.0003
    (21, True)
    """

    bound: float
    clients: int

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf or not 1 <= self.clients <= MOST_CLIENTS:
            raise ConfigError(
                f"a ring has a bound above 0 and at most {MOST_CLIENTS} clients, got {self.bound} and {self.clients}"
            )

    @property
    def bits(self) -> int:
        """What the sum needs: a sign, and `clients` times the largest number."""
        return 1 + (self.clients * LEVELS).bit_length()

    @property
    def step(self) -> float:
        """What 1 in the ring stands for."""
        return self.bound / LEVELS

    def longest(self, count: int) -> float:
        """The most that `count` rounded values, whose length was at most `bound`, can have as a length.

        >>> Ring(bound=1.0, clients=2).longest(100) > 1.0
        True
        """
        # Kairouz, Liu and Steinke (2021), proposition 22, with beta = exp(-1/2).
        stretched = math.sqrt(LEVELS**2 + count / 4 + LEVELS + math.sqrt(count) / 2)
        return self.step * min(stretched, LEVELS + math.sqrt(count))

    def quantized(self, values: NDArray[np.float64], rng: np.random.Generator | None = None) -> Words:
        """The values as numbers of the ring, rounded at random; longer than `bound` they are refused.

        >>> Ring(bound=1.0, clients=2).quantized(np.array([0.0, -0.5])).shape
        (2,)
        """
        length = float(np.linalg.norm(values))
        if not math.isfinite(length) and not np.isfinite(values).all():
            raise ProtocolError("the update holds NaN or infinity: nothing is sent")
        if length > self.bound * (1 + 1e-9):
            raise ProtocolError(f"the update is {length:.4g} long, and the bound is {self.bound:.4g}: nothing is sent")
        rng = rng or np.random.default_rng(secrets.randbits(128))
        rounded = values / self.step
        low = np.floor(rounded)
        rest = np.subtract(rounded, low, out=rounded).astype(np.float32)
        for _ in range(_TRIES):
            np.add(low, rng.random(len(values), dtype=np.float32) < rest, out=rounded)
            if self.step * float(np.linalg.norm(rounded)) <= self.longest(len(values)):
                words: Words = np.clip(rounded, -LEVELS, LEVELS, out=rounded).astype(np.int32).view(np.uint32)
                words &= self.mask
                return words
        raise ProtocolError("no rounding of this update is short enough")  # below 1e-40

    @property
    def mask(self) -> np.uint32:
        """A word with the ring's bits set."""
        return np.uint32((1 << self.bits) - 1)

    def values(self, total: Words) -> NDArray[np.float64]:
        """What a sum in the ring stands for.

        >>> ring = Ring(bound=1.0, clients=2)
        >>> ring.values(ring.quantized(np.array([1.0, 0.0])) + ring.quantized(np.array([0.0, -1.0])))
        array([ 1., -1.])
        """
        half, whole = 1 << (self.bits - 1), 1 << self.bits
        numbers = (total & self.mask).astype(np.int64)
        return np.where(numbers >= half, numbers - whole, numbers) * self.step


def packed(words: Words, bits: int) -> bytes:
    """Words of so many bits one after the other, without gaps, the lowest bit first.

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
    """The words that `packed` wrote; refuses bytes of another length.

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
