"""Keys of clients: signatures, key agreement between two clients, and encryption bound to a purpose.

Every primitive is that of `cryptography`: Ed25519 (RFC 8032), X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869) and
ChaCha20-Poly1305 (RFC 8439). What is said with a key begins with what it is said for, so that nothing that was signed
or derived for one thing can be used for another.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dbcl.errors import ProtocolError, shown

SCHEME = b"dbcl secagg-v2"
SEED, KEY, DIGEST, SIGNATURE = 16, 32, 32, 64
"""Bytes of a shared secret, of a key, of a digest and of a signature."""


def digest(*parts: bytes) -> bytes:
    """Return SHA-256 over parts, each with its length before it, so that no two lists of parts are alike.

    >>> digest(b"ab", b"c") == digest(b"a", b"bc")
    False
    """
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in (SCHEME, *parts))).digest()


def derive(secret: bytes, *info: bytes) -> bytes:
    """Derive a key of 32 bytes from a secret, for the purpose `info` only.

    >>> derive(bytes(32), b"mask") == derive(bytes(32), b"share")
    False
    """
    return HKDF(SHA256(), KEY, salt=None, info=digest(*info)).derive(secret)


class SigningKey:
    """Signing key of a client, for as long as others know the client by it.

    >>> alice = SigningKey(bytes(32))
    >>> SigningKey.signed_by(alice.public, alice.sign(b"hello"), b"hello"), len(alice.public)
    (True, 32)
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(KEY) if secret is None else secret
        self._key = Ed25519PrivateKey.from_private_bytes(self.secret)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, *parts: bytes) -> bytes:
        """Sign the parts."""
        return self._key.sign(digest(*parts))

    @staticmethod
    def signed_by(public: bytes, signature: bytes, *parts: bytes) -> bool:
        """Return whether the owner of a public key has signed exactly these parts."""
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, digest(*parts))
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Registry:
    """Public keys of all clients, which each of them knows independently of the server.

    >>> alice = SigningKey(bytes(32))
    >>> Registry({"alice": alice.public}).problem("alice", SigningKey().public)
    "'alice' is known by another key"
    """

    known: Mapping[str, bytes] = field(default_factory=dict)

    def problem(self, name: str, public: bytes) -> str | None:
        """Return the reason why a client's identity is not valid, or None."""
        own = self.known.get(name)
        if own is None:
            return f"no client is known as {shown(name)}"
        return None if own == public else f"{shown(name)} is known by another key"


class KeyPair:
    """X25519 key made from 16 secret bytes, so that they can be shared and the key restored.

    >>> one, two = KeyPair(bytes(16)), KeyPair(bytes(range(16)))
    >>> one.agree(two.public) == two.agree(one.public)
    True
    """

    def __init__(self, seed: bytes | None = None) -> None:
        self.seed = secrets.token_bytes(SEED) if seed is None else seed
        self._key = X25519PrivateKey.from_private_bytes(derive(self.seed, b"x25519"))
        self.public = self._key.public_key().public_bytes_raw()

    def agree(self, other: bytes) -> bytes:
        """Return the secret that only the two owners have."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:  # a point of small order, with which everybody would have the same secret
            raise ProtocolError("a public key that no honest client has") from error


def seal(key: bytes, plain: bytes, *about: bytes) -> bytes:
    """Encrypt under a key that is used once; `about` is bound to it and not sent.

    >>> opened(bytes(32), seal(bytes(32), b"share", b"round 3"), b"round 3")
    b'share'
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), plain, digest(*about))


def opened(key: bytes, sealed: bytes, *about: bytes) -> bytes | None:
    """Decrypt a message; None if it was sealed with another key, for another purpose, or was changed.

    >>> opened(bytes(32), seal(bytes(32), b"share", b"round 3"), b"round 4") is None
    True
    """
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, digest(*about))
    except InvalidTag:
        return None
