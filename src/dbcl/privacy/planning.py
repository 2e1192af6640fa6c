"""Suggested rounds, separation and step size for an example-level guarantee, computed from public
values.

All updates together can change the weights by at most rounds * step, the reach. The noise on the
final model grows with the reach, and their ratio hardly depends on rounds or step. The reach is
therefore the only free choice, and should be as large as the noise permits. In experiments on
digits, MNIST, CIFAR-10 and LFW, accuracy was best with a noise norm of about 14 on the weights, for
heads on normalised features and for small networks (`docs/privacy.md`). The suggestion uses no
private data or results, so it has no privacy cost.
"""

from dataclasses import dataclass, replace

from dbcl.config import PrivacyConfig
from dbcl.privacy.accounting import PrivacyPlan

NOISE_NORM = 14.0
"""Suggested norm of the noise on the weights after the last round."""
NOISE_NORM_CLIENTS = 10.0
"""Suggested norm of the noise with one client as the privacy unit, whose updates contain several
local steps.
"""
SMALL_STEP, LARGE_STEP = 2.0, 4.0
"""Bounds on the change of the weights per round (learning rate times clip). The lower bound gives
better accuracy, the upper bound fewer rounds.
"""
MIN_ROUNDS, ENOUGH_ROUNDS, MAX_ROUNDS = 20, 400, 800
"""Minimum number of rounds, number of rounds above which the step size grows instead, and maximum
number of rounds.
"""
BATCH = 6000
"""Suggested minimum number of examples in a round. Smaller batches save time and hardly change the
noise.
"""
MAX_SEPARATION = 10
LOSS_OF_NOISE = 17.0
"""Loss of accuracy in percentage points per unit of noise-to-signal ratio, on the digits
(`results/guaranteed`).
"""
WORTH_A_WARNING, RUINED = 0.3, 1.0
"""Noise-to-signal ratios above which a warning is printed, and above which default settings are
rejected.
"""
TRIALS = 5
"""Iterations of the fixed point between the number of rounds and the noise."""


@dataclass(frozen=True)
class Suggestion:
    """Suggested settings of a guarantee.

    Args:
        rounds: Number of rounds.
        separation: Number of rounds between two uses of an example.
        step: Learning rate times clip.
        noise_to_signal: Norm of the noise on the final model, relative to the maximum total change
            by the updates.
    """

    rounds: int
    separation: int
    step: float
    noise_to_signal: float


def expected_loss(noise_to_signal: float) -> float:
    """Return the expected loss of accuracy to noise in percentage points, as measured for a linear
    head on the digits.

    The loss is larger for tasks that need more training: CIFAR-10 lost 4 points at a ratio of
    0.015.

    >>> [round(expected_loss(ratio), 1) for ratio in (0.1, 0.5, 20)]
    [1.7, 8.5, 90.0]
    """
    return min(LOSS_OF_NOISE * noise_to_signal, 90.0)


def suggest_server_rate(plan: PrivacyPlan, values: int) -> float:
    """Return the server learning rate that gives the suggested norm of the noise on the final
    model.

    Applies to one client as the privacy unit, with a clipping norm near the median norm of an
    update.

    Args:
        plan: Plan of the guarantee.
        values: Number of trained parameters.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.03, rounds=200, clients=1000, cohort=100)
    >>> round(suggest_server_rate(plan, values=39_700), 1)
    11.2
    """
    return NOISE_NORM_CLIENTS / (plan.noise_to_signal(values) * plan.rounds * plan.clip)


def suggest(config: PrivacyConfig, *, clients: int, examples: int, values: int, rounds: int = 0) -> Suggestion:
    """Suggest settings for one example as the privacy unit, with plain SGD on the server.

    Args:
        config: Target of the guarantee; its clip and separation are ignored.
        clients: Number of clients.
        examples: Number of examples of all clients.
        values: Number of trained parameters.
        rounds: Fixed number of rounds; 0 to suggest one.

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
