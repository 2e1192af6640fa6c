import logging
import stat
from pathlib import Path

import pytest
import torch

import dbcl
from dbcl.errors import ProtocolError
from dbcl.protocol import checkpoint
from dbcl.protocol.codec import CHECKPOINT, unpack
from protocol.conftest import answer, net, same, weights


def played(server: dbcl.Server, folder: Path, rounds: int) -> None:
    server.save(folder)
    for _ in range(rounds):
        server.close_round([answer(server.open_round())])
        server.save(folder)


def test_the_last_two_are_kept_and_the_newest_comes_back(server: dbcl.Server, tmp_path: Path) -> None:
    played(server, tmp_path, rounds=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000003.dbcl", "round-00000004.dbcl"]
    other = dbcl.Server.load(tmp_path, net(), dbcl.SketchConfig(coverage="hidden"))
    assert other.round == 4
    assert same(weights(other), weights(server))


def test_only_the_owner_may_read_it(server: dbcl.Server, tmp_path: Path) -> None:
    path = server.save(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path: Path) -> None:
    server = dbcl.Server(torch.nn.Linear(4, 2), dbcl.SketchConfig(coverage="all"))
    data = server.save(tmp_path).read_bytes()
    unpack(CHECKPOINT, data)
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(ProtocolError):
                unpack(CHECKPOINT, bytes(flipped))
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            unpack(CHECKPOINT, data[:length])
    with pytest.raises(ProtocolError):
        unpack(CHECKPOINT, data + b"\0")


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_the_last_whole_one_is_used(
    server: dbcl.Server, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    played(server, tmp_path, rounds=3)
    newest = tmp_path / "round-00000003.dbcl"
    data = newest.read_bytes()
    ruined = {
        "flip": data[:500] + bytes([data[500] ^ 4]) + data[501:],
        "truncate": data[:-1],
        "empty": b"",
        "garbage": b"\0" * 300,
    }
    newest.write_bytes(ruined[damage])
    with caplog.at_level(logging.WARNING):
        state = checkpoint.load(tmp_path)
    assert state.values["round"]["number"] == 2
    assert "passed over round-00000003.dbcl" in caplog.text


def test_no_checkpoint_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "round-1.dbcl").write_bytes(b"")  # not a name of ours
    with pytest.raises(ProtocolError, match="no whole checkpoint in"):
        checkpoint.load(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = dbcl.Server(torch.nn.Linear(4, 2), dbcl.SketchConfig(coverage="all"))
    path = server.save(tmp_path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        server.save(tmp_path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_save_never_deletes_what_it_wrote(server: dbcl.Server, tmp_path: Path) -> None:
    """In a folder with later rounds of another run the new file was the oldest, and was deleted at once."""
    played(server, tmp_path, rounds=3)
    fresh = dbcl.Server(net())
    with pytest.raises(ProtocolError, match="holds round 3 already, and this is round 0: of another run"):
        fresh.save(tmp_path)
    assert dbcl.Server.load(tmp_path, net(), dbcl.SketchConfig(coverage="hidden")).round == 3
    (tmp_path / "round-00000009.dbcl").write_bytes(b"half a file")
    server.save(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["round-00000002.dbcl", "round-00000003.dbcl"]
