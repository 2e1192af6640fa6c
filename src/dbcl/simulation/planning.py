"""Settings of a guarantee that follow from the run: rounds, separation and learning rate that are left at 0."""

from dataclasses import replace

from torch import nn

from dbcl.errors import ConfigError
from dbcl.privacy.planning import suggest
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task


def trained_values(model: nn.Module) -> int:
    """Return the number of trained parameters, which is that of the values in an update.

    >>> trained_values(nn.Linear(4, 2))
    10
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def planned(config: RunConfig, *, examples: int, values: int) -> RunConfig:
    """Return the settings with what is left at 0 filled in, if one example is the privacy unit.

    Args:
        config: The settings.
        examples: Number of training examples of all clients.
        values: Number of trained parameters.

    >>> config = RunConfig.from_options(
    ...     epsilon=2, clip=0.1, privacy_unit="example", algorithm="sgd", fraction=1.0, clients=10, rounds=0, lr=0
    ... )
    >>> made = planned(config, examples=60_000, values=39_700)
    >>> made.rounds, made.privacy.separation, round(made.lr * made.privacy.clip, 2)
    (430, 10, 4.0)
    """
    privacy = config.privacy
    if privacy is None or privacy.unit != "example" or (config.rounds and config.lr and privacy.separation):
        return config
    if not privacy.delta < 1 / max(1, examples):
        raise ConfigError(
            f"`delta` must be below 1 / {examples} (examples), or revealing one of them entirely would be allowed, "
            f"got {privacy.delta}"
        )
    found = suggest(privacy, clients=config.clients, examples=examples, values=values)
    return replace(
        config,
        rounds=config.rounds or found.rounds,
        lr=config.lr or found.step / privacy.clip,
        privacy=replace(privacy, separation=privacy.separation or found.separation),
    )


def planned_for(config: RunConfig, task: Task) -> RunConfig:
    """Return the settings with what is left at 0 filled in for a task."""
    if config.privacy is None or config.privacy.unit != "example":
        return config
    return planned(config, examples=len(task.train), values=trained_values(task.make_model(0)))
