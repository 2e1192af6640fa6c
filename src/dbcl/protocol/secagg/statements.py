"""Statements for signatures, commitments and key derivation. Each begins with a unique label."""

from dbcl.protocol.secagg.keys import SEED, digest
from dbcl.protocol.secagg.messages import Roster, names_digest


def advertised(round: int, broadcast: bytes, name: str, share_key: bytes, mask_key: bytes) -> tuple[bytes, ...]:
    """Return the statement that a client signs to authenticate its keys."""
    return b"keys", round.to_bytes(8, "big"), broadcast, name.encode(), share_key, mask_key


def joined(binding: bytes) -> tuple[bytes, ...]:
    """Return the statement that a client signs to authenticate its shares for a roster."""
    return b"roster", binding


def pairwise(roster: Roster, sharers: tuple[str, ...], one: str, other: str) -> tuple[bytes, ...]:
    """Return the label of two clients' pairwise mask.

    The label does not depend on the order of the two clients, and differs for every list of clients
    that sent shares.
    """
    low, high = sorted((one, other))
    return b"pair mask", roster.binding, names_digest(sharers), low.encode(), high.encode()


def committed(binding: bytes, name: str, own_mask: bytes) -> bytes:
    """Return a commitment to the secret of a client's self-mask."""
    return digest(b"own mask", binding, name.encode(), own_mask)


def share_digests(binding: bytes, owner: str, holder: str, pair: bytes) -> bytes:
    """Return commitments to two shares from one client for another.

    >>> len(share_digests(bytes(32), "ann", "bob", bytes(32)))
    64
    """
    about = binding, owner.encode(), holder.encode()
    return digest(b"key share", *about, pair[:SEED]) + digest(b"mask share", *about, pair[SEED:])
