"""What an attacker computes of all rounds: the drift, how far others are from it, and how examples move the model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from audit.attacks.shards import played, trajectory_of
from dbcl.blinding import lift
from dbcl.data import Examples, examples_of
from dbcl.objective import CLASSIFICATION, Objective
from dbcl.protocol import Broadcast, blinded
from dbcl_audit.attacks import trajectory as module
from dbcl_audit.attacks.gradients import example_gradients, gradients
from dbcl_audit.attacks.layer_gradients import layer_gradients
from dbcl_audit.attacks.trajectory import Lane, Own, Trajectory, each_loss, effective, example_losses, loaded
from dbcl_audit.attacks.trajectory_updates import trajectory_update_findings


def some(found: Trajectory, count: int = 12) -> Examples:
    return found.knowledge.own.subset(np.arange(count))


def in_the_middle(found: Trajectory, lane: Lane) -> nn.Module:
    """A client's own model, halfway through its steps."""
    sent = lane.broadcast
    moved = {name: V + lane.change[name] / 2 if name in lane.change else V for name, V in sent.tensors.items()}
    return blinded(found.template, Broadcast(sent.plan, moved, sent.veil))


def over_columns(found: Trajectory, lane: Lane, name: str, each: Tensor) -> Tensor:
    """A gradient of V, or many, as a change of W over its columns."""
    sketch = lane.broadcast.plan.sketches.get(name)
    view = found.views[name]
    matrix = each.reshape(*each.shape[:1], len(view.seen[0]), -1)
    return matrix if sketch is None else sketch.lift(matrix)


# --- steps, lanes and the drift -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"epochs": 3, "batch_size": 16}, 9), ({"epochs": 1, "batch_size": 40}, 1), ({"algorithm": "sgd"}, 1)],
)
def test_the_others_are_taken_to_make_as_many_steps_as_the_attacker(settings: dict, steps: int) -> None:
    """40 examples, the last batch of an epoch with what is left."""
    assert trajectory_of(played(rounds=3, **settings)).steps == steps


def test_in_one_lane_the_others_were_sent_what_the_attacker_was() -> None:
    found = trajectory_of(played(clients=5, lanes=1))
    for index, lanes in enumerate(found.lanes):
        (lane,) = lanes
        assert lane.others == 4
        assert lane.broadcast is found.received[index][0].broadcast


@pytest.mark.parametrize(("clients", "allies"), [(2, 0), (5, 0), (5, 1)])
def test_of_two_lanes_both_are_known_and_nobody_is_counted_twice(clients: int, allies: int) -> None:
    simulated = played(clients=clients, allies=allies)
    found = trajectory_of(simulated)
    for round, lanes in zip(found.rounds, found.lanes, strict=True):
        assert sum(lane.others for lane in lanes) == pytest.approx(clients - 1 - allies)
        plans = {lane.broadcast.plan.digest for lane in lanes}
        server = simulated.recorded.server[round]
        assert {server.answered(str(client)).plan.digest for client in range(1 + allies, clients)} <= plans
        assert len(lanes) == (1 if clients == 2 else 2)


@pytest.mark.parametrize(("veil", "most"), [(0.0, 0.05), (0.2, 0.5)])
def test_what_clients_of_the_other_lane_were_sent_is_estimated(veil: float, most: float) -> None:
    """Of W half is seen in a round, and the estimate is right where rounds before and after showed the other half."""
    simulated = played(clients=2, rounds=12, veil=veil)
    found = trajectory_of(simulated)
    off = []
    for index, round in enumerate(found.rounds):
        (lane,) = found.lanes[index]
        true = simulated.recorded.server[round].answered("1")
        assert lane.broadcast.plan.digest == true.plan.digest
        one, other = lane.broadcast.tensors["1.weight"], true.tensors["1.weight"]
        off.append(float((one - other).norm() / other.norm()))
        assert torch.equal(lane.broadcast.tensors["3.bias"], true.tensors["3.bias"])
    assert np.median(off) < most


def test_the_drift_is_the_mean_clients_update_times_the_others() -> None:
    """One step on all of the attacker's examples is the gradient of their mean loss."""
    found = trajectory_of(played(clients=5, lanes=1, epochs=1, batch_size=40), examples=10**6)
    rate = found.setting.local.lr
    own = found.knowledge.own
    for index in (0, 3):
        (lane,) = found.lanes[index]
        batch = own.take(np.arange(len(own)))
        exact = gradients(blinded(found.template, lane.broadcast), *batch)
        for name, tensor in lane.change.items():
            torch.testing.assert_close(tensor, -rate * exact[name].reshape(tensor.shape), atol=1e-6, rtol=1e-3)
            expected = found.share[name][index] * 4 / 5 * over_columns(found, lane, name, lane.change[name][None])[0]
            torch.testing.assert_close(found.drift[name][index], expected)


def test_what_the_mean_client_changes_is_lifted_as_what_clients_send() -> None:
    found = trajectory_of(played(lanes=1))
    (lane,) = found.lanes[0]
    whole = lift(lane.broadcast.plan, dict(lane.change))
    parts = [(lane.broadcast.plan, 1.0, lane.change)]
    for name, view in found.views.items():
        torch.testing.assert_close(found.over_columns(name, parts) * found.cohort, view.matrix(whole[name]).float())


def test_what_is_clipped_is_clipped_in_the_drift_and_in_the_rate() -> None:
    plain = trajectory_of(played(rounds=3))
    clipped = trajectory_of(played(rounds=3), clip=0.01)
    whole, short = plain.lanes[0][0], clipped.lanes[0][0]
    length = sum(float(each.square().sum()) for each in short.change.values()) ** 0.5
    assert length == pytest.approx(0.01, rel=1e-5)
    ratio = float(short.change["1.weight"].norm() / whole.change["1.weight"].norm())
    assert 0 < ratio < 0.5
    far = replace(short, change=whole.change)
    assert clipped.rate(0, far) == pytest.approx(plain.rate(0, whole) * ratio, rel=1e-4)


def with_own(own: list[Tensor], mean: list[Tensor]) -> Trajectory:
    """A trajectory whose attacker sent `own` where the mean client would have sent `mean`."""
    found = trajectory_of(played(clients=5, lanes=1, rounds=10))
    found.__dict__["_own"] = {name: list(zip(own, mean, strict=True)) for name in found.views}
    return found


def noise(size: float, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [size * torch.randn(12, 50, generator=rng) for _ in range(10)]


def test_the_share_of_the_drift_is_what_the_attacker_does_itself() -> None:
    mean, off = noise(1.0, 0), noise(0.1, 1)
    half = with_own([each / 2 + e for each, e in zip(mean, off, strict=True)], mean)
    np.testing.assert_allclose(half.share["1.weight"], 0.5, atol=0.02)
    whole = with_own([each + 20 * e for each, e in zip(mean, off, strict=True)], mean)
    # Noise of twice the length over 600 numbers: the error of one round's share is 0.08, and so it stays near 1.
    np.testing.assert_allclose(whole.share["1.weight"], 1.0, atol=0.1)
    assert np.std(whole.share["1.weight"]) < 0.04


def test_the_spread_is_how_far_the_attacker_is_from_the_drift_for_all_others_together() -> None:
    mean = noise(1.0, 0)
    found = with_own([each + e for each, e in zip(mean, noise(0.3, 1), strict=True)], mean)
    np.testing.assert_allclose(found.spread["1.weight"], np.sqrt(4) * 0.3 / 5, rtol=0.05)
    far = with_own([each + e for each, e in zip(mean, noise(0.3, 1), strict=True)], mean)
    far.knowledge = replace(far.knowledge, process_noise_scale=10.0)
    np.testing.assert_allclose(far.spread["1.weight"], 10 * found.spread["1.weight"])


def test_of_rounds_that_the_attacker_only_saw_sizes_are_those_of_its_neighbours() -> None:
    found = trajectory_of(played(clients=5, lanes=1, rounds=10))
    for place in (3, 4):
        broadcast = found.received[place][0].broadcast
        found.received[place] = [Own(broadcast, {}, 0)]
    assert found.answered == [0, 1, 2, 5, 6, 7, 8, 9]
    assert len(found._own["1.weight"]) == 8
    assert len(found.spread["1.weight"]) == 10
    assert (found.spread["1.weight"] > 0).all()


def test_what_is_known_of_the_ends_is_in_the_model() -> None:
    simulated = played(rounds=3)
    start = simulated.recorded.truth.weights(0)
    released = [({3: 1.0}, {name: simulated.released[name] for name in start})]
    plain, known = trajectory_of(simulated), trajectory_of(simulated, start=start, released=released)
    assert plain.model_of("1.weight").weight > 0
    assert plain.model_of("1.weight").more == ()
    model = known.model_of("1.weight")
    assert model.weight == 0
    torch.testing.assert_close(model.start.float(), start["1.weight"])  # type: ignore[union-attr]
    assert model.more[0].shares == {3: 1.0}
    assert known.information("1.weight").shape == (2, 2)
    noisy = trajectory_of(simulated, noise=lambda rounds: 0.01 * np.eye(len(rounds)))
    np.testing.assert_allclose(noisy.model_of("1.weight").noise, 0.01 * np.eye(3))


# --- what examples do -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lanes", "clients"), [(1, 2), (2, 5)])
def test_the_slope_of_an_example_is_its_gradients_inner_product_with_the_pull(
    lanes: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP", 1e-3)  # a finite difference, in single precision
    found = trajectory_of(played(clients=clients, lanes=lanes))
    for index in (0, 2):
        for lane in found.lanes[index]:
            examples = some(found)
            each = example_gradients(in_the_middle(found, lane), *examples.take(np.arange(12)))
            exact = np.zeros(12)
            for name, posterior in found.posteriors.items():
                moved = -found.setting.local.lr / clients * over_columns(found, lane, name, each[name].detach())
                exact += (moved * posterior.influence(index)[0]).sum(dim=(1, 2)).double().numpy()
            assert np.abs(exact).max() > 0
            slopes = found.example_slopes(index, lane, examples)
            off = np.abs(slopes - exact) / np.abs(exact).max()
            assert np.median(off) < 1e-3
            assert off.max() < 0.2  # a difference may go over a kink of ReLU


def test_a_round_of_which_nothing_is_left_to_explain_has_no_slope() -> None:
    found = trajectory_of(played(rounds=3))
    for posterior in found.posteriors.values():
        posterior.__dict__["_influences"] = torch.zeros_like(posterior._influences)
    assert not found.example_slopes(0, found.lanes[0][0], some(found)).any()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_weighted_change_is_that_of_a_step_on_the_weighted_losses(lanes: int) -> None:
    found = trajectory_of(played(clients=5, lanes=lanes))
    weights = np.random.default_rng(0).standard_normal(12)
    for lane in found.lanes[1]:
        each = example_gradients(in_the_middle(found, lane), *some(found).take(np.arange(12)))
        changed = found.weighted_change(1, lane, some(found), weights)
        assert changed.keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
        for name, change in changed.items():
            lifted = over_columns(found, lane, name, each[name].detach())
            exact = -found.setting.local.lr / 5 * torch.einsum("n,nij->ij", torch.from_numpy(weights).float(), lifted)
            torch.testing.assert_close(change, exact, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("lanes", [1, 2])
def test_effective_weights_compute_what_the_clients_model_computes(lanes: int) -> None:
    found = trajectory_of(played(clients=5, lanes=lanes))
    broadcast, inputs = found.received[1][0].broadcast, some(found).take(np.arange(12)).inputs
    whole = loaded(found.transcript.template(), effective(broadcast))
    torch.testing.assert_close(whole(inputs), blinded(found.template, broadcast)(inputs), atol=1e-5, rtol=1e-4)


def test_losses_of_single_examples() -> None:
    rng = torch.Generator().manual_seed(0)
    outputs, classes = torch.randn(7, 4, generator=rng), torch.arange(7) % 4
    each = each_loss(outputs, classes, CLASSIFICATION)
    assert float(each.mean()) == pytest.approx(float(CLASSIFICATION.loss(outputs, classes)))
    squared = Objective.from_loss(nn.functional.mse_loss)
    targets = torch.randn(7, 4, generator=rng)
    torch.testing.assert_close(each_loss(outputs, targets, squared), (outputs - targets).square().mean(dim=1))
    two, flags = torch.randn(7, 1, generator=rng), torch.arange(7) % 2  # one output for two classes
    exact = nn.functional.binary_cross_entropy_with_logits(two[:, 0], flags.float(), reduction="none")
    torch.testing.assert_close(each_loss(two, flags, CLASSIFICATION), exact)


def test_losses_are_computed_in_parts_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).train()
    examples = examples_of((torch.randn(11, 3, generator=torch.Generator().manual_seed(0)), torch.arange(11) % 4))
    whole = example_losses(net, examples, CLASSIFICATION)
    monkeypatch.setattr(module, "EXAMPLES_PER_PASS", 4)
    np.testing.assert_allclose(example_losses(net, examples, CLASSIFICATION), whole, atol=1e-6)
    assert net.training


# --- gradients by layers --------------------------------------------------------------------------------------------


def test_gradients_of_dense_layers_are_exact() -> None:
    found = trajectory_of(played(lanes=1))
    (lane,) = found.lanes[1]
    model = loaded(found.template, effective(lane.broadcast))
    examples = some(found)
    layers = layer_gradients(model, examples, CLASSIFICATION)
    each = example_gradients(model, *examples.take(np.arange(12)))
    assert [layer.name for layer in layers] == ["1.weight", "3.weight"]
    compact = example_gradients(blinded(found.template, lane.broadcast), *examples.take(np.arange(12)))
    for layer in layers:
        bias = layer.name.replace("weight", "bias")
        for one, exact in ((layer, each), (layer.through(lane.broadcast.plan), compact)):
            both = torch.cat([exact[layer.name].flatten(1), exact[bias]], dim=1)
            torch.testing.assert_close(one.squares, both.square().sum(dim=1), atol=1e-6, rtol=1e-3)
            torch.testing.assert_close(one.products(3), both @ both[3:].T, atol=1e-5, rtol=1e-3)


def test_of_convolutions_the_positions_are_summed_and_shapes_stand() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 4, stride=4), nn.Flatten(), nn.Linear(147, 10))
    examples = some(trajectory_of(played(lanes=1)), 5)
    convolution, dense = layer_gradients(net, examples, CLASSIFICATION)
    assert (convolution.inputs.shape, convolution.deltas.shape) == ((5, 1), (5, 3))
    each = example_gradients(net, *examples.take(np.arange(5)))
    torch.testing.assert_close(convolution.deltas, each["0.bias"], atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(torch.einsum("ni,nj->nij", dense.deltas, dense.inputs), each["2.weight"])
    assert layer_gradients(nn.Flatten(), examples, Objective.from_loss(lambda out, target: out.mean())) == []


# --- the others' updates --------------------------------------------------------------------------------------------


def test_updates_are_found_beyond_the_drift_and_better_in_sums() -> None:
    simulated = played(model="audit.networks:thirty_two", rounds=25)
    found = trajectory_of(simulated)
    single, beyond, five, twenty = trajectory_update_findings(found, simulated.recorded.truth, "client")
    assert [each.attack for each in (single, beyond, five, twenty)] == [
        "smoother with drift",
        "smoother beyond the drift",
        "smoother with drift, sums of 5 rounds",
        "smoother with drift, sums of 20 rounds",
    ]
    assert single.value > 0.25 > single.chance + 0.05  # type: ignore[operator]
    assert beyond.value > 0.25
    assert twenty.value > five.value > single.value
    assert twenty.value > 0.8
    assert "the drift alone, which is independent of the others, has" in single.note
    assert single.budget["scored rounds"] == 24


def test_strong_veils_leave_nothing_but_the_drift() -> None:
    simulated = played(model="audit.networks:thirty_two", rounds=12, veil=5.0)
    findings = trajectory_update_findings(trajectory_of(simulated), simulated.recorded.truth, "client")
    assert abs(findings[1].value) < 0.15


def test_of_somebody_elses_run_nothing_is_found() -> None:
    """The truth of another rehearsal: the same settings, other shards."""
    found = trajectory_of(played(model="audit.networks:thirty_two", rounds=25))
    other = played(model="audit.networks:thirty_two", rounds=25, division=1)
    _, beyond, *_ = trajectory_update_findings(found, other.recorded.truth, "client")
    assert abs(beyond.value) < 0.1
