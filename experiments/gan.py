"""`gan`: a client draws a class that only another client holds, with the shared model as discriminator.

The parameter-based attack of Hitaj et al. (2017), which the paper names as not covered. It takes no gradient and no
estimate of one, so that only what changes the model itself can stop it.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl import data
from dbcl.data import Dataset
from dbcl.engines import evaluate
from dbcl.protocol import Server
from dbcl.simulation import RunConfig, Task, presets
from dbcl.simulation.build import build_run_server, new_seed, public_setting
from dbcl.simulation.task import of_pictures
from dbcl.simulation.training import update_noise
from dbcl.transcripts import Recorder, Transcript
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.gradient_matching import pictures, pixels
from experiments.tables import NOT_RUN, markdown

if TYPE_CHECKING:
    from dbcl_audit.attacks.gan import GanAttacker, GanEngine

SHOWN = 10
"""Number of drawings that a row keeps."""
ESTIMATED = ("paper", "blind", "private-example", "private")
"""Presets that send the model with a sketch or noise; a smoother's estimate of W is attacked, too."""
PROMISES = {"private-example": "epsilon 8 for each example", "private": "epsilon 8 for each client"}


def network() -> nn.Module:
    """A small CNN for 28 x 28 pixels, ten classes and the attacker's own one.

    >>> network()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 11])
    """
    layers: list[nn.Module] = []
    for din, dout in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(din, dout, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 11))


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One run for each preset, one in which nobody has the class, and where many clients share, one without noise."""
    few: ExperimentJob = {
        "data": "mnist",
        "clients": 2,
        "fraction": 1.0,
        "examples": 3000,
        "drawings": 500,
        "steps": 10,
    }
    few |= {"rounds": 40, "lr": 0.05, "batch_size": 32, "held": True, "target": 3, "judge": 300, "seed": 0}
    example = few | {"rounds": 100, "lr": 0.5, "examples": 6000, "batch_size": 100}
    many = few | {"clients": 200, "fraction": 0.1, "examples": 6000, "drawings": 60, "rounds": 200, "steps": 40}
    many |= {"batch_size": 10}
    if quick:
        few |= {"data": "digits", "examples": 1000, "drawings": 200, "rounds": 10, "judge": 60, "steps": 5}
        many |= {"data": "digits", "examples": 2000, "clients": 100, "rounds": 40, "judge": 60, "steps": 10}
        return [{"preset": name, **few} for name in ("plain", "paper", "blind")] + [{"preset": "private", **many}]
    return [
        {"preset": "plain", **few},
        {"preset": "plain", **few, "held": False},
        {"preset": "paper", **few},
        {"preset": "blind", **few},
        {"preset": "private-example", **example},
        {"preset": "plain", **many},
        {"preset": "private", **many},
    ]


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Play the run with the attacker among its clients, and measure what its generators draw."""
    from dbcl_audit import image_quality as quality  # needs SciPy, which is an extra
    from dbcl_audit.attacks.gan import estimated_models, measure

    dataset = data.load(job["data"], context.data_dir)
    context.tell(f"{_name(job)}: an independent classifier", 0, 1)
    judged = partial(measure, dataset=dataset, target=job["target"], judge=_judge(job, context.data_dir))
    with tempfile.TemporaryDirectory() as scratch:
        engine, server, task, attacker = _assemble(job, dataset, Path(scratch))
        for number in range(1, job["rounds"] + 1):
            engine.play_round()
            context.tell(f"{_name(job)}: round {number}", number, job["rounds"])
        kinds = {"received": attacker.drawings}
        if job["preset"] in ESTIMATED:
            again = _attacker(job, dataset)
            for model in estimated_models(Transcript(Path(scratch) / "client-0", partial(task.make_model, 1))):
                again.learn(model)
                context.tell(f"{_name(job)}: generator on estimates of W", again.turns, attacker.turns)
            kinds["estimated"] = again.drawings
    released, of_target = server.released, np.flatnonzero(dataset.y_test.numpy() == job["target"])
    real, box = dataset.x_test[torch.from_numpy(of_target)], quality.span(dataset)
    return {
        "accuracy": round(evaluate(released, task.held_out).score, 4),
        "of_target": round(evaluate(released, task.held_out.subset(of_target)).score, 4),
        "turns": attacker.turns,
        "real": _rounded(asdict(judged(real))),
        "drawn": {kind: _rounded(asdict(judged(drawings))) for kind, drawings in kinds.items()},
        "shape": list(dataset.shape),
        "pictures": {kind: pixels(quality.unit(_some(each), box)) for kind, each in {"real": real, **kinds}.items()},
    }


def _assemble(job: ExperimentJob, dataset: Dataset, folder: Path) -> "tuple[GanEngine, Server, Task, GanAttacker]":
    """The engine with its attacker, recording what that sees."""
    from dbcl_audit.attacks.gan import ATTACKER, GanEngine, divide_classes, with_drawings

    rng = np.random.default_rng(job["seed"])
    rows = torch.from_numpy(rng.permutation(len(dataset.y_train))[: job["examples"]])
    few = replace(dataset, x_train=dataset.x_train[rows], y_train=dataset.y_train[rows])
    shared, config = with_drawings(few, job["drawings"]), _config(job)
    parts = divide_classes(shared.y_train, job["target"], few.outputs, job["clients"], held=job["held"])
    task = replace(of_pictures(config, shared), division=parts)
    seed = new_seed(config)
    server = build_run_server(config, task, seed=seed)
    engine = GanEngine(
        server,
        task.make_model(job["seed"] + 1),
        task.train.divide(parts),
        task.training(config),
        objective=task.objective,
        fraction=config.share,
        seed=seed,
        noise=update_noise(config),
    )
    engine.in_turns = config.privacy is not None and config.privacy.unit == "client"
    engine.attacker = attacker = _attacker(job, dataset)
    engine.drawings = np.flatnonzero(shared.y_train.numpy() == few.outputs)
    engine.observer = Recorder(folder, [str(ATTACKER)], server, public_setting(config, task, server.plan))
    return engine, server, task, attacker


def _config(job: ExperimentJob) -> RunConfig:
    own = {name: job[name] for name in ("data", "clients", "fraction", "rounds", "lr", "batch_size", "seed")}
    return presets.preset(job["preset"], model="experiments.gan:network", **own)


def _attacker(job: ExperimentJob, dataset: Dataset) -> "GanAttacker":
    from dbcl_audit.attacks.gan import GanAttacker, GanSettings
    from dbcl_audit.image_quality import span

    settings = GanSettings(target=job["target"], steps=job["steps"])
    return GanAttacker(dataset.shape, span(dataset), settings, count=job["drawings"], seed=job["seed"])


def _judge(job: ExperimentJob, data_dir: str | None) -> nn.Module:
    return _trained_judge(job["data"], job["judge"], data_dir)


@lru_cache(maxsize=2)
def _trained_judge(name: str, steps: int, data_dir: str | None) -> nn.Module:
    from dbcl_audit.attacks.gan import judge

    return judge(data.load(name, data_dir), steps=steps)


def _some(drawings: Tensor) -> Tensor:
    """Some of them, of all the rounds that they are of."""
    return drawings[:SHOWN]


def table(found: Results) -> str:
    """A line for each run and for each kind of model that the generator learned from."""
    lines = []
    for job in found.jobs:
        place = [_preset(job), job["clients"], "the victim alone" if job["held"] else "nobody"]
        runs = found.of(**job)
        if not runs:
            lines.append([*place, NOT_RUN, *[""] * 5])
            continue
        run = runs[0]
        for kind, drawn in run["drawn"].items():
            scores = [f"{drawn['called']:.0%}", f"{drawn['nearest']:.0%}", f"{drawn['psnr']:.1f}"]
            learned = [f"{run['accuracy']:.1%}", f"{run['of_target']:.1%}"]
            lines.append([*place, *learned, "received" if kind == "received" else "smoother's W", *scores])
    heads = ["preset", "clients", "who has the class", "accuracy", "of the class", "discriminator"]
    heads += ["called the class", "nearest to its mean", "PSNR with its mean, dB"]
    first, real = found.jobs[0], [run["real"] for run in found.of()]
    truth = (
        f" Of real pictures of the class it is {real[0]['called']:.0%}, {real[0]['nearest']:.0%} and "
        f"{real[0]['psnr']:.1f} dB."
        if real
        else ""
    )
    text = (
        f"A client draws the digit {first['target']}, which only one other client has, by a GAN whose discriminator "
        "is the model that it receives in each round; it trains on its drawings as a class of their own (Hitaj et "
        "al.). Shares of drawings that an independent CNN, which learned from held-out pictures and may say that a "
        "drawing is no digit, calls the class; that are nearer to the held-out mean of the class than to any other "
        f"class's; and the median PSNR with that mean.{truth} Accuracy is that of the released model on held-out "
        "pictures, of all classes and of this one. The line where nobody has the class says what is drawn without any "
        "victim. A small CNN, the other classes divided evenly. Scaled: a few thousand examples and tens of rounds; "
        f"`private` with {max(job['clients'] for job in found.jobs)} clients where the preset has 1,000, of which a "
        "tenth take part in a round, so that the same epsilon costs more noise; beside it `plain` with as many. "
        "The paper names this attack as not covered, and has no numbers."
    )
    return "\n\n".join([text, markdown(heads, lines)])


def draw(found: Results) -> Mapping[str, Any]:
    """Real pictures of the class, and a line of drawings for each run and discriminator."""
    lines: list[tuple[str, Any]] = []
    for job in found.jobs:
        for run in found.of(**job):
            shown = {name: pictures(text, run["shape"]) for name, text in run["pictures"].items()}
            lines = lines or [("real", shown["real"])]
            for kind, drawn in run["drawn"].items():
                whose = "" if job["held"] else ", nobody has it"
                on = "" if kind == "received" else ", smoother's W"
                title = f"{_preset(job)}, {job['clients']} clients{whose}{on}: {drawn['called']:.0%}"
                lines.append((title, shown[kind]))
    figure, panels = figures.new(12, 0.85 * len(lines), len(lines), SHOWN)
    for line, (title, drawings) in zip(panels, lines, strict=True):
        for axes, picture in zip(line, drawings, strict=False):
            axes.imshow(picture[0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        for axes in line:
            axes.grid(visible=False)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(title.replace("`", ""), rotation=0, ha="right", va="center", fontsize=9)
    return {"gan": figure}


def _preset(job: ExperimentJob) -> str:
    promise = PROMISES.get(job["preset"])
    return f"`{job['preset']}`" + (f" ({promise})" if promise else "")


def _name(job: ExperimentJob) -> str:
    return f"{job['preset']}, {job['clients']} clients" + ("" if job["held"] else ", nobody has the class")


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in scores.items()}


EXPERIMENT = Experiment(
    name="gan",
    title="A class that another client holds, drawn by a GAN",
    what="A client trains a GAN against the shared model to draw another client's class: plain, paper, blind, private.",
    minutes="20 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist",),
    extras={"scipy": "audit"},
)
