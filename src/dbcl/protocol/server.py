"""The server, the only component with the true weights.

Longer than 350 lines: every public method documents its parameters and errors.
"""

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
    """Holds the model W and runs the rounds.

    `open_round` blinds the model; `close_round` takes a step with the lifted average update.

    Args:
        model: The network. Its weights are changed in place.
        sketch: Protection of each tensor, as a configuration or as a plan built from a
            configuration.
        privacy: Plan of a formal guarantee. The plan then defines the noise, the clipping and the
            weights of the updates. Clients that return too early are rejected. No report or
            decision depends on unprotected data.
        optimizer: Optimizer for the server's step with the average update. Default: momentum 0.5,
            or the optimizer of the privacy plan.
        validator: Limits for updates.
        noise: Noise mechanism for all weights that leave the server, instead of `sketch.veil` or
            `privacy`.
        wire: Transmission dtype of tensors: "float64", "float32", "bfloat16" or "float16"; the
            model's dtype by default.
        calibration: Unlabelled inputs for measuring normalisation statistics on the server after
            every round. Clients cannot measure them on blinded models, so models with such
            statistics require these inputs.
        ema_decay: Decay of the released running mean of W; 0 releases the last W.
        steady_lanes: Assign clients to the same lanes in every round, given the same order of
            requests. Required by secure aggregation.
        insecure_seed: Fixes all secrets, for reproducible experiments. Never set it in a
            deployment.

    Raises:
        PlanError: The model, the plan, the noise and the guarantee are incompatible.

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
        """Names of the transmitted normalisation statistics."""
        self.validation = RoundValidation(limits, self.keeper, self.plan, self.statistics)
        self.averaging = MeanAggregation(self.trained, self.keeper, self.sequence)
        self.step = RoundStep(self.trained, self.keeper, self.sequence)
        self.contributions = Contributions()
        self.release = Release(self.trained, ema_decay, noisy=self.keeper.releases_noisy)

    @property
    def round(self) -> int:
        """Number of the open round, or of the next round."""
        return self.sequence.number

    @property
    def privacy(self) -> PrivacyPlan | None:
        """The privacy plan, or None."""
        return self.keeper.plan

    @property
    def validator(self) -> UpdateValidator:
        """Limits for updates."""
        return self.validation.validator

    @property
    def guarantee(self) -> str:
        """The guarantee in one sentence, or "none"."""
        return self.keeper.statement(self.sequence.noise)

    @property
    def noise(self) -> NoiseMechanism:
        """Noise mechanism for all weights that leave the server."""
        return self.sequence.noise

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes of the last round's other messages, down and up; None if there were none.

        Broadcasts and updates are not included.
        """
        return None

    def weights(self) -> dict[str, Tensor]:
        """Return the true values of every tensor that leaves the server, by name, not copied."""
        return self.trained.read()

    def open_round(self, client: str | int | None = None) -> Broadcast:
        """Blind the model for this round and return a client's broadcast.

        Clients are assigned to lanes in the order of their requests. All noise of a round is
        derived from its key, which checkpoints include, so the same weights never get a second
        noise sample.

        Args:
            client: Name of the client. Without a name, the first lane's broadcast is returned; if
                all clients receive it, they share one sketch as in the paper.

        Returns:
            The broadcast, the same at every call of the round.

        >>> import dbcl
        >>> server = Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all"))
        >>> sorted(server.open_round(client).plan.lane for client in ("alice", "bob"))
        [0, 1]
        """
        if self.sequence.current is None:
            self.release.opened(self.sequence.open().veiled, self.round)
        return self.sequence.opened().broadcast(None if client is None else str(client))

    def noisy_weights(self) -> dict[str, Tensor]:
        """Open the round and return W + N of every tensor that leaves the server.

        A guarantee permits releasing these weights.
        """
        self.open_round()
        return dict(self.sequence.opened().veiled)

    @property
    def released(self) -> nn.Module:
        """The model to evaluate and release: a running mean of W or, under a guarantee, of W + N.

        Before the first round, this is the initial model, or a copy of it under a guarantee. Under
        a guarantee, reading this property opens the round.

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
        """Return the noisy frozen parameters for clients that lack them, the same at every call.

        A client loads them into its module once, with `dbcl.protocol.load_base`.

        Returns:
            The message with the frozen parameters.

        Raises:
            ProtocolError: No frozen parameter is sent.
        """
        return self.sequence.base()

    def close_round(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> RoundReport:
        """Validate the updates, average the accepted updates, lift the average, and take a step.

        Args:
            updates: Updates or their bytes by sender. A list has no sender names; of equal updates
                in a list, only the first is accepted.

        Returns:
            The report of the round, with a reason for every rejected update.

        Raises:
            ProtocolError: Fewer than `validator.min_updates` updates were accepted, or the step
                failed. The round stays open and nothing has changed.
            DivergedError: A `ProtocolError` caused by non-finite values.
        """
        known = set(self.contributions.rejected)
        report = self.close_validated(self.validate(updates))
        for who, why in report.rejected.items():
            if who not in known:
                log.warning("round %s: rejected %s: %s (server.contributions counts how often)", report.round, who, why)
        return report

    def validate(self, updates: Iterable[Update | bytes] | Mapping[str, Update | bytes]) -> ValidationResult:
        """Validate the updates for the open round, for `close_validated`.

        Does not change any state.

        Args:
            updates: Updates or their bytes by sender.

        Returns:
            The accepted updates and the rejections.
        """
        return self.validation.validate(updates, self.sequence.opened())

    def close_validated(self, result: ValidationResult, aggregation: Aggregation | None = None) -> RoundReport:
        """Close the round with the result of `validate`.

        Args:
            result: The accepted updates and the rejections.
            aggregation: Replaces `averaging`, the mean weighted by examples.

        Returns:
            The report of the round.

        Raises:
            ProtocolError: See `close_round`.
        """
        result.require(self.validator.min_updates)
        return self.close((aggregation or self.averaging).aggregate(result), result.stats())

    def close(self, aggregate: Aggregate, stats: AggregationStats | None = None) -> RoundReport:
        """Close the round with an aggregate: lift its mean, validate it, and take a step.

        Args:
            aggregate: A sum of updates from any source. With several lanes it must already be
                lifted.
            stats: Statistics of the updates, for the report.

        Returns:
            The report of the round.

        Raises:
            ProtocolError: The aggregate is invalid or the step failed. Nothing has changed and the
                round stays open.

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
        """Skip an open round that yielded no sum. Its number is used up; the weights do not change.

        Raises:
            ProtocolError: The guarantee does not use distributed noise.
        """
        self.keeper.check_void()
        self.open_round()
        self.sequence.void()

    def sums(self) -> Mapping[str, Update]:
        """Return the sums of the last round if the server sees only sums, else an empty mapping."""
        return {}

    def state(self) -> State:
        """Return the complete state of the server, including W and all secrets."""
        return server_state(self)

    def load_state(self, state: State) -> None:
        """Restore the state returned by `state`.

        Args:
            state: The state.

        Raises:
            ProtocolError: The state is damaged, or belongs to another model, plan, optimizer or
                guarantee. Nothing has changed.
        """
        load_server(self, state)

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint atomically and keep the previous checkpoint.

        Args:
            folder: The folder of the checkpoints.

        Returns:
            The path of the new checkpoint.

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
        """Create a server from the newest undamaged checkpoint of a folder.

        Args:
            folder: The folder of the checkpoints.
            model: The network.
            *arguments: Positional arguments of the saved server.
            **settings: Keyword arguments of the saved server.

        Returns:
            The restored server.

        Raises:
            ProtocolError: There is no undamaged checkpoint, or it belongs to another server.
        """
        server = cls(model, *arguments, **settings)
        server.load_state(checkpoint.load(user_path(folder)))
        return server
