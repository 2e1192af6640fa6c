"""The attacker's own examples and their gradients at the models of all rounds, for property
inference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dbcl.protocol import Broadcast, blinded
from dbcl.simulation.task import Task
from dbcl_audit.attacks.gradients import gradients

Gradients = dict[str, Tensor]
"""One gradient, keyed by the tensor names of the plan."""


@dataclass(frozen=True, eq=False)
class OwnExamples:
    """The attacker's own examples: rows `own` of the task's training data. `holds` flags the
    training examples with the property.

    >>> from dbcl.simulation import RunConfig, task_of
    >>> examples = OwnExamples(task_of(RunConfig()), np.arange(4000) % 2 == 0, np.arange(10))
    >>> examples.count(True), examples.draw(np.random.default_rng(0), True, 3).sort().values
    (5, tensor([4, 6, 8]))
    """

    task: Task
    holds: NDArray[np.bool_]
    own: NDArray[np.int64]

    def draw(self, rng: np.random.Generator, kind: bool, count: int) -> Tensor:
        """Draw indices of examples with (`kind` True) or without the property, without replacement
        if there are enough.
        """
        pool = self.own[self.holds[self.own] == kind]
        return torch.from_numpy(rng.choice(pool, size=count, replace=count > len(pool)))

    def count(self, kind: bool) -> int:
        return int((self.holds[self.own] == kind).sum())

    def gradient(self, model: nn.Module, index: Tensor) -> Gradients:
        """Return the gradient of the loss of the batch with these indices."""
        found = gradients(model, *self.task.train.take(index.numpy()), loss=self.task.objective.loss)
        return {name: gradient.detach() for name, gradient in found.items()}


@dataclass(frozen=True, eq=False)
class OwnBatches:
    """Gradients of the attacker's own batches, over the entries of W.

    Args:
        gradients: one gradient per batch.
        holds: flags of the batches with the property.
        rounds: index of each batch's round among the tested rounds.

    >>> OwnBatches([{"bias": torch.zeros(2)}], np.array([True]), np.array([0])).holds
    array([ True])
    """

    gradients: list[Gradients]
    holds: NDArray[np.bool_]
    rounds: NDArray[np.int64]


def own_batches(
    template: nn.Module,
    broadcasts: Sequence[Broadcast],
    examples: OwnExamples,
    *,
    batches: int,
    size: int,
    seed: int,
) -> OwnBatches:
    """Compute gradients of `batches` batches with and as many without the property, at the model of
    each broadcast.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl.simulation import preset, task_of
    >>> config = preset("paper", model="dlg-lenet")
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> examples = OwnExamples(task_of(config), np.arange(4000) % 2 == 0, np.arange(100))
    >>> sent = [played.attacker[round].broadcast for round in (0, 1)]
    >>> own_batches(played.attacker.template(), sent, examples, batches=1, size=4, seed=0).rounds
    array([0, 0, 1, 1])
    """
    rng = np.random.default_rng(seed)
    kinds = (True, False) * batches
    made = []
    for broadcast in broadcasts:
        model = blinded(template, broadcast)
        made += [over_weights(broadcast, examples.gradient(model, examples.draw(rng, kind, size))) for kind in kinds]
    return OwnBatches(made, np.array(kinds * len(broadcasts)), np.repeat(np.arange(len(broadcasts)), len(kinds)))


def over_weights(broadcast: Broadcast, gradient: Gradients) -> Gradients:
    """Lift a gradient from the space of V to the space of W, whose entries correspond between
    rounds.

    The result is in single precision, because many gradients are kept in memory.

    >>> import dbcl
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> over_weights(broadcast, {"weight": torch.ones(2, 3)})["weight"].shape
    torch.Size([2, 6])
    """
    sketches, parts = broadcast.sketches(), {part.name: part for part in broadcast.plan.tensors}
    lifted = {}
    for name, tensor in gradient.items():
        if name in sketches:
            layout = parts[name].layout
            tensor = layout.weight(sketches[name].lift(tensor.reshape(layout.rows, -1)))
        lifted[name] = tensor.reshape(parts[name].shape).float()
    return lifted
