"""Enforcers of formal guarantees: noise from a trusted server, or noise shares from the clients."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dbcl.blinding import veiled
from dbcl.config import UNSKETCHED
from dbcl.errors import PlanError, ProtocolError, shown
from dbcl.optim import ServerOptimizer, fedavg, momentum
from dbcl.privacy import (
    CorrelatedNoise,
    IndependentNoise,
    NoiseMechanism,
    ParticipationTracker,
    PrivacyPlan,
    Workload,
    clip_factor,
    norm,
    share,
)
from dbcl.protocol.keeper import Keeper
from dbcl.protocol.messages import AggregationStats, RoundReport, Update, UpdateStack
from dbcl.protocol.rejection import Reason, Rejection
from dbcl.protocol.trained_weights import TrainedWeights
from dbcl.protocol.validation import AcceptedUpdate, UpdateValidator
from dbcl.state import State, join

MAX_EPS = torch.finfo(torch.float32).eps
"""Largest permitted relative spacing of the dtype that transports sums of clipped gradients."""
MAX_ROUNDING = 0.01
"""Largest permitted rounding error per example on a client, as a fraction of the clip."""
FLOAT32_SLACK = 1e-3
"""Relative tolerance of a projection for rounding errors of float32 sums."""


class DifferentialPrivacy(Keeper):
    """The guarantee of a `PrivacyPlan`, with a trusted server.

    Decisions and reports must not depend on data without noise. The server therefore uses no
    medians, no value-based rejection and no client metrics. If the privacy unit is one example,
    clients clip each example separately and send the sum. The clients are then responsible for
    limiting how often an example is used.

    Args:
        plan: The privacy plan.
        insecure: True if the noise is derived from a known seed. Nothing is guaranteed then.
    """

    exact = True
    releases_noisy = True

    def __init__(self, plan: PrivacyPlan, *, insecure: bool) -> None:
        self.plan: PrivacyPlan = plan
        self._statement = "none: its secrets follow from insecure_seed" if insecure else plan.promise
        self.grid = None if plan.noise_on_updates else plan.grid
        self._noise = CorrelatedNoise(plan.mechanism, plan.sigma, self._statement)
        of_clients = plan.unit == "client"
        separation, participations = (plan.separation, plan.participations) if of_clients else (1, plan.rounds)
        self.tracker: ParticipationTracker = ParticipationTracker(
            rounds=plan.rounds, separation=separation, participations=participations, clients=plan.clients
        )

    def statement(self, noise: NoiseMechanism) -> str:
        return self._statement

    def default_optimizer(self) -> ServerOptimizer:
        if self.plan.noise_on_updates:
            return super().default_optimizer()
        return momentum(self.plan.momentum, self.plan.lr) if self.plan.momentum else fedavg(self.plan.lr)

    def noise_mechanism(self, veils: Mapping[str, float], given: NoiseMechanism | None = None) -> NoiseMechanism:
        if given is not None:
            raise PlanError("give either privacy, which has noise of its own, or noise")
        return super().noise_mechanism(veils) if self.plan.noise_on_updates else self._noise

    def check(self, weights: TrainedWeights, wire: torch.dtype | None) -> None:
        plan, problems = self.plan, list[str]()
        if not plan.noise_on_updates and (found := Workload.from_optimizer(weights.optimizer)) != plan.workload:
            problems.append(f"it was planned for {plan.workload} on the server, which has {found}")
        sent = {name: wire or tensor.dtype for name, tensor in weights.model_tensors().items()}
        coarse = sorted(name for name, dtype in sent.items() if torch.finfo(dtype).eps > MAX_EPS)
        if plan.unit == "example" and coarse:
            # Rounding a sum of many gradients can move it by more than one of them.
            problems.append(
                f"{coarse[0]} travels in half precision, whose rounding may enlarge what one example changes in a sum "
                'of many; take a model in float32 and wire="float32"'
            )
        elif plan.unit == "example" and (moved := self._rounding(weights)) > MAX_ROUNDING * plan.clip:
            problems.append(
                f"the weights are so large beside the clip, {plan.clip:g}, that what clients round in them may move "
                f"an update by {moved:.3g}; take a larger lr with a server_lr smaller in proportion, a larger clip, or "
                "a model in float64"
            )
        if weights.statistics:
            problems.append(
                f"{min(weights.statistics)} is measured by clients without a clip; use a normalisation without running "
                "statistics, such as GroupNorm"
            )
        if problems:
            raise PlanError("\n  - ".join(["this guarantee cannot be kept:", *problems]))

    def _rounding(self, weights: TrainedWeights) -> float:
        """Bound the rounding error in the difference between sums of neighbouring data sets.

        A client applies its step to the weights and sends the difference. Each value is therefore
        rounded to the floating-point spacing of the weights. The norm of the weights is at most the
        sum of the initial norm, the largest change and the noise.
        """
        own = weights.read()
        spacing = max(torch.finfo(tensor.dtype).eps for tensor in weights.model_tensors().values())
        parameters = sum(tensor.numel() for tensor in own.values())
        noise = 0.0 if self.plan.noise_on_updates else self.plan.noise_to_signal(parameters)
        return spacing * (norm(own) + self.plan.reach * (1 + noise))

    def restrict(self, validator: UpdateValidator) -> UpdateValidator:
        return replace(
            validator,
            norm_bound=self.plan.clip if self.plan.unit == "client" else None,
            clip=True,
            max_influence=None,
            outlier_factor=None,
            reject_by_value=False,
        )

    def check_weights(self, round: int, unchanged: bool) -> None:
        if not unchanged:
            raise ProtocolError(
                f"round {round}: the weights were changed from outside, and the guarantee is that of the rounds alone; "
                "the remedy: make the server anew from its last checkpoint"
            )

    def check_return(self, round: int, kept: int, *, same_key: bool) -> None:
        if kept < round or (kept == round and not same_key):
            raise ProtocolError(
                f"with a guarantee nothing goes back: this server is at round {round}, and playing round {kept} again "
                "would use its updates twice"
            )

    def check_senders(self, *, named: bool) -> None:
        if not named:
            raise ProtocolError("a guarantee counts who takes part: give the updates as a dictionary by their senders")

    def rejection(self, round: int, client: str, beside: Collection[str]) -> Rejection | None:
        spent = self.tracker.refusal(round, client, beside)
        return None if spent is None else Rejection(Reason.BUDGET, spent)

    def in_turn(self, round: int, clients: Sequence[str]) -> list[str]:
        """Return at most the planned cohort of eligible clients, fewest participations first."""
        may = [client for client in clients if self.tracker.refusal(round, client) is None]
        return sorted(may, key=self.tracker.uses)[: self.plan.cohort]

    def protect(self, update: Update) -> Update:
        return replace(update, metrics={})

    def protect_stack(self, round: int, stack: UpdateStack) -> UpdateStack | None:
        if len(self.tracker.allowed(round, stack.senders)) < len(stack):
            return None
        stack = replace(stack, metrics=({},) * len(stack))
        return stack if stack.norms(stack.tensors).isfinite().all() else None

    def weigh(self, accepted: Mapping[str, AcceptedUpdate]) -> dict[str, AcceptedUpdate]:
        return {who: self._weighed(each) for who, each in accepted.items()}

    def _weighed(self, each: AcceptedUpdate) -> AcceptedUpdate:
        if self.plan.unit == "example":
            # A sum of clipped gradients lies in a ball. Projecting onto it moves no two sums further apart; whether a
            # client has clipped each gradient, the server cannot know.
            bound = self.plan.clip * min(each.weight, self.plan.batch)
            factor = clip_factor(each.norm, bound * (1 + 1e-6))
            return replace(each, weight=1.0, factor=factor, norm=each.norm * factor)
        cap = self.plan.weight_cap
        return replace(each, weight=share(each.weight, weight_cap=cap, per_round=1) if cap else 1.0)

    def denominator(self, weights: Collection[float]) -> float:
        return float(self.plan.per_round)

    def project(self, changes: dict[str, Tensor], size: float, count: int) -> dict[str, Tensor]:
        # Rejecting an aggregate outside the ball would depend on data without noise.
        if self.plan.unit != "client":
            return changes
        factor = clip_factor(size, count * self.plan.clip / self.plan.per_round * (1 + FLOAT32_SLACK))
        return changes if factor == 1.0 else {name: change * factor for name, change in changes.items()}

    def report(self, report: RoundReport, stats: AggregationStats) -> tuple[RoundReport, AggregationStats]:
        bare = replace(report, clipped=0, examples=0, norm=math.nan, metrics={})
        return bare, replace(stats, capped=(), clipped=())

    def noisy(self, changes: dict[str, Tensor], round: int, key: bytes, model: nn.Module) -> dict[str, Tensor]:
        if not self.plan.noise_on_updates:
            return changes
        self._noise.begin(round + 1, key, model)
        noisy = veiled(changes, partial(self._noise.noise, round + 1), self.plan.grid)
        self._noise.end(round + 1)
        return noisy

    def check_use(self, round: int, stats: AggregationStats, count: int) -> None:
        if len(stats.senders) != count:
            raise ProtocolError(f"round {round}: a guarantee counts participations, and the senders are not known")
        self.tracker.check(round, stats.senders)

    def use(self, round: int, senders: Collection[str]) -> None:
        self.tracker.use(round, senders)

    def values(self) -> dict[str, Any]:
        return {name: list(own) if isinstance(own, tuple) else own for name, own in asdict(self.plan).items()}

    def state(self) -> State:
        parts = {"participation": self.tracker.state()}
        if self.plan.noise_on_updates:
            parts["noise"] = self._noise.state()
        return join(**parts)

    def load_state(self, state: State) -> None:
        self.tracker.load_state(state.part("participation"))
        if self.plan.noise_on_updates:
            self._noise.load_state(state.part("noise"))


class SharedNoise(DifferentialPrivacy):
    """The guarantee of a plan with distributed noise: the server sees only noisy sums.

    Every broadcast, release or report of W is post-processing of these sums. The server must not
    request a separate update, because a single noise share protects it only weakly.
    """

    default_sketch = UNSKETCHED

    def __init__(self, plan: PrivacyPlan, *, insecure: bool) -> None:
        super().__init__(plan, insecure=insecure)
        self.grid = None

    def noise_mechanism(self, veils: Mapping[str, float], given: NoiseMechanism | None = None) -> NoiseMechanism:
        super().noise_mechanism(veils, given)
        return IndependentNoise(dict.fromkeys(veils, 0.0))

    def check_void(self) -> None:
        """Allow skipping a round.

        Clients never reuse its noise, and groups may change between rounds.
        """

    def check(self, weights: TrainedWeights, wire: torch.dtype | None) -> None:
        problems = []
        if weights.statistics:
            problems.append(
                f"{min(weights.statistics)} is measured by clients without a clip; use a normalisation without running "
                "statistics, such as GroupNorm"
            )
        plan, values = weights.plan, sum(tensor.numel() for tensor in weights.read().values())
        if plan.lanes > 1 or any(tensor.sketched for tensor in plan.tensors) or any(plan.veils.values()):
            problems.append(
                "noise of clients is correlated over rounds in the coordinates of the weights, which are sent as they "
                "are: leave out the sketch and the veil (dbcl.config.UNSKETCHED); the guarantee covers all that is sent"
            )
        if values != self.plan.values:
            problems.append(f"it was planned for {self.plan.values} values, and an update has {values}")
        if problems:
            raise PlanError("\n  - ".join(["this guarantee cannot be kept:", *problems]))

    def check_weights(self, round: int, unchanged: bool) -> None:
        """Allow any weights, because the guarantee does not depend on the broadcast."""

    def project(self, changes: dict[str, Tensor], size: float, count: int) -> dict[str, Tensor]:
        return changes

    def noisy(self, changes: dict[str, Tensor], round: int, key: bytes, model: nn.Module) -> dict[str, Tensor]:
        return changes

    def check_use(self, round: int, stats: AggregationStats, count: int) -> None:
        if not stats.noisy:
            raise ProtocolError(
                f"round {round}: this guarantee is that of sums with shares of noise: use "
                "dbcl.engines.secure.SecureServer, or SecureRounds over a transport of your own"
            )
        super().check_use(round, stats, count)


def guarantee_of(plan: PrivacyPlan | None, *, insecure: bool) -> Keeper:
    """Return the enforcer of a plan, or an enforcer without a guarantee if the plan is None."""
    if plan is None:
        return Keeper()
    return (SharedNoise if plan.shared else DifferentialPrivacy)(plan, insecure=insecure)


def check_values(kept: Any, keeper: Keeper) -> None:
    """Raise `ProtocolError` if a checkpoint was written under another guarantee."""
    if kept != keeper.values():
        found = shown(kept, 100) if kept else "none"
        raise ProtocolError(
            f"the checkpoint belongs to a run with another guarantee ({found}), which cannot be changed in a run"
        )
