"""How much an audit spends."""

from dataclasses import dataclass

from dbcl_audit.attacks.updates import MIN_LAG


@dataclass(frozen=True)
class Budget:
    """How much an audit spends: more rounds, pictures and shadow models make its findings surer.

    >>> QUICK.rounds < FULL.rounds
    True
    """

    estimators: tuple[str, ...]
    """Which of `ESTIMATORS` a client tries."""
    rounds: int
    """Rounds of the rehearsal for updates and properties."""
    batch: int
    """Examples in each client's batch there."""
    own_batches: int
    """The attacker's own batches of each kind in a round, for the forest."""
    own_examples: int
    """The attacker's own examples of each kind in a round, for the matched filters."""
    pictures: int
    """Pictures that are attacked."""
    steps: int
    """Steps of gradient matching."""
    restarts: int
    """Random starts of gradient matching."""
    inverting: bool
    """Whether the server also tries Inverting Gradients."""
    shadow_models: int
    """Models that LiRA trains."""
    solver_steps: int = 300
    """Steps of solving a dense first layer, for each weight of the total variation."""
    min_lag: int = MIN_LAG
    """Seen rounds that must follow a round for its estimate to count."""
    canary_rounds: int | None = None
    """Rounds of the rehearsal that measures a guarantee; None: all of the run's."""
    run_rounds: int = 60
    """Rounds of the rehearsals with fixed shards in which all clients take part."""
    all_rounds: int = 200
    """Rounds of the rehearsal with the run's own participation."""
    drift_examples: int = 1000
    """The attacker's own examples in the drift of a round."""
    null_examples: int = 600
    """The attacker's own examples that scores of members are compared with."""
    property_examples: int = 2000
    """The attacker's own examples that the filter for a property over all rounds, and the drift there, are made of."""
    whole_cohort: bool = True
    """Whether as many clients as the run has in a round are rehearsed, too."""
    known_ends: bool = True
    """Whether attackers are tried who know the first weights or receive the released model."""
    programmes: int = 200
    """Linear programmes by which the server looks for pictures in one update; 0: it does not."""
    step_pictures: int = 3
    """Single pictures that the server matches through several local steps."""
    fixed_pictures: int = 5
    """Rehearsals in which the victim has one and the same picture in every round."""
    fixed_rounds: int = 60
    """Rounds of each of these."""
    fixed_steps: int = 60
    """Steps of fitting a picture to all rounds."""


QUICK = Budget(
    estimators=("option I", "smoother"),
    rounds=40,
    batch=16,
    own_batches=2,
    own_examples=30,
    pictures=2,
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
    programmes=0,
    step_pictures=0,
    fixed_pictures=2,
    fixed_rounds=40,
    fixed_steps=30,
)
FULL = Budget(
    estimators=("option I", "option II", "rewind", "smoother", "smoother, sizes fitted", "shaped smoother"),
    rounds=120,
    batch=32,
    own_batches=3,
    own_examples=150,
    pictures=5,
    steps=600,
    restarts=3,
    inverting=True,
    shadow_models=16,
)
