"""Effort of an audit: rounds, images, models and steps of its attacks."""

from dataclasses import dataclass

MIN_LAG = 40
"""Observed rounds after a round that is scored: an attacker that goes backward starts from a guess,
which fades.
"""


@dataclass(frozen=True)
class AuditEffort:
    """Effort of an audit: more rounds, images and shadow models narrow its intervals.

    >>> QUICK.rounds < FULL.rounds
    True
    """

    estimators: tuple[str, ...]
    """Names in `ESTIMATORS` that a client tries."""
    rounds: int
    """Rounds of the simulated run for updates and properties."""
    batch: int
    """Examples in each client's batch there."""
    own_batches: int
    """The attacker's own batches of each kind in a round, for the forest."""
    own_examples: int
    """The attacker's own examples of each kind in a round, for the matched filters."""
    images: int
    """Images that are attacked."""
    steps: int
    """Steps of gradient matching."""
    restarts: int
    """Random starts of gradient matching."""
    inverting: bool
    """The server also tries Inverting Gradients."""
    shadow_models: int
    """Models that LiRA trains."""
    solver_steps: int = 300
    """Steps of solving a dense first layer, for each weight of the total variation."""
    min_lag: int = MIN_LAG
    """Observed rounds that must follow a round for its estimate to count."""
    canary_rounds: int | None = None
    """Rounds of the simulated run that measures a guarantee; None: all of the run's."""
    run_rounds: int = 60
    """Rounds of the simulated runs with fixed shards in which all clients take part."""
    all_rounds: int = 200
    """Rounds of the simulated run with the run's own participation."""
    drift_examples: int = 1000
    """The attacker's own examples from which it computes the drift of a round."""
    null_examples: int = 600
    """The attacker's own examples with which scores of members are compared."""
    property_examples: int = 2000
    """The attacker's own examples for the property filter over all rounds and its drift."""
    whole_cohort: bool = True
    """Also simulate as many clients as the run has in a round."""
    known_ends: bool = True
    """Also try attackers that know the initial weights or receive the released model."""
    step_images: int = 3
    """Single images that the server matches through several local steps."""
    fixed_images: int = 5
    """Simulated runs in which the victim has the same image in every round."""
    fixed_rounds: int = 60
    """Rounds of each of these."""
    fixed_steps: int = 60
    """Steps of fitting an image to all rounds."""


QUICK = AuditEffort(
    estimators=("option I", "smoother"),
    rounds=40,
    batch=16,
    own_batches=2,
    own_examples=30,
    images=2,
    steps=200,
    restarts=1,
    inverting=False,
    shadow_models=4,
    canary_rounds=60,
    run_rounds=40,
    all_rounds=60,
    drift_examples=500,
    null_examples=300,
    property_examples=500,
    whole_cohort=False,
    known_ends=False,
    step_images=0,
    fixed_images=2,
    fixed_rounds=40,
    fixed_steps=30,
)
FULL = AuditEffort(
    estimators=("option I", "option II", "rewind", "smoother", "smoother, sizes fitted", "shaped smoother"),
    rounds=120,
    batch=32,
    own_batches=3,
    own_examples=150,
    images=5,
    steps=600,
    restarts=3,
    inverting=True,
    shadow_models=16,
)
