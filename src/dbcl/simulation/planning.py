"""Automatic settings of a guarantee: rounds, separation and learning rate if they are 0."""

import math
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from dbcl.errors import GuaranteeError
from dbcl.privacy import PrivacyPlan
from dbcl.privacy.planning import RUINED, WORTH_A_WARNING, expected_loss, suggest
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import Task

CHOICES = (
    "The choices: fewer parameters on public features (`features`), more examples, a larger `epsilon`, or, by name, a "
    "preset without a guarantee, such as blind"
)
"""Remedies in messages about too much noise for a model."""


LOSS_OF_NETWORKS = "0 to 45 points of accuracy (the median 5), a regression R2 0.43"
LOSS_OF_LINEAR = "about 4 points of accuracy"
"""Losses on raw inputs to federated averaging without a guarantee, at epsilon 2 (`results/ordinary-tasks`)."""


def noise_warning(plan: PrivacyPlan | None, values: int) -> str:
    """Return a warning with remedies if the noise of a plan costs much accuracy, else an empty
    string.

    Args:
        plan: Plan of the guarantee, or None.
        values: Number of trained parameters.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> noise_warning(plan, values=200_000)
    'the noise is 0.33 times as large as all that can be learned, ... about 6 points of accuracy; ...'
    >>> noise_warning(plan, values=20_000)
    ''
    """
    ratio = 0.0 if plan is None else plan.noise_to_signal(values)
    if ratio <= WORTH_A_WARNING:
        return ""
    return (
        f"the noise is {ratio:.2g} times as large as all that can be learned, which on images of digits cost about "
        f"{expected_loss(ratio):.0f} points of accuracy; other data may lose more. {CHOICES}"
    )


def parameter_count(model: nn.Module) -> int:
    """Return the number of trained parameters, which equals the number of values in an update.

    >>> parameter_count(nn.Linear(4, 2))
    10
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def raw_inputs_warning(plan: PrivacyPlan | None, model: nn.Module) -> str:
    """Return a warning of what a guarantee for one example costs a model of raw inputs; empty without such a guarantee.

    `noise_to_signal` is not sufficient for such a model, because its steps have different directions.

    Args:
        plan: Plan of the guarantee, or None.
        model: The network.

    >>> plan = PrivacyPlan(
    ...     epsilon=2, delta=1e-5, clip=0.1, unit="example", separation=1, rounds=130, clients=10, cohort=10,
    ...     examples=3000, batch=3000,
    ... )
    >>> raw_inputs_warning(plan, nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)))
    'the guarantee leaves 130 noisy steps of training, ... small networks lost 0 to 45 points of accuracy ...'
    >>> raw_inputs_warning(plan, nn.Linear(10, 1))
    'the guarantee leaves 130 noisy steps of training, ... a linear model lost about 4 points of accuracy ...'
    """
    if plan is None or plan.unit != "example":
        return ""
    matrices = sum(parameter.requires_grad and parameter.ndim > 1 for parameter in model.parameters())
    lost = f"small networks lost {LOSS_OF_NETWORKS}" if matrices > 1 else f"a linear model lost {LOSS_OF_LINEAR}"
    return (
        f"the guarantee leaves {plan.rounds} noisy steps of training, which suit a linear head on public features; on "
        f"raw inputs {lost} (docs/ordinary-tasks.md). {CHOICES}"
    )


def rms(model: nn.Module) -> float:
    """Return the root mean square of a model's trained parameters.

    >>> rms(nn.Linear(4, 2).requires_grad_(False))
    0.0
    """
    trained = [parameter.detach().double() for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in trained)
    return math.sqrt(sum(float(parameter.square().sum()) for parameter in trained) / total) if total else 0.0


def weight_scale(model: nn.Module, privacy: PrivacyPlan) -> float:
    """Return the RMS of the initial weights as the reference scale for noise.

    If all weights are initially 0, as in some linear models, return the RMS that the updates can
    reach.

    Args:
        model: The network with its initial weights.
        privacy: Plan of the guarantee.

    >>> import torch
    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> model = nn.Linear(4, 1, bias=False)
    >>> weight_scale(model, plan) == rms(model), weight_scale(nn.utils.vector_to_parameters(
    ...     torch.zeros(4), model.parameters()) or model, plan)
    (True, 40.0)
    """
    return rms(model) or privacy.reach / math.sqrt(max(1, parameter_count(model)))


def planned(config: RunConfig, *, examples: int, values: int) -> RunConfig:
    """Fill in the settings that are 0, if one example is the privacy unit.

    Args:
        config: The settings.
        examples: Number of training examples of all clients.
        values: Number of trained parameters.

    Returns:
        The complete settings.

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
        raise GuaranteeError(
            f"`delta` must be below 1 / {examples} (examples), or revealing one of them entirely would be allowed, "
            f"got {privacy.delta}"
        )
    if privacy.noise_by == "clients" and config.clients < 2:
        raise GuaranteeError(
            "with `noise_by=clients` nobody is trusted, which takes 2 clients or more, and there is 1; the preset "
            "private-example trusts the server"
        )
    found = suggest(privacy, clients=config.clients, examples=examples, values=values, rounds=config.rounds)
    if found.noise_to_signal > RUINED:
        raise GuaranteeError(
            f"the noise for epsilon {privacy.epsilon:g} would be {found.noise_to_signal:.2g} times as large as all "
            f"that can be learned of {values} parameters from {examples} examples, and cost about "
            f"{expected_loss(found.noise_to_signal):.0f} points of accuracy. {CHOICES}"
        )
    return replace(
        config,
        rounds=config.rounds or found.rounds,
        lr=config.lr or found.step / privacy.clip,
        privacy=replace(privacy, separation=privacy.separation or found.separation),
    )


def planned_for(config: RunConfig, task: Task) -> RunConfig:
    """Fill in the settings that are 0 for a task."""
    if config.privacy is None or config.privacy.unit != "example":
        return config
    return planned(config, examples=len(task.train), values=parameter_count(task.make_model(0)))


EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Values of epsilon that a forecast compares."""


class Forecast(NamedTuple):
    """Suggested settings for a target, and the expected loss of accuracy.

    >>> Forecast(2.0, "clients", 60, 1, 2.1, 0.11, 1.9).rounds
    60
    """

    epsilon: float
    noise_by: str
    rounds: int
    separation: int
    step: float
    noise_to_signal: float
    loss: float


def forecasts(config: RunConfig, *, examples: int, values: int) -> list[Forecast]:
    """Return suggested settings and expected losses for several targets, with an untrusted and a
    trusted server.

    Args:
        config: Settings whose privacy unit is one example.
        examples: Number of training examples of all clients.
        values: Number of trained parameters.

    >>> config = RunConfig.from_options(
    ...     epsilon=2, clip=0.1, privacy_unit="example", algorithm="sgd", fraction=1.0, clients=10, rounds=0, lr=0
    ... )
    >>> found = forecasts(config, examples=4000, values=39_700)
    >>> [(row.epsilon, row.noise_by, row.rounds) for row in found if row.epsilon == 2]
    [(2.0, 'clients', 60), (2.0, 'server', 70)]
    """
    assert config.privacy is not None
    found = []
    for epsilon in sorted({*EPSILONS, config.privacy.epsilon}):
        for noise_by in ("clients", "server")[config.clients < 2 :]:
            colluders = config.privacy.colluders if noise_by == "clients" else None
            fewest = config.privacy.fewest if noise_by == "clients" else 0
            target = replace(config.privacy, epsilon=epsilon, noise_by=noise_by, colluders=colluders, fewest=fewest)
            made = suggest(target, clients=config.clients, examples=examples, values=values)
            loss = expected_loss(made.noise_to_signal)
            found.append(
                Forecast(epsilon, noise_by, made.rounds, made.separation, made.step, made.noise_to_signal, loss)
            )
    return found
