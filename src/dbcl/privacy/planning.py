"""Rounds, separation and step size that suit a guarantee for one example, from public facts of a run.

All updates together can move the weights by at most rounds * step, and the noise on the last model grows with this
reach: relative to it, the norm of the noise hardly depends on rounds or step. So the reach is what there is to choose:
as far as the noise allows. Runs on the digits, MNIST, CIFAR-10 and LFW were best if the noise on the weights had a norm
of about 14, for heads on normalised features and for small networks (`docs/privacy.md`). Nothing here looks at data or
at results, so nothing of it has to be accounted.
"""

from dataclasses import dataclass, replace

from dbcl.config import PrivacyConfig
from dbcl.privacy.accounting import PrivacyPlan

NOISE_NORM = 14.0
"""Norm of the noise on the weights after the last round."""
NOISE_NORM_CLIENTS = 10.0
"""The same for clients as the unit, whose updates are of several steps."""
SMALL_STEP, LARGE_STEP = 2.0, 4.0
"""Bounds on the change of the weights in a round (learning rate times clip): the smaller one is better, and the larger
one saves rounds."""
MIN_ROUNDS, ENOUGH_ROUNDS, MAX_ROUNDS = 20, 400, 800
"""Up to the second number of rounds the step is small, and from there on it grows first."""
BATCH = 6000
"""Examples in a round, at least, if there are as many: smaller batches save time, and change the noise little."""
MAX_SEPARATION = 10
LOSS_OF_NOISE = 17.0
"""Points of accuracy that are lost for each unit of noise to signal, on the digits (`results/guaranteed`)."""
WORTH_A_WARNING, RUINED = 0.3, 1.0
"""Noise to signal from which a plan is warned of, and from which settings that nobody chose are refused."""
TRIALS = 5
"""Times that the number of rounds is computed from the noise, which depends on it a little."""


@dataclass(frozen=True)
class Suggestion:
    """Settings that suit a guarantee.

    Args:
        rounds: Number of rounds.
        separation: Number of rounds after which an example takes part again.
        step: Learning rate times clip.
        noise_to_signal: Norm of the noise on the last model, relative to all that the updates can change.
    """

    rounds: int
    separation: int
    step: float
    noise_to_signal: float


def expected_loss(noise_to_signal: float) -> float:
    """Return how many points of accuracy a run loses to noise, as measured for a linear head on the digits.

    Tasks that are still learning when the noise ends them lose more: CIFAR-10 4 points at a ratio of 0.015.

    >>> [round(expected_loss(ratio), 1) for ratio in (0.1, 0.5, 20)]
    [1.7, 8.5, 90.0]
    """
    return min(LOSS_OF_NOISE * noise_to_signal, 90.0)


def suggest_server_rate(plan: PrivacyPlan, values: int) -> float:
    """Return the server's learning rate with which the noise on the last model has the norm that suits.

    For one client as the privacy unit, whose clip should be near the median norm of an update.

    Args:
        plan: The plan of the guarantee.
        values: Number of trained parameters.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.03, rounds=200, clients=1000, cohort=100)
    >>> round(suggest_server_rate(plan, values=39_700), 1)
    11.2
    """
    return NOISE_NORM_CLIENTS / (plan.noise_to_signal(values) * plan.rounds * plan.clip)


def suggest(config: PrivacyConfig, *, clients: int, examples: int, values: int, rounds: int = 0) -> Suggestion:
    """Suggest settings for one example as the privacy unit, with plain SGD on the server.

    Args:
        config: The target; its clip and separation are not used.
        clients: Number of clients.
        examples: Number of examples of all clients.
        values: Number of trained parameters.
        rounds: Number of rounds if it is given; 0 for as many as suit.

    >>> config = PrivacyConfig(epsilon=2, clip=0.1, unit="example", noise_by="clients")
    >>> found = suggest(config, clients=10, examples=4000, values=39_700)
    >>> found.rounds, found.separation, found.step, round(found.noise_to_signal, 3)
    (60, 1, 2.1, 0.112)
    """
    separation = max(1, min(MAX_SEPARATION, examples // BATCH))

    def noise_to_signal(rounds: int) -> float:
        plan = PrivacyPlan.from_config(
            replace(config, clip=1.0, separation=separation),
            rounds=rounds,
            clients=clients,
            cohort=clients,
            examples=examples,
            batch=max(1, examples // separation),
            values=values if config.noise_by == "clients" else 0,
        )
        return plan.noise_to_signal(values)

    given, rounds = rounds, rounds or ENOUGH_ROUNDS
    for _ in range(0 if given else TRIALS):
        reach = NOISE_NORM / noise_to_signal(rounds)
        wanted = max(min(reach / SMALL_STEP, ENOUGH_ROUNDS), reach / LARGE_STEP)
        rounds = 10 * round(min(max(wanted, MIN_ROUNDS), MAX_ROUNDS) / 10)
    relative = noise_to_signal(rounds)
    step = min(NOISE_NORM / relative / rounds, LARGE_STEP)
    return Suggestion(rounds, separation, float(f"{step:.2g}"), relative)
