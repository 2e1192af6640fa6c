"""The nine message types of secure aggregation, encoded in dbcl's message container.

Order in a round: `Advert` up, `Roster` down, `Shares` up, `Delivery` down, `Masked` up, `Survivors`
down, `Agreement` up, `Agreed` down, `Reveal` up. `docs/secure-aggregation.md` describes each
message.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dbcl.errors import ProtocolError, shown
from dbcl.privacy import attendance
from dbcl.privacy.attendance import Rows
from dbcl.protocol.codec import KINDS, Fields, pack, unpack
from dbcl.protocol.inspection import is_count, is_name
from dbcl.protocol.secagg.keys import DIGEST, KEY, SEED, SIGNATURE, digest

MAX_GROUP = 128
"""Maximum number of clients with pairwise masks in a group."""
SEALED = 2 * SEED + 16
"""Length in bytes of two encrypted shares with their authentication tag."""


class Member(NamedTuple):
    """Entry of a roster: a client's name, its two keys of the round, and their signature."""

    name: str
    identity: bytes
    share_key: bytes
    mask_key: bytes
    signature: bytes


@dataclass(frozen=True)
class Advert:
    """A client's keys of one round, signed together with the digest of the received broadcast."""

    round: int
    broadcast: bytes
    name: str
    identity: bytes
    share_key: bytes
    mask_key: bytes
    signature: bytes

    @property
    def member(self) -> Member:
        """Return the client's entry for a roster."""
        return Member(self.name, self.identity, self.share_key, self.mask_key, self.signature)


@dataclass(frozen=True)
class Roster:
    """Members of a group and the settings of the sum. All later messages include its digest.

    `broadcast` and `plan` are the digests of the group's broadcast and its round plan. `threshold`
    is the number of clients required to remove the masks, and `colluders` the tolerated number of
    clients that collude with the server. `bound` limits values and norms, `most` limits the number
    of examples of a client, and `length` is the number of values in a vector. `attendance` lists
    the clients of each earlier sum, if a guarantee depends on attendance; an empty list is not
    encoded.
    """

    round: int
    broadcast: bytes
    plan: bytes
    threshold: int
    colluders: int
    bound: float
    most: int
    length: int
    members: tuple[Member, ...]
    attendance: Rows = ()

    @cached_property
    def binding(self) -> bytes:
        """Digest of the roster, from which all masks and encryption keys of shares are derived."""
        return digest(b"binding", json.dumps(_fields_of(self), sort_keys=True).encode())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)


@dataclass(frozen=True)
class Shares:
    """A client's encrypted shares of its two secrets for each other client, and its commitments.

    `commitment` commits to the secret of the self-mask. `digests` commit to the two shares of every
    client, including the owner, to detect wrong shares and identify their sender. `signature` signs
    the roster's digest. It proves that the client takes part in this attempt and that its keys are
    not replayed.
    """

    round: int
    binding: bytes
    commitment: bytes
    signature: bytes
    sealed: Mapping[str, bytes]
    digests: Mapping[str, bytes]


@dataclass(frozen=True)
class Delivery:
    """Encrypted shares for one client by sender, with share digests and the senders' signatures."""

    round: int
    binding: bytes
    sealed: Mapping[str, bytes]
    digests: Mapping[str, bytes]
    signatures: Mapping[str, bytes]


@dataclass(frozen=True)
class Masked:
    """A client's quantized update and weight under all masks, as packed words."""

    round: int
    binding: bytes
    packed: bytes


@dataclass(frozen=True)
class Survivors:
    """Clients that sent shares and whose masked updates have arrived."""

    round: int
    binding: bytes
    sharers: tuple[str, ...]
    survivors: tuple[str, ...]

    @property
    def statement(self) -> tuple[bytes, ...]:
        """Return the bytes that a client signs."""
        return b"survivors", self.binding, names_digest(self.sharers), names_digest(self.survivors)


@dataclass(frozen=True)
class Agreement:
    """A client's signature of the list of survivors. A client signs one list per round."""

    round: int
    binding: bytes
    signature: bytes


@dataclass(frozen=True)
class Agreed:
    """Signatures of the list of survivors."""

    round: int
    binding: bytes
    signatures: Mapping[str, bytes]


@dataclass(frozen=True)
class Reveal:
    """A client's share of one secret per client.

    For a survivor, this is the secret of the self-mask; for a dropped client, the secret of its
    key.
    """

    round: int
    binding: bytes
    shares: Mapping[str, bytes]


Message = Advert | Roster | Shares | Delivery | Masked | Survivors | Agreement | Agreed | Reveal
M = TypeVar("M", bound=Message)
_NUMBERS = {name: number for number, name in KINDS.items()}


def names_digest(names: tuple[str, ...]) -> bytes:
    """Return a digest of a list of names.

    >>> names_digest(("ann", "bob")) == names_digest(("annbob",))
    False
    """
    return digest(b"names", *(name.encode() for name in names))


def encode_message(message: Message) -> bytes:
    """Encode a secure aggregation message as bytes.

    >>> agreement = Agreement(3, bytes(32), bytes(64))
    >>> decode_message(Agreement, encode_message(agreement)) == agreement
    True
    """
    tensors = {}
    if isinstance(message, Masked):
        tensors["packed"] = torch.from_numpy(np.frombuffer(message.packed, dtype=np.uint8).copy())
    return pack(_NUMBERS[_word(type(message))], _fields_of(message), tensors)


def decode_message(kind: type[M], data: bytes) -> M:
    """Decode a secure aggregation message of a given type.

    Args:
        kind: Type of the message.
        data: The encoded message.

    Returns:
        The message.

    Raises:
        ProtocolError: The bytes are not a valid message of this type.

    >>> decode_message(Agreement, b"nothing")
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: agreement: does not begin with DBCL, so it is no dbcl message
    """
    what = _word(kind)
    header, tensors = unpack(_NUMBERS[what], data)
    take = Fields(what, header)
    read: dict[str, Any] = {}
    for each in fields(kind):
        if each.name != "packed" and (each.default is MISSING or each.name in header):
            spec = _SPECS[each.name]
            read[each.name] = spec.read(take(each.name, spec.valid))
    take.end()
    if kind is Masked:
        packed = tensors.pop("packed", torch.zeros(0))
        if packed.dtype != torch.uint8 or packed.ndim != 1:
            raise ProtocolError(f"{what}: packed words are bytes in a row, got {shown(packed.dtype)}")
        read["packed"] = packed.numpy().tobytes()
    if tensors:
        raise ProtocolError(f"{what}: unknown tensors {shown(', '.join(sorted(tensors)))}")
    return kind(**read)


def _word(kind: type[Any]) -> str:
    return kind.__name__.lower()


class _Spec(NamedTuple):
    valid: Callable[[Any], bool]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _is_bytes(length: int) -> Callable[[Any], bool]:
    def valid(value: Any) -> bool:
        return isinstance(value, str) and len(value) == 2 * length and not set(value) - set("0123456789abcdef")

    return valid


def _bytes(length: int) -> _Spec:
    return _Spec(_is_bytes(length), bytes.hex, bytes.fromhex)


def _by_name(length: int) -> _Spec:
    inner = _is_bytes(length)
    return _Spec(
        lambda value: (
            isinstance(value, dict)
            and len(value) <= MAX_GROUP
            and all(map(is_name, value))
            and all(map(inner, value.values()))
        ),
        lambda own: {name: each.hex() for name, each in own.items()},
        lambda own: {name: bytes.fromhex(each) for name, each in own.items()},
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_GROUP and all(map(is_name, value))


def _are_members(value: Any) -> bool:
    def one(own: Any) -> bool:
        checks = (is_name, _is_bytes(KEY), _is_bytes(KEY), _is_bytes(KEY), _is_bytes(SIGNATURE))
        return (
            isinstance(own, list)
            and len(own) == len(checks)
            and all(check(each) for check, each in zip(checks, own, strict=True))
        )

    return isinstance(value, list) and len(value) <= MAX_GROUP and all(map(one, value))


def _is_attendance(value: Any) -> bool:
    try:
        return bool(attendance.unpacked(value)) and all(map(is_name, value["parties"]))
    except ValueError:
        return False


def _plain(value: Any) -> Any:
    return value


_COUNT = _Spec(is_count, _plain, _plain)
_NAMES = _Spec(_are_names, list, tuple)
_SPECS: dict[str, _Spec] = {
    "round": _COUNT,
    "threshold": _COUNT,
    "colluders": _COUNT,
    "most": _COUNT,
    "length": _COUNT,
    "bound": _Spec(lambda value: isinstance(value, float) and 0 < value < 1e100, _plain, _plain),
    "name": _Spec(is_name, _plain, _plain),
    **dict.fromkeys(("broadcast", "plan", "identity", "share_key", "mask_key", "binding", "commitment"), _bytes(KEY)),
    "signature": _bytes(SIGNATURE),
    "sealed": _by_name(SEALED),
    "digests": _by_name(2 * DIGEST),
    "signatures": _by_name(SIGNATURE),
    "shares": _by_name(SEED),
    "sharers": _NAMES,
    "survivors": _NAMES,
    "attendance": _Spec(_is_attendance, attendance.packed, attendance.unpacked),
    "members": _Spec(
        _are_members,
        lambda own: [[member.name, *(each.hex() for each in member[1:])] for member in own],
        lambda own: tuple(Member(name, *map(bytes.fromhex, rest)) for name, *rest in own),
    ),
}


def _fields_of(message: Message) -> dict[str, Any]:
    return {
        each.name: _SPECS[each.name].write(getattr(message, each.name))
        for each in fields(message)
        if each.name != "packed" and (each.default is MISSING or getattr(message, each.name) != each.default)
    }
