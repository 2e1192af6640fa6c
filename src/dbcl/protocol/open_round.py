"""A round while it is open: the veiled weights, a broadcast for each lane, and which client is in which lane."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from dbcl import seeds
from dbcl.blind import sketched
from dbcl.errors import ProtocolError
from dbcl.plan import SketchPlan
from dbcl.protocol.admission import not_finite
from dbcl.protocol.messages import Broadcast
from dbcl.round_plan import RoundPlan

Place = tuple[int, int]
"""A group of clients, and a lane in it."""
DRAWN = 64
"""For so many groups the order of the lanes is drawn at once."""


class OpenRound:
    """Spreads the clients of a round over its lanes as they ask, and makes the broadcast of each lane once.

    Of every `lanes` clients that ask, each gets another lane, in an order that follows from the round's key: so lanes
    differ by one client at most. `veiled` is W + N: all lanes show the same noise, or clients of different lanes could
    average it away. `asked` are those who had asked before a checkpoint was written. With `steady` clients that ask in
    the same order are in a lane together in every round, whichever lane that is.

    >>> plan = SketchPlan.of(torch.nn.Linear(4, 2), cover="all")
    >>> draw = lambda group: plan.draw(bytes(32), 0)
    >>> veiled = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    >>> opened = OpenRound(plan, bytes(32), draw, veiled, lambda name: torch.float32)
    >>> sorted(opened.broadcast(client).plan.lane for client in ("alice", "bob"))
    [0, 1]
    """

    def __init__(
        self,
        plan: SketchPlan,
        key: bytes,
        draw: Callable[[int], RoundPlan],
        veiled: Mapping[str, Tensor],
        wire: Callable[[str], torch.dtype],
        asked: Iterable[str] = (),
        steady: bool = False,
    ) -> None:
        self.plan, self._key, self._draw, self.veiled, self._wire = plan, key, draw, veiled, wire
        self._steady = steady
        self._orders: list[list[int]] = []  # of the lanes, for as many clients in turn
        self._places: dict[str, Place] = {}  # of the clients, in the order in which they asked first
        self._broadcasts: dict[Place, Broadcast] = {}
        self._by_digest: dict[str, Place] = {}
        self._drawn: dict[int, RoundPlan] = {}  # the plan of each group, in the first lane
        self.first = self._made((0, 0))
        for client in asked:  # their answers may be under way
            self.broadcast(client)

    def broadcast(self, client: str | None = None) -> Broadcast:
        """What a client receives, the same at every call; that of the first lane for one that is not named."""
        if client is None or self.plan.lanes == 1:
            return self.first
        return self._made(self._place(client))

    def answered(self, digest: str, client: str) -> Broadcast:
        """The broadcast that an update answers by its plan; the first where there is none such, for the door to say.

        A client that was given one lane must not answer in another.
        """
        place = self._by_digest.get(digest)
        if place is None:
            return self.first
        if self._places.get(client, place) != place:
            raise ProtocolError("answers another lane than its own")
        return self._broadcasts[place]

    def lane_of(self, digest: str) -> int:
        """The lane that a plan is of."""
        return self._by_digest[digest][1]

    def by_digest(self) -> dict[str, RoundPlan]:
        """The plans that were sent, by their digests."""
        return {digest: self._broadcasts[place].plan for digest, place in self._by_digest.items()}

    @property
    def asked(self) -> list[str]:
        """Who has asked, in the order in which they first did."""
        return list(self._places)

    def _place(self, client: str) -> Place:
        if client not in self._places:
            block, number = divmod(len(self._places), self.plan.lanes)
            if block % DRAWN == 0 and number == 0:
                words = seeds.words(self._key, "lanes", block, n=DRAWN * self.plan.lanes)
                self._orders += words.reshape(DRAWN, -1).argsort(axis=1, kind="stable").tolist()
            order = self._orders[0 if self._steady else block]
            self._places[client] = (block if self.plan.grouped else 0), order[number]
        return self._places[client]

    def _made(self, place: Place) -> Broadcast:
        if place not in self._broadcasts:
            group, lane = place
            if group not in self._drawn:
                self._drawn[group] = self._draw(group)
            plan = self._drawn[group].in_lane(lane)
            leaving = {name: V.to(self._wire(name)) for name, V in sketched(self.veiled, plan).items()}
            wrong = not_finite(leaving)
            if wrong:
                raise ProtocolError(f"round {plan.round}: nothing leaves the server, {wrong[0]} holds NaN or infinity")
            self._broadcasts[place] = Broadcast(plan, leaving, self.plan.least_veil)
            self._by_digest[plan.digest] = place
        return self._broadcasts[place]
