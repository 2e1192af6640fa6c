"""Keeper of a guarantee on the server, as it is without one: its hooks change nothing.

A server calls the hooks in every round, so that a guarantee is one object and not a branch in every method.
`dbcl.protocol.guarantee` has the keepers of the formal guarantees.
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
"""Default momentum of the server."""


class Keeper:
    """No guarantee: the hooks change nothing.

    >>> Keeper().statement(IndependentNoise({}))
    'none'
    """

    plan: PrivacyPlan | None = None
    exact = False
    """True if the weights must be kept in float64."""
    grid: float | None = None
    """Grid to which noisy weights are rounded."""
    releases_noisy = False
    """True if only W + N may be released, never W."""
    default_sketch = SketchConfig()
    """Sketch of a server for which none is configured."""
    tracker: ParticipationTracker | None = None

    def statement(self, noise: NoiseMechanism) -> str:
        """Return the guarantee as a sentence; without a plan it is that of the noise."""
        return noise.guarantee()

    def default_optimizer(self) -> ServerOptimizer:
        """Return the server's optimiser where none is given."""
        return momentum(MOMENTUM)

    def noise_mechanism(self, veils: Mapping[str, float], given: NoiseMechanism | None = None) -> NoiseMechanism:
        """Return the mechanism of the noise on everything that leaves the server: `given`, or independent noise.

        Raises:
            PlanError: A mechanism is given, and the plan has one of its own.
        """
        return given or IndependentNoise(veils)

    def check(self, weights: TrainedWeights, wire: torch.dtype | None) -> None:
        """Raise `PlanError` if the guarantee cannot be kept for these weights and this dtype of messages."""

    def restrict(self, validator: UpdateValidator) -> UpdateValidator:
        """Return the validator without decisions that depend on unprotected data."""
        return validator

    def check_weights(self, round: int, unchanged: bool) -> None:
        """Raise `ProtocolError` if the weights were changed outside the rounds, where that is not allowed."""

    def rejection(self, round: int, client: str, beside: Collection[str]) -> Rejection | None:
        """Return the reason for which a client may not take part in a round."""
        return None

    def check_return(self, round: int, kept: int, *, same_key: bool) -> None:
        """Raise `ProtocolError` if a server at `round` may not go back to the checkpoint of round `kept`."""

    def check_void(self) -> None:
        """Raise `ProtocolError` if a round may not be given up."""
        raise ProtocolError("only a round with shares of noise can be given up")

    def in_turn(self, round: int, clients: Sequence[str]) -> list[str]:
        """Return the clients whose turn it is, of those that are there."""
        return list(clients)

    def check_senders(self, *, named: bool) -> None:
        """Raise `ProtocolError` if updates must have senders and have none."""

    def protect(self, update: Update) -> Update:
        """Remove from an update what must neither be reported nor decide anything."""
        return update

    def protect_stack(self, round: int, stack: UpdateStack) -> UpdateStack | None:
        """Do the same for a stack; None where its updates must be validated one by one."""
        return stack

    def weigh(self, accepted: Mapping[str, AcceptedUpdate]) -> dict[str, AcceptedUpdate]:
        """Return the accepted updates with the weights and factors that the guarantee requires."""
        return dict(accepted)

    def denominator(self, weights: Collection[float]) -> float:
        """Return what the weighted sum of the updates is divided by."""
        return sum(weights)

    def project(self, changes: dict[str, Tensor], size: float, count: int) -> dict[str, Tensor]:
        """Project an average update of `count` clients, with norm `size`, onto the ball of clipped ones."""
        return changes

    def report(self, report: RoundReport, stats: AggregationStats) -> tuple[RoundReport, AggregationStats]:
        """Remove from a report what depends on unprotected data."""
        return report, stats

    def noisy(self, changes: dict[str, Tensor], round: int, key: bytes, model: nn.Module) -> dict[str, Tensor]:
        """Add noise to the average update of a round, where the guarantee has it there."""
        return changes

    def check_use(self, round: int, stats: AggregationStats, count: int) -> None:
        """Raise `ProtocolError` if these senders may not have taken part."""

    def use(self, round: int, senders: Collection[str]) -> None:
        """Count the participations of a closed round."""

    def values(self) -> dict[str, Any] | None:
        """Return the settings of the guarantee as a checkpoint keeps them."""
        return None

    def state(self) -> State:
        """Return what a checkpoint keeps."""
        return State({}, {})

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
