"""Joint model of all observed rounds, and matched filters based on it. Reads: client-N and its
allies.

The attacker models every tensor by a `StateSpaceModel` with unknown W_0 and known sketches, veil,
momentum and own updates. The drift is the expected sum of the other clients' updates. To compute
it, the attacker trains on its own examples at the broadcast of every lane, as a client would. The
likelihood describes the deviations from the drift. A hypothesis that changes the other clients'
updates by d_t, such as one additional example, adds to first order

    sum_t <d_t, influence_t>

to the log-likelihood. influence_t is the derivative of the log-likelihood by the update of round t.
One pass over the rounds is therefore enough for any number of examples, groups or labels.

Longer than 350 lines, because the cached quantities of `Trajectory` depend on each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl.data import Examples
from dbcl.data.trees import Tree, call, map_tensors, tensors
from dbcl.engines import LocalTraining
from dbcl.model.tensors import named_tensors
from dbcl.objective import CLASSIFICATION, Objective
from dbcl.protocol import Broadcast, blinded, make_update
from dbcl.round_plan import RoundPlan
from dbcl.transcripts import Transcript
from dbcl_audit.attacks.roc import Array
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.estimators.others import plans_of_others
from dbcl_audit.estimators.smoother import known_scales
from dbcl_audit.estimators.state_space import Observation, Posterior, StateSpaceModel

STEP = 1e-2
"""Step size of finite differences, relative to the norm of the weights."""
EXAMPLES_PER_PASS = 2000
ROUNDS_PER_AVERAGE = 5
"""Number of rounds in a running mean."""
DIVERGED_LOSS = 1e9
"""Loss that replaces a non-finite loss."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Knowledge of an attacker in addition to its transcript.

    Args:
        own: examples from the same distribution as the other clients' examples.
        objective: loss of the task.
        examples: number of own examples used for the drift of a round.
        start: initial weights W_0, if known.
        released: published weighted means of W, as pairs of weights by round and values: {60: 1.0}
            is W before round 60.
        noise: covariance of the veil over the observed rounds, as a function of the rounds, if the
            veil is known and not white.
        clip: norm to which updates are clipped.
        process_noise_scale: deviation of the other clients' updates from the expected updates,
            relative to that of the attacker's own update. Larger values emphasise single rounds;
            smaller values accumulate all rounds.

    >>> Knowledge(None).clip is None
    True
    """

    own: Examples
    objective: Objective = CLASSIFICATION
    examples: int = 1000
    start: Mapping[str, Tensor] | None = None
    released: Sequence[tuple[Mapping[int, float], Mapping[str, Tensor]]] = ()
    noise: Callable[[Sequence[int]], Array] | None = None
    clip: float | None = None
    process_noise_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Lane:
    """One lane of a round, as far as the attacker knows it.

    Args:
        broadcast: broadcast of the lane, or an estimate of it.
        others: expected number of other clients in the lane.
        change: expected update of a client (the mean client), simulated with the attacker's own
            examples.
        kept: factor by which clipping scales this update.

    >>> import dbcl
    >>> Lane(dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round(), others=1.0).kept
    1.0
    """

    broadcast: Broadcast
    others: float
    change: Mapping[str, Tensor] = field(default_factory=dict)
    kept: float = 1.0


class Own(NamedTuple):
    """Broadcast and update of one attacker in a round. The update is empty if the attacker did not
    train in the round.
    """

    broadcast: Broadcast
    tensors: Mapping[str, Tensor]
    examples: int


class Trajectory:
    """Joint model of all rounds observed by one attacker, or by an attacker and its allies.

    >>> from dbcl_audit.examples import example_run
    >>> played = example_run("veil", rounds=4, model="dlg-lenet")
    >>> own, members = (played.shards.examples.subset(rows) for rows in (played.shards.own, played.shards.members()))
    >>> trajectory = Trajectory(played.recorded.attacker, Knowledge(own, examples=50))
    >>> trajectory.example_slopes(0, trajectory.lanes[0][0], members).shape
    (40,)
    """

    def __init__(
        self,
        transcript: Transcript,
        knowledge: Knowledge,
        *,
        allies: Sequence[Transcript] = (),
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self.transcript, self.knowledge, self.step = transcript, knowledge, step
        self.pooled = (transcript, *allies)
        self.views = tensor_observations(transcript, allies=allies)
        self.rounds = next(iter(self.views.values())).rounds
        self.setting, self.template = transcript.setting, transcript.template()
        self.received = [self._received(round) for round in self.rounds]
        self.scales = {name: known_scales(view, self.setting.veil) for name, view in self.views.items()}

    def knowing(self, knowledge: Knowledge) -> "Trajectory":
        """Return the trajectory for different knowledge. The estimated broadcasts are reused."""
        other = Trajectory(self.transcript, knowledge, allies=self.pooled[1:], step=self.step)
        other.lanes, other._own = self.lanes, self._own
        return other

    def _received(self, round: int) -> list[Own]:
        found = []
        for each in self.pooled:
            if round in each.rounds:
                seen = each[round]
                sent = seen.updates.get(each.client or "")
                found.append(Own(seen.broadcast, sent.tensors if sent else {}, sent.examples if sent else 0))
        return found

    @property
    def cohort(self) -> int:
        return self.setting.cohort

    @cached_property
    def steps(self) -> int:
        """Number of local steps of a client with as many examples as the attacker."""
        training = self.setting.local
        if training.steps is not None:
            return training.steps
        return training.epochs * -(-self.examples // training.batch_size)

    @cached_property
    def examples(self) -> int:
        """Number of examples of a client: the attacker's own number, or one batch if the attacker
        did not train.
        """
        counts = [own.examples for present in self.received for own in present if own.examples]
        return int(np.median(counts or [self.setting.local.batch_size]))

    @property
    def entries(self) -> float:
        """Expected number of a round's steps that use an example, weighted by the example's share
        of the batch.
        """
        return self.steps / self.examples

    @cached_property
    def lanes(self) -> list[list[Lane]]:
        """Lanes of the other clients in each observed round, with the mean client's change."""
        found = []
        for index in range(len(self.rounds)):
            held = {own.broadcast.plan.digest: own.broadcast for own in self.received[index]}
            known = [own.broadcast.plan for own in self.received[index]]
            plans = plans_of_others(known, self.cohort)
            lanes = []
            for plan, others in plans:
                if others > 0:
                    broadcast = held.get(plan.digest) or self._estimated(plan, next(iter(held.values())), index)
                    change = self._mean_client(broadcast)
                    kept = self._kept(change)
                    lanes.append(Lane(broadcast, others, {name: kept * each for name, each in change.items()}, kept))
            found.append(lanes)
            self.step()
        return found

    def _estimated(self, plan: RoundPlan, own: Broadcast, index: int) -> Broadcast:
        """Estimate the broadcast of another lane: W from all rounds, corrected by the observation
        of this round.
        """
        tensors = dict(own.tensors)
        for name, sketch in plan.sketches.items():
            view, guess = self.views[name], self._weights[name][index]
            mine = view.sketches[index]
            guess = guess + mine.lift(view.seen[index] - mine.apply(guess))
            tensors[name] = sketch.apply(guess).to(own.tensors[name].dtype)
        return Broadcast(plan, tensors, own.veil)

    @cached_property
    def _weights(self) -> dict[str, list[Tensor]]:
        """Expected W before each observed round, for every sketched tensor, from a smoother without
        drift.
        """
        found = {}
        for name, view in self.views.items():
            if view.sketched:
                scales = self.scales[name]
                model = StateSpaceModel(view, veil=self._veil(name), update=scales.update, weight=scales.weight)
                found[name] = model.solve().weights()
        return found

    def _veil(self, name: str) -> float | Tensor:
        noise = self.knowledge.noise
        return self.scales[name].veil if noise is None else torch.from_numpy(noise(self.rounds))

    def _mean_client(self, broadcast: Broadcast) -> dict[str, Tensor]:
        """Simulate the mean client: the usual number of steps, but with large batches of the
        attacker's examples.

        If the training diverges, the expected update is set to 0.
        """
        model, training, examples = blinded(self.template, broadcast), self.setting.local, self.knowledge.own
        order = seeds.permutation(bytes(seeds.SEED_BYTES), "drift", broadcast.round, n=len(examples))
        # At least the clients' own batch size: smaller batches diverge at rates at which clients do not.
        size = max(training.batch_size, min(len(examples), self.knowledge.examples) // self.steps)
        rows = np.resize(order, size * self.steps)
        large = replace(training, batch_size=size, epochs=1, steps=self.steps)
        train_on(model, examples.subset(rows), large, broadcast.round, self.knowledge.objective)
        sent = make_update(model, broadcast, examples=1).tensors
        change = {name: tensor for name, tensor in sent.items() if name in self.views}
        if not all(tensor.isfinite().all() for tensor in change.values()):
            return {name: torch.zeros_like(tensor) for name, tensor in change.items()}
        return change

    def _kept(self, change: Mapping[str, Tensor]) -> float:
        """Factor by which clipping scales an update."""
        clip = self.knowledge.clip
        length = sum(float(tensor.square().sum()) for tensor in change.values()) ** 0.5
        return 1.0 if clip is None or length <= clip else clip / length

    @cached_property
    def drift(self) -> dict[str, list[Tensor]]:
        """Expected sum of the other clients' updates in each observed round, by tensor, over the
        columns of W.
        """
        found: dict[str, list[Tensor]] = {name: [] for name in self.views}
        for index, lanes in enumerate(self.lanes):
            parts = [(lane.broadcast.plan, lane.others, lane.change) for lane in lanes]
            for name, rows in found.items():
                rows.append(self.share[name][index] * self.over_columns(name, parts))
        return found

    def over_columns(self, name: str, parts: Sequence[tuple[RoundPlan, float, Mapping[str, Tensor]]]) -> Tensor:
        """Return the change of W by clients of several lanes in one round: the sum of the lifted
        changes, weighted by count / cohort.
        """
        view = self.views[name]
        total = torch.zeros(len(view.seen[0]), view.dim)
        for plan, count, change in parts:
            matrix = change[name].reshape(len(view.seen[0]), -1)
            sketch = plan.sketches.get(name)
            total += count / self.cohort * (matrix if sketch is None else sketch.lift(matrix))
        return total

    @cached_property
    def _own(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """The attacker's own update and the mean client's update in each answered round, by
        tensor.
        """
        found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.views}
        for index in self.answered:
            own = next(own for own in self.received[index] if own.examples)
            lanes = {lane.broadcast.plan.digest: lane.change for lane in self.lanes[index]}
            change = lanes.get(own.broadcast.plan.digest)
            if change is None:
                whole = self._mean_client(own.broadcast)
                change = {name: self._kept(whole) * each for name, each in whole.items()}
            for name, pairs in found.items():
                pairs.append((self._kept(own.tensors) * own.tensors[name], change[name]))
        return found

    @cached_property
    def answered(self) -> list[int]:
        """Indices of the observed rounds in which the attacker trained."""
        return [index for index, present in enumerate(self.received) if any(own.examples for own in present)]

    @cached_property
    def share(self) -> dict[str, Array]:
        """Ratio of actual to expected updates, by tensor and observed round.

        Clients memorise their own examples and then change the model less than new clients would.
        The attacker estimates the ratio from its own updates, <own, mean client> / |mean client|^2,
        as a running mean over rounds. The estimate is shrunk towards 1 by its standard error.
        """
        found = {}
        for name, pairs in self._own.items():
            shares = [float((own * mean).sum() / (mean.square().sum() + 1e-30)) for own, mean in pairs]
            mean, square = self._over_rounds(shares), self._over_rounds([share**2 for share in shares])
            error = np.maximum(square - mean**2, 0) / min(ROUNDS_PER_AVERAGE, len(shares))
            found[name] = 1 + (mean - 1) * np.maximum(0, 1 - error / np.maximum((mean - 1) ** 2, 1e-12))
        return found

    @cached_property
    def spread(self) -> dict[str, Array]:
        """Standard deviation of an entry of the other clients' summed update about the drift, by
        tensor and round.

        The deviation of one client from its expected update is assumed to equal the attacker's own
        deviation.
        """
        others, found = max(self.cohort - len(self.pooled), 1), {}
        for name, pairs in self._own.items():
            shares = self.share[name][self.answered]
            left = [(own - share * mean).square().mean() for (own, mean), share in zip(pairs, shares, strict=True)]
            variance = self._over_rounds([float(each) for each in left])
            size = self.knowledge.process_noise_scale * np.sqrt(others * variance) / self.cohort
            found[name] = size + 1e-9 * self.scales[name].weight
        return found

    def _over_rounds(self, values: Sequence[float]) -> Array:
        """Extend values of the answered rounds to all observed rounds, by interpolation and a
        running mean.
        """
        every = np.interp(np.arange(len(self.rounds)), self.answered, values)
        kernel = np.ones(min(ROUNDS_PER_AVERAGE, len(every)))
        return np.convolve(every, kernel, mode="same") / np.convolve(np.ones(len(every)), kernel, mode="same")

    @cached_property
    def posteriors(self) -> dict[str, Posterior]:
        """Posterior of each tensor given all observed rounds."""
        found = {}
        for name in self.views:
            found[name] = self.model_of(name).solve()
            self.step()
        return found

    def model_of(self, name: str) -> StateSpaceModel:
        """Return the attacker's state-space model of one tensor."""
        view, known = self.views[name], self.knowledge
        start = None if known.start is None else view.matrix(known.start[name])
        more = [Observation(dict(shares), view.matrix(weights[name])) for shares, weights in known.released]
        return StateSpaceModel(
            view,
            veil=self._veil(name),
            update=self.spread[name],
            weight=self.scales[name].weight if start is None else 0.0,
            drift=self.drift[name],
            start=start,
            more=more,
        )

    def information(self, name: str) -> Array:
        """Fisher information about an entry of a tensor's updates, for all observed rounds except
        the last.
        """
        model = self.posteriors[name].model
        places = [int(np.flatnonzero(model.ticks == round)[0]) for round in self.rounds[:-1]]
        found: Array = model.information[np.ix_(places, places)]
        return found

    def changes(self) -> dict[str, list[Tensor]]:
        """Expected change of W by the other clients between successive observed rounds, by
        tensor.
        """
        return {name: posterior.changes() for name, posterior in self.posteriors.items()}

    def example_slopes(self, index: int, lane: Lane, examples: Examples) -> Array:
        """Return <d(x), influence>, the derivative of the log-likelihood by each example's update,
        for one lane of a round.

        A client's step on an example changes V by -lr dL/dV, and W by 1 / cohort of this change.
        For later rounds that the attacker missed, the sketches are unknown, and their expectation
        (the identity) is used instead.
        """
        return -self.rate(index, lane) * self._slopes(lane, self._along(index, lane), examples)

    def weighted_change(self, index: int, lane: Lane, examples: Examples, weights: Array) -> dict[str, Tensor]:
        """Return the change of W, over its columns, by a client's step on the weighted sum of the
        examples' losses.
        """
        model = loaded(self.template, self.middle(lane))
        names = [name for name in self.views if name in dict(model.named_parameters())]
        batch = examples.take(np.arange(len(examples)))
        each = each_loss(call(model, batch.inputs), batch.targets, self.knowledge.objective)
        held = dict(model.named_parameters())
        total = (each * torch.from_numpy(weights).to(each)).sum()
        gradients = torch.autograd.grad(total, [held[name] for name in names])
        found = {}
        for name, gradient in zip(names, gradients, strict=True):
            sketch, matrix = lane.broadcast.plan.sketches.get(name), self.views[name].matrix(gradient)
            found[name] = -self.rate(index, lane) * (matrix if sketch is None else sketch.lift(sketch.project(matrix)))
        return found

    def rate(self, index: int, lane: Lane) -> float:
        """Return the factor by which an example's gradient changes W in one client step."""
        return self.setting.local.rate(self.rounds[index]) * lane.kept / self.cohort

    def _along(self, index: int, lane: Lane) -> dict[str, Tensor]:
        """Return the direction of the effective weights V D R^T that corresponds to the influence
        of a round.
        """
        found = {}
        for name, posterior in self.posteriors.items():
            influence, missed = posterior.influence(index)
            sketch = lane.broadcast.plan.sketches.get(name)
            found[name] = (influence if sketch is None else sketch.expand(sketch.apply(influence))) + missed
        return found

    def middle(self, lane: Lane) -> dict[str, Tensor]:
        """Return the effective weights of a lane's client halfway through its local steps."""
        change, sent = lane.change, lane.broadcast.tensors
        moved = {name: V + change[name] / 2 if name in change else V for name, V in sent.items()}
        return effective(Broadcast(lane.broadcast.plan, moved, lane.broadcast.veil))

    def losses(self, lane: Lane, examples: Examples) -> Array:
        """Return the loss of each example at the lane's broadcast."""
        return example_losses(loaded(self.template, effective(lane.broadcast)), examples, self.knowledge.objective)

    def _slopes(self, lane: Lane, along: Mapping[str, Tensor], examples: Examples) -> Array:
        """Return the directional derivative of each example's loss, halfway through a client's
        local steps.
        """
        weights = self.middle(lane)
        shapes = {part.name: part.layout for part in lane.broadcast.plan.tensors if part.sketched}
        directions = {
            name: shapes[name].weight(each) if name in shapes else each.reshape(weights[name].shape)
            for name, each in along.items()
        }
        size = sum(float(weights[name].square().sum()) for name in directions) ** 0.5
        length = sum(float(each.square().sum()) for each in directions.values()) ** 0.5
        if not length > 0:
            return np.zeros(len(examples))
        step = STEP * size / length
        ends = []
        for sign in (1, -1):
            moved = {name: weights[name] + sign * step * each.to(weights[name]) for name, each in directions.items()}
            ends.append(example_losses(loaded(self.template, {**weights, **moved}), examples, self.knowledge.objective))
        slopes: Array = (ends[0] - ends[1]) / (2 * step)
        return slopes


def effective(broadcast: Broadcast) -> dict[str, Tensor]:
    """Return the effective weights of a client's model: V D R^T for sketched tensors, unchanged
    values for the others.

    >>> import dbcl
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> {name: tuple(tensor.shape) for name, tensor in sorted(effective(broadcast).items())}
    {'bias': (2,), 'weight': (2, 6)}
    """
    return {
        part.name: part.layout.weight(broadcast.plan.sketches[part.name].expand(broadcast.tensors[part.name].float()))
        if part.sketched
        else broadcast.tensors[part.name].float()
        for part in broadcast.plan.tensors
    }


@torch.no_grad()
def loaded(template: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Load weights into the template, in place.

    >>> loaded(nn.Linear(1, 1), {"bias": torch.ones(1), "weight": torch.zeros(1, 1)})(torch.ones(1)).item()
    1.0
    """
    own = named_tensors(template)
    for name, tensor in weights.items():
        own[name].copy_(tensor)
    return template


@torch.no_grad()
def example_losses(model: nn.Module, examples: Examples, objective: Objective) -> Array:
    """Return the loss of each example. Non-finite losses of a diverged model are replaced by
    `DIVERGED_LOSS`.

    >>> from dbcl.data import examples_of
    >>> examples = examples_of((torch.tensor([[9.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])))
    >>> example_losses(nn.Identity(), examples, CLASSIFICATION).round(3)
    array([0.   , 0.693])
    """
    training = model.training
    model.eval()
    found = []
    for start in range(0, len(examples), EXAMPLES_PER_PASS):
        batch = examples.take(np.arange(start, min(start + EXAMPLES_PER_PASS, len(examples))))
        outputs = call(model, batch.inputs)
        found.append(
            each_loss(outputs, batch.targets, objective).double().nan_to_num(DIVERGED_LOSS, DIVERGED_LOSS).numpy()
        )
    model.train(training)
    return np.concatenate(found)


def each_loss(outputs: Tree, targets: Tree, objective: Objective) -> Tensor:
    """Return the loss of each example of a batch.

    >>> each_loss(torch.zeros(2, 4), torch.tensor([0, 1]), CLASSIFICATION)
    tensor([1.3863, 1.3863])
    """
    classes = isinstance(targets, Tensor) and targets.ndim == 1 and isinstance(outputs, Tensor) and outputs.ndim == 2
    if objective.classifies and classes and outputs.shape[1] > 1:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    return torch.stack(
        [
            objective.loss(*map_tensors(lambda tensor: tensor[row : row + 1], (outputs, targets)))  # noqa: B023
            for row in range(len(next(tensors(targets))))
        ]
    )


def train_on(model: nn.Module, examples: Examples, training: LocalTraining, round: int, objective: Objective) -> None:
    """Train a model in place as a client does, with a public seed."""
    training.train(model, examples, seed=bytes(seeds.SEED_BYTES), round=round, client=0, loss=objective.loss)
