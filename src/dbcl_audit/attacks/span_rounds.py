"""Span attack over several rounds, on one client's updates, on sums of updates, or on a client's
estimates.

Reads: server, or client-N. If clients train on the same examples in every round, each round
provides a new span of these examples.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dbcl.sketch import Identity
from dbcl.transcripts import Transcript
from dbcl_audit.attacks.first_layer import FirstLayer, dense_first_layer
from dbcl_audit.attacks.membership import judge_members
from dbcl_audit.attacks.roc import Array
from dbcl_audit.attacks.span import first_layer_change, span_scores
from dbcl_audit.estimators.observations import tensor_observations
from dbcl_audit.estimators.rewind import rewind
from dbcl_audit.findings import Finding
from dbcl_audit.numerics import standardized
from dbcl_audit.simulated_run import SimulatedRun

ROUNDS = 6
"""Number of attacked rounds. In later rounds the model changes less, and fewer examples
contribute.
"""


def sent_changes(recorded: SimulatedRun, victim: int, rounds: int = ROUNDS) -> tuple[list[FirstLayer], tuple[int, ...]]:
    """Return the first-layer changes of the first rounds with a client, alone or in sums, and the
    clients present in all these rounds.

    Both are empty if the network has no dense first layer with a bias.

    >>> from dbcl_audit.examples import example_run
    >>> played = example_run("plain")
    >>> changes, clients = sent_changes(played.recorded, victim=1)
    >>> len(changes), clients
    (3, (1,))
    """
    server, truth = recorded.server, recorded.truth
    present = [round for round in server.rounds if victim in truth.cohort(round)][:rounds]
    found, together = list[FirstLayer](), set[int]()
    for round in present:
        saw = recorded.server_observation(round, victim)
        change = first_layer_change(saw.broadcast, saw.tensors, server.setting.shape)
        if change is None:
            break
        together = together & set(saw.clients) if found else set(saw.clients)
        found.append(change)
    return found, tuple(sorted(together))


def rewound_changes(transcript: Transcript, rounds: int = ROUNDS) -> list[FirstLayer]:
    """Estimate the other clients' first updates with `rewind`. The estimate is exact without a veil
    and with one lane.

    >>> from dbcl_audit.examples import example_run
    >>> played = example_run("paper")
    >>> [change.sketch.width for change in rewound_changes(played.recorded.attacker)]
    [392, 392]
    """
    prefix = dense_first_layer(transcript[transcript.rounds[0]].broadcast, transcript.setting.shape)
    if prefix is None:
        return []
    seen = tensor_observations(transcript)
    weight, bias = seen[f"{prefix}weight"], seen[f"{prefix}bias"]
    pairs = zip(weight.sketches, rewind(weight), rewind(bias), strict=False)
    # Single precision, as they were sent: the span attack derives their rounding error from the dtype.
    return [FirstLayer(sketch.apply(w).float(), b.flatten().float(), sketch) for sketch, w, b in pairs][:rounds]


def round_span_scores(changes: Sequence[FirstLayer], candidates: Tensor) -> Array:
    """Score candidates by the rows of several rounds' changes; members score higher.

    Without a sketch, the rows of all rounds lie in the span of the same examples and are
    concatenated. With a new sketch per round, each round is scored separately, and the standardised
    scores are added.

    >>> x = torch.rand(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> deltas = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    >>> scores = round_span_scores([FirstLayer(d @ x[:3], d.sum(1), Identity(8)) for d in deltas], x)
    >>> sorted(np.argsort(-scores)[:3].tolist())  # two rows a round, and three examples
    [0, 1, 2]
    """
    if all(isinstance(change.sketch, Identity) for change in changes):
        weights, biases = ([getattr(change, part) for change in changes] for part in ("weight", "bias"))
        return span_scores(FirstLayer(torch.cat(weights), torch.cat(biases), changes[0].sketch), candidates)
    total = np.zeros(len(candidates))
    for change in changes:
        scores = span_scores(change, candidates)
        total += standardized(scores, scores)
    return total


def round_span_findings(
    changes: Sequence[FirstLayer], members: Tensor, others: Tensor, adversary: str
) -> list[Finding]:
    """Infer membership from the row spans of several rounds' changes.

    >>> x = torch.rand(140, 16, generator=torch.Generator().manual_seed(0))
    >>> delta = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    >>> change = FirstLayer(delta @ x[:4], delta.sum(1), Identity(16))
    >>> [(found.measure, found.value) for found in round_span_findings([change], x[:4], x[4:], "server")]
    [('auc', 1.0), ('tpr at 1 % fpr', 1.0)]
    """
    changes = [change for change in changes if change.bias.any()]  # without rounds in which no unit was active
    if not changes:
        return []
    result = judge_members(round_span_scores(changes, torch.cat([members, others])), len(members))
    return result.findings("span of several rounds", adversary, "adaptive", {"rounds": len(changes)})
