"""Server side of secure aggregation over all rounds, independent of the transport.

A function transports bytes to clients and returns their answers (`SecureRounds.play`). Clients
answer with `SecureClient`. Each lane is a group, because updates of different lanes cannot be added
before lifting. A lane of more than 64 clients is divided into several groups. After its first
revealed sum, a group stays together and computes sums only with all its clients (`SumHistory`).
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from dbcl.blinding import lift
from dbcl.config import SecAggConfig
from dbcl.errors import ConfigError, ProtocolError, listed, plain
from dbcl.privacy import clip_factor
from dbcl.privacy.attendance import AttendanceLog
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.codec import encode
from dbcl.protocol.messages import AggregationStats, Broadcast, RoundReport
from dbcl.protocol.rejection import Reason, Rejection
from dbcl.protocol.secagg.encoding import Total, encoding_of, noisy_config
from dbcl.protocol.secagg.groups import Group, groups
from dbcl.protocol.secagg.history import SumHistory
from dbcl.protocol.secagg.keys import Registry
from dbcl.protocol.secagg.quantizer import Quantizer
from dbcl.protocol.secagg.server import GroupRound
from dbcl.protocol.secagg.vectors import broadcast_digest, shaped, vector_length
from dbcl.protocol.server import Server
from dbcl.round_plan import RoundPlan
from dbcl.state import State, join

log = logging.getLogger(__name__)

Ask = Callable[[Mapping[str, bytes]], Mapping[str, bytes]]
"""Transport: delivers a message to each client and returns the answers received."""


class SecureRounds:
    """Runs rounds under secure aggregation. The server learns only each group's sum and members.

    If a group loses a client before the clients agree on its sum, it is excluded from the round and
    listed in the report. It takes part again once all its clients are present. A round without any
    group raises `ProtocolError` and changes nothing. Only a group without a revealed sum may
    continue without its lost clients, which then leave the group.

    Args:
        server: The server, created with `steady_lanes=True`.
        config: Secure aggregation settings.
        registry: Public keys of the clients. Clients that honest clients would reject are excluded.
        persist: Function that saves `state`. It is called for a new group before requesting masked
            updates, and for a final list of survivors before requesting signatures.
    """

    def __init__(
        self,
        server: Server,
        config: SecAggConfig,
        registry: Registry | None = None,
        *,
        persist: Callable[[], None] = lambda: None,
    ) -> None:
        problems = []
        if not server.sequence.steady_lanes and server.plan.lanes > 1:
            problems.append("its lanes change from round to round: make it with steady_lanes=True")
        if (problem := unbounded(server.statistics)) is not None:
            problems.append(problem)
        self.encoding = encoding_of(config, server.privacy)
        if server.privacy is not None and server.privacy.shared:
            if config != noisy_config(server.privacy):
                problems.append(
                    f"the guarantee needs {noisy_config(server.privacy)}, got {config}: make it by "
                    "dbcl.protocol.secagg.noisy_config"
                )
        elif server.privacy is not None:
            length = sum(math.prod(tensor.shape) for tensor in server.plan.tensors)
            stretched = Quantizer(config.clip, 2).longest(length)
            if server.privacy.unit != "client" or stretched > server.privacy.clip * (1 + 1e-9):
                problems.append(
                    f"rounding may stretch an update of norm {config.clip:g} to {stretched:.6g}, and the guarantee "
                    f"is for {server.privacy.unit}s clipped to {server.privacy.clip:g}: lower the bound"
                )
        if problems:
            raise ConfigError(listed("this server cannot add securely:", problems))
        self.server, self.config, self.registry, self.persist = server, config, registry, persist
        self.history = SumHistory()
        self.attendance: AttendanceLog | None = None
        """Clients of each revealed sum, if a guarantee depends on attendance, else None."""
        if server.privacy is not None and server.privacy.counts_attendance:
            self.attendance = AttendanceLog(server.privacy.shares)
        self._formed: dict[str, tuple[str, ...]] = {}
        """Group of each client with a requested masked update, before the group's first sum."""
        self.sent_up = self.sent_down = 0
        """Bytes of the last round, without the broadcasts."""
        self.totals: list[tuple[RoundPlan, Total]] = []
        """Results of the last round: the sum of each group, with its lane's plan."""

    def play(self, clients: Sequence[str], begin: Ask, ask: Ask, *, partial: bool = True) -> RoundReport:
        """Run one round.

        Args:
            clients: Names of the clients.
            begin: Transports the broadcasts. Clients train, then answer with their keys.
            ask: Transports all later messages.
            partial: Permit dropouts in groups without a revealed sum. Other groups must be
                complete.

        Returns:
            The report of the round.

        Raises:
            ProtocolError: No group computed a sum. Nothing has changed.
        """
        self.sent_up, self.sent_down = 0, 0
        sent = {client: self.server.open_round(client) for client in clients}
        playing, refused = self.grouped(sent, partial=partial)
        alive = list(playing)
        asked = [client for group in playing for client in group.clients]
        answers = begin({client: encode(sent[client]) for client in asked})
        self.sent_up += sum(map(len, answers.values()))
        steps: list[Callable[[Group, Mapping[str, bytes]], Mapping[str, bytes]]] = [
            Group.roster,
            Group.deliver,
            lambda group, own: group.survivors(own, self.record),
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
            formed = step is Group.deliver and self._form(alive)
            if formed or step is steps[2]:
                self.persist()
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
        return self.close(totals, refused)

    def ready(self, clients: Iterable[str]) -> list[str]:
        """Return clients that can form a sum: complete groups, and enough new clients per lane.

        >>> import torch, dbcl
        >>> server = dbcl.Server(torch.nn.Linear(4, 2), dbcl.SketchConfig(coverage="all", lanes=1))
        >>> rounds = SecureRounds(server, SecAggConfig(clip=1.0, min_cohort=3))
        >>> rounds.history.add(["ann", "bob", "cleo"])
        >>> rounds.ready(["ann", "bob", "dan", "eve", "fay"])
        ['dan', 'eve', 'fay']
        """
        sent = {client: self.server.open_round(client) for client in clients}
        try:
            playing, _ = self.grouped(sent)
        except ProtocolError:
            return []
        chosen = {client for group in playing for client in group.clients}
        return [client for client in sent if client in chosen]

    def grouped(self, sent: Mapping[str, Broadcast], *, partial: bool = True) -> "tuple[list[Group], dict[str, str]]":
        """Divide the clients of each lane into groups.

        Returns:
            The groups, and the clients without a group with the reason for each.
        """
        lanes: dict[str, list[str]] = {}
        for client, broadcast in sent.items():
            lanes.setdefault(broadcast.plan.digest, []).append(client)
        made: list[Group] = []
        refused: dict[str, str] = {}
        least = self.config.min_cohort
        for members in lanes.values():
            if self.encoding.noisy:
                made += self._noisy_group(sent[members[0]], tuple(members), refused)
                continue
            known = dict.fromkeys(own for client in members if (own := self.history.group_of(client)) is not None)
            for own in known:
                missing = sorted(set(own) - set(members))
                if missing:
                    here = set(own) & set(members)
                    reason = f"adds up with {plain(', '.join(missing), 300)} only, and not all of them are here"
                    refused |= dict.fromkeys(here, reason)
                else:
                    made.append(self._group(sent[members[0]], own, whole=True))
            new = [client for client in members if self.history.group_of(client) is None]
            formed = dict.fromkeys(self._formed[client] for client in new if client in self._formed)
            rest = [client for client in new if client not in self._formed]
            divided = [tuple(client for client in own if client in new) for own in formed]
            for clients in [*divided, *(groups(rest) if rest else [])]:
                if len(clients) >= least:
                    made.append(self._group(sent[members[0]], clients, whole=not partial))
                    continue
                refused |= dict.fromkeys(
                    clients,
                    f"a lane has {len(clients)} clients that were in no sum before, and {least} are the fewest whose "
                    "sum may be shown: the remedy is a larger cohort or fewer lanes",
                )
        if not made:
            self._fail(refused)
        return made, refused

    def _noisy_group(self, broadcast: Broadcast, clients: tuple[str, ...], refused: dict[str, str]) -> list["Group"]:
        """Return the only group of a round with noise shares. A sum needs the complete noise."""
        privacy, count = self.server.privacy, len(clients)
        assert privacy is not None
        if privacy.least <= count <= privacy.cohort:
            return [self._group(broadcast, clients, whole=privacy.least == privacy.cohort)]
        reason = f"{count} clients are there, and the guarantee is planned for {privacy.least} to {privacy.cohort}"
        refused |= dict.fromkeys(clients, reason)
        return []

    def record(self, members: Sequence[str]) -> None:
        """Record a group's sum as revealed.

        Raises:
            ProtocolError: Clients would not sign the list of survivors.
        """
        if not self.encoding.noisy:
            self.history.add(members)
        elif self.attendance is not None:
            self.attendance.add(self.server.round, members)

    def _form(self, groups: Iterable["Group"]) -> bool:
        """Store groups before requesting their masked updates, which fixes their members.

        Return True if any group is new.
        """
        if self.encoding.noisy:
            return False
        before = self._formed
        for names in (group.round.names for group in groups):
            if self.history.group_of(names[0]) is None:
                self._formed = {client: own for client, own in self._formed.items() if not set(own) & set(names)}
                self._formed |= dict.fromkeys(names, names)
        return self._formed != before

    def _group(self, broadcast: Broadcast, clients: tuple[str, ...], *, whole: bool) -> "Group":
        plan = broadcast.plan
        own = broadcast_digest(broadcast), self.encoding.binding(bytes.fromhex(plan.digest)), vector_length(plan)
        past = () if self.attendance is None else self.attendance.before(broadcast.round)
        side = GroupRound(
            broadcast.round, *own, self.config, registry=self.registry, encoding=self.encoding, attendance=past
        )
        return Group(clients, plan, side, whole)

    def close(self, totals: Sequence[tuple[RoundPlan, Total]], refused: Mapping[str, str]) -> RoundReport:
        """Take an optimizer step with the groups' sums.

        Args:
            totals: The sum of each group, with its lane's plan.
            refused: Excluded clients, with reasons.

        Returns:
            The report of the round.
        """
        if not totals:
            self._fail(refused)
        self.totals = list(totals)
        privacy = self.server.privacy
        whole = sum(total.weight for _, total in totals) if privacy is None else float(privacy.per_round)
        sums: dict[str, Tensor] = {}
        like = self.server.weights()
        for plan, total in totals:
            # The mean of honest updates is no longer than the bound; a bad client could lower the sum of the weights.
            bound = self.config.clip * (total.weight if privacy is None else math.inf)
            factor = clip_factor(float(np.linalg.norm(total.values)), bound)
            part = {name: each.to(like[name]) for name, each in shaped(plan, total.values * (factor / whole)).items()}
            for name, change in lift(plan, part).items():
                sums[name] = sums[name] + change if name in sums else change
        senders = tuple(name for _, total in totals for name in total.members)
        lanes = tuple(
            sum(len(total.members) for plan, total in totals if plan.lane == lane)
            for lane in range(self.server.plan.lanes)
        )
        rejected = {who: Rejection(Reason.SECURE_AGGREGATION, why) for who, why in sorted(refused.items())}
        stats = AggregationStats(rejected, senders=senders, lanes=lanes, noisy=self.encoding.noisy)
        return self.server.close(Aggregate(sums, weight=1.0, count=len(senders), lifted=True), stats)

    def _fail(self, refused: Mapping[str, str]) -> None:
        head = f"round {self.server.round}: no sum could be made, and nothing has changed"
        raise ProtocolError(listed(head, _reasons(refused)))

    def state(self) -> State:
        """Return the groups and the attendance, for a checkpoint beside the server's state."""
        formed = [list(group) for group in dict.fromkeys(self._formed.values())]
        parts = {"history": self.history.state(), "formed": State({"groups": formed}, {})}
        if self.attendance is not None:
            parts["attendance"] = self.attendance.state()
        return join(**parts)

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`."""
        try:
            groups = [tuple(map(str, group)) for group in state.part("formed").values["groups"]]
            history = state.part("history")
            attendance = None if self.attendance is None else state.part("attendance")
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError("the checkpoint does not say which clients add up together") from error
        self.history.load_state(history)
        if self.attendance is not None and attendance is not None:
            self.attendance.load_state(attendance)
        self._formed = {client: group for group in groups for client in group}


def _reasons(refused: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}: {reason}" for name, reason in sorted(refused.items()))


def unbounded(statistics: Iterable[str]) -> str | None:
    """Return the reason why running statistics are incompatible with secure aggregation, or None.

    `statistics` holds their names.

    >>> unbounded([]) is None
    True
    """
    first = min(statistics, default=None)
    if first is None:
        return None
    return (
        f"{first} is what clients measure, which has no public bound; use a normalisation without running statistics, "
        "such as GroupNorm"
    )
