import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
from dbcl.data import examples_of
from dbcl.engines import Engine, LocalEngine, LocalTraining, StackedEngine
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.testing.clipping import SharedNoiseContract
from dbcl.testing.engine import EngineContract
from dbcl.testing.nested import nested

SEED = bytes(range(32))


class TestStackedEngine(EngineContract, SharedNoiseContract):
    def engine(self, *arguments: Any, **more: Any) -> StackedEngine:
        return StackedEngine(*arguments, **more)


class TestStackedEngineByVmap(EngineContract):
    """The contract's networks in a wrapper of which the fast path has no form."""

    def engine(self, server: dbcl.Server, template: nn.Module, *arguments: Any, **more: Any) -> StackedEngine:
        template.register_forward_hook(lambda module, inputs, output: output)
        return StackedEngine(server, template, *arguments, **more)

    def test_it_takes_this_path(self) -> None:
        engine = self.start(LocalTraining())
        engine.play_round()
        assert engine.path == "vmap"


class TestStackedEngineByLoop(EngineContract):
    """The same with one client after another."""

    def engine(self, *arguments: Any, **more: Any) -> StackedEngine:
        engine = StackedEngine(*arguments, **more)
        engine.path, engine.why = "loop", "the test says so"
        return engine


class TestStackedEngineInChunks(EngineContract):
    def engine(self, *arguments: Any, **more: Any) -> StackedEngine:
        engine = StackedEngine(*arguments, **more)
        engine.chunk = 3
        return engine


def distance(
    make: Any,
    shape: tuple,
    training: LocalTraining,
    *,
    outputs: int,
    rounds: int = 2,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> tuple[float, StackedEngine]:
    """The largest difference between the weights of the two engines after some rounds with the same seeds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, *shape, generator=generator).to(dtype)
    y = torch.randint(0, max(2, outputs), (40,), generator=generator)
    shards = [np.arange(0, 17), np.arange(17, 20), np.arange(20, 40)]
    torch.manual_seed(0)
    start = make().to(dtype).state_dict()
    states = []
    for kind in (LocalEngine, StackedEngine):
        model, template = make().to(dtype), make().to(dtype)
        model.load_state_dict(start)
        server = dbcl.Server(model, insecure_seed=0, **nested({"coverage": "hidden", "calibration": x, **settings}))
        engine = kind(server, template, examples_of((x, y)).divide(shards), training, seed=SEED)
        for _ in range(rounds):
            engine.play_round()
        states.append(model.state_dict())
    worst = max(
        float((states[0][name] - states[1][name]).abs().max())
        for name in states[0]
        if states[0][name].is_floating_point()
    )
    assert any(not torch.equal(start[name], states[0][name]) for name in start)
    return worst, engine


# One example of the paper's size and a smaller one, and the outputs.
NETWORKS = {
    "mnist-mlp": ((1, 28, 28), (1, 28, 28), 10),
    "mnist-cnn": ((1, 28, 28), (1, 17, 16), 10),
    "cifar-cnn": ((3, 32, 32), (3, 21, 20), 10),
    "lfw-cnn": ((3, 62, 47), (3, 24, 23), 1),
    "dlg-lenet": ((1, 28, 28), (1, 28, 28), 10),
}
TRAINING = {
    "fedavg": LocalTraining(lr=0.001, lr_decay=0.9, epochs=2, batch_size=8, momentum=0.5),
    "fedprox": LocalTraining(lr=0.001, batch_size=8, proximal=0.5),
    "sgd": LocalTraining(lr=0.001, batch_size=8, steps=1),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("training", "veil"), [("fedavg", 0.2), ("fedprox", 0.0), ("sgd", 0.2)])
def test_every_network_of_the_paper_gives_the_weights_of_the_local_engine(
    name: str, training: str, veil: float
) -> None:
    """At the paper's size for a single step, and at a smaller one for several."""
    full, small, outputs = NETWORKS[name]
    assert_as_local(name, full if training == "sgd" else small, outputs, training, veil)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", TRAINING)
@pytest.mark.parametrize("veil", [0.0, 0.2])
def test_every_network_at_the_papers_size_gives_the_weights_of_the_local_engine(
    name: str, training: str, veil: float
) -> None:
    full, _, outputs = NETWORKS[name]
    assert_as_local(name, full, outputs, training, veil)


def assert_as_local(name: str, shape: tuple[int, int, int], outputs: int, training: str, veil: float) -> None:
    worst, engine = distance(
        lambda: networks.build(name, shape=shape, outputs=outputs),
        shape,
        TRAINING[training],
        outputs=outputs,
        veil=veil,
    )
    assert engine.path == "stages"
    assert worst < 1e-10


@pytest.mark.parametrize("name", ["mnist-mlp", "mnist-cnn"])
def test_in_float32_the_engines_agree_to_rounding(name: str) -> None:
    """Weights are of size 1 or less; after two rounds of up to six steps 1e-5 is some eighty units in last place."""
    worst, _ = distance(lambda: networks.build(name), (1, 28, 28), TRAINING["fedavg"], outputs=10, dtype=torch.float32)
    assert worst < 1e-5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 3)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(x + torch.relu(self.one(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.unflatten(1, (3, 4)))[0][:, -1])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(torch.relu(self.one(x))))


ROWS, IMAGES = (12,), (2, 8, 8)
STACKS = {
    "dropout": (
        lambda: nn.Sequential(
            nn.Linear(12, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 3)
        ),
        ROWS,
        "stages",
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(12, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3, bias=False)),
        ROWS,
        "stages",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3)),
        ROWS,
        "stages",
    ),
    "nested images": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.GroupNorm(2, 8), nn.Dropout(0.2)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        IMAGES,
        "stages",
    ),
    "residual": (Residual, ROWS, "vmap"),
    "recurrent": (Recurrent, ROWS, "vmap"),
    "own dropout": (Dropping, ROWS, "loop"),
    "circular": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(256, 3)),
        IMAGES,
        "vmap",
    ),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("sketch", ["count-v1", "count-hashed-v1", "sampling-v1", "identity-v1"])
def test_every_path_is_exact(name: str, sketch: str) -> None:
    make, shape, path = STACKS[name]
    worst, engine = distance(
        make, shape, LocalTraining(lr=0.05, epochs=2, batch_size=5, momentum=0.3), outputs=3, sketch=sketch
    )
    assert engine.path == path, engine.why
    assert worst < 1e-10


LANED: dict[str, dict[str, Any]] = {
    "two": {},
    "four": {"ratio": 4},
    "three, uneven": {"ratio": 3},
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("lanes", LANED)
def test_every_path_is_exact_in_every_lane(name: str, lanes: str) -> None:
    """Batch norm, dropout, convolutions and the rest, of clients that are in different lanes."""
    make, shape, path = STACKS[name]
    worst, engine = distance(
        make,
        shape,
        LocalTraining(lr=0.05, epochs=2, batch_size=5, momentum=0.3),
        outputs=3,
        coverage="all",
        **LANED[lanes],
    )
    assert engine.path == path, engine.why
    assert worst < 1e-10


@pytest.mark.parametrize(
    "training", [LocalTraining(lr=0.05), LocalTraining(lr=0.05, momentum=0.5), LocalTraining(steps=1)]
)
@pytest.mark.parametrize("chunk", [None, 1, 2, 5])
def test_chunks_may_hold_clients_of_any_lanes(training: LocalTraining, chunk: int | None) -> None:
    """Eleven clients in four lanes: a chunk is of one lane, or of some, or of all."""
    generator = torch.Generator().manual_seed(0)
    examples = examples_of((torch.randn(88, 12, generator=generator).double(), torch.arange(88) % 3))
    shards = np.split(np.arange(88), np.cumsum([3, 14, 1, 9, 9, 9, 5, 11, 7, 2]))
    states, reports = [], []
    for kind in (LocalEngine, StackedEngine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        server = dbcl.Server(model, dbcl.SketchConfig(ratio=4, coverage="all"), insecure_seed=0)
        engine = kind(server, copy.deepcopy(model), examples.divide(shards), training, seed=SEED)
        if kind is StackedEngine:
            engine.chunk = chunk
        reports.append([engine.play_round().report for _ in range(3)])
        states.append(model.state_dict())
    assert engine.path == "stages"
    assert max(float((states[0][key] - states[1][key]).abs().max()) for key in states[0]) < 1e-10
    assert [report.lanes for report in reports[0]] == [report.lanes for report in reports[1]]
    assert {tuple(sorted(report.lanes)) for report in reports[0]} == {(2, 3, 3, 3)}


class Scaled(nn.Module):
    """Has a parameter that is one number and no axis."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = nn.Linear(12, 8), nn.Linear(8, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)) * self.scale)


def test_a_parameter_may_be_a_single_number() -> None:
    worst, engine = distance(Scaled, ROWS, LocalTraining(lr=0.05), outputs=3)
    assert engine.path == "vmap"
    assert worst < 1e-10


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(7, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(self.embed(x).mean(dim=1))))


def test_examples_may_be_whole_numbers() -> None:
    x, y = torch.randint(0, 7, (40, 5), generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    shards = [np.arange(0, 17), np.arange(17, 20), np.arange(20, 40)]
    states = []
    for kind in (LocalEngine, StackedEngine):
        torch.manual_seed(0)
        model = Words().double()
        start = model.embed.weight.detach().clone()
        clients = examples_of((x, y)).divide(shards)
        engine = kind(
            dbcl.Server(model, dbcl.SketchConfig(coverage="hidden"), insecure_seed=0),
            Words().double(),
            clients,
            LocalTraining(lr=0.1),
            seed=SEED,
        )
        for _ in range(3):
            engine.play_round()
        states.append(model.state_dict())
        assert not torch.equal(start, model.embed.weight)
    assert engine.path == "vmap"
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) < 1e-10


def test_a_dense_layer_on_sequences_is_not_taken_for_one_on_rows() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))

    worst, engine = distance(make, (4, 6), LocalTraining(lr=0.05, batch_size=5), outputs=3)
    assert engine.path == "stages"
    assert worst < 1e-10


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_may_keep_all_and_nothing(p: float) -> None:
    worst, engine = distance(
        lambda: nn.Sequential(nn.Linear(12, 9), nn.Dropout(p), nn.Dropout(0.5), nn.Linear(9, 3)),
        ROWS,
        LocalTraining(lr=0.05, batch_size=5),
        outputs=3,
    )
    assert engine.path == "stages"
    assert worst < 1e-10


@pytest.mark.parametrize("kind", [LocalEngine, StackedEngine])
def test_a_batch_of_one_example_has_no_batch_norm(kind: type[Engine]) -> None:
    """Plain PyTorch refuses it."""
    model = nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))
    x = torch.randn(11, 12)
    server = dbcl.Server(copy.deepcopy(model), dbcl.SketchConfig(coverage="hidden"), calibration=x)
    engine = kind(server, model, [(x, torch.arange(11) % 3)], LocalTraining(batch_size=5), seed=SEED)
    with pytest.raises((ConfigError, ValueError), match=r"more than 1 value per channel|a batch of one example"):
        engine.play_round()


def test_it_says_which_path_and_why() -> None:
    _, engine = distance(Dropping, ROWS, LocalTraining(), outputs=3, rounds=1)
    assert engine.path == "loop"
    assert engine.why.startswith("the model: no fast form of Dropping; and torch.func cannot batch it: drop (Dropout)")


def halve(module: nn.Module, grads: tuple[Tensor, ...], *others: Any) -> tuple[Tensor, ...]:
    return tuple(grad / 2 for grad in grads)


HOOKS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "forward": (lambda layer: layer.register_forward_hook(lambda layer, inputs, output: output / 2), "vmap"),
    "forward pre": (lambda layer: layer.register_forward_pre_hook(lambda layer, inputs: inputs[0] / 2), "vmap"),
    "backward": (lambda layer: layer.register_full_backward_hook(halve), "loop"),
    "backward pre": (lambda layer: layer.register_full_backward_pre_hook(halve), "loop"),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_the_hooks_of_a_layer_are_called(kind: str) -> None:
    register, path = HOOKS[kind]

    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
        register(net[2])
        return net

    worst, engine = distance(make, ROWS, LocalTraining(lr=0.05), outputs=3)
    assert (engine.path, engine.why.startswith("2: has hooks")) == (path, True)
    assert worst < 1e-10


def test_a_hook_on_every_module_is_called() -> None:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda layer, inputs, output: output / 2)
    try:
        worst, engine = distance(STACKS["layer norm"][0], ROWS, LocalTraining(lr=0.05), outputs=3)
    finally:
        hook.remove()
    assert (engine.path, engine.why) == ("vmap", "every module: has hooks")
    assert worst < 1e-10


def test_a_hook_that_is_added_after_some_rounds_is_called() -> None:
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    engine = StackedEngine(
        dbcl.Server(net, dbcl.SketchConfig(coverage="hidden")),
        copy.deepcopy(net),
        [(torch.randn(20, 8), torch.arange(20) % 2)],
        LocalTraining(),
        seed=SEED,
    )
    engine.play_round()
    assert engine.path == "stages"
    engine.template[0].register_forward_hook(lambda layer, inputs, output: None)
    engine.play_round()
    assert (engine.path, engine.why) == ("vmap", "0: has hooks")


def test_a_forward_that_was_replaced_on_one_layer_is_called() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
        net[1].forward = torch.tanh
        return net

    worst, engine = distance(make, ROWS, LocalTraining(lr=0.05), outputs=3)
    assert (engine.path, engine.why) == ("vmap", "1: has a forward of its own")
    assert worst < 1e-10


def test_a_batch_norm_over_sequences_takes_another_path() -> None:
    """Its statistics are over the batch and the last axis, which the fast form does not compute."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(32, 3))

    worst, engine = distance(make, (4, 6), LocalTraining(lr=0.05, batch_size=5), outputs=3)
    assert engine.path == "loop"
    assert engine.why.startswith("1: batch norm over 2-dimensional examples; ")
    assert worst < 1e-10


@pytest.mark.parametrize("ratio", [(2, 4), 3])
def test_widths_that_change_from_round_to_round(ratio: Any) -> None:
    make = STACKS["layer norm"][0]
    worst, _ = distance(make, ROWS, LocalTraining(lr=0.05), outputs=3, rounds=4, ratio=ratio, coverage="all")
    assert worst < 1e-10


def test_the_sketches_of_earlier_rounds_are_left_alone() -> None:
    """The engine keeps tables of its own, so a broadcast that somebody kept still lifts what it lifted."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    server = dbcl.Server(net, dbcl.SketchConfig(coverage="hidden"))
    clients = [(torch.randn(10, 8), torch.arange(10) % 2) for _ in range(2)]
    engine = StackedEngine(server, net, clients, LocalTraining(), seed=SEED)
    first = server.open_round()
    before = first.sketches()["0.weight"].dense(torch.float32).clone()
    for _ in range(3):
        engine.play_round()
    assert torch.equal(first.sketches()["0.weight"].dense(torch.float32), before)


def test_wire_dtype_and_frozen_parameters() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
        nn.init.constant_(net[0].bias.requires_grad_(False), 0.25)
        return net

    worst, engine = distance(make, ROWS, LocalTraining(lr=0.05), outputs=3, wire="bfloat16", dtype=torch.float32)
    assert engine.path == "stages"
    assert worst < 1e-3  # an update that is rounded to 8 bits may round the other way


class Masked(nn.Module):
    """A network with a constant buffer that it multiplies with, and a frozen layer: neither is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 8).requires_grad_(False)
        nn.init.constant_(self.base.weight, 0.1)
        nn.init.zeros_(self.base.bias)
        self.register_buffer("mask", torch.tensor([1.0, 0.0] * 4))
        self.inner, self.out = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.base(x) * self.mask).relu())


@pytest.mark.parametrize("make", [Masked, lambda: nn.Sequential(Masked().base, nn.ReLU(), nn.Linear(8, 3))])
def test_tensors_that_are_not_sent_are_each_clients_own(make: Any) -> None:
    worst, engine = distance(make, ROWS, LocalTraining(lr=0.05), outputs=3, coverage="all")
    assert worst < 1e-10
    assert engine.path == ("vmap" if make is Masked else "stages")


def test_a_client_whose_frozen_copy_differs_is_refused() -> None:
    x, y = torch.randn(20, 12), torch.arange(20) % 3
    template = Masked()
    template.base.weight[0, 0] += 1
    for kind in (LocalEngine, StackedEngine):
        engine = kind(
            dbcl.Server(Masked(), dbcl.SketchConfig(coverage="hidden")), template, [(x, y)], LocalTraining(), seed=SEED
        )
        with pytest.raises(dbcl.errors.PlanError, match=r"base.weight is frozen, and this model's copy differs"):
            engine.play_round()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("name", ["mnist-mlp", "mnist-cnn"])
@pytest.mark.parametrize("sizes", [(17, 3, 40), (20, 20, 20)])
@pytest.mark.parametrize("chunk", [None, 1])  # equal clients of several chunks share one captured graph
def test_the_gpu_gives_the_cpus_weights(
    name: str, dtype: torch.dtype, bound: float, sizes: tuple[int, ...], chunk: int | None
) -> None:
    states = []
    x, y = torch.randn(60, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(60) % 10
    for device in ("cpu", "cuda"):
        model, template = networks.build(name).to(device, dtype), networks.build(name, seed=1).to(device, dtype)
        server = dbcl.Server(model, dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
        shards = np.split(np.arange(60), np.cumsum(sizes)[:-1])
        clients = examples_of((x, y)).to(device).divide(shards)
        engine = StackedEngine(server, template, clients, LocalTraining(lr=0.01), seed=SEED)
        engine.chunk = chunk
        for _ in range(3):
            engine.play_round()
        states.append({key: value.cpu() for key, value in model.state_dict().items()})
    worst = max(float((states[0][key] - states[1][key]).abs().max()) for key in states[0])
    assert worst < bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("chunk", [None, 1])
def test_the_gpu_clips_every_example_as_the_cpu_does(dtype: torch.dtype, bound: float, chunk: int | None) -> None:
    """With an example that is far from all others: one that were not clipped would be seen in every weight."""
    training = LocalTraining(lr=0.1, steps=1, example_clip=0.05, separation=2)
    x, y = torch.randn(60, 1, 28, 28, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(60) % 10
    x[0] *= 1e3  # its turn is round 0
    states, shards = [], np.split(np.arange(60), [17, 20])
    for device in ("cpu", "cuda"):
        model, template = (networks.build("mnist-mlp", seed=seed).to(device, dtype) for seed in (0, 1))
        server = dbcl.Server(model, dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
        clients = examples_of((x, y)).to(device).divide(shards)
        engine = StackedEngine(server, template, clients, training, seed=SEED)
        engine.chunk = chunk
        before = torch.cat([parameter.flatten() for parameter in model.parameters()]).detach().cpu()
        for _ in range(3):
            engine.play_round()
        states.append(torch.cat([parameter.flatten() for parameter in model.parameters()]).detach().cpu())
    assert float((states[0] - before).norm()) > 1e3 * bound
    assert float((states[0] - states[1]).norm()) < bound
