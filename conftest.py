"""What every test needs: one thread a process, no waiting for the disk, and real datasets where they are."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Tests run in several processes, and their kernels are small: more threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
os.environ["COLUMNS"] = "160"  # rich reads it when its console is made


def pytest_collection_finish() -> None:
    """Keep what the imports left out of garbage collections: some of Flower's strategies start one for every array."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk. Programs that a test starts and kills are not affected: they sync."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Give the folder of a real dataset under DBCL_DATA, or skip the test where it is missing."""

    def find(relative: str) -> Path:
        path = Path(os.environ.get("DBCL_DATA", "/nowhere")) / relative
        if not path.exists():
            pytest.skip(f"DBCL_DATA has no {relative}")
        return path

    return find
