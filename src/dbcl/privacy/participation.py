"""Participation: the schedule that a guarantee assumes, and the tracker that enforces it.

A guarantee assumes at least `separation` rounds between two participations of a client, and at most
`participations` of them. A fixed cyclic order satisfies both. The tracker rejects clients that
would violate them. It counts only used updates: a client whose update is missing or rejected has
spent no budget.
"""

from collections.abc import Iterable

from dbcl.errors import ConfigError, ProtocolError, shown
from dbcl.state import State


def cyclic_cohort(round: int, *, clients: int, cohort: int) -> list[int]:
    """Return the clients of a round in a fixed cyclic order.

    A client takes part again after at least clients // cohort rounds, and in at most ceil(n cohort
    / clients) of n rounds.

    Args:
        round: Number of the round.
        clients: Number of clients.
        cohort: Number of clients in a round.

    >>> [cyclic_cohort(round, clients=6, cohort=2) for round in range(4)]
    [[0, 1], [2, 3], [4, 5], [0, 1]]
    """
    if not 1 <= cohort <= clients:
        raise ConfigError(f"cohort must be between 1 and the number of clients, {clients}, got {cohort}")
    return [(round * cohort + turn) % clients for turn in range(cohort)]


def cyclic_batch(round: int, *, examples: int, separation: int) -> range:
    """Return a client's examples in a round if one example is the privacy unit: every
    `separation`-th example.

    The next round uses the following examples, so that each example is used every `separation`
    rounds.

    Args:
        round: Number of the round.
        examples: Number of examples of the client.
        separation: Number of rounds between two uses of an example.

    >>> [list(cyclic_batch(round, examples=5, separation=3)) for round in range(4)]
    [[0, 3], [1, 4], [2], [0, 3]]
    """
    if separation < 1:
        raise ConfigError(f"separation must be 1 or more, got {separation}")
    return range(round % separation, examples, separation)


def share(weight: float, *, weight_cap: float, per_round: int) -> float:
    """Return the factor of an update in the average: min(weight / weight_cap, 1) / per_round.

    Args:
        weight: Number of examples of the client.
        weight_cap: Public maximum weight; must not depend on private data.
        per_round: Planned number of units in a round, independent of the actual number.

    >>> share(30, weight_cap=60, per_round=100), share(90, weight_cap=60, per_round=100)
    (0.005, 0.01)
    """
    if not weight_cap > 0 or per_round < 1 or not weight >= 0:
        raise ConfigError(
            f"weight must be 0 or more, weight_cap above 0 and per_round 1 or more, got {weight}, {weight_cap} and "
            f"{per_round}"
        )
    return min(weight / weight_cap, 1.0) / per_round


class ParticipationTracker:
    """Tracker of each client's used updates. Rejects participations that the guarantee does not
    cover.

    At most `clients` different names are accepted in a run, because a client with a new name would
    have a new budget.

    Args:
        rounds: Number of rounds that the guarantee covers.
        separation: Minimum number of rounds between two participations of a client.
        participations: Maximum number of participations of a client.
        clients: Maximum number of different clients.

    >>> tracker = ParticipationTracker(rounds=20, separation=10, participations=2, clients=2)
    >>> tracker.use(0, ["alice", "bob"])
    >>> tracker.refusal(3, "alice")
    'took part in round 0, and may again from round 10 on'
    >>> tracker.refusal(10, "alice") is None, tracker.refusal(20, "alice")
    (True, 'the budget of 20 rounds is spent')
    >>> tracker.refusal(10, "carol")
    'is unknown, and all 2 clients of the plan have taken part'
    """

    def __init__(self, *, rounds: int, separation: int, participations: int, clients: int) -> None:
        self.rounds, self.separation, self.participations, self.clients = rounds, separation, participations, clients
        if min(self.rule.values()) < 1:
            said = ", ".join(f"{name} {value}" for name, value in self.rule.items())
            raise ConfigError(f"rounds, separation, participations and clients must be 1 or more, got {said}")
        self._uses: dict[str, tuple[int, int]] = {}  # by client: number of participations, last round

    def refusal(self, round: int, client: str | int, beside: Iterable[str | int] = ()) -> str | None:
        """Return the reason why a client may not take part in a round, or None.

        Args:
            round: Number of the round.
            client: Name of the client.
            beside: Other clients of the same round.
        """
        if round >= self.rounds:
            return f"the budget of {self.rounds} rounds is spent"
        if str(client) not in self._uses:
            others = self._uses.keys() | set(map(str, beside))
            if len(others - {str(client)}) >= self.clients:
                return f"is unknown, and all {self.clients} clients of the plan have taken part"
        count, last = self._uses.get(str(client), (0, -self.separation))
        if count >= self.participations:
            return f"took part {count} times, which is all that its budget allows"
        if round < last + self.separation:
            return f"took part in round {last}, and may again from round {last + self.separation} on"
        return None

    def allowed(self, round: int, clients: Iterable[str | int]) -> list[str | int]:
        """Return the clients that may take part in a round.

        >>> tracker = ParticipationTracker(rounds=20, separation=10, participations=2, clients=2)
        >>> tracker.use(0, ["alice"])
        >>> tracker.allowed(1, ["alice", "bob"])
        ['bob']
        """
        may: list[str | int] = []
        for client in clients:
            if self.refusal(round, client, may) is None:
                may.append(client)
        return may

    def check(self, round: int, clients: Iterable[str | int]) -> None:
        """Raise `ProtocolError` if any of the clients may not take part in a round.

        >>> ParticipationTracker(rounds=5, separation=2, participations=1, clients=2).check(5, ["alice"])
        Traceback (most recent call last):
            ...
        dbcl.errors.ProtocolError: round 5: 'alice': the budget of 5 rounds is spent
        """
        names = [str(client) for client in clients]
        for place, name in enumerate(names):
            before = names[:place]
            reason = self.refusal(round, name, before) or ("counts once a round" if name in before else None)
            if reason is not None:
                raise ProtocolError(f"round {round}: {shown(name)}: {reason}")

    def use(self, round: int, clients: Iterable[str | int]) -> None:
        """Record a participation of each client. If any client may not take part, raise
        `ProtocolError` and record none.
        """
        names = [str(client) for client in clients]
        self.check(round, names)
        for name in names:
            self._uses[name] = self.uses(name) + 1, round

    def uses(self, client: str | int) -> int:
        """Return the number of participations of a client.

        >>> ParticipationTracker(rounds=5, separation=2, participations=1, clients=2).uses("alice")
        0
        """
        return self._uses.get(str(client), (0, 0))[0]

    @property
    def most_uses(self) -> int:
        """Maximum number of participations of any client."""
        return max((count for count, _ in self._uses.values()), default=0)

    @property
    def rule(self) -> dict[str, int]:
        """Limits of the guarantee, as stored by `state`."""
        names = ("rounds", "separation", "participations", "clients")
        return {name: getattr(self, name) for name in names}

    def state(self) -> State:
        """Return the state for a checkpoint. Save it in the same file as the weights, so that no
        participation is lost or counted twice.

        >>> tracker = ParticipationTracker(rounds=5, separation=2, participations=1, clients=2)
        >>> tracker.use(0, ["alice"])
        >>> tracker.state().values
        {'rounds': 5, 'separation': 2, 'participations': 1, 'clients': 2, 'uses': {'alice': [1, 0]}}
        """
        return State({**self.rule, "uses": {name: list(own) for name, own in self._uses.items()}}, {})

    def load_state(self, state: State) -> None:
        """Restore a state returned by `state`.

        Raises:
            ProtocolError: The state has other limits. A budget cannot change during a run.
        """
        kept = {name: state.values.get(name) for name in self.rule}
        if kept != self.rule:
            raise ProtocolError(
                f"the checkpoint counts participations by {shown(kept, 100)}, and this run by {self.rule}"
            )
        self._uses = {str(name): (int(count), int(last)) for name, (count, last) in state.values["uses"].items()}
