"""Sharing 16 secret bytes among clients, so that a number of them together have it and fewer have nothing.

Shamir's scheme is PyCryptodome's, which gives a wrong secret without a word when a share is wrong or too few are given.
So a secret comes back only where it fits what its owner has committed itself to.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from Crypto.Protocol.SecretSharing import Shamir, _Element

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg.keys import SEED


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares for the clients 1 to `count`, in order, of which any `threshold` give the secret.

    >>> shares = split(bytes(16), threshold=2, count=3)
    >>> recovered({1: shares[0], 3: shares[2]}, 2, lambda secret: secret == bytes(16)) == bytes(16)
    True
    """
    if len(secret) != SEED or not 2 <= threshold <= count:
        raise ProtocolError(f"no sharing of {len(secret)} bytes among {count} with threshold {threshold}")
    return [bytes(share) for _, share in Shamir.split(threshold, count, secret, ssss=False)]


def recovered(shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]) -> bytes:
    """The secret that `fits`, from shares by their client's number.

    Every share must be one that its owner has made, which their digests tell. Then it is the owner's doing where they
    do not fit together.

    >>> recovered({1: bytes(16), 2: bytes(16)}, 2, lambda secret: False)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: its shares do not give what it has committed itself to
    """
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares, and {threshold} are needed")
    some = sorted(shares.items())[:threshold]
    found = _Element(0)
    for factor, (_, share) in zip(_factors(tuple(number for number, _ in some)), some, strict=True):
        found = found + _product(factor, _Element(share))
    secret = found.encode()
    if not fits(secret):
        raise ProtocolError("its shares do not give what it has committed itself to")
    return secret


@lru_cache(maxsize=64)
def _factors(numbers: tuple[int, ...]) -> tuple[_Element, ...]:
    """What the shares of these clients are multiplied by, and added up, to give the secret.

    They are the same for the secrets of a whole group, and nearly all the work of `Shamir.combine`, which makes them
    anew for each: so its field is used here and not itself, and a test compares the two.
    """
    factors = []
    for own in numbers:
        above, below = _Element(1), _Element(1)
        for other in numbers:
            if other != own:
                above = _product(above, _Element(other))
                below = _product(below, _Element(own) + _Element(other))
        factors.append(_product(above, below.inverse()))
    return tuple(factors)


def _product(one: _Element, other: Any) -> _Element:  # PyCryptodome's own types say that the other is an int
    product: _Element = one * other
    return product
