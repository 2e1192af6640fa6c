"""Requirements of a client: broadcasts with weaker protection are rejected, so that no server lowers it unnoticed."""

import math
from dataclasses import dataclass

from torch import nn

from dbcl.config import Coverage
from dbcl.errors import ConfigError, PlanError, listed, plain
from dbcl.model.coverage import covered_names
from dbcl.protocol.messages import Broadcast


@dataclass(frozen=True)
class BroadcastRequirements:
    """Minimum protection of a broadcast; the defaults are those of the default plan.

    Everything is checked against the client's own model and the round's own sketches.

    Args:
        sketched: Weights of the client's model that must be sketched, as `SketchConfig.coverage` names them.
        min_ratio: Smallest ratio of their sketches.
        max_ratio: Largest ratio of their sketches.
        veil: Least noise on everything, relative to the weights, that the server must *state*: noise that a client
            could check would be no secret.

    >>> import dbcl
    >>> net = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> _ = dbcl.blinded(net, dbcl.Server(net).open_round(), require=BroadcastRequirements())
    >>> _ = dbcl.blinded(net, dbcl.Server(net, dbcl.SketchConfig(veil=0)).open_round(), require=BroadcastRequirements())
    Traceback (most recent call last):
        ...
    dbcl.errors.PlanError: this broadcast hides less than the client's policy requires:
      - the veil is 0, and 0.2 is required
    """

    sketched: Coverage | None = "auto"
    min_ratio: float = 2.0
    max_ratio: float | None = None
    veil: float = 0.2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.veil) and self.veil >= 0):
            raise ConfigError(f"veil must be 0 or more, got {self.veil}")
        if not self.min_ratio >= 1 or (self.max_ratio is not None and not self.max_ratio >= self.min_ratio):
            raise ConfigError(f"the ratios must be 1 or more and rise, got {self.min_ratio} and {self.max_ratio}")

    def check(self, module: nn.Module, broadcast: Broadcast) -> None:
        """Raise `PlanError`, with all that is missing, if a broadcast does not meet the requirements."""
        problems = []
        if broadcast.veil < self.veil:
            problems.append(f"the veil is {broadcast.veil:g}, and {self.veil:g} is required")
        parts = {part.name: part for part in broadcast.plan.tensors}
        if self.sketched is not None:
            for name in sorted(covered_names(module, self.sketched).names):
                if name not in parts or not parts[name].sketched:
                    problems.append(f"{name} is not sketched")
        for part in parts.values():
            said = f"{plain(part.name, 100)} is sketched from {part.dim} to {part.columns}, a ratio"
            if part.sketched and part.columns > math.ceil(part.dim / self.min_ratio):
                problems.append(f"{said} below {self.min_ratio:g}")
            if part.sketched and self.max_ratio is not None and part.columns < math.floor(part.dim / self.max_ratio):
                problems.append(f"{said} above {self.max_ratio:g}")
        if problems:
            raise PlanError(listed("this broadcast hides less than the client's policy requires:", problems))
