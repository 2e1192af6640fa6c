"""Keys of clients: signatures, pairwise key agreement, and authenticated encryption.

All primitives come from `cryptography`: Ed25519 (RFC 8032), X25519 (RFC 7748), HKDF with SHA-256
(RFC 5869) and ChaCha20-Poly1305 (RFC 8439). Every signed statement and derived key includes a label
for its purpose (domain separation), so that it is invalid for any other purpose.
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
"""Length in bytes of a shared secret, a key, a digest and a signature."""


def digest(*parts: bytes) -> bytes:
    """Return the SHA-256 digest of length-prefixed parts. Different lists have different digests.

    >>> digest(b"ab", b"c") == digest(b"a", b"bc")
    False
    """
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in (SCHEME, *parts))).digest()


def derive(secret: bytes, *info: bytes) -> bytes:
    """Derive a 32-byte key from a secret, bound to the purpose `info`.

    >>> derive(bytes(32), b"mask") == derive(bytes(32), b"share")
    False
    """
    return HKDF(SHA256(), KEY, salt=None, info=digest(*info)).derive(secret)


class SigningKey:
    """A client's long-term signing key (Ed25519), which identifies the client.

    >>> alice = SigningKey(bytes(32))
    >>> SigningKey.signed_by(alice.public, alice.sign(b"hello"), b"hello"), len(alice.public)
    (True, 32)
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(KEY) if secret is None else secret
        self._key = Ed25519PrivateKey.from_private_bytes(self.secret)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, *parts: bytes) -> bytes:
        """Sign a list of parts."""
        return self._key.sign(digest(*parts))

    @staticmethod
    def signed_by(public: bytes, signature: bytes, *parts: bytes) -> bool:
        """Return True if the signature of these parts is valid for a public key."""
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, digest(*parts))
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Registry:
    """Public keys of all clients, obtained independently of the server.

    >>> alice = SigningKey(bytes(32))
    >>> Registry({"alice": alice.public}).problem("alice", SigningKey().public)
    "'alice' is known by another key"
    """

    known: Mapping[str, bytes] = field(default_factory=dict)

    def problem(self, name: str, public: bytes) -> str | None:
        """Return the reason to reject a client's identity, or None if it is valid."""
        own = self.known.get(name)
        if own is None:
            return f"no client is known as {shown(name)}"
        return None if own == public else f"{shown(name)} is known by another key"


class KeyPair:
    """X25519 key pair derived from a 16-byte seed. Secret sharing of the seed permits key recovery.

    >>> one, two = KeyPair(bytes(16)), KeyPair(bytes(range(16)))
    >>> one.agree(two.public) == two.agree(one.public)
    True
    """

    def __init__(self, seed: bytes | None = None) -> None:
        self.seed = secrets.token_bytes(SEED) if seed is None else seed
        self._key = X25519PrivateKey.from_private_bytes(derive(self.seed, b"x25519"))
        self.public = self._key.public_key().public_bytes_raw()

    def agree(self, other: bytes) -> bytes:
        """Return the secret shared with the owner of another public key.

        Raises:
            ProtocolError: The public key is invalid.
        """
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:  # a point of small order, with which everybody would have the same secret
            raise ProtocolError("a public key that no honest client has") from error


def seal(key: bytes, plain: bytes, *about: bytes) -> bytes:
    """Encrypt with a single-use key; `about` is authenticated but not sent.

    >>> opened(bytes(32), seal(bytes(32), b"share", b"round 3"), b"round 3")
    b'share'
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), plain, digest(*about))


def opened(key: bytes, sealed: bytes, *about: bytes) -> bytes | None:
    """Decrypt a message.

    Return None if the key or the purpose is wrong or the message was modified.

    >>> opened(bytes(32), seal(bytes(32), b"share", b"round 3"), b"round 4") is None
    True
    """
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, digest(*about))
    except InvalidTag:
        return None
