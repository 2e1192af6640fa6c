"""The server: the only place that holds the true weights."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dbcl._torch import unwrapped
from dbcl.config import SketchConfig
from dbcl.data.trees import Tree
from dbcl.files import user_path
from dbcl.optim import ServerOptimizer
from dbcl.plan import SketchPlan
from dbcl.privacy import NoiseMechanism, PrivacyPlan
from dbcl.protocol import checkpoint
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.averaging import Aggregation, MeanAggregation
from dbcl.protocol.contributions import Contributions
from dbcl.protocol.guarantee import guarantee_of
from dbcl.protocol.messages import AggregationStats, Base, Broadcast, RoundReport, Update
from dbcl.protocol.release import EMA_DECAY, Release
from dbcl.protocol.round_keys import RoundKeys
from dbcl.protocol.round_sequence import RoundSequence
from dbcl.protocol.round_step import RoundStep
from dbcl.protocol.round_validation import RoundValidation
from dbcl.protocol.server_state import load_server, server_state
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.protocol.validation import UpdateValidator, ValidationResult
from dbcl.state import State

log = logging.getLogger(__name__)


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
        noise: Mechanism of the noise on everything that leaves the server, in place of `sketch.veil` or `privacy`.
        wire: Dtype in which tensors travel: "float64", "float32", "bfloat16" or "float16"; the model's own by default.
        calibration: Inputs without labels on which the server measures normalisation statistics after every round.
            Clients cannot measure them on blinded models, so such a model is an error without these inputs.
        ema_decay: Decay of the running mean of W that is released; 0 releases the last W.
        steady_lanes: Keep clients that ask in the same order in one lane in every round, for secure aggregation.
        insecure_seed: Fixes all secrets, so that an experiment can be repeated. Never set it in a deployment.

    Raises:
        PlanError: The model, the plan, the noise and the guarantee do not fit together.

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
    >>> report.accepted, report.refused, server.round, server.guarantee
    (1, (), 1, 'none')
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
        self.model = model = unwrapped(model)
        """The network with the true weights."""
        self.keeper = guarantee_of(privacy, insecure=insecure_seed is not None)
        sketch = sketch or self.keeper.default_sketch
        self.plan = sketch if isinstance(sketch, SketchPlan) else SketchPlan.from_model(model, sketch)
        noise = self.keeper.noise_mechanism(self.plan.veils, noise)
        optimizer = optimizer or self.keeper.default_optimizer()
        self.trained = TrainedWeights(model, self.plan, optimizer, exact=self.keeper.exact, calibration=calibration)
        keys = RoundKeys(insecure_seed)
        self.sequence = RoundSequence(self.trained, self.keeper, noise, keys, wire=wire, steady_lanes=steady_lanes)
        limits = self.keeper.restrict(validator or UpdateValidator())
        self.statistics = self.trained.statistics
        """Names of the normalisation statistics that are sent."""
        self.validation = RoundValidation(limits, self.keeper, self.plan, self.statistics)
        self.averaging = MeanAggregation(self.trained, self.keeper, self.sequence)
        self.step = RoundStep(self.trained, self.keeper, self.sequence)
        self.contributions = Contributions()
        self.release = Release(self.trained, ema_decay, noisy=self.keeper.releases_noisy)

    @property
    def round(self) -> int:
        """Number of the round that is open or will open next."""
        return self.sequence.number

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
        """The guarantee as a sentence; "none" where there is none."""
        return self.keeper.statement(self.sequence.noise)

    @property
    def noise(self) -> NoiseMechanism:
        """Mechanism of the noise on everything that leaves the server."""
        return self.sequence.noise

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round down and up besides broadcasts and updates; None where there are no others."""
        return None

    def weights(self) -> dict[str, Tensor]:
        """Return the true values of every tensor that leaves the server, by name; not copies."""
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
        if self.sequence.current is None:
            self.release.opened(self.sequence.open().veiled, self.round)
        return self.sequence.opened().broadcast(None if client is None else str(client))

    def noisy_weights(self) -> dict[str, Tensor]:
        """Open the round; return W + N of every tensor that leaves the server, which a guarantee allows to release."""
        self.open_round()
        return dict(self.sequence.opened().veiled)

    @property
    def released(self) -> nn.Module:
        """The model to evaluate and to give away: a running mean of W, or with a guarantee of W + N.

        Before the first round it is the initial model, with a guarantee as a copy. With a guarantee this opens the
        round.

        >>> server = Server(nn.Linear(6, 2), ema_decay=0.0)
        >>> server.released is server.model
        True
        """
        if self.round > 0 and self.release.noisy:
            self.open_round()
        return self.release.model(self.round)

    def prepare(self) -> None:
        """Precompute randomness of the next round; may overlap with client training."""
        self.sequence.prepare()

    def base(self) -> Base:
        """Return the frozen parameters under noise, the same at every call, for a client that has none.

        A client puts them into its module once, with `dbcl.protocol.load_base`.

        Raises:
            ProtocolError: No frozen parameter is sent.
        """
        return self.sequence.base()

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
        for who, why in report.rejected.items():
            if who not in known:
                log.warning("round %s: rejected %s: %s (server.contributions counts how often)", report.round, who, why)
        return report

    def validate(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> ValidationResult:
        """Validate the updates for the open round, for `close_validated`. Does not change the server's state."""
        return self.validation.validate(updates, self.sequence.opened())

    def close_validated(self, result: ValidationResult, aggregation: Aggregation | None = None) -> RoundReport:
        """Close the round with updates that `validate` has validated.

        Args:
            result: The accepted updates and the rejections.
            aggregation: Replaces `averaging`, the mean weighted by examples.

        Raises:
            ProtocolError: As for `close_round`.
        """
        result.require(self.validator.min_updates)
        return self.close((aggregation or self.averaging).aggregate(result), result.stats())

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
        report, stats = self.step.take(aggregate, stats or AggregationStats(), self.validator.min_updates)
        self.contributions.add(stats)
        self.validation.influence.observe(stats.influence, stats.agreement)
        self.release.closed(self.round)
        return report

    def void_round(self) -> None:
        """Give the open round up, of which no sum could be made: its number is used up, and the weights stay.

        Raises:
            ProtocolError: The clients add no shares of noise.
        """
        self.keeper.check_void()
        self.open_round()
        self.sequence.void()

    def sums(self) -> Mapping[str, Update]:
        """Return what a server that sees only sums has seen of the last round; empty where it sees each update."""
        return {}

    def state(self) -> State:
        """Return everything that is needed to go on after this moment. It holds W and the secrets."""
        return server_state(self)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned.

        Raises:
            ProtocolError: The state is damaged, or of another model, plan, optimizer or guarantee. Nothing has changed.
        """
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
        """Make a server from the newest whole checkpoint of a folder, with the arguments that it was made with.

        Raises:
            ProtocolError: There is no whole checkpoint, or it is of another server.
        """
        server = cls(model, *arguments, **settings)
        server.load_state(checkpoint.load(user_path(folder)))
        return server
