"""Threshold secret sharing of 16-byte secrets among clients.

PyCryptodome's implementation of Shamir's scheme returns a wrong secret without an error if a share
is wrong or too few shares are given. A secret is therefore used only if it matches its owner's
commitment. PyCryptodome's field arithmetic reconstructs many secrets at once; a test compares the
result with `Shamir.combine`.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from Crypto.Protocol.SecretSharing import Shamir, _div_gf2, _Element, _mult_gf2

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg.keys import SEED


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into shares for clients 1 to `count`; any `threshold` shares recover it.

    >>> shares = split(bytes(16), threshold=2, count=3)
    >>> combined([{1: shares[0], 3: shares[2]}], 2) == [bytes(16)]
    True
    """
    if len(secret) != SEED or not 2 <= threshold <= count:
        raise ProtocolError(f"no sharing of {len(secret)} bytes among {count} with threshold {threshold}")
    return [bytes(share) for _, share in Shamir.split(threshold, count, secret, ssss=False)]


def combined(many: Sequence[Mapping[int, bytes]], threshold: int) -> list[bytes]:
    """Return the secrets of several owners, each recovered from its shares by client number.

    This is a batched `Shamir.combine`: Lagrange coefficients are computed once for all secrets with
    the same holders. A wrong share gives a wrong secret, so compare each secret with its owner's
    commitment.

    >>> one, two = (dict(enumerate(split(bytes([own]) * 16, 2, 3), start=1)) for own in (1, 2))
    >>> combined([one, two], 2) == [bytes([1]) * 16, bytes([2]) * 16]
    True
    """
    if any(len(shares) < threshold for shares in many):
        raise ProtocolError(f"{min(map(len, many))} shares, and {threshold} are needed")
    chosen = [sorted(shares.items())[:threshold] for shares in many]
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, some in enumerate(chosen):
        alike.setdefault(tuple(number for number, _ in some), []).append(place)
    secrets = [b""] * len(many)
    for numbers, places in alike.items():
        total = 0
        for position, factor in enumerate(_factors(numbers)):
            # The product of two elements has less than 256 bits before it is reduced, so they stand side by side.
            row = b"".join(bytes(SEED) + chosen[place][position][1] for place in places)
            total ^= _mult_gf2(int.from_bytes(row, "big"), factor)
        products = total.to_bytes(2 * SEED * len(places), "big")
        for lane, place in enumerate(places):
            product = int.from_bytes(products[2 * SEED * lane : 2 * SEED * (lane + 1)], "big")
            divided: Any = _div_gf2(product, _Element.irr_poly)  # two numbers, though its types say one
            secrets[place] = divided[1].to_bytes(SEED, "big")
    return secrets


@lru_cache(maxsize=64)
def _factors(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange coefficients of the given clients' shares."""
    factors = []
    for own in numbers:
        above, below = _Element(1), _Element(1)
        for other in numbers:
            if other != own:
                above = _product(above, _Element(other))
                below = _product(below, _Element(own) + _Element(other))
        factors.append(int(_product(above, below.inverse())))
    return tuple(factors)


def _product(one: _Element, other: Any) -> _Element:  # PyCryptodome's own types say that the other is an int
    product: _Element = one * other
    return product
