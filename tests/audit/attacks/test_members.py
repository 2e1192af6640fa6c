"""Membership by likelihood ratios over all rounds: where it must be found, and where it must not."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from audit.attacks.shards import played, trajectory_of
from dbcl.errors import AuditError
from dbcl_audit.attacks.members import RoundScores, log_ratio, loss_scores, member_findings, ratio_scores, round_scores
from dbcl_audit.findings import Finding
from dbcl_audit.simulated_run import ShardRun

BOTH = "likelihood ratio and losses over all rounds"
NET = "audit.networks:thirty_two"


def aucs(findings: list[Finding]) -> dict[str, float]:
    return {each.attack: each.value for each in findings if each.measure == "auc"}


def rate(findings: list[Finding]) -> float:
    """The share of the members that are found at 1 % false positives."""
    (value,) = (each.value for each in findings if each.attack == BOTH and each.measure == "tpr at 1 % fpr")
    return value


def looked_for(found: ShardRun, members: np.ndarray) -> ShardRun:
    """The same rehearsal, as if the victim had had these examples."""
    return replace(found, shards=replace(found.shards, of_clients=(found.shards.of_clients[0], members)))


def test_members_of_two_parties_with_fixed_shards_are_found_and_strangers_are_not() -> None:
    """40 members and 300 others: under the null the error of an AUC is 0.05, and 0.65 three of them above chance."""
    simulated = played(model=NET, rounds=25)
    trajectory = trajectory_of(simulated)
    found = member_findings(simulated, trajectory, null=200)
    values = aucs(found)
    assert values["likelihood ratio over all rounds"] > 0.85
    assert values[BOTH] > 0.9
    assert values[BOTH] >= max(values.values()) - 0.02
    # A sum of standardised scores, which does not weigh rounds and examples, finds 0.43 of the members.
    assert rate(found) > 0.6
    (auc,) = (each for each in found if each.attack == BOTH and each.measure == "auc")
    assert auc.low < auc.value < auc.high  # type: ignore[operator]
    assert (auc.adversary, auc.attacker, auc.chance) == ("client", "adaptive", 0.5)
    assert {name: auc.budget[name] for name in ("members", "non-members", "rounds seen", "own examples")} == {
        "members": 40, "non-members": 300, "rounds seen": 25, "own examples": 200,
    }  # fmt: skip
    assert auc.curves[0].y[-1] == 1.0
    # Examples like the members, of which nobody has any: what a client would be whose data were fresh in every round.
    strangers = looked_for(simulated, simulated.shards.own[-40:])
    for value in aucs(member_findings(strangers, trajectory, null=200)).values():
        assert 0.35 < value < 0.65


def test_who_has_which_shard_is_not_read_from_the_truth() -> None:
    """Half of the members and half of the others exchanged: then there is nothing to tell."""
    simulated = played(model=NET, rounds=25)
    shards, trajectory = simulated.shards, trajectory_of(simulated)
    rng = np.random.default_rng(0)
    everyone = rng.permutation(np.concatenate([shards.of_clients[1], shards.others[:40]]))
    mixed = replace(
        simulated, shards=replace(shards, of_clients=(shards.of_clients[0], everyone[:40]), others=everyone[40:])
    )
    assert 0.3 < aucs(member_findings(mixed, trajectory, null=200))[BOTH] < 0.7


@pytest.mark.slow
def test_the_presets_own_network_and_ten_clients() -> None:
    """Measured: AUC 0.99, 0.88 and 0.56; at 1 % false positives 0.70, 0.37 and 0.03 of the members."""
    simulated = played(model="mnist-mlp", rounds=40)
    found = member_findings(simulated, trajectory_of(simulated, examples=500), null=300)
    assert aucs(found)[BOTH] > 0.93
    assert rate(found) > 0.55
    ten = played(model="mnist-mlp", rounds=60, clients=10)
    found = member_findings(ten, trajectory_of(ten, examples=1000), null=600)
    assert 0.7 < aucs(found)[BOTH] < 0.95
    assert 0.25 < rate(found) < 0.6
    strong = played(model="mnist-mlp", rounds=40, veil=5.0, lr=0.001)
    found = member_findings(strong, trajectory_of(strong, examples=500), null=300)
    assert aucs(found)[BOTH] < 0.7
    assert rate(found) < 0.15


def test_colluders_of_both_lanes_look_for_members_together() -> None:
    simulated = played(clients=4, allies=1, rounds=6)
    found = member_findings(simulated, trajectory_of(simulated), null=100)
    assert {each.adversary for each in found} == {"colluders"}
    assert found[0].budget["members"] == 80


def test_every_example_has_a_score_in_every_lane_of_every_round_but_the_last() -> None:
    simulated = played(clients=5, rounds=4)
    trajectory, shards = trajectory_of(simulated), simulated.shards
    examples, null = shards.examples.subset(shards.members()), shards.examples.subset(shards.own[:50])
    moved: list[int] = []
    trajectory.step = lambda: moved.append(1)
    assert trajectory.lanes
    before = len(moved)
    scores = round_scores(trajectory, examples, null)
    assert len(moved) > before + 2
    assert [len(lanes) for lanes in scores] == [2, 2, 2]
    for index, lanes in enumerate(scores):
        assert [each.plan for each in lanes] == [lane.broadcast.plan.digest for lane in trajectory.lanes[index]]
        for each in lanes:
            assert (each.ratios.shape, each.losses.shape) == ((160,), (210,))
            assert np.isfinite(each.ratios).all()


@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_a_likelihood_ratio_is_that_of_two_normals(spread: float) -> None:
    left, variance, shift = np.array([-1.0, 0.0, 2.5]), np.array([0.5, 1.0, 2.0]), np.array([0.3, 1.0, 4.0])
    wide = np.sqrt(variance + (spread * shift) ** 2)
    expected = norm.logpdf(left, shift, wide) - norm.logpdf(left, 0, np.sqrt(variance))
    np.testing.assert_allclose(log_ratio(left, variance, shift, spread), expected)


def of_lane(plan: str, others: float, *ratios: float) -> RoundScores:
    return RoundScores(plan, others, np.array(ratios), np.ones(len(ratios)))


def test_ratios_add_up_over_a_clients_lanes_and_are_mixed_where_its_lane_is_unknown() -> None:
    rounds = [
        [of_lane("a", 1.0, 1.0, 0.0), of_lane("b", 3.0, 5.0, 4.0)],
        [of_lane("c", 2.0, -1.0, 2.0), of_lane("d", 2.0, 7.0, 0.0)],
    ]
    assert ratio_scores(rounds, ["a", "d"]).tolist() == [8.0, 0.0]
    first = np.log(0.25 * np.exp([1.0, 0.0]) + 0.75 * np.exp([5.0, 4.0]))
    second = np.log(0.5 * np.exp([-1.0, 2.0]) + 0.5 * np.exp([7.0, 0.0]))
    np.testing.assert_allclose(ratio_scores(rounds, [None, None]), first + second)
    # Of eight other clients four take part in a round: a client says nothing in the rounds that it is not in.
    absent = np.log(0.5 * np.exp(first) + 0.5) + np.log(0.5 * np.exp(second) + 0.5)
    np.testing.assert_allclose(ratio_scores(rounds, [None, None], clients=8), absent)


def test_losses_are_compared_within_a_class() -> None:
    """An example of the harder class counts for more than one with the same loss of the easier one."""
    rng = np.random.default_rng(0)
    easy, hard = 0.01 * rng.lognormal(0, 0.3, 50), 1.0 * rng.lognormal(0, 0.3, 50)
    losses = np.concatenate([[0.1, 0.1], easy, hard])
    groups = np.array([0.0, 1.0] + [0.0] * 50 + [1.0] * 50)
    found = loss_scores([[RoundScores("a", 1.0, np.zeros(2), losses)]], groups, slice(2, None))
    assert found[0] < -3 < 3 < found[1]
    # Of a class with next to no null examples all of them are taken.
    alone = loss_scores([[RoundScores("a", 1.0, np.zeros(2), losses)]], np.array([2.0, *groups[1:]]), slice(2, None))
    assert np.isfinite(alone).all()
    assert alone[1] == found[1]


def test_an_attacker_without_examples_is_refused() -> None:
    simulated = played(rounds=3)
    few = replace(simulated, shards=replace(simulated.shards, own=simulated.shards.own[:5]))
    with pytest.raises(
        AuditError, match="the attacker has 5 examples of its own beside its shard; it needs 20 or more"
    ):
        member_findings(few, trajectory_of(simulated))
