"""`ordinary-tasks`: ten ordinary tasks with default settings, each beside federated averaging in plain PyTorch.

Every task is trained four ways with dbcl as a user would write it on the first day (`dbcl.simulate` with its default
and with the preset `blind`, the five verbs, Flower's `DoubleBlind` on a `LocalGrid`), and by a loop that knows nothing
of dbcl. All have the same initial weights and clients. `python -m experiments.ordinary_tasks` plays what has no row yet
and writes docs/ordinary-tasks.md.

Longer than 350 lines, since training by hand, by dbcl and by Flower is written out here, each as a user would.
"""

import argparse
import copy
import logging
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import torch
from torch import Tensor, nn

import dbcl
from dbcl.errors import DbclError
from dbcl.files import write_atomic
from experiments import figures, runner
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.small_tasks import TASKS, Example, OrdinaryTask
from experiments.tables import NOT_RUN, markdown, page

SEEDS = (0, 1, 2)
REPEATED = ("tabular regression", "linear model")
"""Tasks with all seeds, since some way is near the limit; the others have the first."""
REPEATED_DEFAULT = (*REPEATED, "LSTM", "U-Net with dictionaries")
"""The same for the default, whose noise moves the score of these by more than the limit."""
CLIENTS = 10
PAGE = Path(__file__).parents[1] / "docs" / "ordinary-tasks.md"
LOGGERS = ("dbcl", "flwr.dbcl")
LIMIT = 0.03
"""Difference to plain federated averaging that counts as equal."""
HEADS = {
    "default": "`simulate`, default", "blind": "`simulate`, blind", "five verbs": "five verbs", "Flower": "Flower",
}  # fmt: skip
"""Headings of the ways with dbcl."""
QUICK_ROUNDS = 3
CALIBRATION = "calibration=inputs"
"""Remedy of a refused model with running statistics, as the message names it."""


class WarningRecorder(logging.Handler):
    """Collects what dbcl's loggers warn of before the first step of training.

    >>> with recorded() as recorder:
    ...     logging.getLogger("dbcl.protocol").warning("the network is small")
    ...     recorder.trains = True
    ...     logging.getLogger("dbcl").warning("a client has diverged")
    >>> recorder.messages
    ['the network is small']
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.trains = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        if not self.trains:
            self.messages.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[WarningRecorder]:
    """Record the warnings of dbcl's loggers and those of Python that dbcl's modules raise."""
    recorder = WarningRecorder()
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if "dbcl" in filename and not recorder.trains:
            recorder.messages.append(str(message))

    for name in LOGGERS:
        logging.getLogger(name).addHandler(recorder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield recorder
    finally:
        warnings.showwarning = shown
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(recorder)


def initial(task: OrdinaryTask, seed: int) -> nn.Module:
    """Return the network with its initial weights."""
    return copy.deepcopy(_made(task.name, seed))


@cache
def _made(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return NAMES[name].make()


def clients_of(task: OrdinaryTask, seed: int) -> list[Example]:
    """Divide the training examples among the clients."""
    (inputs, targets), _ = task.data()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed + 1))
    return [(_rows(inputs, torch.from_numpy(rows)), targets[rows]) for rows in np.array_split(order.numpy(), CLIENTS)]


def _rows(inputs: Any, rows: Tensor) -> Any:
    return {name: each[rows] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def _outputs(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def train(task: OrdinaryTask, model: nn.Module, own: Example, seed: int) -> None:
    """Train on a client's examples, as a user's own loop does."""
    inputs, targets = own
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad], lr=task.lr)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(task.epochs):
        for rows in torch.randperm(len(targets), generator=generator).split(task.batch_size):  # type: ignore[no-untyped-call]
            outputs = _outputs(model, _rows(inputs, rows))
            optimizer.zero_grad()
            task.loss(outputs, targets[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@torch.no_grad()
def score(task: OrdinaryTask, model: nn.Module) -> float:
    """Return the metric on held-out examples."""
    _, (inputs, targets) = task.data()
    model.eval()
    return task.metric(_outputs(model, inputs), targets)


def plain(task: OrdinaryTask, seed: int) -> nn.Module:
    """Train by federated averaging in plain PyTorch."""
    model, clients = initial(task, seed), clients_of(task, seed)
    for round in range(task.rounds):
        states = []
        for number, own in enumerate(clients):
            local = copy.deepcopy(model)
            train(task, local, own, 1000 * round + number)
            states.append(local.state_dict())
        mean = {
            name: sum(state[name] for state in states) / CLIENTS if tensor.is_floating_point() else tensor
            for name, tensor in model.state_dict().items()
        }
        model.load_state_dict(mean)
    return model


def by_default(task: OrdinaryTask, seed: int) -> nn.Module:
    """Train by one call of `dbcl.simulate` that names nothing but the model, the data and the loss."""
    return dbcl.simulate(initial(task, seed), clients_of(task, seed), task.data()[1], loss=task.loss).model


def blind(task: OrdinaryTask, seed: int, **more: Any) -> nn.Module:
    """Train by one call of `dbcl.simulate` with the preset `blind` and the task's own loop."""
    own: dict[str, Any] = {
        "settings": "blind",
        "lr": task.lr,
        "batch_size": task.batch_size,
        "epochs": task.epochs,
    } | more
    rounds = own.pop("times", 1) * task.rounds
    return dbcl.simulate(
        initial(task, seed), clients_of(task, seed), task.data()[1], loss=task.loss, rounds=rounds,
        optimizer=task.optimizer, **own,
    ).model  # fmt: skip


def five_verbs(task: OrdinaryTask, seed: int, **more: Any) -> nn.Module:
    """Train by open_round, blinded, make_update and close_round."""
    server, clients = dbcl.Server(initial(task, seed), **more), clients_of(task, seed)
    for round in range(task.rounds):
        updates = {}
        for number, own in enumerate(clients):
            broadcast = server.open_round(f"client {number}")
            local = dbcl.blinded(initial(task, seed), broadcast)
            train(task, local, own, 1000 * round + number)
            updates[f"client {number}"] = dbcl.make_update(local, broadcast, examples=len(own[1]))
        server.close_round(updates)
    return server.released


def flower(task: OrdinaryTask, seed: int, **more: Any) -> nn.Module:
    """Train by Flower's `FedAvg` inside `DoubleBlind`."""
    from flwr.app import Context as FlowerContext
    from flwr.app import Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    clients, app = clients_of(task, seed), ClientApp()

    @app.train()
    def answer(message: Message, context: FlowerContext) -> Message:
        number = int(context.node_config["partition-id"])
        round = cast(int, message.content.config_records["config"]["server-round"])
        model = dbcl.flower.blinded(initial(task, seed), message)
        train(task, model, clients[number], 1000 * round + number)
        return cast(Message, dbcl.flower.reply(model, message, examples=len(clients[number][1])))

    inner, model = FedAvg(fraction_evaluate=0.0), initial(task, seed)
    strategy = dbcl.flower.DoubleBlind(inner, model, **more)
    result = strategy.start(dbcl.flower.LocalGrid(app, nodes=CLIENTS), num_rounds=task.rounds)
    trained = initial(task, seed)
    trained.load_state_dict(result.arrays.to_torch_state_dict())
    return trained


WAYS: dict[str, Callable[..., nn.Module]] = {
    "plain": plain, "default": by_default, "blind": blind, "five verbs": five_verbs, "Flower": flower,
}  # fmt: skip
NAMES = {task.name: task for task in TASKS}
CLOSEST = "tabular regression"
"""Task whose parts are played alone: it loses most under the preset `blind`."""
PARTS: dict[str, dict[str, Any]] = {
    "sketch alone": {"veil": 0.0}, "veil alone": {"settings": "veil"}, "twice the rounds": {"times": 2},
}  # fmt: skip
"""Changes of the preset `blind`."""
WAYS |= {name: partial(blind, **more) for name, more in PARTS.items()}


def jobs(quick: bool, folder: Path) -> list[ExperimentJob]:
    """Return a job for each task and way; the reduced setting has three tasks and three rounds."""
    tasks = [task for task in TASKS if task.name in QUICK_TASKS] if quick else TASKS
    more = {"rounds": QUICK_ROUNDS} if quick else {}
    found = [
        {"task": task.name, "way": way, "seed": seed, **more}
        for seed in SEEDS[: 1 if quick else None]
        for task in tasks
        for way in ("plain", *HEADS)
        if seed == SEEDS[0] or task.name in (REPEATED_DEFAULT if way == "default" else REPEATED)
    ]
    return found + [
        {"task": CLOSEST, "way": way, "seed": seed, **more} for seed in SEEDS[: 1 if quick else None] for way in PARTS
    ]


QUICK_TASKS = ("tabular regression", "U-Net with dictionaries", "linear model")


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train in one way; a way that dbcl refuses has its message, and the score with the remedy of the message."""
    task = NAMES[job["task"]]
    with recorded() as recorder:

        def loss(outputs: Any, targets: Any) -> Tensor:
            recorder.trains |= torch.is_grad_enabled()  # before the training dbcl tries the loss without gradients
            return task.loss(outputs, targets)

        own = replace(task, loss=loss, rounds=job.get("rounds", task.rounds))

        def trained(**more: Any) -> float:
            return round(score(task, WAYS[job["way"]](own, job["seed"], **more)), 4)

        result: dict[str, Any] = {"score": None, "error": ""}
        try:
            result["score"] = trained()
        except DbclError as problem:
            result["error"] = str(problem)
            if CALIBRATION in str(problem):
                result["with_calibration"] = trained(calibration=_rows(task.data()[1][0], torch.arange(500)))
    context.tell(f"{job['task']}, {job['way']}: {result}", 1, 1)
    return {**result, "warnings": list(dict.fromkeys(recorder.messages))}


def table(found: Results) -> str:
    """Compare what each way reaches with plain federated averaging, and list what dbcl said before the training."""
    names = list(dict.fromkeys(job["task"] for job in found.jobs))
    lines = []
    for name in names:
        reference = mean_score(found.of(task=name, way="plain"))
        cells = [cell(found.of(task=name, way=way), reference) for way in HEADS]
        lines.append([name, NAMES[name].measure, NOT_RUN if reference is None else f"{reference:.3f}", *cells])
    rounds = f"{QUICK_ROUNDS} rounds" if found.quick else "as many rounds as the plain loop needs to converge"
    text = (
        f"{CLIENTS} clients with equal shares, all of them in every round; {rounds}; "
        f"{_seeds(found)}. All ways start from the same weights. Plain "
        "FedAvg, *blind*, the five verbs and Flower have the same local optimiser, learning rate and rounds, which "
        "were chosen for plain FedAvg.\n\n"
        "- *default*: `dbcl.simulate(model, clients, held_out, loss=loss)`, which is the preset `guaranteed` with the "
        "rounds and the rate that it plans.\n"
        '- *blind*: the same with `settings="blind"` and the local training of the task.\n'
        "- *five verbs*, *Flower*: `dbcl.Server(model)` and `DoubleBlind(FedAvg(), model)` without any setting.\n\n"
        f"A score is at most {LIMIT} (3 points, or R2 0.03) below plain FedAvg, or dbcl *warned* or *refused* before "
        "the first step. A score in **bold** is further below, and nothing was said."
    )
    heads = ["task", "metric", "plain FedAvg", *HEADS.values()]
    said = spoken(found)
    notes = ["Said before the training:", "\n".join(f"- {places}: {text}" for text, places in said.items())]
    return "\n\n".join([text, markdown(heads, lines), *(notes if said else []), _parts(found)])


def _seeds(found: Results) -> str:
    counts = {
        way: Counter(row["job"]["task"] for row in found.rows if row["job"]["way"] == way)
        for way in ("plain", "default")
    }
    several = [task for task, count in counts["plain"].items() if count > 1]
    more = [task for task, count in counts["default"].items() if count > 1 and task not in several]
    if not several:
        return "one seed"
    also = f", and of the default for {' and '.join(more)}" if more else ""
    return f"means of {len(SEEDS)} seeds for {' and '.join(several)}{also}; one seed for the others"


def _parts(found: Results) -> str:
    """Return a table of what the parts of the preset cost the task that loses most."""
    ways = {"plain": "plain FedAvg", "blind": "`blind`"} | {way: f"`blind`, {way}" for way in PARTS}
    values = {label: mean_score(found.of(task=CLOSEST, way=way)) for way, label in ways.items()}
    text = (
        f"The {CLOSEST} loses about as much as the limit, 0.03, to the preset `blind`: to the sketch and the veil "
        'together, since each alone costs less. The remedy is twice the rounds, or `settings="veil"`, which has no '
        "sketch. dbcl does not warn of it: the other networks of the table are within the limit with the same sketch. "
        "Secrets are fresh in every run, "
        "which moves a score by about 0.01 (with the default, an LSTM's by 0.3)."
    )
    return f"{text}\n\n" + markdown(
        [CLOSEST, NAMES[CLOSEST].measure],
        [[label, NOT_RUN if value is None else f"{value:.3f}"] for label, value in values.items()],
    )


def mean_score(runs: Sequence[Mapping[str, Any]], name: str = "score") -> float | None:
    """Return the mean over seeds, or None if no run has a score.

    >>> mean_score([{"score": 0.5}, {"score": 0.75}]), mean_score([{"score": None}])
    (0.625, None)
    """
    scores = [run[name] for run in runs if run.get(name) is not None]
    return statistics.mean(scores) if scores else None


def cell(runs: Sequence[Mapping[str, Any]], reference: float | None) -> str:
    """Return a cell of the table: a score, marked if it is below the limit or if dbcl warned of it.

    >>> cell([{"score": 0.91, "error": "", "warnings": []}], 0.95)
    '**0.910, 0.040 less**'
    >>> cell([{"score": 0.91, "error": "", "warnings": ["a guarantee costs accuracy"]}], 0.95)
    '0.910, warned'
    >>> cell([{"score": None, "error": "the remedy: calibration=inputs", "with_calibration": 0.9}], 0.95)
    'refused; 0.900 with `calibration`'
    """
    if not runs:
        return NOT_RUN
    value = mean_score(runs)
    if value is None:
        again = mean_score(runs, "with_calibration")
        points = re.search(r"about (\d+) points", runs[0]["error"])
        if again is not None:
            return f"refused; {again:.3f} with `calibration`"
        return f"refused: about {points[1]} points expected" if points else "refused"
    if all(run["warnings"] for run in runs):
        return f"{value:.3f}, warned"
    less = 0.0 if reference is None else reference - value
    return f"**{value:.3f}, {less:.3f} less**" if less > LIMIT else f"{value:.3f}"


def spoken(found: Results) -> dict[str, str]:
    """Return the refusals and warnings, each with the places where it was said; numbers may differ between them."""
    places: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for row in found.rows:
        for text in filter(None, [row["result"]["error"], *row["result"]["warnings"]]):
            kind = re.sub(r"[\d.]+", "0", text)
            texts.setdefault(kind, " ".join(text.split()).replace("|", "\\|"))
            places.setdefault(kind, []).append(f"{row['job']['task']} ({HEADS[row['job']['way']]})")
    return {texts[kind]: ", ".join(dict.fromkeys(names)) for kind, names in places.items()}


def draw(found: Results) -> Mapping[str, Any]:
    """Draw the difference to plain federated averaging by task and way."""
    figure, panels = figures.new(8, 5)
    axes, names = panels[0, 0], list(dict.fromkeys(job["task"] for job in found.jobs))
    for offset, (way, colour) in enumerate(zip(HEADS, figures.MORE, strict=False)):
        for place, name in enumerate(names):
            reference, own = (mean_score(found.of(task=name, way=each)) for each in ("plain", way))
            if reference is not None and own is not None:
                label = "_" if place else HEADS[way].replace("`", "")
                axes.barh(place + 0.2 * offset, own - reference, 0.18, color=colour, label=label)
    axes.axvline(-LIMIT, color="0.5", linewidth=0.8)
    axes.set_yticks([place + 0.3 for place in range(len(names))], names)
    axes.invert_yaxis()
    figures.label(axes, "metric minus that of plain FedAvg", "")
    return {"ordinary-tasks": figure}


EXPERIMENT = Experiment(
    name="ordinary-tasks",
    title="Ten ordinary tasks",
    what="Ten ordinary tasks trained with default settings through `dbcl.simulate`, the five verbs and Flower, beside "
    "plain federated averaging.",
    minutes="about 45 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"flwr": "flower"},
)


def main() -> None:
    """Play what has no row yet and write the page of the documentation."""
    parser = argparse.ArgumentParser(description=EXPERIMENT.what)
    parser.add_argument("--task", action="append", default=[], help="only this task; again for more")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the rows")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written")
    parser.add_argument("--quick", action="store_true", help="three tasks and three rounds, to see that all works")
    parser.add_argument("--report", action="store_true", help="write the page of the rows that are there; play nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    experiment = replace(EXPERIMENT, jobs=jobs)
    order = runner.Order(given.out, quick=given.quick)
    for name in [] if given.report else given.task or [""]:
        order = replace(order, only=(f"task={name}",) if name else ())
        runner.play(
            experiment, order, Context(tell=lambda text, done, total: print(text, flush=True) if text else None)
        )
    runner.report(experiment, order)
    found = runner.results(experiment, order)
    text = page(experiment, found, [], command="python -m experiments.ordinary_tasks")
    write_atomic(given.page, text.replace("`rows.jsonl`", "`results/ordinary-tasks/rows.jsonl`").encode())
    print(f"wrote {given.page}")


if __name__ == "__main__":
    main()
