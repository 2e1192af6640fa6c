"""Server-side groups of clients with a common sum, and the size of their messages."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dbcl.config import SecAggConfig
from dbcl.errors import ProtocolError, plain
from dbcl.protocol.secagg.encoding import Encoding
from dbcl.protocol.secagg.keys import DIGEST, KEY, SEED, SIGNATURE
from dbcl.protocol.secagg.messages import (
    SEALED,
    Advert,
    Agreed,
    Agreement,
    Delivery,
    Masked,
    Member,
    Message,
    Reveal,
    Roster,
    Shares,
    Survivors,
    encode_message,
)
from dbcl.protocol.secagg.server import GroupRound
from dbcl.round_plan import RoundPlan

log = logging.getLogger(__name__)

GROUP = 64
"""Maximum number of clients in a group.

More clients are divided into several groups, whose sums are added. With distributed noise, there is
only one group.
"""


def groups(clients: Sequence[str], *, largest: int = GROUP) -> list[tuple[str, ...]]:
    """Divide clients into as few groups as possible, with sizes that differ by at most one.

    >>> [len(group) for group in groups([str(number) for number in range(100)])]
    [50, 50]
    """
    count = -(-len(clients) // largest) or 1
    return [tuple(clients[number::count]) for number in range(count)]


@dataclass(eq=False)
class Group:
    """A group in a round: its clients, its lane's plan, and the server side of the protocol.

    If `whole` is true, the group computes a sum only with all its clients.
    """

    clients: tuple[str, ...]
    plan: RoundPlan
    round: GroupRound
    whole: bool

    def of(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        return {client: answers[client] for client in self.clients if client in answers}

    def roster(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        self.round.refused |= {name: "gave no keys" for name in self.clients if name not in answers}
        roster = self.round.roster(answers)
        self._require_enough(roster.names)
        return dict.fromkeys(roster.names, encode_message(roster))

    def deliver(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        deliveries = self.round.deliver(answers)
        self._require_enough(deliveries)
        return {name: encode_message(each) for name, each in deliveries.items()}

    def survivors(self, answers: Mapping[str, bytes], record: Callable[[Sequence[str]], None]) -> dict[str, bytes]:
        survivors = self.round.survivors(answers)
        self.settle(survivors.survivors, record)
        return dict.fromkeys(survivors.survivors, encode_message(survivors))

    def settle(self, members: Sequence[str], record: Callable[[Sequence[str]], None]) -> None:
        """Fix the clients of the sum.

        Args:
            members: Clients whose masked updates arrived.
            record: Records the sum as revealed, or raises `ProtocolError` if the sum must not be
                revealed.

        Raises:
            ProtocolError: The sum must not be revealed.
        """
        self._require_enough(members)
        record(members)

    def agreed(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        agreed = self.round.agreed(answers)
        assert self.round.last is not None
        return dict.fromkeys(self.round.last.survivors, encode_message(agreed))

    def failed(self, error: ProtocolError) -> dict[str, str]:
        reason = plain(str(error).split("\n")[0], 300)
        log.warning("a group of %s clients is left out: %s", len(self.clients), reason)
        return {client: self.round.refused.get(client, reason) for client in self.clients}

    def _require_enough(self, present: Collection[str]) -> None:
        fewest = max(self.round.config.min_cohort, self.round.config.threshold(len(self.clients)))
        if len(present) < fewest:
            raise ProtocolError(f"{len(present)} clients have answered, and {fewest} are needed: nothing is added")
        lost = sorted(set(self.clients) - set(present))
        if self.whole and lost:
            why = "; ".join(f"{name} {self.round.refused.get(name, 'is missing')}" for name in lost)
            raise ProtocolError(f"the group adds up with all its {len(self.clients)} clients or not at all: {why}")


def traffic(names: Sequence[str], length: int, config: SecAggConfig, encoding: Encoding) -> tuple[int, int]:
    """Return the bytes of a group's round, down and up, without the broadcasts.

    The sizes are extrapolated from one client's messages.

    >>> from dbcl.protocol.secagg.encoding import encoding_of
    >>> config = SecAggConfig(clip=1.0, min_cohort=3)
    >>> down, up = traffic(("ann", "bob", "cleo"), 1000, config, encoding_of(config, None))
    >>> up > 3 * 1000 * 18 // 8
    True
    """
    count, key, seal = len(names), bytes(KEY), bytes(SEALED)
    words, others = (length + encoding.more_words) * encoding.bits(count), dict.fromkeys(names[1:], seal)
    digests, signatures = (dict.fromkeys(names[1:], bytes(size)) for size in (2 * DIGEST, SIGNATURE))
    members = tuple(Member(name, key, key, key, bytes(SIGNATURE)) for name in names)
    up: list[Message] = [
        Advert(0, key, names[0], key, key, key, bytes(SIGNATURE)),
        Shares(0, key, key, bytes(SIGNATURE), others, dict.fromkeys(names, bytes(2 * DIGEST))),
        Masked(0, key, bytes(-(-words // 8))),
        Agreement(0, key, bytes(SIGNATURE)),
        Reveal(0, key, dict.fromkeys(names, bytes(SEED))),
    ]
    signed = dict.fromkeys(names, bytes(SIGNATURE))
    agreed = config.threshold(count), config.colluders(count), config.clip, config.weight_cap, length
    down: list[Message] = [
        Roster(0, key, key, *agreed, members),
        Delivery(0, key, others, digests, signatures),
        Survivors(0, key, tuple(names), tuple(names)),
        Agreed(0, key, signed),
    ]
    sizes = [sum(len(encode_message(message)) for message in messages) for messages in (down, up)]
    return count * sizes[0], count * sizes[1]
