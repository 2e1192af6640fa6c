import math
import types

import pytest
import torch
from torch import nn

import dbcl
from dbcl.config import SketchConfig
from dbcl.errors import PlanError
from dbcl.plan import SketchPlan
from dbcl.privacy import veil_sizes


def net(hidden: int = 50) -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, hidden), nn.ReLU(), nn.Linear(hidden, 4))


def test_the_veil_is_white_and_has_the_size_that_was_asked_for() -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 4))
    broadcast = dbcl.Server(model, dbcl.SketchConfig(veil=0.5), insecure_seed=0).open_round()
    W = model[0].weight.detach()
    noise = broadcast.tensors["0.weight"] - broadcast.sketches()["0.weight"].apply(W)
    scale = noise / (0.5 * W.square().mean().sqrt())
    n = scale.numel()  # 60,000: the bounds are five standard errors
    assert abs(scale.mean()) < 5 / math.sqrt(n)
    assert abs(scale.square().mean() - 1) < 5 * math.sqrt(2 / n)
    assert abs(scale.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((scale[:, :-1] * scale[:, 1:]).mean()) < 5 / math.sqrt(n)
    assert abs((scale[:-1] * scale[1:]).mean()) < 5 / math.sqrt(n)


def test_no_veil_is_exactly_the_sketch() -> None:
    model = net()
    broadcast = dbcl.Server(model, dbcl.SketchConfig(veil=0)).open_round()
    W = model[0].weight.detach()
    assert torch.equal(broadcast.tensors["0.weight"], broadcast.sketches()["0.weight"].apply(W))
    assert torch.equal(broadcast.tensors["2.weight"], model[2].weight)


def test_every_tensor_has_noise_of_its_own_in_every_round() -> None:
    server = dbcl.Server(net(), dbcl.SketchConfig(veil=0.2))
    first = server.open_round()
    server.close_round([dbcl.make_update(dbcl.blinded(net(), first), first, examples=1)])
    second = server.open_round()
    assert second.plan.seed != first.plan.seed
    noises = [first.tensors["2.weight"] - server.model[2].weight, second.tensors["2.weight"] - server.model[2].weight]
    assert abs(torch.corrcoef(torch.stack([noise.detach().flatten() for noise in noises]))[0, 1]) < 0.4
    assert (noises[0] != noises[1]).all()


def test_a_zero_bias_is_veiled_like_the_rest_of_its_layer() -> None:
    """With tau = rho * rms(bias) a fresh bias would go out exactly, and so would its first updates."""
    model = net()
    nn.init.zeros_(model[0].bias)
    server = dbcl.Server(model, dbcl.SketchConfig(veil=0.2))
    sent = server.open_round().tensors["0.bias"]
    size = model[0].weight.detach().square().mean().sqrt()
    assert 0.1 * size < sent.std() < 0.3 * size  # 50 numbers: the bounds are five standard errors
    assert sent.min() < 0 < sent.max()  # only buffers are kept from turning negative
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(model[2].weight)
    assert veil_sizes(model, SketchPlan.from_model(model, SketchConfig(veil=0.2)).veils)["0.bias"] > 0


def test_a_running_variance_never_turns_negative() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    server = dbcl.Server(model, dbcl.SketchConfig(veil=3.0), calibration=torch.randn(16, 4))
    for _ in range(5):
        broadcast = server.open_round()
        assert broadcast.tensors["1.running_var"].min() >= 0
        local = dbcl.blinded(model, broadcast)
        local.train()(0.01 * torch.randn(16, 4))
        server.close_round([dbcl.make_update(local, broadcast, examples=16)])
        assert model[1].running_var.min() >= 0


def test_a_clients_own_module_is_not_touched_and_may_be_used_again() -> None:
    template = net()
    before = {name: tensor.clone() for name, tensor in template.state_dict().items()}
    server = dbcl.Server(net())
    for _ in range(2):
        broadcast = server.open_round()
        local = dbcl.blinded(template, broadcast)
        with torch.no_grad():
            for parameter in local.parameters():
                parameter.add_(1)
        server.close_round([dbcl.make_update(local, broadcast, examples=1)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in template.state_dict().items())


def test_training_does_not_change_the_broadcast() -> None:
    broadcast = dbcl.Server(net()).open_round()
    before = {name: tensor.clone() for name, tensor in broadcast.tensors.items()}
    local = dbcl.blinded(net(), broadcast)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in broadcast.tensors.items())


def test_another_model_is_refused_with_all_that_differs() -> None:
    broadcast = dbcl.Server(net()).open_round()
    other = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4, bias=False), nn.LayerNorm(4))
    with pytest.raises(PlanError) as caught:
        dbcl.blinded(other, broadcast)
    text = str(caught.value)
    assert "this model is not the one that the server trains" in text
    assert "0.weight has shape (30, 40) and must have (50, 40)" in text
    assert "2.bias is missing" in text
    assert "'3.weight' was not asked for" in text


def test_a_forward_that_a_copy_would_not_have_is_refused() -> None:
    """Its closure holds the original layer: the client would train nothing and answer that nothing has changed."""
    broadcast, model = dbcl.Server(net()).open_round(), net()
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    with pytest.raises(PlanError, match=r"0.forward is a function that holds a module"):
        dbcl.blinded(model, broadcast)
    model[0].forward = types.MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), model[0])
    local, plain = dbcl.blinded(model, broadcast), dbcl.blinded(net(), broadcast)
    x = torch.randn(3, model[0].in_features)
    torch.testing.assert_close(local[0](x), 2 * plain[0](x))


def test_weights_in_one_place_of_memory_are_refused_on_both_sides() -> None:
    """A step of one would move both, as it does in plain PyTorch, and the server knows of two."""
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 4))
    broadcast = dbcl.Server(model).open_round()
    model[2].weight.data = model[0].weight.data
    for refused in (lambda: dbcl.Server(model), lambda: dbcl.blinded(model, broadcast)):
        with pytest.raises(PlanError, match=r"2.weight: lies in the memory of 0.weight; tie them"):
            refused()
    model[2].weight = model[0].weight  # tied, as PyTorch means it
    dbcl.Server(model, dbcl.SketchConfig(coverage="all"))


def test_a_weight_that_is_kept_in_a_list_is_refused() -> None:
    model = net()
    model.kept = [model[0].weight]
    with pytest.raises(PlanError, match=r"0.weight is in the list kept too, where it would stay"):
        dbcl.blinded(model, dbcl.Server(net()).open_round())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_server_plan_and_client_take_a_wrapped_model(wrap) -> None:
    server = dbcl.Server(wrap(net()))
    assert dbcl.SketchPlan.from_model(wrap(net())) == server.plan == dbcl.SketchPlan.from_model(net())
    broadcast = server.open_round()
    for module in (net(), wrap(net())):
        assert server.close_round(
            [dbcl.make_update(dbcl.blinded(module, server.open_round()), server.open_round(), examples=1)]
        )
    assert type(dbcl.blinded(wrap(net()), broadcast)) is nn.Sequential


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(50), nn.ReLU(), nn.Linear(50, 4)), "0.weight: has no shape yet; run one"),
        (lambda: net().to("meta"), r"0.weight: has no numbers .device meta.; use model.to_empty"),
        (
            lambda: torch.jit.script(net()),
            "a TorchScript model cannot be sketched; give the module that it was made of",
        ),
    ],
    ids=["lazy", "meta", "script"],
)
@pytest.mark.filterwarnings("ignore")  # lazy layers and scripts warn of themselves
def test_a_model_without_numbers_is_refused_on_both_sides(make, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dbcl.blinded(make(), dbcl.Server(net()).open_round())
    with pytest.raises(PlanError, match=message):
        SketchPlan.from_model(make())
