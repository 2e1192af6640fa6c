"""Construction of plan, server, clients and engine from a run's settings."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl import data, seeds
from dbcl.config import Layers, SecAggConfig, SketchConfig
from dbcl.data import TensorExamples
from dbcl.data.examples import Rows
from dbcl.data.trees import Tree
from dbcl.engines import Engine, LocalEngine, StackedEngine
from dbcl.engines.training_server import TrainingServer
from dbcl.errors import ConfigError
from dbcl.optim import ServerOptimizer, adam, fedavg, momentum
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Server, UpdateValidator
from dbcl.simulation.config import RunConfig
from dbcl.simulation.planning import noise_warning, parameter_count, raw_inputs_warning, rms, weight_scale
from dbcl.simulation.task import Task
from dbcl.simulation.training import local_training, update_noise
from dbcl.transcripts import Setting

log = logging.getLogger(__name__)

CALIBRATION_INPUTS = 1000
"""Number of unlabelled held-out inputs with which the server estimates normalisation statistics."""
ENGINES: dict[str, type[Engine]] = {"stacked": StackedEngine, "local": LocalEngine}
SERVER_OPTIMIZERS: dict[str, Callable[..., ServerOptimizer]] = {"fedavg": fedavg, "momentum": momentum, "adam": adam}


def validator(config: RunConfig) -> UpdateValidator:
    """Return the server's validator of updates."""
    return UpdateValidator(
        min_updates=config.min_updates,
        norm_bound=config.norm_bound,
        max_examples=config.max_examples,
        max_influence=config.max_influence or None,
        outlier_factor=config.outlier_factor or None,
    )


def server_rate(config: RunConfig) -> float:
    """Return the server's learning rate: `server_lr`, or the default of its optimiser.

    >>> server_rate(RunConfig()), server_rate(RunConfig(server_optimizer="adam"))
    (1.0, 0.01)
    """
    default: float = signature(SERVER_OPTIMIZERS[config.server_optimizer]).parameters["lr"].default
    return config.server_lr or default


def server_momentum(config: RunConfig) -> float:
    """Return the server's momentum; 0 if its optimiser has none."""
    return config.server_momentum if config.server_optimizer == "momentum" else 0.0


def server_optimizer(config: RunConfig) -> ServerOptimizer:
    """Return the server's optimiser."""
    more = {"beta": config.server_momentum} if config.server_optimizer == "momentum" else {}
    return SERVER_OPTIMIZERS[config.server_optimizer](lr=server_rate(config), **more)


def check(config: RunConfig) -> RunConfig:
    """Validate settings by constructing their parts. Return the settings, or raise `ConfigError`."""
    local_training(config)
    validator(config)
    update_noise(config)
    return config


def privacy_plan(config: RunConfig, examples: int = 0, values: int = 0) -> PrivacyPlan | None:
    """Return the privacy plan of the settings; None without a guarantee.

    Args:
        config: Settings of the run.
        examples: Number of training examples; required if one example is the privacy unit.
        values: Number of values in an update; required if clients add the noise.

    >>> plan = privacy_plan(RunConfig.from_options(epsilon=8, clip=0.2, clients=1000, rounds=400))
    >>> plan.separation, plan.participations
    (10, 40)
    """
    privacy = config.privacy
    if privacy is None:
        return None
    facts: dict[str, Any] = {"rounds": config.rounds, "clients": config.clients, "cohort": config.cohort}
    if privacy.noise_by == "clients":
        facts["values"] = values
    if privacy.unit == "example":
        # Clients send gradients times their learning rate, and this is what one of them moves the sum by.
        privacy = replace(privacy, clip=privacy.clip * config.lr)
        facts |= {"examples": examples, "batch": max(1, examples // privacy.separation)}
    if config.server_optimizer == "adam":  # not linear
        facts |= {"noise_on_updates": True}
    else:
        facts |= {"momentum": server_momentum(config), "lr": server_rate(config)}
    return PrivacyPlan.from_config(privacy, **facts)


def secagg_config(config: RunConfig, *, lanes: int, largest: int, values: int) -> SecAggConfig | None:
    """Return the configuration of secure aggregation. None if it is disabled or defined by a plan
    with noise shares.

    Args:
        config: Settings of the run.
        lanes: Number of lanes, each of which needs enough clients.
        largest: Number of examples of the largest client, used as weight cap without a guarantee.
        values: Number of values in W. Rounding increases norms, which a guarantee takes into
            account.

    >>> config = RunConfig.from_options(secure_aggregation=True, fraction=0.2)
    >>> secagg_config(config, lanes=2, largest=600, values=1000).clip
    4.0
    """
    if not config.secure_aggregation or (config.privacy is not None and config.privacy.noise_by == "clients"):
        return None
    least = config.secagg.min_cohort
    if config.cohort < lanes * least:
        share = math.ceil(100 * lanes * least / config.clients) / 100
        remedy = f"`fraction={share:g}`" if share <= 1 else f"`clients={lanes * least}` with `fraction=1`"
        each, other = (f" in each of {lanes} lanes", ", or `lanes=1`") if lanes > 1 else ("", "")
        raise ConfigError(
            f"`secure_aggregation` adds up {least} clients or more (`min_cohort`){each}, and a round has "
            f"{config.cohort} of {config.clients}: the remedy is {remedy}{other}"
        )
    if config.privacy is None:
        return replace(config.secagg, weight_cap=largest)
    from dbcl.protocol.secagg.quantizer import Quantizer

    stretch = Quantizer(clip=1.0, clients=2).longest(values)
    cap = int(config.privacy.weight_cap) or 1
    return replace(config.secagg, clip=config.privacy.clip / stretch, weight_cap=cap)


def new_seed(config: RunConfig) -> bytes:
    """Return the seed of a run's initial weights, cohorts and batches: fresh and secret, or derived
    from `seed`.

    >>> new_seed(RunConfig(seed=0)) == new_seed(RunConfig(seed=0)), new_seed(RunConfig()) == new_seed(RunConfig())
    (True, False)
    """
    return seeds.fresh() if config.seed is None else seeds.derive(bytes(seeds.SEED_BYTES), "run", config.seed)


def sketch_config(
    config: RunConfig, model: nn.Module, layers: Layers | None = None, *, examples: int = 0
) -> SketchConfig:
    """Return the configuration of a model's sketch and veil.

    With a guarantee the noise scale is fixed, and the veil states it relative to the initial
    weights.

    Args:
        config: Settings of the run.
        model: The network.
        layers: Input axes of custom layers.
        examples: Number of training examples; required if one example is the privacy unit.
    """
    veil = config.sketch.veil
    if config.privacy is not None and config.privacy.noise_by == "server" and config.server_optimizer != "adam":
        privacy = privacy_plan(config, examples)
        assert privacy is not None
        veil = float(f"{privacy.relative(weight_scale(model, privacy)):.3g}")
    return replace(config.sketch, veil=veil, layers=layers or config.sketch.layers)


def build_plan(config: RunConfig, model: nn.Module, layers: Layers | None = None, *, examples: int = 0) -> SketchPlan:
    """Plan a model's sketches and veil. The arguments are those of `sketch_config`.

    >>> from dbcl.simulation.task import task_of
    >>> config = RunConfig.from_options(veil=0.0)
    >>> build_plan(config, task_of(config).make_model(0)).unprotected
    ('1.bias', '3.bias', '5.weight', '5.bias')
    """
    return SketchPlan.from_model(model, sketch_config(config, model, layers, examples=examples))


def build_server(
    config: RunConfig,
    model: nn.Module,
    *,
    layers: Layers | None = None,
    examples: int = 0,
    insecure_seed: int | None = None,
    **changes: Any,
) -> Server:
    """Make a server with a run's sketch and wire format. `changes` are further arguments of
    `Server`.

    >>> from dbcl.simulation.task import task_of
    >>> build_server(RunConfig(), task_of(RunConfig()).make_model(0)).round
    0
    """
    plan = build_plan(config, model, layers, examples=examples)
    return Server(model, plan, wire=config.wire, insecure_seed=insecure_seed, **changes)


def divide(config: RunConfig, task: Task, *, seed: bytes) -> list[Rows]:
    """Return each client's training examples: the partition of the data, or a partition by the
    settings.

    >>> from dbcl.simulation.task import task_of
    >>> len(divide(RunConfig(clients=4), task_of(RunConfig()), seed=bytes(32)))
    4
    """
    if task.division is not None:
        return list(task.division)
    if config.partition == "iid":
        return data.iid(np.zeros(len(task.train), dtype=np.int64), config.clients, seed=seed)
    labels = task.train.targets if isinstance(task.train, TensorExamples) else None
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
        raise ConfigError(
            f"`partition={config.partition}` divides by class, and these targets are no tensor of classes"
        )
    classes = labels.cpu().numpy()[task.train.rows]  # type: ignore[attr-defined]
    if config.partition == "dirichlet":
        return data.dirichlet(classes, config.clients, alpha=config.alpha, seed=seed)
    return data.shards(classes, config.clients, seed=seed)


def calibration(config: RunConfig, task: Task) -> Tree:
    """Return held-out inputs with which the server estimates normalisation statistics.

    >>> from dbcl.simulation.task import task_of
    >>> calibration(RunConfig(), task_of(RunConfig())).shape
    torch.Size([1000, 1, 28, 28])
    """
    return task.held_out.to(device_of(config)).first(CALIBRATION_INPUTS).inputs


def build_run_server(config: RunConfig, task: Task, *, seed: bytes) -> Server:
    """Make the server of a new run."""
    check(config)
    model = task.make_model(_weight_seed(config, seed)).to(device_of(config))
    examples = len(task.train)
    plan = build_plan(config, model, task.layers, examples=examples)
    values = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    privacy = privacy_plan(config, examples, values)
    if privacy is not None:
        privacy.require_useful(rms(model), parameter_count(model))
        raw = "" if config.feature_map else raw_inputs_warning(privacy, model)
        if warning := noise_warning(privacy, parameter_count(model)) or raw:
            log.warning("%s", warning)
    settings: dict[str, Any] = {
        "privacy": privacy,
        "optimizer": server_optimizer(config),
        "validator": validator(config),
        "wire": config.wire,
        "calibration": calibration(config, task),
        "ema_decay": config.ema_decay,
        "insecure_seed": config.seed,
    }
    largest = max(map(len, divide(config, task, seed=seed)))
    secagg = secagg_config(config, lanes=plan.lanes, largest=largest, values=values)
    if not config.secure_aggregation:
        return Server(model, plan, **settings)
    from dbcl.engines.secure import SecureServer

    rounding_seed = None if config.seed is None else seed
    return SecureServer(
        model, plan, secagg=secagg, masked=config.engine == "local", rounding_seed=rounding_seed, **settings
    )


def build_engine(config: RunConfig, task: Task, server: TrainingServer, *, seed: bytes) -> Engine:
    """Make the engine of a run."""
    device = device_of(config)
    more = {"precision": config.precision} if config.engine == "stacked" else {}
    return ENGINES[config.engine](
        server,
        # A client's own network has other weights, which the broadcast replaces.
        task.make_model(_weight_seed(config, seed) + 1).to(device),
        task.train.to(device).divide(divide(config, task, seed=seed)),
        task.training(config),
        objective=task.objective,
        fraction=config.share,
        seed=seed,
        noise=update_noise(config),
        in_turns=config.privacy is not None and config.privacy.unit == "client",
        in_batches=config.secure_aggregation,
        **more,
    )


def public_setting(config: RunConfig, task: Task, plan: SketchPlan) -> Setting:
    """Return the public setting of a run, which every party knows before the first round."""
    return Setting(
        model=config.model,
        shape=task.pictures.shape if task.pictures else (),
        outputs=task.pictures.outputs if task.pictures else 0,
        training=task.training(config).settings(),
        clients=config.clients,
        cohort=config.cohort,
        optimizer=config.server_optimizer,
        momentum=server_momentum(config),
        server_lr=server_rate(config),
        veil=max((tensor.veil for tensor in plan.tensors), default=config.sketch.veil),
    )


def resolve_device(config: RunConfig) -> RunConfig:
    """Return the settings with `auto` replaced by the actual device, which the run's folder then
    documents.

    >>> resolve_device(RunConfig(device="auto")).device == ("cuda" if torch.cuda.is_available() else "cpu")
    True
    """
    if config.device != "auto":
        return config
    return replace(config, device="cuda" if torch.cuda.is_available() else "cpu")


def _weight_seed(config: RunConfig, seed: bytes) -> int:
    """Return the seed of the initial weights, derived from the run's seed and limited to PyTorch's
    64 bits.
    """
    return int(seeds.words(seed, "weights", n=1)[0] >> np.uint64(2)) if config.seed is None else config.seed


def device_of(config: RunConfig) -> torch.device:
    """Return the device of a run, or raise `ConfigError` if the device is unavailable.

    >>> device_of(RunConfig())
    device(type='cpu')
    """
    device = torch.device(resolve_device(config).device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and PyTorch finds no CUDA device here; `device=auto` takes what there is")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device}, and PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return device
