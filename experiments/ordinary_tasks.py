"""`ordinary-tasks`: ten ordinary tasks with default settings, each beside federated averaging in plain PyTorch.

Every task is trained three ways with dbcl as a user would write it on the first day (`dbcl.simulate`, the five verbs,
Flower's `DoubleBlind` on a `LocalGrid`), and by a loop that knows nothing of dbcl. All have the same initial weights,
clients, local optimiser and number of rounds. `python -m experiments.ordinary_tasks` plays what has no row yet and
writes docs/ordinary-tasks.md.
"""

import argparse
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import torch
from torch import Tensor, nn

import dbcl
from dbcl.errors import ConfigError, DbclError
from dbcl.files import write_atomic
from dbcl.simulation import preset
from dbcl.simulation.build import server_optimizer
from experiments import figures, runner
from experiments.experiment import Context, Experiment, ExperimentJob, Results
from experiments.small_tasks import TASKS, Example, OrdinaryTask
from experiments.tables import NOT_RUN, markdown, page

PRESET = "blind"
"""The preset whose settings the three ways with dbcl have."""
CLIENTS = 10
PAGE = Path(__file__).parents[1] / "docs" / "ordinary-tasks.md"
LOGGERS = ("dbcl", "flwr.dbcl")
MAX_WARNING_LENGTH = 160
"""Characters of a warning that the table shows."""
QUICK_ROUNDS = 3


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
    torch.manual_seed(seed)
    return task.make()


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


def plain(task: OrdinaryTask, settings: str, seed: int) -> nn.Module:
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


def simulated(task: OrdinaryTask, settings: str, seed: int) -> nn.Module:
    """Train by one call of `dbcl.simulate`."""
    run = dbcl.simulate(
        initial(task, seed), clients_of(task, seed), task.data()[1], loss=task.loss, settings=settings, lr=task.lr,
        batch_size=task.batch_size, epochs=task.epochs, rounds=task.rounds, optimizer=task.optimizer,
    )  # fmt: skip
    return run.model


def _server_settings(settings: str) -> dict[str, Any]:
    """Return the arguments of a server with the settings of a preset."""
    config = preset(settings)
    if config.privacy is not None or config.secure_aggregation:
        raise ConfigError(f"the preset {settings} needs a plan for the run; `dbcl.simulate` makes it")
    return {"sketch": config.sketch, "optimizer": server_optimizer(config), "ema_decay": config.ema_decay}


def five_verbs(task: OrdinaryTask, settings: str, seed: int) -> nn.Module:
    """Train by open_round, blinded, make_update and close_round."""
    server, clients = dbcl.Server(initial(task, seed), **_server_settings(settings)), clients_of(task, seed)
    for round in range(task.rounds):
        updates = {}
        for number, own in enumerate(clients):
            broadcast = server.open_round(f"client {number}")
            local = dbcl.blinded(initial(task, seed), broadcast)
            train(task, local, own, 1000 * round + number)
            updates[f"client {number}"] = dbcl.make_update(local, broadcast, examples=len(own[1]))
        server.close_round(updates)
    return server.released


def flower(task: OrdinaryTask, settings: str, seed: int) -> nn.Module:
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
    strategy = dbcl.flower.DoubleBlind(inner, model, **_server_settings(settings))
    result = strategy.start(dbcl.flower.LocalGrid(app, nodes=CLIENTS), num_rounds=task.rounds)
    trained = initial(task, seed)
    trained.load_state_dict(result.arrays.to_torch_state_dict())
    return trained


WAYS: dict[str, Callable[[OrdinaryTask, str, int], nn.Module]] = {
    "plain": plain, "simulate": simulated, "five verbs": five_verbs, "Flower": flower,
}  # fmt: skip
NAMES = {task.name: task for task in TASKS}


def jobs(quick: bool, folder: Path, settings: str = PRESET) -> list[ExperimentJob]:
    """Return a job for each task and way; the reduced setting has three tasks and three rounds."""
    tasks = [task for task in TASKS if task.name in QUICK_TASKS] if quick else TASKS
    more = {"rounds": QUICK_ROUNDS} if quick else {}
    return [{"task": task.name, "way": way, "settings": settings, "seed": 0, **more} for task in tasks for way in WAYS]


QUICK_TASKS = ("tabular regression", "U-Net with dictionaries", "linear model")


def play(job: ExperimentJob, context: Context) -> dict[str, Any]:
    """Train in one way; a way that dbcl refuses has its message as the result."""
    task = NAMES[job["task"]]
    with recorded() as recorder:

        def loss(outputs: Any, targets: Any) -> Tensor:
            recorder.trains = True
            return task.loss(outputs, targets)

        own = replace(task, loss=loss, rounds=job.get("rounds", task.rounds))
        try:
            value = round(score(task, WAYS[job["way"]](own, job["settings"], job["seed"])), 4)
            error = ""
        except DbclError as problem:
            value, error = None, str(problem)
    context.tell(f"{job['task']}, {job['way']}: {error or value}", 1, 1)
    return {"score": value, "error": error, "warnings": list(dict.fromkeys(recorder.messages))}


def table(found: Results) -> str:
    """Compare what the three ways reach with plain federated averaging."""
    settings = found.jobs[0]["settings"]
    lines = []
    for name in dict.fromkeys(job["task"] for job in found.jobs):
        runs = {way: found.of(task=name, way=way) for way in WAYS}
        told = dict.fromkeys(text for each in runs.values() for run in each for text in run["warnings"])
        cells = [_cell(each) for each in runs.values()]
        lines.append([name, NAMES[name].measure, *cells, "; ".join(map(_shortened, told)) or "no"])
    rounds = f"{QUICK_ROUNDS} rounds" if found.quick else "as many rounds as the plain loop needs to converge"
    text = (
        f"{CLIENTS} clients, all of them in every round, {rounds}, the preset `{settings}` and otherwise default "
        "settings. All ways have the same initial weights, clients, local optimiser and learning rate, which were "
        "chosen for plain federated averaging. *Warned before training* has what dbcl says in its log before the first "
        "step; a refusal is an error message in place of a model."
    )
    heads = ["task", "metric", "plain FedAvg", "`dbcl.simulate`", "five verbs", "Flower", "warned before training"]
    refused = [
        f"- {job['task']}, {job['way']}: {run['error']}"
        for job in found.jobs
        for run in found.of(**job)
        if run["error"]
    ]
    return "\n\n".join([text, markdown(heads, lines), *(["Refusals:", "\n".join(refused)] if refused else [])])


def _cell(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return NOT_RUN
    return "refused" if runs[0]["score"] is None else f"{runs[0]['score']:.3f}"


def _shortened(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= MAX_WARNING_LENGTH else line[:MAX_WARNING_LENGTH].rsplit(" ", 1)[0] + " ..."


def draw(found: Results) -> Mapping[str, Any]:
    """Draw the difference to plain federated averaging by task and way."""
    figure, panels = figures.new(8, 4)
    axes, names = panels[0, 0], list(dict.fromkeys(job["task"] for job in found.jobs))
    for offset, (way, colour) in enumerate(zip(list(WAYS)[1:], figures.MORE, strict=False)):
        for place, name in enumerate(names):
            reference, own = found.of(task=name, way="plain"), found.of(task=name, way=way)
            if reference and own and own[0]["score"] is not None:
                difference = own[0]["score"] - reference[0]["score"]
                axes.barh(place + 0.25 * offset, difference, 0.22, color=colour, label="_" if place else way)
    axes.set_yticks([place + 0.25 for place in range(len(names))], names)
    axes.invert_yaxis()
    figures.label(axes, "metric minus that of plain FedAvg", "")
    return {"ordinary-tasks": figure}


EXPERIMENT = Experiment(
    name="ordinary-tasks",
    title="Ten ordinary tasks",
    what="Ten ordinary tasks trained with default settings through `dbcl.simulate`, the five verbs and Flower, beside "
    "plain federated averaging.",
    minutes="about 20 on one core",
    jobs=jobs,
    play=play,
    table=table,
    draw=draw,
    extras={"flwr": "flower"},
)


def main() -> None:
    """Play what has no row yet and write the page of the documentation."""
    parser = argparse.ArgumentParser(description=EXPERIMENT.what)
    parser.add_argument("--preset", default=PRESET, help="settings of the three ways with dbcl")
    parser.add_argument("--task", action="append", default=[], help="only this task; again for more")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the rows")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written")
    parser.add_argument("--quick", action="store_true", help="three tasks and three rounds, to see that all works")
    given = parser.parse_args()
    torch.set_num_threads(1)
    experiment = replace(EXPERIMENT, jobs=lambda quick, folder: jobs(quick, folder, given.preset))
    order = runner.Order(given.out, quick=given.quick)
    for name in given.task or [""]:
        order = replace(order, only=(f"task={name}",) if name else ())
        runner.play(
            experiment, order, Context(tell=lambda text, done, total: print(text, flush=True) if text else None)
        )
    runner.report(experiment, order)
    found = runner.results(experiment, order)
    write_atomic(given.page, page(experiment, found, [], command="python -m experiments.ordinary_tasks").encode())
    print(f"wrote {given.page}")


if __name__ == "__main__":
    main()
