"""Effort of an audit: number of rounds, images, models and optimisation steps of its attacks."""

from dataclasses import dataclass

MIN_LAG = 40
"""Minimum number of rounds observed after a scored round. Backward estimators start from a guess,
whose influence fades over these rounds.
"""


@dataclass(frozen=True)
class AuditEffort:
    """Effort of an audit. More rounds, images and shadow models narrow the intervals of the
    results.

    >>> QUICK.rounds < FULL.rounds
    True
    """

    estimators: tuple[str, ...]
    """Names of the estimators in `ESTIMATORS` that a client uses."""
    rounds: int
    """Rounds of the simulated run for updates and properties."""
    batch: int
    """Examples in each client's batch in this simulated run."""
    own_batches: int
    """Batches with and as many without the property that the attacker makes per round, for the
    random forest.
    """
    own_examples: int
    """Examples with and as many without the property that the attacker uses per round, for the
    matched filters.
    """
    images: int
    """Number of images to recover."""
    steps: int
    """Iterations of gradient matching."""
    restarts: int
    """Restarts of gradient matching."""
    inverting: bool
    """Also attack with Inverting Gradients, as the server."""
    shadow_models: int
    """Shadow models that LiRA trains."""
    solver_steps: int = 300
    """Iterations for a dense first layer, per weight of the total variation."""
    min_lag: int = MIN_LAG
    """Minimum number of rounds observed after a round for its estimate to be scored."""
    canary_rounds: int | None = None
    """Rounds of the simulated run that measures a guarantee; None for as many rounds as the run
    has.
    """
    run_rounds: int = 60
    """Rounds of the simulated runs with fixed shards and full participation."""
    all_rounds: int = 200
    """Rounds of the simulated run with the participation rate of the audited run."""
    drift_examples: int = 1000
    """Attacker's own examples used to compute the drift of a round."""
    null_examples: int = 600
    """Null examples: the attacker's own examples, with which the scores of candidates are
    compared.
    """
    property_examples: int = 2000
    """Attacker's own examples for the property filter over all rounds and for its drift."""
    whole_cohort: bool = True
    """Also simulate a run with the cohort size of the audited run."""
    known_ends: bool = True
    """Also attack with knowledge of the initial weights or of the released model."""
    step_images: int = 3
    """Single images that the server recovers from several local steps."""
    fixed_images: int = 5
    """Simulated runs in which the victim trains on the same image in every round."""
    fixed_rounds: int = 60
    """Rounds of each simulated run with a fixed image."""
    fixed_steps: int = 60
    """Iterations of fitting an image to all rounds."""


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
