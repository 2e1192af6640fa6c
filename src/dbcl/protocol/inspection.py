"""Structural checks of untrusted bytes before parsing, to limit the cost of parsing.

A parser's memory use can be thousands of times the input length. Examples are a list of empty
lists, a million names, or a tensor of shape (0, 2^63). The checks count all elements before
parsing.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbcl.errors import ProtocolError, plain, shown

MAX_NAME = 500
MAX_AXES = 16
MAX_NUMBERS = 1 << 40
"""Maximum product of a tensor's non-zero dimensions."""

_ITEMSIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Size limits of a message: header bytes, header values and number of tensors.

    A header value uses about 60 bytes as a Python object, regardless of its encoded size.

    >>> Limits().check("update", b'{"round":3}')
    >>> Limits(header=4).check("update", b'{"round":3}')
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: update: a header of 11 bytes does not fit
    """

    header: int = 4 << 20
    items: int = 400_000
    tensors: int = 20_000

    def check(self, what: str, data: bytes) -> None:
        """Raise `ProtocolError` before parsing if a header is too long or has too many values."""
        if len(data) > self.header:
            raise ProtocolError(f"{what}: a header of {len(data)} bytes does not fit")
        if data.count(b",") + data.count(b"[") + data.count(b"{") > self.items:
            raise ProtocolError(f"{what}: the header has more than {self.items} values")


MESSAGE = Limits()
"""Limits of messages from untrusted senders."""
OWN = Limits(header=256 << 20, items=16_000_000, tensors=500_000)
"""Limits of checkpoints, which are trusted and contain optimiser states and all metrics."""


def read_json(
    what: str, data: bytes, *, limits: Limits = MESSAGE, spelling: Callable[[dict[str, Any]], bytes] | None = None
) -> dict[str, Any]:
    """Parse a JSON object within limits, without duplicate names.

    Args:
        what: Name of the message in errors.
        data: The encoded object.
        limits: Size limits of the header.
        spelling: Returns the canonical encoding. Any other encoding is rejected.

    Returns:
        The parsed object.

    Raises:
        ProtocolError: The bytes are malformed or exceed a limit.

    >>> read_json("update", b'{"round":3}')
    {'round': 3}
    >>> read_json("update", b'{"round":3,"round":4}')
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: update: the header is not JSON (a name stands twice)
    """
    limits.check(what, data)
    try:
        header = json.loads(data, object_pairs_hook=_once)
        spelt = data if spelling is None or not isinstance(header, dict) else spelling(header)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what}: the header is not JSON ({plain(str(error))})") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"{what}: the header is not an object")
    if spelt != data:
        raise ProtocolError(f"{what}: the header is not written as dbcl writes it")
    return header


def check_tensors(what: str, body: memoryview, limits: Limits = MESSAGE) -> None:
    """Raise `ProtocolError` unless bytes are contiguous tensors in the safetensors format.

    >>> import safetensors.torch, torch
    >>> check_tensors("update", memoryview(safetensors.torch.save({"w": torch.zeros(2, 3)})))
    >>> check_tensors("update", memoryview(bytes(8) + b"{}"))
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: update: the tensors cannot be read (2 bytes are no tensor's)
    """
    try:
        _check(what, body, limits)
    except _UnreadableError as reason:
        raise ProtocolError(f"{what}: the tensors cannot be read ({reason})") from None


class _UnreadableError(Exception):
    """Tensors cannot be read."""


def _check(what: str, body: memoryview, limits: Limits) -> None:
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 or length > len(body) - 8:
        raise _UnreadableError("cut short")
    if length > limits.header:
        raise _UnreadableError(f"a list of {length} bytes")
    listed = bytes(body[8 : 8 + length])
    entries = read_json(what, listed, limits=limits) if listed.strip() else {}
    if len(entries) > limits.tensors:
        raise _UnreadableError(f"{len(entries)} tensors, more than {limits.tensors}")
    spans = sorted(_span(name, entry) for name, entry in entries.items())
    at = 0
    for begin, end in spans:
        if begin != at:
            raise _UnreadableError("a gap or an overlap between two tensors")
        at = end
    if at != len(body) - 8 - length:
        raise _UnreadableError(f"{len(body) - 8 - length - at} bytes are no tensor's")


def _span(name: str, entry: Any) -> tuple[int, int]:
    if not is_name(name):
        raise _UnreadableError(f"a tensor cannot be called {shown(name)}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _UnreadableError(f"the entry of {shown(name)} is not one of a tensor")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not is_shape(shape):
        raise _UnreadableError(f"the shape of {shown(name)} cannot be {shown(shape)}")
    if not isinstance(dtype, str) or dtype not in _ITEMSIZES:
        raise _UnreadableError(f"the dtype of {shown(name)} cannot be {shown(dtype)}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_count, offsets))):
        raise _UnreadableError(f"the place of {shown(name)} cannot be {shown(offsets)}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEMSIZES[dtype]:
        raise _UnreadableError(f"{shown(name)} has {end - begin} bytes, which is not what its shape and dtype take")
    return begin, end


def is_count(value: Any) -> bool:
    """Return True for a non-negative integer below 2^63. Booleans are not integers here.

    >>> is_count(3), is_count(True), is_count(1 << 63)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_shape(value: Any) -> bool:
    """Return True for a valid tensor shape.

    >>> is_shape([2, 3]), is_shape([0, 1 << 62])
    (True, False)
    """
    fits = isinstance(value, list) and len(value) <= MAX_AXES and all(map(is_count, value))
    return fits and math.prod(size or 1 for size in value) <= MAX_NUMBERS


def is_name(value: Any) -> bool:
    """Return True for a valid tensor name: text of 1 to 500 printable characters.

    >>> is_name("encoder.0.weight"), is_name(""), is_name("a\\x1b[31m")
    (True, False, False)
    """
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found
