"""Participation: the turns that a guarantee counts on, and the tracker that enforces them.

A guarantee holds for clients that come back after `separation` rounds at the earliest and take part `participations`
times at most. Turns in a fixed order satisfy this by themselves. The tracker rejects any other client. It counts
updates that were used: a client that did not answer, or whose update was rejected, has spent nothing.
"""

from collections.abc import Iterable

from dbcl.errors import ConfigError, ProtocolError, shown
from dbcl.state import State


def cyclic_cohort(round: int, *, clients: int, cohort: int) -> list[int]:
    """Return the clients of a round if all take turns in a fixed order.

    A client comes back after clients // cohort rounds at the earliest, and takes part in ceil(n cohort / clients) of n
    rounds at most.

    >>> [cyclic_cohort(round, clients=6, cohort=2) for round in range(4)]
    [[0, 1], [2, 3], [4, 5], [0, 1]]
    """
    if not 1 <= cohort <= clients:
        raise ConfigError(f"cohort must be between 1 and the number of clients, {clients}, got {cohort}")
    return [(round * cohort + turn) % clients for turn in range(cohort)]


def cyclic_batch(round: int, *, examples: int, separation: int) -> range:
    """Return the examples that a client takes in a round if one example is the unit: every `separation`-th.

    The next round takes the examples after these, so an example comes back after exactly `separation` rounds.

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
        weight_cap: Public weight at which weights are capped; it must not depend on data.
        per_round: Planned number of clients (or examples) in a round, however many answer.

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
    """Counts how often and when each client's updates were used, and rejects more than a guarantee covers.

    A client under a new name would be counted anew, so no more than `clients` names are accepted in a run.

    Args:
        rounds: Number of rounds that the guarantee covers.
        separation: Rounds after which a client may take part again.
        participations: Largest number of participations of one client.
        clients: Largest number of different clients.

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
        """Return the reason for which a client may not take part in a round together with others, or None."""
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
        """Raise `ProtocolError` if one of these clients may not take part in a round.

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
        """Count a participation of each of these clients, or raise `ProtocolError` and count none."""
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
        """Largest number of participations of any client."""
        return max((count for count, _ in self._uses.values()), default=0)

    @property
    def rule(self) -> dict[str, int]:
        """Limits as `state` keeps them."""
        names = ("rounds", "separation", "participations", "clients")
        return {name: getattr(self, name) for name in names}

    def state(self) -> State:
        """Return what a checkpoint keeps; it belongs into the same file as the weights, so nothing is counted twice.

        >>> tracker = ParticipationTracker(rounds=5, separation=2, participations=1, clients=2)
        >>> tracker.use(0, ["alice"])
        >>> tracker.state().values
        {'rounds': 5, 'separation': 2, 'participations': 1, 'clients': 2, 'uses': {'alice': [1, 0]}}
        """
        return State({**self.rule, "uses": {name: list(own) for name, own in self._uses.items()}}, {})

    def load_state(self, state: State) -> None:
        """Restore what `state` returned.

        Raises:
            ProtocolError: The state has other limits; a budget cannot be changed in a run.
        """
        kept = {name: state.values.get(name) for name in self.rule}
        if kept != self.rule:
            raise ProtocolError(
                f"the checkpoint counts participations by {shown(kept, 100)}, and this run by {self.rule}"
            )
        self._uses = {str(name): (int(count), int(last)) for name, (count, last) in state.values["uses"].items()}
