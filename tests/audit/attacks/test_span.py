"""One FedAvg update spans its client's examples: who was in it, and where that must fail."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dbcl
from audit.attacks.digits import DIGITS
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.simulation import preset
from dbcl.simulation.build import build_server
from dbcl_audit.attacks.first_layer import FirstLayer
from dbcl_audit.attacks.membership import judge
from dbcl_audit.attacks.span import (
    first_layer_change,
    span_membership_findings,
    span_scores,
)

SHAPE = DIGITS.shape
ORDER = np.random.default_rng(0).permutation(len(DIGITS.x_train))
OTHERS = DIGITS.x_test  # 1,000
FOUR_DEVIATIONS = 0.08  # of an AUC that is 0.5: 4 sqrt(1301 / (12 * 300 * 1000)), for 300 against 1,000


@cache
def played(name: str, count: int, first: int = 0) -> tuple[dbcl.Broadcast, dict[str, Tensor], Tensor]:
    """A round of a preset: the broadcast, the update of a client that takes one epoch of FedAvg, and its images."""
    model = networks.build("mnist-mlp", seed=0)
    broadcast = build_server(preset(name), model, insecure_seed=0).open_round()
    local, rows = dbcl.blinded(model, broadcast), ORDER[first : first + count]
    training = LocalTraining(lr=0.1, batch_size=10, epochs=1)
    training.train(local, (DIGITS.x_train[rows], DIGITS.y_train[rows]), seed=bytes(32), round=0, client=0)
    return broadcast, dict(dbcl.make_update(local, broadcast, examples=count).tensors), DIGITS.x_train[rows]


def change_of(name: str, count: int) -> tuple[FirstLayer, Tensor]:
    broadcast, sent, x = played(name, count)
    change = first_layer_change(broadcast, sent, SHAPE)
    assert change is not None
    return change, x


def noised(tensor: Tensor, times: float) -> Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return tensor + times * tensor.square().mean().sqrt() * noise


def auc_of(change: FirstLayer, members: Tensor) -> float:
    truth = np.arange(len(members) + len(OTHERS)) < len(members)
    return judge(span_scores(change, torch.cat([members, OTHERS])), truth).auc


@pytest.mark.parametrize("name", ["blind", "paper", "plain"])
def test_members_of_one_update_are_told(name):
    broadcast, sent, x = played(name, 40)
    auc, one, tenth = span_membership_findings(broadcast, sent, x, OTHERS)
    assert (auc.measure, one.measure, tenth.measure) == ("auc", "tpr at 1 % fpr", "tpr at 0.1 % fpr")
    assert {(f.adversary, f.attacker, f.target) for f in (auc, one, tenth)} == {("server", "adaptive", "membership")}
    assert auc.value > 0.98
    assert tenth.value >= 0.85


def test_members_stand_out_where_there_are_more_than_units_or_inputs():
    auc, _, tenth = span_membership_findings(*played("blind", 600), OTHERS)
    assert auc.value > 0.75
    assert tenth.value > 0.2


def test_an_update_in_half_precision_still_tells_members():
    change, x = change_of("blind", 40)
    assert auc_of(FirstLayer(change.weight.half(), change.bias.half(), change.sketch), x) > 0.98


def test_a_client_that_did_not_send_the_update_is_not_told():
    change, _ = change_of("blind", 40)
    assert abs(auc_of(change, DIGITS.x_train[ORDER[2000:2300]]) - 0.5) < FOUR_DEVIATIONS


def test_with_shuffled_truth_nothing_is_told():
    change, x = change_of("blind", 600)
    scores = span_scores(change, torch.cat([x[:300], OTHERS]))
    truth = np.random.default_rng(1).permutation(len(scores)) < 300
    assert abs(judge(scores, truth).auc - 0.5) < FOUR_DEVIATIONS


def test_noise_on_the_update_hides_members():
    change, x = change_of("blind", 40)
    auc = [
        auc_of(FirstLayer(noised(change.weight, times), noised(change.bias, times), change.sketch), x)
        for times in (0.1, 30)
    ]
    assert auc[0] > 0.85
    assert abs(auc[1] - 0.5) < 0.19  # four deviations for 40 against 1,000


def test_a_sum_over_many_clients_hides_most_members():
    together = [played("blind", 40, first) for first in range(0, 2000, 40)]
    broadcast = together[0][0]
    sums = {name: torch.stack([sent[name] for _, sent, _ in together]).mean(0) for name in ("1.weight", "1.bias")}
    change = first_layer_change(broadcast, sums, SHAPE)
    assert change is not None
    assert len(together) * 40 > change.sketch.width
    assert auc_of(change, torch.cat([x for _, _, x in together])[:300]) < 0.75


def test_what_cannot_be_read_is_refused():
    sketch = dbcl.sketch.Identity(784)
    for weight, bias in ((torch.zeros(5, 784), torch.zeros(5)), (torch.ones(5, 784), torch.zeros(5))):
        change = FirstLayer(weight, bias, sketch)
        with pytest.raises(ConfigError, match="the first layer's bias did not change"):
            span_scores(change, OTHERS[:5])
    with pytest.raises(ConfigError, match="not finite"):
        span_scores(FirstLayer(torch.full((5, 784), torch.nan), torch.ones(5), sketch), OTHERS[:5])
    with pytest.raises(ConfigError, match=r"must have the shape \(5, 784\)"):
        span_scores(FirstLayer(torch.ones(5, 392), torch.ones(5), sketch), OTHERS[:5])


def test_an_update_of_nothing_has_no_findings():
    broadcast, sent, x = played("blind", 10)
    empty = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    assert span_membership_findings(broadcast, empty, x, OTHERS) == []


@pytest.mark.parametrize(
    "first",
    [nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten()), nn.Sequential(nn.Flatten(), nn.Linear(784, 8, bias=False))],
)
def test_networks_without_a_dense_first_layer_with_a_bias_have_no_findings(first):
    broadcast = dbcl.Server(first, dbcl.SketchConfig(veil=0, coverage="all")).open_round()
    x = OTHERS[:4]
    assert span_membership_findings(broadcast, broadcast.tensors, x, OTHERS) == []
