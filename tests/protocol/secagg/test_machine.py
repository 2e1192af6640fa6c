"""Servers and networks that do anything in any order, found by Hypothesis: what comes of it is a sum or a refusal."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dbcl.errors import ProtocolError
from dbcl.protocol.secagg import ClientRound, SigningKey, encode_message
from dbcl.protocol.secagg.keys import SEED
from dbcl.protocol.secagg.messages import Advert, Agreed, Agreement, Delivery, Masked, Reveal, Roster, Shares, Survivors
from dbcl.protocol.secagg.quantizer import Quantizer, packed
from protocol.secagg.conftest import BOUND, BROADCAST, LENGTH, PLAN, ROUND, Fleet, carried, easy_config, names

NAMES = names(4)
CONFIG = easy_config()
REACHED: Counter[str] = Counter()
"""How often the machines got somewhere."""


@dataclass
class Attempt:
    """One client in one attempt of the round, and what the server has of it."""

    client: ClientRound
    advert: Advert
    roster: Roster | None = None
    shares: Shares | None = None
    masked: Masked | None = None
    signed: list[tuple[Survivors, bytes]] = field(default_factory=list)
    reveal: Reveal | None = None
    held: dict[str, bytes] = field(default_factory=dict)


class HostileServer(RuleBasedStateMachine):
    """Sends any roster, any shares, any list and any signatures to any client, in any order, as often as it likes.

    Every client may be made to begin the round anew. The machine looks into the clients to know whose share is whose.
    """

    kind = ClientRound

    @initialize()
    def begin(self) -> None:
        self.identities = {name: SigningKey() for name in NAMES}
        self.values = {name: np.arange(1, LENGTH + 1) * (100 + place) / 4096 for place, name in enumerate(NAMES)}
        self.attempts: dict[str, list[Attempt]] = {name: [] for name in NAMES}
        self.rosters: list[Roster] = []
        self.received: list[bytes] = []
        for name in NAMES:
            self.join(name)
        self.add_roster([self.current(name).advert for name in NAMES])

    def join(self, name: str) -> None:
        client = self.kind(name, self.identities[name], ROUND, BROADCAST, PLAN, CONFIG)
        self.attempts[name].append(Attempt(client, client.advertise()))

    def current(self, name: str) -> Attempt:
        return self.attempts[name][-1]

    def take(self, message: object) -> None:
        self.received.append(encode_message(message))  # type: ignore[arg-type]

    def add_roster(self, adverts: list[Advert]) -> None:
        members, threshold = tuple(each.member for each in adverts), CONFIG.threshold(len(adverts))
        self.rosters.append(Roster(ROUND, BROADCAST, PLAN, threshold, 0, BOUND, 1, LENGTH, members))

    @rule(name=st.sampled_from(NAMES), really=st.integers(0, 4))
    def begin_anew(self, name: str, really: int) -> None:
        if really == 0 and len(self.attempts[name]) < 3:
            self.join(name)

    @rule(data=st.data())
    def make_roster(self, data: st.DataObject) -> None:
        """Of any adverts of this round: of clients that have begun anew since, too."""
        some = data.draw(st.sampled_from([tuple(NAMES), tuple(NAMES), tuple(NAMES[:3]), tuple(NAMES[1:])]))
        self.add_roster([data.draw(st.sampled_from(self.attempts[name][::-1])).advert for name in some])

    @precondition(lambda self: getattr(self, "rosters", None))
    @rule(data=st.data())
    def send_roster(self, data: st.DataObject) -> None:
        roster = data.draw(st.sampled_from(self.rosters))
        for name in data.draw(st.permutations(NAMES))[: data.draw(st.sampled_from([4, 4, 4, 3, 2, 1]))]:
            own = self.current(name)
            try:
                shares = own.client.share(roster)
            except ProtocolError:
                continue
            own.roster, own.shares = roster, shares
            REACHED["shares"] += 1
            self.take(shares)

    @precondition(lambda self: getattr(self, "rosters", None))
    @rule(data=st.data())
    def send_shares(self, data: st.DataObject) -> None:
        mixed = not data.draw(st.integers(0, 9))  # of other rosters, too, which clients refuse
        for name in data.draw(st.permutations(NAMES)):
            own = self.current(name)
            binding = own.roster.binding if own.roster else bytes(32)
            made = {
                other: attempt.shares
                for other in data.draw(st.sampled_from([*(9 * [NAMES]), NAMES[:3]]))
                for attempt in self.attempts[other]
                if other != name and attempt.shares is not None and name in attempt.shares.sealed
                if mixed or attempt.shares.binding == binding
            }
            delivery = Delivery(
                ROUND,
                binding,
                {other: shares.sealed[name] for other, shares in made.items()},
                {other: shares.digests[name] for other, shares in made.items()},
                {other: shares.signature for other, shares in made.items()},
            )
            try:
                masked = own.client.mask(delivery, self.values[name], 1)
            except ProtocolError:
                continue
            own.masked, own.held = masked, dict(own.client._held)
            REACHED["masked"] += 1
            self.take(masked)

    @precondition(lambda self: any(own.masked for each in getattr(self, "attempts", {}).values() for own in each))
    @rule(data=st.data())
    def send_lists(self, data: st.DataObject) -> None:
        """Most clients are shown one list, and any of them another."""
        lists = [NAMES, NAMES[:3], NAMES[1:], NAMES[::3]]
        most = data.draw(st.sampled_from(lists[:3]))
        for name in NAMES:
            own = self.current(name)
            if own.masked is None:
                continue
            listed = data.draw(st.sampled_from([*(20 * [most]), *lists, [name]]))
            sharers = own.client._sharers
            survivors = Survivors(ROUND, own.masked.binding, sharers, tuple(each for each in listed if each in sharers))
            try:
                agreement = own.client.agree(survivors)
            except ProtocolError:
                continue
            own.signed.append((survivors, agreement.signature))
            REACHED["signed"] += 1
            self.take(agreement)

    @precondition(lambda self: any(own.signed for each in getattr(self, "attempts", {}).values() for own in each))
    @rule(data=st.data())
    def send_signatures(self, data: st.DataObject) -> None:
        """All signatures there are, under whatever list."""
        signatures = {
            name: data.draw(st.sampled_from(attempt.signed))[1]
            for name in NAMES
            for attempt in self.attempts[name]
            if attempt.signed
        }
        for name in data.draw(st.permutations(NAMES)):
            own = self.current(name)
            if own.masked is None:
                continue
            try:
                reveal = own.client.reveal(Agreed(ROUND, own.masked.binding, signatures))
            except ProtocolError:
                continue
            assert own.reveal is None
            own.reveal = reveal
            REACHED["revealed"] += 1
            self.take(reveal)

    @invariant()
    def nobody_is_laid_open(self) -> None:
        """Of one client, all that is ever given out are shares of one and the same secret."""
        kinds: dict[bytes, dict[str, set[str]]] = defaultdict(lambda: {"key": set(), "own": set()})
        for name, attempts in getattr(self, "attempts", {}).items():
            for attempt in attempts:
                for owner, share in attempt.reveal.shares.items() if attempt.reveal else ():
                    pair = attempt.held[owner]
                    assert share in (pair[:SEED], pair[SEED:])
                    kind = "key" if share == pair[:SEED] else "own"
                    maker = next(
                        each.client._own_mask
                        for each in self.attempts[owner]
                        if each.shares is not None and each.shares.binding == attempt.reveal.binding  # type: ignore[union-attr]
                    )
                    kinds[maker][kind].add(name)
        for each in kinds.values():
            assert not each["key"] or not each["own"]

    @invariant()
    def no_update_is_in_what_the_server_received(self) -> None:
        everything = b"".join(getattr(self, "received", []))
        for needle in needles(getattr(self, "values", {})):
            assert needle not in everything


def needles(values: dict[str, np.ndarray]) -> list[bytes]:
    """What of clients' rounded updates would show in bytes: words in a row, and packed bits for groups of 3 and 4."""
    found = []
    for own in values.values():
        for clients in (3, 4):
            quantizer = Quantizer(BOUND, clients)
            words = quantizer.quantized(own)
            found += [packed(words, quantizer.bits)[:-1], packed(words, quantizer.bits)[1:-1]]
            found += [words[start : start + 2].tobytes() for start in range(LENGTH - 1)]
    return found


def test_the_search_finds_an_update_that_is_not_masked() -> None:
    fleet = Fleet.made(4)
    values = {name: fleet.values(name) for name in NAMES}
    quantizer = Quantizer(BOUND, 4)
    clear = Masked(
        ROUND, bytes(32), packed(np.append(quantizer.quantized(values[NAMES[0]]), np.uint32(1)), quantizer.bits)
    )
    assert any(needle in encode_message(clear) for needle in needles(values))
    fleet.play()
    assert len(fleet.received) == 5 * 4
    assert not any(needle in b"".join(fleet.received) for needle in needles(values))


class Network(RuleBasedStateMachine):
    """An honest server over a network that delays, repeats and loses messages; phases close when they close."""

    @initialize(count=st.integers(3, 5))
    def begin(self, count: int) -> None:
        self.fleet = Fleet.made(count)
        self.down: dict[str, list[tuple[str, object]]] = {name: [] for name in self.fleet.clients}
        self.arrived: dict[str, bytes] = {}
        self.phase, self.over, self.total = 0, False, None
        for name in self.down:
            self.down[name].append(("advertise", None))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Some messages reach their clients, old ones again among them; what they answer arrives at once."""
        for name in data.draw(st.permutations(sorted(self.down))):
            for step, message in data.draw(st.permutations(self.down[name])):
                client = self.fleet.clients[name]
                arguments = () if step == "advertise" else (message,)
                if step == "mask":
                    arguments = (message, self.fleet.values(name), 1)
                try:
                    answer = encode_message(getattr(client, step)(*arguments))
                except ProtocolError:
                    continue
                if data.draw(st.integers(0, 9)):
                    self.arrived[name] = answer
                self.fleet.received.append(answer)

    @precondition(lambda self: not getattr(self, "over", True))
    @rule(data=st.data())
    def next_phase(self, data: st.DataObject) -> None:
        if data.draw(st.integers(0, 9)):
            self.deliver(data)
        server, answers = self.fleet.server, dict(self.arrived)
        self.arrived = {}
        try:
            match self.phase:
                case 0:
                    roster = carried(server.roster(answers))
                    self.send(dict.fromkeys(roster.names, ("share", roster)))
                case 1:
                    self.send({name: ("mask", carried(each)) for name, each in server.deliver(answers).items()})
                case 2:
                    survivors = carried(server.survivors(answers))
                    self.send(dict.fromkeys(survivors.survivors, ("agree", survivors)))
                case 3:
                    agreed = carried(server.agreed(answers))
                    assert server.last is not None
                    self.send(dict.fromkeys(server.last.survivors, ("reveal", agreed)))
                case 4:
                    self.total, self.over = server.total(answers), True
                    REACHED["sum"] += 1
        except ProtocolError:
            self.over = True
            REACHED["refusal"] += 1
        self.phase += 1

    def send(self, messages: dict[str, tuple[str, object]]) -> None:
        for name, message in messages.items():
            self.down[name].append(message)

    @invariant()
    def a_sum_is_the_sum(self) -> None:
        total = getattr(self, "total", None)
        if total is not None:
            assert len(total.members) >= 3
            assert np.array_equal(total.values, self.fleet.clear_sum(total.members))
            assert total.weight == len(total.members)


LIMITS = settings(
    max_examples=100,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
)


def test_a_hostile_server_lays_nobody_open() -> None:
    REACHED.clear()
    run_state_machine_as_test(HostileServer, settings=LIMITS)
    assert REACHED["shares"] > 100
    assert REACHED["masked"] > 50
    assert REACHED["signed"] > 20
    assert REACHED["revealed"] > 5  # else the invariants would hold of nothing


class Trusting(ClientRound):
    """A mutant that reveals where a single client has signed."""

    def agree(self, survivors: Survivors) -> Agreement:
        agreement = super().agree(survivors)
        assert self._roster is not None
        object.__setattr__(self._roster, "threshold", 1)
        return agreement


class AgainstTrusting(HostileServer):
    kind = Trusting


def test_the_machine_finds_a_client_that_trusts_the_server() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AgainstTrusting, settings=settings(LIMITS, max_examples=300, phases=[Phase.generate]))


def test_a_network_that_repeats_reorders_and_loses() -> None:
    REACHED.clear()
    run_state_machine_as_test(Network, settings=LIMITS)
    assert REACHED["sum"] > 3
    assert REACHED["refusal"] > 3
