"""One example as the unit of a guarantee: every example's gradient is clipped by itself, in every engine."""

import copy
import math

import pytest
import torch
from torch import nn

import dbcl
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine
from dbcl.errors import ConfigError
from dbcl.privacy import PrivacyPlan, cyclic_batch
from dbcl.run import RunConfig

SEED = bytes(range(32))
FREE = dbcl.Door(max_influence=None, max_times_median=None)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 10, generator=generator, dtype=torch.float64), torch.arange(50) % 3
    return [(x[:20], y[:20]), (x[20:27], y[20:27]), (x[27:28], y[27:28]), (x[28:], y[28:])]  # unequal on purpose


def written_out(model: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: float) -> dict[str, torch.Tensor]:
    """The sum of the examples' gradients, each clipped, one after another."""
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for one, label in zip(x, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(one[None]), label[None]).backward()
        length = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad * min(1.0, clip / float(length))
    return total


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
@pytest.mark.parametrize("clip", [0.05, 0.7, 100.0])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_is_the_sum_of_clipped_gradients(kind: type[Engine], clip: float, lanes: int) -> None:
    torch.manual_seed(1)
    start = net()
    server = dbcl.Server(copy.deepcopy(start), insecure_seed=0, door=FREE, lanes=lanes)
    twin = dbcl.Server(copy.deepcopy(start), insecure_seed=0, door=FREE, lanes=lanes)
    training = LocalTraining(lr=0.1, steps=1, example_clip=clip, separation=3)
    engine = kind(server, net(), clients(), training, seed=SEED)
    for round in range(4):
        engine.play_round()
        updates = {}
        for client, (x, y) in enumerate(clients()):
            broadcast = twin.open_round(f"client {client}")
            local = dbcl.blinded(net(), broadcast)
            rows = list(cyclic_batch(round, examples=len(x), separation=3))
            total = written_out(local, x[rows], y[rows], clip)
            with torch.no_grad():
                for name, parameter in local.named_parameters():
                    parameter.sub_(0.1 * total[name])
            updates[f"client {client}"] = dbcl.update(local, broadcast, examples=-(-len(x) // 3))
        twin.close_round(updates)
    for one, other in zip(server.model.parameters(), twin.model.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
def test_an_example_without_a_gradient_counts_as_none(kind: type[Engine], bad: float) -> None:
    """Else one example would decide over all others of its client."""
    torch.manual_seed(1)
    start, others = net(), clients()[1:]
    x, y = (tensor.clone() for tensor in clients()[0])
    x[4, 2] = bad  # of a batch of 20 examples
    whole = PrivacyPlan(
        epsilon=8,
        delta=1e-4,
        clip=0.07,
        rounds=4,
        clients=4,
        cohort=4,
        unit="example",
        examples=50,
        batch=50,
        separation=1,
    )
    ends, kept = [], [row for row in range(20) if row != 4]
    for first in ((x, y), (x[kept], y[kept])):
        server = dbcl.Server(copy.deepcopy(start), privacy=whole, insecure_seed=0, lanes=1)
        training = LocalTraining(lr=0.1, steps=1, example_clip=0.7, separation=1)
        report = kind(server, net(), [first, *others], training, seed=SEED).play_round().report
        assert (report.accepted, report.refused) == (4, ())
        ends.append(torch.cat([tensor.flatten() for tensor in server.weights().values()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    assert not torch.equal(ends[0], torch.cat([parameter.flatten() for parameter in start.parameters()]))


def test_other_networks_are_clipped_one_client_at_a_time() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(12, 1, 6, 6)
    training = LocalTraining(lr=0.1, steps=1, example_clip=0.1)
    engine = StackedEngine(dbcl.Server(net), copy.deepcopy(net), [(x, torch.arange(12) % 3)], training, seed=SEED)
    report = engine.play_round().report
    assert engine.path == "loop"
    assert "one client at a time" in engine.why
    assert 0 < report.norm <= 12 * 0.1 * 0.1 * (1 + 1e-5)  # twelve gradients of length 0.1 at most, times the rate


def test_several_steps_are_refused() -> None:
    for settings in ({"steps": 2}, {"steps": None}, {"steps": 1, "momentum": 0.5}, {"steps": 1, "proximal": 0.1}):
        with pytest.raises(ConfigError, match="one step of plain SGD a round"):
            LocalTraining(example_clip=1.0, **settings)  # type: ignore[arg-type]


def test_the_server_divides_by_the_planned_batch_whoever_answers() -> None:
    torch.manual_seed(1)
    model = net()
    before = copy.deepcopy(model)
    # An epsilon so large that its noise is below the bound of this test; and the step is W's, without noise.
    plan = PrivacyPlan(
        epsilon=500,
        delta=1e-3,
        clip=0.1,
        rounds=4,
        clients=4,
        cohort=4,
        unit="example",
        examples=50,
        batch=16,
        separation=3,
    )
    server = dbcl.Server(model, sketch="identity-v1", veil=0, privacy=plan, insecure_seed=0)
    training = LocalTraining(lr=0.1, steps=1, example_clip=1.0, separation=3)
    engine = StackedEngine(server, net(), clients()[:2], training, seed=SEED)
    engine.play_round()
    total = {name: torch.zeros_like(parameter) for name, parameter in before.named_parameters()}
    for x, y in clients()[:2]:
        rows = list(cyclic_batch(0, examples=len(x), separation=3))
        for name, each in written_out(before, x[rows], y[rows], 1.0).items():
            total[name] += each
    for name, parameter in model.named_parameters():
        expected = before.get_parameter(name) - 0.1 * total[name] / 16
        assert (parameter - expected).abs().max() < 0.1 * (expected - before.get_parameter(name)).abs().max()


def test_settings_of_examples() -> None:
    config = RunConfig(
        epsilon=8, clip=1.0, unit="example", algorithm="sgd", fraction=1.0, clients=2, lr=0.5, rounds=600
    )
    plan = config.privacy(60_000)
    assert plan is not None
    assert (plan.batch, plan.separation, plan.participations, plan.clip) == (6000, 10, 60, 0.5)
    assert (config.training().example_clip, config.training().separation) == (1.0, 10)
    assert config.noise() is None
    for wrong in ({"algorithm": "fedavg"}, {"fraction": 0.5}, {"lr_schedule": "mine:schedule"}):
        with pytest.raises(ConfigError, match="with --unit example clients take one step a round"):
            RunConfig(**{"epsilon": 8, "clip": 1.0, "unit": "example", "algorithm": "sgd", "fraction": 1.0, **wrong})
