"""Settings of a run as plain data. `dbcl.simulation.build` makes the corresponding objects.

Longer than 350 lines: the fields hold the help of every option of the command line.
"""

import dataclasses
import math
import re
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from dbcl.config import PrivacyConfig, SecAggConfig, SketchConfig
from dbcl.data import LOADERS
from dbcl.engines import cohort_size
from dbcl.errors import ConfigError, GuaranteeError
from dbcl.model.networks import NETWORKS, SCATTER
from dbcl.protocol.codec import WIRE_DTYPES
from dbcl.protocol.keeper import MOMENTUM
from dbcl.protocol.release import EMA_DECAY
from dbcl.protocol.running_mean import RunningMean
from dbcl.settings import (
    CLIENT,
    HIDE,
    LONG,
    SERVER,
    WHAT,
    WHO,
    check_settings,
    described,
    described_fields,
    option_name,
    read_names,
)
from dbcl.trackers import check_place

CROSS_ENTROPY = "cross-entropy"
SCATTERING = "scattering"
IN_PYTHON = " (in Python)"
"""Suffix of a setting whose value is a Python object passed to `dbcl.simulate`."""
SERVER_OPTIMIZERS = {"fedavg": "adds it", "momentum": "", "adam": ""}
MAX_ROUNDS = 99_999_999
"""Largest round number that fits into a checkpoint's file name."""


def in_python(text: str) -> bool:
    """Return whether a setting names a Python object that was passed to `dbcl.simulate`.

    >>> in_python("Net (in Python)"), in_python("mypackage.nets:make")
    (True, False)
    """
    return text.endswith(IN_PYTHON)


def names_code(text: str | None) -> bool:
    """Return whether a setting names user code, either as `module:name` or as a Python object.

    >>> names_code("mypackage.nets:make"), names_code("mnist-mlp")
    (True, False)
    """
    return text is not None and (":" in text or in_python(text))


@dataclass(frozen=True)
class RunConfig:
    """Settings of a training run. `dbcl train --help` documents each setting.

    The settings of one concern are grouped in one object: `sketch`, `secagg` and `privacy`. The
    last two are None if the feature is disabled. `from_options` accepts all settings by the option
    names of the command line and TOML files.

    >>> RunConfig.from_options(rounds=7, veil=0.1).sketch.veil
    0.1
    >>> RunConfig(rounds=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: rounds must be 1 or more, got 0
    """

    data: str = described(
        "digits",
        f"Dataset: {', '.join(LOADERS)}, or module:factory of your own, which returns (training examples, held-out "
        "examples), the first as a list where every client has its own",
        WHAT,
    )
    model: str = described("mnist-mlp", f"Network: {', '.join(NETWORKS)}, or module:factory of your own", WHAT)
    features: str | None = described(
        None,
        "Fixed public features, computed once, on which the network is trained: scattering (of images), or "
        "module:factory of a frozen network or a function of your own",
        WHAT,
        unset=f"none, and scattering for {' and '.join(SCATTER)}",
    )
    loss: str = described(
        CROSS_ENTROPY,
        f"Training loss: {CROSS_ENTROPY}, or module:function of your own, which takes a batch's outputs and targets; "
        "for example torch.nn.functional:mse_loss",
        WHAT,
    )
    metric: str | None = described(
        None,
        "Metric on held-out examples: loss, or module:function, which takes all outputs and targets",
        WHAT,
        unset=f"accuracy with {CROSS_ENTROPY}, else the loss",
    )
    metric_mode: str = described(
        "higher", "Better values of --metric", WHAT, choices={"higher": "", "lower": "as of an error"}
    )

    clients: int = described(100, "Number of clients that share the training examples", WHO)
    fraction: float | None = described(
        None,
        "Share of the clients that takes part in each round",
        WHO,
        unset="0.1, or 1 where --data gives every client its own examples",
    )
    partition: str = described(
        "iid",
        "Division of the examples among the clients",
        WHO,
        choices={"iid": "", "dirichlet": "labels unevenly, by --alpha", "shards": "few labels each"},
    )
    alpha: float = described(0.5, "Evenness of --partition dirichlet: the smaller, the less even", WHO)

    algorithm: str = described(
        "fedavg",
        "Training of a client",
        CLIENT,
        choices={
            "fedavg": "",
            "fedprox": "with a penalty on the distance to the received weights, --proximal",
            "sgd": "one batch a round: plain gradients",
        },
    )
    epochs: int = described(1, "Passes over a client's examples in a round", CLIENT)
    batch_size: int = described(10, "Examples in a local step", CLIENT)
    lr: float = described(
        0.05, "Local learning rate; 0 with --privacy-unit example: one that suits the guarantee", CLIENT
    )
    lr_decay: float = described(1.0, "Factor of the learning rate after every round", CLIENT)
    lr_schedule: str = described(
        "constant",
        "Further factor of the learning rate: constant, cosine (falls to 0 over --rounds), or module:function, which "
        "takes the round, from 0",
        CLIENT,
    )
    optimizer: str = described(
        "SGD",
        "Local optimiser: a class of torch.optim, such as AdamW, or module:factory, which takes parameters and lr",
        CLIENT,
    )
    momentum: float = described(0.0, "Local momentum of SGD", CLIENT)
    proximal: float = described(0.1, "Weight of FedProx's penalty", CLIENT)
    update_clip: float | None = described(None, "Norm to which clients clip their updates", CLIENT, unset="not clipped")
    update_noise: float = described(
        0.0, "Gaussian noise that clients add to their updates, relative to --update-clip; no guarantee", CLIENT
    )

    sketch: SketchConfig = dataclasses.field(default_factory=SketchConfig)
    secure_aggregation: bool = described(
        False,
        "The server sees only sums: clients mask their updates so that the masks cancel in the sum over a lane, and "
        "take part in fixed groups",
        HIDE,
    )
    secagg: SecAggConfig = dataclasses.field(default_factory=SecAggConfig)
    privacy: PrivacyConfig | None = None

    server_optimizer: str = described(
        "momentum", "Step of the server on the average update", SERVER, choices=SERVER_OPTIMIZERS
    )
    server_lr: float | None = described(None, "Server's learning rate", SERVER, unset="1, with adam 0.01")
    server_momentum: float = described(MOMENTUM, "Momentum of --server-optimizer momentum", SERVER)
    ema_decay: float = described(
        EMA_DECAY, "Decay of the running mean of W that is evaluated and kept; 0.95 is a mean over 20 rounds", SERVER
    )
    min_updates: int = described(1, "A round with fewer accepted updates is an error", SERVER)
    max_examples: int = described(10_000_000, "Largest number of examples that an update may count for", SERVER)
    max_influence: float | None = described(
        1.5,
        "Bound on a client's weight and influence, relative to the median client; 0 removes it",
        SERVER,
    )
    outlier_factor: float | None = described(
        10.0,
        "An update whose norm is above this multiple of its lane's median is rejected: the client has diverged; 0 "
        "accepts all",
        SERVER,
    )
    norm_bound: float | None = described(
        None, "Norm to which the server scales longer updates down", SERVER, unset="not scaled"
    )
    wire: str = described("float32", "Dtype of the values in a message", SERVER, choices=dict.fromkeys(WIRE_DTYPES, ""))

    rounds: int = described(
        200, "Largest number of rounds; 0 with --privacy-unit example: as many as suit the guarantee", LONG
    )
    target: float | None = described(
        None, "Stop when the metric reaches this, for example an accuracy of 0.97", LONG, unset="play all rounds"
    )
    patience: int | None = described(
        None, "Stop when the metric has not improved for this many rounds", LONG, unset="play all rounds"
    )
    seed: int | None = described(
        None,
        "Fix everything, the server's secrets too, so that an experiment can be repeated; insecure",
        LONG,
        unset="fresh secrets and fresh randomness",
    )
    engine: str = described(
        "stacked",
        "How the clients of a round are computed",
        LONG,
        choices={"stacked": "all at once", "local": "one after another"},
    )
    device: str = described("cpu", "Device: cpu, cuda, one of several as cuda:1, or auto (cuda if there is one)", LONG)
    precision: str = described(
        "float32",
        "Arithmetic of matrix products on a GPU",
        LONG,
        choices={"float32": "", "tf32": "faster, less exact", "bf16": "faster still, still less exact"},
    )
    transcripts: tuple[str, ...] = described(
        (),
        "Record for an audit what these parties saw: numbers of clients, server, server-sum; for example 0,server",
        LONG,
        unset="nothing is recorded",
        read=read_names,
    )
    track: tuple[str, ...] = described(
        (),
        "Write the metrics of every round for TensorBoard, into the run's folder or another: tensorboard:logs",
        LONG,
        unset="nowhere",
        read=read_names,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        may_plan = self.privacy is not None and self.privacy.unit == "example"  # 0 is filled in by `planned`
        for name in ("clients", "rounds"):
            if getattr(self, name) < (0 if name == "rounds" and may_plan else 1):
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.rounds > MAX_ROUNDS:
            raise ConfigError(f"rounds must be at most {MAX_ROUNDS}, got {self.rounds}")
        by_accuracy = self.metric is None and self.loss == CROSS_ENTROPY
        reachable = self.target is None or (0 < self.target <= 1 if by_accuracy else math.isfinite(self.target))
        kind = "an accuracy between 0 and 1" if by_accuracy else "a number"
        checks = {
            f"alpha must be above 0, got {self.alpha}": self.alpha > 0,
            f"data must be one of {', '.join(LOADERS)} or module:factory, got {self.data!r}": self.data in LOADERS
            or names_code(self.data),
            f"features must be {SCATTERING} or module:factory, got {self.features!r}": self.features
            in (None, SCATTERING)
            or names_code(self.features),
            f"loss must be {CROSS_ENTROPY} or module:function, got {self.loss!r}": self.loss == CROSS_ENTROPY
            or names_code(self.loss),
            f"metric must be loss or module:function, got {self.metric!r}": self.metric in (None, "loss")
            or names_code(self.metric),
            f"fraction must be above 0 and at most 1, got {self.fraction}": self.fraction is None
            or 0 < self.fraction <= 1,
            f"target is {kind}, got {self.target}": reachable,
            f"server_lr must be above 0, got {self.server_lr}": self.server_lr is None or 0 < self.server_lr < math.inf,
            f"server_momentum must be between 0 and 1, got {self.server_momentum}": 0 <= self.server_momentum < 1,
            f"patience must be 1 round or more, got {self.patience}": self.patience is None or self.patience >= 1,
            f"device must be auto, cpu, cuda or, of several, cuda:1; got {self.device!r}": re.fullmatch(
                r"auto|cpu|cuda(:\d{1,3})?", self.device
            )
            is not None,
            "update_noise is relative to update_clip: set that, too": not self.update_noise
            or self.update_clip is not None,
        }
        for problem, fine in checks.items():
            if not fine:
                raise ConfigError(problem)
        for place in self.track:
            check_place(place)
        RunningMean(self.ema_decay)
        if self.privacy is not None:
            self._check_privacy(self.privacy)

    def _check_privacy(self, privacy: PrivacyConfig) -> None:
        if self.update_clip is not None:
            raise GuaranteeError("with `epsilon` clients clip by `clip`, not by `update_clip`")
        if privacy.noise_by == "clients":
            if not self.secure_aggregation:
                raise GuaranteeError(
                    "`noise_by=clients` needs `secure_aggregation`: one share of noise hides too little"
                )
            own, default = self.sketch, SketchConfig()
            settings = [name for name in ("ratio", "coverage", "lanes") if getattr(own, name) != getattr(default, name)]
            if own.sketch != "identity-v1" or own.veil or settings:
                raise GuaranteeError(
                    "with `noise_by=clients` the weights are sent without sketch and veil, since the guarantee covers "
                    f"them: `sketch=identity-v1` and `veil=0`{''.join(f', no `{name}`' for name in settings)}"
                )
        if privacy.unit == "example":
            if self.algorithm != "sgd" or self.share != 1 or names_code(self.lr_schedule):
                raise GuaranteeError(
                    "with `privacy_unit=example` clients take one step a round, all of them in every round "
                    "(`algorithm=sgd`, `fraction=1`; the preset private-example has both), by a rate that only falls "
                    "(no `lr_schedule` of your own)"
                )
            if self.secure_aggregation and privacy.noise_by == "server":
                raise GuaranteeError(
                    "with `secure_aggregation` and `privacy_unit=example` the noise must come from the clients, "
                    "`noise_by=clients`: an update has no public norm that the server could bound"
                )
        elif self.secure_aggregation and privacy.noise_by == "server" and self.clients % self.cohort:
            raise GuaranteeError(
                f"with `secure_aggregation` and `epsilon` clients come in fixed groups: {self.clients} clients must be "
                f"a multiple of the {self.cohort} in a round"
            )

    @property
    def cohort(self) -> int:
        """Number of clients in a round.

        >>> RunConfig(clients=25).cohort, RunConfig(clients=25, fraction=1.0).cohort
        (3, 25)
        """
        return cohort_size(self.clients, self.share)

    @property
    def share(self) -> float:
        """Share of the clients in a round: `fraction`, or 0.1 by default."""
        return 0.1 if self.fraction is None else self.fraction

    @property
    def feature_map(self) -> str | None:
        """Feature extractor of the network: `features`, or the features implied by the network's
        name.

        >>> RunConfig(model="scatter-linear").feature_map, RunConfig().feature_map
        ('scattering', None)
        """
        return SCATTERING if self.features is None and self.model in SCATTER else self.features

    @property
    def insecure(self) -> bool:
        """Return whether all randomness is derived from `seed`, including the server's secrets. For
        experiments only.
        """
        return self.seed is not None

    def options(self) -> dict[str, Any]:
        """Return all settings by their option names.

        >>> RunConfig().options()["veil"]
        0.2
        """
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            own = getattr(self, field.name)
            nested = NESTED.get(field.name)
            if nested is None:
                values[field.name] = own
            else:
                values |= {option_name(each): None if own is None else getattr(own, each.name) for each in nested}
        return values

    @classmethod
    def from_options(cls, **options: Any) -> "RunConfig":
        """Make a configuration from settings by their option names, such as `veil`, `epsilon` and
        `rounds`.
        """
        return cls().with_options(**options)

    def with_options(self, **options: Any) -> "RunConfig":
        """Return a configuration with changed settings, given by their option names.

        >>> RunConfig().with_options(epsilon=8, clip=0.2).privacy.epsilon
        8
        """
        changes = {name: value for name, value in options.items() if name not in HOMES}
        for name, fields in NESTED.items():
            given = {each.name: options[option_name(each)] for each in fields if option_name(each) in options}
            own = getattr(self, name)
            if given:
                changes[name] = _privacy(own, given) if name == "privacy" else replace(own, **given)
        return replace(self, **changes)


def _privacy(own: PrivacyConfig | None, given: dict[str, Any]) -> PrivacyConfig | None:
    """Update or make a privacy configuration. Epsilon None removes the configuration."""
    if own is not None and given.get("epsilon", 0) is not None:
        return replace(own, **given)
    given = {name: value for name, value in given.items() if value is not None}
    if ("epsilon" in given) != ("clip" in given):
        raise ConfigError("epsilon and clip go together: noise is measured by how far one client can move the model")
    if given and "epsilon" not in given:
        names = ", ".join(option_name(field) for field in NESTED["privacy"] if field.name in given)
        raise ConfigError(f"{names}: without `epsilon` there is no guarantee that this could change")
    return PrivacyConfig(**given) if given else None


KINDS: dict[str, type] = {"sketch": SketchConfig, "secagg": SecAggConfig, "privacy": PrivacyConfig}
NESTED = {name: list(described_fields(kind)) for name, kind in KINDS.items()}
"""Fields of each nested configuration that are settings, by its name in `RunConfig`."""
HOMES = {option_name(each): name for name, fields in NESTED.items() for each in fields} | dict.fromkeys(NESTED, "")
"""Nested configuration that contains each setting, by option name; empty for `RunConfig` itself."""
OPTIONS: dict[str, dataclasses.Field[Any]] = {}
"""All settings by option name, in the order of `--help`."""
HINTS: dict[str, Any] = {}
"""Type of each setting, by option name."""
for _field in dataclasses.fields(RunConfig):
    _kind = KINDS.get(_field.name, RunConfig)
    for _each in described_fields(_kind) if _kind is not RunConfig else [_field]:
        OPTIONS[option_name(_each)], HINTS[option_name(_each)] = _each, get_type_hints(_kind)[_each.name]
