"""How many clients must help, how many may collude, and how small a sum may be: the terms of a group."""

from collections.abc import Sequence
from dataclasses import dataclass

from dbcl.errors import ConfigError
from dbcl.protocol.secagg.messages import MAX_GROUP


@dataclass(frozen=True)
class Terms:
    """What clients insist on, and what a server that wants an answer keeps to.

    A server that could get two lists of survivors signed would ask for both secrets of a client, one from each half. So
    `threshold` clients must sign, of n, with 2 threshold > n + colluders: two such lists would share an honest client,
    and it signs one. As many clients may drop out as the threshold leaves, and no more.

    `bound` is the public length to which every update is clipped, `most` the public number of examples above which a
    client weighs no more, and no sum of fewer than `min_cohort` clients is ever shown.

    >>> Terms(bound=4.0).threshold(32), Terms(bound=4.0).colluders(32)
    (22, 10)
    """

    bound: float
    most: int = 1
    min_cohort: int = 8
    colluding: float = 1 / 3

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.bound < 1e100:
            problems.append(f"bound must be above 0 and finite, got {self.bound}")
        if not 1 <= self.most < 1 << 40:
            problems.append(f"most must be 1 or more examples, got {self.most}")
        if self.min_cohort < 3:
            problems.append(f"of fewer than 3 clients one learns the other's update, got min_cohort {self.min_cohort}")
        if not 0 <= self.colluding < 1:
            problems.append(f"colluding is a share of the clients, at least 0 and below 1, got {self.colluding}")
        if problems:
            raise ConfigError("; ".join(problems))
        object.__setattr__(self, "bound", float(self.bound))  # as it is written: 4 and 4.0 would be two rosters

    def colluders(self, count: int) -> int:
        """How many of a group may collude with the server."""
        return int(self.colluding * count + 1e-9)

    def threshold(self, count: int) -> int:
        """How many of a group must sign and help."""
        return (count + self.colluders(count)) // 2 + 1


def groups(clients: Sequence[str], *, most: int = MAX_GROUP) -> list[tuple[str, ...]]:
    """Divide clients into as few groups as there must be, which differ by one client at most.

    >>> [len(group) for group in groups([str(number) for number in range(100)])]
    [50, 50]
    """
    count = -(-len(clients) // most) or 1
    return [tuple(clients[number::count]) for number in range(count)]
