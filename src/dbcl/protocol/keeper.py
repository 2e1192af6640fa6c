"""Default enforcer of a server without a guarantee. Its hooks have no effect.

A server calls the hooks in every round, so each guarantee is one object instead of a branch in
every method. `dbcl.protocol.guarantee` defines the enforcers of formal guarantees.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.config import SketchConfig
from dbcl.errors import ProtocolError
from dbcl.optim import ServerOptimizer, momentum
from dbcl.privacy import IndependentNoise, NoiseMechanism, ParticipationTracker, PrivacyPlan
from dbcl.protocol.messages import AggregationStats, RoundReport, Update, UpdateStack
from dbcl.protocol.rejection import Rejection
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.protocol.validation import AcceptedUpdate, UpdateValidator
from dbcl.state import State

MOMENTUM = 0.5
"""Default momentum of the server's optimiser."""


class Keeper:
    """Enforcer without a guarantee. Its hooks have no effect.

    >>> Keeper().statement(IndependentNoise({}))
    'none'
    """

    plan: PrivacyPlan | None = None
    exact = False
    """True if the weights must be kept in float64."""
    grid: float | None = None
    """Spacing of the grid to which noisy weights are rounded; None disables rounding."""
    releases_noisy = False
    """True if only W + N may be released, never W."""
    default_sketch = SketchConfig()
    """Default sketch configuration of the server."""
    tracker: ParticipationTracker | None = None

    def statement(self, noise: NoiseMechanism) -> str:
        """Describe the guarantee in one sentence. Without a plan, describe the noise."""
        return noise.guarantee()

    def default_optimizer(self) -> ServerOptimizer:
        """Return the server's default optimiser."""
        return momentum(MOMENTUM)

    def noise_mechanism(self, veils: Mapping[str, float], given: NoiseMechanism | None = None) -> NoiseMechanism:
        """Return the noise mechanism for all weights that leave the server.

        Args:
            veils: Relative standard deviation of the noise, by tensor.
            given: A custom mechanism; None selects independent noise.

        Returns:
            The noise mechanism.

        Raises:
            PlanError: A custom mechanism is given, but the plan defines the mechanism.
        """
        return given or IndependentNoise(veils)

    def check(self, weights: TrainedWeights, wire: torch.dtype | None) -> None:
        """Raise `PlanError` if the guarantee does not support these weights or this dtype.

        Args:
            weights: The weights W.
            wire: Transmission dtype; None for the dtype of each tensor.
        """

    def restrict(self, validator: UpdateValidator) -> UpdateValidator:
        """Return a copy of the validator without decisions that depend on unprotected data."""
        return validator

    def check_weights(self, round: int, unchanged: bool) -> None:
        """Raise `ProtocolError` if the guarantee forbids a change of the weights between rounds."""

    def rejection(self, round: int, client: str, beside: Collection[str]) -> Rejection | None:
        """Return the reason to exclude a client from a round, or None."""
        return None

    def check_return(self, round: int, kept: int, *, same_key: bool) -> None:
        """Raise `ProtocolError` if a server must not restore an earlier checkpoint.

        Args:
            round: Current round of the server.
            kept: Round of the checkpoint.
            same_key: The server's key equals the key in the checkpoint.
        """

    def check_void(self) -> None:
        """Raise `ProtocolError` if a round must not be skipped."""
        raise ProtocolError("only a round with shares of noise can be given up")

    def in_turn(self, round: int, clients: Sequence[str]) -> list[str]:
        """Return the present clients that are scheduled for a round."""
        return list(clients)

    def check_senders(self, *, named: bool) -> None:
        """Raise `ProtocolError` if the guarantee needs the senders' names and they are missing."""

    def protect(self, update: Update) -> Update:
        """Remove data from an update that must not affect reports or decisions."""
        return update

    def protect_stack(self, round: int, stack: UpdateStack) -> UpdateStack | None:
        """Remove the same data from a stack.

        Return None if its updates need individual validation.
        """
        return stack

    def weigh(self, accepted: Mapping[str, AcceptedUpdate]) -> dict[str, AcceptedUpdate]:
        """Return the accepted updates with the weights and factors that the guarantee requires."""
        return dict(accepted)

    def denominator(self, weights: Collection[float]) -> float:
        """Return the divisor of the weighted sum of the updates."""
        return sum(weights)

    def project(self, changes: dict[str, Tensor], size: float, count: int) -> dict[str, Tensor]:
        """Project an average update onto the ball of possible averages of clipped updates.

        Args:
            changes: The average update.
            size: Norm of the average update.
            count: Number of clients.
        """
        return changes

    def report(self, report: RoundReport, stats: AggregationStats) -> tuple[RoundReport, AggregationStats]:
        """Remove values from a report that depend on unprotected data."""
        return report, stats

    def noisy(self, changes: dict[str, Tensor], round: int, key: bytes, model: nn.Module) -> dict[str, Tensor]:
        """Add noise to the average update of a round, if the guarantee uses this kind of noise."""
        return changes

    def check_use(self, round: int, stats: AggregationStats, count: int) -> None:
        """Raise `ProtocolError` if the participation limits exclude any of the senders."""

    def use(self, round: int, senders: Collection[str]) -> None:
        """Record the participations of a closed round."""

    def values(self) -> dict[str, Any] | None:
        """Return the settings of the guarantee for a checkpoint."""
        return None

    def state(self) -> State:
        """Return the state for a checkpoint."""
        return State({}, {})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
