"""Encoding and decoding of messages; `docs/protocol.md` describes the format.

    DBCL | version (1 byte) | kind (1 byte) | header length (4) | header: JSON | tensors:
        safetensors | SHA-256 (32)

Nothing is unpickled. Decoding raises only `ProtocolError`, for any malformed input. The digest
detects corruption but is not a signature: the transport must authenticate the sender.

Longer than 350 lines: the writer and the reader of each message are in the same file.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dbcl.errors import ProtocolError, plain, shown
from dbcl.protocol.inspection import (
    MAX_NUMBERS,
    MESSAGE,
    OWN,
    Limits,
    check_tensors,
    is_count,
    is_name,
    is_shape,
    read_json,
)
from dbcl.protocol.messages import Base, Broadcast, Update, UpdateStack
from dbcl.protocol.rejection import Reason, RejectedError
from dbcl.round_plan import MAX_LANES, UNSKETCHED, RoundPlan, RoundTensor
from dbcl.seeds import SEED_BYTES
from dbcl.sketch import SCHEMES, LaneSketch

MAGIC = b"DBCL"
VERSION = 1
BROADCAST, UPDATE, CHECKPOINT, BASE = 1, 2, 3, 4
KINDS = {BROADCAST: "broadcast", UPDATE: "update", CHECKPOINT: "checkpoint", BASE: "base"}
SECAGG = ("advert", "roster", "shares", "delivery", "masked", "survivors", "agreement", "agreed", "reveal")
KINDS |= dict(enumerate(SECAGG, start=16))
MAX_METRICS, MAX_METRIC_NAME, MAX_METRIC = 100, 100, 1e100
"""Maximum number of metrics in an update, length of their names and magnitude of their values."""
WIRE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""Dtypes by their names in safetensors."""
_PREFIX = struct.Struct("<4sBBI")
_DIGEST = 32


def encode(message: Broadcast | Update | Base) -> bytes:
    """Encode a message as bytes.

    Args:
        message: The message.

    Returns:
        The encoded message.

    >>> import torch
    >>> data = encode(Update(round=0, plan="ab" * 32, tensors={"bias": torch.zeros(2)}, examples=600))
    >>> data[:4], decode_update(data).examples
    (b'DBCL', 600)
    """
    kind = {Broadcast: BROADCAST, Update: UPDATE, Base: BASE}[type(message)]
    return pack(kind, _header(message), message.tensors)


def encoded_size(message: Broadcast | Update | Base | UpdateStack | bytes) -> int:
    """Return the size of an encoded message in bytes, without encoding its tensors.

    The size of a stack is the total over its updates.

    >>> update = Update(round=0, plan="ab" * 32, tensors={"bias": torch.zeros(2)}, examples=600)
    >>> encoded_size(update) == len(encode(update))
    True
    """
    if isinstance(message, bytes):
        return len(message)
    one = message.at(0) if isinstance(message, UpdateStack) else message
    shapes = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in one.tensors.items())
    body = _PREFIX.size + _body_size(shapes) + _DIGEST
    if isinstance(message, UpdateStack):
        return sum(body + len(_header_text(_header(update))) for update in message.values())
    return body + len(_header_text(_header(message)))


@lru_cache(maxsize=64)
def _body_size(shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> int:
    # Nothing in the tensors' part depends on their values.
    return len(safetensors.torch.save({name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in shapes}))


def decode(data: bytes) -> Broadcast | Update | Base:
    """Decode a message of any kind.

    Args:
        data: The encoded message.

    Returns:
        The message.

    Raises:
        ProtocolError: The bytes are not a valid message.

    >>> decode(encode(Base({"w": torch.zeros(2)}))).tensors
    {'w': tensor([0., 0.])}
    """
    kind = data[5] if len(data) > 5 else UPDATE
    if kind == BROADCAST:
        return decode_broadcast(data)
    return decode_base(data) if kind == BASE else decode_update(data)


def decode_broadcast(data: bytes) -> Broadcast:
    """Decode a broadcast.

    Args:
        data: The encoded broadcast.

    Returns:
        The broadcast.

    Raises:
        ProtocolError: The bytes are not a valid broadcast.

    >>> import dbcl
    >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> decode_broadcast(encode(broadcast)).sketches()
    {'weight': LaneSketch(6 -> 3, lane 0 of 2)}
    """
    header, tensors = unpack(BROADCAST, data)
    _require_floats("broadcast", tensors)
    take = Fields("broadcast", header)
    round = take("round", is_count)
    seed = take("seed", lambda value: isinstance(value, str) and len(value) == 2 * SEED_BYTES and _is_hex(value))
    parts = take("parts", lambda value: isinstance(value, list) and all(map(_is_part, value)))
    frozen = take("frozen", lambda value: isinstance(value, list) and all(map(_is_frozen, value)), default=[])
    veil = take("veil", lambda value: isinstance(value, float) and 0 < value < MAX_METRIC, default=0.0)
    lane, lanes = take("lane", _is_lane, default=[0, 1])
    take.end()
    plan = RoundPlan(
        round,
        bytes.fromhex(seed),
        tuple(_part(*part) for part in parts),
        tuple((name, digest) for name, digest in frozen),
        lane,
        lanes,
    )
    if lanes == 1 and any(part.scheme == LaneSketch.scheme for part in plan.tensors):
        raise ProtocolError("broadcast: the plan has sketches in lanes, and the header does not say which lane")
    if len({part.name for part in plan.tensors}) != len(plan.tensors):
        raise ProtocolError("broadcast: a tensor is named twice in the plan")
    return Broadcast(plan, tensors, veil)


def decode_base(data: bytes) -> Base:
    """Decode a message with frozen parameters.

    Args:
        data: The encoded message.

    Returns:
        The frozen parameters.

    Raises:
        ProtocolError: The bytes are not a valid message of this kind.

    >>> decode_base(encode(Base({"w": torch.zeros(2)}))).tensors
    {'w': tensor([0., 0.])}
    """
    header, tensors = unpack(BASE, data)
    _require_floats("base", tensors)
    Fields("base", header).end()
    return Base(tensors)


def decode_update(data: bytes, *, lazy: bool = False) -> Update:
    """Decode an update.

    Args:
        data: The encoded update.
        lazy: Decode each tensor on access, directly from `data`, to save memory.

    Returns:
        The update.

    Raises:
        ProtocolError: The bytes are not a valid update.

    >>> decode_update(b"not a message")
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: update: does not begin with DBCL, so it is no dbcl message
    """
    header, body = _checked(UPDATE, data)
    tensors = _LazyTensors(body) if lazy else _tensors("update", bytes(body))
    _check_finite(header.get("metrics"))
    take = Fields("update", header)
    update = Update(
        round=take("round", is_count),
        plan=take("plan", lambda value: isinstance(value, str)),
        examples=take("examples", _is_integer),
        metrics={name: float(value) for name, value in take("metrics", _are_metrics).items()},
        tensors=tensors,
    )
    take.end()
    return update


def _header(message: Broadcast | Update | Base) -> dict[str, Any]:
    if isinstance(message, Base):
        return {}
    if isinstance(message, Broadcast):
        parts = [tensor.fields() for tensor in message.plan.tensors]
        header: dict[str, Any] = {"round": message.plan.round, "seed": message.plan.seed.hex(), "parts": parts}
        if message.plan.frozen:
            header["frozen"] = [list(each) for each in message.plan.frozen]
        if message.plan.lanes > 1:
            header["lane"] = [message.plan.lane, message.plan.lanes]
        return {**header, "veil": message.veil} if message.veil else header
    return {
        "round": message.round,
        "plan": message.plan,
        "examples": message.examples,
        "metrics": dict(message.metrics),
    }


def _header_text(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def pack(kind: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Write a container: a JSON header and named tensors, within the limits of `unpack`.

    >>> unpack(CHECKPOINT, pack(CHECKPOINT, {"round": 3}, {"w": torch.zeros(2)}))
    ({'round': 3}, {'w': tensor([0., 0.])})
    """
    text = _header_text(header)
    body = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    what, limits = KINDS[kind], _limits(kind)
    limits.check(what, text)
    limits.check(what, body[8 : 8 + int.from_bytes(body[:8], "little")])
    if len(tensors) > limits.tensors:
        raise ProtocolError(f"{what}: {len(tensors)} tensors, and {limits.tensors} are the most that can be read")
    data = _PREFIX.pack(MAGIC, VERSION, kind, len(text)) + text + body
    return data + hashlib.sha256(data).digest()


def _limits(kind: int) -> Limits:
    return OWN if kind == CHECKPOINT else MESSAGE


def unpack(kind: int, data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a container of one kind, or raise `ProtocolError` with a description of the damage."""
    header, body = _checked(kind, data)
    return header, _tensors(KINDS[kind], bytes(body))


def _checked(kind: int, data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Check the structure of a container; return its header and the bytes of its tensors."""
    what = KINDS[kind]
    if data[:4] != MAGIC:
        raise ProtocolError(f"{what}: does not begin with DBCL, so it is no dbcl message")
    if len(data) < _PREFIX.size + _DIGEST:
        raise ProtocolError(f"{what}: cut short, only {len(data)} bytes long")
    _, version, found, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise ProtocolError(f"{what}: wire format version {version}, and this dbcl reads version {VERSION}")
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise ProtocolError(f"{what}: damaged or cut short, its SHA-256 does not fit its {len(data)} bytes")
    if found != kind:
        raise ProtocolError(f"{what}: expected, but these bytes are a {KINDS.get(found, f'message of kind {found}')}")
    end = _PREFIX.size + length
    if end > len(data) - _DIGEST:
        raise ProtocolError(f"{what}: a header of {length} bytes does not fit")
    text = data[_PREFIX.size : end]
    header = read_json(what, text, limits=_limits(kind), spelling=_header_text)
    body = memoryview(data)[end:-_DIGEST]
    check_tensors(what, body, _limits(kind))
    return header, body


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors in an encoded message. Each is decoded on access."""

    def __init__(self, body: memoryview) -> None:
        length = int.from_bytes(body[:8], "little")
        listed = json.loads(bytes(body[8 : 8 + length]))
        self._values, self._entries = body[8 + length :], dict(sorted(listed.items()))

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        if begin == end:
            return torch.zeros(entry["shape"], dtype=dtype)
        return torch.frombuffer(bytearray(self._values[begin:end]), dtype=dtype).view(entry["shape"])

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _tensors(what: str, body: bytes) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load(body)
    except Exception as error:  # `check_tensors` knows what can be read; whatever is left must not end a round
        raise ProtocolError(f"{what}: the tensors cannot be read ({plain(str(error))})") from None
    return dict(sorted(tensors.items()))  # safetensors returns them in no fixed order


def _require_floats(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ProtocolError` unless all tensors have floating-point dtypes.

    PyTorch would silently convert booleans and complex values.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ProtocolError(f"{what}: {plain(name, 100)} is {tensor.dtype}, and weights are floating-point numbers")


class Fields:
    """Reader of header fields. Each read checks the field's type; unread fields raise an error."""

    def __init__(self, what: str, header: dict[str, Any]) -> None:
        self._what, self._left = what, dict(header)

    def __call__(self, name: str, valid: Callable[[Any], bool], default: Any = None) -> Any:
        if name not in self._left:
            if default is not None:
                return default
            raise ProtocolError(f"{self._what}: the header has no {name!r}")
        value = self._left.pop(name)
        if not valid(value):
            raise ProtocolError(f"{self._what}: {name!r} cannot be {shown(value)}")
        return value

    def end(self) -> None:
        if self._left:
            raise ProtocolError(f"{self._what}: unknown fields {shown(', '.join(sorted(self._left)))}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _check_finite(metrics: Any) -> None:
    """Reject non-finite metrics with the reason of diverged training."""
    values = metrics.values() if isinstance(metrics, dict) else ()
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise RejectedError(Reason.NOT_FINITE, f"update: 'metrics' cannot be {shown(metrics)}")


def _are_metrics(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_METRICS
        and all(isinstance(name, str) and len(name) <= MAX_METRIC_NAME for name in value)
        and all(map(_is_number, value.values()))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_METRIC


def _is_hex(text: str) -> bool:
    return all(letter in "0123456789abcdef" for letter in text)


def _is_lane(value: Any) -> bool:
    """Return True for a pair of a lane index and a number of lanes of at least two."""
    if not (isinstance(value, list) and len(value) == 2 and all(map(is_count, value))):
        return False
    lane, lanes = value
    return bool(lane < lanes and 1 < lanes <= MAX_LANES)


def _is_frozen(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2):
        return False
    name, digest = value
    return is_name(name) and isinstance(digest, str) and len(digest) == 2 * _DIGEST and _is_hex(digest)


def _part(name: str, shape: list[int], scheme: str, width: int, columns: int, inputs: Any = ()) -> RoundTensor:
    return RoundTensor(name, tuple(shape), scheme, width, columns, tuple(inputs))


def _is_part(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) in (5, 6)):
        return False
    name, shape, scheme, width, columns, *inputs = value
    return (
        is_name(name)
        and is_shape(shape)
        and isinstance(scheme, str)
        and (scheme in SCHEMES or scheme in UNSKETCHED)
        and (scheme in UNSKETCHED or len(shape) >= 2)
        and is_count(width)
        and is_count(columns)
        and (scheme in UNSKETCHED or columns <= width <= MAX_NUMBERS)
        and all(_is_inputs(axes, len(shape)) and scheme not in UNSKETCHED for axes in inputs)
    )


def _is_inputs(value: Any, ndim: int) -> bool:
    """Return True for a sorted list of axes that differs from the default axes."""
    return (
        isinstance(value, list)
        and 0 < len(value) < ndim
        and all(is_count(axis) and axis < ndim for axis in value)
        and value == sorted(set(value))
        and value != list(range(1, ndim))
    )
