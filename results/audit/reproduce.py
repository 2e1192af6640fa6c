"""The figures of docs/threat-model.md, from the library's own attacks.

    python results/audit/reproduce.py updates       options, rewind and smoother on the paper's setting (MNIST)
    python results/audit/reproduce.py pictures      one picture, from the server's and a client's seat (MNIST, CIFAR-10)
    python results/audit/reproduce.py properties    a property of a batch (LFW)
    python results/audit/reproduce.py theory        the paper's theorems and the veil's formula, against simulation
    python results/audit/reproduce.py veil          all of it against the size of the veil (embedded digits)
    python results/audit/reproduce.py large         how long the smoother takes for 2,048 inputs and 300 rounds

Each writes a JSON file beside this one and prints its table. DBCL_DATA says where the datasets lie.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from dbcl import blinded, data, models
from dbcl.audit import picture_quality as pictures
from dbcl.audit import simulation
from dbcl.audit.attacks.gradients import as_gradient, gradients
from dbcl.audit.attacks.matching import Matching, recover
from dbcl.audit.attacks.properties import property_findings
from dbcl.audit.attacks.updates import estimates
from dbcl.audit.attacks.victim import Changes, victims_rounds
from dbcl.audit.budget import FULL
from dbcl.audit.estimators.kalman import Scales
from dbcl.audit.estimators.smoother import smoother
from dbcl.audit.estimators.view import View, views
from dbcl.audit.rehearsal import Rehearsal, draw_batches, rehearse
from dbcl.audit.scoring import predicted_cosine, score
from dbcl.audit.suite import property_script
from dbcl.blind import lift
from dbcl.protocol import Server
from dbcl.run import Run, RunConfig, Task, preset, task_of
from dbcl.run.task import of_pictures
from dbcl.sketch import CountSketch

HERE = Path(__file__).parent


def quiet(text: str) -> None:
    """Say what is being done, on one line."""
    print(f"\r{text:<90}", end="", file=sys.stderr, flush=True)


def write(name: str, rows: Any, began: float) -> None:
    """Write one table."""
    facts = {"command": f"python results/audit/reproduce.py {name}", "torch": torch.__version__}
    body = {**facts, "seconds": round(perf_counter() - began), "results": rows}
    (HERE / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    print(f"\n{json.dumps(rows, indent=1)}")


def cosines(rehearsal: Rehearsal, names: list[str], min_lag: int) -> tuple[dict[str, Any], dict[str, Changes]]:
    """Median cosine and error of every estimator, for each sketched tensor."""
    seen = views(rehearsal.attacker)
    found = estimates(rehearsal.attacker, names, quiet)
    table: dict[str, Any] = {}
    for name, changes in found.items():
        for tensor, guesses in changes.items():
            view = seen[tensor]
            if view.sketched:
                each = score(rehearsal.truth, view, guesses)
                cosine, error = each.median_cosine(min_lag), each.median_error(min_lag)
                table.setdefault(name, {})[tensor] = {"cosine": round(cosine, 4), "error": float(f"{error:.3g}")}
    return table, found


def updates(scratch: Path) -> Any:
    config = preset("paper", data="mnist", lr=0.01)
    task = task_of(config)
    script = draw_batches(np.arange(len(task.train)), (150, 2, 32), 0)
    rehearsal = rehearse(config, task, script, scratch)
    return cosines(rehearsal, ["option I", "option II", "rewind", "smoother"], 40)[0]


def one_picture(name: str, index: int, number: int, steps: int, tv: float) -> dict[str, float]:
    """A single picture from the server's seat: no sketch, the paper's attacker, and one that knows the sketch."""
    dataset = data.load(name)
    x, y = dataset.x_test[index : index + 1].double(), dataset.y_test[index : index + 1]
    box, shape = pictures.span(dataset), dataset.shape
    model, template = (models.build("dlg-lenet", shape=shape, seed=seed).double() for seed in (number, 99))
    broadcast = Server(model, veil=0, ratio=2, lanes=1, insecure_seed=number).open_round()
    client = blinded(template, broadcast)
    plain, sketched = gradients(model, x, y), gradients(client, x, y)
    sketched = {key: value.detach() for key, value in sketched.items()}
    adaptive = Matching(steps=steps, box=box, tv=tv, restarts=3 if tv == 0 else 1)
    sides = {
        "no sketch": (model, plain, adaptive),
        "the paper's attacker": (model, lift(broadcast.plan, sketched), Matching(steps=600, restarts=1, box=box)),
        "adaptive": (client, sketched, adaptive),
    }
    found = {}
    for side, (attacked, target, settings) in sides.items():
        quiet(f"{name}, picture {number}: {side}")
        result = recover(attacked, target, shape, None, 1, settings, seed=number)
        found[side] = float(pictures.psnr(result.images, x, box)[0])
    return found


def client_pictures(config: RunConfig, dataset: data.Dataset, scratch: Path, estimator: str, count: int) -> list[float]:
    """A victim's single pictures from a client's seat, through an estimator."""
    script = draw_batches(np.arange(len(dataset.y_train)), (48 + count, 2, 1), 5)
    rehearsal = rehearse(config, of_pictures(config, dataset), script, scratch)
    found = estimates(rehearsal.attacker, [estimator], quiet)[estimator]
    known = victims_rounds(rehearsal, views(rehearsal.attacker), {estimator: found}, range(count))
    template, box, values = rehearsal.attacker.template().double(), pictures.span(dataset), []
    for number in range(count):
        quiet(f"a client's seat, {estimator}, veil {config.veil}: picture {number}")
        broadcast, changes = known[number].broadcast, known[number].others_update(found, number, 2)
        target = {name: change.reshape(broadcast.tensors[name].shape) for name, change in changes.items()}
        noisy = config.veil > 0
        settings = Matching(
            steps=600, box=box, tv=0.1 if noisy else 0.0, anneal_tv=not noisy, restarts=1 if noisy else 3
        )
        client = blinded(template, broadcast)
        result = recover(client, as_gradient(target, config.lr), dataset.shape, None, 1, settings, seed=number)
        truth = dataset.x_train[script[number, 1]].double()
        values.append(float(pictures.psnr(result.images, truth, box)[0]))
    return values


def batch(count: int) -> list[dict[str, float]]:
    """Several pictures at once, from the server's seat."""
    dataset = data.load("mnist")
    x, y = dataset.x_test[:count].double(), dataset.y_test[:count]
    model, template = (models.build("dlg-lenet", shape=dataset.shape, seed=seed).double() for seed in (0, 99))
    broadcast = Server(model, veil=0, ratio=2, lanes=1, insecure_seed=0).open_round()
    client = blinded(template, broadcast)
    target = {key: value.detach() for key, value in gradients(client, x, y).items()}
    quiet(f"{count} pictures at once")
    settings = Matching(steps=2000, box=pictures.span(dataset), restarts=1, label="known")
    result = recover(client, target, dataset.shape, y, count, settings, seed=0)
    return [{"adaptive": float(value)} for value in pictures.psnr(result.images, x, pictures.span(dataset))]


def pictures_(scratch: Path) -> Any:
    rows = [one_picture("mnist", 37 * number, number, 1000, 0.0) for number in range(5)]
    table: dict[str, Any] = {"MNIST, server's seat": summary(rows)}
    rows = [one_picture("cifar10", 37 * number, number, 2000, 1.0) for number in range(3)]
    table["CIFAR-10, server's seat, with a prior"] = summary(rows)
    for count in (2, 4):
        table[f"MNIST, server's seat, {count} pictures at once, labels known"] = summary(batch(count))
    config = preset("paper", data="mnist", model="dlg-lenet", lr=0.1)
    values = client_pictures(config, data.load("mnist"), scratch, "rewind", 3)
    table["MNIST, a client's seat on top of rewind"] = summary([{"adaptive": value} for value in values])
    return table


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    table = {}
    for side in rows[0]:
        each = [round(row[side], 1) for row in rows]
        table[side] = {"median dB": float(np.median(each)), "each": each}
    return table


def aucs(rehearsal: Rehearsal, task: Task, spare: Any, found: Any, batches: int, examples: int) -> dict[str, str]:
    rows = property_findings(
        rehearsal, task, task.holds, spare, found, batches=batches, examples=examples, seed=0, tell=quiet
    )
    return {f"{row.attack}, {row.seat}'s seat": f"{row.value:.3f} ({row.low:.2f} to {row.high:.2f})" for row in rows}


def properties(scratch: Path) -> Any:
    return side_by_side(partial(inferred, scratch), ("plain", "paper"))


def inferred(scratch: Path, name: str) -> dict[str, str]:
    """The property on LFW under one preset."""
    config = preset(name, data="lfw", model="lfw-cnn", lr=0.01)
    task = task_of(config)
    spare, script = property_script(task, replace(FULL, rounds=134), 2, 0)
    quiet(f"{name}: rehearsal")
    rehearsal = rehearse(config, task, script, scratch / name)
    names = ["option I"] if name == "plain" else ["option I", "smoother"]
    found = estimates(rehearsal.attacker, names, quiet)
    return aucs(rehearsal, task, spare, found, 6, 400)


def side_by_side(one: Callable[[Any], Any], many: tuple[Any, ...]) -> dict[str, Any]:
    """One row of a table for each of many, in processes of one thread each: two threads would wait for each other."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with ProcessPoolExecutor(min(len(many), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        return {str(each): row for each, row in zip(many, pool.map(one, many), strict=True)}


def veil(scratch: Path) -> Any:
    table = side_by_side(partial(veiled, scratch), (0.0, 0.05, 0.2, 0.5))
    draw(table)
    return table


def veiled(scratch: Path, rho: float) -> dict[str, Any]:
    """One row of the table; a machine with four cores makes all four at a time."""
    dataset, config = data.load("digits"), preset("paper", lr=0.01, veil=rho)
    task = task_of(config)
    row: dict[str, Any] = {}
    for clients in (2, 10):
        spare, script = property_script(task, replace(FULL, rounds=120), clients, 0)
        rehearsal = rehearse(config, task, script, scratch / f"{rho}-{clients}")
        names = ["smoother", "shaped smoother"] if clients == 2 else ["smoother"]
        scores, found = cosines(rehearsal, names, 40)
        if clients == 2:
            seen = views(rehearsal.attacker)
            row["cosine"] = {name: {t: s["cosine"] for t, s in each.items()} for name, each in scores.items()}
            row["formula"] = {
                tensor: round(predicted_cosine(rehearsal.truth, seen[tensor], rho), 4) for tensor in scores["smoother"]
            }
        row[f"property AUC, {clients} clients"] = aucs(rehearsal, task, spare, found, 3, 100)
    picture = preset("paper", model="dlg-lenet", lr=0.1, veil=rho)
    values = client_pictures(picture, dataset, scratch / f"{rho}-p", "rewind" if rho == 0 else "smoother", 3)
    row["client's picture, dB"] = summary([{"each": value} for value in values])["each"]
    run = Run.start(preset("paper", veil=rho, rounds=200, seed=0), scratch / f"{rho}-run")
    row["accuracy after 200 rounds"] = [metrics.score for metrics in run.play()][-1]
    return row


def theory_(scratch: Path) -> Any:
    checks = [simulation.simulate_veil(kappa, rounds=20_000, seed=8) for kappa in (0.3, 1.0, 3.0, 10.0)]
    for scheme in ("count-v1", "count-hashed-v1", "sampling-v1"):
        checks.append(simulation.simulate_option_one(scheme, dout=6, dim=24, width=12, draws=4000, seed=1))
        checks.append(simulation.simulate_linear(scheme, dout=6, dim=24, width=12, draws=4000, seed=2))
        checks += simulation.simulate_unbiased(scheme, dim=6, width=3, draws=20_000, seed=3)[:1]
    checks.append(simulation.simulate_listing(dim=5, ratio=2, draws=4000, seed=4))
    return {check.name: f"{check.measured:.4g} +- {check.error:.2g}, formula {check.predicted:.4g}" for check in checks}


def large(scratch: Path) -> Any:
    """A random walk of 64 rows, seen through a sketch to half its 2,048 inputs, with a veil and without."""
    dim, width, rows, rounds, step = 2048, 1024, 64, 300, 1e-3
    generator = torch.Generator().manual_seed(0)
    table = {}
    for rho in (0.0, 0.2):
        weights = torch.randn(rows, dim, dtype=torch.float64, generator=generator)
        sketches, seen, changes = [], [], []
        for number in range(rounds):
            sketch = CountSketch(dim, width, seed=bytes(32), round=number, name="large")
            compact = sketch.apply(weights)
            changes.append(sketch.lift(step * torch.randn(compact.shape, dtype=torch.float64, generator=generator)))
            noise = torch.randn(compact.shape, dtype=torch.float64, generator=generator)
            sketches.append(sketch)
            seen.append(compact + rho * noise)
            weights = weights + changes[-1]
        own = tuple(torch.zeros_like(compact) for compact in seen)
        view = View("large", tuple(range(rounds)), (1,) * rounds, tuple(sketches), tuple(seen), own)
        began = perf_counter()
        scales = Scales(max(rho, 1e-7), step, 1.0)
        found = smoother(view, scales, on_step=lambda done, of: quiet(f"{done} of {of}"))
        seconds = perf_counter() - began
        cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b in zip(found[:250], changes, strict=False)]
        table[f"veil {rho}"] = {
            "seconds": round(seconds, 1),
            "median cosine, rounds 0 to 249": round(float(np.median(cosines)), 4),
        }
    return {"threads": torch.get_num_threads(), **table}


def draw(table: dict[str, Any]) -> None:
    """The trade-off as one picture: what leaks against the size of the veil."""
    from matplotlib.figure import Figure  # here, so that the tables do not need it

    rhos = [float(rho) for rho in table]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = min(next(iter(table.values()))["formula"])  # a message's tensors come in any order
    lines = {
        "smoother": [row["cosine"]["smoother"][first] for row in table.values()],
        "shaped smoother": [row["cosine"]["shaped smoother"][first] for row in table.values()],
        "formula": [row["formula"][first] for row in table.values()],
    }
    for name, values in lines.items():
        left.plot(rhos, values, "o--" if name == "formula" else "o-", label=name)
    left.set(xlabel="veil, relative to the weights", ylabel=f"cosine with the other's update, {first}", ylim=(0, 1.03))
    for clients in (2, 10):
        for learner in ("matched filter", "random forest"):
            values = [best(row, learner, clients) for row in table.values()]
            right.plot(
                rhos, values, "o-" if learner == "matched filter" else "o:", label=f"{learner}, {clients} clients"
            )
    right.plot(rhos, [row["accuracy after 200 rounds"] for row in table.values()], "k.-", label="accuracy")
    right.set(xlabel="veil, relative to the weights", ylabel="AUC of the property; accuracy", ylim=(0.4, 1.03))
    for axes in (left, right):
        axes.legend(fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "veil.png", dpi=110)


def best(row: dict[str, Any], learner: str, clients: int) -> float:
    """The highest AUC of a learner from a client's seat, whatever it was given."""
    found = row[f"property AUC, {clients} clients"]
    return max(float(text.split()[0]) for name, text in found.items() if learner in name and "client's" in name)


PARTS = {
    "updates": updates,
    "pictures": pictures_,
    "properties": properties,
    "theory": theory_,
    "veil": veil,
    "large": large,
}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in PARTS:
        raise SystemExit(__doc__)
    began = perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        write(sys.argv[1], PARTS[sys.argv[1]](Path(scratch)), began)


if __name__ == "__main__":
    main()
