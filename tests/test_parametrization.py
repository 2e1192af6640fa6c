"""The layers against the paper's arithmetic, written anew from its listing: loops over buckets, explicit gradients."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dbcl
from dbcl.errors import SketchError
from dbcl.model.parametrization import EffectiveWeight, compact_parameter, inner_name, plan_name, sketch_parameter
from dbcl.sketch import CountSketch, Sketch, draw

SEED = bytes(range(32))
F64 = torch.float64


class PaperSketch:
    """Buckets of inputs and a sign for each input, applied with a loop over the buckets."""

    def __init__(self, sketch: Sketch) -> None:
        R = sketch.dense()
        self.members = [R[:, h].nonzero().flatten() for h in range(sketch.width)]
        self.signs = R.sum(dim=1).sign()

    def apply(self, a: Tensor) -> Tensor:  # (m, n) -> (m, s)
        signed = a * self.signs
        return torch.stack([signed[:, members].sum(dim=1) for members in self.members], dim=1)

    def transpose(self, c: Tensor) -> Tensor:  # (m, s) -> (m, n)
        b = torch.zeros(len(c), len(self.signs), dtype=c.dtype)
        for h, members in enumerate(self.members):
            b[:, members] = c[:, h : h + 1]
        return b * self.signs


class PaperLinear:
    """z = (x S)(W S)^T + b on the full weight W, with the gradients written out."""

    def __init__(self, layer: nn.Linear, sketch: Sketch) -> None:
        self.W, self.b = layer.weight.detach().clone(), layer.bias.detach().clone()
        self.sketch = PaperSketch(sketch)

    def forward(self, x: Tensor) -> Tensor:
        self.x_sketch, self.w_sketch = self.sketch.apply(x), self.sketch.apply(self.W)
        return self.x_sketch @ self.w_sketch.T + self.b

    def backward(self, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_x = self.sketch.transpose(G @ self.w_sketch)
        grad_W = self.sketch.transpose(G.T @ self.x_sketch)
        return grad_x, grad_W, G.sum(dim=0)


class PaperConv:
    """The same for a convolution, as matrix products with its patches; one product for each group of channels."""

    def __init__(self, layer: nn.Conv2d, sketch: Sketch) -> None:
        self.shape, self.layer = layer.weight.shape, layer
        self.W, self.b = layer.weight.detach().reshape(layer.out_channels, -1).clone(), layer.bias.detach().clone()
        self.sketch = PaperSketch(sketch)

    def forward(self, x: Tensor) -> Tensor:
        layer, groups = self.layer, self.layer.groups
        self.size = x.shape
        names = ("kernel_size", "stride", "padding", "dilation")
        self.geometry = {name: getattr(layer, name) for name in names}
        patches = F.unfold(x, **self.geometry)  # (b, channels * k * k, places)
        patches = patches.reshape(len(x), groups, -1, patches.shape[-1]).permute(1, 0, 3, 2)  # (groups, b, places, dim)
        self.places = patches.shape[2]
        self.x_sketch = [self.sketch.apply(group.reshape(-1, group.shape[-1])) for group in patches]
        self.w_sketch = [self.sketch.apply(group) for group in self.W.chunk(groups)]
        z = [a @ w.T for a, w in zip(self.x_sketch, self.w_sketch, strict=True)]
        z = torch.cat([part.reshape(len(x), self.places, -1) for part in z], dim=2) + self.b
        reach = layer.dilation[0] * (layer.kernel_size[0] - 1) + 1
        height = (x.shape[2] + 2 * layer.padding[0] - reach) // layer.stride[0] + 1
        return z.transpose(1, 2).reshape(len(x), -1, height, self.places // height)

    def backward(self, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        G = G.flatten(2).transpose(1, 2)  # (b, places, out)
        parts = [part.reshape(-1, part.shape[-1]) for part in G.chunk(self.layer.groups, dim=2)]
        grad_W = torch.cat([self.sketch.transpose(g.T @ x) for g, x in zip(parts, self.x_sketch, strict=True)])
        grad_patches = [self.sketch.transpose(g @ w) for g, w in zip(parts, self.w_sketch, strict=True)]
        stacked = torch.cat([part.reshape(len(G), self.places, -1) for part in grad_patches], dim=2).transpose(1, 2)
        grad_x = F.fold(stacked, self.size[2:], **self.geometry)
        return grad_x, grad_W, G.sum(dim=(0, 1))


def train_as_the_paper(layer: PaperLinear | PaperConv, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """SGD with momentum 0.9 on W itself; the loss is sum(c * tanh(z))."""
    speed_W, speed_b, inputs = torch.zeros_like(layer.W), torch.zeros_like(layer.b), []
    for x, c in batches:
        z = layer.forward(x)
        grad_x, grad_W, grad_b = layer.backward(c * (1 - z.tanh().square()))
        speed_W, speed_b = 0.9 * speed_W + grad_W, 0.9 * speed_b + grad_b
        layer.W, layer.b = layer.W - 0.02 * speed_W, layer.b - 0.02 * speed_b
        inputs.append(grad_x)
    return inputs


def train_ours(layer: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.02, momentum=0.9)
    inputs = []
    for x, c in batches:
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        (c * layer(x).tanh()).sum().backward()
        optimizer.step()
        inputs.append(x.grad)
    return inputs


LAYERS = {
    "linear": (lambda: nn.Linear(24, 7, dtype=F64), (5, 24)),
    "linear-uneven": (lambda: nn.Linear(75, 7, dtype=F64), (5, 75)),
    "conv": (lambda: nn.Conv2d(2, 6, 3, dtype=F64), (3, 2, 7, 8)),
    "conv-uneven": (lambda: nn.Conv2d(3, 6, 5, dtype=F64), (2, 3, 9, 9)),
    "conv-stride-padding": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, dtype=F64), (2, 3, 8, 8)),
    "conv-groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, groups=2, dtype=F64), (2, 4, 7, 7)),
    "conv-dilation": (lambda: nn.Conv2d(2, 3, 3, padding=2, dilation=2, dtype=F64), (2, 2, 8, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("scheme", ["count-v1", "count-hashed-v1"])
def test_local_steps_lifted_are_the_papers_sgd(name: str, steps: int, scheme: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    dim = layer.weight[0].numel()
    sketch = draw(scheme, dim, dim // 2, seed=SEED, round=0, name="weight")
    W = layer.weight.detach().reshape(len(layer.weight), -1).clone()
    paper = (PaperLinear if isinstance(layer, nn.Linear) else PaperConv)(layer, sketch)
    batches = [(x, 0.1 * torch.randn_like(paper.forward(x))) for x in torch.randn(steps, *shape, dtype=F64)]
    V = sketch.apply(W)
    ours = sketch_parameter(layer, "weight", sketch, V)
    grads = train_ours(ours, batches)
    expected_grads = train_as_the_paper(paper, batches)
    lifted = W + sketch.lift(compact_parameter(ours, "weight") - V)
    assert (W - lifted).abs().max() > 1e-3  # something was learned
    assert (paper.W - lifted).abs().max() < 1e-12
    assert (paper.b - ours.bias).abs().max() < 1e-12
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert (grad - expected).abs().max() < 1e-12


def test_the_two_forms_of_a_linear_layer_agree() -> None:
    torch.manual_seed(0)
    sketch = CountSketch(30, 15, seed=SEED)
    fast = sketch_parameter(nn.Linear(30, 8, dtype=F64), "weight", sketch, torch.randn(8, 15, dtype=F64))
    x = torch.randn(4, 3, 30, dtype=F64)
    slow = F.linear(x, fast.weight, fast.bias)  # reads the parametrized weight, V D R^T
    torch.testing.assert_close(fast(x), slow, rtol=0, atol=1e-13)
    (first,) = torch.autograd.grad(fast(x).tanh().sum(), compact_parameter(fast, "weight"))
    (second,) = torch.autograd.grad(slow.tanh().sum(), compact_parameter(fast, "weight"))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-13)


def test_a_first_layer_learns_as_one_whose_input_has_a_gradient() -> None:
    torch.manual_seed(0)
    layer = sketch_parameter(nn.Linear(12, 5, dtype=F64), "weight", CountSketch(12, 6, seed=SEED), torch.ones(5, 6))
    x, parameters = torch.randn(4, 12, dtype=F64), list(layer.parameters())
    first = torch.autograd.grad(layer(x).tanh().sum(), parameters)
    later = torch.autograd.grad(layer(x.requires_grad_()).tanh().sum(), parameters)
    for one, other in zip(first, later, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("first", [True, False])
def test_a_linear_layer_trains_under_autocast(first: bool) -> None:
    torch.manual_seed(0)
    layer = sketch_parameter(nn.Linear(12, 5), "weight", CountSketch(12, 6, seed=SEED), torch.randn(5, 6))
    x, parameters = torch.randn(4, 12, requires_grad=not first), list(layer.parameters())
    exact = torch.autograd.grad(layer(x).sum(), parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = layer(x)
    assert z.dtype == torch.bfloat16
    for rough, one in zip(torch.autograd.grad(z.float().sum(), parameters), exact, strict=True):
        assert rough.dtype == torch.float32
        torch.testing.assert_close(rough, one, rtol=0.02, atol=0.05)


class Everything(nn.Module):
    """Every kind of layer that can be covered, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular")
        self.conv2 = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU())
        self.conv3 = nn.Conv3d(1, 2, 3, padding=1, dilation=1, padding_mode="replicate", bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.cell = nn.GRUCell(8, 8)
        self.bilinear = nn.Bilinear(8, 8, 4)
        self.head = nn.ModuleDict({"out": nn.Linear(4, 2)})

    def forward(self, x: Tensor) -> Tensor:  # (b, 3, 8) -> (b, 2)
        h = self.conv1(x)  # (b, 4, 8)
        h = h + self.conv2(h.unsqueeze(-1).expand(-1, -1, -1, 2)).mean(dim=(1, 2, 3)).reshape(-1, 1, 1)
        h = h + self.conv3(h.unsqueeze(1).unsqueeze(-1)).mean(dim=1).squeeze(-1)
        h = h + self.attention(h, h, h)[0]
        h = h + self.cross(h, h[..., :6], h[..., :4])[0]
        h = self.encoder(h)
        h = self.gru(self.lstm(h)[0])[0][:, -1]
        h = self.cell(h, h)
        return self.head["out"](self.bilinear(h, h))


@pytest.mark.parametrize("shape", [(3, 11), (3, 13), (13,), (2, 3, 13), ()])
def test_an_input_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    layer = sketch_parameter(nn.Linear(12, 5), "weight", CountSketch(12, 6, seed=bytes(32)), torch.zeros(5, 6))
    with pytest.raises(SketchError, match="12 entries"):
        layer(torch.ones(shape))


def test_every_layer_in_any_nesting_trains_and_equals_its_effective_weight() -> None:
    torch.manual_seed(0)
    server = dbcl.Server(Everything(), dbcl.SketchConfig(coverage="all", veil=0), insecure_seed=1)
    broadcast = server.open_round()
    local = dbcl.blinded(Everything(), broadcast)
    x = torch.randn(5, 3, 8)
    local(x).square().sum().backward()
    assert all(
        p.grad is not None and bool(p.grad.abs().sum() > 0) for n, p in local.named_parameters() if "bias" not in n
    )
    # The same network with the effective weights written into plain layers gives the same outputs.
    plain = Everything()
    sketches = broadcast.sketches()
    assert len(sketches) == sum(p.ndim >= 2 for p in plain.parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            tensor = broadcast.tensors[name]
            parameter.copy_(sketches[name].expand(tensor).reshape(parameter.shape) if name in sketches else tensor)
    torch.testing.assert_close(local(x), plain(x), rtol=1e-4, atol=1e-5)
    for mode in (local.train(), local.eval()):
        torch.testing.assert_close(mode(x), plain(x), rtol=1e-4, atol=1e-5)


def test_the_names_of_a_clients_model_and_those_of_the_plan() -> None:
    broadcast = dbcl.Server(Everything(), dbcl.SketchConfig(coverage="all")).open_round()
    inside = [name for name, _ in dbcl.blinded(Everything(), broadcast).named_parameters()]
    of_plan = [part.name for part in broadcast.plan.tensors]
    covered = set(broadcast.sketches())
    assert sorted(map(plan_name, inside)) == sorted(of_plan)
    assert sorted(inside) == sorted(inner_name(name) if name in covered else name for name in of_plan)
    assert plan_name("myparametrizations.weight.original") == "myparametrizations.weight.original"


def test_a_copy_of_a_client_model_is_its_own() -> None:
    local = dbcl.blinded(nn.Linear(6, 2), dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round())
    other = copy.deepcopy(local)
    with torch.no_grad():
        compact_parameter(other, "weight").zero_()
    assert compact_parameter(local, "weight").abs().sum() > 0
    assert isinstance(local.parametrizations.weight[0], EffectiveWeight)


def test_gradient_of_a_gradient_goes_through_a_sketched_layer() -> None:
    """An attacker who matches gradients differentiates twice; the layers must let it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(18, 3), nn.Tanh(), nn.Linear(3, 2))
    net = net.double()
    local = dbcl.blinded(net, dbcl.Server(net, dbcl.SketchConfig(coverage="all")).open_round())
    parameters = list(local.parameters())

    def gradient_length(x: Tensor) -> Tensor:
        grads = torch.autograd.grad(local(x).square().sum(), parameters, create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    assert torch.autograd.gradcheck(gradient_length, (torch.randn(1, 1, 5, 5, dtype=F64, requires_grad=True),))


def test_a_parametrization_of_ones_own_beside_a_sketched_weight() -> None:
    """A copy of a parametrized module has its class, and a property put there would be in the original too."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        recurrent = nn.utils.parametrizations.weight_norm(nn.LSTM(6, 4, batch_first=True), "weight_hh_l0")
        return nn.ModuleDict({"body": recurrent, "out": nn.Linear(4, 2)}).to(F64)

    template, x = make(), torch.randn(3, 5, 6, dtype=F64)
    before = template["body"](x)[0]
    broadcast = dbcl.Server(make(), dbcl.SketchConfig(veil=0, coverage="hidden")).open_round()
    assert set(broadcast.sketches()) == {"body.weight_ih_l0"}
    local = dbcl.blinded(template, broadcast)
    assert torch.equal(template["body"](x)[0], before)
    sketch, W = broadcast.sketches()["body.weight_ih_l0"], template["body"].weight_ih_l0
    plain = make()
    plain["body"].weight_ih_l0.data = sketch.expand(sketch.apply(W.detach()))
    torch.testing.assert_close(local["body"](x)[0], plain["body"](x)[0])


COMPILED = {
    "dense": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), (5, 12)),
    "sequences": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)), (3, 4, 12)),
    "convolutional": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)),
        (3, 1, 8, 8),
    ),
    "upwards": (
        lambda: nn.Sequential(nn.ConvTranspose1d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)),
        (3, 4, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's own, while it traces
@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_client_is_one_graph_for_all_rounds(kind: str, ratio: int) -> None:
    """PyTorch gives up after eight compilations of one model, with fullgraph=True in an error."""
    build, shape = COMPILED[kind]
    torch.compiler.reset()
    torch.manual_seed(0)
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> object:
        compilations.append(graph)
        return graph.forward

    server, x = (
        dbcl.Server(build(), dbcl.SketchConfig(ratio=ratio, coverage="hidden"), insecure_seed=0),
        torch.randn(*shape),
    )
    for _ in range(10):
        broadcast = server.open_round()
        local, plain = dbcl.blinded(server.model, broadcast), dbcl.blinded(server.model, broadcast)
        for model in (torch.compile(local, backend=count, fullgraph=True), plain):
            model(x).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        updates = [dbcl.make_update(model, broadcast, examples=3) for model in (local, plain)]
        for name, change in updates[1].tensors.items():
            torch.testing.assert_close(updates[0].tensors[name], change)
        server.close_round(updates)
    assert len(compilations) == 1


def test_expanded_weights_go_through_a_dense_client_and_are_refused_by_a_convolutional_one() -> None:
    """Opacus asks for them with grad_sample_mode='ew'; the sketch of a convolution computes with its weight first."""
    per_sample = importlib.import_module("torch.nn.utils._per_sample_grad").call_for_per_sample_grads
    torch.manual_seed(0)
    dense, x = (
        nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)),
        torch.randn(4, 12),
    )
    local = dbcl.blinded(dense, dbcl.Server(dense, dbcl.SketchConfig(coverage="hidden"), insecure_seed=0).open_round())
    per_sample(local, loss_reduction="sum")(x).square().sum().backward()
    for number in range(4):
        alone = torch.autograd.grad(local(x[number : number + 1]).square().sum(), list(local.parameters()))
        for parameter, expected in zip(local.parameters(), alone, strict=True):
            torch.testing.assert_close(parameter.grad_sample[number], expected)
    convolutional = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    local = dbcl.blinded(
        convolutional, dbcl.Server(convolutional, dbcl.SketchConfig(coverage="hidden"), insecure_seed=0).open_round()
    )
    with pytest.raises(dbcl.errors.PlanError, match=r"expanded weights .* cannot be sketched; use 'hooks'"):
        per_sample(local, loss_reduction="sum")(torch.randn(4, 1, 4, 4))
