"""Membership inference on the final model: loss threshold, and likelihood ratio (LiRA, Carlini et
al. 2022).

Reads no transcript. The attacks use the final model, which may be public, and one broadcast of the
model, as a client would receive it.

Every attack assigns a score to each example; members are expected to have higher scores. The main
measure is the true positive rate at very low false positive rates, not the average over all
thresholds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from dbcl import seeds
from dbcl.data import Batch, examples_of
from dbcl.data.trees import Tree, call, map_tensors, tensors
from dbcl.engines import LocalTraining
from dbcl.errors import AuditError
from dbcl.objective import CLASSIFICATION, Objective
from dbcl.protocol import blinded
from dbcl.simulation.build import build_server, calibration
from dbcl.simulation.task import Task, pooled
from dbcl_audit.attacks.roc import Array, Flags, roc
from dbcl_audit.context import AuditContext, OnProgress
from dbcl_audit.findings import Curve, Finding, Measure

MIN_VALUES_FOR_OWN_VARIANCE = 64  # of an example, as in the original


def membership_findings(
    model: nn.Module,
    view: nn.Module,
    task: Task,
    training: LocalTraining,
    *,
    shadow_models: int,
    seed: int,
    tell: OnProgress,
) -> list[Finding]:
    """Attack the final model, and a client's broadcast `view` of the model, by loss threshold and
    LiRA.

    `training` is the local training of the shadow models.

    >>> from dataclasses import replace
    >>> from dbcl.simulation import RunConfig, task_of
    >>> task = task_of(RunConfig(model="dlg-lenet"))
    >>> few = replace(task, **{name: getattr(task, name).subset(np.arange(20)) for name in ("train", "held_out")})
    >>> make = task.make_model
    >>> findings = membership_findings(make(0), make(1), few, LocalTraining(), shadow_models=4, seed=0, tell=str)
    >>> sorted({finding.attack for finding in findings if finding.adversary == "anyone"})
    ['LiRA on the final model', 'loss threshold on the final model']
    """
    count = min(1000, len(task.held_out), len(task.train))
    inside = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed))[:count].numpy()
    examples = pooled([task.train.subset(inside), task.held_out.subset(np.arange(count))])
    tell("membership: shadow models")
    trained = shadows(task.make_model, examples, shadow_models, training, seed, task.objective)
    findings = []
    for adversary, what, target in (("anyone", "the final model", model), ("client", "a client's view of it", view)):
        values = confidences(target, examples, task.objective)
        attacks = {
            "loss threshold": ("naive", loss_threshold(values)),
            "LiRA": ("adaptive", lira(values, trained.inside, trained.outside)),
        }
        for name, (kind, scores) in attacks.items():
            result = judge_members(scores, count)
            more = {"shadow models": shadow_models}
            findings += result.findings(f"{name} on {what}", adversary, kind, more)
    return findings


def audit_final_model(context: AuditContext) -> list[Finding]:
    """Infer membership in the training data from the final model and from a client's broadcast of
    the model.
    """
    config, path = context.config, context.folder / "model.safetensors"
    if not path.exists():
        raise AuditError(f"{path} is missing: the run is not finished")

    def make(number: int) -> nn.Module:
        context.step()  # a new shadow model is made when the previous one is trained
        return context.task.make_model(number)

    model = make(0)
    try:
        model.load_state_dict(safetensors.torch.load_file(path))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise AuditError(f"{path} cannot be read: {error}") from None
    known = calibration(config, context.task)
    server = build_server(config, model, layers=context.task.layers, insecure_seed=context.seed, calibration=known)
    view, task = blinded(make(1), server.open_round()), replace(context.task, make_model=make)
    training = replace(task.training(config), batch_size=20, epochs=10, steps=None, lr_decay=1.0, proximal=0.0)
    count = context.effort.shadow_models
    return membership_findings(model, view, task, training, shadow_models=count, seed=context.seed, tell=context.tell)


def final_model_steps(context: AuditContext) -> int:
    """Expected progress steps of `audit_final_model`."""
    return 0 if context.guaranteed else 3 + context.effort.shadow_models


@torch.no_grad()
def confidences(
    model: nn.Module, examples: Any, objective: Objective = CLASSIFICATION, *, batch_size: int = 1000
) -> Array:
    """Compute a model's confidence in each example's target, on an unbounded scale.

    For class targets the confidence is log(p / (1 - p)) with the probability p of the true class:
    z_y - log sum_(j != y) exp(z_j). A model with a single output returns the logit of class 1.
    Computing from logits instead of probabilities avoids saturation. For other losses the
    confidence is -arsinh(10^6 loss), approximately the negative logarithm of the example's loss and
    defined for every loss value.

    >>> confidences(nn.Identity(), (torch.tensor([[100.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])))
    array([100.,   0.])
    >>> confidences(nn.Identity(), (torch.tensor([[3.0], [3.0]]), torch.tensor([1, 0])))
    array([ 3., -3.])
    """
    examples = examples_of(examples)
    training = model.training
    model.eval()
    found = []
    for start in range(0, len(examples), batch_size):
        batch = examples.take(np.arange(start, min(start + batch_size, len(examples))))
        outputs = call(model, batch.inputs)
        one_class_each = objective.classifies and isinstance(batch.targets, Tensor) and batch.targets.ndim == 1
        found.append(_logits_of(outputs, batch.targets) if one_class_each else _of_losses(outputs, batch, objective))
    model.train(training)
    return np.asarray(torch.cat(found).cpu().numpy(), dtype=np.float64)


def _logits_of(logits: Tensor, labels: Tensor) -> Tensor:
    logits, label = logits.double(), labels[:, None]
    if logits.shape[-1] == 1:
        return (logits * (2 * label - 1)).squeeze(-1)
    others = logits.scatter(1, label, -math.inf).logsumexp(-1)
    return logits.gather(1, label).squeeze(-1) - others


def _of_losses(outputs: Tree, batch: Batch, objective: Objective) -> Tensor:
    count = len(next(tensors(batch.targets)))
    each = [
        objective.loss(*map_tensors(lambda tensor: tensor[row : row + 1], (outputs, batch.targets)))  # noqa: B023
        for row in range(count)
    ]
    return -torch.arcsinh(1e6 * torch.stack(each).double())


def loss_threshold(target: Array) -> Array:
    """Score examples by their loss alone: log p = -log(1 + exp(-confidence)).

    >>> loss_threshold(np.array([0.0, 100.0])).round(3)
    array([-0.693, -0.   ])
    """
    return np.asarray(-np.logaddexp(0, -target), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Shadows:
    """Confidences of shadow models, and a mask of training members; one row per model, one column
    per example.

    >>> shadows = Shadows(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[True, False], [False, True]]))
    >>> shadows.inside
    array([[ 1., nan],
           [nan,  4.]])
    """

    confidences: Array
    members: Flags

    @property
    def inside(self) -> Array:
        """Confidences of models trained on the example; NaN for the other models."""
        return np.where(self.members, self.confidences, np.nan)

    @property
    def outside(self) -> Array:
        """Confidences of models not trained on the example; NaN for the other models."""
        return np.where(self.members, np.nan, self.confidences)


def shadows(
    make_model: Callable[[int], nn.Module],
    examples: Any,
    count: int,
    training: LocalTraining,
    seed: int,
    objective: Objective = CLASSIFICATION,
) -> Shadows:
    """Train `count` shadow models on random halves of the examples, and compute every model's
    confidence in every example.

    Each random division trains two models, one per half; half of the models therefore contain each
    example. `make_model` builds a new model from a seed.

    >>> examples = torch.eye(4), torch.tensor([0, 1, 0, 1])
    >>> found = shadows(lambda number: nn.Linear(4, 2), examples, 2, LocalTraining(), seed=0)
    >>> found.confidences.shape, found.members.sum(axis=0)
    ((2, 4), array([1, 1, 1, 1]))
    """
    if count < 2 or count % 2:
        raise ValueError(f"count must be even and 2 or more, got {count}")
    examples = examples_of(examples)
    root = seeds.derive(bytes(seeds.SEED_BYTES), "shadows", seed)
    members = np.zeros((count, len(examples)), dtype=np.bool_)
    found = np.empty((count, len(examples)))
    for number in range(count):
        order = seeds.permutation(root, "half", number // 2, n=len(examples))
        members[number, order[number % 2 :: 2]] = True
        model = make_model(int(seeds.words(root, "model", number, n=1)[0] >> np.uint64(32)))
        own = examples.subset(np.flatnonzero(members[number]))
        training.train(model, own, seed=root, round=0, client=number, loss=objective.loss)
        found[number] = confidences(model, examples, objective)
    return Shadows(found, members)


def lira(target: Array, inside: Array | None, outside: Array) -> Array:
    """Score examples by the likelihood of the target's confidence t under shadow models with and
    without the example.

    Online: log N(t; mu_in, s_in) - log N(t; mu_out, s_out). Offline (`inside` is None): (t -
    mu_out) / s_out, which gives the same order as the one-sided test of the paper. Rows are models;
    NaN marks models to ignore. For examples with fewer than 64 values, one variance about the
    examples' means is shared by all examples.

    >>> outside = np.array([[0.0, 5.0], [1.0, 6.0]])
    >>> lira(np.array([4.0, 6.0]), None, outside).round(2)  # the second is an easy example
    array([4.95, 0.71])
    >>> lira(np.array([4.0, 6.0]), outside + 3, outside).round(1)
    array([12., -6.])
    """
    mean, spread = _normal(outside)
    out = (target - mean) / spread
    if inside is None:
        return out
    mean_in, spread_in = _normal(inside)
    scores: Array = np.square(out) / 2 - np.square((target - mean_in) / spread_in) / 2 + np.log(spread / spread_in)
    return scores


def _normal(values: Array) -> tuple[Array, Array]:
    """Return the mean and standard deviation of each column, ignoring NaN. Columns with few values
    share one standard deviation.
    """
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    if count.min() < 1 or count.max() < 2:
        raise ValueError(f"every example needs a shadow model and some need 2, got {count.min()} to {count.max()}")
    mean = np.where(known, values, 0).sum(axis=0) / count
    squares = np.where(known, np.square(values - mean), 0).sum(axis=0)
    shared = squares.sum() / (count - 1).sum()
    variance = np.where(count < MIN_VALUES_FOR_OWN_VARIANCE, shared, squares / np.maximum(count - 1, 1))
    return mean, np.sqrt(np.maximum(variance, 1e-12))


@dataclass(frozen=True)
class Membership:
    """Performance of membership scores.

    Args:
        auc: area under the ROC curve; 0.5 for guessing.
        tpr_at_1_percent: true positive rate at a false positive rate of at most 1 %; NaN with fewer
            than 100 non-members, which cannot resolve this rate. 0.01 for guessing.
        tpr_at_01_percent: true positive rate at a false positive rate of at most 0.1 %; NaN with
            fewer than 1,000 non-members. 0.001 for guessing.
        roc: false positive rates and true positive rates, both ascending. Plot with logarithmic
            axes.
        members: number of members scored.
        others: number of non-members scored.

    >>> Membership(0.5, 0.01, 0.001, ((0.0, 1.0), (0.0, 1.0))).auc
    0.5
    """

    auc: float
    tpr_at_1_percent: float
    tpr_at_01_percent: float
    roc: tuple[tuple[float, ...], tuple[float, ...]]
    members: int = field(default=0, repr=False)
    others: int = field(default=0, repr=False)

    def findings(
        self, attack: str, adversary: str, attacker: str, more: Mapping[str, Any] | None = None
    ) -> list[Finding]:
        """Return the AUC and the true positive rates as findings. Rates that are NaN are omitted.

        >>> found = Membership(0.5, 0.01, math.nan, ((0.0, 1.0), (0.0, 1.0)))
        >>> [each.measure for each in found.findings("LiRA", "anyone", "adaptive")]
        ['auc', 'tpr at 1 % fpr']
        """
        budget = {"members": self.members, "non-members": self.others, **(more or {})}
        values = {
            Measure.AUC: self.auc,
            Measure.TPR_AT_1_PERCENT: self.tpr_at_1_percent,
            Measure.TPR_AT_01_PERCENT: self.tpr_at_01_percent,
        }
        curve, axes = Curve("", *self.roc), ("false positive rate", "true positive rate")
        found = [
            Finding(attack, adversary, attacker, "membership", name, value, chance=name.chance, budget=budget)
            for name, value in values.items()
            if not math.isnan(value)
        ]
        return [replace(found[0], curves=(curve,), axes=axes), *found[1:]]


def judge_members(scores: Array, members: int) -> Membership:
    """Measure scores with `judge`. The first `members` scores belong to members, the others to
    non-members.

    >>> judge_members(np.arange(200.0)[::-1], 100).others
    100
    """
    result = judge(scores, np.arange(len(scores)) < members)
    return replace(result, members=members, others=len(scores) - members)


def judge(scores: Array, members: Flags) -> Membership:
    """Measure an attack's scores exactly. Ties count against the attack at low rates and by one
    half in the AUC.

    >>> judge(np.arange(200.0), np.arange(200) >= 100)
    Membership(auc=1.0, tpr_at_1_percent=1.0, tpr_at_01_percent=nan, roc=((0.0, 0.0, 1.0), (0.0, 1.0, 1.0)))
    """
    if not members.any() or members.all() or np.isnan(scores).any():
        raise ValueError(
            f"need scores of members and of others and no NaN, got {members.sum()} of {len(members)} members"
        )
    alarms, hits = roc(scores, members)
    auc = float(np.diff(alarms) @ (np.array(hits[1:]) + np.array(hits[:-1])) / 2)
    return Membership(auc, _tpr(scores, members, 0.01), _tpr(scores, members, 0.001), (alarms, hits))


def _tpr(scores: Array, members: Flags, fpr: float) -> float:
    """Return the fraction of members whose score exceeds the threshold for a false positive rate of
    at most `fpr`.
    """
    others = np.sort(scores[~members])[::-1]
    allowed = math.floor(fpr * len(others) + 1e-9)
    return float((scores[members] > others[allowed]).mean()) if allowed else math.nan
