"""All observed rounds as one observation, and matched filters over them. Reads: client-N and its
allies.

The attacker models every tensor by a `StateSpaceModel`: unknown W_0, known sketches, veil,
momentum, its own updates. The others' expected updates, the drift, are computed from its own
examples, by training as a client would at the broadcast of every lane. The likelihood explains the
remainder. Anything that would move the others' updates by d_t, such as one more example, adds

    sum_t <d_t, influence_t>

to the log-likelihood, to first order, where influence_t is its derivative by the update of round t.
So one pass over the rounds serves any number of examples, groups of them or labels.

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
"""Step of finite differences along a direction, relative to the norm of the weights."""
EXAMPLES_PER_PASS = 2000
ROUNDS_PER_AVERAGE = 5
"""Rounds over which sizes are averaged."""
DIVERGED_LOSS = 1e9
"""Loss in place of one that is not finite."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Knowledge of an attacker besides its transcript.

    `own` are examples like the others', `examples` of them for the drift of a round. `start` is W_0
    where it is known. `released` are published means of W, by the rounds' shares: {60: 1.0} is W
    before round 60. `noise` is the covariance of the veil over rounds where that is known and not
    white, as a function of the seen rounds. `clip` is the length to which updates are clipped.
    `process_noise_scale` is how many times as far as the attacker's own update the others' may be
    from what is expected: more makes single rounds stand out from their neighbours, less adds up
    all of them.

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
    """A lane of a round: its broadcast, as far as an attacker knows it, and the expected number of
    other clients.

    `change` is what a client with the attacker's own examples changes there, the mean client, and
    `kept` what clipping leaves of it.

    >>> import dbcl
    >>> Lane(dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round(), others=1.0).kept
    1.0
    """

    broadcast: Broadcast
    others: float
    change: Mapping[str, Tensor] = field(default_factory=dict)
    kept: float = 1.0


class Own(NamedTuple):
    """Broadcast and answer of one attacker in a round; the answer is empty if it only observed the
    round.
    """

    broadcast: Broadcast
    tensors: Mapping[str, Tensor]
    examples: int


class Trajectory:
    """Model of all rounds together, by one attacker or with allies.

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
        """Return the trajectory for other knowledge; estimates of the broadcasts are shared."""
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
        """Local steps of a client with as many examples as the attacker."""
        training = self.setting.local
        if training.steps is not None:
            return training.steps
        return training.epochs * -(-self.examples // training.batch_size)

    @cached_property
    def examples(self) -> int:
        """Number of a client's examples: as many as the attacker has; one batch where it trains on
        none.
        """
        counts = [own.examples for present in self.received for own in present if own.examples]
        return int(np.median(counts or [self.setting.local.batch_size]))

    @property
    def entries(self) -> float:
        """Expected number of steps of a round that use an example, weighted by its share in their
        batches.
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
        """Estimate the broadcast of another lane: W from all rounds, corrected by this round's
        observation.
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
        """Expected W before each observed round, by a smoother without drift, of every sketched
        tensor.
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
        """Update of a client that takes as many steps as others, each on many of the attacker's
        examples.

        Where that training diverges, nothing is expected of the others: the update is 0.
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
        """Expected sum of the others' updates in each observed round, by tensor, over W's columns."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.views}
        for index, lanes in enumerate(self.lanes):
            parts = [(lane.broadcast.plan, lane.others, lane.change) for lane in lanes]
            for name, rows in found.items():
                rows.append(self.share[name][index] * self.over_columns(name, parts))
        return found

    def over_columns(self, name: str, parts: Sequence[tuple[RoundPlan, float, Mapping[str, Tensor]]]) -> Tensor:
        """Return a round's change of W by clients of several lanes: the sum of count / cohort times
        the lifted change.
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
        """The attacker's own update and the mean client's in each answered round, by tensor."""
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
        """Indices of the observed rounds that the attacker answered."""
        return [index for index, present in enumerate(self.received) if any(own.examples for own in present)]

    @cached_property
    def share(self) -> dict[str, Array]:
        """Share of the drift in real updates, by tensor and observed round.

        They memorise their own examples, and then change less than clients new to them would.
        How much is left the attacker sees by itself: <own, mean client> / |mean client|^2, smoothed
        over rounds. It is 1 but for what is beyond the error of that.
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
        """Standard deviation of an entry of the others' summed update beyond the drift, by tensor
        and round.

        One client's differs from what is expected as much as the attacker's own does.
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
        """Extend values of the answered rounds to all observed rounds, by a running mean."""
        every = np.interp(np.arange(len(self.rounds)), self.answered, values)
        kernel = np.ones(min(ROUNDS_PER_AVERAGE, len(every)))
        return np.convolve(every, kernel, mode="same") / np.convolve(np.ones(len(every)), kernel, mode="same")

    @cached_property
    def posteriors(self) -> dict[str, Posterior]:
        """Posterior of each tensor given all rounds."""
        found = {}
        for name in self.views:
            found[name] = self.model_of(name).solve()
            self.step()
        return found

    def model_of(self, name: str) -> StateSpaceModel:
        """Return the attacker's model of one tensor."""
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
        """Fisher information of the observed rounds but the last about an entry of a tensor's
        updates.
        """
        model = self.posteriors[name].model
        places = [int(np.flatnonzero(model.ticks == round)[0]) for round in self.rounds[:-1]]
        found: Array = model.information[np.ix_(places, places)]
        return found

    def changes(self) -> dict[str, list[Tensor]]:
        """Expected change of W by the others from each observed round to the next, by tensor."""
        return {name: posterior.changes() for name, posterior in self.posteriors.items()}

    def example_slopes(self, index: int, lane: Lane, examples: Examples) -> Array:
        """Return the derivative of the log-likelihood by each example's update in one lane of a
        round: <d(x), influence>.

        A client's step on an example moves V by -lr dL/dV, and W by 1 / cohort of that. Of the
        rounds that were missed after this one the attacker does not know the sketches: it takes
        their mean, which is no sketch.
        """
        return -self.rate(index, lane) * self._slopes(lane, self._along(index, lane), examples)

    def weighted_change(self, index: int, lane: Lane, examples: Examples, weights: Array) -> dict[str, Tensor]:
        """Return the change of W, over its columns, by a client's step on the weighted sum of
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
        """Factor of an example's gradient in one step of its client."""
        return self.setting.local.rate(self.rounds[index]) * lane.kept / self.cohort

    def _along(self, index: int, lane: Lane) -> dict[str, Tensor]:
        """Return the direction of the effective weights V D R^T that matches the influence of a
        round.
        """
        found = {}
        for name, posterior in self.posteriors.items():
            influence, missed = posterior.influence(index)
            sketch = lane.broadcast.plan.sketches.get(name)
            found[name] = (influence if sketch is None else sketch.expand(sketch.apply(influence))) + missed
        return found

    def middle(self, lane: Lane) -> dict[str, Tensor]:
        """Return the effective weights of a client of a lane halfway through its steps."""
        change, sent = lane.change, lane.broadcast.tensors
        moved = {name: V + change[name] / 2 if name in change else V for name, V in sent.items()}
        return effective(Broadcast(lane.broadcast.plan, moved, lane.broadcast.veil))

    def losses(self, lane: Lane, examples: Examples) -> Array:
        """Return each example's loss at a lane's broadcast."""
        return example_losses(loaded(self.template, effective(lane.broadcast)), examples, self.knowledge.objective)

    def _slopes(self, lane: Lane, along: Mapping[str, Tensor], examples: Examples) -> Array:
        """Return the derivative of each example's loss along a direction, halfway through a
        client's steps.
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
    """Return the effective weights of a client's model: V D R^T of sketched tensors, and the others
    unchanged.

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
    """Return the loss of each example; of a diverged model, `DIVERGED_LOSS`.

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
    """Train a model in place as a client does, with public randomness."""
    training.train(model, examples, seed=bytes(seeds.SEED_BYTES), round=round, client=0, loss=objective.loss)
