"""Property inference on the victim's batches, for example for thick strokes. Reads: server;
client-0 (with its own examples).

The random forest, the published classifier, is trained once on whole batches of all rounds. The two
matched filters of `round_filters.py` are computed for every round.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dbcl.errors import AuditError
from dbcl.protocol import Broadcast, blinded
from dbcl.simulation.task import Task
from dbcl_audit.attacks.learners import Samples, forest, melis_features
from dbcl_audit.attacks.own_data import OwnBatches, OwnExamples, over_weights, own_batches
from dbcl_audit.attacks.roc import Array, Flags, measure_auc
from dbcl_audit.attacks.round_filters import filter_scores
from dbcl_audit.attacks.sources import Source, sources
from dbcl_audit.attacks.victim import Changes
from dbcl_audit.context import OnProgress
from dbcl_audit.effort import MIN_LAG
from dbcl_audit.findings import Curve, Finding, Measure
from dbcl_audit.simulated_run import VICTIM, SimulatedRun


def property_findings(
    simulated: SimulatedRun,
    task: Task,
    holds: NDArray[np.bool_],
    own: NDArray[np.int64],
    found: Mapping[str, Changes],
    *,
    batches: int,
    examples: int,
    seed: int,
    tell: OnProgress,
    min_lag: int = MIN_LAG,
) -> list[Finding]:
    """Infer a property of the victim's batches as each adversary, with a random forest and matched
    filters.

    Args:
        simulated: simulated run with known batches.
        task: task of the run.
        holds: flags of the training examples with the property.
        own: indices of the attacker's own training examples.
        found: the attacking client's estimates of the changes, by estimator name.
        batches: batches with and as many without the property that the attacker makes per round to
            train the forest, at the victim's models as far as the attacker knows them
            (`victim.py`).
        examples: examples with and as many without the property whose gradients the filters use.
        seed: seed of the random draws.
        tell: callback for progress messages.
        min_lag: rounds that must follow a tested round.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl.simulation import preset, task_of
    >>> config, holds = preset("paper", model="dlg-lenet"), np.arange(4000) % 2 == 0
    >>> task = task_of(config)
    >>> played = example_batches("paper", rounds=16, model="dlg-lenet")
    >>> own = np.arange(100, 200)
    >>> found = property_findings(played, task, holds, own, {}, batches=1, examples=4, seed=0, tell=str)
    >>> [finding.attack for finding in found if finding.adversary == "server"]
    ['random forest on the update itself', 'matched filter on the update itself', 'matched filter of magnitudes on ...']
    """
    attacker, size = simulated.attacker, simulated.script.shape[2]
    seen = attacker.rounds[:-1]
    tested = seen[: len(seen) - min(min_lag, len(seen) // 3)]
    truth = np.array([bool(holds[simulated.script[round, VICTIM]].mean() > 0.5) for round in tested])
    if min(truth.sum(), (~truth).sum()) < 5:
        raise AuditError(f"only {truth.sum()} of {len(truth)} tested rounds have the property")
    own_examples = OwnExamples(task, holds, own)
    template = attacker.template()
    forests, filters = [], []
    for group in _by_broadcasts(sources(simulated, found, tested)):
        broadcasts = [victim.broadcast for victim in group[0].victims]
        tell("property: the attacker's own batches")
        made = own_batches(template, broadcasts, own_examples, batches=batches, size=size, seed=seed)
        budget = {"own batches": len(made.gradients), "tested rounds": len(tested)}
        for source in group:
            tell(f"property: random forest on {source.name}, {source.adversary}")
            began = perf_counter()
            scores = _forest_scores(source, made, broadcasts, seed)
            forests.append(_finding("random forest", source, scores, truth, budget, began, seed))
        began = perf_counter()
        models = [blinded(template, broadcast) for broadcast in broadcasts]
        filtered = filter_scores(
            models, own_examples, group, made, own_examples=examples, size=size, seed=seed, tell=tell
        )
        budget = {"own examples a round": examples * 2, "tested rounds": len(tested)}
        for learner, of_sources in filtered.items():
            for source, scores in zip(group, of_sources, strict=True):
                filters.append(_finding(learner, source, scores, truth, budget, began, seed))
    return forests + filters


def _by_broadcasts(every: Sequence[Source]) -> list[list[Source]]:
    """Group the sources that share the victim's models: the server's sources and the clients'
    sources.
    """
    groups: dict[tuple[int, ...], list[Source]] = {}
    for source in every:
        groups.setdefault(tuple(id(victim.broadcast) for victim in source.victims), []).append(source)
    return list(groups.values())


def _finding(
    learner: str, source: Source, scores: Array, truth: Flags, budget: Mapping[str, object], began: float, seed: int
) -> Finding:
    result = measure_auc(scores, truth, seed)
    return Finding(
        f"{learner} on {source.name}", source.adversary, source.attacker, "property", Measure.AUC,
        result.auc, result.low, result.high, 0.5, {**budget, "seconds": round(perf_counter() - began, 1)},
        curves=(Curve("", *result.roc),), axes=("false positive rate", "true positive rate"),
    )  # fmt: skip


def _forest_scores(source: Source, made: OwnBatches, broadcasts: Sequence[Broadcast], seed: int) -> Array:
    """Score each round with the published classifier. The mean of the attacker's features in a
    round is subtracted from all features of the round.
    """
    names = list(source.gradients[0])
    lifted = [over_weights(broadcast, row) for broadcast, row in zip(broadcasts, source.gradients, strict=True)]
    train, test = (
        np.stack([melis_features({name: row[name] for name in names}, vectors=True) for row in rows])
        for rows in (made.gradients, lifted)
    )
    for index in range(len(test)):
        mean = train[made.rounds == index].mean(axis=0)
        train[made.rounds == index] -= mean
        test[index] -= mean
    return forest(Samples(train, made.holds), test, seed)
