"""An open round: the noisy weights, a broadcast for each lane, and the lane of each client."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from dbcl import seeds
from dbcl.blinding import sketched
from dbcl.errors import ProtocolError
from dbcl.plan import SketchPlan
from dbcl.protocol.messages import Broadcast
from dbcl.protocol.validation import not_finite
from dbcl.round_plan import RoundPlan

DRAWN = 64
"""Number of lane permutations drawn at a time."""


class OpenRound:
    """The state of a round between `open_round` and `close_round`.

    Assigns clients to lanes in the order of their requests, and builds each lane's broadcast once.
    Each block of `lanes` clients is spread over all lanes by a permutation derived from the round's
    key. The lane sizes therefore differ by at most one client.

    Args:
        plan: The plan of all rounds.
        key: The round's key.
        drawn: The round's plan for the first lane.
        veiled: W + N. All lanes use the same noise; otherwise clients of different lanes could
            average the noise away.
        wire: Returns the transmission dtype of a tensor.
        asked: Clients that requested the broadcast before a checkpoint was written.
        steady: Assign clients to the same lanes in every round, given the same order of requests.

    >>> from dbcl import SketchConfig
    >>> plan = SketchPlan.from_model(torch.nn.Linear(4, 2), SketchConfig(coverage="all"))
    >>> veiled = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    >>> opened = OpenRound(plan, bytes(32), plan.draw(bytes(32), 0), veiled, lambda name: torch.float32)
    >>> sorted(opened.broadcast(client).plan.lane for client in ("alice", "bob"))
    [0, 1]
    """

    def __init__(
        self,
        plan: SketchPlan,
        key: bytes,
        drawn: RoundPlan,
        veiled: Mapping[str, Tensor],
        wire: Callable[[str], torch.dtype],
        asked: Iterable[str] = (),
        steady: bool = False,
    ) -> None:
        self.plan, self.veiled, self.round = plan, veiled, drawn.round
        self._key, self._drawn, self._wire, self._steady = key, drawn, wire, steady
        self._orders: list[list[int]] = []
        self._lanes: dict[str, int] = {}  # of the clients, in the order in which they asked first
        self._broadcasts: dict[int, Broadcast] = {}
        self._by_digest: dict[str, int] = {}
        self.first = self._made(0)
        for client in asked:  # their answers may be under way
            self.broadcast(client)

    def broadcast(self, client: str | None = None) -> Broadcast:
        """Return a client's broadcast, the same at every call.

        Without a name, return the broadcast of the first lane.
        """
        if client is None or self.plan.lanes == 1:
            return self.first
        return self._made(self._lane(client))

    def answered(self, digest: str, client: str) -> Broadcast:
        """Return the broadcast that an update answers, identified by the digest of its plan.

        For an unknown digest, return the first lane's broadcast.

        Raises:
            ProtocolError: The update answers another lane's broadcast than the client's.
        """
        lane = self._by_digest.get(digest)
        if lane is None:
            return self.first
        if self._lanes.get(client, lane) != lane:
            raise ProtocolError("answers another lane than its own")
        return self._broadcasts[lane]

    def lane_of(self, digest: str) -> int:
        """Return the lane with the given plan digest."""
        return self._by_digest[digest]

    def by_digest(self) -> dict[str, RoundPlan]:
        """Return the transmitted plans by digest."""
        return {digest: self._broadcasts[lane].plan for digest, lane in self._by_digest.items()}

    @property
    def asked(self) -> list[str]:
        """Clients that requested a broadcast, in the order of their first request."""
        return list(self._lanes)

    def _lane(self, client: str) -> int:
        if client not in self._lanes:
            block, number = divmod(len(self._lanes), self.plan.lanes)
            if block % DRAWN == 0 and number == 0:
                words = seeds.words(self._key, "lanes", block, n=DRAWN * self.plan.lanes)
                self._orders += words.reshape(DRAWN, -1).argsort(axis=1, kind="stable").tolist()
            self._lanes[client] = self._orders[0 if self._steady else block][number]
        return self._lanes[client]

    def _made(self, lane: int) -> Broadcast:
        if lane not in self._broadcasts:
            plan = self._drawn.in_lane(lane)
            leaving = {name: V.to(self._wire(name)) for name, V in sketched(self.veiled, plan).items()}
            wrong = not_finite(leaving)
            if wrong:
                raise ProtocolError(f"round {plan.round}: nothing leaves the server, {wrong[0]} holds NaN or infinity")
            self._broadcasts[lane] = Broadcast(plan, leaving, self.plan.least_veil)
            self._by_digest[plan.digest] = lane
        return self._broadcasts[lane]
