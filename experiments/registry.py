"""Experiments by name, in the order in which they are listed and played."""

from difflib import get_close_matches

from dbcl.errors import ConfigError
from experiments import (
    all_rounds,
    cifar10,
    complexity,
    frontier,
    gan,
    gradient_error,
    gradient_matching,
    guaranteed,
    hostile_clients,
    lanes,
    lfw_roc,
    non_iid,
    ordinary_tasks,
    presets,
    privacy,
    property_inference,
    rounds,
    sums,
    table1,
    theory,
    veil,
)
from experiments.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    table1.EXPERIMENT,
    non_iid.EXPERIMENT,
    rounds.EXPERIMENT,
    cifar10.EXPERIMENT,
    lfw_roc.EXPERIMENT,
    gradient_error.EXPERIMENT,
    property_inference.EXPERIMENT,
    gradient_matching.EXPERIMENT,
    gan.EXPERIMENT,
    veil.EXPERIMENT,
    theory.EXPERIMENT,
    complexity.EXPERIMENT,
    frontier.EXPERIMENT,
    all_rounds.EXPERIMENT,
    lanes.EXPERIMENT,
    sums.EXPERIMENT,
    presets.EXPERIMENT,
    privacy.EXPERIMENT,
    guaranteed.EXPERIMENT,
    ordinary_tasks.EXPERIMENT,
    hostile_clients.EXPERIMENT,
)


def find(name: str) -> Experiment:
    """Return an experiment by its name.

    >>> find("theroy")
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: no experiment 'theroy'; did you mean theory? `python -m experiments --list` shows all
    """
    found = {experiment.name: experiment for experiment in EXPERIMENTS}
    if name not in found:
        near = get_close_matches(name, found, 1)
        remedy = f"did you mean {near[0]}?" if near else f"choose all or one of {', '.join(found)};"
        raise ConfigError(f"no experiment {name!r}; {remedy} `python -m experiments --list` shows all")
    return found[name]
