"""A client's requirements for broadcasts, which prevent a server from weakening the protection."""

import math
from dataclasses import dataclass

from torch import nn

from dbcl.config import Coverage
from dbcl.errors import ConfigError, PlanError, listed, plain
from dbcl.model.coverage import covered_names
from dbcl.protocol.messages import Broadcast


@dataclass(frozen=True)
class BroadcastRequirements:
    """Minimum protection of a broadcast; the defaults match the default plan.

    All checks use the client's own model and the round's sketches.

    Args:
        sketched: Weights of the client's model that must be sketched, in the form of
            `SketchConfig.coverage`.
        min_ratio: Smallest permitted sketch ratio.
        max_ratio: Largest permitted sketch ratio.
        veil: Smallest permitted noise on every tensor, relative to the weights. The client checks
            the noise level that the server states: it cannot measure secret noise.

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
        """Check a broadcast against the requirements.

        Args:
            module: The client's model.
            broadcast: The received broadcast.

        Raises:
            PlanError: The broadcast does not meet the requirements. The message lists all problems.
        """
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
