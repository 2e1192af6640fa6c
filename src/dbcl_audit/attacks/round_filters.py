"""Matched filters for single rounds, computed at the model that the victim received.

The sketch changes in every round and with it all gradients. The attacker can compute the gradient
of each of its own examples at the round's model. The linear filter uses the gradients and the known
noise variance of the tested estimate. The magnitude filter uses |g| / |g|_2 of each tensor, whose
sign does not depend on the labels of a batch, and assumes no noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dbcl_audit.attacks.gradients import example_gradients
from dbcl_audit.attacks.learners import Features, MatchedFilter, Samples
from dbcl_audit.attacks.own_data import OwnBatches, OwnExamples
from dbcl_audit.attacks.roc import Array, Flags
from dbcl_audit.attacks.sources import Source
from dbcl_audit.context import OnProgress

UNOBSERVED = 1e150  # variance of the noise in an unobserved tensor
MAX_MIXED_BATCHES = 300  # of each kind, mixed from single examples in each round
MIN_RELATIVE_SPREAD = 0.03  # relative to a tensor's typical feature; what varies less may be an estimate's rounding
MAX_DEVIATIONS = 6.0  # from the mean, to which features of a tested batch are clipped


class Fidelity(NamedTuple):
    """Gain and noise of the estimate of one tensor.

    Args:
        gain: fraction of the true gradient in the estimate.
        noise: variance of the estimate's noise.

    >>> Fidelity(gain=0.1, noise=0.0025).gain
    0.1
    """

    gain: float
    noise: float


def filter_scores(
    models: Sequence[nn.Module],
    examples: OwnExamples,
    sources: Sequence[Source],
    made: OwnBatches,
    *,
    own_examples: int,
    size: int,
    seed: int,
    tell: OnProgress,
) -> dict[str, Array]:
    """Return the log odds of every source in every tested round, by filter name; shape (sources,
    rounds).

    `models` are the models that the victim received in the tested rounds, as far as the attacker
    knows them. `size` is the victim's batch size.

    >>> from dbcl import Server, SketchConfig, blinded
    >>> from dbcl_audit.attacks.victim import VictimsRound
    >>> from dbcl.simulation import RunConfig, task_of
    >>> examples = OwnExamples(task_of(RunConfig()), np.arange(4000) % 2 == 0, np.arange(40))
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    >>> broadcast = Server(net, SketchConfig(veil=0, coverage="all")).open_round()
    >>> model = blinded(net, broadcast)
    >>> gradient = examples.gradient(model, torch.arange(8))
    >>> victims = [VictimsRound(broadcast, 1, 1)]
    >>> source = Source("the update itself", "server", "adaptive", [gradient], victims, exact=True)
    >>> made = OwnBatches([gradient], np.array([True]), np.array([0]))
    >>> scores = filter_scores([model], examples, [source], made, own_examples=16, size=8, seed=0, tell=str)
    >>> {name: each.shape for name, each in scores.items()}
    {'matched filter': (1, 1), 'matched filter of magnitudes': (1, 1)}
    """
    tell("property: how faithful each estimate is")
    known = fidelities(sources, models, examples, made, seed)
    rng = np.random.default_rng(seed + 1)
    scores = np.zeros((2, len(sources), len(models)))
    for index, model in enumerate(models):
        tell(f"property: matched filters, round {index + 1} of {len(models)}")
        picked = torch.cat(
            [examples.draw(rng, kind, min(own_examples, examples.count(kind))) for kind in (True, False)]
        )
        batch, loss = examples.task.train.take(picked.numpy()), examples.task.objective.loss
        found = example_gradients(model, *batch, loss=loss)
        group = np.repeat(np.arange(len(found)), [row[0].numel() for row in found.values()])
        rows = np.concatenate([row.flatten(1).numpy() for row in found.values()], axis=1)
        linear = MatchedFilter(Samples(rows, examples.holds[picked.numpy()]), group, size)
        magnitudes = MagnitudeFilter(rng, rows, linear.y, group, size)
        mean = linear.mean.astype(np.float64)
        for number, source in enumerate(sources):
            tested, noise = _tested(source, index, known[number], list(found), group, mean)
            scores[0, number, index] = linear(tested[None], noise)[0]
            scores[1, number, index] = magnitudes(tested, np.where(noise == UNOBSERVED, UNOBSERVED, 0.0))
    return {"matched filter": scores[0], "matched filter of magnitudes": scores[1]}


def _tested(
    source: Source, index: int, known: dict[str, Fidelity], names: list[str], group: NDArray[np.integer], mean: Array
) -> tuple[Array, Array]:
    """Return the victim's gradient as one row, and the noise variance of each tensor. Unobserved
    tensors take the mean gradient.
    """
    row, noise = mean.copy(), np.full(len(names), UNOBSERVED)
    for column, name in enumerate(names):
        gain, variance = known.get(name, Fidelity(0.0, 0.0))
        if gain > 0:
            value = source.gradients[index][name].double().numpy().ravel() / gain
            # The bystanders' part is unknown, but its expectation is the mean gradient.
            row[group == column] = value - (source.victims[index].crowd(name) - 1) * row[group == column]
            noise[column] = variance
    return row, noise


class MagnitudeFilter:
    """Matched filter on magnitudes |g| / |g|_2 for the model of one round, trained on mixtures of
    the attacker's examples.

    Cross-validation cannot choose the penalty, because mixed batches share examples. Instead, every
    feature is divided by its standard deviation, and the correlations between features are halved
    (penalty 1). `least_spread` is a lower bound of the standard deviation, relative to the typical
    value of the tensor.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(40) % 2 == 0
    >>> rows = np.where(y[:, None], [3.0, 1.0], [1.0, 3.0]) + 0.1 * rng.normal(size=(40, 2))
    >>> score = MagnitudeFilter(rng, rows, y, np.zeros(2, dtype=np.int64), 4)
    >>> score(np.array([3.0, 1.0]), np.zeros(1)) > 0 > score(np.array([-1.0, -3.0]), np.zeros(1))
    True
    """

    def __init__(
        self,
        rng: np.random.Generator,
        rows: Features,
        y: Flags,
        group: NDArray[np.integer],
        size: int,
        *,
        least_spread: float = MIN_RELATIVE_SPREAD,
    ) -> None:
        kinds = np.repeat([True, False], min(MAX_MIXED_BATCHES, len(rows)))
        shares = np.zeros((len(kinds), len(rows)), dtype=rows.dtype)
        for share, kind in zip(shares, kinds, strict=True):
            among = np.flatnonzero(y == kind)
            np.add.at(share, rng.choice(among, size, replace=size > len(among)), 1 / size)
        made = _magnitudes(shares @ rows, group)
        self.group, self.mean, variance = group, made.mean(axis=0), made.var(axis=0)
        of_tensor = np.bincount(group, variance) / np.bincount(group)
        spread = np.sqrt(variance + least_spread**2 * of_tensor[group]).astype(rows.dtype)
        self.spread = np.where(spread > 0, spread, 1)
        self.filter = MatchedFilter(Samples(self._standardize(made), kinds), group, penalty=1.0)

    def __call__(self, row: Features, noise: Array) -> float:
        """Return the log odds that a gradient has the property. `noise` is 0 for observed tensors
        and UNOBSERVED for the others.
        """
        return float(self.filter(self._standardize(_magnitudes(row[None], self.group)), noise)[0])

    def _standardize(self, rows: Features) -> Features:
        """Standardise in place to save memory; there may be a million features."""
        rows -= self.mean
        rows /= self.spread
        return np.clip(rows, -MAX_DEVIATIONS, MAX_DEVIATIONS, out=rows)


def _magnitudes(rows: Features, group: NDArray[np.integer]) -> Features:
    """Return |g| / |g|_2 of each row and tensor."""
    out = np.abs(rows)
    for part in np.split(out, np.flatnonzero(np.diff(group)) + 1, axis=1):
        size = np.sqrt(np.einsum("ij,ij->i", part, part))[:, None]
        part /= np.where(size > 0, size, 1)
    return out


def fidelities(
    sources: Sequence[Source], models: Sequence[nn.Module], examples: OwnExamples, made: OwnBatches, seed: int
) -> list[dict[str, Fidelity]]:
    """Return the gain and noise of every source's estimate of every tensor, without unobserved
    tensors.

    An estimator shrinks uncertain components. The attacker can compute the mean m of all gradients
    of a round from its own examples. Summed over the rounds, E <estimate, m> = gain * crowd * <m,
    m>. Using two independent means makes <m, m> unbiased.

    >>> from dbcl import Server, SketchConfig, blinded
    >>> from dbcl_audit.attacks.victim import VictimsRound
    >>> from dbcl.simulation import RunConfig, task_of
    >>> examples = OwnExamples(task_of(RunConfig()), np.arange(4000) % 2 == 0, np.arange(40))
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    >>> broadcast = Server(net, SketchConfig(veil=0, coverage="all")).open_round()
    >>> model = blinded(net, broadcast)
    >>> gradient = examples.gradient(model, torch.arange(8))
    >>> victims = [VictimsRound(broadcast, 1, 1)]
    >>> source = Source("the update itself", "server", "adaptive", [gradient], victims, exact=True)
    >>> made = OwnBatches([gradient], np.array([True]), np.array([0]))
    >>> fidelities([source], [model], examples, made, seed=0)[0]["1.bias"]
    Fidelity(gain=1.0, noise=0.0)
    """
    rng = np.random.default_rng(seed + 2)
    half = max(1, min(128, examples.count(True), examples.count(False)))
    inner = [dict.fromkeys(source.gradients[0], 0.0) for source in sources]  # <estimate, m> / crowd
    power = [dict.fromkeys(source.gradients[0], 0.0) for source in sources]  # |estimate|^2
    square: dict[str, float] = {}  # <m, m>
    for index, model in enumerate(models):
        one, two = (
            examples.gradient(model, torch.cat([examples.draw(rng, kind, half) for kind in (True, False)]))
            for _ in range(2)
        )
        for name in one:
            square[name] = square.get(name, 0.0) + float((one[name].double() * two[name]).sum())
        for number, source in enumerate(sources):
            for name, tensor in source.gradients[index].items():
                shown = tensor.double().reshape(one[name].shape)
                crowd = max(1, source.victims[index].crowd(name))
                inner[number][name] += float((shown * (one[name] + two[name]) / 2).sum()) / crowd
                power[number][name] += float(shown.square().sum())
    typical = {
        name: float(np.mean([row[name].double().square().sum() for row in made.gradients])) * len(models)
        for name in square
    }  # |g|^2 of one batch, summed over the rounds as the others are
    found = []
    for number, source in enumerate(sources):
        each = {}
        for name, tensor in source.gradients[0].items():
            sums = inner[number][name], power[number][name], square[name], typical[name]
            crowds = np.array([victim.crowd(name) for victim in source.victims], dtype=np.float64)
            gain, noise = _gain_and_noise(source.exact, crowds, *sums)
            if gain > 0:
                each[name] = Fidelity(gain, noise / len(models) / tensor.numel())
        found.append(each)
    return found


def _gain_and_noise(
    exact: bool, crowds: Array, inner: float, power: float, square: float, typical: float
) -> tuple[float, float]:
    """Return the gain and the squared norm of the noise, from sums over the rounds. `crowds` holds
    the number of clients in each round's sum.
    """
    if exact:
        # With two parties nothing else is in it; with more, the bystanders' batches are.
        return 1.0, max(0.0, typical - square) * float(crowds.mean() - 1)
    gain = min(1.0, inner / square) if square > 0 else 1.0
    if gain <= 0:
        return 0.0, 0.0
    # What the victim's batch varies by belongs to the filter; all else that the mean does not explain is noise.
    expected = typical - square + float(np.square(crowds).mean()) * square
    return gain, max(0.0, power / gain**2 - expected)
