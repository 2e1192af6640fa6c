"""Who takes part when: the rule that a guarantee counts on, and the ledger that enforces it.

A guarantee holds for clients that come back after `separation` rounds at the earliest and `participations` times at
most. Cyclic cohorts keep it by themselves; the ledger refuses whoever would break it, counted from updates that were
used: a client that was asked and did not answer, or whose update was refused, has spent nothing.
"""

from collections.abc import Iterable

from dbcl.errors import ConfigError, ProtocolError, shown
from dbcl.state import State


def cyclic_cohort(round: int, *, clients: int, cohort: int) -> list[int]:
    """The clients of a round where all take turns: the next `cohort` of them, after the last the first again.

    A client comes back after clients // cohort rounds at the earliest, and in n rounds it has ceil(n cohort / clients)
    turns at most.

    >>> [cyclic_cohort(round, clients=6, cohort=2) for round in range(4)]
    [[0, 1], [2, 3], [4, 5], [0, 1]]
    """
    if not 1 <= cohort <= clients:
        raise ConfigError(f"cohort must be between 1 and the number of clients, {clients}, got {cohort}")
    return [(round * cohort + turn) % clients for turn in range(cohort)]


def cyclic_batch(round: int, *, examples: int, separation: int) -> range:
    """The batch of a client in a round where one example is the unit: every `separation`-th of its examples.

    The next round takes those after them, so an example comes back after exactly `separation` rounds.

    >>> [list(cyclic_batch(round, examples=5, separation=3)) for round in range(4)]
    [[0, 3], [1, 4], [2], [0, 3]]
    """
    if separation < 1:
        raise ConfigError(f"separation must be 1 or more, got {separation}")
    return range(round % separation, examples, separation)


def share(weight: float, *, most: float, per_round: int) -> float:
    """What one update of a round is multiplied by: min(weight / most, 1) / per_round.

    `most` is a weight that is public, and above which none counts; `per_round` is the planned number of clients (or of
    examples) in a round, whoever answers: neither may follow from the data. Weights that are all 1 are the default.

    >>> share(30, most=60, per_round=100), share(90, most=60, per_round=100)
    (0.005, 0.01)
    """
    if not most > 0 or per_round < 1 or not weight >= 0:
        raise ConfigError(
            f"a weight is 0 or more, the largest above 0 and per_round 1 or more, got {weight}, {most} and {per_round}"
        )
    return min(weight / most, 1.0) / per_round


class Ledger:
    """Counts how often and when each client's updates were used, and refuses those that the guarantee does not cover.

    >>> ledger = Ledger(rounds=20, separation=10, participations=2)
    >>> ledger.use(0, ["alice", "bob"])
    >>> ledger.refusal(3, "alice")
    'took part in round 0, and may again from round 10 on'
    >>> ledger.refusal(10, "alice") is None, ledger.refusal(20, "carol")
    (True, 'the budget of 20 rounds is spent')
    """

    def __init__(self, *, rounds: int, separation: int, participations: int) -> None:
        if min(rounds, separation, participations) < 1:
            raise ConfigError(
                f"rounds, separation and participations are 1 or more, got {rounds}, {separation} and {participations}"
            )
        self.rounds, self.separation, self.participations = rounds, separation, participations
        self._uses: dict[str, tuple[int, int]] = {}  # of each client: how often, and the last round

    def refusal(self, round: int, client: str | int) -> str | None:
        """Why this client's update may not be used in this round; None where it may."""
        if round >= self.rounds:
            return f"the budget of {self.rounds} rounds is spent"
        count, last = self._uses.get(str(client), (0, -self.separation))
        if count >= self.participations:
            return f"took part {count} times, which is all that its budget allows"
        if round < last + self.separation:
            return f"took part in round {last}, and may again from round {last + self.separation} on"
        return None

    def allowed(self, round: int, clients: Iterable[str | int]) -> list[str | int]:
        """Those of the clients that may take part in this round; where there are none, the run is over or must wait.

        >>> ledger = Ledger(rounds=20, separation=10, participations=2)
        >>> ledger.use(0, ["alice"])
        >>> ledger.allowed(1, ["alice", "bob"])
        ['bob']
        """
        return [client for client in clients if self.refusal(round, client) is None]

    def use(self, round: int, clients: Iterable[str | int]) -> None:
        """The updates of these clients go into the weights; where one of them may not, that is an error, and none does.

        >>> Ledger(rounds=5, separation=2, participations=1).use(5, ["alice"])
        Traceback (most recent call last):
            ...
        dbcl.errors.ProtocolError: round 5: 'alice': the budget of 5 rounds is spent
        """
        names = [str(client) for client in clients]
        for name in names:
            reason = self.refusal(round, name) or ("counts once a round" if names.count(name) > 1 else None)
            if reason is not None:
                raise ProtocolError(f"round {round}: {shown(name)}: {reason}")
        for name in names:
            self._uses[name] = self.uses(name) + 1, round

    def uses(self, client: str | int) -> int:
        """How often this client's updates were used.

        >>> Ledger(rounds=5, separation=2, participations=1).uses("alice")
        0
        """
        return self._uses.get(str(client), (0, 0))[0]

    @property
    def most_uses(self) -> int:
        """How often the client with the most turns was used: what of the budget is spent."""
        return max((count for count, _ in self._uses.values()), default=0)

    def state(self) -> State:
        """What a checkpoint keeps; it belongs into the same file as the weights, so that nothing is counted twice.

        >>> ledger = Ledger(rounds=5, separation=2, participations=1)
        >>> ledger.use(0, ["alice"])
        >>> ledger.state().values
        {'rounds': 5, 'separation': 2, 'participations': 1, 'uses': {'alice': [1, 0]}}
        """
        rule = {"rounds": self.rounds, "separation": self.separation, "participations": self.participations}
        return State({**rule, "uses": {name: list(own) for name, own in self._uses.items()}}, {})

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave; the ledger of another rule is refused, since a budget cannot be changed."""
        rule = {"rounds": self.rounds, "separation": self.separation, "participations": self.participations}
        kept = {name: state.values.get(name) for name in rule}
        if kept != rule:
            raise ProtocolError(f"the checkpoint's ledger has the rule {shown(kept, 100)}, and this run {rule}")
        self._uses = {str(name): (int(count), int(last)) for name, (count, last) in state.values["uses"].items()}
