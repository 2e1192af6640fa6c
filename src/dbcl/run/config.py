"""The settings of a run, each with its default, its meaning and its choices."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from dbcl.cover import WORDS
from dbcl.data import LOADERS
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine, cohort_size
from dbcl.engines.training import OptimizerFactory, Schedule
from dbcl.errors import ConfigError
from dbcl.models import NETWORKS
from dbcl.optim import ServerOptimizer, adam, fedavg, momentum
from dbcl.plan import COUNT
from dbcl.privacy import PrivacyPlan, UpdateNoise
from dbcl.protocol import Door
from dbcl.protocol.codec import WIRE_DTYPES
from dbcl.run.settings import about, described
from dbcl.sketch import SCHEMES, LaneSketch
from dbcl.trackers import PLACES, check_place

if TYPE_CHECKING:
    from dbcl.protocol.secagg import Terms

CROSS_ENTROPY = "cross-entropy"
IN_PYTHON = " (in Python)"
"""How the settings name what was given as an object: by its name and this."""

WHAT, WHO, CLIENT, HIDE, PROMISE, SERVER, LONG = (
    "What is trained",
    "Who takes part",
    "What a client does",
    "What is hidden",
    "What is promised",
    "What the server does",
    "How long, and how",
)


def _flower(*arguments: Any, **more: Any) -> Engine:
    """Optional dependency, imported lazily."""
    if find_spec("flwr") is None:
        raise ConfigError(
            "the engine flower needs Flower, which is not installed: pip install '.[flower]' in a clone of dbcl"
        )
    from dbcl.flower import SimulationEngine

    return SimulationEngine(*arguments, **more)


OPTIMIZERS: dict[str, Callable[..., ServerOptimizer]] = {"fedavg": fedavg, "momentum": momentum, "adam": adam}
ENGINES: dict[str, Callable[..., Engine]] = {"stacked": StackedEngine, "local": LocalEngine, "flower": _flower}


def read_cover(text: str) -> str | tuple[str, ...]:
    """Read what is covered, as a person writes it: hidden, large, all, or patterns with commas between them.

    >>> read_cover("hidden"), read_cover("conv*, !conv1*")
    ('hidden', ('conv*', '!conv1*'))
    """
    return text if text in WORDS else read_names(text)


def read_ratio(text: str) -> float | tuple[float, float]:
    """Read a ratio, as a person writes it: a number, or a range that every round draws from.

    >>> read_ratio("2"), read_ratio("2-4")
    (2.0, (2.0, 4.0))
    """
    try:
        numbers = [float(part) for part in text.split("-")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    raise ConfigError(f"ratio is a number or a range such as 2-4, got {text!r}")


def read_names(text: str) -> tuple[str, ...]:
    """Read names with commas between them.

    >>> read_names("0, server")
    ('0', 'server')
    """
    return tuple(part.strip() for part in text.split(","))


def cosine(round: int, *, rounds: int) -> float:
    """What a learning rate is multiplied by that falls along half a cosine: 1 in the first round, 0 after the last.

    >>> [round(cosine(number, rounds=4), 2) for number in range(5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    return (1 + math.cos(math.pi * min(round, rounds) / rounds)) / 2


def in_python(text: str) -> bool:
    """Whether a setting only names an object that was given in Python, as `dbcl.simulate` takes them.

    >>> in_python("Net (in Python)"), in_python("mypackage.nets:make")
    (True, False)
    """
    return text.endswith(IN_PYTHON)


def _own(text: str | None) -> bool:
    return text is not None and (":" in text or in_python(text))


LARGEST = torch.finfo(torch.float32).max
MAX_ROUNDS = 99_999_999
"""A checkpoint's name has room for so many."""


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def _check_numbers(name: str, value: Any) -> None:
    """Refuse what is no number, and what fits into no machine's."""
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not abs(number) <= LARGEST:
            raise ConfigError(f"{name} must be a finite number, at most {LARGEST:.3g}, got {number}")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise ConfigError(f"{name} must be between -2^63 and 2^63, got {number}")


def _unexplained(names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, "")


def _rate(optimizer: Callable[..., ServerOptimizer]) -> float:
    """The learning rate of a server optimiser that is given none."""
    default: float = signature(optimizer).parameters["lr"].default
    return default


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run. `dbcl train --help` explains each field.

    >>> RunConfig(rounds=0)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: rounds must be 1 or more, got 0
    """

    data: str = described(
        "digits",
        f"The dataset: {', '.join(LOADERS)}, or module:factory of your own, which gives (training examples, held-out "
        "examples), the first as a list where every client has its own",
        WHAT,
    )
    model: str = described("mnist-mlp", f"The network: {', '.join(NETWORKS)}, or module:factory of your own", WHAT)
    loss: str = described(
        CROSS_ENTROPY,
        f"What clients make small: {CROSS_ENTROPY}, or module:function of your own, which is given a batch's outputs "
        "and targets; for example torch.nn.functional:mse_loss",
        WHAT,
    )
    metric: str | None = described(
        None,
        "What says how good the model is: loss, or module:function, which is given all held-out outputs and targets",
        WHAT,
        unset=f"accuracy with {CROSS_ENTROPY}, else the loss",
    )
    better: str = described(
        "higher", "Which values of --metric are better", WHAT, choices={"higher": "", "lower": "as of an error"}
    )

    clients: int = described(100, "How many clients share the training examples", WHO)
    fraction: float | None = described(
        None,
        "The share of the clients that takes part in each round",
        WHO,
        unset="0.1, or 1 where --data gives every client its own examples",
    )
    partition: str = described(
        "iid",
        "How the examples are divided among the clients",
        WHO,
        choices={"iid": "", "dirichlet": "labels unevenly, by --alpha", "shards": "few labels each"},
    )
    alpha: float = described(0.5, "How even --partition dirichlet is: the smaller, the less", WHO)

    algorithm: str = described(
        "fedavg",
        "How a client trains",
        CLIENT,
        choices={
            "fedavg": "",
            "fedprox": "held near the weights it received, by --proximal",
            "sgd": "one batch a round: plain gradients",
        },
    )
    epochs: int = described(1, "Passes over a client's examples in a round", CLIENT)
    batch_size: int = described(10, "Examples in a local step", CLIENT)
    lr: float = described(0.05, "Local learning rate", CLIENT)
    lr_decay: float = described(1.0, "The learning rate is multiplied by this after every round", CLIENT)
    lr_schedule: str = described(
        "constant",
        "What the learning rate is multiplied by: constant, cosine (falls to 0 over --rounds), or module:function, "
        "which is given the round, from 0",
        CLIENT,
    )
    optimizer: str = described(
        "SGD",
        "Local optimiser: a class of torch.optim, such as AdamW, or module:factory, which is given parameters and lr",
        CLIENT,
    )
    momentum: float = described(0.0, "Local momentum of SGD", CLIENT)
    proximal: float = described(0.1, "Weight of FedProx's penalty on the distance to the received weights", CLIENT)
    update_clip: float | None = described(
        None, "Clients scale longer updates down to this norm", CLIENT, unset="they do not"
    )
    update_noise: float = described(0.0, "Clients add Gaussian noise of this size, relative to --update-clip", CLIENT)

    cover: str | tuple[str, ...] = described(
        "hidden",
        "What is sketched: hidden (all but the output layer), large (of those the layers with 1 % of the parameters or "
        "more), all, or patterns such as 'conv*,!conv1*'",
        HIDE,
        read=read_cover,
    )
    sketch: str = described(
        COUNT,
        "The kind of sketch",
        HIDE,
        choices=_unexplained(name for name in SCHEMES if name != LaneSketch.scheme) | {"identity-v1": "none"},
    )
    ratio: float | tuple[float, float] = described(
        2.0,
        "How many inputs share one output of a sketch, or a range that each round draws from: 2-4",
        HIDE,
        read=read_ratio,
    )
    lanes: int | None = described(
        None,
        "Among how many complementary sketches the clients of a round are spread; 1 is one for all, as in the paper",
        HIDE,
        unset="the ratio, rounded",
    )
    buckets: str = described(
        "shared",
        "Which clients share the buckets of a sketch",
        HIDE,
        choices={"shared": "all", "grouped": "as many as there are lanes: fewer rounds, no sums inside a lane"},
    )
    veil: float = described(0.2, "Secret noise on all that leaves the server, relative to the weights", HIDE)

    secure_aggregation: bool = described(
        False,
        "The server sees only sums: clients mask their updates so that the masks cancel in the sum over a lane, and "
        "take part in fixed batches",
        HIDE,
    )
    secure_bound: float = described(
        4.0, "With --secure-aggregation every update is clipped to this public length; with --epsilon by --clip", HIDE
    )
    min_cohort: int = described(8, "With --secure-aggregation no sum of fewer clients is ever made", HIDE)

    epsilon: float | None = described(
        None,
        "Promise differential privacy: the run's noise is correlated over rounds and large enough for this epsilon, in "
        "the place of --veil; needs --clip, and clients take turns",
        PROMISE,
        unset="nothing is promised",
    )
    delta: float = described(1e-5, "The delta beside --epsilon; below one in the number of clients", PROMISE)
    clip: float | None = described(
        None, "Every update is clipped to this length, all its tensors together", PROMISE, unset="not clipped"
    )
    unit: str = described(
        "client",
        "What --epsilon protects",
        PROMISE,
        choices={
            "client": "all that one client contributes",
            "example": "one example, also with few clients; needs --algorithm sgd and --fraction 1",
        },
    )
    separation: int = described(10, "With --unit example every example comes back after so many rounds", PROMISE)
    mechanism: str = described(
        "banded",
        "How the noise of --epsilon is correlated over rounds",
        PROMISE,
        choices={
            "banded": "by a banded square root",
            "blt": "by a buffer of one tensor, less to remember; needs --blt-decay and --blt-scale",
            "independent": "not at all, as in DP-FedAvg",
        },
    )
    blt_decay: float | None = described(
        None,
        "What --mechanism blt keeps of its buffer from round to round; dbcl privacy --mechanism blt plans it",
        PROMISE,
        unset="none",
    )
    blt_scale: float | None = described(
        None, "How much of its buffer --mechanism blt adds; planned with --blt-decay", PROMISE, unset="none"
    )
    weight_cap: int = described(
        0,
        "With --epsilon clients count by their examples, those with so many and more for one; 0: all count alike",
        PROMISE,
    )

    server_optimizer: str = described(
        "fedavg",
        "What the server does with the average update",
        SERVER,
        choices=_unexplained(OPTIMIZERS) | {"fedavg": "adds it"},
    )
    server_lr: float | None = described(
        None, "The server's learning rate", SERVER, unset=f"{_rate(fedavg):g}, with adam {_rate(adam):g}"
    )
    server_momentum: float = described(0.5, "Momentum of --server-optimizer momentum", SERVER)
    ema_decay: float = described(
        0.0, "Evaluate and keep a running mean of W that decays so; 0.95 is a mean over about 20 rounds", SERVER
    )
    min_updates: int = described(1, "A round with fewer accepted updates is an error", SERVER)
    max_examples: int = described(10_000_000, "An update that counts for more examples is refused", SERVER)
    max_influence: float | None = described(
        1.5,
        "No client counts for more examples, or pulls on the average harder, than so many times the median client; "
        "0 takes every update as it is",
        SERVER,
    )
    max_times_median: float | None = described(
        10.0,
        "An update longer than so many times its lane's median is refused: its client has diverged; 0 takes all",
        SERVER,
    )
    norm_bound: float | None = described(
        None, "The server scales longer updates down to this norm", SERVER, unset="it does not"
    )
    wire: str = described("float32", "The numbers of a message", SERVER, choices=_unexplained(WIRE_DTYPES))

    rounds: int = described(200, "At most so many rounds", LONG)
    target: float | None = described(
        None, "Stop when the metric reaches this, for example an accuracy of 0.97", LONG, unset="play all rounds"
    )
    patience: int | None = described(
        None,
        "Stop when the metric has not improved for so many rounds",
        LONG,
        unset="play all rounds",
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
        choices={"stacked": "all at once", "local": "one after another", "flower": "in Flower's simulation"},
    )
    device: str = described(
        "cpu", "Where it is computed: cpu, cuda, one of several as cuda:1, or auto (cuda where there is one)", LONG
    )
    precision: str = described(
        "float32",
        "Arithmetic of matrix products on a GPU",
        LONG,
        choices={"float32": "", "tf32": "faster, less exact", "bf16": "more so"},
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
        f"Show the metrics of every round in {', '.join(PLACES)}; for example tensorboard:logs",
        LONG,
        unset="nowhere",
        read=read_names,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), about(field).choices
            if allowed and value not in allowed:
                raise ConfigError(f"{field.name} must be one of {', '.join(allowed)}, got {value!r}")
            _check_numbers(field.name, value)
        for name in ("clients", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.rounds > MAX_ROUNDS:
            raise ConfigError(f"rounds must be at most {MAX_ROUNDS}, got {self.rounds}")
        if self.veil < 0:
            raise ConfigError(f"veil must be 0 or more, got {self.veil}")
        low, high = self.ratio if isinstance(self.ratio, tuple) else (self.ratio, self.ratio)
        if self.sketch != "identity-v1" and not 1 < low <= high:
            raise ConfigError(f"ratio must be above 1, and a range must rise, got {low:g} to {high:g}")
        if self.lanes is not None and self.lanes < 1:
            raise ConfigError(f"lanes must be 1 or more, got {self.lanes}")
        if not self.alpha > 0:
            raise ConfigError(f"alpha must be above 0, got {self.alpha}")
        if self.data not in LOADERS and not _own(self.data):
            raise ConfigError(f"data must be one of {', '.join(LOADERS)} or module:factory, got {self.data!r}")
        if self.loss != CROSS_ENTROPY and not _own(self.loss):
            raise ConfigError(f"loss must be {CROSS_ENTROPY} or module:function, got {self.loss!r}")
        if self.metric not in (None, "loss") and not _own(self.metric):
            raise ConfigError(f"metric must be loss or module:function, got {self.metric!r}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        by_accuracy = self.metric is None and self.loss == CROSS_ENTROPY
        if self.target is not None and not (0 < self.target <= 1 if by_accuracy else math.isfinite(self.target)):
            kind = "an accuracy between 0 and 1" if by_accuracy else "a number"
            raise ConfigError(f"target is {kind}, got {self.target}")
        if self.server_lr is not None and not (math.isfinite(self.server_lr) and self.server_lr > 0):
            raise ConfigError(f"server_lr must be above 0, got {self.server_lr}")
        if not 0 <= self.server_momentum < 1:
            raise ConfigError(f"server_momentum must be between 0 and 1, got {self.server_momentum}")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"patience must be 1 round or more, got {self.patience}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or, of several, cuda:1; got {self.device!r}")
        for place in self.track:
            check_place(place)
        if self.update_noise and self.update_clip is None:
            raise ConfigError("update_noise is relative to update_clip: set that, too")
        if (self.epsilon is None) != (self.clip is None):
            raise ConfigError(
                "epsilon and clip go together: noise is measured by how far one client can move the model"
            )
        if self.epsilon is not None:
            self._check_promise()
        if self.secure_aggregation:
            self._check_secure()
        self.training()
        self.door()
        self.noise()

    def _check_promise(self) -> None:
        """Refuse what no guarantee goes with."""
        if self.update_clip is not None:
            raise ConfigError("with --epsilon clients clip by --clip, not by --update-clip")
        given = [value is not None for value in (self.blt_decay, self.blt_scale)]
        if any(given) if self.mechanism != "blt" else not all(given):
            raise ConfigError(
                "--mechanism blt goes with --blt-decay and --blt-scale: dbcl privacy --mechanism blt, with the other "
                "options of this run, plans them"
            )
        if self.unit == "client":
            return
        steps = self.algorithm == "sgd" and self.share == 1 and self.separation >= 1
        if not steps or _own(self.lr_schedule):
            raise ConfigError(
                "with --unit example clients take one step a round, all of them in every round (--algorithm sgd, "
                "--fraction 1; --preset private-example has both), by a rate that only falls (no --lr-schedule of your "
                "own), and --separation is 1 or more"
            )

    def _check_secure(self) -> None:
        """Refuse what cannot be added securely."""
        if self.engine == "flower":
            raise ConfigError("--secure-aggregation is not built for --engine flower; take --engine local or stacked")
        if self.buckets == "grouped":
            raise ConfigError(
                "--secure-aggregation adds up the clients of a lane: with --buckets grouped each is alone"
            )
        if self.epsilon is not None and self.unit == "example":
            raise ConfigError("--secure-aggregation does not go with --unit example: an update has no public length")
        if self.epsilon is not None and self.clients % self.cohort:
            raise ConfigError(
                f"with --secure-aggregation and --epsilon clients come in fixed batches: {self.clients} clients must "
                f"be a multiple of the {self.cohort} in a round"
            )

    def terms(self, *, lanes: int, most: int, length: int) -> "Terms | None":
        """What clients insist on under secure aggregation; None without it.

        Each of the `lanes` must have enough clients. `most` is the number of examples above which a client weighs no
        more, where `weight_cap` does not say, and `length` the number of values in W: rounding stretches updates, and a
        guarantee counts that.

        >>> RunConfig(secure_aggregation=True, fraction=0.2).terms(lanes=2, most=600, length=1000).bound
        4.0
        """
        if not self.secure_aggregation:
            return None
        if self.cohort < lanes * self.min_cohort:
            share = math.ceil(100 * lanes * self.min_cohort / self.clients) / 100
            remedy = f"--fraction {share:g}" if share <= 1 else f"--clients {lanes * self.min_cohort} --fraction 1"
            raise ConfigError(
                f"--secure-aggregation adds up {self.min_cohort} clients or more (--min-cohort) in each of {lanes} "
                f"lanes, and a round has {self.cohort} of {self.clients}: the remedy is {remedy}, or --lanes 1"
            )
        from dbcl.protocol.secagg import Terms
        from dbcl.protocol.secagg.ring import Ring

        if self.clip is None:
            return Terms(bound=self.secure_bound, most=self.weight_cap or most, min_cohort=self.min_cohort)
        stretch = Ring(bound=1.0, clients=2).longest(length)
        return Terms(bound=self.clip / stretch, most=self.weight_cap or 1, min_cohort=self.min_cohort)

    @property
    def cohort(self) -> int:
        """How many clients take part in a round.

        >>> RunConfig(clients=25).cohort, RunConfig(clients=25, fraction=1.0).cohort
        (3, 25)
        """
        return cohort_size(self.clients, self.share)

    @property
    def share(self) -> float:
        """The share of the clients in a round: `fraction`, or a tenth."""
        return 0.1 if self.fraction is None else self.fraction

    @property
    def insecure(self) -> bool:
        """Whether everything follows from `seed`, the server's secrets too: for experiments only.

        >>> RunConfig().insecure, RunConfig(seed=0).insecure
        (False, True)
        """
        return self.seed is not None

    def training(self, optimizer: OptimizerFactory | None = None, schedule: Schedule | None = None) -> LocalTraining:
        """What a client does with its examples; `optimizer` and `schedule` are those that a task has imported."""
        return LocalTraining(
            lr=self.lr,
            lr_decay=self.lr_decay,
            batch_size=self.batch_size,
            epochs=self.epochs,
            steps=1 if self.algorithm == "sgd" else None,
            example_clip=self.clip if self.unit == "example" else None,
            separation=self.separation if self.unit == "example" else 1,
            momentum=self.momentum,
            proximal=self.proximal if self.algorithm == "fedprox" else 0.0,
            optimizer=optimizer or self._optimizer(),
            schedule=schedule or self._schedule(),
        )

    def _optimizer(self) -> OptimizerFactory:
        if _own(self.optimizer):
            return torch.optim.SGD  # settings import nothing: what it really is, the task knows
        kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if _is_optimizer(kind)}
        if self.optimizer.lower() not in kinds:
            known = ", ".join(sorted(kind.__name__ for kind in kinds.values()))
            raise ConfigError(f"optimizer must be one of {known}, or module:factory; got {self.optimizer!r}")
        found: OptimizerFactory = kinds[self.optimizer.lower()]
        return found

    def _schedule(self) -> Schedule | None:
        if self.lr_schedule == "constant" or _own(self.lr_schedule):
            return None
        if self.lr_schedule == "cosine":
            return partial(cosine, rounds=self.rounds)
        raise ConfigError(f"lr_schedule must be constant, cosine or module:function, got {self.lr_schedule!r}")

    def privacy(self, examples: int = 0) -> PrivacyPlan | None:
        """The guarantee that the settings ask for; None where they ask for none.

        `examples` is how many training examples there are, which counts where one of them is the unit. Adam is not
        linear, so with it the noise goes into the average update and not on top of W.

        >>> plan = RunConfig(epsilon=8, clip=0.2, clients=1000, rounds=400).privacy()
        >>> plan.separation, plan.participations
        (10, 40)
        """
        if self.epsilon is None or self.clip is None:
            return None
        more: dict[str, Any] = {}
        if self.unit == "example":
            batch = max(1, examples // self.separation)
            more |= {"unit": "example", "examples": examples, "batch": batch, "separation": self.separation}
        if self.mechanism == "blt":
            more |= {"decay": (self.blt_decay,), "scale": (self.blt_scale,)}
        if self.server_optimizer == "adam":
            more |= {"before": True}
        else:
            more |= {
                "momentum": self.server_momentum if self.server_optimizer == "momentum" else 0.0,
                "lr": self.server_rate,
            }
        return PrivacyPlan(
            **more,
            epsilon=self.epsilon,
            delta=self.delta,
            # What one gradient moves the sum by: clients send it times their learning rate.
            clip=self.clip if self.unit == "client" else self.clip * self.lr,
            rounds=self.rounds,
            clients=self.clients,
            cohort=self.cohort,
            most=float(self.weight_cap),
            kind=self.mechanism,
        )

    def noise(self) -> UpdateNoise | None:
        """What a client does to its update before it sends it."""
        if self.clip is not None:
            return UpdateNoise(self.clip) if self.unit == "client" else None
        if self.update_clip is None:
            return None
        return UpdateNoise(self.update_clip, self.update_noise, insecure_seed=self.seed)

    @property
    def server_rate(self) -> float:
        """The server's learning rate: `server_lr`, or else what its optimiser has by default.

        >>> RunConfig().server_rate, RunConfig(server_optimizer="adam").server_rate
        (1.0, 0.01)
        """
        return self.server_lr or _rate(OPTIMIZERS[self.server_optimizer])

    def server_step(self) -> ServerOptimizer:
        """What the server does with the average update."""
        more = {"beta": self.server_momentum} if self.server_optimizer == "momentum" else {}
        return OPTIMIZERS[self.server_optimizer](lr=self.server_rate, **more)

    def door(self) -> Door:
        """What an update must be to get in."""
        return Door(
            min_updates=self.min_updates,
            norm_bound=self.norm_bound,
            max_examples=self.max_examples,
            max_influence=self.max_influence or None,
            max_times_median=self.max_times_median or None,
        )
