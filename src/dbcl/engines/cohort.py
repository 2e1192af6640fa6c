"""Selection of the clients of each round."""

from dbcl import seeds
from dbcl.errors import ConfigError


def cohort_size(clients: int, fraction: float) -> int:
    """Return the number of clients in a round: clients * fraction, rounded half up, and at least 1.

    Args:
        clients: Number of clients.
        fraction: Share of the clients in a round.

    >>> cohort_size(100, 0.1), cohort_size(25, 0.1), cohort_size(3, 0.01)
    (10, 3, 1)
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"the fraction of clients in a round must be above 0 and at most 1, got {fraction}")
    return max(1, int(fraction * clients + 0.5))


def fixed_batch(clients: int, fraction: float, *, seed: bytes, round: int) -> list[int]:
    """Return a round's clients as one of several fixed groups, which take part in turn.

    Args:
        clients: Number of clients.
        fraction: Share of the clients in a round.
        seed: Seed of the division into groups.
        round: Number of the round.

    >>> both = [fixed_batch(6, 0.5, seed=bytes(32), round=round) for round in range(2)]
    >>> sorted(both[0] + both[1]), fixed_batch(6, 0.5, seed=bytes(32), round=2) in both
    ([0, 1, 2, 3, 4, 5], True)
    """
    batches = max(1, clients // cohort_size(clients, fraction))
    cycle, place = divmod(round, batches)
    number = int(seeds.permutation(seed, "batches", cycle, n=batches)[place])
    return sorted(seeds.permutation(seed, "members", n=clients)[number::batches].tolist())


def draw_cohort(clients: int, fraction: float, *, seed: bytes, round: int) -> list[int]:
    """Draw a round's clients uniformly without replacement.

    Args:
        clients: Number of clients.
        fraction: Share of the clients in a round.
        seed: Seed of the draws.
        round: Number of the round.

    >>> len(draw_cohort(100, 0.1, seed=bytes(32), round=0))
    10
    """
    size = cohort_size(clients, fraction)
    return sorted(seeds.permutation(seed, "participants", round, n=clients)[:size].tolist())
