"""From settings to what plays a run: model, plan, server, session, shards and engine are built here and only here."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbcl import data, seeds
from dbcl.cover import Layers
from dbcl.data import TensorExamples
from dbcl.data.examples import Rows
from dbcl.engines import Engine, ServerSession, Session, StackedEngine
from dbcl.errors import ConfigError
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Server
from dbcl.run.config import ENGINES, RunConfig
from dbcl.run.task import Task
from dbcl.transcripts import Setting

CALIBRATION = 1000
"""On so many held-out inputs, without their labels, the server measures normalisation statistics."""


def new_seed(config: RunConfig) -> bytes:
    """The seed of a run's initial weights, cohorts and batches: secret and fresh, or that of an experiment.

    >>> new_seed(RunConfig(seed=0)) == new_seed(RunConfig(seed=0)), new_seed(RunConfig()) == new_seed(RunConfig())
    (True, False)
    """
    return seeds.fresh() if config.seed is None else seeds.derive(bytes(seeds.SEED_BYTES), "run", config.seed)


def rms(model: nn.Module) -> float:
    """The root mean square of all that is trained in a model.

    >>> rms(nn.Linear(4, 2).requires_grad_(False))
    0.0
    """
    trained = [parameter.detach().double() for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in trained)
    return math.sqrt(sum(float(parameter.square().sum()) for parameter in trained) / total) if total else 0.0


def parameter_count(model: nn.Module) -> int:
    """Return the number of trained parameters.

    >>> parameter_count(nn.Linear(4, 2))
    10
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def weight_scale(model: nn.Module, privacy: PrivacyPlan) -> float:
    """Return the size that a guarantee's noise is compared with: the RMS of the initial weights.

    Weights that all begin at 0, as those of a linear model may, are as large as the updates can make them.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> model = nn.Linear(4, 1, bias=False)
    >>> weight_scale(model, plan) == rms(model), weight_scale(nn.utils.vector_to_parameters(
    ...     torch.zeros(4), model.parameters()) or model, plan)
    (True, 40.0)
    """
    return rms(model) or privacy.reach / math.sqrt(max(1, parameter_count(model)))


def build_plan(config: RunConfig, model: nn.Module, layers: Layers | None = None, *, examples: int = 0) -> SketchPlan:
    """What is sketched and veiled, and how; `layers` are those of `SketchPlan.of`.

    With a guarantee the size of the veil is fixed for the run; the plan names what that is beside the weights now.
    Where one example is the unit, that takes the number of training `examples`. Noise before the server's optimiser is
    in W already, and the veil is what the settings say.

    >>> from dbcl.run.task import task_of
    >>> build_plan(RunConfig(veil=0.0), task_of(RunConfig()).make_model(0)).in_clear
    ('1.bias', '3.bias', '5.weight', '5.bias')
    """
    privacy = config.privacy(examples)
    promised = None if privacy is None or privacy.before else privacy.relative(weight_scale(model, privacy))
    return SketchPlan.of(
        model,
        ratio=config.ratio,
        cover=config.cover,
        veil=config.veil if promised is None else float(f"{promised:.3g}"),
        sketch=config.sketch,
        layers=layers,
        lanes=config.lanes,
        grouped=config.buckets == "grouped",
    )


def build_server(
    config: RunConfig,
    model: nn.Module,
    *,
    layers: Layers | None = None,
    examples: int = 0,
    insecure_seed: int | None = None,
    **changes: Any,
) -> Server:
    """A server for a model under a configuration's plan and wire; `changes` are more arguments of `Server`.

    >>> from dbcl.run.task import task_of
    >>> build_server(RunConfig(), task_of(RunConfig()).make_model(0)).round
    0
    """
    plan = build_plan(config, model, layers, examples=examples)
    return Server(model, plan, wire=config.wire, insecure_seed=insecure_seed, **changes)


def divide(config: RunConfig, task: Task, *, seed: bytes) -> list[Rows]:
    """Which training examples each client holds: as the data come divided, or else as the settings say.

    >>> from dbcl.run.task import task_of
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
            f"--partition {config.partition} divides by class, and these targets are no tensor of classes"
        )
    classes = labels.cpu().numpy()[task.train.rows]  # type: ignore[attr-defined]
    if config.partition == "dirichlet":
        return data.dirichlet(classes, config.clients, alpha=config.alpha, seed=seed)
    return data.shards(classes, config.clients, seed=seed)


def build_session(config: RunConfig, task: Task, *, seed: bytes) -> ServerSession:
    """Whoever holds the model of a run, at its first round."""
    model = task.make_model(_weight_seed(config, seed)).to(_device(config))
    privacy = config.privacy(len(task.train))
    if privacy is not None:
        privacy.require_useful(rms(model), parameter_count(model))
    server = build_server(
        config,
        model,
        layers=task.layers,
        examples=len(task.train),
        insecure_seed=config.seed,
        optimizer=config.server_step(),
        door=config.door(),
        privacy=privacy,
        calibration=task.held_out.to(_device(config)).first(CALIBRATION).inputs,
        steady_lanes=config.secure_aggregation,
    )
    length = sum(math.prod(tensor.shape) for tensor in server.plan.tensors)
    most = max(map(len, divide(config, task, seed=seed)))
    terms = config.terms(lanes=server.plan.lanes, most=most, length=length)
    if terms is None:
        return ServerSession(server, ema_decay=config.ema_decay)
    from dbcl.engines.secure import SecureSession

    rounding = None if config.seed is None else seed
    return SecureSession(server, terms, config.ema_decay, masked=config.engine == "local", seed=rounding)


def build_engine(config: RunConfig, task: Task, session: Session, *, seed: bytes) -> Engine:
    """The engine that plays the rounds of a configuration."""
    device = _device(config)
    engine = ENGINES[config.engine](
        session,
        # A client's own network has weights of its own, which the broadcast replaces.
        task.make_model(_weight_seed(config, seed) + 1).to(device),
        task.train.to(device).divide(divide(config, task, seed=seed)),
        task.training(config),
        objective=task.objective,
        fraction=config.share,
        seed=seed,
        noise=config.noise(),
    )
    engine.in_turns = config.epsilon is not None and config.unit == "client"
    engine.in_batches = config.secure_aggregation
    if isinstance(engine, StackedEngine):
        engine.precision = config.precision
    return engine


def public_setting(config: RunConfig, task: Task, plan: SketchPlan) -> Setting:
    """What every party of a run knows before its first round; `plan` is the one that the run has.

    >>> from dbcl.run.task import task_of
    >>> config = RunConfig(clients=2, fraction=1.0)
    >>> task = task_of(config)
    >>> public_setting(config, task, build_plan(config, task.make_model(0))).cohort
    2
    """
    return Setting(
        model=config.model,
        shape=task.pictures.shape if task.pictures else (),
        outputs=task.pictures.outputs if task.pictures else 0,
        training=task.training(config).settings(),
        clients=config.clients,
        cohort=config.cohort,
        optimizer=config.server_optimizer,
        momentum=config.server_momentum if config.server_optimizer == "momentum" else 0.0,
        server_lr=config.server_rate,
        veil=max((tensor.veil for tensor in plan.tensors), default=config.veil),
        grouped=config.buckets == "grouped",
    )


def _weight_seed(config: RunConfig, seed: bytes) -> int:
    """What the initial weights are drawn from: as hard to guess as the run's seed, up to PyTorch's 64 bits."""
    return int(seeds.words(seed, "weights", n=1)[0] >> np.uint64(2)) if config.seed is None else config.seed


def resolve_device(config: RunConfig) -> RunConfig:
    """The same settings with the device that `auto` stands for here, so that a run's folder says what was used.

    >>> resolve_device(RunConfig(device="auto")).device == ("cuda" if torch.cuda.is_available() else "cpu")
    True
    """
    if config.device != "auto":
        return config
    return replace(config, device="cuda" if torch.cuda.is_available() else "cpu")


def _device(config: RunConfig) -> torch.device:
    device = torch.device(resolve_device(config).device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and PyTorch finds no CUDA device here; --device auto takes what there is")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device}, and PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return device
