"""Every benchmark starts: one repeat of its first sizes, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SHARED = {"authors", "common", "gate"}
DEVICE_ONLY = {"gpu"}
SCRIPTS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - SHARED - DEVICE_ONLY)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_starts_and_writes_its_results(name: str, tmp_path: Path) -> None:
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / f"{name}.py"), "--tiny", "--out", str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **one_thread})
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "b").read_text())["results"]
