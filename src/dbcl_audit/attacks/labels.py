"""Label inference from the change of the output layer's bias between two broadcasts. Reads:
client-0.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dbcl.data import Dataset
from dbcl.errors import ConfigError
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.estimators.paper_estimators import option_2
from dbcl_audit.findings import Finding, Measure
from dbcl_audit.simulated_run import VICTIM, SimulatedRun


def labels_of_gradient(weight: Tensor | None, bias: Tensor | None, count: int = 1) -> Tensor:
    """Infer labels from the gradient of the output layer: from its bias, or without one from row
    sums (iDLG).

    The bias gradient of class c is mean(p_c) - n_c / count. A row sum is this value times the sum
    of the layer's inputs, which are positive after a sigmoid or ReLU. For one example, exactly one
    entry is negative. For a batch, the most negative entry is selected `count` times, and each
    selection subtracts the contribution of one example (exact for biases if the predictions p are
    uniform).

    >>> labels_of_gradient(None, torch.tensor([0.1, 0.1, -0.9, 0.7]))
    tensor([2])
    >>> labels_of_gradient(None, torch.tensor([-0.4, 0.2, -0.1, 0.3]), count=2)
    tensor([0, 2])
    """
    if bias is not None:
        evidence = bias.detach().double().clone()
        one = 1 / count
    elif weight is not None:
        evidence = weight.detach().double().flatten(1).sum(dim=1)
        one = float(evidence.abs().sum() / 2) / count
    else:
        raise ConfigError("labels need the gradient of the output layer's weight or bias")
    if len(evidence) == 1:  # one logit speaks for class 1 and against class 0
        evidence = torch.cat([-evidence, evidence])
    found = []
    for _ in range(count):
        found.append(int(evidence.argmin()))
        evidence[found[-1]] += one
    return torch.tensor(sorted(found))


def label_chance(labels: Tensor) -> float:
    """Return the accuracy of always predicting the most frequent class.

    >>> label_chance(torch.tensor([0, 1, 0, 1])), label_chance(torch.tensor([0, 1, 1, 1]))
    (0.5, 0.75)
    """
    return int(torch.bincount(labels).max()) / len(labels)


def label_finding(simulated: SimulatedRun, dataset: Dataset, rounds: Sequence[int]) -> Finding:
    """Infer the victim's labels from the output layer's bias, in simulated rounds with one example
    each.

    >>> from dbcl_audit.examples import example_batches
    >>> from dbcl import data
    >>> played = example_batches("paper", model="dlg-lenet")
    >>> label_finding(played, data.load("digits"), range(2)).value
    1.0
    """
    transcript = simulated.attacker
    biases = [part.name for part in transcript[rounds[0]].broadcast.plan.tensors if part.name.endswith("bias")]
    value, note = float("nan"), ""
    failures: tuple[str, ...] = ("the network has no bias",)
    if biases:
        layer = biases[-1]
        changes = option_2(tensor_observations(transcript, [layer])[layer])
        right = []
        for round in rounds:
            label = labels_of_gradient(None, -changes[transcript.rounds.index(round)].flatten())
            right.append(int(label[0]) == int(dataset.y_train[simulated.script[round, VICTIM, 0]]))
        value, note, failures = float(np.mean(right)), f"from {layer} alone, one example a round", ()
    return Finding(
        "label from the output layer's bias", "client", "naive", "label", Measure.ACCURACY, value,
        chance=label_chance(dataset.y_train), budget={"rounds": len(rounds)}, failures=failures, note=note,
    )  # fmt: skip
