"""Tensors that leave the server and tensors that do not, on models of common kinds."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from independent import largest_error
from torch import Tensor, nn
from torch.nn.utils import prune

import dbcl
from dbcl.engines import LocalEngine, LocalTraining, StackedEngine
from dbcl.model.tensors import fingerprint
from dbcl.privacy import norm
from dbcl.testing.nested import nested


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.arange(6, dtype=torch.int8).reshape(2, 3),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4, 4).T,
        torch.empty(0, 3),
        torch.tensor(1.5),
    ],
    ids=["float", "bfloat16", "int8", "complex", "transposed", "empty", "scalar"],
)
def test_a_fingerprint_is_of_the_values(tensor: Tensor) -> None:
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    if tensor.numel():
        assert fingerprint(tensor) != fingerprint(tensor + 1)
    assert fingerprint(torch.zeros(2, 3)) != fingerprint(torch.zeros(3, 2))
    assert fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(2, dtype=torch.float64))


class Adapted(nn.Module):
    """A frozen base with a trained low-rank adapter; its base may be of any dtype."""

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.out = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base.real if self.base.is_complex() else self.base
        return self.out(x @ base.to(x.dtype).T + self.up(self.down(x)))


@pytest.mark.parametrize(
    "base",
    [
        torch.randn(64, 64),
        torch.randint(-8, 8, (64, 64), dtype=torch.int8),
        torch.randn(64, 64, dtype=torch.complex64),
    ],
    ids=["float", "int8", "complex"],
)
def test_an_adapters_round_sends_the_adapter_alone(base: Tensor) -> None:
    server = dbcl.Server(Adapted(base.clone()), dbcl.SketchConfig(coverage="hidden"), insecure_seed=0)
    template = Adapted(base.clone())
    for _ in range(2):
        data = dbcl.encode(server.open_round())
        broadcast = dbcl.protocol.decode_broadcast(data)
        local = dbcl.blinded(template, broadcast)
        local(torch.randn(8, 64)).square().mean().backward()
        torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1).step()
        assert server.close_round([dbcl.make_update(local, broadcast, examples=8)]).accepted == 1
    numbers = 64 * 4 + 4 * 64 + 64 * 2 + 2  # the base has 4,096
    assert len(data) < 4 * numbers + 1500
    assert "not sent: 1 frozen parameters (base)" in str(server.plan)
    with pytest.raises(dbcl.errors.PlanError, match="base is frozen, and this model's copy differs from the server's"):
        dbcl.blinded(Adapted(base + 1), broadcast)


def test_a_mask_is_no_weight() -> None:
    """A causal mask of minus infinity, veiled, would be NaN or no mask at all."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0])

    server = dbcl.Server(Causal(), dbcl.SketchConfig(veil=0.5, coverage="hidden"))
    broadcast = server.open_round()
    assert "mask" not in broadcast.tensors
    local = dbcl.blinded(Causal(), broadcast)
    assert torch.equal(local.mask, server.model.mask)
    x = torch.randn(1, 4, 8)
    changed = x.clone()
    changed[:, 3] += 1
    torch.testing.assert_close(local(x)[:, :3], local(changed)[:, :3])
    unchanged = dbcl.make_update(local, broadcast, examples=1)
    assert norm(unchanged.tensors) == 0
    assert server.close_round([unchanged]).accepted == 1  # infinity in a constant is no reason to undo the step


class Backwards(nn.Module):
    """A dense layer that keeps its weight as (in, out), as GPT-2's does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    """Three experts in two stacked weights, (expert, out, in) and (expert, in, out), mixed with equal shares."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(3, 10, 7))
        self.down = nn.Parameter(0.3 * torch.randn(3, 10, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eoi->ebo", x, self.up).tanh()
        return torch.bmm(hidden, self.down).mean(dim=0)


def seeded(build) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


OTHERS = {
    "inputs first": (
        lambda: nn.Sequential(Backwards(9, 8), nn.Tanh(), nn.Linear(8, 2)),
        {Backwards: 0},
        {"0.weight": (0,)},
    ),
    "experts": (
        lambda: nn.Sequential(Experts(), nn.Tanh(), nn.Linear(6, 2)),
        {"*.up": -1, "*.down": 1},
        {"0.up": (2,), "0.down": (1,)},
    ),
    "square": (lambda: nn.Sequential(Backwards(9, 9), nn.Tanh(), nn.Linear(9, 2)), {Backwards: 0}, {"0.weight": (0,)}),
    "a linear layer told otherwise": (
        lambda: nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 2)),
        {"0.weight": 0},
        {"0.weight": (0,)},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("lane", "lanes"), [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4)])
def test_layers_with_their_inputs_on_any_axis_are_exact(kind: str, lane: int, lanes: int) -> None:
    build, layers, inputs = OTHERS[kind]
    x = torch.randn(5, 7 if kind == "experts" else 9, dtype=torch.float64)
    settings: dict[str, Any] = {"layers": layers, "lane": lane, "lanes": lanes, "ratio": max(2, lanes)}
    assert largest_error(lambda: seeded(build), lambda model: model(x).square().mean(), inputs, **settings) < 1e-12


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolutions_are_covered_and_exact(axes: int, groups: int) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]

    def build() -> nn.Module:
        return nn.Sequential(
            kind(4, 6, 3, stride=2, padding=1, groups=groups), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)
        )

    x = torch.randn(2, 4, *(4,) * axes, dtype=torch.float64)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = build().double()
        model(x)
        return model

    inputs = {"0.weight": (0, *range(2, 2 + axes))}
    assert largest_error(make, lambda model: model(x).square().mean(), inputs) < 1e-13


def test_the_plan_says_which_axis_is_sketched() -> None:
    rows = dbcl.SketchPlan.from_model(
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.Linear(8, 2)), dbcl.SketchConfig(coverage="hidden")
    ).rows()
    assert rows[0][3] == "18 of 36 inputs (axes 0, 2, 3)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": {Backwards: 0}}, "layers: 'Backwards' is no layer and no parameter of this model"),
        ({"layers": {"nothing.*": 0}}, "layers: 'nothing.*' is no layer and no parameter of this model"),
        ({"layers": {"0.up": 3}}, r"layers: 0.up: the inputs of a weight of shape \(3, 10, 7\) cannot lie on 3"),
        ({"layers": {"0.up": (2, -1)}}, r"cannot lie on \(2, -1\); name one axis or a tuple of them"),
        (
            {"coverage": ["0.up"]},
            r"0.up: has shape \(3, 10, 7\) in a layer that is not known; say which axis has its inputs",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(dbcl.errors.PlanError, match=message):
        dbcl.SketchPlan.from_model(
            nn.Sequential(Experts(), nn.Linear(6, 6), nn.Linear(6, 2)), **nested({"coverage": "hidden", **settings})
        )


def test_a_server_takes_layers() -> None:
    server = dbcl.Server(
        nn.Sequential(Backwards(8, 4), nn.Linear(4, 2)),
        dbcl.SketchConfig(layers={Backwards: 0}, coverage="hidden"),
        insecure_seed=0,
    )
    assert server.open_round().tensors["0.weight"].shape == (4, 4)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in use
        return nn.utils.weight_norm(layer)


HOOKED = {
    "weight_norm": old_weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm today": nn.utils.parametrizations.weight_norm,
}


def hooked(wrap) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("kind", HOOKED)
def test_what_a_hook_computes_is_trained_and_not_a_stale_copy(kind: str, used: bool) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)

    def make() -> nn.Module:
        model = seeded(lambda: hooked(HOOKED[kind]))
        if used:
            model(x)  # leaves a weight with a history in an attribute
        return model

    assert largest_error(make, lambda model: model(x).square().mean(), {"2.weight": (1,)}) < 1e-12


def test_a_client_with_other_pruning_masks_is_refused() -> None:
    server = dbcl.Server(seeded(lambda: hooked(HOOKED["pruning"])), dbcl.SketchConfig(veil=0, coverage="hidden"))
    other = seeded(lambda: hooked(lambda layer: prune.random_unstructured(layer, "weight", 0.5)))
    with pytest.raises(dbcl.errors.PlanError, match=r"0.weight_mask is frozen, and this model's copy differs"):
        dbcl.blinded(other, server.open_round())


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_spectral_norm_is_that_of_the_weights_that_came(norm) -> None:
    """A client's estimate of the singular vectors is of its own weights, and so is the server's after a step."""
    server = dbcl.Server(seeded(lambda: hooked(norm)), dbcl.SketchConfig(veil=0, coverage="hidden"), insecure_seed=0)
    name = next(name for name in server.weights() if name.startswith("0.") and name.endswith(("orig", "original")))
    with torch.no_grad():
        left, _, right = torch.linalg.svd(torch.randn(6, 6, dtype=torch.float64))
        server.weights()[name].copy_(left @ torch.diag(torch.tensor([9.0, 2, 2, 1, 1, 1]).double()) @ right)
    W = server.weights()[name].detach().clone().requires_grad_()
    broadcast = server.open_round()
    local = dbcl.blinded(hooked(norm).double(), broadcast)
    x = torch.randn(5, 6, dtype=torch.float64)
    local[0](x).square().mean().backward()
    torch.optim.SGD([p for p in local.parameters() if p.grad is not None], lr=0.1).step()
    server.close_round([dbcl.make_update(local, broadcast, examples=5)])
    bias = server.model[0].bias.detach() * 0 + broadcast.tensors["0.bias"]
    ((x @ (W / torch.linalg.matrix_norm(W, 2)).T + bias).square().mean()).backward()
    torch.testing.assert_close(server.weights()[name].detach(), W.detach() - 0.1 * W.grad, rtol=1e-9, atol=1e-9)
    server.model.eval()
    assert float(torch.linalg.matrix_norm(server.model[0].weight.detach(), 2)) == pytest.approx(1, abs=1e-9)


def test_a_model_that_cannot_be_copied_is_refused_in_a_sentence() -> None:
    broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    used = nn.Linear(6, 2)
    used.kept = {"output": used(torch.ones(1, 6))}
    with pytest.raises(dbcl.errors.PlanError, match=r"cannot be copied .* give one that has not been run yet"):
        dbcl.blinded(used, broadcast)


class Wrapped(Tensor):
    """A weight in 8 bits and a scale, as quantising libraries keep it: it says that it is float32 and is not."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.small, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["small", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(arguments[0].small, arguments[0].scale)
        raise NotImplementedError(f"{function} of a quantised weight")


class Quantised(nn.Module):
    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        weight = torch.arange(64, dtype=torch.int8).reshape(8, 8) + shift
        self.base = nn.Parameter(Wrapped(weight, torch.tensor(0.1)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(8))  # beside a weight whose size cannot be measured
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x @ (self.base.small * self.base.scale) + self.bias))


def test_a_quantised_base_that_calls_itself_float_is_not_sent(tmp_path: Path) -> None:
    server = dbcl.Server(Quantised(), dbcl.SketchConfig(send_frozen=True, coverage="hidden"))
    assert server.plan.not_sent == (("base", "frozen"),)
    broadcast = server.open_round()
    local = dbcl.blinded(Quantised(), broadcast)
    local(torch.randn(3, 8)).square().mean().backward()
    torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1).step()
    assert server.close_round([dbcl.make_update(local, broadcast, examples=3)]).accepted == 1
    with pytest.raises(dbcl.errors.PlanError, match="base is frozen, and this model's copy differs"):
        dbcl.blinded(Quantised(shift=1), broadcast)
    server.save(tmp_path)
    revived = dbcl.Server.load(tmp_path, Quantised(shift=1), dbcl.SketchConfig(send_frozen=True, coverage="hidden"))
    assert torch.equal(revived.model.base.small, server.model.base.small)


def test_a_trained_parameter_that_cannot_be_sent_is_refused() -> None:
    model = Quantised()
    model.base.requires_grad_(True)
    with pytest.raises(dbcl.errors.PlanError, match="base: is trained and a Wrapped; freeze it"):
        dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage="hidden"))
    with pytest.raises(dbcl.errors.PlanError, match="weight: is trained and complex64; freeze it, or keep its real"):
        dbcl.SketchPlan.from_model(nn.Linear(4, 4, dtype=torch.complex64), dbcl.SketchConfig(coverage="all"))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own dynamic quantisation is deprecated, and in use
def test_a_base_in_packed_8_bit_layers_must_be_the_servers() -> None:
    def adapted(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        base = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, dtype=torch.qint8)
        return nn.Sequential(base, nn.Linear(8, 8), nn.Linear(8, 2))

    server = dbcl.Server(adapted(0), dbcl.SketchConfig(coverage="hidden"))
    broadcast = dbcl.protocol.decode_broadcast(dbcl.encode(server.open_round()))
    assert dbcl.blinded(adapted(0), broadcast)(torch.ones(1, 8)).shape == (1, 2)
    with pytest.raises(
        dbcl.errors.PlanError, match=r"0.0._packed_params._packed_params.0 is frozen, and this model's copy"
    ):
        dbcl.blinded(adapted(1), broadcast)


class Odd(nn.Module):
    """Weights in all kinds of products: by expert, transposed, in a convolution, in two ways, and in none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 5, 6))
        self.stacked = nn.Parameter(torch.randn(3, 5, 4))
        self.turned = nn.Parameter(torch.randn(4, 4))
        self.kernel = nn.Parameter(torch.randn(2, 4, 3))
        self.twice = nn.Parameter(torch.randn(2, 2))
        self.scale = nn.Parameter(torch.randn(1, 2))
        self.norm = nn.BatchNorm1d(2)
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.stack([nn.functional.linear(x, each) for each in self.experts])
        hidden = torch.baddbmm(torch.zeros(3, 1, 4), hidden, self.stacked).sum(0)
        hidden = nn.functional.linear(hidden, self.turned.t())
        hidden = torch.nn.functional.conv1d(hidden.unsqueeze(-1), self.kernel, padding=1).squeeze(-1)
        hidden = nn.functional.linear(hidden @ self.twice, self.twice)
        return self.out(self.norm(hidden * self.scale))


def test_layers_are_found_by_what_they_do() -> None:
    model, x = Odd(), torch.randn(4, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = dbcl.model.find_layers(model, x)
    assert found == {"experts": (2,), "stacked": (1,), "turned": (0,), "kernel": (1, 2)}
    assert model.training
    assert model.norm.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    x = torch.randn(4, 7, dtype=torch.float64)
    experts = nn.Sequential(Experts().double(), nn.Linear(6, 2).double())
    assert dbcl.model.find_layers(experts, x) == {"0.up": (2,), "0.down": (1,)}


def test_found_layers_are_exact() -> None:
    def make() -> nn.Module:
        return seeded(lambda: nn.Sequential(Experts(), nn.Tanh(), Backwards(6, 5), nn.Tanh(), nn.Linear(5, 2)))

    x = torch.randn(5, 7, dtype=torch.float64)
    layers = dbcl.model.find_layers(make(), x)
    error = largest_error(make, lambda model: model(x).square().mean(), layers, layers=layers)
    assert error < 1e-13


def test_the_independent_step_tells_a_wrong_axis() -> None:
    """A comparison that cannot fail proves nothing."""
    x = torch.randn(5, 9, dtype=torch.float64)
    make = OTHERS["square"][0]
    wrong = largest_error(
        lambda: seeded(make), lambda model: model(x).square().mean(), {"0.weight": (1,)}, layers={Backwards: 0}
    )
    assert wrong > 0.01


@pytest.mark.parametrize("kind", ["inputs first", "a linear layer told otherwise"])
def test_all_engines_agree_on_weights_with_their_inputs_first(kind: str) -> None:
    build, layers, _ = OTHERS[kind]
    x, y = torch.randn(20, 9, dtype=torch.float64), torch.arange(20) % 2
    made = []
    for engine in (LocalEngine, StackedEngine):
        server = dbcl.Server(seeded(build), dbcl.SketchConfig(layers=layers, coverage="hidden"), insecure_seed=0)
        clients = [(x[:10], y[:10]), (x[10:], y[10:])]
        playing = engine(server, seeded(build), clients, LocalTraining(lr=0.1, batch_size=5), seed=bytes(32))
        for _ in range(3):
            playing.play_round()
        made.append(server.weights())
    for name, tensor in made[0].items():
        torch.testing.assert_close(made[1][name], tensor)


def test_large_covers_the_hidden_layers_that_matter() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 60), nn.ReLU(), nn.Linear(60, 10))
    plan = dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage="large"))
    assert [tensor.name for tensor in plan.tensors if tensor.sketched] == ["2.weight"]  # the first holds 0.4 %
    both = dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage=["large", "0.*"]))
    assert [tensor.name for tensor in both.tensors if tensor.sketched] == ["0.weight", "2.weight"]
    with pytest.raises(dbcl.errors.PlanError, match="is the output layer and nothing else can be covered"):
        dbcl.SketchPlan.from_model(nn.Linear(6, 2), dbcl.SketchConfig(coverage="large"))
    wide = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 600))
    with pytest.raises(dbcl.errors.PlanError, match="no layer but the output layer holds 1% of the parameters"):
        dbcl.SketchPlan.from_model(wide, dbcl.SketchConfig(coverage="large"))


def reasons(plan: dbcl.SketchPlan) -> dict[str, str]:
    assert not [tensor for tensor in plan.tensors if tensor.sketched and tensor.name in dict(plan.left_out)]
    return dict(plan.left_out)


def test_auto_leaves_out_what_a_sketch_would_harm_and_says_why() -> None:
    narrow, wide = nn.Linear(31, 32), nn.Linear(32, 40)
    plan = dbcl.SketchPlan.from_model(nn.Sequential(narrow, nn.Tanh(), wide, nn.Tanh(), nn.Linear(40, 2)))
    assert [tensor.name for tensor in plan.tensors if tensor.sketched] == ["2.weight"]
    assert reasons(plan) == {"0.weight": "has 31 inputs, and a sketch of fewer than 32 loses too much"}
    normalised = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 2))
    plan = dbcl.SketchPlan.from_model(normalised)
    assert all("feeds a normalisation layer" in why for why in reasons(plan).values())
    assert "not sketched: 0.weight, 2.weight feeds a normalisation layer" in str(plan)
    frozen = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 32), nn.Linear(32, 2))
    assert reasons(dbcl.SketchPlan.from_model(frozen)) == {
        "1.weight": "is a small part of a network that is mostly frozen"
    }


@pytest.mark.parametrize("coverage", ["auto", ["auto"], ["auto", "!0.*"]])
def test_where_auto_finds_nothing_the_plan_has_one_lane_unless_lanes_were_asked_for(coverage: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    for settings in ({}, {"ratio": 4}, {"lanes": 1}):
        plan = dbcl.SketchPlan.from_model(model, **nested({"coverage": coverage, **settings}))
        assert (plan.lanes, [tensor.scheme for tensor in plan.tensors]) == (1, ["identity-v1"] * 4)
        assert set(plan.veils.values()) == {0.2}
    with pytest.raises(dbcl.errors.PlanError, match=r"lanes=2 needs a sketch.*0.weight.*use coverage='hidden'"):
        dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage=coverage, lanes=2))


def test_auto_and_names_mix() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    for cover, covered in (
        (["auto", "0.*"], ["0.weight", "2.weight"]),
        (["auto", "!2.*"], []),
        (["auto", "!2.*", "4.*"], ["4.weight"]),
    ):
        plan = dbcl.SketchPlan.from_model(model, dbcl.SketchConfig(coverage=cover))
        assert [tensor.name for tensor in plan.tensors if tensor.sketched] == covered


def test_the_share_of_a_layer_is_that_of_what_is_trained() -> None:
    """A small trained layer of a large frozen network is large."""
    body = nn.Sequential(nn.Linear(500, 500).requires_grad_(False), nn.Linear(500, 4), nn.Linear(4, 2))
    plan = dbcl.SketchPlan.from_model(body, dbcl.SketchConfig(coverage="large"))
    assert [tensor.name for tensor in plan.tensors if tensor.sketched] == ["1.weight"]
