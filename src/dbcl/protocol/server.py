"""The server: the only place that holds the true weights."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl._torch import unwrapped, version
from dbcl.blind import lift, veiled
from dbcl.cover import Cover, Layers, fingerprint, fixed_tensors, frozen_parameters, named_tensors, recompute
from dbcl.data.trees import Tree
from dbcl.errors import PlanError, ProtocolError, plain
from dbcl.optim import ServerOptimizer, fedavg
from dbcl.plan import Ratio, SketchPlan
from dbcl.privacy import CorrelatedVeil, Ledger, PrivacyPlan, Veil, WhiteVeil, Workload, clip_factor, norm, share
from dbcl.protocol import checkpoint
from dbcl.protocol.admission import Admission, Admitted, Door, copies, not_finite
from dbcl.protocol.aggregation import Aggregate, stacked_sums, summed
from dbcl.protocol.base import veiled_base
from dbcl.protocol.codec import WIRE_DTYPES, decode_update
from dbcl.protocol.masters import Masters
from dbcl.protocol.messages import Base, Broadcast, RoundReport, Tally, Update, UpdateStack
from dbcl.protocol.open_round import OpenRound
from dbcl.protocol.state import restore_server, server_state
from dbcl.round_plan import MEASURED, RoundPlan, mismatches
from dbcl.state import State
from dbcl.statistics import calibrate

log = logging.getLogger(__name__)

MAX_EPS = torch.finfo(torch.float32).eps
"""Relative spacing of the values in which sums of clipped gradients may travel: of coarser ones rounding counts."""
RECENT = 5
"""So many rounds are remembered to tell how far clients usually pull."""


class Server:
    """Holds the model W and runs the rounds: `open_round` blinds it, `close_round` steps on the lifted average.

    `ratio`, `cover`, `veil`, `sketch`, `layers`, `send_frozen`, `lanes` and `grouped` are those of `SketchPlan.of`; or
    give a `plan`.
    `wire` names the dtype that travels ("float64", "float32", "bfloat16", "float16"; the model's own where it is None).
    The round's seed and veil come from the operating system, anew in every round; `insecure_seed` fixes them all, so
    that an experiment can be repeated, and must never be set where clients are strangers. `calibration` are inputs of
    the server's own, without labels: on these it measures the normalisation statistics of W after every round. Without
    them W has the average of what clients measured on the veiled and sketched model, which is not the same.

    With `privacy`, a `dbcl.privacy.PrivacyPlan`, the veil is the one that keeps its guarantee, whatever size the plan
    names: every update is clipped to `privacy.clip`, they count alike, their sum is divided by the planned cohort,
    whoever answers, and a client that comes back too early or too often is refused. Clients' metrics are not reported.
    Where one example is the unit, an update is the sum over its examples, each clipped by the client. With
    `privacy.before` the noise goes into each average update instead, the optimiser may be any, and the veil is the
    plan's.

    With `steady_lanes` clients that ask in the same order share a lane in every round, whichever lane it is: under
    secure aggregation, where clients of a lane add up, changing groups would tell of single clients.

    >>> import torch, dbcl
    >>> def net():
    ...     return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> server = dbcl.Server(net(), ratio=2)
    >>> broadcast = server.open_round("alice")
    >>> local = dbcl.blinded(net(), broadcast)
    >>> optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    >>> local(torch.ones(5, 8)).square().mean().backward()
    >>> optimizer.step()
    >>> update = dbcl.update(local, broadcast, examples=5)
    >>> report = server.close_round({"alice": update})
    >>> report.accepted, report.refused, server.round
    (1, (), 1)
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SketchPlan | None = None,
        *,
        ratio: Ratio | None = None,
        cover: Cover | None = None,
        veil: float | None = None,
        sketch: str | None = None,
        layers: Layers | None = None,
        send_frozen: bool | None = None,
        lanes: int | None = None,
        grouped: bool | None = None,
        optimizer: ServerOptimizer | None = None,
        door: Door | None = None,
        wire: str | None = None,
        calibration: Tree | None = None,
        privacy: PrivacyPlan | None = None,
        steady_lanes: bool = False,
        insecure_seed: int | None = None,
    ) -> None:
        given = {
            "ratio": ratio,
            "cover": cover,
            "veil": veil,
            "sketch": sketch,
            "layers": layers,
            "send_frozen": send_frozen,
            "lanes": lanes,
            "grouped": grouped,
        }
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if plan is not None and settings:
            raise PlanError(f"give either a plan or {', '.join(settings)}, not both")
        if wire is not None and wire not in WIRE_DTYPES:
            raise ProtocolError(f"wire must be one of {', '.join(WIRE_DTYPES)}, got {wire!r}")
        model = self.model = unwrapped(model)
        self.plan = plan or SketchPlan.of(model, **settings)
        own = {name: tensor for name, tensor in named_tensors(model).items() if name in self.plan.veils}
        problems = mismatches({t.name: t.shape for t in self.plan.tensors}, own)
        problems += [f"{p} is trained and not in it" for p in _trained(model) if p not in self.plan.veils]
        if problems:
            raise PlanError("\n  - ".join(["this plan was made for another model:", *problems]))
        self.door = door or Door()
        self.calibration = calibration
        self.privacy = privacy
        self.steady_lanes = steady_lanes
        self.veil: Veil = WhiteVeil(self.plan.veils)
        self.update_noise: CorrelatedVeil | None = None
        if privacy is not None:
            promise = privacy.promise if insecure_seed is None else "none: its secrets follow from insecure_seed"
            noise = CorrelatedVeil(privacy.mechanism, privacy.sigma, promise)
            if privacy.before:
                self.update_noise = noise
            else:
                self.veil = noise
        self.ledger: Ledger | None = None
        self.round = 0
        self.statistics = {tensor.name for tensor in self.plan.tensors if tensor.scheme == MEASURED}
        self._wire = WIRE_DTYPES[wire] if wire is not None else None
        self._insecure = None if insecure_seed is None else seeds.derive(bytes(32), "experiment", insecure_seed)
        self._pulls: list[float] = []
        self._next_key: bytes | None = None
        self._renew_key()
        self._base_key = seeds.fresh() if self._insecure is None else seeds.derive(self._insecure, "base")
        self._frozen: tuple[tuple[str, str], ...] | None = None
        self._open: OpenRound | None = None
        self._asked: list[str] = []  # who had asked for the round when the checkpoint was written
        self._masters = Masters(own)
        trained = [
            self._masters.of(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._optimizer = (optimizer or fedavg())(trained)
        if privacy is not None:
            self._keep(privacy)

    def _keep(self, privacy: PrivacyPlan) -> None:
        """See to it that a guarantee holds, or say why it cannot."""
        problems = []
        if not privacy.before and (found := Workload.of(self._optimizer)) != privacy.workload:
            problems.append(f"it was planned for {privacy.workload} on the server, which has {found}")
        coarse = sorted(
            tensor.name
            for tensor in self.plan.tensors
            if torch.finfo(self._wire or named_tensors(self.model)[tensor.name].dtype).eps > MAX_EPS
        )
        if privacy.unit == "example" and coarse:
            # Rounding a sum of many gradients moves it by more than one of them: the sum of a neighbouring data set may
            # be rounded otherwise in every value.
            problems.append(
                f"{coarse[0]} travels in half precision, whose rounding may enlarge what one example changes in a sum "
                'of many; take a model in float32 and wire="float32"'
            )
        if self.statistics:
            problems.append(
                f"{min(self.statistics)} is what clients measure, without a clip; use a normalisation without running "
                "statistics, such as GroupNorm"
            )
        if problems:
            raise PlanError("\n  - ".join(["this guarantee cannot be kept:", *problems]))
        # Nothing that follows from data without noise may decide: no medians, no rejection because of values. Where one
        # example is the unit, clients clip each by itself and send the sum; how often it comes is for them to keep.
        of_clients = privacy.unit == "client"
        self.door = replace(
            self.door,
            norm_bound=privacy.clip if of_clients else None,
            clip=True,
            max_influence=None,
            max_times_median=None,
            reject_by_value=False,
        )
        rule = (privacy.separation, privacy.participations) if of_clients else (1, privacy.rounds)
        self.ledger = Ledger(rounds=privacy.rounds, separation=rule[0], participations=rule[1])

    def open_round(self, client: str | int | None = None) -> Broadcast:
        """Blind the model for this round and give a client's broadcast, the same at every call until the round closes.

        Clients are spread over the lanes in the order in which they ask; name them, so that one that asks again gets
        the same lane. With one lane all get the same. Without a name it is the broadcast of the first lane: sent to
        all clients, that is the paper's shared sketch, and takes the paper's many rounds.

        A second veil of the same weights would let a client average the noise away, so there never is one: the
        round's key is drawn when the round before it closes, it is in the checkpoint, and all noise follows from it.

        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> sorted(server.open_round(client).plan.lane for client in ("alice", "bob"))
        [0, 1]
        """
        if self._open is None:
            if self._frozen is None:
                self._frozen = self._fingerprints()
            self.settle_key()
            self.veil.begin(self.round, seeds.derive(self._key, "veil"), self.model)
            grid = None if self.privacy is None or self.privacy.before else self.privacy.grid
            hidden = veiled(self.weights(), partial(self.veil.noise, self.round), grid)
            own = named_tensors(self.model)
            self._open = OpenRound(
                self.plan,
                self._key,
                self._draw,
                hidden,
                lambda name: self._wire or own[name].dtype,
                self._asked,
                self.steady_lanes,
            )
        return self._open.broadcast(None if client is None else str(client))

    def shown(self) -> dict[str, Tensor]:
        """W + N of every tensor that is sent, before any sketch: what the round shows to all its clients together.

        It opens the round. With a guarantee this is what may be released; W itself never is.

        >>> server = Server(nn.Linear(6, 2), cover="all", veil=0)
        >>> bool((server.shown()["weight"] == server.model.weight).all())
        True
        """
        self.open_round()
        return dict(self._opened().veiled)

    def prepare(self) -> None:
        """Draw what the next round needs beside the weights, for whoever has time while the clients train.

        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> _ = server.open_round()
        >>> server.prepare()
        """
        self._next_key = self._new_key(self.round + 1)
        shapes = {tensor.name: tensor.shape for tensor in self.plan.tensors}
        self.veil.prepare(seeds.derive(self._next_key, "veil"), shapes)

    def _draw(self, group: int) -> RoundPlan:
        labels = ("sketch", group) if group else ("sketch",)
        return self.plan.draw(seeds.derive(self._key, *labels), self.round, self._frozen or ())

    def base(self) -> Base:
        """The frozen parameters, veiled, for a client that has none: the same numbers at every call.

        A client puts them into its module with `dbcl.load_base`, once, and keeps them; one that lost them asks again. A
        second noise would average out, so there never is one: its key is in the checkpoint.
        """
        if not self.plan.base:
            raise ProtocolError("no frozen parameter is sent: make the server with send_frozen=True")
        veiled = veiled_base(frozen_parameters(self.model), self.plan.base, self._base_key)
        return Base({name: tensor.to(self._wire) for name, tensor in veiled.items()})

    def close_round(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> RoundReport:
        """Check the updates, average those that pass, lift the average, and step.

        An update may come as an `Update` or as bytes. One that does not pass is refused with a reason in the report.
        Give a dictionary of them by their senders where those are known. In a list nobody knows who sent what, so of
        updates that are number for number the same only the first counts.
        Where fewer than `min_updates` are left, that is a `ProtocolError`, nothing has changed and the round stays
        open.
        """
        if isinstance(updates, UpdateStack):
            admission = self._admit_stack(updates)
        elif isinstance(updates, Mapping):
            admission = self.admit((str(who), each) for who, each in updates.items())
        elif self.privacy is not None:
            raise ProtocolError("a guarantee counts who takes part: give the updates as a dictionary by their senders")
        else:
            admission = self.admit(
                ((f"update {number}", each) for number, each in enumerate(updates)), refuse_copies=True
            )
        admission.require(self.door.min_updates)
        return self.close(self.average(admission), admission.tally())

    def admit(self, updates: Iterable[tuple[str, Update | bytes]], *, refuse_copies: bool = False) -> Admission:
        """Let the updates to the open round through the door, each with the name of its sender; nothing changes yet.

        A sender counts once. With `refuse_copies` an update counts once, too, whoever sends it.

        With an `Aggregate` of your own making and `close` this is `close_round` with another aggregation.
        """
        opened = self._opened()
        accepted: dict[str, Admitted] = {}
        refused: dict[str, str] = {}
        further: Counter[str] = Counter()
        for who, update in updates:
            if who in accepted or who in refused:
                further[who] += 1
                continue
            if self.ledger is not None and (spent := self.ledger.refusal(self.round, who)) is not None:
                refused[who] = spent
                continue
            try:
                read = decode_update(bytes(update)) if isinstance(update, bytes | bytearray | memoryview) else update
                digest = read.plan if isinstance(read, Update) else ""
                if self.privacy is not None and isinstance(read, Update):
                    read = replace(read, metrics={})  # of no use here, and they must not decide
                accepted[who] = self.door.admit(read, opened.answered(digest, who))
            except ProtocolError as error:
                refused[who] = plain(str(error))
            except Exception as error:  # whatever one client sent, the others' round goes on
                log.debug("round %s: %s", self.round, who, exc_info=True)
                refused[who] = f"cannot be read ({type(error).__name__})"
        for who, count in further.items():
            many = f" ({count} of them)" if count > 1 else ""
            log.warning("round %s: a further answer of %s is left out%s", self.round, who, many)
        if refuse_copies:
            refused |= copies(accepted)
        return self._admission({who: each for who, each in accepted.items() if who not in refused}, refused)

    def _admit_stack(self, stack: UpdateStack) -> Admission:
        """The same for updates that lie together."""
        opened = self._opened()
        accepted: dict[str, Admitted] = {}
        refused: dict[str, str] = {}
        if self.privacy is not None:
            stack = replace(stack, metrics=({},) * len(stack))
            if not stack.lengths(stack.tensors).isfinite().all():  # one by one, where such an update becomes zeros
                return self.admit(stack.items())
        if self.ledger is not None and len(self.ledger.allowed(self.round, stack.senders)) < len(stack):
            return self.admit(stack.items())
        try:
            answered = [opened.answered(digest, who) for who, digest in zip(stack.senders, stack.plans, strict=True)]
        except ProtocolError:  # somebody answers another lane than its own
            return self.admit(stack.items())
        for who, found in zip(stack.senders, self.door.admit_stack(stack, answered), strict=True):
            if isinstance(found, Admitted):
                accepted[who] = found
            else:
                refused[who] = plain(str(found))
        return replace(self._admission(accepted, refused), stack=stack)

    def _admission(self, accepted: Mapping[str, Admitted], refused: Mapping[str, str]) -> Admission:
        refused = {**refused, **self.door.outliers(accepted)}
        within = {who: each for who, each in accepted.items() if who not in refused}
        if self.privacy is not None:
            within = {who: _within(self.privacy, each) for who, each in within.items()}
        balanced, pull = self.door.balance(within, self._pulls)
        lane_of = self._opened().lane_of
        answers = Counter(lane_of(each.update.plan) for each in balanced.values())
        return Admission(
            self.round, balanced, refused, pull, lanes=tuple(answers[lane] for lane in range(self.plan.lanes))
        )

    def average(self, admission: Admission) -> Aggregate:
        """The mean of what was admitted, weighted by examples: over each lane in the sketched space, lifted, and added.

        What a lane without answers would have weighed goes to the others. With a guarantee it is the sum divided by the
        planned cohort, and nothing goes anywhere.
        """
        weights, plans = self.weights(), self._opened().by_digest()
        sums: dict[str, Tensor] = {}
        for digest, part in self._sums(admission, weights):
            for name, change in lift(plans[digest], part).items():
                sums[name] = sums[name].add_(change) if name in sums else change
        return Aggregate(sums, weight=1.0, count=len(admission.accepted), lifted=True)

    def _sums(self, admission: Admission, like: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """For each plan that was answered, what its updates add to the whole mean, in its sketched space."""
        accepted = list(admission.accepted.values())
        whole = sum(each.weight for each in accepted) if self.privacy is None else float(self.privacy.per_round)
        digests = list(dict.fromkeys(each.update.plan for each in accepted))
        statistics = {name: like[name] for name in self.statistics}
        if admission.stack is None:
            every = admission.weighted()
            changes = {name: tensor for name, tensor in like.items() if name not in statistics}
            for digest in digests:
                own = [one for one, each in zip(every, accepted, strict=True) if each.update.plan == digest]
                yield digest, summed(own, changes, whole=whole)
            yield digests[0], summed(every, statistics, statistics)
            return
        stack = admission.stack.only(list(admission.accepted))
        shares = [[each.weight / whole * (each.update.plan == digest) for each in accepted] for digest in digests]
        clipped = [[share * each.factor for share, each in zip(row, accepted, strict=True)] for row in shares]
        changed = {name: tensor for name, tensor in stack.items() if name not in statistics}
        measured = {name: tensor for name, tensor in stack.items() if name in statistics}
        for rows, tensors in ((clipped, changed), (shares, measured)):
            yield from zip(digests, stacked_sums(tensors, rows, like), strict=True)

    def lifted(self, admission: Admission) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """For every client that was admitted, the weights it would have made: W + dV R^T, clipped by the door.

        >>> import dbcl
        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> broadcast = server.open_round()
        >>> update = dbcl.update(dbcl.blinded(nn.Linear(6, 2), broadcast), broadcast, examples=1)
        >>> same = dict(server.lifted(server.admit([("me", update)])))
        >>> torch.equal(same["me"]["weight"], server.model.weight)
        True
        """
        plans = self._opened().by_digest()
        weights = {name: tensor.detach() for name, tensor in self.weights().items()}
        for who, each in admission.accepted.items():
            sent = {name: each.update.tensors[name].to(W) for name, W in weights.items() if name in each.update.tensors}
            changes = lift(plans[each.update.plan], sent)
            made = {name: changes.get(name, W) for name, W in weights.items()}  # of statistics the client's values
            for name in weights.keys() - self.statistics:
                made[name] = torch.add(weights[name], changes[name], alpha=each.factor)
            yield who, made

    def close(self, aggregate: Aggregate, tally: Tally | None = None) -> RoundReport:
        """Close the round with an aggregate, whoever made it: lift its mean, check it, and step.

        With several lanes the aggregate must be lifted already: `average` does so lane by lane. Where it does not pass
        the door, that is a `ProtocolError`, nothing has changed and the round stays open. `tally` is what the report
        says of the updates behind it.

        >>> from dbcl.protocol import Aggregate
        >>> server = Server(nn.Linear(6, 2), cover="all", veil=0, lanes=1)
        >>> sums = {name: torch.ones_like(tensor) for name, tensor in server.open_round().tensors.items()}
        >>> server.close(Aggregate(sums, weight=2.0, count=2)).accepted
        2
        """
        plan = self._opened().first.plan
        weights = self.weights()
        mean, changes = aggregate.mean(), dict[str, Tensor]()
        shapes = {
            tensor.name: tensor.shape if aggregate.lifted else tensor.sent_shape
            for tensor in plan.tensors
            if tensor.name in mean or not tensor.measured
        }
        problems = mismatches(shapes, mean)
        if plan.lanes > 1 and not aggregate.lifted:
            problems.append(f"it is not lifted, and the round has {plan.lanes} lanes")
        if not problems:
            changes = dict(mean) if aggregate.lifted else lift(plan, mean)
            for name in self.statistics & changes.keys():
                changes[name] = (changes[name].to(weights[name]) - weights[name]) * self._fresh_share
            problems = self.door.problems(aggregate, changes)
        if problems:
            raise ProtocolError("\n  - ".join([f"round {self.round}: the aggregate is refused", *problems]))
        tally = tally or Tally()
        if self.ledger is not None and len(tally.senders) != aggregate.count:
            raise ProtocolError(f"round {self.round}: a guarantee counts who takes part, and the tally does not say so")
        length = norm({name: change for name, change in changes.items() if name not in self.statistics})
        report = RoundReport(
            round=self.round,
            accepted=aggregate.count,
            refused=tally.refused,
            clipped=tally.clipped,
            examples=tally.examples,
            norm=length,
            metrics=tally.metrics,
            lanes=tally.lanes,
        )
        if self.privacy is not None:
            self._check_untouched()
            changes = self._projected(self.privacy, changes, length, aggregate.count)
            report = replace(report, clipped=0, examples=0, norm=math.nan, metrics={})  # all of it tells of data
        if report.unanswered and report.accepted >= len(report.lanes):
            log.warning(
                "round %s: no answer in lanes %s of %s; open_round(client) gives each client its lane",
                self.round,
                ", ".join(map(str, report.unanswered)),
                len(report.lanes),
            )
        before = server_state(self)
        try:
            self._step(weights, changes if self.update_noise is None else self._noisy(changes, self.update_noise))
            if self.calibration is not None and self.statistics:
                calibrate(self.model, self.calibration)
            own = named_tensors(self.model)  # only what is sent: a mask of minus infinity stays at home
            wrong = not_finite({tensor.name: own[tensor.name] for tensor in self.plan.tensors})
            if wrong:
                reasons = [f"{name} leaves the range of the weights' dtype" for name in wrong]
                raise ProtocolError("\n  - ".join([f"round {self.round}: the step is undone", *reasons]))
            if self.ledger is not None:
                self.ledger.use(self.round, tally.senders)
            self.veil.end(self.round)
        except BaseException:
            restore_server(self, before, keep_open=True)
            raise
        self.round += 1
        if tally.pull > 0:
            self._pulls = [*self._pulls, tally.pull][-RECENT:]
        self._renew_key()
        self._open, self._asked = None, []
        return report

    def _noisy(self, changes: Mapping[str, Tensor], noise: CorrelatedVeil) -> dict[str, Tensor]:
        """The average update with the noise of the guarantee, on its grid: whatever follows from it may be shown.

        The noise is in W from now on and is never asked for again, so its key is kept nowhere.
        """
        assert self.privacy is not None
        key = seeds.fresh() if self._insecure is None else seeds.derive(self._insecure, "update", self.round)
        noise.begin(self.round + 1, key, self.model)
        noisy = veiled(changes, partial(noise.noise, self.round + 1), self.privacy.grid)
        noise.end(self.round + 1)
        return noisy

    @staticmethod
    def _projected(privacy: PrivacyPlan, changes: dict[str, Tensor], length: float, count: int) -> dict[str, Tensor]:
        """Project an aggregate onto the ball of sums of clipped updates; those of `average` lie in it.

        Rejecting one outside would tell of data without noise. A projection moves no two sums further apart.
        """
        if privacy.unit != "client":
            return changes
        factor = clip_factor(length, count * privacy.clip / privacy.per_round * (1 + 1e-3))  # float32 rounds
        return changes if factor == 1.0 else {name: change * factor for name, change in changes.items()}

    def _check_untouched(self) -> None:
        if self._key_of != self._versions():
            raise ProtocolError(
                f"round {self.round}: somebody has changed the weights, and the guarantee is that of the rounds alone; "
                "the remedy: make the server anew from its last checkpoint"
            )

    @property
    def guarantee(self) -> str:
        """What the run promises, in a sentence; "none" where it promises nothing.

        >>> Server(nn.Linear(6, 2), cover="all").guarantee
        'none'
        """
        return (self.update_noise or self.veil).guarantee()

    def weights(self) -> dict[str, Tensor]:
        """The true values of every tensor that the plan sends, by name; not copies.

        Of a half-precision tensor it is the float32 master, which the model holds rounded.

        >>> list(Server(nn.Linear(6, 2), cover="all").weights())
        ['weight', 'bias']
        """
        own = named_tensors(self.model)
        masters = self._masters.read(own)
        return {tensor.name: masters.get(tensor.name, own[tensor.name]) for tensor in self.plan.tensors}

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after this moment, as plain values and tensors. It holds W and the secrets.

        >>> sorted(Server(nn.Linear(6, 2), cover="all").state_dict())
        ['tensors', 'values']
        """
        return server_state(self)._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` gave; refuses the state of another plan, model or kind of optimiser."""
        restore_server(self, State(**state))

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint into a folder, whole or not at all, and keep the one before it.

        >>> import tempfile
        >>> server = Server(nn.Linear(6, 2), cover="all")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = server.save(folder)
        ...     Server.load(folder, nn.Linear(6, 2), cover="all").round
        0
        """
        return checkpoint.save(Path(folder), self.round, server_state(self))

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module, plan: SketchPlan | None = None, **settings: Any) -> "Server":
        """Make a server from the newest whole checkpoint of a folder; `settings` are those that it was made with."""
        state = checkpoint.load(Path(folder))
        server = cls(model, plan, **settings)
        restore_server(server, state)
        return server

    def _opened(self) -> OpenRound:
        if self._open is None:
            raise ProtocolError("no round is open: call open_round first")
        return self._open

    @property
    def _fresh_share(self) -> float:
        """How much a round's statistics count against those of the rounds before.

        Clients measure them on a veiled or sketched model, and every round errs in another way: an average over about
        five rounds errs less. Where the model goes out as it is, the last round is right.
        """
        exact = not any(tensor.veil or tensor.sketched for tensor in self.plan.tensors)
        return 1.0 if exact else max(0.2, 1 / (self.round + 1))

    def _fingerprints(self) -> tuple[tuple[str, str], ...]:
        """What a client must hold: the tensors that stay at home, and the base as a client has it after `load_base`."""
        fixed = fixed_tensors(self.model)
        base = self.base().tensors if self.plan.base else {}
        held = {name: base[name].to(tensor.dtype) if name in base else tensor for name, tensor in fixed.items()}
        return tuple((name, fingerprint(tensor)) for name, tensor in held.items())

    def settle_key(self) -> None:
        """Draw another secret for the round where somebody has changed the weights: a key veils one W only.

        Not in an open round, whose broadcast is made. Whoever writes a checkpoint settles the key first. With a
        guarantee changed weights are refused once a round has been played: no budget was counted for them.
        """
        if self._open is not None or self._key_of == self._versions():
            return
        if self.privacy is not None and self.round > 0:
            self._check_untouched()
        self._renew_key()

    def _renew_key(self) -> None:
        """Draw the round's secret, for the weights as they are now."""
        self._key, self._next_key = self._next_key or self._new_key(self.round), None
        self._key_of = self._versions()

    def _new_key(self, round: int) -> bytes:
        return seeds.fresh() if self._insecure is None else seeds.derive(self._insecure, "round", round)

    def _versions(self) -> list[object]:
        """What changes when anybody writes to the weights."""
        return [version(tensor) for tensor in named_tensors(self.model).values()]

    @torch.no_grad()
    def _step(self, weights: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            if name not in changes:
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.grad = -changes[name] if tensor.requires_grad else None
            else:
                tensor.add_(changes[name])
                if name.endswith("running_var"):
                    tensor.clamp_(min=0)  # a variance must not turn negative; a running mean may
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.write(named_tensors(self.model))
        recompute(self.model)


def _within(privacy: PrivacyPlan, each: Admitted) -> Admitted:
    """Let an update count as a guarantee has it: all alike, or by their examples up to a public number.

    Where one example is the unit, it is a sum of clipped gradients and is projected onto the ball of such sums. What
    one gradient adds stays as it is or becomes smaller; whether a client has clipped each, no server can see.
    """
    if privacy.unit == "example":
        bound = privacy.clip * min(each.weight, privacy.batch)
        factor = clip_factor(each.length, bound * (1 + 1e-6))  # sums in float32 round
        return replace(each, weight=1.0, factor=factor, length=each.length * factor)
    weight = share(each.weight, most=privacy.most, per_round=1) if privacy.most else 1.0
    return replace(each, weight=weight)


def _trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
