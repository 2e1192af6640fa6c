"""Secure aggregation for a server and its clients, round after round, over any transport.

The server asks through a function that carries bytes to clients and brings back what they answer: `SecureRounds.play`.
A client answers with `SecureClient`. Lanes are groups, since updates of different lanes cannot be added before they are
lifted; a lane of more than 64 clients is several.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.blind import lift
from dbcl.errors import ConfigError, ProtocolError, plain
from dbcl.privacy import clip_factor, norm
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.codec import encode
from dbcl.protocol.messages import Broadcast, RoundReport, Tally, Update
from dbcl.protocol.secagg.client import ClientRound
from dbcl.protocol.secagg.keys import DIGEST, KEY, SEED, SIGNATURE, Identity, Registry
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
    decode_message,
    encode_message,
)
from dbcl.protocol.secagg.pins import FirstUse
from dbcl.protocol.secagg.resume import resumed_round, round_state
from dbcl.protocol.secagg.ring import Ring
from dbcl.protocol.secagg.rosters import Rosters
from dbcl.protocol.secagg.server import GroupRound, Total
from dbcl.protocol.secagg.terms import Terms, groups
from dbcl.protocol.server import Server
from dbcl.round_plan import RoundPlan
from dbcl.state import State, join

log = logging.getLogger(__name__)

Ask = Callable[[Mapping[str, bytes]], Mapping[str, bytes]]
"""Carries a message to each client, and brings back the answers of those that gave one."""


@dataclass
class SecureClient:
    """A client that answers a server's five messages: the broadcast with `begin`, all others with `answer`.

    It keeps the keys of one round. `rosters` are the sums that it has been in; it does not help with one that would
    single anybody out. A client that is another process at every message keeps its `state`, and writes it before an
    answer leaves: two answers from one state could give the update away.

    >>> client = SecureClient("ann", Identity(), Terms(bound=4.0))
    >>> client.answer(b"")
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: ann is in no round: it begins with a broadcast
    """

    name: str
    identity: Identity
    terms: Terms
    registry: Registry | None = None
    rosters: Rosters = field(default_factory=Rosters)
    _round: ClientRound | None = None
    _values: NDArray[np.float64] | None = None
    _examples: int = 0

    def begin(self, broadcast: Broadcast, update: Update, rounding: np.random.Generator | None = None) -> bytes:
        """Take part in a round with an update, clipped to the public bound: gives the client's keys."""
        if (update.round, update.plan) != (broadcast.round, broadcast.plan.digest):
            raise ProtocolError(f"the update of {self.name} does not answer this broadcast")
        self._values, self._examples = bounded(update, broadcast.plan, self.terms.bound), update.examples
        self._round = ClientRound(
            self.name,
            self.identity,
            broadcast.round,
            broadcast_digest(broadcast),
            bytes.fromhex(broadcast.plan.digest),
            self.terms,
            self.registry,
            rounding,
        )
        return encode_message(self._round.advertise())

    def answer(self, data: bytes) -> bytes:
        """Answer the next message of the round; anything else is refused."""
        if self._round is None or self._values is None:
            raise ProtocolError(f"{self.name} is in no round: it begins with a broadcast")
        match self._round.next_step:
            case "share":
                roster = decode_message(Roster, data)
                shares = self._round.share(roster)
                if isinstance(self.registry, FirstUse):
                    self.registry.learn((member.name, member.identity) for member in roster.members)
                return encode_message(shares)
            case "mask":
                delivery = decode_message(Delivery, data)
                masked = self._round.mask(delivery, self._values, self._examples)
                self._values = self._values[:0]  # it is not needed any more
                return encode_message(masked)
            case "agree":
                survivors = decode_message(Survivors, data)
                refuse_singling(self.rosters, survivors.survivors)
                agreement = self._round.agree(survivors)
                self.rosters.add(survivors.survivors)
                return encode_message(agreement)
            case "reveal":
                reveal = self._round.reveal(decode_message(Agreed, data))
                self._round = self._values = None
                return encode_message(reveal)
        raise ProtocolError(f"{self.name} has nothing more to say in this round")

    def state(self) -> State:
        """All that another process needs to answer the next message, the secrets too.

        >>> client = SecureClient("ann", Identity(), Terms(bound=4.0))
        >>> again = SecureClient("ann", Identity(), Terms(bound=4.0))
        >>> again.load_state(client.state())
        >>> again.identity.public == client.identity.public
        True
        """
        values = {"name": self.name, "identity": self.identity._secret.hex(), "examples": self._examples}
        tensors = {} if self._values is None else {"update": torch.from_numpy(self._values)}
        parts = {"client": State(values, tensors), "rosters": self.rosters.state()}
        if self._round is not None:
            parts["round"] = round_state(self._round)
        if isinstance(self.registry, FirstUse):
            parts["registry"] = self.registry.state()
        return join(**parts)

    def load_state(self, state: State) -> None:
        """Go on from what `state` gave: with its identity, in its round."""
        try:
            own = state.part("client")
            name, identity = own.values["name"], Identity(bytes.fromhex(own.values["identity"]))
            rosters, self._examples = state.part("rosters"), int(own.values["examples"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the state of {self.name} cannot be read ({type(error).__name__})") from error
        if name != self.name:
            raise ProtocolError(f"the state is of {plain(str(name))}, and this is {self.name}")
        self.identity = identity
        self.rosters.load_state(rosters)
        if isinstance(self.registry, FirstUse):
            self.registry.load_state(state.part("registry") if "registry" in state.values else FirstUse().state())
        self._round = self._values = None
        if "round" in state.values:
            self._round = resumed_round(state.part("round"), identity, self.terms, self.registry)
            self._values = own.tensors.get("update", torch.zeros(0, dtype=torch.float64)).numpy()


class SecureRounds:
    """Plays rounds of a server under secure aggregation: it learns a sum for each lane, and who is in it.

    The server must be made with `steady_lanes=True`. A group that loses too many clients, or whose sum would single
    somebody out, is left out of the round and named in the report; where no group is left, that is a `ProtocolError`,
    and nothing has changed. `registry` is whom the server itself knows: clients that these refuse would refuse all.
    """

    def __init__(self, server: Server, terms: Terms, registry: Registry | None = None) -> None:
        problems = []
        if not server.steady_lanes and server.plan.lanes > 1:
            problems.append("its lanes change from round to round: make it with steady_lanes=True")
        if server.plan.grouped:
            problems.append("every group of clients has buckets of its own, so that there is nothing to add")
        if server.statistics:
            problems.append(
                f"{min(server.statistics)} is what clients measure, which has no public bound; use a normalisation "
                "without running statistics, such as GroupNorm"
            )
        if server.privacy is not None:
            length = sum(math.prod(tensor.shape) for tensor in server.plan.tensors)
            stretched = Ring(terms.bound, 2).longest(length)
            if server.privacy.unit != "client" or stretched > server.privacy.clip * (1 + 1e-9):
                problems.append(
                    f"rounding may stretch an update of length {terms.bound:g} to {stretched:.6g}, and the guarantee "
                    f"is for {server.privacy.unit}s clipped to {server.privacy.clip:g}: lower the bound"
                )
        if problems:
            raise ConfigError("\n  - ".join(["this server cannot add securely:", *problems]))
        self.server, self.terms, self.registry, self.rosters = server, terms, registry, Rosters()
        self.lost: dict[str, str] = {}
        """Who was lost in the last round by its own doing, and why; others of its group may have been left out."""
        self.sent_up = self.sent_down = 0
        """Bytes of the last round, without the broadcasts."""
        self.totals: list[tuple[RoundPlan, Total]] = []
        """What the server learned in the last round: the sum of each group, and the plan of its lane."""

    def play(self, clients: Sequence[str], begin: Ask, ask: Ask) -> RoundReport:
        """Play one round: `begin` carries the broadcasts, and clients that have trained answer with their keys."""
        self.sent_up, self.sent_down, self.lost = 0, 0, {}
        sent = {client: self.server.open_round(client) for client in clients}
        playing, refused = self.grouped(sent), dict[str, str]()
        alive = list(playing)
        answers = begin({client: encode(broadcast) for client, broadcast in sent.items()})
        self.sent_up += sum(map(len, answers.values()))
        steps: list[Callable[[Group, Mapping[str, bytes]], Mapping[str, bytes]]] = [
            Group.roster,
            Group.deliver,
            lambda group, own: group.survivors(own, self.rosters),  # clients count a sum that they have signed
            Group.agreed,
        ]
        for step in steps:
            down: dict[str, bytes] = {}
            for group in list(alive):
                try:
                    down |= step(group, group.of(answers))
                except ProtocolError as error:
                    refused |= group.failed(error)
                    alive.remove(group)
            self.sent_down += sum(map(len, down.values()))
            answers = ask(down) if down else {}
            self.sent_up += sum(map(len, answers.values()))
        totals: list[tuple[RoundPlan, Total]] = []
        for group in alive:
            try:
                total = group.round.total(group.of(answers))
            except ProtocolError as error:
                refused |= group.failed(error)
                continue
            totals.append((group.plan, total))
            refused |= group.round.refused
        self.lost = {name: reason for group in playing for name, reason in group.round.refused.items()}
        return self.close(totals, refused)

    def harmless(self, clients: Sequence[str]) -> list[str]:
        """Of clients that could take part, those whose sums are large enough and would single nobody out.

        Where one of a group that was together before is missing, one more than may collude are left out with it: then
        the difference of the sums shows the missing one together with an honest other one, or more.
        """
        lanes: dict[str, list[str]] = {}
        for client in clients:
            lanes.setdefault(self.server.open_round(client).plan.digest, []).append(client)
        chosen: list[str] = []
        for members in lanes.values():
            out = self.terms.colluders(len(members) + 1) + 1
            turned = (members[start:] + members[:start] for start in range(len(members)))
            for each in chain([members], (names[:-out] for names in turned)):
                if len(each) >= self.terms.min_cohort and not self.rosters.singled_out(each):
                    chosen += each
                    break
        return [client for client in clients if client in chosen]

    def grouped(self, sent: Mapping[str, Broadcast]) -> list["Group"]:
        """The clients of each lane, in groups that are large enough."""
        lanes: dict[str, list[str]] = {}
        for client, broadcast in sent.items():
            lanes.setdefault(broadcast.plan.digest, []).append(client)
        made = []
        for members in lanes.values():
            broadcast = sent[members[0]]
            own = broadcast_digest(broadcast), bytes.fromhex(broadcast.plan.digest), length_of(broadcast.plan)
            for clients in groups(members):
                if len(clients) < self.terms.min_cohort:
                    raise ProtocolError(
                        f"round {broadcast.round}: a lane has {len(clients)} clients, and {self.terms.min_cohort} are "
                        "the fewest whose sum may be shown: the remedy is a larger cohort or fewer lanes"
                    )
                side = GroupRound(broadcast.round, *own, self.terms, registry=self.registry)
                made.append(Group(clients, broadcast.plan, side))
        return made

    def close(self, totals: Sequence[tuple[RoundPlan, Total]], refused: Mapping[str, str]) -> RoundReport:
        """Step on the sums of the groups, each with the plan of its lane."""
        reasons = tuple(f"{name}: {reason}" for name, reason in sorted(refused.items()))
        if not totals:
            head = f"round {self.server.round}: no sum could be made, and nothing has changed"
            raise ProtocolError("\n  - ".join([head, *reasons]))
        self.totals = list(totals)
        privacy = self.server.privacy
        whole = sum(total.weight for _, total in totals) if privacy is None else float(privacy.per_round)
        sums: dict[str, Tensor] = {}
        like = self.server.weights()
        for plan, total in totals:
            part = {name: tensor.to(like[name]) for name, tensor in shaped(plan, total.values / whole).items()}
            for name, change in lift(plan, part).items():
                sums[name] = sums[name] + change if name in sums else change
        senders = tuple(name for _, total in totals for name in total.members)
        lanes = tuple(
            sum(len(total.members) for plan, total in totals if plan.lane == lane)
            for lane in range(self.server.plan.lanes)
        )
        tally = Tally(refused=reasons, senders=senders, lanes=lanes)
        return self.server.close(Aggregate(sums, weight=1.0, count=len(senders), lifted=True), tally)

    def state(self) -> State:
        """What a checkpoint keeps beside the server's state: who was in which sum."""
        return self.rosters.state()

    def load_state(self, state: State) -> None:
        """Go back to what `state` gave."""
        self.rosters.load_state(state)


@dataclass(eq=False)
class Group:
    """A group in a round: its clients, the plan of its lane, and the server's side of the protocol."""

    clients: tuple[str, ...]
    plan: RoundPlan
    round: GroupRound

    def of(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        return {client: answers[client] for client in self.clients if client in answers}

    def roster(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        self.round.refused |= {name: "gave no keys" for name in self.clients if name not in answers}
        roster = self.round.roster(answers)
        if isinstance(self.round.registry, FirstUse):
            self.round.registry.learn((member.name, member.identity) for member in roster.members)
        return dict.fromkeys(roster.names, encode_message(roster))

    def deliver(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: encode_message(each) for name, each in self.round.deliver(answers).items()}

    def survivors(self, answers: Mapping[str, bytes], rosters: Rosters) -> dict[str, bytes]:
        survivors = self.round.survivors(answers)
        refuse_singling(rosters, survivors.survivors)
        rosters.add(survivors.survivors)
        return dict.fromkeys(survivors.survivors, encode_message(survivors))

    def agreed(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        agreed = self.round.agreed(answers)
        assert self.round.last is not None
        return dict.fromkeys(self.round.last.survivors, encode_message(agreed))

    def failed(self, error: ProtocolError) -> dict[str, str]:
        reason = plain(str(error).split("\n")[0], 300)
        log.warning("a group of %s clients is left out: %s", len(self.clients), reason)
        return {client: self.round.refused.get(client, reason) for client in self.clients}


def refuse_singling(rosters: Rosters, names: Sequence[str]) -> None:
    """Refuse a sum that would show somebody alone, with those before.

    >>> rosters = Rosters()
    >>> rosters.add(["ann", "bob"])
    >>> refuse_singling(rosters, ["ann"])
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: with the sums of earlier rounds this one would show ann alone: who adds up together ...
    """
    alone = rosters.singled_out(names)
    if alone:
        raise ProtocolError(
            f"with the sums of earlier rounds this one would show {plain(alone[0])} alone: who adds up together must "
            "not change by one client"
        )


def bounded(update: Update, plan: RoundPlan, bound: float) -> NDArray[np.float64]:
    """An update's values in the order of its plan, clipped to the public bound."""
    tensors = {part.name: update.tensors[part.name] for part in plan.tensors}
    return flat(tensors) * clip_factor(norm(tensors), bound)


def broadcast_digest(broadcast: Broadcast) -> bytes:
    """What masks are bound to: of clients that were sent other bytes, they are others.

    >>> import dbcl
    >>> len(broadcast_digest(dbcl.Server(torch.nn.Linear(6, 2), cover="all").open_round()))
    32
    """
    return hashlib.sha256(encode(broadcast)).digest()


def traffic(names: Sequence[str], length: int, terms: Terms) -> tuple[int, int]:
    """Bytes that a group of so many clients sends in a round, down and up, counted on messages for the first of them.

    >>> down, up = traffic(("ann", "bob", "cleo"), 1000, Terms(bound=1.0, min_cohort=3))
    >>> up > 3 * 1000 * 18 // 8
    True
    """
    count, key, seal = len(names), bytes(KEY), bytes(SEALED)
    ring, others = Ring(terms.bound, count), dict.fromkeys(names[1:], seal)
    members = tuple(Member(name, key, key, key, bytes(SIGNATURE)) for name in names)
    up: list[Message] = [
        Advert(0, key, names[0], key, key, key, bytes(SIGNATURE)),
        Shares(0, key, key, others, dict.fromkeys(names, bytes(2 * DIGEST))),
        Masked(0, key, bytes(-(-(length + 1) * ring.bits // 8))),
        Agreement(0, key, bytes(SIGNATURE)),
        Reveal(0, key, dict.fromkeys(names, bytes(SEED))),
    ]
    signed = dict.fromkeys(names, bytes(SIGNATURE))
    agreed = terms.threshold(count), terms.colluders(count), terms.bound, terms.most, length
    down: list[Message] = [
        Roster(0, key, key, *agreed, members),
        Delivery(0, key, others, dict.fromkeys(names[1:], bytes(2 * DIGEST))),
        Survivors(0, key, tuple(names), tuple(names)),
        Agreed(0, key, signed),
    ]
    sizes = [sum(len(encode_message(message)) for message in messages) for messages in (down, up)]
    return count * sizes[0], count * sizes[1]


def length_of(plan: RoundPlan) -> int:
    """How many values an update of a plan has."""
    return sum(int(np.prod(tensor.sent_shape, dtype=np.int64)) for tensor in plan.tensors)


def flat(tensors: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """Tensors in a row, in their order, as float64.

    >>> flat({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    array([1., 1., 0.])
    """
    parts: list[NDArray[np.float64]] = [
        tensor.detach().cpu().double().reshape(-1).numpy() for tensor in tensors.values()
    ]
    return np.concatenate(parts)


def shaped(plan: RoundPlan, values: NDArray[np.float64]) -> dict[str, Tensor]:
    """The tensors of a plan that `flat` put in a row."""
    tensors, start = {}, 0
    for part in plan.tensors:
        count = int(np.prod(part.sent_shape, dtype=np.int64))
        tensors[part.name] = torch.from_numpy(values[start : start + count].copy()).reshape(part.sent_shape)
        start += count
    return tensors
