import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dbcl
from dbcl.config import SketchConfig
from dbcl.errors import DbclError, ProtocolError
from dbcl.model import networks
from dbcl.plan import SketchPlan
from dbcl.protocol.codec import BROADCAST, CHECKPOINT, UPDATE, pack, unpack
from protocol.conftest import answer, net, same, weights

GOLDEN = Path(__file__).parents[1] / "golden"


def make_server() -> dbcl.Server:
    torch.manual_seed(0)
    return dbcl.Server(net(), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)


def test_messages_come_back_as_they_were(server: dbcl.Server) -> None:
    broadcast = server.open_round()
    back = dbcl.protocol.decode_broadcast(dbcl.encode(broadcast))
    assert back.plan == broadcast.plan
    assert same(dict(back.tensors), dict(broadcast.tensors))
    update = answer(broadcast)
    again = dbcl.protocol.decode_update(dbcl.encode(update))
    assert (again.round, again.plan, again.examples, again.metrics) == (0, update.plan, 10, {"loss": 1.0})
    assert same(dict(again.tensors), dict(update.tensors))


def test_tensors_come_back_in_one_order() -> None:
    names = [f"tensor {number}" for number in range(10)]
    data = pack(CHECKPOINT, {}, {name: torch.zeros(1) for name in names})
    assert all(list(unpack(CHECKPOINT, data)[1]) == names for _ in range(5))


def golden_messages() -> dict[str, bytes]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + number / 2)
    broadcast = dbcl.Server(model, dbcl.SketchConfig(veil=0, lanes=1, coverage="hidden"), insecure_seed=0).open_round()
    lane = dbcl.Server(model, dbcl.SketchConfig(veil=0, coverage="hidden"), insecure_seed=0).open_round("ann")
    tensors = {name: torch.full_like(tensor, 0.25) for name, tensor in broadcast.tensors.items()}
    update = dbcl.Update(0, broadcast.plan.digest, tensors, examples=600, metrics={"loss": 0.5})
    model[1].weight.requires_grad_(False)
    frozen = dbcl.Server(model, dbcl.SketchConfig(veil=0, coverage=["0.weight"], lanes=1), insecure_seed=0).open_round()
    upwards = torch.nn.Sequential(torch.nn.ConvTranspose1d(4, 2, 1), torch.nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in upwards.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    inputs = dbcl.Server(upwards, dbcl.SketchConfig(veil=0, lanes=1, coverage="hidden"), insecure_seed=0).open_round()
    return {
        "broadcast.dbcl": dbcl.encode(broadcast),
        "broadcast-inputs.dbcl": dbcl.encode(inputs),
        "broadcast-frozen.dbcl": dbcl.encode(frozen),
        "broadcast-lane.dbcl": dbcl.encode(lane),
        "base.dbcl": dbcl.encode(
            dbcl.Server(model, dbcl.SketchConfig(coverage=["0.weight"], veil=0, send_frozen=True)).base()
        ),
        "update.dbcl": dbcl.encode(update),
    }


@pytest.mark.parametrize("name", [
    "broadcast.dbcl", "broadcast-frozen.dbcl", "broadcast-inputs.dbcl", "broadcast-lane.dbcl", "base.dbcl",
    "update.dbcl",
])  # fmt: skip
def test_golden_bytes(name: str) -> None:
    """Version 1 of the wire format is these bytes; a change is a new version and new golden files."""
    assert golden_messages()[name] == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", ["mnist-mlp", "mnist-cnn", "cifar-cnn"])
def test_half_the_bytes_of_a_plain_exchange(name: str) -> None:
    model = networks.build(name, shape=(3, 32, 32) if name == "cifar-cnn" else (1, 28, 28))

    def exchange(server: dbcl.Server) -> int:
        broadcast = server.open_round()
        local = dbcl.blinded(model, broadcast)
        return len(dbcl.encode(broadcast)) + len(dbcl.encode(dbcl.make_update(local, broadcast, examples=600)))

    sketched = exchange(dbcl.Server(model, dbcl.SketchConfig(ratio=2, coverage="hidden")))
    plain = exchange(dbcl.Server(model, SketchPlan.from_model(model, SketchConfig(sketch="identity-v1", veil=0))))
    assert sketched <= 0.51 * plain
    assert sketched == pytest.approx(
        exchange(dbcl.Server(model, dbcl.SketchConfig(ratio=2, lanes=1, coverage="hidden"))), abs=50
    )  # the lane's number


def seal(data: bytes) -> bytes:
    """Give mutated bytes a fitting digest, as a malicious sender would."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


@given(data=st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_messages_never_crash_and_never_change_the_model(data: st.DataObject) -> None:
    server = make_server()
    broadcast = server.open_round()
    before = weights(server)
    for encoded, decode in (
        (dbcl.encode(answer(broadcast)), dbcl.protocol.decode_update),
        (dbcl.encode(broadcast), dbcl.protocol.decode_broadcast),
    ):
        mutated = bytearray(encoded)
        for _ in range(data.draw(st.integers(1, 4))):
            # Mostly the structured front part, where every byte means something.
            end = len(mutated) - 1 if data.draw(st.booleans()) else min(len(mutated) - 1, 700)
            place = data.draw(st.integers(0, max(end, 0)))
            kind = data.draw(st.integers(0, 3))
            if kind == 0:
                mutated[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
            elif kind == 1:
                del mutated[place : place + data.draw(st.integers(1, 40))]
            elif kind == 2:
                mutated[place:place] = data.draw(st.binary(min_size=1, max_size=20))
            else:
                mutated = mutated[: max(place, 1)]
        message = bytes(mutated)
        if message != encoded:
            with pytest.raises(ProtocolError):
                decode(message)
            with pytest.raises(ProtocolError):
                server.close_round([message])
        # With a digest that fits, the message may be legal; then it may be refused or not, but it must not crash.
        try:
            decoded = decode(seal(message)) if len(message) > 64 else None
            if isinstance(decoded, dbcl.Broadcast):
                dbcl.blinded(net(), decoded)
        except DbclError:
            pass
    assert same(before, weights(server))
    assert server.round == 0


HEADER = {"round": 0, "plan": "ab", "examples": 5, "metrics": {}}
PARTS = [["w", [2, 6], "count-v1", 3, 3]]
LANED = [["w", [2, 6], "lanes-v1", 3, 3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round": -1}, "'round' cannot be '-1'"),
        ({"round": True}, "'round' cannot be 'True'"),
        ({"round": 1.5}, "'round' cannot be '1.5'"),
        ({"examples": "5"}, "'examples' cannot be '5'"),
        ({"examples": None}, "'examples' cannot be 'None'"),
        ({"metrics": [1]}, "'metrics' cannot be"),
        ({"metrics": {"loss": "low"}}, "'metrics' cannot be"),
        ({"metrics": {"loss": 10**400}}, "'metrics' cannot be"),
        ({"plan": 7}, "'plan' cannot be '7'"),
        ({"more": 1}, "unknown fields 'more'"),
    ],
)
def test_each_field_of_an_update_is_checked(changes: dict, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        dbcl.protocol.decode_update(pack(UPDATE, {**HEADER, **changes}, {}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "00"}, "'seed' cannot be '00'"),
        ({"seed": "zz" * 32}, "'seed' cannot be"),
        ({"parts": [["w", [2, 6], "count-v9", 3, 3]]}, "'parts' cannot be"),
        ({"parts": [["w", [6], "count-v1", 3, 3]]}, "'parts' cannot be"),
        ({"parts": [["\ud800", [2, 6], "count-v1", 3, 3]]}, "'parts' cannot be"),
        ({"parts": [["w", [2, -6], "count-v1", 3, 3]]}, "'parts' cannot be"),
        ({"parts": [["w", [6, 2], "count-v1", 3, 3, [2]]]}, "'parts' cannot be"),
        ({"parts": [["w", [6, 2], "count-v1", 3, 3, [1]]]}, "'parts' cannot be"),
        ({"parts": [["w", [6, 2], "count-v1", 3, 3, [0, 1]]]}, "'parts' cannot be"),
        ({"parts": [["w", [6, 2], "identity-v1", 3, 3, [0]]]}, "'parts' cannot be"),
        ({"parts": [["w", [4, 6], "count-v1", 3, 3, [0]]]}, "has shape .2, 3. and must have .6, 3."),
        ({"parts": PARTS * 2}, "named twice"),
        ({"parts": [["w", [1 << 50, 1 << 50], "count-v1", 3, 3]]}, "'parts' cannot be"),
        ({"parts": [["w", [1 << 20, 6], "count-v1", 3, 3]]}, "has shape .2, 3. and must have"),
        ({"parts": [["w", [2, 6], "count-v1", 2, 3]]}, "'parts' cannot be"),
        ({"parts": [["w" * 501, [2, 6], "count-v1", 3, 3]]}, "'parts' cannot be"),
        ({"parts": []}, "'w' was not asked for"),
        *[
            ({"parts": LANED, "lane": lane}, "'lane' cannot be")
            for lane in (
                None,
                0,
                "0",
                {},
                [],
                [0],
                [0, 2, 0],
                [[0], 2],
                ["0", 2],
                [0, "2"],
                [True, 2],
                [0, True],
                [0.0, 2],
                [0, 2.0],
                [-1, 2],
                [2, 2],
                [3, 2],
                [0, 1],
                [0, 0],
                [0, -2],
                [0, 1025],
                [1 << 63, 1 << 64],
                [None, 2],
            )
        ],
        ({"parts": LANED}, "has sketches in lanes, and the header does not say which lane"),
        ({"parts": LANED, "lanes": [0, 2]}, "unknown fields 'lanes'"),
        ({"parts": [["w", [2, 6], "lanes-v2", 3, 3]], "lane": [0, 2]}, "'parts' cannot be"),
        ({"parts": [["w", [6], "lanes-v1", 3, 3]], "lane": [0, 2]}, "'parts' cannot be"),
    ],
)
def test_each_field_of_a_broadcast_is_checked(changes: dict, message: str) -> None:
    header = {"round": 0, "seed": "00" * 32, "parts": PARTS, **changes}
    with pytest.raises(ProtocolError, match=message):
        dbcl.protocol.decode_broadcast(pack(BROADCAST, header, {"w": torch.zeros(2, 3)}))


@pytest.mark.parametrize("lane", [[0, 2], [1, 2], [1023, 1024]])
def test_a_lane_comes_back_from_the_wire(lane: list[int]) -> None:
    header = {"round": 0, "seed": "00" * 32, "parts": LANED, "lane": lane}
    data = pack(BROADCAST, header, {"w": torch.zeros(2, 3)})
    broadcast = dbcl.protocol.decode_broadcast(data)
    assert [broadcast.plan.lane, broadcast.plan.lanes] == lane
    assert dbcl.encode(broadcast) == data
    assert repr(broadcast.sketches()["w"]) == f"LaneSketch(6 -> 3, lane {lane[0]} of {lane[1]})"


@pytest.mark.parametrize(("width", "columns"), [(7, 7), (6, 6), (0, 0), (4, 3)])
def test_a_lane_of_a_width_that_cannot_be_is_refused(width: int, columns: int) -> None:
    parts = [["weight", [2, 6], "lanes-v1", width, columns]]
    header = {"round": 0, "seed": "00" * 32, "parts": parts, "lane": [1, 2]}
    broadcast = dbcl.protocol.decode_broadcast(pack(BROADCAST, header, {"weight": torch.zeros(2, columns)}))
    with pytest.raises(DbclError, match=r"width must be between 1 and 5|the sketch has 4 columns, and the plan says 3"):
        dbcl.blinded(torch.nn.Linear(6, 2, bias=False), broadcast)


def test_plans_of_other_lanes_have_other_digests() -> None:
    made = []
    for lane in ([0, 2], [1, 2], [0, 3], None):
        parts = PARTS if lane is None else LANED
        header = {"round": 0, "seed": "00" * 32, "parts": parts, **({} if lane is None else {"lane": lane})}
        made.append(dbcl.protocol.decode_broadcast(pack(BROADCAST, header, {"w": torch.zeros(2, 3)})).plan.digest)
    assert len(set(made)) == 4


def test_a_sketch_that_a_plan_misstates_is_refused() -> None:
    header = {"round": 0, "seed": "00" * 32, "parts": [["weight", [2, 6], "count-v1", 4, 3]]}
    broadcast = dbcl.protocol.decode_broadcast(pack(BROADCAST, header, {"weight": torch.zeros(2, 3)}))
    with pytest.raises(DbclError, match="the sketch has 4 columns, and the plan says 3"):
        dbcl.blinded(torch.nn.Linear(6, 2, bias=False), broadcast)


def test_one_kind_is_not_taken_for_another(server: dbcl.Server) -> None:
    broadcast = server.open_round()
    with pytest.raises(ProtocolError, match="update: expected, but these bytes are a broadcast"):
        dbcl.protocol.decode_update(dbcl.encode(broadcast))


SPELT = json.dumps(HEADER, sort_keys=True, separators=(",", ":")).encode()


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def listed(entries: dict, size: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def raw(header: bytes, body: bytes) -> bytes:
    data = struct.pack("<4sBBI", b"DBCL", 1, UPDATE, len(header)) + header + body
    return data + hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        (b"[" * 100_000, b"", "the header is not JSON"),
        (b"\xff\xfe", b"", "the header is not JSON"),
        (b"[]", b"", "the header is not an object"),
        (json.dumps(HEADER).encode(), b"", "the header is not written as dbcl writes it"),
        (b"[" * (5 << 20), b"", "a header of 5242880 bytes does not fit"),
        (b'{"a":[' + b"[]," * 400_000 + b"1]}", b"", "the header has more than 400000 values"),
        (SPELT[:-1] + b',"round":0}', b"", "a name stands twice"),
        (SPELT, b"", "the tensors cannot be read .cut short"),
        (SPELT, b"\xff" * 8 + b"{}", "the tensors cannot be read .cut short"),
        (SPELT, struct.pack("<Q", 1 << 40) + b"{}", "the tensors cannot be read .cut short"),
        (SPELT, listed({"w": entry([0, 1 << 62], 0, 0)}), "the shape of 'w' cannot be"),
        (SPELT, listed({"w": entry([2], 0, 4)}, 4), "'w' has 4 bytes, which is not what its shape and dtype take"),
        (SPELT, listed({"w": entry([1], 0, 4), "v": entry([1], 8, 12)}, 12), "a gap or an overlap"),
        (SPELT, listed({"w": entry([2], 0, 8), "v": entry([1], 4, 8)}, 8), "a gap or an overlap"),
        (SPELT, listed({"w": entry([1], 0, 4)}, 9), "5 bytes are no tensor's"),
        (SPELT, listed({"w": entry([1], 0, 4, dtype="F3")}, 4), "the dtype of 'w' cannot be 'F3'"),
        (SPELT, listed({"w": {}}), "the entry of 'w' is not one of a tensor"),
        (SPELT, listed({"\x1b[31m": entry([1], 0, 4)}, 4), "a tensor cannot be called '.\\(31m'"),
        (SPELT, listed({f"{n}": entry([0], 0, 0) for n in range(20_001)}), "20001 tensors, more than 20000"),
    ],
)
def test_hostile_structure_is_a_protocol_error(header: bytes, body: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        dbcl.protocol.decode_update(raw(header, body))


def test_a_header_longer_than_the_message_is_refused() -> None:
    data = struct.pack("<4sBBI", b"DBCL", 1, UPDATE, 1 << 31) + b"{}"
    with pytest.raises(ProtocolError, match="a header of 2147483648 bytes does not fit"):
        dbcl.protocol.decode_update(data + hashlib.sha256(data).digest())
