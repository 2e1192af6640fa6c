"""Mutated messages are refused with a short reason, change nothing, and cost little; see fuzz.py."""

import gc
import json
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import dbcl
from dbcl.errors import DbclError
from dbcl.protocol.codec import BROADCAST, CHECKPOINT, UPDATE, pack, unpack
from robustness import fuzz

MB = 1 << 20
HEADER = {"round": 1, "plan": "ab", "examples": 5, "metrics": {}}


def test_two_thousand_mutated_messages() -> None:
    found = fuzz.fuzz(2_000, seed=1)
    assert [why for why, _ in found.faults] == []
    assert found.outcomes["refused"] > 1_000
    assert found.outcomes["taken"] > 50  # some change nothing that matters: the mutations reach past the decoder
    assert found.quantile(0.99) < 20  # milliseconds; 0.4 on an idle machine


def test_messages_that_once_broke_something() -> None:
    found = fuzz.read_corpus()
    assert found.messages >= 6 * len(fuzz.subjects())
    assert [why for why, _ in found.faults] == []


def test_the_fuzzer_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that lets a negative round through, and one that crashes, are both found."""
    honest = dbcl.protocol.decode_update

    def careless(data: bytes) -> dbcl.Update:
        update = honest(data)
        assert len(update.tensors) >= 4
        return update

    monkeypatch.setattr(dbcl.protocol, "decode_update", careless)
    assert any("AssertionError" in why for why, _ in fuzz.fuzz(1_000, seed=2).faults)


def test_nothing_is_nested_too_deep_to_be_refused() -> None:
    """What JSON could just read and not write again was a RecursionError."""
    for depth in range(900, 1_001):
        nested = b"[" * depth + b"]" * depth
        data = fuzz.sealed(UPDATE, b'{"examples":' + nested + b"}", struct.pack("<Q", 2) + b"{}")
        with pytest.raises(dbcl.errors.ProtocolError):
            dbcl.protocol.decode_update(data)


def test_memory_stays_in_proportion() -> None:
    """At most three times the message and a little, over small messages of every kind."""
    rng, subject = random.Random(3), fuzz.subjects()[0]
    tracemalloc.start()
    try:
        for _ in range(300):
            kind = rng.choice([BROADCAST, UPDATE, CHECKPOINT])
            data = fuzz.mutated(rng.choice(subject.honest[kind]), rng)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            fuzz.judge(subject, kind, data, rng, fuzz.Found())
            assert tracemalloc.get_traced_memory()[1] - before < 3 * len(data) + 4 * MB
    finally:
        tracemalloc.stop()


def update(header: bytes | None = None, entries: Any = None, data: bytes = b"") -> bytes:
    listed = b"{}" if entries is None else json.dumps(entries, separators=(",", ":")).encode()
    text = json.dumps(HEADER, sort_keys=True, separators=(",", ":")).encode() if header is None else header
    return fuzz.sealed(UPDATE, text, struct.pack("<Q", len(listed)) + listed + data)


def entry(shape: list[int], begin: int = 0, end: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def broadcast(shape: list[int], width: int) -> bytes:
    header = {"round": 0, "seed": "00" * 32, "parts": [["weight", shape, "count-v1", width, width]]}
    return pack(BROADCAST, header, {"weight": torch.zeros(shape[0], width)})


KILLERS = {
    "a tensor of no rows and 2^63 columns": lambda: update(entries={"w": entry([0, 1 << 63])}),
    "a metric of 10^307": lambda: pack(UPDATE, {**HEADER, "metrics": {"loss": 10**307}}, {}),
    "ten million inputs": lambda: broadcast([1, 10_000_000], 1),
    "1.5 million names": lambda: update(entries={f"{n:036d}": entry([0]) for n in range(1_500_000)}),
    "a million empty lists": lambda: update(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"),
    "400,000 empty objects": lambda: update(b'{"a":[' + b"{}," * 199_990 + b"{}]}"),
    "20,000 names": lambda: update(entries={f"{n:0150d}": entry([0]) for n in range(20_000)}),
    "a number of 4 million digits": lambda: update(b'{"round":' + b"9" * 4_000_000 + b"}"),
    "a text of 4 million escapes": lambda: update(b'{"plan":"' + b"\\u0001" * 600_000 + b'"}'),
    "a deep list": lambda: update(b'{"a":' + b"[" * 390_000 + b"]" * 390_000 + b"}"),
    "64 MB of tensor": lambda: update(entries={"w": entry([16 * MB], 0, 64 * MB)}, data=bytes(64 * MB)),
    "64 MB of nothing": lambda: bytes(64 * MB),
}


def cost_of(name: str) -> dict[str, Any]:
    """What reading one large message costs: its length, the memory at its peak, the seconds."""
    template, server = torch.nn.Linear(6, 2), dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all"))
    server.open_round()
    data = KILLERS[name]()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, began = resident("VmRSS"), time.process_time()
    try:
        if data[5:6] == bytes([BROADCAST]):
            dbcl.blinded(template, dbcl.protocol.decode_broadcast(data))
        else:
            dbcl.protocol.decode_update(data)
            raise dbcl.errors.ProtocolError(str(server.validate({"a": data}).rejected["a"]))
    except DbclError as error:
        if wrong := fuzz.wrong_with(error):
            raise AssertionError(f"{name}: {wrong}") from error
    else:
        raise AssertionError(f"{name}: it was taken")
    seconds = time.process_time() - began
    return {"name": name, "bytes": len(data), "peak": resident("VmHWM") - before, "seconds": seconds}


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


LARGE = [name for name in KILLERS if "MB" in name or "1.5" in name]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it")
@pytest.mark.parametrize(
    "names", [[name for name in KILLERS if name not in LARGE], pytest.param(LARGE, marks=pytest.mark.slow)], ids=len
)
def test_no_message_costs_more_than_its_size(names: list[str]) -> None:
    program = (
        f"import sys, json; sys.path[:0] = {sys.path!r}; from robustness.test_fuzz import cost_of; "
        f"print(json.dumps([cost_of(name) for name in {names!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)
    assert [cost["name"] for cost in costs] == names
    for cost in costs:
        assert cost["peak"] < 3 * cost["bytes"] + 64 * MB, cost
        assert cost["seconds"] < 5, cost


@pytest.mark.slow
def test_three_hundred_thousand_mutated_messages(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(fuzz.__file__)), "--messages", "300000", "--seed", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    played = re.findall(r"^(\d+) messages", done.stdout, flags=re.MULTILINE)
    assert int(played[-1]) >= 300_000  # and the whole ones that it begins with
    assert "\n0 faults" in done.stdout


def test_what_is_written_can_be_read() -> None:
    """A checkpoint grows with the rounds: one of 500,000 values was written, and could not be read again."""
    long = {"history": list(range(500_000))}
    assert unpack(CHECKPOINT, pack(CHECKPOINT, long, {}))[0] == long
    with pytest.raises(dbcl.errors.ProtocolError, match="update: the header has more than 400000 values"):
        pack(UPDATE, long, {})
    with pytest.raises(
        dbcl.errors.ProtocolError, match="update: 20001 tensors, and 20000 are the most that can be read"
    ):
        pack(UPDATE, HEADER, {str(number): torch.zeros(0) for number in range(20_001)})
