"""Local training configured by a run's settings."""

import math
from functools import partial

import torch

from dbcl.engines import LocalTraining
from dbcl.engines.training import OptimizerFactory, Schedule
from dbcl.errors import ConfigError
from dbcl.privacy import UpdateNoise
from dbcl.simulation.config import RunConfig, names_code


def cosine(round: int, *, rounds: int) -> float:
    """Return the cosine learning rate factor: 1 in the first round, 0 after the last round.

    Args:
        round: Number of the round, starting at 0.
        rounds: Total number of rounds.

    >>> [round(cosine(number, rounds=4), 2) for number in range(5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    return (1 + math.cos(math.pi * min(round, rounds) / rounds)) / 2


def local_training(
    config: RunConfig, optimizer: OptimizerFactory | None = None, schedule: Schedule | None = None
) -> LocalTraining:
    """Return the configuration of local training.

    Args:
        config: Settings of the run.
        optimizer: Optimiser that overrides the user code named by the settings.
        schedule: Schedule that overrides the user code named by the settings.
    """
    privacy = config.privacy
    of_examples = privacy is not None and privacy.unit == "example"
    return LocalTraining(
        lr=config.lr,
        lr_decay=config.lr_decay,
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps=1 if config.algorithm == "sgd" else None,
        example_clip=privacy.clip if privacy is not None and of_examples else None,
        separation=privacy.separation if privacy is not None and of_examples else 1,
        momentum=config.momentum,
        proximal=config.proximal if config.algorithm == "fedprox" else 0.0,
        optimizer=optimizer or _optimizer(config),
        schedule=schedule or _schedule(config),
    )


def _optimizer(config: RunConfig) -> OptimizerFactory:
    if names_code(config.optimizer):
        return torch.optim.SGD  # the task imports user code
    kinds = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if config.optimizer.lower() not in kinds:
        known = ", ".join(sorted(kind.__name__ for kind in kinds.values()))
        raise ConfigError(f"optimizer must be one of {known}, or module:factory; got {config.optimizer!r}")
    found: OptimizerFactory = kinds[config.optimizer.lower()]
    return found


def _schedule(config: RunConfig) -> Schedule | None:
    if config.lr_schedule == "constant" or names_code(config.lr_schedule):
        return None
    if config.lr_schedule == "cosine":
        return partial(cosine, rounds=config.rounds)
    raise ConfigError(f"lr_schedule must be constant, cosine or module:function, got {config.lr_schedule!r}")


def update_noise(config: RunConfig) -> UpdateNoise | None:
    """Return the clipping and noise applied by each client to its update, or None."""
    if config.privacy is not None:
        return UpdateNoise(config.privacy.clip) if config.privacy.unit == "client" else None
    if config.update_clip is None:
        return None
    return UpdateNoise(config.update_clip, config.update_noise, insecure_seed=config.seed)
