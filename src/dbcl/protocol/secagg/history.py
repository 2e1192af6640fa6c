"""History of revealed sums. Groups of different sums must be equal or disjoint.

Near the end of training, a client's updates in two rounds are similar, so an adversary can combine
sums over different groups. The difference of the sums over a group with and without a client is
that client's update (So et al. 2021). Four groups suffice even if no two of them differ by one
client: (A1 + A2 + v) - (A1 + B1) - (A2 + B2) + (B1 + B2) = v. No client is in all four groups, so
no client could detect the attack. If groups are equal or disjoint, combinations of their sums
reveal only these sums. Each client can check this locally: all lists that it signs must be the
same.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from dbcl.errors import ProtocolError, plain, shown
from dbcl.privacy import NoiseShares
from dbcl.privacy.attendance import AttendanceLog, Rows
from dbcl.protocol.inspection import is_name
from dbcl.state import State


class SumHistory:
    """Stores the groups with revealed sums, and rejects groups that partly overlap with them.

    >>> history = SumHistory()
    >>> history.add(["ann", "bob", "cleo"])
    >>> history.add(["cleo", "ann", "bob"])  # as often as it likes
    >>> history.group_of("bob"), history.group_of("dan")
    (('ann', 'bob', 'cleo'), None)
    >>> history.add(["ann", "bob"])
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: a sum without cleo, who was in the group before, is not revealed: ...
    """

    def __init__(self) -> None:
        self._groups: dict[str, tuple[str, ...]] = {}

    def group_of(self, client: str) -> tuple[str, ...] | None:
        """Return the sorted names of a client's group, including the client, or None."""
        return self._groups.get(client)

    def check_isolation(self, names: Iterable[str]) -> None:
        """Raise `ProtocolError` if combining the sum with earlier sums could isolate a client."""
        group = tuple(sorted(names))
        for client in group:
            before = self._groups.get(client)
            if before is not None and before != group:
                missing, added = sorted(set(before) - set(group)), sorted(set(group) - set(before))
                who = f"without {plain(missing[0])}, who was" if missing else f"with {plain(added[0])}, who was not"
                raise ProtocolError(
                    f"a sum {who} in the group before, is not revealed: with the group's earlier sums it would show "
                    "what one client or a few contribute"
                )

    def add(self, names: Iterable[str]) -> None:
        """Record that the sum over the given clients may be revealed from now on."""
        group = tuple(sorted(names))
        self.check_isolation(group)
        self._groups |= dict.fromkeys(group, group)

    def state(self) -> State:
        """Return the state for a checkpoint.

        >>> history = SumHistory()
        >>> history.add(["bob", "ann"])
        >>> history.state().values
        {'groups': [['ann', 'bob']]}
        """
        return State({"groups": [list(group) for group in dict.fromkeys(self._groups.values())]}, {})

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        groups = state.values.get("groups")
        if not isinstance(groups, list) or not all(isinstance(own, list) and all(map(is_name, own)) for own in groups):
            raise ProtocolError("the checkpoint does not say which clients were in a sum together")
        self._groups = {}
        for group in groups:
            self.add(group)


class GroupRule(ABC):
    """A client's record of its groups, and its rule for rejecting groups that isolate a client."""

    @abstractmethod
    def check_roster(self, round: int, names: tuple[str, ...]) -> None:
        """Raise `ProtocolError` if the client must not join this roster.

        The check applies even if the client never signs a list of survivors.
        """

    def learn(self, round: int, attendance: Rows) -> None:  # noqa: B027  most need none
        """Store the attendance of earlier rounds, as stated in a roster.

        Raises:
            ProtocolError: The attendance contradicts the client's own record or violates the plan.
        """

    @abstractmethod
    def mask(self, round: int, names: tuple[str, ...]) -> None:
        """Record that the client sends a masked vector for a roster."""

    @abstractmethod
    def check_list(self, round: int, survivors: tuple[str, ...]) -> None:
        """Raise `ProtocolError` if the client must not sign this list of survivors."""

    @abstractmethod
    def sign(self, round: int, survivors: tuple[str, ...]) -> None:
        """Record that the client has signed a list of survivors."""

    @abstractmethod
    def state(self) -> State:
        """Return the state that must be on disk before the client sends an answer."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""


class StandingGroup(GroupRule):
    """Rule for sums without noise: a client stays in the first group whose list it signs.

    Sums without noise must be over equal or disjoint groups. Before its first signature, a client
    may have sent a masked vector for a roster. Other clients may have signed the list of this
    roster, so the client afterwards accepts only rosters without additional clients.
    """

    def __init__(self) -> None:
        self.history = SumHistory()
        self._masked: tuple[str, ...] | None = None

    def check_roster(self, round: int, names: tuple[str, ...]) -> None:
        self.history.check_isolation(names)
        others = set(names) - set(names if self._masked is None else self._masked)
        if others:
            raise ProtocolError(
                f"a masked update has left for a group without {shown(min(others))} and may be in its sum; this client "
                "adds up with clients of that group only"
            )

    def mask(self, round: int, names: tuple[str, ...]) -> None:
        self._masked = names

    def check_list(self, round: int, survivors: tuple[str, ...]) -> None:
        self.history.check_isolation(survivors)

    def sign(self, round: int, survivors: tuple[str, ...]) -> None:
        self.history.add(survivors)

    def state(self) -> State:
        own = {"masked": None if self._masked is None else list(self._masked)}
        return State({**self.history.state().values, **own}, {})

    def load_state(self, state: State) -> None:
        masked = state.values.get("masked")
        if masked is not None and not (isinstance(masked, list) and all(map(is_name, masked))):
            raise ProtocolError("the state does not say for which group an update was masked")
        self.history.load_state(state)
        self._masked = None if masked is None else tuple(masked)


class OneSumARound(GroupRule):
    """Rule for sums with noise shares: one sum per round, over any group.

    Two sums over different groups in one round would reveal the difference of the groups with the
    noise of only a few clients. A client therefore masks its vector of a round for one roster only
    and signs one list of survivors. Two lists of one roster cannot both have enough signatures
    (`SecAggConfig`).

    Args:
        steady: The group of the first round is used in all rounds. Noise with correlation between
            rounds requires this: the accountant assumes the same noise streams in every sum.

    >>> rule = OneSumARound()
    >>> rule.mask(3, ("ann", "bob", "cleo"))
    >>> rule.check_roster(3, ("ann", "bob", "cleo"))
    >>> rule.check_roster(4, ("ann", "dan", "eve"))
    >>> rule.check_roster(3, ("ann", "bob"))
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 3: a masked vector has left for another group, and a round has one sum
    """

    def __init__(self, *, steady: bool = False) -> None:
        self._steady = steady
        self._masked: tuple[int, tuple[str, ...]] | None = None
        self._signed: tuple[int, tuple[str, ...]] | None = None

    def check_roster(self, round: int, names: tuple[str, ...]) -> None:
        if self._masked is None or self._masked[1] == names:
            return
        if self._masked[0] == round:
            raise ProtocolError(f"round {round}: a masked vector has left for another group, and a round has one sum")
        if self._steady:
            raise ProtocolError(
                f"round {round}: a masked vector has left for another group, and the guarantee is planned for the same "
                "clients in every round"
            )

    def mask(self, round: int, names: tuple[str, ...]) -> None:
        self.check_roster(round, names)
        self._masked = round, names

    def check_list(self, round: int, survivors: tuple[str, ...]) -> None:
        if self._signed is not None and self._signed[0] == round and self._signed[1] != survivors:
            raise ProtocolError(f"round {round}: another list of survivors was signed, and a round has one sum")

    def sign(self, round: int, survivors: tuple[str, ...]) -> None:
        self.check_list(round, survivors)
        self._signed = round, survivors

    def state(self) -> State:
        kept = {"masked": self._masked, "signed": self._signed}
        return State({name: None if own is None else [own[0], list(own[1])] for name, own in kept.items()}, {})

    def load_state(self, state: State) -> None:
        def read(own: Any) -> tuple[int, tuple[str, ...]] | None:
            return None if own is None else (int(own[0]), tuple(map(str, own[1])))

        try:
            self._masked, self._signed = read(state.values["masked"]), read(state.values["signed"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError("the state does not say what was masked and signed in the last round") from error


class AccountedAttendance(OneSumARound):
    """Rule for sums with correlated noise shares and possible dropouts.

    Before signing a list of survivors, a client computes mu from the attendance in all revealed
    sums, including this list. It signs only if the plan permits this mu. The client keeps its own
    attendance record (`AttendanceLog`).

    >>> from dbcl.privacy import PrivacyPlan
    >>> plan = PrivacyPlan(
    ...     epsilon=8, delta=1e-5, clip=1.0, unit="example", noise_by="clients", colluders=1, fewest=4, separation=2,
    ...     rounds=8, clients=5, cohort=5, examples=500, batch=250, values=10,
    ... )
    >>> rule = AccountedAttendance(plan.shares)
    >>> rule.sign(0, ("ann", "bob", "cleo", "dan"))
    >>> rule.learn(1, ((0, ("ann", "bob", "cleo", "eve")),))
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: round 1: the roster states another attendance of round 0 than the list that was signed
    """

    def __init__(self, shares: NoiseShares) -> None:
        super().__init__()
        self.log = AttendanceLog(shares)

    def learn(self, round: int, attendance: Rows) -> None:
        self.log.learn(round, attendance)

    def check_list(self, round: int, survivors: tuple[str, ...]) -> None:
        super().check_list(round, survivors)
        self.log.check(round, survivors)

    def sign(self, round: int, survivors: tuple[str, ...]) -> None:
        super().sign(round, survivors)
        self.log.add(round, survivors)

    def state(self) -> State:
        return State({**super().state().values, "attendance": self.log.state().values}, {})

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.log.load_state(State(state.values.get("attendance", {}), {}))
