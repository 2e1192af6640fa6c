"""Several rounds span the same examples: what one client's updates, sums and a client's own view tell of members."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from torch import Tensor

from dbcl.simulation import preset, task_of
from dbcl.sketch import Identity
from dbcl_audit.attacks.first_layer import FirstLayer
from dbcl_audit.attacks.membership import judge
from dbcl_audit.attacks.span_rounds import (
    ROUNDS,
    rewound_changes,
    round_span_findings,
    round_span_scores,
    sent_changes,
)
from dbcl_audit.simulated_run import ShardRun, shards_of, simulate_run

FOUR_DEVIATIONS = 0.06  # of an AUC that is 0.5: 4 sqrt(1361 / (12 * 360 * 1000)), for 360 against 1,000, with some room


@cache
def played(name: str, clients: int, rounds: int = ROUNDS + 1, **more: object) -> ShardRun:
    config = preset(name, **more)
    task = task_of(config)
    shards = shards_of(config, task, clients=clients)
    return simulate_run(config, task, shards, Path(mkdtemp()), rounds=rounds)


def inputs(run: ShardRun, rows: np.ndarray) -> Tensor:
    found = run.shards.examples.take(rows).inputs
    assert isinstance(found, Tensor)
    return found


def auc(changes: list[FirstLayer], members: Tensor, others: Tensor) -> float:
    truth = np.arange(len(members) + len(others)) < len(members)
    return judge(round_span_scores(changes, torch.cat([members, others])), truth).auc


def test_a_client_without_a_veil_tells_the_examples_of_nine_others_and_no_strangers() -> None:
    run = played("plain", 10)
    changes = rewound_changes(run.recorded.attacker)
    assert len(changes) == ROUNDS
    members, others = inputs(run, run.shards.members(run.known)), inputs(run, run.shards.others)
    together = auc(changes, members, others)
    assert together > 0.99
    assert together > auc(changes[-1:], members, others)  # one round has fewer rows than there are examples
    strangers = inputs(run, run.shards.own[:360])
    assert abs(auc(changes, strangers, others) - 0.5) < FOUR_DEVIATIONS


def test_what_a_client_works_out_is_what_the_others_sent() -> None:
    run = played("plain", 2)
    victim = next(client for client in (0, 1) if client not in run.known)
    sent, clients = sent_changes(run.recorded, victim)
    assert clients == (victim,)
    for mine, true in zip(rewound_changes(run.recorded.attacker), sent, strict=True):
        torch.testing.assert_close(2 * mine.weight, true.weight, rtol=0, atol=1e-6)


def test_sums_of_a_lane_are_told_by_several_rounds() -> None:
    run = played("blind", 16, secure_aggregation=True)
    victim = next(client for client in range(16) if client not in run.known)
    changes, clients = sent_changes(run.recorded, victim)
    assert len(clients) == 8  # the same in every round
    assert victim in clients
    members = inputs(run, np.concatenate([run.shards.of_clients[client] for client in clients]))
    others = inputs(run, run.shards.others)
    assert auc(changes, members, others) > 0.98
    assert auc(changes, members, others) > auc(changes[-1:], members, others) + 0.01
    absent = [client for client in range(16) if client not in clients]
    strangers = inputs(run, np.concatenate([run.shards.of_clients[client] for client in absent]))
    assert auc(changes, strangers, others) < 0.6


def test_noise_on_updates_hides_their_span() -> None:
    noisy = played("plain", 2, update_clip=0.5, update_noise=0.01)
    victim = next(client for client in (0, 1) if client not in noisy.known)
    changes, _ = sent_changes(noisy.recorded, victim)
    members, others = inputs(noisy, noisy.shards.of_clients[victim]), inputs(noisy, noisy.shards.others)
    assert auc(changes, members, others) < 0.8


@pytest.mark.parametrize("adversary", ["client", "server"])
def test_findings_name_the_seat_and_leave_out_rounds_that_say_nothing(adversary: str) -> None:
    x = torch.rand(1104, 16, generator=torch.Generator().manual_seed(0))
    delta = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    change, dead = (FirstLayer(d @ x[:4], d.sum(1), Identity(16)) for d in (delta, 0 * delta))
    found = round_span_findings([dead, change], x[:4], x[4:], adversary)
    assert [each.measure for each in found] == ["auc", "tpr at 1 % fpr", "tpr at 0.1 % fpr"]
    assert {each.value for each in found} == {1.0}
    assert {each.adversary for each in found} == {adversary}
    assert found[0].budget["rounds"] == 1
    assert round_span_findings([dead], x[:4], x[4:], adversary) == []
