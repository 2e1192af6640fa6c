"""The server: the only place that holds the true weights."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dbcl import seeds
from dbcl._torch import unwrapped
from dbcl.blinding import copied, veiled
from dbcl.config import UNSKETCHED, SketchConfig
from dbcl.data.trees import Tree
from dbcl.errors import PlanError, ProtocolError
from dbcl.files import user_path
from dbcl.model.tensors import frozen_parameters
from dbcl.optim import ServerOptimizer
from dbcl.plan import SketchPlan
from dbcl.privacy import NoiseMechanism, PrivacyPlan, norm
from dbcl.protocol import averaging, checkpoint
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.averaging import Aggregation
from dbcl.protocol.base import fingerprints, veiled_base
from dbcl.protocol.codec import WIRE_DTYPES
from dbcl.protocol.contributions import Contributions
from dbcl.protocol.guarantee import guarantee_of
from dbcl.protocol.messages import AggregationStats, Base, Broadcast, RoundReport, Update
from dbcl.protocol.open_round import OpenRound
from dbcl.protocol.round_keys import RoundKeys
from dbcl.protocol.round_validation import RoundValidation
from dbcl.protocol.running_mean import RunningMean
from dbcl.protocol.server_state import load_server, server_state
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.protocol.validation import UpdateValidator, ValidationResult
from dbcl.state import State, restored_on_error

log = logging.getLogger(__name__)

EMA_DECAY = 0.8
"""Default decay of the released running mean: a mean over about five rounds."""


class Server:
    """Holds the model W and runs the rounds: `open_round` blinds it, `close_round` steps on the lifted average.

    Args:
        model: The network. Its weights are changed in place.
        sketch: What a client sees of each tensor, as a configuration or as a plan made from one.
        privacy: Plan of a formal guarantee. The noise is then that of the plan, every update is clipped and counts by a
            public rule, clients that come back too early are rejected, and nothing that depends on unprotected data is
            reported or decides.
        optimizer: Step of the server on the average update; momentum 0.5 by default, or that of the privacy plan.
        validator: Limits for updates.
        noise: Mechanism of the noise on everything that leaves the server, in place of the one that `sketch.veil` or
            `privacy` stands for.
        wire: Dtype in which tensors travel: "float64", "float32", "bfloat16" or "float16"; the model's own by default.
        calibration: Inputs without labels on which the server measures normalisation statistics after every round.
            Without them W has the average of the clients' statistics, which is wrong on blinded models: such a model
            is an error.
        ema_decay: Decay of the running mean of W that is released; 0 releases the last W.
        steady_lanes: Keep clients that ask in the same order in the same lane in every round, as secure aggregation
            needs it.
        insecure_seed: Fixes all secrets, so that an experiment can be repeated. Never set it in a deployment.

    Raises:
        PlanError: The model, the plan and the guarantee do not fit together.

    >>> import torch, dbcl
    >>> def net():
    ...     return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> server = dbcl.Server(net())
    >>> broadcast = server.open_round("alice")
    >>> local = dbcl.blinded(net(), broadcast)
    >>> optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    >>> local(torch.ones(5, 8)).square().mean().backward()
    >>> optimizer.step()
    >>> update = dbcl.make_update(local, broadcast, examples=5)
    >>> report = server.close_round({"alice": update})
    >>> report.accepted, report.refused, server.round
    (1, (), 1)
    """

    def __init__(
        self,
        model: nn.Module,
        sketch: SketchConfig | SketchPlan | None = None,
        *,
        privacy: PrivacyPlan | None = None,
        optimizer: ServerOptimizer | None = None,
        validator: UpdateValidator | None = None,
        noise: NoiseMechanism | None = None,
        wire: str | None = None,
        calibration: Tree | None = None,
        ema_decay: float = EMA_DECAY,
        steady_lanes: bool = False,
        insecure_seed: int | None = None,
    ) -> None:
        if wire is not None and wire not in WIRE_DTYPES:
            raise ProtocolError(f"wire must be one of {', '.join(WIRE_DTYPES)}, got {wire!r}")
        if noise is not None and privacy is not None:
            raise PlanError("give either privacy, which has noise of its own, or noise")
        model = unwrapped(model)
        default = UNSKETCHED if privacy is not None and privacy.shared else SketchConfig()
        self.plan = sketch if isinstance(sketch, SketchPlan) else SketchPlan.from_model(model, sketch or default)
        self.keeper = guarantee_of(privacy, insecure=insecure_seed is not None)
        self.trained = TrainedWeights(
            model,
            self.plan,
            optimizer or self.keeper.default_optimizer(),
            exact=self.keeper.exact,
            calibration=calibration,
        )
        self._wire = WIRE_DTYPES[wire] if wire is not None else None
        self.keeper.check(self.trained, self._wire)
        limits = self.keeper.restrict(validator or UpdateValidator())
        self.validation = RoundValidation(limits, self.keeper, self.plan, self.statistics)
        self.noise = noise or self.keeper.noise_mechanism(self.plan.veils)
        self.keys = RoundKeys(insecure_seed)
        self.contributions = Contributions()
        self.steady_lanes = steady_lanes
        self.round = 0
        mean = ema_decay != 0 or privacy is not None  # W itself is never released under a guarantee
        self.mean = RunningMean(ema_decay) if mean else None
        self._frozen: tuple[tuple[str, str], ...] | None = None
        self._open: OpenRound | None = None
        self._asked: list[str] = []  # clients that had asked for the round when the checkpoint was written
        self._key_of = self.trained.versions()

    @property
    def model(self) -> nn.Module:
        """The network with the true weights."""
        return self.trained.model

    @property
    def privacy(self) -> PrivacyPlan | None:
        """The plan of the guarantee."""
        return self.keeper.plan

    @property
    def validator(self) -> UpdateValidator:
        """Limits for updates."""
        return self.validation.validator

    @property
    def guarantee(self) -> str:
        """The guarantee as a sentence; "none" where there is none.

        >>> Server(nn.Linear(6, 2)).guarantee
        'none'
        """
        return self.keeper.statement if self.privacy is not None else self.noise.guarantee()

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round down and up besides broadcasts and updates; None where there are no others."""
        return None

    @property
    def statistics(self) -> set[str]:
        """Names of the normalisation statistics that are sent."""
        return self.trained.statistics

    @property
    def asked(self) -> list[str]:
        """Clients that have asked for the open round, in the order in which they first did."""
        return self._asked if self._open is None else self._open.asked

    def weights(self) -> dict[str, Tensor]:
        """Return the true values of every tensor that leaves the server, by name; not copies.

        >>> list(Server(nn.Linear(6, 2)).weights())
        ['weight', 'bias']
        """
        return self.trained.read()

    def open_round(self, client: str | int | None = None) -> Broadcast:
        """Blind the model for this round and return a client's broadcast, the same at every call of the round.

        Clients are divided among the lanes in the order in which they ask. Without a name the broadcast is that of the
        first lane: sent to all clients, that is the paper's shared sketch. All noise of a round follows from its key,
        which is in checkpoints, so there is never a second noise on the same weights.

        >>> import dbcl
        >>> server = Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all"))
        >>> sorted(server.open_round(client).plan.lane for client in ("alice", "bob"))
        [0, 1]
        """
        if self._open is None:
            self._open = self._make_round()
        return self._open.broadcast(None if client is None else str(client))

    def _make_round(self) -> OpenRound:
        if self._frozen is None:
            self._frozen = fingerprints(self.model, self.base() if self.plan.base else None)
        self.rotate_key_if_weights_changed()
        self.noise.begin(self.round, seeds.derive(self.keys.current, "veil"), self.model)
        noisy = veiled(self.weights(), partial(self.noise.noise, self.round), self.keeper.grid)
        noisy = {name: noisy[name].to(kind) for name, kind in self.trained.dtypes().items()}
        own = self.trained.model_tensors()
        opened = OpenRound(
            self.plan,
            self.keys.current,
            self.plan.draw(seeds.derive(self.keys.current, "sketch"), self.round, self._frozen),
            noisy,
            lambda name: self._wire or own[name].dtype,
            self._asked,
            self.steady_lanes,
        )
        if self.mean is not None and self.privacy is not None and self.round > 0:
            self.mean.update(noisy, self.round)
        return opened

    def noisy_weights(self) -> dict[str, Tensor]:
        """Return W + N of every tensor that leaves the server, before any sketch; opens the round.

        With a guarantee this may be released, and W itself may not.

        >>> import dbcl
        >>> server = Server(nn.Linear(6, 2), dbcl.SketchConfig(veil=0))
        >>> bool((server.noisy_weights()["weight"] == server.model.weight).all())
        True
        """
        self.open_round()
        return dict(self._opened().veiled)

    @property
    def released(self) -> nn.Module:
        """The model to evaluate and to give away: a running mean of W, or with a guarantee of W + N.

        Before the first round it is the initial model, with a guarantee as a copy. With a guarantee this opens the
        round.

        >>> server = Server(nn.Linear(6, 2), ema_decay=0.0)
        >>> server.released is server.model
        True
        """
        if self.mean is None:
            return self.model
        if self.round == 0:
            return self.model if self.privacy is None else copied(self.model)
        if self.privacy is not None:
            self.open_round()
        return self.mean.model(self.model, self.trained.calibrate)

    def prepare(self) -> None:
        """Precompute randomness of the next round; may overlap with client training."""
        key = self.keys.prepare(self.round + 1)
        self.noise.prepare(seeds.derive(key, "veil"), {tensor.name: tensor.shape for tensor in self.plan.tensors})

    def base(self) -> Base:
        """Return the frozen parameters under noise, the same at every call, for a client that has none.

        A client puts them into its module once, with `dbcl.protocol.load_base`.
        """
        if not self.plan.base:
            raise ProtocolError("no frozen parameter is sent: make the server with SketchConfig(send_frozen=True)")
        noisy = veiled_base(frozen_parameters(self.model), self.plan.base, self.keys.base)
        return Base({name: tensor.to(self._wire) for name, tensor in noisy.items()})

    def close_round(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> RoundReport:
        """Validate the updates, average the accepted ones, lift the average, and step.

        Args:
            updates: Updates or their bytes by sender. In a list senders are unknown: of equal updates only the first
                counts.

        Returns:
            The report of the round, with a reason for every rejected update.

        Raises:
            ProtocolError: Fewer updates than `validator.min_updates` were accepted, or the step failed. The round
                stays open and nothing has changed. It is a `DivergedError` if values that are not finite are the cause.
        """
        known = set(self.contributions.rejected)
        report = self.close_validated(self.validate(updates))
        for who in report.rejected.keys() - known:
            log.warning(
                "round %s: rejected %s: %s (server.contributions counts how often)",
                report.round,
                who,
                report.rejected[who],
            )
        return report

    def validate(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> ValidationResult:
        """Validate the updates for the open round. Does not change the server's state.

        With an `Aggregate` of one's own and `close` this is `close_round` with another aggregation.
        """
        return self.validation.validate(updates, self._opened())

    def close_validated(self, result: ValidationResult, aggregation: Aggregation | None = None) -> RoundReport:
        """Close the round with updates that `validate` has validated.

        Args:
            result: The accepted updates and the rejections.
            aggregation: Replaces the weighted mean, `average`.

        Raises:
            ProtocolError: As for `close_round`.
        """
        result.require(self.validator.min_updates)
        made = self.average(result) if aggregation is None else aggregation.aggregate(result)
        return self.close(made, result.stats())

    def average(self, result: ValidationResult) -> Aggregate:
        """Return the lifted average of the accepted updates, weighted by examples.

        The share of a lane without answers goes to the other lanes. With a guarantee the sum is divided by the planned
        cohort instead.
        """
        own = self.trained.model_tensors()
        like = {name: own[name].new_empty(0, dtype=kind) for name, kind in self.trained.dtypes().items()}
        denominator = self.keeper.denominator([each.weight for each in result.accepted.values()])
        return averaging.average(result, self._opened().by_digest(), like, self.statistics, denominator)

    def lifted(self, result: ValidationResult) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Iterate over the weights that each accepted client would have made: W + dV R^T, by sender.

        >>> import dbcl, torch
        >>> server = Server(nn.Linear(6, 2))
        >>> broadcast = server.open_round()
        >>> update = dbcl.make_update(dbcl.blinded(nn.Linear(6, 2), broadcast), broadcast, examples=1)
        >>> same = dict(server.lifted(server.validate({"me": update})))
        >>> torch.equal(same["me"]["weight"], server.model.weight)
        True
        """
        return averaging.lifted(result, self._opened().by_digest(), self.weights(), self.statistics)

    def close(self, aggregate: Aggregate, stats: AggregationStats | None = None) -> RoundReport:
        """Close the round with an aggregate: lift its mean, validate it, and step.

        Args:
            aggregate: A sum of updates from any source; with several lanes it must be lifted already.
            stats: What the report says of the updates behind it.

        Raises:
            ProtocolError: The aggregate is invalid or the step failed. Nothing has changed and the round stays open.

        >>> import dbcl, torch
        >>> server = Server(nn.Linear(6, 2), dbcl.config.UNSKETCHED)
        >>> sums = {name: torch.ones_like(tensor) for name, tensor in server.open_round().tensors.items()}
        >>> server.close(Aggregate(sums, weight=2.0, count=2)).accepted
        2
        """
        keeper, stats = self.keeper, stats or AggregationStats()
        changes = averaging.changes_of(aggregate, self._opened().first.plan, self.weights(), self.validator.min_updates)
        keeper.check_use(self.round, stats, aggregate.count)
        keeper.check_weights(self.round, self._key_of == self.trained.versions())
        size = norm({name: change for name, change in changes.items() if name not in self.statistics})
        report = RoundReport(
            round=self.round,
            accepted=aggregate.count,
            rejected=stats.rejected,
            clipped=len({*stats.capped, *stats.clipped}),
            examples=stats.examples,
            norm=size,
            metrics=stats.metrics,
            lanes=stats.lanes,
        )
        changes = keeper.project(changes, size, aggregate.count)
        report, stats = keeper.report(report, stats)
        try:
            with restored_on_error(self.trained, keeper):
                self.trained.step(keeper.noisy(changes, self.round, self.keys.of_update(self.round), self.model))
                keeper.use(self.round, stats.senders)
                self.noise.end(self.round)
        except BaseException:
            self._key_of = self.trained.versions()  # the same values, written back
            raise
        self.round += 1
        self.contributions.add(stats)
        self.validation.influence.observe(stats.influence, stats.agreement)
        self._renew_key()
        self._open, self._asked = None, []
        if self.mean is not None and self.privacy is None:  # W + N is added when the next round opens
            self.mean.update(self.weights(), self.round)
        if report.unanswered and report.accepted >= len(report.lanes):
            log.warning(
                "round %s: no answer in lanes %s of %s; open_round(client) gives each client its lane",
                report.round,
                ", ".join(map(str, report.unanswered)),
                len(report.lanes),
            )
        return report

    def void_round(self) -> None:
        """Give the open round up, of which no sum could be made: its number is used up, and the weights stay.

        Only with shares of noise, where clients answer a round once and groups may change from round to round.
        """
        if self.privacy is None or not self.privacy.shared:
            raise ProtocolError("only a round with shares of noise can be given up")
        self.open_round()
        self.noise.end(self.round)
        self.round += 1
        self._renew_key()
        self._open, self._asked = None, []

    def sums(self) -> Mapping[str, Update]:
        """Return what a server that sees only sums has seen of the last round; empty where it sees each update."""
        return {}

    def rotate_key_if_weights_changed(self) -> None:
        """Draw another key if the weights changed since it was drawn: reusing noise would reveal the difference.

        An open round keeps its key. With a guarantee changed weights are an error once a round has been played.
        """
        unchanged = self._key_of == self.trained.versions()
        if self._open is not None or unchanged:
            return
        if self.round > 0:
            self.keeper.check_weights(self.round, unchanged)
        self._renew_key()

    def state(self) -> State:
        """Return everything that is needed to go on after this moment. It holds W and the secrets."""
        return server_state(self)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned, of a server with the same model, plan and optimiser; else change nothing."""
        load_server(self, state)

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint into a folder, whole or not at all, and keep the one before it.

        >>> import tempfile
        >>> server = Server(nn.Linear(6, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = server.save(folder)
        ...     Server.load(folder, nn.Linear(6, 2)).round
        0
        """
        return checkpoint.save(user_path(folder), self.round, self.state())

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module, *arguments: Any, **settings: Any) -> "Server":
        """Make a server from the newest whole checkpoint of a folder, with the arguments that it was made with."""
        state = checkpoint.load(user_path(folder))
        server = cls(model, *arguments, **settings)
        server.load_state(state)
        return server

    def restart(self, round: int, asked: list[str]) -> None:
        """Go to the beginning of a round for which these clients have asked already."""
        self.round, self._asked, self._open, self._frozen = round, asked, None, None
        self._key_of = self.trained.versions()

    def opened_round(self) -> OpenRound | None:
        """Return the open round, if there is one."""
        return self._open

    def reopen(self, opened: OpenRound | None) -> None:
        """Go on with a round that `opened_round` returned."""
        self._open = opened

    def _opened(self) -> OpenRound:
        if self._open is None:
            raise ProtocolError("no round is open: call open_round first")
        return self._open

    def _renew_key(self) -> None:
        self.keys.advance(self.round)
        self._key_of = self.trained.versions()
