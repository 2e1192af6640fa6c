"""The interface of a server towards engines."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Broadcast, RoundReport, Update

Updates = Sequence[Update | bytes] | Mapping[str, Update | bytes]
"""Updates of a round: by sender, where senders are known."""


class TrainingServer(Protocol):
    """Server as engines use it; `dbcl.Server` implements it."""

    @property
    def round(self) -> int:
        """Number of the next round."""

    @property
    def plan(self) -> SketchPlan:
        """Plan of the sketch and the veil of each tensor."""

    @property
    def model(self) -> nn.Module:
        """The network with the true weights."""

    @property
    def privacy(self) -> PrivacyPlan | None:
        """Plan of the guarantee."""

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round down and up, besides broadcasts and updates."""

    def open_round(self, client: str | int | None = None) -> Broadcast:
        """Return a client's broadcast of the round."""

    def prepare(self) -> None:
        """Precompute randomness of the next round; may overlap with client training."""

    def close_round(self, updates: Updates) -> RoundReport:
        """Step on the updates."""

    def sums(self) -> Mapping[str, Update]:
        """Return what a server that sees only sums has seen of the last round."""
