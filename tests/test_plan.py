import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dbcl
from dbcl.config import SketchConfig
from dbcl.errors import ConfigError, PlanError
from dbcl.model import networks
from dbcl.model.tensors import broadcast_names
from dbcl.plan import SketchPlan


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sketched(plan: SketchPlan) -> list[str]:
    return [tensor.name for tensor in plan.tensors if tensor.sketched]


def test_hidden_is_the_paper_and_all_is_all() -> None:
    assert sketched(SketchPlan.from_model(net(), SketchConfig(coverage="hidden"))) == ["0.weight", "2.weight"]
    assert sketched(SketchPlan.from_model(net(), SketchConfig(coverage="all"))) == ["0.weight", "2.weight", "4.weight"]
    for name in set(networks.NETWORKS) - set(networks.SCATTER):  # small heads
        shape = {"cifar-cnn": (3, 32, 32), "lfw-cnn": (3, 62, 47)}.get(name, (1, 28, 28))
        model = networks.build(name, shape=shape)
        matrices = [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]
        assert sketched(SketchPlan.from_model(model, SketchConfig(coverage="hidden"))) == matrices[:-1]


def test_patterns_and_exclusions() -> None:
    assert sketched(SketchPlan.from_model(net(), SketchConfig(coverage=["*.weight", "!0.*"]))) == [
        "2.weight",
        "4.weight",
    ]
    assert sketched(SketchPlan.from_model(net(), SketchConfig(coverage=["2.*"]))) == [
        "2.weight"
    ]  # the bias is a vector and stays unsketched


def test_words_and_patterns_mix() -> None:
    assert sketched(SketchPlan.from_model(net(), SketchConfig(coverage=["hidden", "!0.*"]))) == ["2.weight"]
    assert sketched(SketchPlan.from_model(net(), SketchConfig(coverage=["hidden", "4.weight"]))) == [
        "0.weight",
        "2.weight",
        "4.weight",
    ]
    with pytest.raises(PlanError, match="'hiden' matches no parameter"):
        SketchPlan.from_model(net(), SketchConfig(coverage=["hiden"]))


def test_what_a_word_cannot_cover_is_left_out_with_a_line_and_refused_only_when_named() -> None:
    model = nn.ModuleDict(
        {
            "narrow": nn.Linear(1, 4),
            "embed": nn.Linear(6, 6, bias=False),
            "again": nn.Linear(6, 6, bias=False),
            "hooked": nn.utils.spectral_norm(nn.Linear(6, 6)),
            "frozen": nn.Linear(6, 6).requires_grad_(False),
            "plain": nn.Linear(6, 6),
            "out": nn.Linear(6, 2),
        }
    )
    model["again"].weight = model["embed"].weight
    plan = SketchPlan.from_model(model, SketchConfig(coverage="hidden"))
    assert sketched(plan) == ["plain.weight"]
    reasons = dict(plan.left_out)
    assert reasons["narrow.weight"] == "has 1 inputs, too few for the ratio 2"
    assert "tied weights cannot be covered" in reasons["embed.weight"]
    assert "use torch.nn.utils.parametrizations.spectral_norm" in reasons["hooked.weight_orig"]
    assert reasons["frozen.weight"] == "is frozen and is not sent"
    assert "not sketched: narrow.weight has 1 inputs" in str(plan)
    assert plan.share_sketched < 0.5
    assert "% of the numbers, less than half: name more layers in coverage" in str(plan)
    for name, why in (
        ("narrow", "width must be between"),
        ("embed", "tied weights cannot be covered"),
        ("hooked", "old-style hook"),
        ("frozen", "is frozen and is not sent; or leave it out with '!frozen.weight' in coverage"),
    ):
        with pytest.raises(PlanError, match=f"{name}.*{why}"):
            SketchPlan.from_model(model, SketchConfig(coverage=[f"{name}.*"]))


def test_everything_that_leaves_is_in_the_plan_and_whole_numbers_stay() -> None:
    plan = SketchPlan.from_model(net(), SketchConfig(veil=0.3, coverage="hidden"))
    names = {tensor.name for tensor in plan.tensors}
    assert {"3.running_mean", "3.running_var", "3.weight"} <= names
    assert "3.num_batches_tracked" not in names
    assert {tensor.veil for tensor in plan.tensors} == {0.3}
    assert plan.unprotected == ()
    assert set(SketchPlan.from_model(net(), SketchConfig(veil=0, coverage="hidden")).unprotected) == names - {
        "0.weight",
        "2.weight",
    }


def test_sketch_and_veil_are_independent_choices() -> None:
    plan = (
        SketchPlan.from_model(net(), SketchConfig(veil=0.2, coverage="hidden"))
        .adjust("0.*", veil=0)
        .adjust("2.weight", ratio=3, sketch="sampling-v1")
    )
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert (by_name["0.weight"].sketched, by_name["0.weight"].veil) == (True, 0)
    assert (by_name["2.weight"].scheme, by_name["2.weight"].widths) == ("sampling-v1", (2, 2))
    assert plan.unprotected == ("0.bias",)
    with pytest.raises(PlanError, match=r"not covered, so it cannot get a sketch: 4\.weight"):
        plan.adjust("4.weight", sketch="count-v1")
    with pytest.raises(PlanError, match=r"'nope' matches no tensor; there are 0\.weight"):
        plan.adjust("nope", veil=1)
    assert "0.weight" not in sketched(plan.adjust("0.weight", sketch="identity-v1"))


def test_a_range_of_ratios_draws_a_width_for_each_round() -> None:
    plan = SketchPlan.from_model(
        nn.Sequential(nn.Linear(100, 3), nn.Linear(3, 2)), SketchConfig(ratio=(2, 5), coverage="hidden")
    )
    widths = {plan.draw(bytes(32), round).tensors[0].width for round in range(200)}
    assert min(widths) == 20
    assert max(widths) == 50
    assert len(widths) == 31


@given(dim=st.integers(2, 500), ratio=st.floats(1.01, 50))
@settings(max_examples=100, deadline=None)
def test_any_ratio_gives_a_legal_width_or_is_refused(dim: int, ratio: float) -> None:
    layer = nn.Linear(dim, 2)
    if 1 <= int(dim / ratio) < dim:
        (part, _) = SketchPlan.from_model(layer, SketchConfig(coverage="all", ratio=ratio)).draw(bytes(32), 0).tensors
        assert part.width == int(dim / ratio)
    else:
        with pytest.raises(PlanError, match=r"width must be between 1 and|too few for the ratio"):
            SketchPlan.from_model(layer, SketchConfig(coverage="all", ratio=ratio))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight


def test_all_problems_are_named_at_once() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.ConvTranspose2d(2, 2, 3), nn.Linear(4, 2))
    with pytest.raises(PlanError) as caught:
        SketchPlan.from_model(model, SketchConfig(coverage=["*.weight", "nothing.*"], ratio=100))
    text = str(caught.value)
    assert "pattern 'nothing.*' matches no parameter; there are 0.weight" in text
    assert "0.weight: width must be between 1 and 0 (its inputs less one), got 0" in text
    assert "2.weight: width must be between 1 and 3 (its inputs less one), got 0" in text
    assert text.startswith("4 problems with this plan:")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(4, 2), {}, "weight is the output layer and nothing else can be covered; use coverage='all'"),
        (nn.ReLU(), {"coverage": "all"}, "the model has nothing to train"),
        (nn.BatchNorm1d(3), {"coverage": "all"}, "nothing to cover"),
        (nn.BatchNorm1d(3), {"coverage": "hidden"}, "nothing to cover"),
        (Tied(), {"coverage": ["embed.*"]}, "embed.weight: is one tensor with head.weight"),
        (net(), {"ratio": 1}, "ratio must be above 1, .*, got 1$"),
        (net(), {"ratio": (4, 2)}, "a range must rise, got 4 to 2"),
        (net(), {"ratio": 9}, "nothing is left to cover: 0.weight has 8 inputs, too few for the ratio 9; 2.weight"),
        (
            net(),
            {"ratio": 9, "coverage": ["0.*"]},
            "0.weight: width must be between 1 and 7 .its inputs less one., got 0",
        ),
        (net(), {"sketch": "magic"}, "sketch must be one of count-v1, .*, got 'magic'"),
        (net(), {"sketch": "lanes-v1"}, "sketch must be one of count-v1, .*, got 'lanes-v1'"),
        (net(), {"coverage": "everything"}, "'everything' matches no parameter"),
        (net(), {"coverage": 3}, "coverage must be text or a list of texts, got 3"),
        (net(), {"lanes": 0}, "lanes must be 1 or more, got 0"),
        (net(), {"lanes": -1}, "lanes must be 1 or more, got -1"),
        (net(), {"lanes": 2.0}, "lanes must be a whole number, got 2.0"),
        (net(), {"lanes": 1025}, "lanes must be between 1 and 1024, got 1025"),
        (net(), {"lanes": 2, "sketch": "count-hashed-v1"}, "count-hashed-v1 has one, got 2"),
        (net(), {"lanes": 2, "sketch": "sampling-v1"}, "lanes are of the balanced count sketch: sampling-v1 has one"),
        (net(), {"lanes": 2, "sketch": "identity-v1"}, "identity-v1 has one, got 2"),
        (net(), {"veil": float("nan")}, "veil must be finite .*, got nan"),
        (net(), {"veil": -1}, "veil must be 0 or more, got -1"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), {}, "0.weight: has no shape yet"),
        (nn.Embedding(5, 4, max_norm=1.0), {"coverage": ["weight"]}, "sparse gradients or max_norm cannot be covered"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            {"coverage": ["*original1"]},
            "belongs to another parametrization",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(model: nn.Module, settings: dict, message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message):
        SketchPlan.from_model(model, SketchConfig(**{"coverage": "hidden", **settings}))


def test_a_plan_that_is_changed_is_validated_again() -> None:
    plan = SketchPlan.from_model(net(), SketchConfig(coverage="hidden"))
    for changes, message in (
        ({"veil": -1.0}, "2.weight: veil must be 0 or more, got -1"),
        ({"veil": float("nan")}, "2.weight: veil must be 0 or more, got nan"),
        ({"ratio": 1.0}, "2.weight: ratio must be above 1"),
        ({"ratio": (4.0, 2.0)}, "a range must rise., got 4 to 2"),
        ({"sketch": "magic"}, "2.weight: unknown sketch 'magic'; choose one of count-v1"),
    ):
        with pytest.raises(PlanError, match=message):
            plan.adjust("2.weight", **changes)
    with pytest.raises(PlanError, match="lanes must be between 1 and 1024, got 0"):
        dataclasses.replace(plan, lanes=0)


def test_a_tied_output_layer_is_left_alone_and_sent_once() -> None:
    plan = SketchPlan.from_model(Tied(), SketchConfig(coverage="hidden"))
    assert sketched(plan) == ["body.weight"]
    assert "head.weight" not in {tensor.name for tensor in plan.tensors}
    model, template = Tied(), Tied()
    broadcast = dbcl.Server(model, plan).open_round()
    local = dbcl.blinded(template, broadcast)
    assert local.head.weight is local.embed.weight
    assert torch.equal(local.head.weight, broadcast.tensors["embed.weight"])


def test_no_sketch_needs_nothing_to_cover() -> None:
    assert sketched(SketchPlan.from_model(nn.Linear(4, 2), SketchConfig(sketch="identity-v1"))) == []


def test_a_plan_must_fit_the_model() -> None:
    plan = SketchPlan.from_model(net(), SketchConfig(coverage="hidden"))
    with pytest.raises(PlanError, match="made for another model"):
        dbcl.Server(nn.Sequential(nn.Linear(9, 6), *net()[1:]), plan)


def test_the_table_says_what_a_client_sees() -> None:
    text = str(
        SketchPlan.from_model(networks.build("mnist-mlp"), SketchConfig(veil=0, ratio=(2, 4), coverage="hidden"))
    )
    assert "1.weight  200x784  lanes-v1  196 to 392 of 784 numbers of each row  none" in text
    assert "unprotected: 1.bias, 3.bias, 5.weight, 5.bias" in text
    assert "undo it: 1.weight, 3.weight" in text


@pytest.mark.parametrize(
    ("settings", "lanes"),
    [
        ({}, 2),
        ({"ratio": 1.4}, 1),
        ({"ratio": 1.5}, 2),
        ({"ratio": 2.5}, 3),
        ({"ratio": 4}, 4),
        ({"ratio": (2, 4)}, 2),
        ({"ratio": 2, "lanes": 5}, 5),
        ({"ratio": 4, "lanes": 1}, 1),
        ({"sketch": "count-hashed-v1"}, 1),
        ({"sketch": "sampling-v1"}, 1),
        ({"sketch": "identity-v1"}, 1),
    ],
)
def test_as_many_lanes_as_the_ratio_unless_told_otherwise(settings: dict, lanes: int) -> None:
    plan = SketchPlan.from_model(net(), SketchConfig(**{"coverage": "hidden", **settings}))
    assert plan.lanes == lanes
    assert plan.tensors[0].scheme == ("lanes-v1" if lanes > 1 else settings.get("sketch", "count-v1"))
    assert (f"lanes: {lanes}, whose sketches complement each other" in str(plan)) == (lanes > 1)
    assert dbcl.Server(net(), plan, calibration=torch.randn(4, 8)).open_round("ann").plan.lanes == lanes


def test_lanes_are_part_of_a_plan() -> None:
    plans = [SketchPlan.from_model(net(), SketchConfig(coverage="hidden", lanes=lanes)) for lanes in (1, None, 3)]
    assert len({plan.digest for plan in plans}) == 3
    assert plans[1] == SketchPlan.from_model(net(), SketchConfig(lanes=2, coverage="hidden"))
    assert plans[0] == SketchPlan.from_model(net(), SketchConfig(sketch="count-v1", lanes=1, coverage="hidden"))
    with pytest.raises(PlanError, match=r"0.weight: lanes-v1 needs two lanes or more; of one lane it is count-v1"):
        plans[0].adjust("0.weight", sketch="lanes-v1")


def test_the_lanes_of_a_round_have_the_same_widths_and_one_that_is_not_of_lanes_is_shared() -> None:
    plan = SketchPlan.from_model(networks.build("mnist-mlp"), SketchConfig(ratio=(2, 4), coverage="hidden")).adjust(
        "3.weight", sketch="count-v1"
    )
    for round in range(3):
        one, two = (plan.draw(bytes(32), round).in_lane(lane) for lane in (0, 1))
        for lane in (one, two):  # what was drawn once for all lanes is what a client draws for its own
            anew = dataclasses.replace(lane).sketches
            assert all(sketch.fingerprint() == anew[name].fingerprint() for name, sketch in lane.sketches.items())
            assert all(torch.equal(sketch.dense(), anew[name].dense()) for name, sketch in lane.sketches.items())
        assert one.tensors == two.tensors
        assert one.sketches["1.weight"].fingerprint() != two.sketches["1.weight"].fingerprint()
        assert one.sketches["3.weight"].fingerprint() == two.sketches["3.weight"].fingerprint()


def test_buffers_that_are_constants_are_not_sent() -> None:
    module = nn.Linear(3, 2)
    module.register_buffer("table", torch.ones(4), persistent=False)
    module.register_buffer("mask", torch.ones(4))
    module.register_buffer("steps", torch.ones(4))
    assert broadcast_names(module) == ["weight", "bias"]
    assert broadcast_names(module, ["st*", "table"]) == ["weight", "bias", "steps"]
    plan = SketchPlan.from_model(module, SketchConfig(coverage="all", buffers=["steps"]))
    assert [tensor.name for tensor in plan.tensors] == ["weight", "bias", "steps"]
    assert plan.not_sent == (("mask", "constant"),)
    assert "not sent: 1 buffers that are constants (mask)" in str(plan)
