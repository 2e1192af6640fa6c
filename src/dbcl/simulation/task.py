"""Task of a run: network, examples, loss and metric, from settings or from Python objects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from dbcl import data
from dbcl.config import Layers
from dbcl.data import Dataset, DatasetExamples, Examples, TensorExamples, examples_of
from dbcl.data.examples import Rows
from dbcl.data.traits import PROPERTY_NAMES, properties_of
from dbcl.data.trees import join
from dbcl.engines import LocalTraining
from dbcl.engines.training import OptimizerFactory, Schedule
from dbcl.errors import ConfigError, DataError
from dbcl.features.extract import Features
from dbcl.model import networks
from dbcl.objective import CLASSIFICATION, Objective, name_of
from dbcl.simulation.config import CROSS_ENTROPY, RunConfig, in_python
from dbcl.simulation.features import Progress, no_progress, on_features
from dbcl.simulation.training import local_training
from dbcl.user_code import imported, made, needed, out_of_memory, short

Flags = NDArray[np.bool_]
CODE = ("model", "data", "features", "loss", "metric", "optimizer", "lr_schedule")
"""Settings that may name user code as module:name."""


@dataclass(frozen=True, eq=False)
class Task:
    """Task of a run: network, examples and objective. Use `dbcl.simulation.task_of` to make a task
    from settings.

    `make_model` makes the network from a seed of its initial weights. `train` contains all training
    examples, and `division` the row indices of each client if the data are already partitioned.
    `pictures` contains the same examples as images for image attacks; if it is None,
    `why_no_pictures` gives the reason.
    """

    make_model: Callable[[int], nn.Module]
    train: Examples
    held_out: Examples
    objective: Objective
    division: Sequence[Rows] | None = None
    pictures: Dataset | None = None
    why_no_pictures: str = ""
    holds: Flags | None = None
    """Flags of the training examples that have the property targeted by an audit, or None."""
    property_name: str = ""
    optimizer: OptimizerFactory | None = None
    schedule: Schedule | None = None
    layers: Layers | None = None
    """Input axes of the weights of custom layers, as in `SketchConfig.layers`."""

    def training(self, config: RunConfig) -> LocalTraining:
        """Return the configuration of a client's local training."""
        training = local_training(config, self.optimizer, self.schedule)
        return replace(training, batch_size=min(training.batch_size, len(self.train)))  # engines make room for a batch

    def adapt(self, config: RunConfig) -> RunConfig:
        """Return the settings with the number of clients in the data, if the data are already
        partitioned.
        """
        if self.division is None:
            return config
        fraction = 1.0 if config.fraction is None else config.fraction
        return replace(config, clients=len(self.division), fraction=fraction)


def task_of(
    config: RunConfig,
    data_dir: str | None = None,
    *,
    allow_code: bool = True,
    cache: str | Path | None = None,
    progress: Progress = no_progress,
) -> Task:
    """Make the task named by the settings.

    Args:
        config: The settings.
        data_dir: Folder of the datasets.
        allow_code: Permit the import of user code. Otherwise settings that name user code raise an
            error.
        cache: Folder in which features of images are cached; by default the folder `features` next
            to a file dataset.
        progress: Callback with the number of processed examples and their total number.

    >>> task = task_of(RunConfig())
    >>> len(task.train), len(task.held_out), task.objective.name
    (4000, 1000, 'accuracy')
    """
    task = _task_on_inputs(config, data_dir, allow_code)
    if cache is None and config.data in data.LOADERS and config.data != data.EMBEDDED:
        cache = data.data_root(data_dir) / "features"
    return with_features(task, config, cache=cache, progress=progress)


def with_features(
    task: Task,
    config: RunConfig,
    features: Features | None = None,
    *,
    cache: str | Path | None = None,
    progress: Progress = no_progress,
) -> Task:
    """Return the task with features as inputs: the given features, or those named by the settings.

    >>> config = RunConfig()
    >>> task = task_of(config)
    >>> with_features(task, config) is task
    True
    """
    if features is None and config.feature_map is None:
        return task
    train, held_out, make_model = on_features(
        config, task.train, task.held_out, task.pictures, features, cache=cache, progress=progress
    )
    return replace(
        task,
        train=train,
        held_out=held_out,
        make_model=make_model or task.make_model,
        pictures=None,
        why_no_pictures="the network is trained on features, not on images",
    )


def _task_on_inputs(config: RunConfig, data_dir: str | None, allow_code: bool) -> Task:
    code = code_of(config)
    if code and not allow_code:
        named = ", ".join(f"{name} {value}" for name, value in code.items())
        raise ConfigError(f"the settings name code that would be run ({named}); if you trust it, add `allow_code=True`")
    for name in CODE:
        value = getattr(config, name)
        if value is not None and in_python(value):
            raise ConfigError(
                f"the {name} of this run, {value.split(' (')[0]}, was given in Python: go on by dbcl.simulate with "
                "the same objects and resume=True, and audit it by dbcl_audit.audit.audit(run.folder, task=run.task)"
            )
    loss = None if config.loss == CROSS_ENTROPY else imported(config.loss, "loss")
    if config.metric == "loss":
        objective = replace(Objective.from_loss(loss), metric=None, name="loss", lower_is_better=True)
    else:
        metric = None if config.metric is None else imported(config.metric, "metric")
        objective = _with_own(loss, metric, config)
    own: dict[str, Any] = {
        "optimizer": imported(config.optimizer, "optimiser") if ":" in config.optimizer else None,
        "schedule": _schedule(config.lr_schedule),
    }
    if ":" in config.data:
        train, held_out, properties = _own_data(config.data)
        make = partial(_build, config.model)
        return given(make, train, held_out, objective=objective, properties=properties, **own)
    task = replace(of_pictures(config, data.load(config.data, data_dir), objective), **own)
    if config.data not in PROPERTY_NAMES:
        return task
    return replace(task, holds=properties_of(config.data, data_dir), property_name=PROPERTY_NAMES[config.data])


def code_of(config: RunConfig) -> dict[str, str]:
    """Return the settings that name user code, by option name.

    >>> code_of(RunConfig(model="mypackage.nets:make"))
    {'model': 'mypackage.nets:make'}
    """
    named = {name: getattr(config, name) or "" for name in CODE}
    return {name: value for name, value in named.items() if ":" in value}


def _with_own(loss: Any, metric: Any, config: RunConfig) -> Objective:
    for what, found, name in (("loss", loss, config.loss), ("metric", metric, config.metric)):
        missing = needed(found) if isinstance(found, type) else []
        if missing:
            raise ConfigError(
                f"the {what} {name!r} is a class that needs arguments ({', '.join(missing)}); write a function"
            )
    if metric is not None and not isinstance(metric, type) and not hasattr(metric, "update"):
        metric = _one_number(metric, "metric", config.metric)
    return Objective.from_loss(loss, metric, metric_mode=config.metric_mode)


def _schedule(name: str) -> Schedule | None:
    return _one_number(imported(name, "schedule"), "schedule", name) if ":" in name else None


def _one_number(function: Callable[..., Any], what: str, name: str | None) -> Callable[..., float]:
    """Wrap a user's function so that it must return a single number."""

    @wraps(function)
    def called(*arguments: Any) -> float:
        value = function(*arguments)
        try:
            return float(value.item() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else short(repr(value))
            raise ConfigError(f"the {what} {name!r} must give one number, and gave {got}") from None

    called.__name__ = name_of(function)
    return called


def of_pictures(config: RunConfig, dataset: Dataset, objective: Objective = CLASSIFICATION) -> Task:
    """Return the task of the settings' network on a dataset of images.

    >>> of_pictures(RunConfig(model="mnist-cnn"), data.load("digits")).pictures.shape
    (1, 28, 28)
    """
    return Task(
        lambda seed: networks.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=seed),
        TensorExamples(dataset.x_train, dataset.y_train),
        TensorExamples(dataset.x_test, dataset.y_test),
        objective,
        pictures=dataset if objective.classifies else None,
        why_no_pictures="" if objective.classifies else "the loss is not the cross entropy of classes",
    )


def _build(model: str, seed: int) -> nn.Module:
    if ":" not in model and model not in networks.SCATTER:
        raise ConfigError(
            f"{model} is made for the built-in datasets; with data of your own give `model=module:factory`"
        )
    return networks.build(model, seed=seed)


def given(
    make_model: Callable[[int], nn.Module],
    train: Any,
    held_out: Any,
    *,
    objective: Objective,
    properties: Mapping[str, Any] | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Schedule | None = None,
) -> Task:
    """Make a task from examples: `train` is a list with one set per client, or a single set to
    partition.

    The first entry of `properties` is the target of property inference: its name, and a flag for
    each training example.

    >>> import torch
    >>> x, y = torch.randn(20, 8), torch.arange(20) % 2
    >>> task = given(lambda seed: nn.Linear(8, 2), [(x, y), (x[:5], y[:5])], (x, y), objective=Objective())
    >>> [len(rows) for rows in task.division], task.why_no_pictures
    ([20, 5], 'an example has 1 axes, and a picture has 3: channels, height, width')
    """
    division = None
    if isinstance(train, list):
        clients = [_named(f"client {number}", each) for number, each in enumerate(train)]
        if not clients:
            raise DataError("the list of clients is empty")
        ends = np.cumsum([len(client) for client in clients])
        division = [np.arange(end - len(client), end) for client, end in zip(clients, ends, strict=True)]
        whole: Examples = pooled(clients)
    else:
        whole = _named("the training examples", train)
    held = _named("the held-out examples", held_out)
    pictures, why = _pictures(whole, held, objective)
    task = Task(make_model, whole, held, objective, division, pictures, why, optimizer=optimizer, schedule=schedule)
    for name, values in (properties or {}).items():
        return replace(task, holds=_flags(name, values, len(whole)), property_name=name)
    return task


def pooled(sets: Sequence[Examples]) -> Examples:
    """Concatenate several sets of examples.

    >>> import torch
    >>> first, second = (examples_of((torch.zeros(n, 4), torch.zeros(n))) for n in (3, 2))
    >>> len(pooled([first, second]))
    5
    """
    if len(sets) == 1:
        return sets[0]
    tensors = [each.first(len(each)) for each in sets if isinstance(each, TensorExamples)]
    if len(tensors) == len(sets):
        try:
            return TensorExamples(*join(tensors))
        except (RuntimeError, ValueError) as error:
            if out_of_memory(error):
                raise
            raise DataError(f"the clients' examples differ in shape or kind: {error}") from error
    lazy = [each for each in sets if isinstance(each, DatasetExamples)]
    if len(lazy) < len(sets):
        raise DataError("some clients are given as tensors and others as datasets; give all in one way")
    parts = [Subset(each.dataset, each.rows.tolist()) for each in lazy]
    return DatasetExamples(ConcatDataset(parts), lazy[0].collate)


def _own_data(name: str) -> tuple[Any, Any, Mapping[str, Any]]:
    given = made(name, "data")
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise DataError(
            f"{name!r} must give (training examples, held-out examples), and may give a dictionary of properties as a "
            f"third; it gave a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple) else "")
        )
    train, held_out, *more = given
    properties = more[0] if more else {}
    if not isinstance(properties, Mapping):
        raise DataError(f"the third that {name!r} gives is a {type(properties).__name__}, and must be a dictionary")
    return train, held_out, properties


def _named(who: str, source: Any) -> Examples:
    try:
        return examples_of(source)
    except DataError as error:
        raise DataError(f"{who}: {error}") from error


def _flags(name: str, values: Any, examples: int) -> Flags:
    flags = np.asarray(values)
    if flags.shape != (examples,) or not np.isin(flags, (0, 1)).all():
        raise DataError(f"the property {name!r} must be True or False for each of the {examples} training examples")
    return np.asarray(flags, dtype=np.bool_)


def _pictures(train: Examples, held_out: Examples, objective: Objective) -> tuple[Dataset | None, str]:
    """Return the examples as images for image attacks, or the reason why they are not images."""
    if not objective.classifies:
        return None, "the loss is not the cross entropy of classes"
    if not (isinstance(train, TensorExamples) and isinstance(held_out, TensorExamples)):
        return None, "the examples are not tensors in memory"
    (x, y), (x_test, y_test) = train.first(len(train)), held_out.first(len(held_out))
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None, "an input is not one tensor of numbers"
    if x.ndim != 4:
        return None, f"an example has {x.ndim - 1} axes, and a picture has 3: channels, height, width"
    if not isinstance(y, Tensor) or y.ndim != 1:
        return None, "an example has not one class"
    low, high = float(x.min()), float(x.max())
    scale = high - low or 1.0  # the pixels from 0 to 1 that these would be
    outputs = int(y.max()) + 1
    return Dataset("given", x, y.long(), x_test, y_test.long(), outputs, -low / scale, 1 / scale), ""
