"""`theory`: the paper's lemmas, theorems and corollary by simulation, against the formulas; and the veil's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dbcl.sketch import CountSketch
from dbcl_audit import theory_checks
from dbcl_audit.theory import corollary_factor, printed_linear_error, remark_residual, veil_cosine
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import markdown

SCHEMES = {
    "count-hashed-v1": "hashed buckets",
    "count-v1": "balanced buckets, which the paper's listing draws",
    "sampling-v1": "uniform sampling",
}
TITLES = {"unbiased": "E[S S^T]", "product": "lemma 5", "option I": "theorem 1", "linear": "theorem 2"}
KAPPAS = (0.1, 0.3, 1.0, 3.0, 10.0)
DIMS = (16, 64, 256, 1024)
DOUTS = (4, 16, 64)
SIZES = {"dout": 6, "dim": 24, "width": 12}


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Means over many draws first; then the formulas that need no simulation."""
    draws, many, rounds = (1000, 4000, 5_000) if quick else (4000, 20_000, 20_000)
    found: list[ExperimentJob] = []
    for scheme in SCHEMES:
        found.append({"check": "unbiased", "scheme": scheme, "draws": many, "seed": 3})
        found.append({"check": "product", "scheme": scheme, "draws": draws, "seed": 5})
        found.append({"check": "option I", "scheme": scheme, "draws": draws, "seed": 1})
        found.append({"check": "linear", "scheme": scheme, "draws": draws, "seed": 2})
    found.append({"check": "listing", "draws": draws, "seed": 4})
    found += [{"check": "veil", "kappa": kappa, "rounds": rounds, "seed": 8} for kappa in KAPPAS]
    found += [{"check": "corollary", "mean": mean, "dim": dim, "seed": 0} for mean in (0.0, 1.0) for dim in DIMS]
    found += [{"check": "remark", "dout": dout, "seed": 0} for dout in DOUTS]
    return found


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """One formula and what it was compared with."""
    context.tell(", ".join(f"{name} {value}" for name, value in job.items() if name != "seed"), 0, 1)
    kind, seed = job["check"], job["seed"]
    if kind == "corollary":
        return {"factor": corollary_factor(job["mean"], job["dim"], seed=seed)}
    if kind == "remark":
        return {"residual": _remark(job["dout"], seed)}
    if kind == "veil":
        return _facts(theory_checks.simulate_veil(job["kappa"], rounds=job["rounds"], seed=seed))
    if kind == "listing":
        return _facts(theory_checks.simulate_listing(dim=5, ratio=2, draws=job["draws"], seed=seed))
    if kind == "unbiased":
        return _facts(theory_checks.simulate_unbiased(job["scheme"], dim=6, width=3, draws=job["draws"], seed=seed)[0])
    if kind == "product":
        return _facts(theory_checks.simulate_product(job["scheme"], draws=job["draws"], seed=seed))
    if kind == "option I":
        return _facts(theory_checks.simulate_option_one(job["scheme"], **SIZES, draws=job["draws"], seed=seed))
    found = _facts(theory_checks.simulate_linear(job["scheme"], **SIZES, draws=job["draws"], seed=seed))
    return {**found, "printed": _printed(seed)}


def table(found: Results) -> str:
    """Every statement, what the paper says of it, and what came out."""
    lines = []
    for scheme, name in SCHEMES.items():
        lines += _lines(found, f"E[x S S^T y^T] = x y^T, {name}", "equal", check="unbiased", scheme=scheme)
    for scheme, name in SCHEMES.items():
        statement = f"Lemma 5, E\\|A S S^T B^T - A B^T\\|^2 / \\|A B^T\\|^2, {name}"
        lines += _lines(found, statement, _said(scheme, "equal, with hashed buckets"), check="product", scheme=scheme)
    for scheme, name in SCHEMES.items():
        said = _said(scheme, "Omega(din/s) (|W_old|^2 + |W_new|^2)")
        statement = f"Theorem 1, E\\|D_hat - D\\|^2 / \\|D\\|^2, {name}"
        lines += _lines(found, statement, said.replace("|", "\\|"), check="option I", scheme=scheme)
    for scheme, name in SCHEMES.items():
        runs = found.of(check="linear", scheme=scheme)
        said = _said(scheme, f"{runs[0]['printed']:.4g}" if runs else "")
        lines += _lines(found, f"Theorem 2, the same of D V^T, {name}", said, check="linear", scheme=scheme)
    lines += _lines(
        found, "E\\|x S\\|^2 / \\|x\\|^2 by the paper's listing, din 5, q 2", "1 (unbiased)", check="listing"
    )
    for kappa in KAPPAS:
        lines += _lines(
            found, f"veil of {kappa:g} update sizes: cosine of a smoother", "(ours)", check="veil", kappa=kappa
        )
    headings = ["statement", "the paper", "our formula", "simulated", "standard errors apart"]
    return "\n\n".join([markdown(headings, lines), *_constants(found)])


def _said(scheme: str, text: str) -> str:
    """Return the paper's statement, which is about count sketches."""
    return "–" if scheme == "sampling-v1" else text


def _lines(found: Results, statement: str, said: str, **which: Any) -> list[list[str]]:
    return [
        [
            statement,
            said,
            f"{run['predicted']:.4g}",
            f"{run['measured']:.4g} ± {run['error']:.2g}",
            f"{round(run['deviation'], 1) + 0.0:+.1f}",
        ]
        for run in found.of(**which)
    ]


def _constants(found: Results) -> list[str]:
    """The corollary and the remark, which are about constants that must not vanish."""
    factors = [
        [
            f"entries with mean {mean:g}",
            *(_first(found, "factor", check="corollary", mean=mean, dim=dim) for dim in DIMS),
        ]
        for mean in (0.0, 1.0)
    ]
    residuals = [[_first(found, "residual", check="remark", dout=dout) for dout in DOUTS]]
    return [
        "The corollary says that E\\|(D_hat - D) V^T\\|^2 / (din/s \\|W V^T\\|^2) stays above a constant as din grows:",
        markdown(["", *(f"din {dim}" for dim in DIMS)], factors),
        "The remark hopes for a residual of Omega(1) \\|D\\|^2 after the best Z_1, Z_2 (din 32, s 16):",
        markdown([f"dout {dout}" for dout in DOUTS], residuals),
    ]


def _first(found: Results, name: str, **which: Any) -> str:
    return next((f"{run[name]:.3g}" for run in found.of(**which)), "not run")


def draw(found: Results) -> Mapping[str, Any]:
    """Simulated over predicted for the theorems; the veil's formula; the corollary's constant."""
    figure, panels = figures.new(11, 3.4, 1, 3)
    left, middle, right = panels[0]
    runs = [(kind, SCHEMES[scheme], run) for kind in TITLES for scheme in SCHEMES
            for run in found.of(check=kind, scheme=scheme)]  # fmt: skip
    for place, (_, _, run) in enumerate(runs):
        size = abs(run["predicted"])
        left.errorbar(
            run["measured"] / size, -place, xerr=2 * run["error"] / size, fmt="o", ms=4, color=figures.MORE[0]
        )
    left.axvline(1, color=figures.MORE[-1], linewidth=0.8)
    left.set_yticks([-place for place in range(len(runs))], [f"{TITLES[k]}, {s.split(',')[0]}" for k, s, _ in runs])
    figures.label(left, "simulated / formula, ± 2 standard errors", "")
    points = [(kappa, run) for kappa in KAPPAS for run in found.of(check="veil", kappa=kappa)]
    wide = torch.logspace(-1, 1, 60).tolist()
    middle.plot(wide, [veil_cosine(kappa) for kappa in wide], color=figures.MORE[-1], label="formula")
    middle.plot(
        [k for k, _ in points], [run["measured"] for _, run in points], "o", color=figures.MORE[0], label="simulated"
    )
    figures.log_scale(middle, "x")
    figures.label(middle, "veil, in sizes of an update", "cosine of the smoother")
    for mean, colour in ((0.0, figures.MORE[0]), (1.0, figures.MORE[1])):
        line = [(dim, run["factor"]) for dim in DIMS for run in found.of(check="corollary", mean=mean, dim=dim)]
        right.plot([dim for dim, _ in line], [value for _, value in line], "o-", color=colour, label=f"mean {mean:g}")
    figures.log_scale(right, "x", base=2)
    figures.log_scale(right, "y")
    figures.label(right, "din", "the corollary's constant")
    return {"theory": figure}


def _facts(check: theory_checks.Check) -> dict[str, float]:
    return {
        "measured": check.measured,
        "predicted": check.predicted,
        "error": check.error,
        "deviation": check.deviation,
    }


def _printed(seed: int) -> float:
    """Theorem 2 as it is printed, of the weights that are simulated, relative to |D V^T|^2."""
    old, new, V = theory_checks.draw_weights(SIZES["dout"], SIZES["dim"], 2, seed)
    size = float(((old - new) @ V.T).square().sum())
    return printed_linear_error(old, new, V, SIZES["width"]) / size


def _remark(dout: int, seed: int) -> float:
    old, new, _ = theory_checks.draw_weights(dout, 32, 1, seed)
    sketches: Sequence[CountSketch] = [CountSketch(32, 16, seed=bytes(32), round=number) for number in (0, 1)]
    return remark_residual(old, new, sketches[0], sketches[1])


EXPERIMENT = Experiment(
    name="theory",
    title="The paper's theory, simulated",
    what="Expectations and variances of the lemmas, theorems and the corollary by simulation, against the formulas.",
    minutes="1 on 2 cores",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
)
