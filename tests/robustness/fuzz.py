"""A structure-aware fuzzer of the wire: honest messages, mutated, sealed again, and handed to everything that reads.

    python tests/robustness/fuzz.py --messages 10000000        # before a release; prints its progress

Whatever the bytes, reading raises a `DbclError` with a short and printable reason or takes the message; a refused one
changes nothing. Messages that once broke something lie in `corpus/`, and every run reads them first.
"""

import argparse
import copy
import hashlib
import json
import logging
import math
import os
import random
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dbcl
from dbcl.errors import DbclError
from dbcl.protocol import BroadcastRequirements, checkpoint
from dbcl.protocol.codec import BASE, BROADCAST, CHECKPOINT, KINDS, UPDATE, pack, unpack
from dbcl.protocol.server_state import server_state
from dbcl.state import State
from dbcl.testing.nested import nested

CORPUS = Path(__file__).parent / "corpus"
CHUNK = 2_000
"""Messages that are made of one seed, before the models are compared with what they were."""
PREFIX = struct.Struct("<4sBBI")


# Honest messages


@dataclass(frozen=True)
class Subject:
    """A server in an open round, what a client of it has, and the honest messages between them by kind."""

    name: str
    server: dbcl.Server
    template: nn.Module
    honest: dict[int, list[bytes]]

    def fingerprint(self) -> str:
        """A hash of all that a refused message must leave alone: W, the round, its key, the optimiser."""
        state = server_state(self.server)
        digest = hashlib.sha256(json.dumps(state.values, sort_keys=True, default=str).encode())
        for name, tensor in sorted(state.tensors.items()):
            digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in sorted(self.template.state_dict().items()):
            digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6).requires_grad_(False), nn.Linear(6, 6), nn.Linear(6, 2))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def upwards() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose1d(4, 2, 1), nn.Flatten(), nn.Linear(2, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "sketched": (mlp, {"optimizer": dbcl.optim.momentum()}),
    "frozen": (frozen, {"send_frozen": True}),
    "statistics": (normalised, {"optimizer": dbcl.optim.adam(), "calibration": torch.ones(4, 8)}),
    "half": (lambda: mlp().to(torch.bfloat16), {}),
    "wire": (mlp, {"wire": "float16", "sketch": "sampling-v1"}),
    "inputs": (upwards, {"sketch": "count-hashed-v1"}),
    "lanes": (mlp, {"ratio": (2, 4), "lanes": 4}),
}


@cache
def subjects() -> list[Subject]:
    made = []
    for name, (model, settings) in MODELS.items():
        torch.manual_seed(0)
        server, template = dbcl.Server(model(), insecure_seed=0, **nested({"coverage": "hidden", **settings})), model()
        honest: dict[int, list[bytes]] = {}
        if server.plan.base:
            honest[BASE] = [dbcl.encode(server.base())]
            dbcl.protocol.load_base(template, dbcl.protocol.decode_base(honest[BASE][0]))
        server.close_round([answer(template, server.open_round(), 0.01)])  # the optimiser has something to remember
        broadcast = server.open_round("ann")  # the checkpoint holds who has asked
        honest[BROADCAST] = [dbcl.encode(broadcast)]
        honest[UPDATE] = [dbcl.encode(answer(template, broadcast, scale)) for scale in (0.01, 0.02, 0.03)]
        state = server_state(server)
        honest[CHECKPOINT] = [pack(CHECKPOINT, state.values, state.tensors)]
        made.append(Subject(name, server, template, honest))
    return made


def answer(template: nn.Module, broadcast: dbcl.Broadcast, scale: float) -> dbcl.Update:
    local = dbcl.blinded(template, broadcast)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(scale)
    return dbcl.make_update(local, broadcast, examples=10, metrics={"loss": 0.5, "accuracy": 0.25})


# Mutations


class Raw(str):
    """Text that goes into the JSON as it is."""


def deep(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64,
    -(1 << 63), 10**99, 10**101, 10**307, 10**400, 0.0, -0.0, 0.5, 3.0, 1e-320, 1e99, 1e101, 1e308,
    math.nan, math.inf, -math.inf, Raw("1e999"), Raw("-0"), Raw("1.50"), Raw("01"), Raw("9" * 4301), Raw("1E5"),
]  # fmt: skip
TEXTS: list[Any] = [
    "", "x", "weight", "0.weight", "\x1b[31m", "<b>x</b>", "[red]", "\ud800", "\x00", "\n", "é" * 3, "名前", "\u202e",
    "a" * 501, "z" * 5_000, "00" * 32, "identity-v1", "statistics-v1", "count-v1", "count-hashed-v1", "sampling-v1",
    "count-v9", "__metadata__", "running_var", "%s%n{0}", "None", "nan", Raw('"\\u00e9"'), Raw("'x'"),
    Raw('"\\ud83d\\ude00"'),
]  # fmt: skip
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [0], [1, 2], {"a": 1}, {"": {}}, Raw("nul"), Raw(""), Raw("[1,]")]
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U8": 1, "BOOL": 1, "C64": 8,
    "I8": 1, "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
DTYPES = [*SIZES, "F4", "F6_E2M3", "f32", "F8_E8M0"]
NAMES = ["", "\x1b", "[x]", "<i>", "é", "n" * 500, "n" * 501, "__metadata__"]


def any_value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(NUMBERS)
    if kind < 0.75:
        return rng.choice(TEXTS)
    if kind < 0.97:
        return copy.deepcopy(rng.choice(OTHERS))
    if kind < 0.999:
        return deep(rng.choice((2, 20, 200, rng.randrange(950, 1000))))
    return deep(rng.choice((5_000, 100_000)))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    found, todo = [], [tree]
    while todo:
        inside = todo.pop()
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            found.append((inside, key))
            if isinstance(inside[key], dict | list):
                todo.append(inside[key])
    return found


def tweak(value: Any, rng: random.Random) -> Any:
    """A value of the same kind, a little different."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, 2 * value, value + (1 << 32), value % 1000 / 1, str(value)))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e300, value * 1e-300, int(value) if math.isfinite(value) else 0))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice((value[:at] + rng.choice("\x07[<é0ag.") + value[at:], value[:at], value.upper(), value * 2))
    if isinstance(value, list):
        return rng.choice((value * 2, value[::-1], value[:-1], [*value, any_value(rng)], [value]))
    return {**value, rng.choice(TEXTS): any_value(rng)}


def mutate_tree(tree: dict[str, Any], rng: random.Random) -> None:
    listed = places(tree)
    if not listed or rng.random() < 0.05:
        tree[str(rng.choice(TEXTS))] = any_value(rng)
        return
    inside, key = rng.choice(listed)
    kind = rng.random()
    if kind < 0.35:
        inside[key] = any_value(rng)
    elif kind < 0.7:
        inside[key] = tweak(inside[key], rng)
    elif kind < 0.8:
        del inside[key]
    elif kind < 0.9:
        other, place = rng.choice(listed)
        if place in other if isinstance(other, dict) else place < len(other):
            inside[key] = copy.deepcopy(other[place])
    elif isinstance(inside, dict):
        inside[str(rng.choice(TEXTS))] = inside.pop(key)
    else:
        inside.insert(key, any_value(rng))


def mutate_entries(entries: dict[str, Any], data: bytes, rng: random.Random) -> bytes:
    """Change the list of tensors, and sometimes the data with it, so that the two still fit."""
    kind = rng.random()
    names = [name for name, entry in entries.items() if isinstance(entry, dict)]
    if kind < 0.3 or not names:
        mutate_tree(entries, rng)
        return data
    name = rng.choice(names)
    entry = entries[name]
    try:
        if kind < 0.4:
            entry["dtype"] = rng.choice(DTYPES)
        elif kind < 0.5:
            entry["shape"] = [rng.choice((0, 1, 2, 3, -1, 1 << 31, 1 << 62, 1 << 63)) for _ in range(rng.randrange(18))]
        elif kind < 0.55:
            entry["data_offsets"][rng.randrange(2)] += rng.choice((-8, -4, -1, 1, 4, 8, 1 << 62))
        elif kind < 0.6:
            entries[rng.choice(("", "\x1b", "[x]", "<i>", "é", "n" * 500, "n" * 501, "__metadata__"))] = entries.pop(
                name
            )
        elif kind < 0.65:  # another type of the same size, or another shape of it
            same = [each for each, size in SIZES.items() if size == SIZES.get(entry["dtype"])]
            entry["dtype"] = rng.choice(same or DTYPES)
        elif kind < 0.7:
            count = product(entry["shape"])
            entry["shape"] = rng.choice(([count], [1, count], [count, 1], [*entry["shape"], 1], entry["shape"][::-1]))
        elif kind < 0.75:  # a further tensor that fits
            shape = [rng.choice((0, 1, 2)) for _ in range(rng.randrange(3))]
            dtype = rng.choice([*SIZES])
            size = math.prod(shape) * SIZES[dtype]
            place = [len(data), len(data) + size]
            entries[str(rng.choice(TEXTS)) + "!"] = {"dtype": dtype, "shape": shape, "data_offsets": place}
            data += bytes(size)
        elif kind < 0.8:  # one tensor less
            data = resized(entries, name, b"", data)
            del entries[name]
        elif kind < 0.9:  # another type or shape, with the data for it
            if rng.random() < 0.5:
                entry["dtype"] = rng.choice([*SIZES])
            else:
                entry["shape"] = [rng.choice((0, 1, 2, 3, 7)) for _ in range(rng.randrange(5))]
            size = min(10_000, product(entry["shape"]) * SIZES[entry["dtype"]])
            data = resized(entries, name, (data * (size // max(len(data), 1) + 1))[:size], data)
        else:  # other numbers
            begin, end = entry["data_offsets"]
            patterns = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x00\x00\x00\x80", b"\x01\0\0\0"
            pattern = rng.choice((*patterns, rng.randbytes(4)))
            length = rng.choice((4, max(0, min(10_000, end - begin))))
            filled = (pattern * (length // 4 + 1))[:length]
            data = data[:begin] + filled + data[begin + length :]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError):
        mutate_tree(entries, rng)  # an earlier mutation has been there
    return data


def product(shape: list[Any]) -> int:
    if not all(isinstance(size, int) for size in shape):
        raise TypeError("an earlier mutation has put something else there")
    return math.prod(shape)


def resized(entries: dict[str, Any], name: str, new: bytes, data: bytes) -> bytes:
    """The data with other bytes for one tensor; the places of those behind it are moved."""
    begin, end = entries[name]["data_offsets"]
    for each in entries.values():
        each["data_offsets"] = [at + (len(new) - end + begin) * (at >= end) for at in each["data_offsets"]]
    entries[name]["data_offsets"] = [begin, begin + len(new)]
    return data[:begin] + new + data[end:]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(rng.randrange(50))
    kind, at = rng.random(), rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 700))
    if kind < 0.3:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind < 0.45:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind < 0.6:
        return data[:at] + data[at + rng.randrange(1, 40) :]
    if kind < 0.75:
        return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
    if kind < 0.85:
        return data[: max(at, 1)]
    if kind < 0.95:
        field = rng.choice((0, 1, 2, 255, len(data), 1 << 31, (1 << 32) - 1))
        return data[:6] + struct.pack("<I", field) + data[10:]
    return data + rng.randbytes(rng.choice((1, 8, 32)))


def spelt(tree: Any) -> bytes:
    """JSON as dbcl writes it, with raw text where a mutation put some."""
    raws: list[Raw] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"@raw{len(raws) - 1}@"
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree), sort_keys=True, separators=(",", ":"))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw{number}@"', raw, 1)
    return text.encode("utf-8", "surrogatepass")


def sealed(kind: int, header: bytes, body: bytes) -> bytes:
    data = PREFIX.pack(b"DBCL", 1, kind, len(header)) + header + body
    return data + hashlib.sha256(data).digest()


@cache
def parts(message: bytes) -> tuple[int, str, str, bytes]:
    """An honest message as kind, header, list of tensors and data."""
    _, _, kind, length = PREFIX.unpack_from(message)
    body = message[10 + length : -32]
    size = int.from_bytes(body[:8], "little")
    return kind, message[10 : 10 + length].decode(), body[8 : 8 + size].decode(), body[8 + size :]


def mutated(message: bytes, rng: random.Random) -> bytes:
    """A message with one to three things changed in it; mostly with a digest that fits."""
    if rng.random() < 0.15:
        for _ in range(rng.randrange(1, 4)):
            message = mutate_bytes(message, rng)
        return message[:-32] + hashlib.sha256(message[:-32]).digest() if rng.random() < 0.9 else message
    kind, header_text, listed, data = parts(message)
    header, entries = json.loads(header_text), json.loads(listed)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.5:
            mutate_tree(header, rng)
        else:
            data = mutate_entries(entries, data, rng)
    top, inner = spelt(header), spelt(entries)
    twice = rng.random()
    if twice < 0.02 and len(top) > 2:
        top = top[:-1] + b"," + top[1:]
    elif twice < 0.04 and len(inner) > 2:
        inner = inner[:-1] + b"," + inner[1:]
    if rng.random() < 0.02:
        kind = rng.randrange(6)
    result = sealed(kind, top, struct.pack("<Q", len(inner)) + inner + data)
    return mutate_bytes(result, rng) if rng.random() < 0.03 else result


# The oracle


@dataclass
class Found:
    """What a run of the fuzzer saw: how many messages, what became of them, how long they took, what was wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    times: Counter[int] = field(default_factory=Counter)
    """Messages by the time that refusing took, in steps of 10 %: step n is up to 1.1^n microseconds."""
    faults: list[tuple[str, bytes]] = field(default_factory=list)

    def add(self, other: "Found") -> None:
        self.outcomes += other.outcomes
        self.times += other.times
        self.faults += other.faults

    @property
    def messages(self) -> int:
        return self.outcomes.total()

    def quantile(self, share: float) -> float:
        """How many milliseconds this share of the refused messages took at most."""
        left = share * self.times.total()
        for step in sorted(self.times):
            left -= self.times[step]
            if left <= 0:
                return 1.1**step / 1e3
        return 0.0

    def __str__(self) -> str:
        shares = ", ".join(f"{100 * q:g} % in {self.quantile(q):.2f} ms" for q in (0.5, 0.99, 0.999, 0.9999))
        return f"{self.messages} messages: {dict(sorted(self.outcomes.items()))}; refused {shares}"


def wrong_with(error: DbclError) -> str:
    """What is wrong with the text of a refusal; empty where nothing is."""
    lines = str(error).split("\n  - ")
    for line in lines:
        if len(line) > 300:
            return f"a reason of {len(line)} characters"
        if not line.isprintable() or "[" in line or "<" in line:
            return f"a reason that is not plain: {line!r}"
    return f"{len(lines)} reasons" if len(lines) > 22 else ""


class Watch:
    """Adds up the processor time of what is done inside `with`."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def __enter__(self) -> None:
        self._began = time.thread_time_ns()

    def __exit__(self, *error: object) -> None:
        self.nanoseconds += time.thread_time_ns() - self._began


def read_update(subject: Subject, data: bytes, rng: random.Random, watch: Watch) -> None:
    with watch:
        update = dbcl.protocol.decode_update(data)
        result = subject.server.validate({"a": data if rng.random() < 0.1 else update})
    for rejection in result.rejected.values():
        reason = str(rejection)
        if reason.startswith("cannot be read"):
            raise AssertionError(f"the validator caught what the decoder let through: {reason}")
        raise dbcl.errors.ProtocolError(reason)


def read_broadcast(subject: Subject, data: bytes, rng: random.Random, watch: Watch) -> None:
    with watch:
        broadcast = dbcl.protocol.decode_broadcast(data)
        dbcl.blinded(subject.template, broadcast, require=BroadcastRequirements() if rng.random() < 0.1 else None)


def read_base(subject: Subject, data: bytes, rng: random.Random, watch: Watch) -> None:
    with watch:
        base = dbcl.protocol.decode_base(data)
    module = copy.deepcopy(subject.template)
    try:
        with watch:
            dbcl.protocol.load_base(module, base)
    except DbclError:
        for name, tensor in subject.template.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor), f"a refused base changed {name}"
        raise


def read_checkpoint(subject: Subject, data: bytes, rng: random.Random, watch: Watch) -> None:
    if rng.random() < 0.01:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "round-00000001.dbcl").write_bytes(data)
            state = checkpoint.load(Path(folder))
    else:
        with watch:
            state = State(*unpack(CHECKPOINT, data))
    if rng.random() > 0.2:
        return
    before, server = server_state(subject.server), copy.deepcopy(subject.server)
    try:
        server.load_state(state)
    except DbclError:
        after = server_state(server)
        assert after.values == before.values, "a refused checkpoint changed a value"
        assert all(torch.equal(after.tensors[n], t) for n, t in before.tensors.items()), "... changed a tensor"
        raise


READERS = {UPDATE: read_update, BROADCAST: read_broadcast, BASE: read_base, CHECKPOINT: read_checkpoint}


def judge(subject: Subject, kind: int, data: bytes, rng: random.Random, found: Found) -> None:
    """Hand bytes to what reads this kind, and note what became of them."""
    watch = Watch()
    try:
        READERS[kind](subject, data, rng, watch)
    except DbclError as error:
        found.times[math.ceil(math.log(max(watch.nanoseconds / 1e3, 1.0), 1.1))] += 1
        found.outcomes["refused"] += 1
        wrong = wrong_with(error)
    except RecursionError:
        found.outcomes["faults"] += 1
        wrong = "RecursionError"
    except Exception as error:
        found.outcomes["faults"] += 1
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        found.outcomes["taken"] += 1
        wrong = ""
    if wrong:
        found.faults.append((f"{KINDS[kind]} ({subject.name}): {wrong}", data))


def close_with(subject: Subject, data: bytes, found: Found) -> None:
    """A round with three honest updates and this one commits; then the server goes back to where it was."""
    server, honest = subject.server, subject.honest[UPDATE]
    before, sent = server.state(), dbcl.encode(server.open_round())
    try:
        report = server.close_round([honest[0], data, *honest[1:]])
    except Exception as error:
        found.faults.append((f"close_round ({subject.name}): {type(error).__name__}: {error}", data))
        return
    if report.accepted < 3 or server.round != before.values["round"]["number"] + 1:
        found.faults.append((f"close_round ({subject.name}): {report}", data))
    if any(wrong_with(dbcl.errors.ProtocolError(reason)) for reason in report.refused):
        found.faults.append((f"close_round ({subject.name}): {report.refused}", data))
    server.load_state(before)
    if dbcl.encode(server.open_round()) != sent:
        found.faults.append((f"close_round ({subject.name}): another broadcast after going back", data))


def fuzz(messages: int, seed: int) -> Found:
    """Read so many mutated messages of all models and kinds."""
    found, rng = Found(), random.Random(seed)
    chosen = [(subject, kind, each) for subject in subjects() for kind, many in subject.honest.items() for each in many]
    before = {subject.name: subject.fingerprint() for subject in subjects()}
    for _ in range(messages):
        subject, kind, message = rng.choice(chosen)
        data = mutated(message, rng)
        judge(subject, kind, data, rng, found)
        if kind == UPDATE and rng.random() < 0.005:
            close_with(subject, data, found)
    for subject in subjects():
        if subject.fingerprint() != before[subject.name]:
            found.faults.append((f"{subject.name}: refused messages have changed the model (seed {seed})", b""))
    return found


class Thorough(random.Random):
    """Chooses the longer way where a reader has two."""

    def random(self) -> float:
        return 0.0


def read_corpus() -> Found:
    """Read the messages that once broke something, with every model."""
    found, rng = Found(), Thorough()
    for path in sorted(CORPUS.glob("*.dbcl")):
        kind = {name: number for number, name in KINDS.items()}[path.name.split("-")[0]]
        for subject in subjects():
            judge(subject, kind, path.read_bytes(), rng, found)
            close_with(subject, path.read_bytes(), found)
    return found


def prepare() -> None:
    """Set up a process that only fuzzes."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    logging.getLogger("dbcl").setLevel(logging.CRITICAL)  # each damaged checkpoint is named in the log


def chunks(messages: int, seed: int) -> Iterator[tuple[int, int]]:
    for number, start in enumerate(range(0, messages, CHUNK)):
        yield min(CHUNK, messages - start), seed * 1_000_000_007 + number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where messages with faults go")
    options = parser.parse_args()
    prepare()
    total, told, began = read_corpus(), 0.0, time.monotonic()
    with ProcessPoolExecutor(options.processes, get_context("spawn"), prepare) as pool:
        for found in pool.map(fuzz, *zip(*chunks(options.messages, options.seed), strict=True)):
            for why, data in found.faults:
                options.out.mkdir(parents=True, exist_ok=True)
                name = f"{why.split(' ')[0]}-{hashlib.sha256(data).hexdigest()[:12]}.dbcl"
                (options.out / name).write_bytes(data)
                print(f"{name}: {why}", flush=True)
            total.add(found)
            if time.monotonic() - told > 20:
                told = time.monotonic()
                print(f"{told - began:.0f} s, {total}", flush=True)
    print(total, f"{len(total.faults)} faults", sep="\n")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(main())
