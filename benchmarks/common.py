"""What the benchmarks share: interleaved timing, a table, and a JSON file with the machine and the versions."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

import dbcl

RESULTS = Path(__file__).parent / "results"
TINY = "--tiny" in sys.argv
"""Only show that the script runs: one repeat of the first sizes. The tests start every script in this way."""
Size = TypeVar("Size")


def sizes(every: Sequence[Size]) -> Sequence[Size]:
    """Return the sizes to measure: all of them, or the first with `--tiny`."""
    return every[:1] if TINY else every


def one_thread() -> None:
    """Everything on one thread; NumPy's library must be told before it is loaded, so the Makefile does that."""
    torch.set_num_threads(1)
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        raise SystemExit("set OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1, as `make bench` does")


def interleaved(sides: Mapping[str, Callable[[], object]], *, repeats: int, inner: int = 1) -> dict[str, list[float]]:
    """Time all sides in turn, again and again, so that a noisy moment meets all of them; seconds a call."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    repeats, inner = (1, 1) if TINY else (repeats, inner)
    for side in sides.values():
        side()
    for _ in range(repeats):
        for name, side in sides.items():
            began = time.perf_counter()
            for _ in range(inner):
                side()
            times[name].append((time.perf_counter() - began) / inner)
    return times


def ratios(times: Mapping[str, list[float]], to: str) -> dict[str, dict[str, float]]:
    """Each side's median time and its ratio to one of them, with the spread of that ratio over the repeats."""
    table = {}
    for name, values in times.items():
        each = sorted(value / base for value, base in zip(values, times[to], strict=True))
        spread = (each[-1 - len(each) // 4] - each[len(each) // 4]) / 2  # half the distance of the quartiles
        table[name] = {
            "median_us": round(1e6 * statistics.median(values), 1),
            "ratio": round(statistics.median(each), 3),
            "spread": round(spread, 3),
        }
    return table


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "dbcl": dbcl.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["cuda"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def report(name: str, results: Mapping[str, Any], command: str) -> None:
    """Write the JSON of a benchmark."""
    parser = argparse.ArgumentParser(description=f"benchmark: {name}")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help="one repeat of the first sizes: only shows that it runs")
    path = parser.parse_args().out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"benchmark": name, "command": command, **machine(), "results": results}, indent=2) + "\n"
    )
    print(f"written: {path}")


def show(title: str, table: Mapping[str, Mapping[str, float]]) -> None:
    """Print one table of ratios."""
    print(f"\n{title}")
    width = max(map(len, table))
    for name, row in table.items():
        print(f"  {name:<{width}}  {row['median_us']:>12,.1f} us  x {row['ratio']:<7.3f} +- {row['spread']:.3f}")
