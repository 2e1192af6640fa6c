"""`gradient-error`: how far a client's estimates of the others' updates are from the truth, by round.

The paper's options I and II, and beside them rewind and the smoother, which use all rounds that the client saw.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dbcl.engines import StackedEngine
from dbcl.simulation import presets
from dbcl.simulation.build import build_run_server, divide, new_seed, public_setting
from dbcl.transcripts import Recorder, Transcript, Truth
from experiments import figures
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.tables import NOT_RUN, markdown
from experiments.training import task_on

if TYPE_CHECKING:
    from dbcl_audit.estimators.observations import TensorObservations

ATTACKER = 0
ESTIMATORS = ("option I", "option II", "rewind", "smoother")
NETWORKS: dict[str, ExperimentJob] = {
    "mlp": {"data": "mnist", "model": "mnist-mlp", "epochs": 1, "batch_size": 10, "lr": 0.05},
    "cnn": {"data": "mnist", "model": "mnist-cnn", "epochs": 5, "batch_size": 10, "lr": 0.01},
    "cifar": {"data": "cifar10", "model": "cifar-cnn", "epochs": 5, "batch_size": 50, "lr": 0.01},
}
TITLES = {"mlp": "MNIST, MLP", "cnn": "MNIST, CNN", "cifar": "CIFAR-10, CNN"}
ROUNDS = {"mlp": {"every": 150, "own": 400}, "cnn": {"every": 60}, "cifar": {"every": 30}}
"""By network and attendance. A client that sees one round in ten needs many, so that only the MLP has one."""
SEEN = {"every": "every round", "own": "its own rounds"}
"""In which rounds the attacker takes part: in every one, which is the worst case, or as it is drawn."""


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """One run for each network in which the attacker sees every round, and one in which it sees its own."""
    if quick:
        fixed: ExperimentJob = {
            "data": "digits",
            "model": "mnist-mlp",
            "epochs": 1,
            "batch_size": 10,
            "lr": 0.05,
            "clients": 20,
        }
        rounds = {"every": 80, "own": 150}
        return [{"network": "mlp", "sees": sees, "rounds": rounds[sees], "seed": 0, **fixed} for sees in SEEN]
    return [
        {"network": network, "sees": sees, "rounds": rounds, "seed": 0, "clients": 100, **NETWORKS[network]}
        for network, each in ROUNDS.items()
        for sees, rounds in each.items()
    ]


class AttendedEngine(StackedEngine):
    """Draws cohorts as the stacked engine does, and puts the attacker into each in the place of another client.

    >>> import dbcl
    >>> from dbcl.engines import LocalTraining
    >>> clients, net = [(torch.zeros(4, 6), torch.arange(4) % 2)] * 10, torch.nn.Linear(6, 2)
    >>> server, training = dbcl.Server(net, dbcl.SketchConfig(coverage="all")), LocalTraining()
    >>> engine = AttendedEngine(server, net, clients, training, fraction=0.3, seed=bytes(32))
    >>> all(ATTACKER in engine.cohort(number) and len(engine.cohort(number)) == 3 for number in range(5))
    True
    """

    def cohort(self, round: int) -> list[int]:
        drawn = super().cohort(round)
        return drawn if ATTACKER in drawn else sorted([ATTACKER, *drawn[1:]])


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train with the paper's settings, record what the attacker sees, and compare its estimates with the truth."""
    from dbcl_audit.attacks import updates  # needs SciPy, which is an extra
    from dbcl_audit.estimators.observations import tensor_observations

    with tempfile.TemporaryDirectory() as scratch:
        truth = _record(job, context, Path(scratch))
        seen = [
            view
            for view in tensor_observations(Transcript(Path(scratch) / f"client-{ATTACKER}")).values()
            if view.sketched
        ]
        found = {}
        for name in ESTIMATORS:
            guesses = []
            for view in seen:
                context.tell(f"{_title(job)}: {name} of {view.name}", 1, 1)
                guesses.append(updates.ESTIMATORS[name][1](view, 0.0))
            found[name] = _compare(truth, seen, guesses)
        shapes = {view.name: [len(view.seen[0]), view.dim] for view in seen}
        return {"rounds": list(seen[0].rounds[:-1]), "tensors": shapes, "estimates": found}


def _record(job: ExperimentJob, context: Context, folder: Path) -> Truth:
    """Play a run; the attacker's transcript and the truth go into a folder."""
    own = {name: value for name, value in job.items() if name not in ("network", "sees")}
    config = presets.preset("paper", fraction=0.1, device=context.device, **own)
    task = task_on(context.device, config.data, config.model, context.data_dir)
    seed = new_seed(config)
    server = build_run_server(config, task, seed=seed)
    kind = AttendedEngine if job["sees"] == "every" else StackedEngine
    engine = kind(
        server,
        task.make_model(job["seed"] + 1).to(torch.device(context.device)),
        task.train.divide(divide(config, task, seed=seed)),
        task.training(config),
        objective=task.objective,
        fraction=config.share,
        seed=seed,
    )
    engine.observer = Recorder(folder, [str(ATTACKER)], server, public_setting(config, task, server.plan))
    for number in range(1, config.rounds + 1):
        engine.play_round()
        context.tell(f"{_title(job)}, sees {SEEN[job['sees']]}: round {number}", number, config.rounds)
    return Truth(folder)


def _compare(
    truth: Truth, seen: "Sequence[TensorObservations]", guesses: Sequence[Sequence[Tensor]]
) -> dict[str, list[float]]:
    """For each seen round but the last: |D_hat - D| / |D| and the cosine, over all sketched tensors together."""
    from dbcl_audit.scoring import true_change

    errors, cosines = [], []
    for index in range(len(seen[0].rounds) - 1):
        pairs = [(each[index], true_change(truth, view, index)) for view, each in zip(seen, guesses, strict=True)]
        guess, real = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
        size = float(real.norm())
        errors.append(float(f"{float((guess - real).norm()) / size:.5g}"))
        cosines.append(round(float(guess @ real) / (float(guess.norm()) * size), 6))
    return {"errors": errors, "cosines": cosines}


def table(found: Results) -> str:
    """Medians over the first and the last third of the rounds, and over those with enough rounds after them."""
    lines = []
    for job in found.jobs:
        runs = found.of(network=job["network"], sees=job["sees"])
        place = [_title(job), SEEN[job["sees"]]]
        if not runs:
            lines.append([*place, NOT_RUN, *[""] * 5])
            continue
        count = len(runs[0]["rounds"])
        for name in ESTIMATORS:
            each = runs[0]["estimates"][name]
            lines.append([*place, str(count), name, *_medians(each["errors"], each["cosines"])])
    heads = ["network", "the attacker sees", "changes", "estimate", "error, first third", "error, last third"]
    heads += ["error, first half", "cosine, first half"]
    text = (
        "How far a client's estimate D_hat of what the others changed is from the truth D, with the preset `paper` at "
        "10 % participation: medians of \\|D_hat - D\\| / \\|D\\| and of the cosine, over all sketched tensors. "
        "Saying that nothing changed has error 1. A change lies between two rounds that the attacker sees. Rewind and "
        "the smoother look back, so that the first half of the rounds is what they know best. The paper: options I and "
        "II are far from the truth, and their error grows with the rounds; it has no other estimates."
    )
    return "\n\n".join([text, markdown(heads, lines)])


def _title(job: ExperimentJob) -> str:
    return "embedded digits, MLP" if job["data"] == "digits" else TITLES[job["network"]]


def _medians(errors: Sequence[float], cosines: Sequence[float]) -> list[str]:
    third, half = max(1, len(errors) // 3), max(1, len(errors) // 2)
    parts = (errors[:third], errors[-third:], errors[:half])
    return [*(f"{statistics.median(part):.3g}" for part in parts), f"{statistics.median(cosines[:half]):.4f}"]


def draw(found: Results) -> Mapping[str, Any]:
    """Error and cosine by round, a column for each network; dashed where the attacker sees only its own rounds."""
    networks = [network for network in TITLES if found.of(network=network)]
    figure, panels = figures.new(1 + 4 * len(networks), 6.4, 2, len(networks))
    for network, (upper, lower) in zip(networks, panels.T, strict=True):
        for sees, style in (("every", "-"), ("own", "--")):
            for run in found.of(network=network, sees=sees):
                for name, colour in zip(ESTIMATORS, figures.MORE, strict=False):
                    each = run["estimates"][name]
                    label = f"{name}, {SEEN[sees]}"
                    upper.plot(run["rounds"], each["errors"], style, color=colour, label=label, linewidth=1.2)
                    lower.plot(run["rounds"], each["cosines"], style, color=colour, linewidth=1.2)
        upper.axhline(1, color=figures.MORE[-1], linewidth=0.8, linestyle=":")
        figures.log_scale(upper, "y")
        lower.set_ylim(-0.15, 1.05)
        title = _title(found.jobs_of(network=network)[0])
        figures.label(upper, "round", "error relative to the change", title)
        figures.label(lower, "round", "cosine with the change")
    return {"gradient-error": figure}


EXPERIMENT = Experiment(
    name="gradient-error",
    title="Estimates of the others' updates, by round",
    what="Relative error and cosine of a client's estimates by round: options I and II, and rewind and smoother.",
    minutes="30 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    data=("mnist", "cifar10"),
    extras={"scipy": "audit"},
)
