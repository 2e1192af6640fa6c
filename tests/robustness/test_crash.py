"""A crash at every I/O call of checkpoint, run, transcripts and Flower's state, and going on; see crash.py."""

from pathlib import Path

import pytest

import dbcl.simulation.run
from robustness import crash


@pytest.mark.parametrize("name", crash.SCENARIOS)
def test_a_crash_now_and_then(name: str) -> None:
    """Six points of each scenario, spread over its calls, with every kind of crash among them."""
    listed = crash.points(name)
    step = len(listed) // 6 | 1  # odd, so that the kinds take turns
    assert {point: said for point in listed[::step] if (said := crash.crash(name, *point))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", crash.KINDS)
@pytest.mark.parametrize("name", crash.SCENARIOS)
def test_a_crash_at_every_call(name: str, kind: str) -> None:
    listed = [point for point in crash.points(name) if point[1] == kind]
    assert len(listed) > 25  # 684 calls in all, so 2,736 crashes
    assert {point: said for point in listed if (said := crash.crash(name, *point))} == {}


def test_the_harness_finds_a_file_that_is_not_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(path: Path, data: bytes, *, mode: int = 0o644) -> None:
        with open(path, "wb") as file:
            file.write(data)

    monkeypatch.setattr(dbcl.simulation.run, "write_atomic", careless)
    crash.undisturbed.cache_clear()
    found = [said for point in crash.points("resume")[:80] if (said := crash.crash("resume", *point))]
    crash.undisturbed.cache_clear()
    assert found
