"""Single function from a model and data in Python to a finished run."""

import copy
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dbcl.config import Layers
from dbcl.engines.training import OptimizerFactory, Schedule
from dbcl.errors import ConfigError
from dbcl.features.extract import Features
from dbcl.files import user_path
from dbcl.objective import Loss, Metric, Objective, name_of
from dbcl.simulation.build import resolve_device
from dbcl.simulation.config import CROSS_ENTROPY, IN_PYTHON, RunConfig
from dbcl.simulation.planning import planned_for
from dbcl.simulation.presets import DEFAULT, hint_of_default, preset
from dbcl.simulation.run import RESUMABLE, Run
from dbcl.simulation.run_folder import read_config
from dbcl.simulation.task import Task, given, with_features
from dbcl.trackers import ProgressBar, Tracker

log = logging.getLogger(__name__)


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    clients: Any,
    held_out: Any,
    /,
    *,
    loss: Loss | type[nn.Module] | None = None,
    metric: Metric | None = None,
    metric_mode: str = "higher",
    optimizer: str | OptimizerFactory = "SGD",
    lr_schedule: str | Schedule = "constant",
    features: Features | str | None = None,
    properties: Mapping[str, Any] | None = None,
    layers: Layers | None = None,
    settings: str | Path | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    trackers: Iterable[Tracker] = (),
    **more: Any,
) -> Run:
    """Train a model double-blind with simulated clients.

    Clients with rejected or down-weighted updates are listed in the log and in `run.contributions`.

    Args:
        model: The network, or a function without arguments that makes the network.
        clients: A list with one set of examples per client, or a single set, which is partitioned
            among the number of clients in the keyword argument `clients`. A set is a pair (inputs,
            targets) of tensors, a dataset or a DataLoader. Inputs and targets may be tuples or
            dictionaries of tensors, passed to the model as positional or keyword arguments.
        held_out: Examples on which the server evaluates the model.
        loss: Function of a batch's outputs and targets; cross entropy by default.
        metric: Function of all outputs and targets; by default accuracy with cross entropy, else
            the loss.
        metric_mode: "higher" or "lower", the direction in which the metric improves.
        optimizer: Local optimiser: the name of a class of torch.optim, or a function that makes an
            optimiser.
        lr_schedule: Factor of the learning rate: "constant", "cosine", or a function of the round.
        features: Fixed public feature extractor whose outputs are the network's inputs.
        properties: Binary properties of the training examples by name, as targets of property
            inference in an audit.
        layers: Input axes of custom layers, as in `SketchConfig.layers`.
        settings: A preset or a TOML file; by default the preset guaranteed, whose noise requires
            thousands of examples or few parameters. A warning is logged before the training if the
            expected loss of accuracy is large.
        folder: Folder of the run; a temporary one by default.
        resume: Resume the run in the folder. Requires the same model and data.
        progress: Draw a progress bar.
        trackers: Objects that record every round (`dbcl.trackers.Tracker`).
        more: Settings by the option names of `dbcl train`. By default all clients take part in
            every round; see `fraction`.

    Returns:
        The finished run, with `run.model`, `run.history`, `run.contributions` and `run.folder`.

    Raises:
        ConfigError: Settings, model and data are incompatible.
        GuaranteeError: Settings, model and data are incompatible with the guarantee.

    >>> import torch.nn.functional as F
    >>> x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    >>> y = x[:, :1] - x[:, 1:2]
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    >>> clients = [(x[:20], y[:20]), (x[20:40], y[20:40])]
    >>> run = simulate(net, clients, (x[40:], y[40:]), loss=F.mse_loss, settings="veil", rounds=3, lr=0.05)
    >>> run.history[-1].round, run.history[-1].metric, type(run.model).__name__
    (3, 'loss', 'Sequential')
    """
    objective = Objective.from_loss(loss, metric, metric_mode=metric_mode)
    count = more.pop("clients", None)
    divided = isinstance(clients, list)
    if divided and count is not None:
        raise ConfigError(
            f"clients is a list of {len(clients)} clients already; give one set to divide it among {count}"
        )
    task = given(
        _maker(model),
        clients,
        held_out,
        objective=objective,
        properties=properties,
        optimizer=None if isinstance(optimizer, str) else optimizer,
        schedule=None if isinstance(lr_schedule, str) else lr_schedule,
    )
    task = replace(task, layers=layers)
    named = {
        "features": features if features is None or isinstance(features, str) else _label(features, "features"),
        "model": _label(model, "model"),
        "data": "data" + IN_PYTHON,
        "loss": CROSS_ENTROPY if objective.classifies else _label(objective.loss, "loss"),
        "metric": None if metric is None else _label(metric, "metric"),
        "metric_mode": metric_mode,
        "optimizer": optimizer if isinstance(optimizer, str) else _label(optimizer, "optimizer"),
        "lr_schedule": lr_schedule if isinstance(lr_schedule, str) else _label(lr_schedule, "schedule"),
        "clients": len(clients) if divided else (count or 10),
        "fraction": 1.0,
    }
    chosen = {key: value for key, value in named.items() if value is not None}
    with hint_of_default(settings):
        config = preset(str(settings or DEFAULT), **{**chosen, **more})
        task = with_features(task, config, None if isinstance(features, str) else features)
        place = user_path(folder or tempfile.mkdtemp(prefix="dbcl-"))
        if resume and (place / "config.toml").exists():
            run = _go_on(place, config, task)
        else:
            run = Run.start(config, place, task=task)
    if folder is None:  # its files stay for as long as the run is held
        weakref.finalize(run, shutil.rmtree, place, ignore_errors=True)
    bar = [ProgressBar(objective.shown)] if progress else []
    for _ in run.play(*trackers, *bar):
        pass
    if warning := run.contributions.warning():
        log.warning("%s", warning)
    return run


def _go_on(place: Path, config: RunConfig, task: Task) -> Run:
    before, now = read_config(place).options(), planned_for(resolve_device(config), task).options()
    changed = sorted(name for name in now if now[name] != before[name] and name not in RESUMABLE)
    if changed:
        told = ", ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in changed)
        raise ConfigError(f"the run in {place} has other settings: {told}; a run may change {', '.join(RESUMABLE)}")
    return Run.resume(place, task=task, **{name: now[name] for name in RESUMABLE})


def _maker(model: nn.Module | Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    if isinstance(model, nn.Module):
        return lambda seed: copy.deepcopy(model)
    if not callable(model):
        raise ConfigError(f"model is a torch.nn.Module or a function that makes one, got {type(model).__name__}")

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = model()
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"the function {name_of(model)} made a {type(made).__name__}, and must make a torch.nn.Module"
            )
        return made

    return make


def _label(thing: Any, nameless: str) -> str:
    return name_of(thing, nameless) + IN_PYTHON
