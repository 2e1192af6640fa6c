"""Property inference on the victim's batches, from all rounds together.

Reads: client-N and its allies; server, for the victim's lane.

In every round the attacker computes gradients of its own examples with and without the property. It
also knows the noise variance of its observations of the victim. The optimal linear filter to
separate the two means is

    w = (Sigma / batch + I)^-1 (mu_with - mu_without)

in coordinates in which the noise has unit variance. The computation uses only inner products of the
examples. An observation of one round also contains the updates of neighbouring rounds. The mixing
matrix is known, and the last step inverts it.
"""

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.data import Examples
from dbcl.errors import AuditError
from dbcl_audit.attacks.layer_gradients import layer_gradients
from dbcl_audit.attacks.roc import Array, measure_auc
from dbcl_audit.attacks.trajectory import Lane, Trajectory, loaded
from dbcl_audit.estimators.covariance import solve
from dbcl_audit.findings import Curve, Finding, Measure
from dbcl_audit.simulated_run import VICTIM, SimulatedRun

RIDGE = 0.1
"""Variance of the scores from sources other than the veil, relative to their mean variance."""


def group_direction(
    trajectory: Trajectory, index: int, lane: Lane, examples: Examples, holds: NDArray[np.bool_], batch: int
) -> dict[str, Tensor]:
    """Return the direction in which a batch with the property moves W, for a client of a lane.
    `holds` flags the examples with the property.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl_audit.attacks.trajectory import Knowledge
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("veil", lr=0.01)
    >>> task = task_of(config)
    >>> played = example_batches("veil", batch=4, lr=0.01)
    >>> own = task.train.subset(np.arange(100, 200))
    >>> trajectory = Trajectory(played.attacker, Knowledge(own, examples=50))
    >>> found = group_direction(trajectory, 0, trajectory.lanes[0][0], own, np.arange(100) % 2 == 0, 4)
    >>> found["5.weight"].shape
    torch.Size([10, 200])
    """
    model, rate = loaded(trajectory.template, trajectory.middle(lane)), trajectory.rate(index, lane)
    kernel = torch.zeros(len(examples), len(examples), dtype=torch.float64)
    for each in layer_gradients(model, examples, trajectory.knowledge.objective):
        if each.name in trajectory.views:
            seen = float(trajectory.information(each.name)[index, index])
            kernel += seen * each.through(lane.broadcast.plan).products(0).double()
    gram = (rate**2 / (len(examples) * batch)) * kernel
    gram = gram - gram.mean(dim=0) - gram.mean(dim=1, keepdim=True) + gram.mean()
    contrast = np.where(holds, 1 / holds.sum(), -1 / (~holds).sum())
    weights = solve(gram + torch.eye(len(gram), dtype=gram.dtype), torch.from_numpy(contrast)[:, None])[:, 0].numpy()
    return trajectory.weighted_change(index, lane, examples, weights - weights.mean())


def unmixed_scores(trajectory: Trajectory, directions: Sequence[dict[str, Tensor]]) -> Array:
    """Estimate the other clients' step along the direction of each round: <d_t, influence_t>, with
    the mixing over rounds inverted.

    The influence is K^-1 times the observation. If the other clients' updates are x_s d_s, then E
    <d_t, influence_t> = sum_s H_ts x_s, with covariance H and H_ts = J_ts <d_t, d_s>. The estimate
    is x = (H + ridge)^-1 s.
    """
    count = len(directions)
    mixing, scores = np.zeros((count, count)), np.zeros(count)
    for name, posterior in trajectory.posteriors.items():
        if name in directions[0]:
            stacked = torch.stack([each[name].flatten().float() for each in directions])
            mixing += trajectory.information(name)[:count, :count] * (stacked @ stacked.T).double().numpy()
            scores += [float((d * posterior.influence(t)[0].flatten()).sum()) for t, d in enumerate(stacked)]
    ridge = RIDGE * np.trace(mixing) / count
    found: Array = solve(torch.from_numpy(mixing + ridge * np.eye(count)), torch.from_numpy(scores)[:, None])[
        :, 0
    ].numpy()
    return found


def trajectory_property_findings(
    simulated: SimulatedRun,
    trajectory: Trajectory,
    examples: Examples,
    holds: NDArray[np.bool_],
    truth: Sequence[bool],
    *,
    seed: int = 0,
) -> list[Finding]:
    """Score the victim's batches with the filter of every observed round except the last.

    `holds` flags the attacker's own `examples` with the property, and `truth` the victim's batches
    with the property.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl_audit.attacks.trajectory import Knowledge
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("veil", lr=0.01)
    >>> task = task_of(config)
    >>> played = example_batches("veil", batch=4, lr=0.01)
    >>> own, holds = task.train.subset(np.arange(100, 200)), np.arange(100) % 2 == 0
    >>> trajectory = Trajectory(played.attacker, Knowledge(own, examples=50))
    >>> [finding.measure for finding in trajectory_property_findings(played, trajectory, own, holds, [True, False])]
    ['auc']
    """
    began, directions = perf_counter(), []
    if min(holds.sum(), (~holds).sum()) < 2:
        raise AuditError(f"{int(holds.sum())} of the attacker's {len(holds)} examples have the property: it needs both")
    for index, number in enumerate(trajectory.rounds[:-1]):
        plan = simulated.server[number].answered(str(VICTIM)).plan.digest
        lane = next(lane for lane in trajectory.lanes[index] if lane.broadcast.plan.digest == plan)
        directions.append(group_direction(trajectory, index, lane, examples, holds, simulated.script.shape[2]))
        trajectory.step()
    scores = unmixed_scores(trajectory, directions)
    result = measure_auc(scores, np.array(truth), seed)
    budget = {"tested rounds": len(scores), "own examples": len(examples), "seconds": round(perf_counter() - began, 1)}
    return [
        Finding(
            "matched filter over all rounds", simulated.adversary, "adaptive", "property", Measure.AUC,
            result.auc, result.low, result.high, 0.5, budget,
            curves=(Curve("", *result.roc),), axes=("false positive rate", "true positive rate"),
        )
    ]  # fmt: skip
