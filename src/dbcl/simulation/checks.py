"""Validation of a task before the first round."""

from typing import Any

import torch
from torch import Tensor, nn

from dbcl.data import Examples, TensorExamples
from dbcl.data.examples import check_finite
from dbcl.data.trees import call
from dbcl.engines.engine import check_fit
from dbcl.engines.training import OptimizerFactory
from dbcl.errors import ConfigError, DataError, DbclError
from dbcl.objective import name_of
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task
from dbcl.user_code import short

IGNORED = -100
"""Class index that PyTorch's cross entropy ignores."""


def check_task(task: Task, config: RunConfig, model: nn.Module, held_out: Examples) -> None:
    """Raise `ConfigError` for a task whose first round would fail.

    Args:
        task: The task.
        config: Settings of the run.
        model: The network.
        held_out: Held-out examples on the model's device.

    >>> from dbcl.simulation.task import task_of
    >>> config = RunConfig(clients=2, min_updates=3)
    >>> task = task_of(config)
    >>> check_task(task, config, nn.Linear(3, 2), task.held_out)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: min_updates is 3, and a round has 1 of 2 clients; lower it, or raise `fraction`
    """
    if config.min_updates > config.cohort:
        raise ConfigError(
            f"min_updates is {config.min_updates}, and a round has {config.cohort} of {config.clients} clients; "
            "lower it, or raise `fraction`"
        )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ConfigError(f"the network's initial weights are not all finite: {name}")
    # Under a guarantee clients count such examples as zero: a refusal would tell of them.
    for client, rows in enumerate(task.division or []) if config.privacy is None else ():
        if isinstance(task.train, TensorExamples):
            check_finite(f"client {client}", task.train.subset(rows))
    if task.division is None and config.privacy is None and isinstance(task.train, TensorExamples):
        check_finite("the training examples", task.train)
    check_finite("the held-out examples", task.held_out)  # every round reads all of them, whatever they are
    outputs = _outputs(model, held_out) if task.objective.classifies else 0
    _check_classes("the training examples", task.train, outputs)
    _check_classes("the held-out examples", task.held_out, outputs)
    try:
        check_fit(model, held_out, task.objective)
    except DbclError as error:
        raise type(error)(f"the held-out examples: {error}") from error
    training = task.training(config)
    if not training.is_sgd:
        _check_optimizer(training.optimizer, model, config.lr)
    training.rate(0)


@torch.no_grad()
def _outputs(model: nn.Module, examples: Examples) -> int:
    """Return the number of classes of a network; 0 if it cannot be inferred from the outputs."""
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
    """Test an optimiser by one step with zero gradients on small parameters with the same numbers
    of axes as the model's.
    """
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
        raise ConfigError(f"the optimiser {name_of(make)} cannot train this model: {short(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{name_of(make)} made a {type(made).__name__}, and must make a torch.optim.Optimizer")
