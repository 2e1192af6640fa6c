"""What a run trains: a network, examples, a loss and a metric, made of its settings or given in Python."""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from dbcl import data, models
from dbcl.cover import Layers
from dbcl.data import Dataset, DatasetExamples, Examples, TensorExamples, examples_of
from dbcl.data.examples import Rows
from dbcl.data.traits import PROPERTY_NAMES, properties_of
from dbcl.data.trees import call, join
from dbcl.engines import LocalTraining
from dbcl.engines.engine import check_fit
from dbcl.engines.training import OptimizerFactory, Schedule
from dbcl.errors import ConfigError, DataError, DbclError
from dbcl.objective import CLASSIFICATION, Objective, name_of
from dbcl.run.config import CROSS_ENTROPY, RunConfig, in_python

Flags = NDArray[np.bool_]
CODE = ("model", "data", "loss", "metric", "optimizer", "lr_schedule")
"""The settings that may name code of one's own, as module:name."""
IGNORED = -100
"""The class that PyTorch's cross entropy leaves out."""


@dataclass(frozen=True, eq=False)
class Task:
    """The network, the examples and what is learned from them.

    `make_model` makes the network from a number, which decides its initial weights. `train` holds all training
    examples, and `division` the rows of each client where the data come divided. `pictures` are the same examples as
    attacks on pictures want them, or `why_no_pictures` says what they lack.

    >>> task = task_of(RunConfig())
    >>> len(task.train), len(task.held_out), task.objective.name
    (4000, 1000, 'accuracy')
    """

    make_model: Callable[[int], nn.Module]
    train: Examples
    held_out: Examples
    objective: Objective
    division: Sequence[Rows] | None = None
    pictures: Dataset | None = None
    why_no_pictures: str = ""
    holds: Flags | None = None
    """Which training examples have the property that an audit looks for; None where none is known."""
    property_name: str = ""
    optimizer: OptimizerFactory | None = None
    schedule: Schedule | None = None
    layers: Layers | None = None
    """Which axes of the weights of one's own layers are inputs, as `SketchPlan.of` takes it."""

    def training(self, config: RunConfig) -> LocalTraining:
        """What a client does with its examples."""
        training = config.training(self.optimizer, self.schedule)
        return replace(training, batch_size=min(training.batch_size, len(self.train)))  # engines make room for a batch

    def adapt(self, config: RunConfig) -> RunConfig:
        """The settings with the number of clients that the data have, where they come divided."""
        if self.division is None:
            return config
        fraction = 1.0 if config.fraction is None else config.fraction
        return replace(config, clients=len(self.division), fraction=fraction)

    def check(self, config: RunConfig, model: nn.Module, held_out: Examples) -> None:
        """Refuse, before a run begins, what would end it in its first round; `held_out` are on the model's device.

        >>> config = RunConfig(clients=2, min_updates=3)
        >>> task_of(config).check(config, nn.Linear(3, 2), task_of(config).held_out)
        Traceback (most recent call last):
            ...
        dbcl.errors.ConfigError: min_updates is 3, and a round has 1 of 2 clients; lower it, or raise --fraction
        """
        if config.min_updates > config.cohort:
            raise ConfigError(
                f"min_updates is {config.min_updates}, and a round has {config.cohort} of {config.clients} clients; "
                "lower it, or raise --fraction"
            )
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise ConfigError(f"the network's initial weights are not all finite: {name}")
        outputs = _outputs(model, held_out) if self.objective.classifies else 0
        _check_classes("the training examples", self.train, outputs)
        _check_classes("the held-out examples", self.held_out, outputs)
        try:
            check_fit(model, held_out, self.objective)
        except DbclError as error:
            raise type(error)(f"the held-out examples: {error}") from error
        training = self.training(config)
        if not training.is_sgd:
            _check_optimizer(training.optimizer, model, config.lr)
        training.rate(0)


def task_of(config: RunConfig, data_dir: str | None = None, *, trust: bool = True) -> Task:
    """The task that a run's settings name; without `trust` one whose settings name code of somebody's is refused."""
    code = code_of(config)
    if code and not trust:
        named = ", ".join(f"{name} {value}" for name, value in code.items())
        raise ConfigError(f"the settings name code that would be run ({named}); if you trust it, add --trust")
    for name in CODE:
        value = getattr(config, name)
        if value is not None and in_python(value):
            raise ConfigError(
                f"the {name} of this run, {value.split(' (')[0]}, was given in Python: go on by dbcl.simulate with "
                "the same objects and resume=True, and audit it by dbcl.audit.suite.audit(run.folder, task=run.task)"
            )
    loss = None if config.loss == CROSS_ENTROPY else models.imported(config.loss, "loss")
    if config.metric == "loss":
        objective = replace(Objective.of(loss), metric=None, name="loss", lower_is_better=True)
    else:
        metric = None if config.metric is None else models.imported(config.metric, "metric")
        objective = _with_own(loss, metric, config)
    own: dict[str, Any] = {
        "optimizer": models.imported(config.optimizer, "optimiser") if ":" in config.optimizer else None,
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
    """The settings that name code of somebody's.

    >>> code_of(RunConfig(model="mypackage.nets:make"))
    {'model': 'mypackage.nets:make'}
    """
    named = {name: getattr(config, name) or "" for name in CODE}
    return {name: value for name, value in named.items() if ":" in value}


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no more memory, in Python's words, in CUDA's or in PyTorch's on a CPU.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), out_of_memory(MemoryError())
    (True, True)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def own_code(config: RunConfig, then: str = "") -> Iterator[None]:
    """Whatever the code that the settings name raises becomes one sentence, with its function and line, and `then`.

    Errors of dbcl and of the system pass, and so does everything where the settings name no code.

    >>> with own_code(RunConfig(loss="torch.nn.functional:mse_loss"), then="; mend it"):
    ...     torch.nn.functional.mse_loss(None, None)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: torch.nn.functional:mse_loss failed: AttributeError: ... line ...; mend it
    """
    code = code_of(config)
    try:
        yield
    except (DbclError, OSError):
        raise
    except (Exception, SystemExit) as error:
        if not code or out_of_memory(error):
            raise
        raise ConfigError(f"{_blame(error, code)}{then}") from error


def _blame(error: BaseException, code: Mapping[str, str]) -> str:
    modules = {value.partition(":")[0] for value in code.values()}
    steps = list(traceback.walk_tb(error.__traceback__))
    own = [step for step in steps if step[0].f_globals.get("__name__") in modules]
    frame, line = (own or steps)[-1]
    what = f"{type(error).__name__}: {models.short(error)} ({frame.f_code.co_filename}, line {line})"
    if not own:
        return f"the run's own code ({', '.join(code.values())}) does not do what it must: {what}"
    first = own[0][0]
    return f"{first.f_globals['__name__']}:{first.f_code.co_qualname} failed: {what}"


def _with_own(loss: Any, metric: Any, config: RunConfig) -> Objective:
    for what, found, name in (("loss", loss, config.loss), ("metric", metric, config.metric)):
        needed = models.needed(found) if isinstance(found, type) else []
        if needed:
            raise ConfigError(
                f"the {what} {name!r} is a class that needs arguments ({', '.join(needed)}); write a function"
            )
    if metric is not None and not isinstance(metric, type) and not hasattr(metric, "update"):
        metric = _one_number(metric, "metric", config.metric)
    return Objective.of(loss, metric, better=config.better)


def _schedule(name: str) -> Schedule | None:
    return _one_number(models.imported(name, "schedule"), "schedule", name) if ":" in name else None


def _one_number(function: Callable[..., Any], what: str, name: str | None) -> Callable[..., float]:
    """A function of the user's own that must give one number."""

    @wraps(function)
    def called(*arguments: Any) -> float:
        value = function(*arguments)
        try:
            return float(value.item() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else models.short(repr(value))
            raise ConfigError(f"the {what} {name!r} must give one number, and gave {got}") from None

    called.__name__ = name_of(function)
    return called


@torch.no_grad()
def _outputs(model: nn.Module, examples: Examples) -> int:
    """How many classes a network tells apart; 0 where its outputs do not say."""
    mode = model.training
    model.eval()
    try:
        logits = call(model, examples.first(1).inputs)
    except (RuntimeError, TypeError, ValueError, LookupError):
        return 0  # `check_fit` says what is wrong
    finally:
        model.train(mode)
    return int(logits.shape[1]) if isinstance(logits, Tensor) and logits.ndim > 1 else 0


def _check_classes(who: str, examples: Examples, outputs: int) -> None:
    labels = examples.targets if isinstance(examples, TensorExamples) else None
    if not outputs or not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.numel():
        return
    counted = labels[labels != IGNORED] if outputs > 1 else labels
    for label in (int(counted.min()), int(counted.max())) if counted.numel() else ():
        if not 0 <= label < max(outputs, 2):
            raise DataError(f"{who} hold the class {label}, and the network has {outputs} outputs, from class 0 on")


def _check_optimizer(make: OptimizerFactory, model: nn.Module, lr: float) -> None:
    """Let an optimiser take one step with gradients of 0, on small parameters with as many axes as the model's."""
    stand_ins = [nn.Parameter(torch.zeros([2] * each.ndim)) for each in model.parameters() if each.requires_grad]
    for each in stand_ins:
        each.grad = torch.zeros_like(each)
    try:
        made: Any = make(stand_ins, lr=lr)
        if isinstance(made, torch.optim.Optimizer):
            made.step()
    except (TypeError, RuntimeError, ValueError) as error:  # LBFGS wants a closure, SparseAdam and Muon other gradients
        if not isinstance(make, type):
            raise
        raise ConfigError(f"the optimiser {name_of(make)} cannot train this model: {models.short(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{name_of(make)} made a {type(made).__name__}, and must make a torch.optim.Optimizer")


def of_pictures(config: RunConfig, dataset: Dataset, objective: Objective = CLASSIFICATION) -> Task:
    """The task of a configuration's network on a dataset of pictures.

    >>> of_pictures(RunConfig(model="mnist-cnn"), data.load("digits")).pictures.shape
    (1, 28, 28)
    """
    return Task(
        lambda seed: models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=seed),
        TensorExamples(dataset.x_train, dataset.y_train),
        TensorExamples(dataset.x_test, dataset.y_test),
        objective,
        pictures=dataset if objective.classifies else None,
        why_no_pictures="" if objective.classifies else "the loss is not the cross entropy of classes",
    )


def _build(model: str, seed: int) -> nn.Module:
    if ":" not in model:
        raise ConfigError(
            f"{model} is made for the built-in datasets; with data of your own give --model module:factory"
        )
    return models.build(model, seed=seed)


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
    """The task of examples that are given: `train` a list with an item for each client, or one set for all to share.

    The first of the `properties` is what an audit looks for: its name, and for each training example whether it has it.

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
    """The examples of several sets as one, in their order.

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
            raise DataError(f"the clients' examples differ in shape or kind: {error}") from error
    lazy = [each for each in sets if isinstance(each, DatasetExamples)]
    if len(lazy) < len(sets):
        raise DataError("some clients are given as tensors and others as datasets; give all in one way")
    parts = [Subset(each.dataset, each.rows.tolist()) for each in lazy]
    return DatasetExamples(ConcatDataset(parts), lazy[0].collate)


def _own_data(name: str) -> tuple[Any, Any, Mapping[str, Any]]:
    made = models.made(name, "data")
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise DataError(
            f"{name!r} must give (training examples, held-out examples), and may give a dictionary of properties as a "
            f"third; it gave a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "")
        )
    train, held_out, *more = made
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
    """The examples as attacks on pictures take them, or why they are none."""
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
