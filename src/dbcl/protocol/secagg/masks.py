"""Masks: pseudo-random words from a key, added to a vector to hide it.

The stream is ChaCha20's (RFC 8439), one key for one mask, so the nonce is zero.
"""

from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from dbcl.protocol.secagg.quantizer import Words

PIECE = 1 << 15
"""Number of words that are made and added at a time: they stay in the cache."""


def add_masks(words: Words, plus: Iterable[bytes] = (), minus: Iterable[bytes] = ()) -> None:
    """Add the masks of some keys to words in place, and subtract those of others, modulo 2^32.

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
