"""`gradient-matching`: pictures back from gradients (DLG), by the server and by a client.

Without sketching, and with it by the paper's attacker and by one that knows the sketch: the server matches through it,
the client matches what rewind makes of all the broadcasts that it saw.
"""

import base64
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl import data
from dbcl.blinding import lift
from dbcl.data import Dataset
from dbcl.protocol import blinded
from dbcl.simulation import presets
from dbcl.simulation.task import of_pictures
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown

if TYPE_CHECKING:
    from dbcl_audit.simulated_run import SimulatedRun

LATER = 48
"""Rounds after the attacked ones: rewind goes backward through them from a guess."""
CASES = {"no sketch": "plain", "the paper's attacker": "paper", "adaptive": "paper"}
"""Attacked model and attacker of each case, by the preset of the run."""
ADVERSARIES = ("server", "client")
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "embedded digits"}
WORDS = {"no sketch": "very well recovers the images", "the paper's attacker": "completely fails", "adaptive": ""}


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One job for each picture, adversary and attacker; of batches only the server's, with known labels."""
    fixed: ExperimentJob = {"batch": 1, "lr": 0.1, "seed": 0}
    if quick:
        settings: dict[str, ExperimentJob] = {"digits": {"pictures": 2, "steps": 300, "restarts": 1, "tv": 0.0}}
    else:
        settings = {
            "mnist": {"pictures": 4, "steps": 1000, "restarts": 3, "tv": 0.0},
            "cifar10": {"pictures": 3, "steps": 2000, "restarts": 1, "tv": 1.0},
        }
    single = [
        {"data": name, "adversary": adversary, "case": case, "picture": number, **each, **fixed}
        for name, each in settings.items()
        for adversary in ADVERSARIES
        for case in CASES
        for number in range(each["pictures"])
    ]
    together = [] if quick else [
        {"data": "mnist", "adversary": "server", "case": case, "picture": 0, **settings["mnist"], **fixed}
        | {"batch": batch, "steps": 2000, "restarts": 1}
        for batch in (2, 4)
        for case in CASES
    ]  # fmt: skip
    return single + together


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Simulate the run, and match the gradient of one round."""
    from dbcl_audit import image_quality as quality  # needs SciPy, which is an extra
    from dbcl_audit.attacks.matching import Matching, recover

    dataset = data.load(job["data"], context.data_dir)
    box, round = quality.span(dataset), job["picture"]
    with tempfile.TemporaryDirectory() as scratch:
        context.tell(f"{_name(job)}: simulated run", 0, 1)
        simulated = _simulate(job, dataset, Path(scratch))
        model, gradient = target(simulated, job["adversary"], job["case"], round)
        rows = torch.from_numpy(simulated.script[round, 1])
    truth, labels = dataset.x_train[rows].double(), dataset.y_train[rows]
    label = "inferred" if job["batch"] == 1 else "known"
    settings = Matching(steps=job["steps"], restarts=job["restarts"], tv=job["tv"], box=box, label=label)
    context.tell(f"{_name(job)}: matching", 0, 1)
    found = recover(model, gradient, dataset.shape, labels, job["batch"], settings, seed=job["picture"])
    context.tell(f"{_name(job)}", 1, 1)
    images = quality.pair(found.images, truth, box)
    mean = dataset.x_train[:1000].double().mean(dim=0, keepdim=True).expand_as(truth)
    return {
        "psnr": _rounded(quality.psnr(images, truth, box, ordered=True)),
        "guess": _rounded(quality.psnr(mean, truth, box, ordered=True)),
        "loss": float(f"{found.loss:.4g}"),
        "shape": list(dataset.shape),
        "truth": pixels(quality.unit(truth, box)),
        "rebuilt": pixels(quality.unit(images, box)),
    }


def _simulate(job: ExperimentJob, dataset: Dataset, folder: Path) -> "SimulatedRun":
    """Two clients, a step on one batch each in every round; the same batches whatever is sketched."""
    from dbcl_audit.simulated_run import draw_batches, simulate_batches

    config = presets.preset(CASES[job["case"]], data=job["data"], model="dlg-lenet", lr=job["lr"])
    rounds = LATER + job["pictures"]
    script = draw_batches(np.arange(len(dataset.y_train)), (rounds, 2, job["batch"]), job["seed"] + 5)
    return simulate_batches(config, of_pictures(config, dataset), script, folder, seed=job["seed"])


def target(
    simulated: "SimulatedRun", adversary: str, case: str, round: int, estimator: str = "rewind"
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the gradient that an attacker takes for the victim's, in a round.

    `estimator` is what an adaptive client makes of all the broadcasts that it saw.

    >>> from dbcl_audit.simulated_run import draw_batches, simulate_batches
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("paper", model="dlg-lenet", lr=0.1)
    >>> script = draw_batches(np.arange(100), (4, 2, 1), seed=0)
    >>> played = simulate_batches(config, task_of(config), script, Path(tempfile.mkdtemp()))
    >>> target(played, "server", "the paper's attacker", 0)[1]["0.2.weight"].shape  # over the inputs of W
    torch.Size([12, 12, 5, 5])
    >>> target(played, "server", "adaptive", 0)[1]["0.2.weight"].shape
    torch.Size([12, 150])
    """
    from dbcl_audit.attacks.gradients import as_gradient

    template, adaptive = simulated.attacker.template().double(), case == "adaptive"
    if adversary == "server":
        seen, broadcast, sent, _ = simulated.server_observation(round)
        assert seen.weights is not None
        weights, update = seen.weights, sent if adaptive else lift(broadcast.plan, sent)
    else:
        broadcast = simulated.attacker[round].broadcast
        weights, update = (
            lift(broadcast.plan, broadcast.tensors),
            _estimated(simulated, round, estimator if adaptive else ""),
        )
    if adaptive:
        template = blinded(template, broadcast)
    else:
        template.load_state_dict(weights)
    parts = {part.name: part.sent_shape if adaptive else part.shape for part in broadcast.plan.tensors}
    doubled = {name: tensor.double().reshape(parts[name]) for name, tensor in update.items()}
    return template, as_gradient(doubled, simulated.server.setting.local.lr)


def _estimated(simulated: "SimulatedRun", round: int, adaptive: str) -> dict[str, Tensor]:
    """The victim's update by a client: option I as the paper has it, or by an estimator that knows the sketch."""
    from dbcl_audit.attacks.updates import estimates, others_update_lifted
    from dbcl_audit.attacks.victim import victims_rounds
    from dbcl_audit.estimators.observations import tensor_observations

    name = adaptive or "option I"
    found, cohort = estimates(simulated.attacker, [name]), simulated.attacker.setting.cohort
    if adaptive:
        known = victims_rounds(simulated, tensor_observations(simulated.attacker), found, [round])[0]
        return known.others_update(found[name], round, cohort)
    layouts = {part.name: part.layout for part in simulated.attacker[round].broadcast.plan.tensors if part.sketched}
    lifted = others_update_lifted(found[name], round, cohort)
    return {key: layouts[key].weight(tensor) if key in layouts else tensor for key, tensor in lifted.items()}


def pixels(images: Tensor) -> str:
    """Pixels from 0 to 1 as bytes in base64, which a row can hold.

    >>> pixels(torch.tensor([0.0, 1.0]))
    'AP8='
    """
    return base64.b64encode((images * 255).round().to(torch.uint8).numpy().tobytes()).decode()


def pictures(text: str, shape: Sequence[int]) -> Any:
    """The pictures that `pixels` wrote, (count, channels, height, width).

    >>> pictures(pixels(torch.zeros(2, 1, 4, 4)), (1, 4, 4)).shape
    (2, 1, 4, 4)
    """
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8).reshape(-1, *shape)


def table(found: Results) -> str:
    """The PSNR of each dataset, adversary and number of pictures at once: the median, and each."""
    lines = []
    for name, adversary, batch in dict.fromkeys((job["data"], job["adversary"], job["batch"]) for job in found.jobs):
        cells, guesses = [], list[float]()
        for case in CASES:
            runs = found.of(data=name, adversary=adversary, batch=batch, case=case)
            values = [value for run in runs for value in run["psnr"]]
            guesses += [value for run in runs for value in run["guess"]]
            cells.append(f"{statistics.median(values):.1f} ({_each(values)})" if values else NOT_RUN)
        guess = f"{statistics.median(guesses):.1f}" if guesses else NOT_RUN
        lines.append([TITLES[name], adversary, batch, *cells, guess])
    heads = ["data", "adversary", "pictures at once", "no sketch, dB", "paper, the paper's attacker, dB"]
    heads += ["paper, adaptive attacker, dB", "the mean picture, dB"]
    said = "; ".join(f"{case}: “{words}”" for case, words in WORDS.items() if words)
    first = found.jobs[0]
    text = (
        "PSNR of the victim's pictures as gradient matching rebuilds them (the median, and each in brackets); from "
        "about 20 dB on one sees what they show. DLG's own network, two clients, one SGD step of rate "
        f"{first['lr']} a round; a picture is the victim's batch of one of the first rounds. Preset `plain` for no "
        "sketch, else `paper`. The paper's attacker takes the lifted update for a gradient of W (server), or option I "
        "(client). The adaptive "
        "server matches through the sketch that it knows; the adaptive client rewinds all rounds that it saw, of "
        f"which {LATER} come after the attacked ones. Labels are read off the output layer; with several pictures at "
        "once they are known. Where the data are CIFAR-10, all attackers have a total-variation prior that fades. "
        f"What the paper says of both datasets and adversaries, in words and pictures only: {said}; it has no adaptive "
        "attackers."
    )
    return "\n\n".join([text, markdown(heads, lines)])


def draw(found: Results) -> Mapping[str, Any]:
    """A line for each picture: the true one, and what each attacker rebuilt by either adversary, with its PSNR."""
    lines = list(dict.fromkeys((job["data"], job["picture"]) for job in found.jobs))
    shown = [line for line in lines if found.of(data=line[0], picture=line[1], batch=1)]
    columns = [(adversary, case) for adversary in ADVERSARIES for case in CASES]
    figure, panels = figures.new(1.35 * (1 + len(columns)), 1.55 * len(shown) + 0.4, len(shown), 1 + len(columns))
    for axes in panels.flat:
        axes.grid(visible=False)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for line, (name, number) in zip(panels, shown, strict=True):
        for axes, (adversary, case) in zip(line[1:], columns, strict=True):
            for run in found.of(data=name, picture=number, batch=1, adversary=adversary, case=case):
                _show(line[0], pictures(run["truth"], run["shape"])[0])
                _show(axes, pictures(run["rebuilt"], run["shape"])[0])
                figures.label(axes, f"{run['psnr'][0]:.1f} dB", "")
        figures.label(line[0], "", TITLES[name])
    for axes, title in zip(
        panels[0], ["original", *(f"{adversary}:\n{case}" for adversary, case in columns)], strict=True
    ):
        figures.label(axes, axes.get_xlabel(), axes.get_ylabel(), title)
        axes.title.set_fontsize(8)
    return {"gradient-matching": figure}


def _show(axes: Any, picture: Any) -> None:
    image = picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0)
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 2) for value in values]


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _name(job: ExperimentJob) -> str:
    return f"{TITLES[job['data']]}, {job['adversary']}, {job['case']}, picture {job['picture'] + 1}"


EXPERIMENT = Experiment(
    name="gradient-matching",
    title="Gradient matching, with and without sketching",
    what="DLG on MNIST and CIFAR-10 by the server and by a client, with and without sketching, and adaptive.",
    minutes="20 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist", "cifar10"),
    extras={"scipy": "audit"},
)
