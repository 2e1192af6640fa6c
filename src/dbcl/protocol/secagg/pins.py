"""Trust on first use: keys that nobody vouches for, each of which is remembered from the first time it is seen."""

from collections.abc import Iterable, Mapping

from dbcl.errors import ProtocolError, shown
from dbcl.protocol.inspection import is_name
from dbcl.protocol.secagg.keys import KEY, Registry
from dbcl.state import State


class FirstUse(Registry):
    """Takes a name that it has not seen by whatever key it has, and refuses another key from then on.

    So nobody can step into the place of a client that is known. Who is new is not asked where it comes from: a server
    can invent as many new clients as it likes, at any time. Only a `Registry` from elsewhere helps against that.

    >>> from dbcl.protocol.secagg import Identity
    >>> known, alice = FirstUse(), Identity(bytes(32))
    >>> known.problem("alice", alice.public)
    >>> known.learn([("alice", alice.public)])
    >>> known.problem("alice", Identity().public)
    "'alice' is known by another key"
    >>> known.problem("bob", alice.public)
    "'bob' has the key of 'alice'"
    """

    def __init__(self, known: Mapping[str, bytes] | None = None) -> None:
        super().__init__(dict(known or {}))

    def problem(self, name: str, public: bytes) -> str | None:
        """Why a client cannot be who it is said to be; None where it is new."""
        if name in self.known:
            return super().problem(name, public)
        other = next((each for each, key in self.known.items() if key == public), None)
        return None if other is None else f"{shown(name)} has the key of {shown(other)}"

    def learn(self, members: Iterable[tuple[str, bytes]]) -> None:
        """Remember the names and keys of clients that have signed with them; what is known stays as it is."""
        for name, public in members:
            self.known.setdefault(name, public)  # type: ignore[attr-defined]

    def state(self) -> State:
        """What is kept.

        >>> FirstUse({"alice": bytes(2)}).state().values
        {'known': {'alice': '0000'}}
        """
        return State({"known": {name: public.hex() for name, public in self.known.items()}}, {})

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave."""
        try:
            known = {name: bytes.fromhex(key) for name, key in state.values["known"].items()}
        except (KeyError, AttributeError, TypeError, ValueError):
            known = {"": b""}
        if not all(is_name(name) and len(key) == KEY for name, key in known.items()):
            raise ProtocolError("the state does not say who is known by which key")
        object.__setattr__(self, "known", known)
