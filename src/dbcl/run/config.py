"""The settings of a run, and the presets that ship with dbcl."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dbcl.data import LOADERS
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine, UpdateNoise
from dbcl.errors import ConfigError
from dbcl.optim import ServerOptimizer, adam, fedavg, momentum
from dbcl.protocol import Door
from dbcl.protocol.codec import WIRE_DTYPES
from dbcl.sketch import SCHEMES

PRESETS = ("blind", "paper", "plain")
PARTITIONS = ("iid", "dirichlet", "shards")
ALGORITHMS = ("fedavg", "fedprox", "sgd")
OPTIMIZERS = ("fedavg", "momentum", "adam")
PRECISIONS = ("float32", "tf32", "bf16")


def _flower(*arguments: Any, **more: Any) -> Engine:
    """Flower is an extra, and slow to import: only who asks for it needs it."""
    if find_spec("flwr") is None:
        raise ConfigError("the engine flower needs Flower, which is not installed: pip install 'dbcl[flower]'")
    from dbcl.flower import SimulationEngine

    return SimulationEngine(*arguments, **more)


ENGINES: dict[str, Callable[..., Engine]] = {"stacked": StackedEngine, "local": LocalEngine, "flower": _flower}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run.

    >>> RunConfig(rounds=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: rounds must be 1 or more, got 0
    """

    data: str = "digits"
    model: str = "mnist-mlp"
    # who takes part
    clients: int = 100
    fraction: float = 0.1
    partition: str = "iid"
    alpha: float = 0.5
    # what a client does
    algorithm: str = "fedavg"
    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.05
    lr_decay: float = 1.0
    momentum: float = 0.0
    proximal: float = 0.1
    update_clip: float | None = None
    update_noise: float = 0.0
    """Noise that clients add to their updates, relative to `update_clip`, the length that they shorten them to."""
    # what hides
    cover: str | tuple[str, ...] = "hidden"
    sketch: str = "count-v1"
    ratio: float | tuple[float, float] = 2.0
    veil: float = 0.2
    # what the server does
    server_optimizer: str = "fedavg"
    server_lr: float | None = None
    server_momentum: float = 0.5
    ema_decay: float = 0.0
    min_updates: int = 1
    norm_bound: float | None = None
    wire: str = "float32"
    # how long, and from which seed
    rounds: int = 200
    target: float | None = None
    seed: int = 0
    fixed_secrets: bool = False
    """True: the server's secrets follow from the seed, so that the run can be repeated. Only for experiments."""
    engine: str = "stacked"
    device: str = "cpu"
    precision: str = "float32"
    transcripts: tuple[str, ...] = ()
    """Whose view is recorded for an audit: numbers of clients, "server", "server-sum"."""

    def __post_init__(self) -> None:
        choices = {
            "data": tuple(LOADERS),
            "partition": PARTITIONS,
            "algorithm": ALGORITHMS,
            "server_optimizer": OPTIMIZERS,
            "sketch": tuple(SCHEMES),
            "wire": tuple(WIRE_DTYPES),
            "engine": tuple(ENGINES),
            "precision": PRECISIONS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("clients", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"target is an accuracy between 0 and 1, got {self.target}")
        if self.server_lr is not None and not (math.isfinite(self.server_lr) and self.server_lr > 0):
            raise ConfigError(f"server_lr must be above 0, got {self.server_lr}")
        if not 0 <= self.server_momentum < 1:
            raise ConfigError(f"server_momentum must be between 0 and 1, got {self.server_momentum}")
        if self.update_noise and self.update_clip is None:
            raise ConfigError("update_noise is relative to update_clip: set that, too")
        self.training()
        self.door()
        self.noise()

    @property
    def cohort(self) -> int:
        """How many clients take part in a round."""
        return max(1, int(self.fraction * self.clients + 0.5))

    def training(self) -> LocalTraining:
        """What a client does with its examples."""
        return LocalTraining(
            lr=self.lr,
            lr_decay=self.lr_decay,
            batch_size=self.batch_size,
            epochs=self.epochs,
            steps=1 if self.algorithm == "sgd" else None,
            momentum=self.momentum,
            proximal=self.proximal if self.algorithm == "fedprox" else 0.0,
        )

    def noise(self) -> UpdateNoise | None:
        """What a client does to its update before it sends it."""
        return None if self.update_clip is None else UpdateNoise(self.update_clip, self.update_noise)

    def optimizer(self) -> ServerOptimizer:
        """What the server does with the average update."""
        if self.server_optimizer == "adam":
            return adam(self.server_lr or 0.01)
        if self.server_optimizer == "momentum":
            return momentum(self.server_momentum, self.server_lr or 1.0)
        return fedavg(self.server_lr or 1.0)

    def door(self) -> Door:
        """What an update must be to get in."""
        return Door(min_updates=self.min_updates, norm_bound=self.norm_bound)

    def toml(self) -> str:
        """This configuration as a TOML file.

        >>> from_toml(RunConfig(ratio=(2.0, 4.0)).toml()).ratio
        (2.0, 4.0)
        """
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def from_toml(text: str, **overrides: Any) -> RunConfig:
    """Read a configuration; `overrides` win over the file, and what neither names has its default.

    >>> from_toml('lr = 0.1', rounds=7).rounds
    7
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not a TOML file: {error}") from error
    values.update(overrides)
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(unknown)}; known are {', '.join(fields)}")
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
        default = fields[name].default
        if isinstance(default, bool | int | float | str) and name not in ("cover", "ratio"):
            number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            if not number and type(value) is not type(default):
                raise ConfigError(f"{name} must be a {type(default).__name__}, got {value!r}")
    return RunConfig(**values)


def preset(name: str, **overrides: Any) -> RunConfig:
    """A preset by name, or a TOML file of your own by its path.

    >>> preset("paper").veil, preset("plain").sketch
    (0.0, 'identity-v1')
    """
    if name in PRESETS:
        text = (resources.files("dbcl") / "presets" / f"{name}.toml").read_text()
    else:
        try:
            text = Path(name).read_text()
        except OSError:
            raise ConfigError(f"no preset {name!r}: neither one of {', '.join(PRESETS)} nor a file") from None
    return from_toml(text, **overrides)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # what JSON escapes, TOML reads
    return repr(value)
