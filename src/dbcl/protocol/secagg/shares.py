"""Sharing 16 secret bytes among clients, so that a number of them together have it and fewer have nothing.

Shamir's scheme is PyCryptodome's, which gives a wrong secret without a word when a share is wrong or too few are given.
So a secret comes back only where it fits what its owner has committed itself to.
"""

from collections.abc import Callable, Mapping
from itertools import combinations, islice

from Crypto.Protocol.SecretSharing import Shamir

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg.keys import SEED

TRIES = 64
"""So many sets of shares are tried, at most, to find one without a wrong share in it."""


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
    """The secret that `fits`, from shares by their client's number; wrong ones among them are passed over.

    >>> recovered({1: bytes(16), 2: bytes(16)}, 2, lambda secret: False)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: 2 shares, of which no 2 give the secret: at least 1 is wrong
    """
    whole = {number: share for number, share in shares.items() if len(share) == SEED}
    if len(whole) < threshold:
        raise ProtocolError(f"{len(whole)} shares, and {threshold} are needed")
    for some in islice(combinations(sorted(whole.items()), threshold), TRIES):
        secret = bytes(Shamir.combine(list(some), ssss=False))
        if fits(secret):
            return secret
    raise ProtocolError(f"{len(whole)} shares, of which no {threshold} give the secret: at least 1 is wrong")
