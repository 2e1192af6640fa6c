"""Masks: pseudo-random words derived from a key and added to a vector to hide it.

The words are the ChaCha20 stream (RFC 8439). Each key generates only one mask, so the nonce is
zero.
"""

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from dbcl.protocol.secagg.quantizer import Words

PIECE = 1 << 15
"""Number of words generated and added per step, small enough for the CPU cache."""


def add_masks(words: Words, plus: Iterable[bytes] = (), minus: Iterable[bytes] = ()) -> None:
    """Add and subtract masks in place, modulo 2^32.

    Args:
        words: The vector.
        plus: Keys of the masks to add.
        minus: Keys of the masks to subtract.

    >>> words = np.zeros(3, dtype=np.uint32)
    >>> add_masks(words, plus=[bytes(32)])
    >>> add_masks(words, minus=[bytes(32)])
    >>> words
    array([0, 0, 0], dtype=uint32)
    """
    zeros, made = bytes(4 * PIECE), bytearray(4 * PIECE)
    mask = np.frombuffer(made, dtype="<u4")
    for keys, operation in ((plus, np.add), (minus, np.subtract)):
        for key in keys:
            stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
            for start in range(0, len(words), PIECE):
                piece = words[start : start + PIECE]
                stream.update_into(zeros[: 4 * len(piece)], made)
                operation(piece, mask[: len(piece)], out=piece)
