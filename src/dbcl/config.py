"""Frozen configuration objects, one per concern, which every layer receives unchanged.

`SketchConfig` defines the view of the model that a client receives, `PrivacyConfig` the target
guarantee, and `SecAggConfig` the secure aggregation. A plan (`dbcl.SketchPlan`,
`dbcl.privacy.PrivacyPlan`) applies a configuration to one model and one run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from torch import nn

from dbcl.errors import ConfigError
from dbcl.settings import HIDE, PROMISE, check_settings, described, described_fields, option_name, read_names
from dbcl.sketch import SCHEMES, Identity, LaneSketch

Ratio = float | tuple[float, float]
Coverage = str | Sequence[str]
Layers = Mapping[type[nn.Module] | str, int | tuple[int, ...]]
"""Custom layers: a class or a parameter name pattern, and the input axis (or axes) of its weight.
"""

COVERAGE_WORDS = ("auto", "hidden", "large", "all")
"""Keywords of `SketchConfig.coverage`; any other text is a parameter name pattern."""
CORRELATIONS = {"banded": "by a banded square root", "independent": "not at all, as in DP-FedAvg", "white": "on W"}


class SketchNames(Mapping[str, str]):
    """Sketch names accepted by `SketchConfig.sketch`, each with a note. Includes schemes that are
    added to `SCHEMES` later.

    With several lanes, a plan replaces "count-v1" by "lanes-v1".

    >>> list(SketchNames())
    ['count-v1', 'count-hashed-v1', 'sampling-v1', 'identity-v1']
    """

    def __getitem__(self, name: str) -> str:
        if name not in SCHEMES or name == LaneSketch.scheme:
            raise KeyError(name)
        return "none" if name == Identity.scheme else ""

    def __iter__(self) -> Iterator[str]:
        return (name for name in SCHEMES if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_coverage(text: str) -> str | tuple[str, ...]:
    """Parse a coverage option: one of `COVERAGE_WORDS`, or comma-separated names and patterns.

    >>> read_coverage("hidden"), read_coverage("conv*, !conv1*")
    ('hidden', ('conv*', '!conv1*'))
    """
    return text if text in COVERAGE_WORDS else read_names(text)


def read_ratio(text: str) -> Ratio:
    """Parse a ratio option: a number or a range.

    >>> read_ratio("2"), read_ratio("2-4")
    (2.0, (2.0, 4.0))
    """
    try:
        low, *rest = (float(part) for part in text.split("-"))
    except ValueError:
        rest = [0.0, 0.0]
    if len(rest) > 1:
        raise ConfigError(f"ratio is a number or a range such as 2-4, got {text!r}")
    return (low, rest[0]) if rest else low


@dataclass(frozen=True, kw_only=True)
class SketchConfig:
    """Configuration of the sketches and the veil, which define a client's view of the model.

    Args:
        ratio: Number of inputs that share one output of a sketch, or a range from which each round
            draws.
        coverage: Sketched weights. "hidden": every dense and convolutional layer except the last,
            as in the paper. "large": hidden layers with at least 1 % of the trained parameters.
            "auto": large layers with at least 32 inputs, in networks without running statistics and
            without mostly frozen parameters; may select no layer. "all": every known layer. A list
            combines these words with name patterns, such as `["hidden", "!encoder.embed.*"]`.
        veil: Standard deviation of the secret noise on all broadcast tensors, relative to the
            weights.
        sketch: Sketch scheme; "identity-v1" disables sketching.
        lanes: Number of complementary sketches in a round, each used by a part of the cohort. None
            selects the rounded ratio. One lane is the paper's shared sketch.
        layers: Custom layers: a class or a parameter name pattern, and the input axis or axes of
            the weight: -1 for `x @ W.T`, 0 for `x @ W`.
        send_frozen: Send frozen floating-point parameters once, with constant noise. Otherwise each
            client must hold the same frozen parameters as the server.
        buffers: Name patterns of further buffers to send in addition to normalisation statistics.

    >>> SketchConfig(ratio=4).coverage
    'auto'
    """

    ratio: float | tuple[float, float] = described(
        2.0,
        "Number of inputs that share one output of a sketch, or a range from which each round draws: 2-4",
        HIDE,
        read=read_ratio,
    )
    coverage: str | tuple[str, ...] = described(
        "auto",
        "Weights that are sketched: auto (large layers of 32 inputs or more that a sketch does not harm), large "
        "(hidden layers with 1 % of the parameters or more), hidden (every layer but the last), all, or patterns such "
        "as 'conv*,!conv1*'",
        HIDE,
        read=read_coverage,
    )
    veil: float = described(0.2, "Secret noise on everything that leaves the server, relative to the weights", HIDE)
    sketch: str = described("count-v1", "Kind of sketch", HIDE, choices=SketchNames())
    lanes: int | None = described(
        None,
        "Number of complementary sketches among which the clients of a round are divided; 1 is the paper's",
        HIDE,
        unset="the rounded ratio",
    )
    layers: Layers | None = None
    send_frozen: bool = False
    buffers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.veil >= 0:
            raise ConfigError(f"veil must be 0 or more, got {self.veil}")
        low, high = self.ratio if isinstance(self.ratio, tuple) else (self.ratio, self.ratio)
        if self.sketch != Identity.scheme and not 1 < low <= high:
            got = f"{low:g} to {high:g}" if isinstance(self.ratio, tuple) else f"{low:g}"
            raise ConfigError(f"ratio must be above 1, and a range must rise, got {got}")
        if self.lanes is not None and self.lanes < 1:
            raise ConfigError(f"lanes must be 1 or more, got {self.lanes}")


UNSKETCHED = SketchConfig(sketch=Identity.scheme, veil=0.0)
"""Configuration without protection: clients receive the unmodified weights."""


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Target of a differential privacy guarantee. `PrivacyPlan` computes the noise that a run needs
    to reach the target.

    Args:
        epsilon: Epsilon of the guarantee.
        delta: Delta of the guarantee; must be below 1 / (number of privacy units).
        clip: Clipping norm of a client's update, or of one example's gradient times the learning
            rate.
        unit: Privacy unit: "client" (all contributions of one client) or "example".
        separation: Minimum number of rounds between two participations of a privacy unit. For
            clients, 0 selects the separation of a fixed cyclic order.
        correlation: Correlation of the noise over rounds: "banded", or "independent" and "white" as
            baselines.
        weight_cap: Maximum number of examples that count as a client's weight; 0 for equal weights.
        noise_by: Party that adds the noise. "server" requires a trusted server. With "clients",
            each client adds a share of the noise under secure aggregation, and the server is
            untrusted.
        colluders: Maximum number of clients that collude with the server when clients add the
            noise. None selects a fifth of the clients, at least 1.
        fewest: Minimum number of clients in a sum when clients add the noise. The shares of its
            non-colluding clients must suffice for the target. 0 requires the whole cohort and
            tolerates no dropout. If the noise is correlated over rounds, mu depends on the members
            of each sum, and a sum that would exceed the target is not revealed.

    >>> PrivacyConfig(epsilon=8, clip=0.2).delta
    1e-05
    """

    epsilon: float = described(
        MISSING,
        "Epsilon of differential privacy: the noise is large enough for it and correlated over rounds, and replaces "
        "--veil; needs --clip",
        PROMISE,
        unset="no guarantee",
    )
    delta: float = described(1e-5, "Delta of differential privacy; below one in the number of clients", PROMISE)
    clip: float = described(MISSING, "Bound on the norm of what one client or example contributes", PROMISE)
    unit: str = described(
        "client",
        "What --epsilon protects",
        PROMISE,
        choices={
            "client": "everything that one client contributes",
            "example": "one example, also with few clients; needs --algorithm sgd and --fraction 1",
        },
        option="privacy_unit",
    )
    separation: int = described(
        0,
        "Rounds after which an example takes part again; 0: as suits the guarantee, and of clients that of turns",
        PROMISE,
    )
    correlation: str = described(
        "banded", "Correlation of the noise of --epsilon over rounds", PROMISE, choices=CORRELATIONS
    )
    weight_cap: float = described(
        0.0, "With --epsilon the weight of a client is capped at this number of examples; 0 for equal weights", PROMISE
    )
    noise_by: str = described(
        "server",
        "Who adds the noise of --epsilon",
        PROMISE,
        choices={
            "server": "which must be trusted",
            "clients": "each a share, under --secure-aggregation: the server need not be trusted",
        },
    )
    colluders: int | None = described(
        None,
        "With --noise-by clients the number of clients that may collude with the server",
        PROMISE,
        unset="a fifth of them, at least 1",
    )
    fewest: int = described(
        0,
        "With --noise-by clients the fewest clients in a sum, so that others may drop out; 0 for the whole cohort",
        PROMISE,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        checks = {
            f"epsilon must be above 0 and finite, got {self.epsilon}": 0 < self.epsilon < math.inf,
            f"clip must be above 0 and finite, got {self.clip}": 0 < self.clip < math.inf,
            f"delta must be above 0 and below 1, got {self.delta}": 0 < self.delta < 1,
            f"separation must not be negative, got {self.separation}": self.separation >= 0,
            f"weight_cap must be 0 or more and finite, got {self.weight_cap}": 0 <= self.weight_cap < math.inf,
            f"weight_cap is for clients, and one example is the unit, got {self.weight_cap}": self.unit == "client"
            or not self.weight_cap,
            f"weight_cap is for noise_by=server; if clients add the noise all count alike, got {self.weight_cap}": (
                self.noise_by == "server" or not self.weight_cap
            ),
            f"colluders is for noise_by=clients, got {self.colluders}": self.noise_by == "clients"
            or self.colluders is None,
            f"colluders must not be negative, got {self.colluders}": (self.colluders or 0) >= 0,
            f"fewest is for noise_by=clients, got {self.fewest}": not self.fewest
            or (self.noise_by == "clients" and self.fewest > 0),
        }
        problems = [problem for problem, fine in checks.items() if not fine]
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class SecAggConfig:
    """Conditions of secure aggregation. Every client checks them against its own copy.

    A server with two signed survivor lists could request both secrets of a client, one from each
    half of the clients. So `threshold` of n clients must sign, with 2 threshold > n + colluders:
    two signed lists then share an honest client, which signs only one list. At most n - threshold
    clients may drop out.

    Args:
        clip: Public clipping norm of an update.
        weight_cap: Public maximum number of examples that count as a client's weight.
        min_cohort: Minimum number of clients in a sum.
        colluding: Share of the clients that may collude with the server.

    >>> SecAggConfig(clip=4.0).threshold(32), SecAggConfig(clip=4.0).colluders(32)
    (22, 10)
    """

    clip: float = described(
        4.0,
        "With --secure-aggregation every update is clipped to this norm; with --epsilon to --clip",
        HIDE,
        option="secagg_clip",
    )
    weight_cap: int = 1
    min_cohort: int = described(8, "With --secure-aggregation the smallest number of clients in a sum", HIDE)
    colluding: float = 1 / 3

    def __post_init__(self) -> None:
        check_settings(self)
        problems = []
        if not 0 < self.clip < 1e100:
            problems.append(f"secagg_clip must be above 0 and finite, got {self.clip}")
        if not 1 <= self.weight_cap < 1 << 40:
            problems.append(f"weight_cap must be 1 example or more, got {self.weight_cap}")
        if self.min_cohort < 2:
            problems.append(f"a sum is over 2 clients or more, got min_cohort {self.min_cohort}")
        if not 0 <= self.colluding < 1:
            problems.append(f"colluding is a share of the clients, at least 0 and below 1, got {self.colluding}")
        if problems:
            raise ConfigError("; ".join(problems))
        object.__setattr__(self, "clip", float(self.clip))  # 4 and 4.0 would be two rosters

    def colluders(self, count: int) -> int:
        """Return the maximum number of colluding clients in a group."""
        return int(self.colluding * count + 1e-9)

    def threshold(self, count: int) -> int:
        """Return the number of clients in a group whose signatures are required."""
        return (count + self.colluders(count)) // 2 + 1


def settings_of(config: Any) -> dict[str, Any]:
    """Return the values of all fields declared with `described`, by option name.

    >>> settings_of(SecAggConfig())
    {'secagg_clip': 4.0, 'min_cohort': 8}
    """
    return {option_name(field): getattr(config, field.name) for field in described_fields(type(config))}
