"""Rehearsals of a run as it is: who has which examples, that they stay the same, and what is recorded."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbcl.errors import AuditError, DataError
from dbcl.protocol import blinded, make_update
from dbcl.simulation import preset, task_of
from dbcl.simulation.config import RunConfig
from dbcl_audit.attacks.members import member_findings
from dbcl_audit.attacks.trajectory import Knowledge, Trajectory
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings
from dbcl_audit.fixed_shards import released_shares
from dbcl_audit.simulated_run import ShardRun, shards_of, simulate_run

CONFIG = preset("blind", model="audit.networks:twelve", clients=20, fraction=0.5)
TASK = task_of(CONFIG)


def played(
    folder: Path, config: RunConfig = CONFIG, *, clients: int | None = 4, rounds: int = 3, **more: Any
) -> ShardRun:
    shards = shards_of(config, TASK, clients=clients)
    return simulate_run(config, TASK, shards, folder, rounds=rounds, **more)


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 7, None])
def test_nobody_shares_an_example(clients: int | None) -> None:
    made = shards_of(CONFIG, TASK, clients=clients, own=500, others=300)
    parts = [*made.of_clients, made.own, made.others]
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert len(made.of_clients) == (clients or 20)
    assert {len(rows) for rows in made.of_clients} == {4000 // 20}
    assert (len(made.own), len(made.others)) == (500, 300)
    assert len(made.examples) == 5000  # held-out examples are such as nobody has
    assert (np.concatenate(made.of_clients) < 4000).all()


def test_shards_follow_from_the_seed() -> None:
    one, again, other = (shards_of(CONFIG, TASK, clients=3, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one.of_clients, again.of_clients, strict=True))
    assert np.array_equal(one.others, again.others)
    assert not np.array_equal(one.of_clients[0], other.of_clients[0])


def test_members_are_the_others_examples() -> None:
    made = shards_of(CONFIG, TASK, clients=3)
    assert np.array_equal(made.members(), np.concatenate(made.of_clients[1:]))
    assert np.array_equal(made.members((0, 2)), made.of_clients[1])


def test_the_division_of_the_data_is_kept() -> None:
    division = [np.arange(40), np.arange(40, 120), np.arange(120, 130)]
    made = shards_of(CONFIG, replace(TASK, division=division))
    assert [rows.tolist() for rows in made.of_clients] == [rows.tolist() for rows in division]


def test_what_shards_cannot_be_made_of() -> None:
    with pytest.raises(DataError, match="the run has 20 clients, and 30 are to be simulated"):
        shards_of(CONFIG, TASK, clients=30)
    with pytest.raises(DataError, match="the run has 1 clients, and 2 are to be simulated"):
        shards_of(CONFIG, replace(TASK, division=[np.arange(100)]))
    small = replace(TASK, held_out=TASK.held_out.subset(np.arange(15)))
    with pytest.raises(DataError, match="only 15 examples are left that no client has: too few to tell members from"):
        shards_of(CONFIG, small)


# --- what is played -------------------------------------------------------------------------------------------------


def test_clients_train_on_the_same_shard_in_every_round_as_the_run_says(tmp_path: Path) -> None:
    """What each client sent is what training on its shard gives, from what it was sent, in every round.

    Which of its examples come first is drawn from the rehearsal's seed, and so one batch of all of them is taken.
    """
    config = replace(CONFIG, epochs=2, batch_size=200, momentum=0.5)
    found = played(tmp_path, config)
    training, template = TASK.training(config), found.recorded.attacker.template()
    assert found.recorded.attacker.setting.local.settings() == training.settings()
    for number in range(3):
        seen = found.recorded.server[number]
        assert sorted(seen.updates) == ["0", "1", "2", "3"]
        for client, rows in enumerate(found.shards.of_clients):
            broadcast = seen.answered(str(client))
            local = blinded(template, broadcast)
            examples = found.shards.examples.subset(rows)
            training.train(local, examples, seed=bytes(32), round=number, client=client)
            sent, expected = seen.updates[str(client)], make_update(local, broadcast, examples=len(rows)).tensors
            assert sent.examples == len(rows)
            for name, tensor in expected.items():
                torch.testing.assert_close(sent.tensors[name], tensor, atol=1e-5, rtol=1e-3)


def test_the_servers_momentum_and_step_are_those_of_the_run(tmp_path: Path) -> None:
    found = played(tmp_path, replace(CONFIG, server_momentum=0.3, server_lr=0.8))
    setting = found.recorded.attacker.setting
    assert (setting.momentum, setting.server_lr, setting.veil, setting.cohort) == (0.3, 0.8, 0.2, 4)
    assert found.known == (0,)


@pytest.mark.parametrize("decay", [0.0, 0.2])  # reached in the third round: it rises
def test_the_released_model_is_the_servers_or_its_running_mean(decay: float, tmp_path: Path) -> None:
    config = replace(CONFIG, ema_decay=decay)
    found, longer = played(tmp_path / "one", config, rounds=3), played(tmp_path / "two", config, rounds=4)
    weights = [longer.recorded.truth.weights(number) for number in range(4)]  # of round 3: after three rounds
    shares = released_shares(config, 3)
    assert sum(shares.values()) == pytest.approx(1)
    assert len(shares) == (3 if decay else 1)  # the initial weights have no part
    for name, tensor in found.released.items():
        mean = sum(share * weights[number][name] for number, share in shares.items())
        torch.testing.assert_close(tensor, mean, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(tensor, weights[2][name], atol=1e-4)


def test_with_a_part_of_the_clients_in_a_round_the_one_that_sees_most_attacks(tmp_path: Path) -> None:
    found = played(tmp_path, clients=None, rounds=8, cohort=10, allies=2)
    assert found.config.cohort == 10
    every = [set(found.recorded.server[number].updates) for number in range(8)]
    assert {len(present) for present in every} == {10}
    turns = [sum(str(client) in present for present in every) for client in range(20)]
    first, *allies = found.known
    assert len(found.known) == 3
    assert len(set(found.known)) == 3
    assert turns[first] == max(turns)
    assert sorted((turns[client] for client in found.known), reverse=True) == sorted(turns, reverse=True)[:3]
    assert found.recorded.attacker.rounds == [n for n, present in enumerate(every) if str(first) in present]
    assert [ally.client for ally in found.recorded.allies] == [str(client) for client in allies]
    assert found.recorded.adversary == "colluders"


def test_who_attacks_alone_is_a_client_and_it_can_be_repeated(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    one = played(tmp_path / "one", rounds=2, progress=lambda *step: steps.append(step))
    again, other = played(tmp_path / "again", rounds=2), played(tmp_path / "other", rounds=2, seed=1)
    assert steps == [(1, 2), (2, 2)]
    assert one.recorded.adversary == "client"
    sent = [each.recorded.attacker[1].broadcast.tensors["1.weight"] for each in (one, again, other)]
    assert torch.equal(sent[0], sent[1])
    assert not torch.equal(sent[0], sent[2])


def test_under_secure_aggregation_the_server_has_sums(tmp_path: Path) -> None:
    config = CONFIG.with_options(secure_aggregation=True, secagg_clip=3.0, min_cohort=4, lanes=1)
    found = played(tmp_path, config)
    assert found.recorded.bound == 3.0
    assert sorted(found.recorded.server_observation(1, 2).clients) == [0, 1, 2, 3]
    assert played(tmp_path / "without", CONFIG.with_options(lanes=1)).recorded.server_observation(1, 2).clients == (2,)


def test_a_client_looks_for_members_also_where_the_server_has_sums(tmp_path: Path) -> None:
    """The auditor tells it the lanes of the others, which a server that sees sums does not record."""
    found = played(tmp_path, CONFIG.with_options(secure_aggregation=True, min_cohort=3, lanes=1), clients=3, rounds=5)
    own = found.shards.examples.subset(found.shards.own)
    findings = member_findings(found, Trajectory(found.recorded.attacker, Knowledge(own, examples=100)), null=100)
    assert {finding.measure for finding in findings} == {"auc", "tpr at 1 % fpr", "tpr at 0.1 % fpr"}


def test_no_attack_on_it_opens_the_truth(tmp_path: Path) -> None:
    found = played(tmp_path, clients=3, rounds=5)
    shutil.rmtree(tmp_path / "truth")
    own = found.shards.examples.subset(found.shards.own)
    trajectory = Trajectory(found.recorded.attacker, Knowledge(own, examples=100))
    findings = member_findings(found, trajectory, null=100)
    assert {finding.measure for finding in findings} == {"auc", "tpr at 1 % fpr", "tpr at 0.1 % fpr"}
    assert trajectory.changes().keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    with pytest.raises(AuditError, match="truth: round 0 cannot be read"):
        trajectory_update_findings(trajectory, found.recorded.truth, "client")
