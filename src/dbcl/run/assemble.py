"""From settings to what plays a run: model, plan, server, session, shards and engine are built here and only here."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dbcl import data, models, seeds
from dbcl.data import Dataset
from dbcl.engines import Engine, ServerSession, StackedEngine
from dbcl.errors import ConfigError
from dbcl.plan import SketchPlan
from dbcl.protocol import Server
from dbcl.run.config import ENGINES, RunConfig
from dbcl.transcripts import Setting

CALIBRATION = 1000
"""On so many held-out inputs, without their labels, the server measures normalisation statistics."""


def new_seed(config: RunConfig) -> bytes:
    """The seed of a run's initial weights, cohorts and batches: secret and fresh, or that of an experiment.

    >>> new_seed(RunConfig(seed=0)) == new_seed(RunConfig(seed=0)), new_seed(RunConfig()) == new_seed(RunConfig())
    (True, False)
    """
    return seeds.fresh() if config.seed is None else seeds.derive(bytes(seeds.SEED_BYTES), "run", config.seed)


def build_model(config: RunConfig, dataset: Dataset, *, seed: int = 0) -> nn.Module:
    """The network of a configuration, sized for a dataset.

    >>> sum(parameter.numel() for parameter in build_model(RunConfig(), data.load("digits")).parameters())
    199210
    """
    return models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=seed)


def build_plan(config: RunConfig, model: nn.Module) -> SketchPlan:
    """What is sketched and veiled, and how.

    >>> build_plan(RunConfig(veil=0.0), models.build("mnist-mlp")).in_clear
    ('1.bias', '3.bias', '5.weight', '5.bias')
    """
    return SketchPlan.of(model, ratio=config.ratio, cover=config.cover, veil=config.veil, sketch=config.sketch)


def build_server(config: RunConfig, model: nn.Module, *, insecure_seed: int | None = None, **changes: Any) -> Server:
    """A server for a model under a configuration's plan and wire; `changes` are more arguments of `Server`.

    >>> build_server(RunConfig(), models.build("mnist-mlp")).round
    0
    """
    return Server(model, build_plan(config, model), wire=config.wire, insecure_seed=insecure_seed, **changes)


def divide(config: RunConfig, labels: NDArray[np.int64], *, seed: bytes) -> list[NDArray[np.int64]]:
    """Which examples each client holds.

    >>> len(divide(RunConfig(clients=4), np.zeros(8, dtype=np.int64), seed=bytes(32)))
    4
    """
    if config.partition == "dirichlet":
        return data.dirichlet(labels, config.clients, alpha=config.alpha, seed=seed)
    if config.partition == "shards":
        return data.shards(labels, config.clients, seed=seed)
    return data.iid(labels, config.clients, seed=seed)


def build_session(config: RunConfig, dataset: Dataset, *, seed: bytes) -> ServerSession:
    """Whoever holds the model of a run, at its first round."""
    model = build_model(config, dataset, seed=_weight_seed(config, seed)).to(_device(config))
    server = build_server(
        config,
        model,
        insecure_seed=config.seed,
        optimizer=config.optimizer(),
        door=config.door(),
        calibration=dataset.x_test[:CALIBRATION].to(_device(config)),
    )
    return ServerSession(server, ema_decay=config.ema_decay)


def build_engine(config: RunConfig, dataset: Dataset, session: ServerSession, *, seed: bytes) -> Engine:
    """The engine that plays the rounds of a configuration."""
    device = _device(config)
    # A client's own network has weights of its own, which the broadcast replaces.
    template = build_model(config, dataset, seed=_weight_seed(config, seed) + 1).to(device)
    engine = ENGINES[config.engine](
        session,
        template,
        dataset.x_train.to(device),
        dataset.y_train.to(device),
        divide(config, dataset.y_train.numpy(), seed=seed),
        config.training(),
        fraction=config.fraction,
        seed=seed,
        noise=config.noise(),
    )
    if isinstance(engine, StackedEngine):
        engine.precision = config.precision
    return engine


def public_setting(config: RunConfig, dataset: Dataset) -> Setting:
    """What every party of a run knows before its first round.

    >>> public_setting(RunConfig(clients=2, fraction=1.0), data.load("digits")).cohort
    2
    """
    return Setting(
        model=config.model,
        shape=dataset.shape,
        outputs=dataset.outputs,
        training=asdict(config.training()),
        clients=config.clients,
        cohort=config.cohort,
        optimizer=config.server_optimizer,
        momentum=config.server_momentum if config.server_optimizer == "momentum" else 0.0,
        server_lr=config.server_rate,
        veil=config.veil,
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
