"""One example as the unit of a guarantee: every example's gradient is clipped by itself, in every engine."""

import copy
import math
from typing import ClassVar

import pytest
import torch
from torch import nn

import dbcl
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine
from dbcl.engines.secure import SecureServer
from dbcl.errors import ConfigError
from dbcl.privacy import PrivacyPlan, cyclic_batch
from dbcl.simulation import RunConfig
from dbcl.simulation.build import privacy_plan
from dbcl.simulation.training import local_training, update_noise

SEED = bytes(range(32))
FREE = dbcl.protocol.UpdateValidator(max_influence=None, outlier_factor=None)


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
    server, twin = (
        dbcl.Server(
            copy.deepcopy(start), dbcl.SketchConfig(lanes=lanes, coverage="hidden"), insecure_seed=0, validator=FREE
        )
        for _ in range(2)
    )
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
            updates[f"client {client}"] = dbcl.make_update(local, broadcast, examples=-(-len(x) // 3))
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
        server = dbcl.Server(copy.deepcopy(start), dbcl.SketchConfig(lanes=1), privacy=whole, insecure_seed=0)
        training = LocalTraining(lr=0.1, steps=1, example_clip=0.7, separation=1)
        report = kind(server, net(), [first, *others], training, seed=SEED).play_round().report
        assert (report.accepted, report.refused) == (4, ())
        ends.append(torch.cat([tensor.flatten() for tensor in server.weights().values()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    assert not torch.equal(ends[0], torch.cat([parameter.flatten() for parameter in start.parameters()]))


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
@pytest.mark.parametrize(("noise_by", "excess"), [("server", 1e-3), ("clients", 1e-5)])
def test_of_many_aligned_examples_in_float32_one_changes_no_more_than_its_clip(
    kind: type[Engine], noise_by: str, excess: float
) -> None:
    """6,000 examples with the same gradient, and one less: a sum that were rounded on its way would move by more.

    To a trusted server the sum travels in float32, whose spacing is 5e-7 of 6,000 clips for each value.
    """
    count, clip, rate = 6000, 0.05, 0.1
    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    x, y = 3 * torch.randn(1, 20).repeat(count, 1), torch.zeros(count).long()
    plan = PrivacyPlan(
        epsilon=8, delta=1e-6, clip=rate * clip, unit="example", rounds=4, separation=1, clients=2, cohort=2,
        examples=count + 1, batch=count + 1, noise_by=noise_by,
        values=sum(parameter.numel() for parameter in start.parameters()),
    )  # fmt: skip
    training, sums = LocalTraining(lr=rate, steps=1, example_clip=clip), []
    for size in (count, count - 1):
        model = copy.deepcopy(start)
        server: dbcl.Server
        if noise_by == "clients":
            server = SecureServer(model, privacy=plan, masked=False, insecure_seed=0)
        else:
            server = dbcl.Server(model, dbcl.SketchConfig(sketch="identity-v1"), privacy=plan, insecure_seed=0)
        own = [(x[:size], y[:size]), (x[:1], y[:1])]
        engine = kind(server, copy.deepcopy(start), own, training, seed=SEED)
        update = engine.train_cohort({0: server.open_round("client 0")})["client 0"]
        read = update if isinstance(update, dbcl.Update) else dbcl.protocol.decode_update(update)
        sums.append(torch.cat([tensor.double().flatten() for tensor in read.tensors.values()]))
    assert float(sums[0].norm()) == pytest.approx(count * plan.clip, rel=1e-6)
    assert float((sums[0] - sums[1]).norm()) <= plan.clip * (1 + excess)


class Scale(nn.Module):
    """One weight, in a layer that has no fast path; with `branches` also none for several examples together."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.weight, self.branches = nn.Parameter(torch.zeros(1, 1)), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.branches and float(x.detach().sum()) < 0:
            x = -x
        return x * self.weight


@pytest.mark.parametrize(
    "model", [nn.Linear(1, 1, bias=False), Scale(branches=False), Scale(branches=True)], ids=["dense", "vmap", "each"]
)
def test_a_sum_for_shares_of_noise_is_exact(model: nn.Module) -> None:
    """It is one whose every partial sum is no number of float32, in a model in float32."""
    count, large = 2101, 2.0**25
    x = torch.cat([torch.tensor([large]), torch.ones(count)])[:, None]
    broadcast = dbcl.Server(model, dbcl.config.UNSKETCHED).open_round()
    training = LocalTraining(lr=1.0, steps=1, example_clip=large)
    local = dbcl.blinded(model, broadcast)
    update = training.clipped_update(
        local, broadcast, (x, torch.ones(len(x))), seed=SEED, client=0, loss=lambda outputs, _: outputs.sum()
    )
    assert update.tensors["weight"].item() == -(large + count)


def centred(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate examples less their mean: each acts on all others of its batch."""
    x, y = map(torch.stack, zip(*pairs, strict=True))
    return x - x.mean(dim=0), y


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
def test_a_collate_function_lets_no_example_act_on_another(kind: type[Engine]) -> None:
    torch.manual_seed(1)
    start, (x, y), moved = net(), clients()[0], []
    x = x + 1.0
    x[-1] = 1e3
    training = LocalTraining(lr=0.1, steps=1, example_clip=0.01)
    for count in (20, 19):
        pairs = list(zip(x[:count], y[:count], strict=True))
        loader = torch.utils.data.DataLoader(pairs, batch_size=8, collate_fn=centred)  # type: ignore[arg-type]
        server = dbcl.Server(copy.deepcopy(start), dbcl.SketchConfig(veil=0, sketch="identity-v1"), insecure_seed=0)
        engine = kind(server, net(), [loader], training, seed=SEED)
        update = engine.train_cohort({0: server.open_round("client 0")})["client 0"]
        read = update if isinstance(update, dbcl.Update) else dbcl.protocol.decode_update(update)
        moved.append(torch.cat([tensor.flatten() for tensor in read.tensors.values()]))
    assert float((moved[0] - moved[1]).norm()) <= 0.1 * 0.01 * (1 + 1e-9)


class Remembers(nn.Module):
    """Scales its outputs by something that it has seen before, which is in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(10, 3), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = 0.9 * self.scale + 0.1 * float(x.detach().norm())
        out: torch.Tensor = self.layer(x) * self.scale
        return out


class Averages(nn.Module):
    """Takes the mean of the inputs that it has seen off each, and keeps that in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        out: torch.Tensor = self.layer(x - self.mean)
        return out


class Elsewhere(nn.Module):
    """Scales its outputs by something that it has seen before, which all its copies share."""

    scale: ClassVar[list[float]] = [1.0]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale[0] = 0.9 * self.scale[0] + 0.1 * float(x.detach().norm())
        out: torch.Tensor = self.layer(x) * self.scale[0]
        return out


class TwoSteps(LocalTraining):
    """Clips nothing."""


OF_EXAMPLES = PrivacyPlan(
    epsilon=8, delta=1e-4, clip=0.07, rounds=4, clients=4, cohort=4, unit="example", examples=50, batch=50, separation=1
)


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
@pytest.mark.parametrize("model", [Remembers, Averages])
def test_what_a_model_remembers_of_one_example_does_not_reach_another(
    kind: type[Engine], model: type[nn.Module]
) -> None:
    """Two clients with the same examples, of which one has a huge one before them: updates differ by its gradient."""
    torch.manual_seed(1)
    start = model().double()
    x, y = clients()[0]
    huge = (torch.cat([1e3 * x[:1], x]), torch.cat([y[:1], y]))
    moved = []
    for own in ((x, y), huge):
        server = dbcl.Server(
            copy.deepcopy(start), dbcl.SketchConfig(sketch="identity-v1"), privacy=OF_EXAMPLES, insecure_seed=0
        )
        engine = kind(server, model().double(), [own], LocalTraining(lr=0.1, steps=1, example_clip=0.7), seed=SEED)
        update = engine.train_cohort({0: server.open_round("client 0")})["client 0"]
        read = update if isinstance(update, dbcl.Update) else dbcl.protocol.decode_update(update)
        moved.append(torch.cat([tensor.flatten() for tensor in read.tensors.values()]))
    assert float((moved[0] - moved[1]).norm()) <= 0.1 * 0.7 * (1 + 1e-9)


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
def test_a_model_that_remembers_examples_elsewhere_is_refused(kind: type[Engine]) -> None:
    server = dbcl.Server(Elsewhere().double(), dbcl.SketchConfig(sketch="identity-v1"), privacy=OF_EXAMPLES)
    training = LocalTraining(lr=0.1, steps=1, example_clip=0.7)
    with pytest.raises(ConfigError, match="the gradient of an example depends on those before it"):
        kind(server, Elsewhere().double(), clients(), training, seed=SEED)


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
def test_training_of_somebodys_own_is_refused(kind: type[Engine]) -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(sketch="identity-v1"), privacy=OF_EXAMPLES)
    training = TwoSteps(lr=0.1, steps=1, example_clip=0.7)
    with pytest.raises(ConfigError, match="TwoSteps may train in another way than LocalTraining"):
        kind(server, net(), clients(), training, seed=SEED)


@pytest.mark.parametrize("clip", [None, 0.7])
def test_examples_that_the_loss_leaves_out_are_left_out_by_every_engine(clip: float | None) -> None:
    torch.manual_seed(1)
    start, ends = net(), []
    x, y = clients()[0]
    y[3] = -100
    for kind in (LocalEngine, StackedEngine):
        server = dbcl.Server(
            copy.deepcopy(start), dbcl.SketchConfig(lanes=1, coverage="hidden"), insecure_seed=0, validator=FREE
        )
        training = LocalTraining(lr=0.1, steps=1, batch_size=20, example_clip=clip)
        kind(server, net(), [(x, y), *clients()[1:]], training, seed=SEED).play_round()
        ends.append(torch.cat([tensor.flatten() for tensor in server.weights().values()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


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
    server = dbcl.Server(model, dbcl.SketchConfig(sketch="identity-v1", veil=0), privacy=plan, insecure_seed=0)
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
    settings = {"epsilon": 8, "clip": 1.0, "privacy_unit": "example", "separation": 10, "algorithm": "sgd"}
    config = RunConfig.from_options(**settings, fraction=1.0, clients=2, lr=0.5, rounds=600)
    plan = privacy_plan(config, 60_000)
    assert plan is not None
    assert (plan.batch, plan.separation, plan.participations, plan.clip) == (6000, 10, 60, 0.5)
    training = local_training(config)
    assert (training.example_clip, training.separation) == (1.0, 10)
    assert update_noise(config) is None
    for wrong in ({"algorithm": "fedavg"}, {"fraction": 0.5}, {"lr_schedule": "mine:schedule"}):
        with pytest.raises(ConfigError, match="with `privacy_unit=example` clients take one step a round"):
            RunConfig.from_options(**{**settings, "fraction": 1.0, **wrong})
