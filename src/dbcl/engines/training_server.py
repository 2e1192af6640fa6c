"""Server interface for engines."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Broadcast, RoundReport, Update

Updates = Sequence[Update | bytes] | Mapping[str, Update | bytes]
"""Updates of a round, keyed by sender if senders are known."""


class TrainingServer(Protocol):
    """Interface of a server for engines, implemented by `dbcl.Server`."""

    @property
    def round(self) -> int:
        """Number of the next round."""

    @property
    def plan(self) -> SketchPlan:
        """Plan of each tensor's sketch and veil."""

    @property
    def model(self) -> nn.Module:
        """Network with the master weights."""

    @property
    def privacy(self) -> PrivacyPlan | None:
        """Plan of the guarantee, or None."""

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round down and up, excluding broadcasts and updates; None if there are
        none.
        """

    def open_round(self, client: str | int | None = None) -> Broadcast:
        """Open the round if necessary and return a client's broadcast."""

    def prepare(self) -> None:
        """Precompute the randomness of the next round; may overlap with client training."""

    def close_round(self, updates: Updates) -> RoundReport:
        """Validate and aggregate the updates, and step on their average."""

    def sums(self) -> Mapping[str, Update]:
        """Return the aggregates of the last round, for a server that sees only sums."""
