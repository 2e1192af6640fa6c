"""Every private name of PyTorch is taken away in turn; the results must not change."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle

import dbcl
from dbcl import _torch
from dbcl.model.parametrization import compact_parameter, sketch_parameter
from dbcl.sketch import CountSketch, operator
from dbcl.testing import secrecy

SEED = bytes(range(32))
F64 = torch.float64
LAYER_NAMES = [
    "_are_functorch_transforms_active",
    "_is_any_autocast_enabled",
    "apply",
    "_version",
    "_modules",
    "_parameters",
]


def without(*missing: str) -> ModuleType:
    """`dbcl._torch` as a PyTorch without these names would make it."""
    assert _torch.__file__ is not None
    spec = importlib.util.spec_from_file_location("torch_without_private_names", _torch.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def look_up(owner: object, name: str, fallback: object) -> object:
        return fallback if name in missing else getattr(owner, name, fallback)

    module.__dict__["getattr"] = look_up  # instead of the builtin, for this module alone
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the layers and sketches run without some names."""

    def take_away(*missing: str) -> None:
        module = without(*missing)
        for user in (dbcl.model.parametrization, operator):
            for name in set(vars(user)) & {"functorch_active", "autocast_enabled", "children", "own_parameters"}:
                monkeypatch.setattr(user, name, getattr(module, name))
        monkeypatch.setattr(dbcl.model.parametrization, "version", module.version)
        monkeypatch.setattr(
            dbcl.model.parametrization,
            "_sketched_linear",
            module.direct_apply(dbcl.model.parametrization._SketchedLinear),
        )
        monkeypatch.setattr(operator, "_apply_linear_map", module.direct_apply(operator._LinearMap))

    return take_away


def layer(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(12, 5, bias=bias, dtype=F64)
    return sketch_parameter(made, "weight", CountSketch(12, 6, seed=SEED), torch.randn(5, 6))


def results(bias: bool = True) -> list[Tensor]:
    """What a sketched layer computes in all the ways that ask for a private name."""
    made = layer(bias)
    x = torch.randn(4, 12, dtype=F64)
    again = x.clone().requires_grad_()
    first = torch.autograd.grad(made(x).tanh().sum(), list(made.parameters()))  # without a gradient of the input
    later = torch.autograd.grad(made(again).tanh().sum(), [again, *made.parameters()], create_graph=True)
    twice = torch.autograd.grad(later[0].square().sum(), [again, *made.parameters()], allow_unused=True)
    each = torch.func.vmap(torch.func.grad(lambda row: made(row).tanh().sum()))(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = made.float()(x.float())
    assert rough.dtype == torch.bfloat16
    return [*first, *later, *(grad for grad in twice if grad is not None), each, rough]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("missing", [*LAYER_NAMES, "all of them"])
def test_a_sketched_layer_computes_the_same(use: Callable[..., None], missing: str, bias: bool) -> None:
    expected = results(bias)
    use(*(LAYER_NAMES if missing == "all of them" else [missing]))
    for one, other in zip(results(bias), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("missing", ["nothing", "_version"])
def test_a_weight_changed_in_place_before_the_backward_pass_is_an_error(use: Callable[..., None], missing: str) -> None:
    use(missing)
    made = layer()
    loss = made(torch.ones(4, 12, dtype=F64, requires_grad=True)).sum()
    with torch.no_grad():
        compact_parameter(made, "weight")[0, 0] += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_version_of_a_tensor_without_a_counter(dtype: torch.dtype) -> None:
    version = without("_version").version
    tensor = torch.tensor([[1.0, float("nan")], [0.0, 2.0]], dtype=dtype)
    before = version(tensor.T)
    assert version(tensor.T) == before
    tensor[1, 0] = -0.0
    assert version(tensor.T) != before


def test_the_base_of_a_view() -> None:
    whole = torch.zeros(3)
    assert _torch.view_base(whole[1:]) is whole
    assert _torch.view_base(whole) is None
    assert without("_base").view_base(whole[1:]) is None
    secret = torch.randn(4, 3)  # found by its storage alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrecy, "view_base", without("_base").view_base)
        assert secrecy.leaks([torch.cat([secret, secret])[:1]], {"w": secret})


def test_the_gradient_of_a_relu() -> None:
    out, grad = torch.tensor([-1.0, 0.0, 2.0, float("nan")]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for module in (_torch, without("threshold_backward")):
        assert module.relu_backward(grad, out, 0).tolist() == [0, 0, 3, 4]


def test_autocast_is_seen_without_the_private_name() -> None:
    for module in (_torch, without("_is_any_autocast_enabled")):
        assert not module.autocast_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module.autocast_enabled()


HOOKS: dict[str, Callable[[nn.Module], RemovableHandle]] = {
    "forward": lambda module: module.register_forward_hook(lambda module, inputs, output: None),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda module, inputs: None),
    "backward": lambda module: module.register_full_backward_hook(lambda module, inputs, outputs: None),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda module, outputs: None),
}
GLOBAL_HOOKS: dict[str, Callable[..., RemovableHandle]] = {
    "forward": all_modules.register_module_forward_hook,
    "forward pre": all_modules.register_module_forward_pre_hook,
    "backward": all_modules.register_module_full_backward_hook,
    "backward pre": all_modules.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_every_kind_are_seen(kind: str) -> None:
    module = nn.Linear(2, 2)
    assert not _torch.has_hooks(module)
    handle = HOOKS[kind](module)
    assert _torch.has_hooks(module)
    handle.remove()
    assert not _torch.has_global_hooks()
    handle = GLOBAL_HOOKS[kind](lambda *arguments: None)
    try:
        assert _torch.has_global_hooks()
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward", "backward_pre"])
def test_where_hooks_cannot_be_seen_a_module_counts_as_one_that_has_some(kind: str) -> None:
    """Then the stacked engine takes a path that calls the modules themselves, hooks included."""
    assert without(f"_{kind}_hooks").has_hooks(nn.Linear(2, 2))
    assert without(f"_global_{kind}_hooks").has_global_hooks()


@pytest.mark.parametrize(
    ("private", "public", "layers"),
    [
        ("_ConvNd", "CONVOLUTIONS", [nn.Conv1d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)]),
        ("_ConvTransposeNd", "TRANSPOSED_CONVOLUTIONS", [nn.ConvTranspose1d(1, 1, 1), nn.ConvTranspose3d(1, 1, 1)]),
        ("_DropoutNd", "DROPOUTS", [nn.Dropout(), nn.Dropout3d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]),
        ("_BatchNorm", "BATCH_NORMS", [nn.BatchNorm1d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1)]),
    ],
)
def test_kinds_of_layers_without_their_base_class(private: str, public: str, layers: list[nn.Module]) -> None:
    for module in (_torch, without(private)):
        kinds = getattr(module, public)
        assert all(isinstance(layer, kinds) for layer in layers)
        assert not isinstance(nn.Linear(1, 1), kinds)
    assert not isinstance(nn.Conv2d(1, 1, 1), _torch.TRANSPOSED_CONVOLUTIONS)


def private_names(tree: ast.AST) -> set[str]:
    """Names with an underscore that a module reads from objects, or imports from PyTorch."""
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {name.name for node in imports if (node.module or "").startswith("torch") for name in node.names}
    return {name for name in read | imported if name.startswith("_") and not name.startswith("__")}


def defined_names(tree: ast.AST) -> set[str]:
    """Functions, classes, class attributes and attributes of `self` that a module makes itself."""
    made = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    return made | {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in stored}


def test_no_other_file_uses_a_private_name_of_pytorch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in Path(_torch.__file__).parent.rglob("*.py")}
    own = set().union(*map(defined_names, trees.values()))
    module, tensor = nn.LSTM(1, 1), torch.zeros(1)
    of_torch = {name for owner in (torch, torch._C, module, tensor, nn.modules.module) for name in dir(owner)}
    of_torch |= {"_DropoutNd", "_BatchNorm", "_ConvNd", "_ConvTransposeNd"}
    assert {"_modules", "_version", "_backward_pre_hooks"} <= of_torch - own  # the test can fail
    found = [
        f"{path.name}: {name}"
        for path, tree in trees.items()
        for name in private_names(tree) & of_torch - own
        if path.name != "_torch.py"
    ]
    assert found == []
