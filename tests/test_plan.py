import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dbcl
from dbcl import models
from dbcl.cover import broadcast_names
from dbcl.errors import PlanError
from dbcl.plan import SketchPlan


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sketched(plan: SketchPlan) -> list[str]:
    return [tensor.name for tensor in plan.tensors if tensor.sketched]


def test_hidden_is_the_paper_and_all_is_all() -> None:
    assert sketched(SketchPlan.of(net())) == ["0.weight", "2.weight"]
    assert sketched(SketchPlan.of(net(), cover="all")) == ["0.weight", "2.weight", "4.weight"]
    for name in models.NETWORKS:
        shape = {"cifar-cnn": (3, 32, 32), "lfw-cnn": (3, 62, 47)}.get(name, (1, 28, 28))
        model = models.build(name, shape=shape)
        matrices = [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]
        assert sketched(SketchPlan.of(model)) == matrices[:-1]


def test_patterns_and_exclusions() -> None:
    assert sketched(SketchPlan.of(net(), cover=["*.weight", "!0.*"])) == ["2.weight", "4.weight"]
    assert sketched(SketchPlan.of(net(), cover=["2.*"])) == ["2.weight"]  # the bias is a vector and stays unsketched


def test_words_and_patterns_mix() -> None:
    assert sketched(SketchPlan.of(net(), cover=["hidden", "!0.*"])) == ["2.weight"]
    assert sketched(SketchPlan.of(net(), cover=["hidden", "4.weight"])) == ["0.weight", "2.weight", "4.weight"]
    with pytest.raises(PlanError, match="'hiden' matches no parameter"):
        SketchPlan.of(net(), cover=["hiden"])


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
    plan = SketchPlan.of(model)
    assert sketched(plan) == ["plain.weight"]
    reasons = dict(plan.left_out)
    assert reasons["narrow.weight"] == "has 1 inputs, too few for the ratio 2"
    assert "tied weights cannot be covered" in reasons["embed.weight"]
    assert "use torch.nn.utils.parametrizations.spectral_norm" in reasons["hooked.weight_orig"]
    assert reasons["frozen.weight"] == "is frozen and stays at home"
    assert "not sketched: narrow.weight has 1 inputs" in str(plan)
    assert plan.share_sketched < 0.5
    assert "% of the numbers, less than half: name more layers in cover" in str(plan)
    for name, why in (
        ("narrow", "width must be between"),
        ("embed", "tied weights cannot be covered"),
        ("hooked", "old-style hook"),
        ("frozen", "is frozen and stays at home; or leave it out with '!frozen.weight' in cover"),
    ):
        with pytest.raises(PlanError, match=f"{name}.*{why}"):
            SketchPlan.of(model, cover=[f"{name}.*"])


def test_everything_that_leaves_is_in_the_plan_and_whole_numbers_stay() -> None:
    plan = SketchPlan.of(net(), veil=0.3)
    names = {tensor.name for tensor in plan.tensors}
    assert {"3.running_mean", "3.running_var", "3.weight"} <= names
    assert "3.num_batches_tracked" not in names
    assert {tensor.veil for tensor in plan.tensors} == {0.3}
    assert plan.in_clear == ()
    assert set(SketchPlan.of(net(), veil=0).in_clear) == names - {"0.weight", "2.weight"}


def test_sketch_and_veil_are_independent_choices() -> None:
    plan = SketchPlan.of(net(), veil=0.2).adjust("0.*", veil=0).adjust("2.weight", ratio=3, sketch="sampling-v1")
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert (by_name["0.weight"].sketched, by_name["0.weight"].veil) == (True, 0)
    assert (by_name["2.weight"].scheme, by_name["2.weight"].widths) == ("sampling-v1", (2, 2))
    assert plan.in_clear == ("0.bias",)
    with pytest.raises(PlanError, match=r"not covered, so it cannot get a sketch: 4\.weight"):
        plan.adjust("4.weight", sketch="count-v1")
    with pytest.raises(PlanError, match=r"'nope' matches no tensor; there are 0\.weight"):
        plan.adjust("nope", veil=1)
    assert "0.weight" not in sketched(plan.adjust("0.weight", sketch="identity-v1"))


def test_a_range_of_ratios_draws_a_width_for_each_round() -> None:
    plan = SketchPlan.of(nn.Sequential(nn.Linear(100, 3), nn.Linear(3, 2)), ratio=(2, 5))
    widths = {plan.draw(bytes(32), round).tensors[0].width for round in range(200)}
    assert min(widths) == 20
    assert max(widths) == 50
    assert len(widths) == 31


@given(dim=st.integers(2, 500), ratio=st.floats(1.01, 50))
@settings(max_examples=100, deadline=None)
def test_any_ratio_gives_a_legal_width_or_is_refused(dim: int, ratio: float) -> None:
    layer = nn.Linear(dim, 2)
    if 1 <= int(dim / ratio) < dim:
        (part, _) = SketchPlan.of(layer, cover="all", ratio=ratio).draw(bytes(32), 0).tensors
        assert part.width == int(dim / ratio)
    else:
        with pytest.raises(PlanError, match=r"width must be between 1 and|too few for the ratio"):
            SketchPlan.of(layer, cover="all", ratio=ratio)


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
        SketchPlan.of(model, cover=["*.weight", "nothing.*"], veil=-1)
    text = str(caught.value)
    assert "pattern 'nothing.*' matches no parameter; there are 0.weight" in text
    assert "0.weight: width must be between 1 and 0 (its inputs less one), got 0" in text
    assert "veil must be 0 or more, got -1" in text
    assert text.startswith("8 problems with this plan:")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(4, 2), {}, "weight is the output layer and nothing else can be covered; use cover='all'"),
        (nn.ReLU(), {"cover": "all"}, "nothing to cover"),
        (nn.BatchNorm1d(3), {"cover": "hidden"}, "nothing to cover"),
        (Tied(), {"cover": ["embed.*"]}, "embed.weight: is one tensor with head.weight"),
        (net(), {"ratio": 1}, "0.weight: ratio must be above 1"),
        (net(), {"ratio": (4, 2)}, "ratio must be above 1 .and a range must rise., got 4 to 2"),
        (net(), {"ratio": 9}, "nothing is left to cover: 0.weight has 8 inputs, too few for the ratio 9; 2.weight"),
        (net(), {"ratio": 9, "cover": ["0.*"]}, "0.weight: width must be between 1 and 7 .its inputs less one., got 0"),
        (net(), {"sketch": "magic"}, "0.weight: unknown sketch 'magic'; choose one of count-v1"),
        (net(), {"cover": "everything"}, "cover must be 'hidden', 'large', 'all' or a list of words and name patterns"),
        (net(), {"lanes": 0}, "lanes must be between 1 and 1024, got 0"),
        (net(), {"lanes": -1}, "lanes must be between 1 and 1024, got -1"),
        (net(), {"lanes": 1025}, "lanes must be between 1 and 1024, got 1025"),
        (net(), {"lanes": 2, "sketch": "count-hashed-v1"}, "count-hashed-v1 has one, got 2"),
        (net(), {"lanes": 2, "sketch": "sampling-v1"}, "lanes are of the balanced count sketch: sampling-v1 has one"),
        (net(), {"lanes": 2, "sketch": "identity-v1"}, "identity-v1 has one, got 2"),
        (net(), {"lanes": 1, "grouped": True}, "grouped buckets need two lanes or more"),
        (net(), {"sketch": "sampling-v1", "grouped": True}, "grouped buckets need two lanes or more"),
        (net(), {"veil": float("nan")}, "veil must be 0 or more, got nan"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), {}, "0.weight: has no shape yet"),
        (nn.Embedding(5, 4, max_norm=1.0), {"cover": ["weight"]}, "sparse gradients or max_norm cannot be covered"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            {"cover": ["*original1"]},
            "belongs to another parametrization",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(model: nn.Module, settings: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        SketchPlan.of(model, **settings)


def test_a_tied_output_layer_is_left_alone_and_sent_once() -> None:
    plan = SketchPlan.of(Tied(), cover="hidden")
    assert sketched(plan) == ["body.weight"]
    assert "head.weight" not in {tensor.name for tensor in plan.tensors}
    model, template = Tied(), Tied()
    broadcast = dbcl.Server(model, plan).open_round()
    local = dbcl.blinded(template, broadcast)
    assert local.head.weight is local.embed.weight
    assert torch.equal(local.head.weight, broadcast.tensors["embed.weight"])


def test_no_sketch_needs_nothing_to_cover() -> None:
    assert sketched(SketchPlan.of(nn.Linear(4, 2), sketch="identity-v1")) == []


def test_a_plan_and_settings_do_not_mix_and_must_fit_the_model() -> None:
    plan = SketchPlan.of(net())
    with pytest.raises(PlanError, match="give either a plan or veil, not both"):
        dbcl.Server(net(), plan, veil=0.1)
    with pytest.raises(PlanError, match="made for another model"):
        dbcl.Server(nn.Sequential(nn.Linear(9, 6), *net()[1:]), plan)


def test_the_table_says_what_a_client_sees() -> None:
    text = str(SketchPlan.of(models.build("mnist-mlp"), veil=0, ratio=(2, 4)))
    assert "1.weight  200x784  lanes-v1  196 to 392 of 784 numbers of each row  none" in text
    assert "in clear: 1.bias, 3.bias, 5.weight, 5.bias" in text
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
        ({"sketch": "lanes-v1"}, 2),
        ({"sketch": "lanes-v1", "lanes": 1}, 1),
        ({"sketch": "count-hashed-v1"}, 1),
        ({"sketch": "sampling-v1"}, 1),
        ({"sketch": "identity-v1"}, 1),
    ],
)
def test_as_many_lanes_as_the_ratio_unless_told_otherwise(settings: dict, lanes: int) -> None:
    plan = SketchPlan.of(net(), **settings)
    assert plan.lanes == lanes
    scheme = settings.get("sketch", "count-v1")
    balanced = "lanes-v1" if lanes > 1 else "count-v1"
    assert plan.tensors[0].scheme == (balanced if scheme in ("count-v1", "lanes-v1") else scheme)
    assert (f"lanes: {lanes}, whose sketches complement each other" in str(plan)) == (lanes > 1)
    assert dbcl.Server(net(), plan).open_round("ann").plan.lanes == lanes


def test_lanes_and_groups_are_part_of_what_a_plan_is() -> None:
    plans = [SketchPlan.of(net(), **each) for each in ({"lanes": 1}, {}, {"lanes": 3}, {"grouped": True})]
    assert len({plan.digest for plan in plans}) == 4
    assert plans[1] == SketchPlan.of(net(), lanes=2, grouped=False)
    assert plans[0] == SketchPlan.of(net(), sketch="count-v1", lanes=1)
    assert "each client trains in one of them; every 2 clients have buckets of their own" in str(plans[3])
    assert plans[3].adjust("0.*", ratio=4).grouped
    with pytest.raises(PlanError, match=r"0.weight: lanes-v1 needs two lanes or more; of one lane it is count-v1"):
        plans[0].adjust("0.weight", sketch="lanes-v1")
    with pytest.raises(PlanError, match="give either a plan or lanes, not both"):
        dbcl.Server(net(), plans[0], lanes=2)
    with pytest.raises(PlanError, match="give either a plan or grouped, not both"):
        dbcl.Server(net(), plans[1], grouped=True)


def test_the_lanes_of_a_round_have_the_same_widths_and_one_that_is_not_of_lanes_is_shared() -> None:
    plan = SketchPlan.of(models.build("mnist-mlp"), ratio=(2, 4)).adjust("3.weight", sketch="count-v1")
    for round in range(3):
        one, two = (plan.draw(bytes(32), round).in_lane(lane) for lane in (0, 1))
        for lane in (one, two):  # what was drawn once for all lanes is what a client draws for its own
            anew = dataclasses.replace(lane).sketches
            assert all(sketch.fingerprint() == anew[name].fingerprint() for name, sketch in lane.sketches.items())
            assert all(torch.equal(sketch.dense(), anew[name].dense()) for name, sketch in lane.sketches.items())
        assert one.tensors == two.tensors
        assert one.sketches["1.weight"].fingerprint() != two.sketches["1.weight"].fingerprint()
        assert one.sketches["3.weight"].fingerprint() == two.sketches["3.weight"].fingerprint()


def test_buffers_that_are_constants_stay_at_home() -> None:
    module = nn.Linear(3, 2)
    module.register_buffer("table", torch.ones(4), persistent=False)
    module.register_buffer("mask", torch.ones(4))
    module.register_buffer("steps", torch.ones(4))
    assert broadcast_names(module) == ["weight", "bias"]
    assert broadcast_names(module, ["st*", "table"]) == ["weight", "bias", "steps"]
    plan = SketchPlan.of(module, cover="all", buffers=["steps"])
    assert [tensor.name for tensor in plan.tensors] == ["weight", "bias", "steps"]
    assert plan.at_home == (("mask", "constant"),)
    assert "stays at home: 1 buffers that are constants (mask)" in str(plan)
