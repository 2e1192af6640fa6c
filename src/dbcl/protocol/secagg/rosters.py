"""Who was in which sum: what differences of sums over rounds would show of single clients.

A client's updates of two rounds are much alike near the end of training. So the sum over a group and the sum over the
same group without one client, in another round, give away that client (So et al. 2021). More generally a client is
singled out where some combination of all lists of members has it alone. That is decided here, exactly, modulo a prime.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dbcl.errors import ProtocolError
from dbcl.protocol.inspection import is_name
from dbcl.state import State

PRIME = (1 << 31) - 1


class Rosters:
    """Remembers the members of sums; a list that tells nothing new takes no room.

    Fixed batches of clients never single anybody out, however often they come.

    >>> rosters = Rosters()
    >>> rosters.add(["ann", "bob", "cleo"])
    >>> rosters.singled_out(["ann", "bob"]), rosters.singled_out(["ann", "bob", "cleo"])
    (['cleo'], [])
    """

    def __init__(self) -> None:
        self._lists: list[list[str]] = []
        self._columns: dict[str, int] = {}
        self._rows: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)  # in reduced echelon form

    def singled_out(self, names: Sequence[str]) -> list[str]:
        """The clients that a sum over these, with all sums before, would show by themselves."""
        columns = dict(self._columns)
        for name in names:
            columns.setdefault(name, len(columns))
        rows = _with(_widened(self._rows, len(columns)), [columns[name] for name in names])
        alone = {int(row.nonzero()[0][0]) for row in rows if np.count_nonzero(row) == 1}
        return sorted(name for name, column in columns.items() if column in alone)

    def add(self, names: Sequence[str]) -> None:
        """A sum over these has been shown."""
        for name in names:
            self._columns.setdefault(name, len(self._columns))
        before = _widened(self._rows, len(self._columns))
        self._rows = _with(before, [self._columns[name] for name in names])
        if len(self._rows) > len(before):
            self._lists.append(list(names))

    def state(self) -> State:
        """What a checkpoint keeps.

        >>> rosters = Rosters()
        >>> rosters.add(["ann", "bob"])
        >>> rosters.state().values
        {'lists': [['ann', 'bob']]}
        """
        return State({"lists": [list(names) for names in self._lists]}, {})

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave."""
        lists = state.values.get("lists")
        if not isinstance(lists, list) or not all(isinstance(own, list) and all(map(is_name, own)) for own in lists):
            raise ProtocolError("the checkpoint does not say who was in which sum")
        self.__init__()  # type: ignore[misc]
        for names in lists:
            self.add(names)


def _widened(rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _with(rows: NDArray[np.int64], members: Sequence[int]) -> NDArray[np.int64]:
    """The reduced echelon form with one more row, which has ones at the members."""
    row = np.zeros(rows.shape[1], dtype=np.int64)
    row[list(members)] = 1
    for each in rows:
        pivot = int(each.nonzero()[0][0])
        if row[pivot]:
            row = (row - row[pivot] * each) % PRIME
    if not row.any():
        return rows
    pivot = int(row.nonzero()[0][0])
    row = row * pow(int(row[pivot]), -1, PRIME) % PRIME
    rest = (rows - rows[:, [pivot]] * row) % PRIME
    return np.vstack([rest, row])
