"""`complexity`: time and bytes of a forward and backward pass against din, dout, s and the batch."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl import blinded
from dbcl.config import SketchConfig
from dbcl.plan import SketchPlan
from dbcl.protocol import Server, encoded_size
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown

BASE = {"batch": 256, "din": 2048, "dout": 2048, "s": 1024}
QUICK_BASE = {"batch": 128, "din": 1024, "dout": 1024, "s": 512}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
NAMES = {"plain": "plain pass", "sketched": "sketched pass", "server": "server: sketch W and lift"}


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One size at a time around a base; s never above din / 2 of the base's."""
    base = QUICK_BASE if quick else BASE
    found: list[ExperimentJob] = []
    for name, factor in itertools.product(base, FACTORS):
        sizes = {**base, name: int(base[name] * factor)}
        if name == "s":
            sizes["s"] = int(base["din"] * factor / 8)  # from din / 32 to din / 2
        if name == "din":
            sizes["s"] = base["din"] // 8  # fixed, below the smallest din
        found.append({"sweep": name, **sizes, "seed": 0, "repeats": 10 if quick else 30})
    return found


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Median seconds of a pass with and without sketch, on one thread, and the bytes of the messages."""
    sizes = {name: job[name] for name in BASE}
    context.tell(", ".join(f"{name} {value}" for name, value in sizes.items()), 0, 1)
    generator = torch.Generator().manual_seed(job["seed"])
    net = nn.Linear(job["din"], job["dout"], bias=False).to(context.device)
    with torch.no_grad():
        net.weight.copy_(torch.randn(net.weight.shape, generator=generator) / math.sqrt(job["din"]))
    x = torch.randn(job["batch"], job["din"], generator=generator).to(context.device).requires_grad_()
    ratio = job["din"] / job["s"]
    server = Server(
        net,
        SketchPlan.from_model(net, SketchConfig(ratio=ratio, coverage="all", veil=0.0, lanes=1)),
        insecure_seed=job["seed"],
    )
    broadcast = server.open_round()
    client = blinded(nn.Linear(job["din"], job["dout"], bias=False).to(context.device), broadcast)
    sketch = broadcast.plan.sketches["weight"]
    weight = net.weight.detach()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {
            "plain": _seconds(_both_ways(net, x), job["repeats"], context.device),
            "sketched": _seconds(_both_ways(client, x), job["repeats"], context.device),
            "server": _seconds(lambda: sketch.lift(sketch.apply(weight)), job["repeats"], context.device),
        }
    finally:
        torch.set_num_threads(threads)
    whole = Server(
        net, SketchPlan.from_model(net, SketchConfig(sketch="identity-v1", veil=0.0)), insecure_seed=0
    ).open_round()
    sent = {"plain": encoded_size(whole), "sketched": encoded_size(broadcast)}
    return {"seconds": seconds, "bytes": sent}


def _both_ways(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    parameters = list(layer.parameters())

    def run() -> None:
        z = layer(x)
        z.backward(z.detach())
        for parameter in parameters:
            parameter.grad = None
        x.grad = None

    return run


def _seconds(run: Callable[[], object], repeats: int, device: str) -> float:
    """The median time of one call; the first calls are not counted."""
    times = []
    for number in range(repeats + 3):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        if number >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The growth p of times ~ sizes^p, by least squares of the logarithms.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 3)
    1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def table(found: Results) -> str:
    """The fitted growth in each size, then all measurements."""
    growth, lines = [], []
    weights = _fitted(found)
    for sweep in BASE:
        jobs = found.jobs_of(sweep=sweep)
        runs = {job[sweep]: run for job in jobs for run in found.of(**job)}
        fitted = [_growth(runs, lambda run, kind=kind: run["seconds"][kind]) for kind in NAMES]  # type: ignore[misc]
        both = _growth(runs, lambda run: run["seconds"]["sketched"] + run["seconds"]["server"])
        said = f"{exponent([job[sweep] for job in jobs], [float(_terms(job) @ weights) for job in jobs]):.2f}"
        growth.append([sweep, said, both, *fitted, _growth(runs, lambda run: run["bytes"]["sketched"])])
        for job in jobs:
            cells = [_cells(run) for run in found.of(**job)] or [[NOT_RUN] * 6]
            lines.append([sweep, *(f"{job[name]:,}" for name in BASE), *cells[0]])
    heads = ["in", "the fitted formula", "sketched pass and server", *NAMES.values(), "bytes of a message"]
    every = ["sweep", "batch", "din", "dout", "s", *(f"{name}, ms" for name in NAMES.values())]
    every += ["sketched / plain", "bytes", "of plain"]
    text = (
        "One dense layer, forward and backward, float32, one thread on a CPU: the exponent p of time ~ size^p over a "
        "factor of 16 in one size with the others fixed. The paper: O(b din + din dout + b s dout) for a pass with the "
        "sketch of W in it, against O(b din dout). Here the server sketches W once a round, apart from the clients' "
        "passes. A message has s / din of the plain bytes."
    )
    jobs, times = _times(found)
    off = np.abs(np.array([_terms(job) @ weights for job in jobs]) / times - 1)
    cost = [f"{1e9 * weight:.3g}" for weight in weights]
    fit = (
        f"Fitted to all {len(jobs)} measurements of a sketched pass and the server's part together: {cost[0]} b din + "
        f"{cost[1]} din dout + {cost[2]} b s dout nanoseconds, which is off by {np.median(off):.0%} in the median and "
        f"by {off.max():.0%} at most."
    )
    return "\n\n".join([text, markdown(heads, growth), fit, markdown(every, lines)])


def _terms(job: ExperimentJob) -> NDArray[np.float64]:
    """The operations of the paper's O(b din + din dout + b s dout), each by itself."""
    b, din, dout, s = (float(job[name]) for name in BASE)
    return np.array([b * din, din * dout, b * s * dout])


def _times(found: Results) -> tuple[list[ExperimentJob], NDArray[np.float64]]:
    """The jobs that were played, and their seconds for a sketched pass and the server's part together."""
    pairs = [(job, run["seconds"]) for job in found.jobs for run in found.of(**job)]
    return [job for job, _ in pairs], np.array([each["sketched"] + each["server"] for _, each in pairs])


def _fitted(found: Results) -> NDArray[np.float64]:
    """Seconds for each of the three kinds of operations, none below zero, with the least relative squared error."""
    jobs, times = _times(found)
    terms, kept = np.array([_terms(job) for job in jobs]) / times[:, None], [0, 1, 2]
    while True:
        weights = np.linalg.lstsq(terms[:, kept], np.ones(len(times)), rcond=None)[0]
        if (weights >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(weights.argmin()))
    found_weights = np.zeros(3)
    found_weights[kept] = weights
    return found_weights


def _growth(runs: Mapping[int, Any], value: Callable[[Any], float]) -> str:
    if len(runs) < 3:
        return NOT_RUN
    return f"{round(exponent(list(runs), [value(run) for run in runs.values()]), 2) + 0.0:.2f}"  # no minus before 0


def _cells(run: Mapping[str, Any]) -> list[str]:
    seconds, sent = run["seconds"], run["bytes"]
    times = [f"{1000 * seconds[kind]:.3g}" for kind in NAMES]
    share = seconds["sketched"] / seconds["plain"]
    return [*times, f"{share:.2f}", f"{sent['sketched']:,}", f"{sent['sketched'] / sent['plain']:.3f}"]


def draw(found: Results) -> Mapping[str, Any]:
    """Time against each size, on logarithmic axes."""
    figure, panels = figures.new(13, 3.4, 1, 4)
    for axes, sweep in zip(panels[0], BASE, strict=True):
        runs = [(job[sweep], run) for job in found.jobs_of(sweep=sweep) for run in found.of(**job)]
        for kind, colour in zip(NAMES, figures.MORE, strict=False):
            points = [1000 * run["seconds"][kind] for _, run in runs]
            axes.plot([size for size, _ in runs], points, "o-", color=colour, label=NAMES[kind])
        figures.log_scale(axes, "x", base=2)
        figures.log_scale(axes, "y")
        figures.label(axes, sweep, "ms" if sweep == "batch" else "")
    return {"complexity": figure}


EXPERIMENT = Experiment(
    name="complexity",
    title="Time and bytes of a pass",
    what="Time and bytes of a forward and backward pass through a dense layer against din, dout, s and the batch.",
    minutes="2 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
)
