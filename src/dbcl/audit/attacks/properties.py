"""From each seat: did the victim's batch have a property? What an attacker learns from examples of its own.

The random forest, the published learner, is trained once, on whole batches of all rounds. Two matched filters are made
anew for every round: the sketch changes from round to round and all gradients with it, and the attacker can compute, at
the very model that the victim received, the gradient of every example that it has. One filter takes gradients as they
are and knows the noise in what it tests. The other takes each tensor's |g| / |g|_2, which does not change sign with the
labels of a batch, and knows of no noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl.audit.attacks import learners as properties
from dbcl.audit.attacks.images import ESTIMATORS, OLD, Changes, OnProgress
from dbcl.audit.attacks.matching import as_gradient, example_gradients, gradients
from dbcl.audit.estimators import smoother as estimate
from dbcl.audit.estimators.smoother import View
from dbcl.audit.findings import Curve, Finding
from dbcl.audit.rehearsal import VICTIM, Rehearsal
from dbcl.data import Dataset
from dbcl.errors import AuditError
from dbcl.protocol import Broadcast, blinded

Row = dict[str, Tensor]
UNSEEN = 1e150  # the variance of the noise in a tensor of which nothing is seen
MIXED = 300  # batches of each kind, at most, that are mixed from single examples in each round
LEAST = 0.03  # of the spread of a tensor's features: what varies less may be an estimate's rounding
FAR = 6.0  # a feature of a tested batch counts as no farther from the mean than this, in standard deviations


@dataclass(frozen=True, eq=False)
class Source:
    """What an attacker takes for the others' gradients, the sum of them in V's space, one row for each tested round.

    `exact` says that the attacker knows it to be the very sum: no veil was on what it was made from.
    """

    name: str
    seat: str
    attacker: str
    rows: list[Row]
    others: int
    exact: bool


@dataclass(frozen=True, eq=False)
class Own:
    """The attacker's own examples, and which of them have the property."""

    dataset: Dataset
    holds: NDArray[np.bool_]
    spare: NDArray[np.int64]

    def draw(self, rng: np.random.Generator, kind: bool, count: int) -> Tensor:
        """Examples of one kind, without repetition where there are enough."""
        pool = self.spare[self.holds[self.spare] == kind]
        return torch.from_numpy(rng.choice(pool, size=count, replace=count > len(pool)))

    def count(self, kind: bool) -> int:
        return int((self.holds[self.spare] == kind).sum())

    def gradient(self, model: nn.Module, index: Tensor) -> Row:
        found = gradients(model, self.dataset.x_train[index], self.dataset.y_train[index])
        return {name: gradient.detach() for name, gradient in found.items()}


def property_findings(
    rehearsal: Rehearsal,
    dataset: Dataset,
    holds: NDArray[np.bool_],
    spare: NDArray[np.int64],
    found: Mapping[str, Changes],
    *,
    batches: int,
    examples: int,
    seed: int,
    tell: OnProgress,
) -> list[Finding]:
    """OnProgress whether the victim's batch had a property, from each seat and by forest and matched filter.

    For the forest the attacker makes so many `batches` of each kind in each round, at the models that it received; for
    the filter it takes the gradients of so many `examples` of each kind.
    """
    seen = rehearsal.attacker.rounds[:-1]
    tested = seen[: len(seen) - min(OLD, len(seen) // 3)]
    truth = np.array([bool(holds[rehearsal.script[round, VICTIM]].mean() > 0.5) for round in tested])
    if min(truth.sum(), (~truth).sum()) < 5:
        raise AuditError(f"only {truth.sum()} of {len(truth)} tested rounds have the property")
    own = Own(dataset, holds, spare)
    sources = _sources(rehearsal, found, tested)
    tell("property: the attacker's own batches")
    made = _own_batches(rehearsal, own, tested, batches, seed)
    findings = []
    broadcasts = [rehearsal.attacker[round].broadcast for round in tested]
    budget = {"own batches": len(made.rows), "tested rounds": len(tested)}
    for source in sources:
        tell(f"property: random forest on {source.name}, {source.seat}'s seat")
        began = perf_counter()
        scores = _forest(source, made, broadcasts, seed)
        findings.append(_finding("random forest", source, scores, truth, budget, began, seed))
    began = perf_counter()
    filtered = _filtered(rehearsal, own, sources, made, tested, examples, seed, tell)
    budget = {"own examples a round": examples * 2, "tested rounds": len(tested)}
    for learner, each in filtered.items():
        for source, scores in zip(sources, each, strict=True):
            findings.append(_finding(learner, source, scores, truth, budget, began, seed))
    return findings


def _finding(
    learner: str,
    source: Source,
    scores: NDArray[np.float64],
    truth: NDArray[np.bool_],
    budget: Mapping[str, object],
    began: float,
    seed: int,
) -> Finding:
    result = properties.judge(scores, truth, seed)
    return Finding(
        f"{learner} on {source.name}", source.seat, source.attacker, "property", "auc",
        result.auc, result.low, result.high, 0.5, {**budget, "seconds": round(perf_counter() - began, 1)},
        curves=(Curve("", *result.roc),), axes=("false positive rate", "true positive rate"),
    )  # fmt: skip


def _sources(rehearsal: Rehearsal, found: Mapping[str, Changes], tested: Sequence[int]) -> list[Source]:
    attacker, server = rehearsal.attacker, rehearsal.server
    views, setting = estimate.views(attacker), attacker.setting
    lr, others = setting.local.lr, setting.cohort - 1

    def sums(changes: Changes) -> list[Row]:
        return [as_gradient(_sum(views, changes, place, setting.cohort), lr) for place in range(len(tested))]

    itself = [as_gradient(server[round].updates[str(VICTIM)].tensors, lr) for round in tested]
    sources = [Source("the update itself", "server", "adaptive", itself, 1, exact=True)]
    for name, changes in found.items():
        kind = ESTIMATORS[name][0]
        exact = setting.veil == 0 and kind == "adaptive"
        sources.append(Source(name, "client", kind, sums(changes), others, exact))
    clear = [part.name for part in attacker[tested[0]].broadcast.plan.tensors if not part.sketched]
    if clear:
        plain: Changes = {name: list(estimate.option_2(views[name])) for name in clear}
        sources.append(
            Source("unsketched tensors only", "client", "naive", sums(plain), others, exact=setting.veil == 0)
        )
    return sources


def _sum(views: Mapping[str, View], changes: Changes, place: int, chosen: int) -> Row:
    """The estimated sum of the others' updates of one round, in V's space."""
    return {name: views[name].sketches[place].apply(guesses[place]) * chosen for name, guesses in changes.items()}


def _lifted(broadcast: Broadcast, row: Row) -> Row:
    """The same over W's entries, which mean the same in every round; less precise, as it is held for many batches."""
    sketches, shapes = broadcast.sketches(), {part.name: part.shape for part in broadcast.plan.tensors}
    lifted = {}
    for name, tensor in row.items():
        matrix = sketches[name].lift(tensor.reshape(shapes[name][0], -1)) if name in sketches else tensor
        lifted[name] = matrix.reshape(shapes[name]).float()
    return lifted


@dataclass(frozen=True, eq=False)
class _Batches:
    """The attacker's own batches: gradients over W's entries, whether they had the property, and in which round."""

    rows: list[Row]
    labels: NDArray[np.bool_]
    places: NDArray[np.int64]


def _own_batches(rehearsal: Rehearsal, own: Own, rounds: Sequence[int], batches: int, seed: int) -> _Batches:
    rng = np.random.default_rng(seed)
    template, size = rehearsal.attacker.setting.template(), rehearsal.script.shape[2]
    kinds = (True, False) * batches
    rows = []
    for round in rounds:
        broadcast = rehearsal.attacker[round].broadcast
        model = blinded(template, broadcast)
        rows += [_lifted(broadcast, own.gradient(model, own.draw(rng, kind, size))) for kind in kinds]
    return _Batches(rows, np.array(kinds * len(rounds)), np.repeat(np.arange(len(rounds)), len(kinds)))


def _forest(source: Source, made: _Batches, broadcasts: list[Broadcast], seed: int) -> NDArray[np.float64]:
    """Scores by the published learner; features of own and of tested rows are less the mean of the round's own ones."""
    names = list(source.rows[0])
    test_rows = [_lifted(broadcast, row) for broadcast, row in zip(broadcasts, source.rows, strict=True)]
    clean, noisy = (
        np.stack([properties.melis({name: row[name] for name in names}, vectors=True) for row in rows])
        for rows in (made.rows, test_rows)
    )
    for place in range(len(noisy)):
        mean = clean[made.places == place].mean(axis=0)
        clean[made.places == place] -= mean
        noisy[place] -= mean
    return properties.forest(properties.Samples(clean, made.labels), noisy, seed)


def _filtered(
    rehearsal: Rehearsal,
    own: Own,
    sources: Sequence[Source],
    made: _Batches,
    tested: Sequence[int],
    examples: int,
    seed: int,
    tell: OnProgress,
) -> dict[str, NDArray[np.float64]]:
    """The log odds of every source in every tested round, by filters that are made for that round."""
    template, size = rehearsal.attacker.setting.template(), rehearsal.script.shape[2]
    models = [blinded(template, rehearsal.attacker[round].broadcast) for round in tested]
    tell("property: how faithful each estimate is")
    faithful = _faithful(sources, models, own, made, seed)
    rng = np.random.default_rng(seed + 1)
    scores = np.zeros((2, len(sources), len(tested)))
    for place, model in enumerate(models):
        tell(f"property: matched filters, round {place + 1} of {len(tested)}")
        index = torch.cat([own.draw(rng, kind, min(examples, own.count(kind))) for kind in (True, False)])
        found = example_gradients(model, own.dataset.x_train[index], own.dataset.y_train[index])
        names, group = list(found), np.repeat(np.arange(len(found)), [row[0].numel() for row in found.values()])
        rows = np.concatenate([row.flatten(1).numpy() for row in found.values()], axis=1)
        linear = properties.MatchedFilter(properties.Samples(rows, own.holds[index.numpy()]), group, size)
        shapes = _Shapes(rng, rows, linear.y, group, size)
        for number, source in enumerate(sources):
            seen, noise = linear.mean.astype(np.float64), np.full(len(names), UNSEEN)
            unseen = np.full(len(names), UNSEEN)
            for column, name in enumerate(names):
                gain, variance = faithful[number].get(name, (0.0, 0.0))
                if gain > 0:
                    value = source.rows[place][name].double().numpy().ravel() / gain
                    # The bystanders' part is not known, but its mean is.
                    seen[group == column] = value - (source.others - 1) * seen[group == column]
                    noise[column], unseen[column] = variance, 0.0
            scores[0, number, place] = linear(seen[None], noise)[0]
            scores[1, number, place] = shapes(seen, unseen)
    return {"matched filter": scores[0], "matched filter of magnitudes": scores[1]}


def _magnitudes(rows: properties.Features, group: NDArray[np.integer]) -> properties.Features:
    """|g| / |g|_2 of each row, tensor by tensor."""
    out = np.abs(rows)
    for part in np.split(out, np.flatnonzero(np.diff(group)) + 1, axis=1):
        size = np.sqrt(np.einsum("ij,ij->i", part, part))[:, None]
        part /= np.where(size > 0, size, 1)
    return out


class _Shapes:
    """A filter of magnitudes for the model of one round, made from batches that are mixed of the attacker's examples.

    Batches share examples, so leaving some out would not tell how strong a penalty must be. Instead every feature is
    taken in units of its own spread, and the features' correlations are halved.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        rows: properties.Features,
        y: properties.Truth,
        group: NDArray[np.integer],
        size: int,
    ) -> None:
        kinds = np.repeat([True, False], min(MIXED, len(rows)))
        shares = np.zeros((len(kinds), len(rows)), dtype=rows.dtype)
        for share, kind in zip(shares, kinds, strict=True):
            among = np.flatnonzero(y == kind)
            np.add.at(share, rng.choice(among, size, replace=size > len(among)), 1 / size)
        made = _magnitudes(shares @ rows, group)
        self.group, self.mean, variance = group, made.mean(axis=0), made.var(axis=0)
        of_tensor = np.bincount(group, variance) / np.bincount(group)
        spread = np.sqrt(variance + LEAST**2 * of_tensor[group]).astype(rows.dtype)
        self.spread = np.where(spread > 0, spread, 1)
        self.filter = properties.MatchedFilter(properties.Samples(self._standard(made), kinds), group, penalty=1.0)

    def __call__(self, row: properties.Features, unseen: NDArray[np.float64]) -> float:
        """The log odds that a gradient has the property; `unseen` is the noise in each tensor, nothing or all."""
        return float(self.filter(self._standard(_magnitudes(row[None], self.group)), unseen)[0])

    def _standard(self, rows: properties.Features) -> properties.Features:
        """In place, as there may be a million features."""
        rows -= self.mean
        rows /= self.spread
        return np.clip(rows, -FAR, FAR, out=rows)


def _faithful(
    sources: Sequence[Source], models: Sequence[nn.Module], own: Own, made: _Batches, seed: int
) -> list[dict[str, tuple[float, float]]]:
    """For every source and tensor: what share of the gradient the estimate shows, and the variance of what it adds.

    An estimate shrinks what it is unsure of. With the mean m of all gradients of a round, which the attacker knows from
    examples of its own, E <estimate, m> = share * others * <m, m>, summed over the rounds. Two independent means make
    <m, m> unbiased.
    """
    rng = np.random.default_rng(seed + 2)
    half = max(1, min(128, own.count(True), own.count(False)))
    share = [dict.fromkeys(source.rows[0], 0.0) for source in sources]
    power = [dict.fromkeys(source.rows[0], 0.0) for source in sources]
    square: dict[str, float] = {}
    for place, model in enumerate(models):
        one, two = (
            own.gradient(model, torch.cat([own.draw(rng, kind, half) for kind in (True, False)])) for _ in range(2)
        )
        for name in one:
            square[name] = square.get(name, 0.0) + float((one[name].double() * two[name]).sum())
        for number, source in enumerate(sources):
            for name, tensor in source.rows[place].items():
                shown = tensor.double().reshape(one[name].shape)
                share[number][name] += float((shown * (one[name] + two[name]) / 2).sum()) / source.others
                power[number][name] += float(shown.square().sum())
    typical = {
        name: float(np.mean([row[name].double().square().sum() for row in made.rows])) * len(models) for name in square
    }
    result = []
    for number, source in enumerate(sources):
        found = {}
        for name in source.rows[0]:
            if source.exact:
                # Between two parties nothing else is in it; otherwise the bystanders' batches are.
                spread = max(0.0, typical[name] - square[name]) * (source.others - 1)
                found[name] = (1.0, spread / len(models) / source.rows[0][name].numel())
                continue
            gain = min(1.0, share[number][name] / square[name]) if square[name] > 0 else 1.0
            if gain > 0:
                # What the victim's batch varies by belongs to the filter; all else that was not foreseen is noise.
                foreseen = typical[name] - square[name] + source.others**2 * square[name]
                extra = power[number][name] / gain**2 - foreseen
                found[name] = (gain, max(0.0, extra) / len(models) / source.rows[0][name].numel())
        result.append(found)
    return result
