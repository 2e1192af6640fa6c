"""How many examples of each label a client has, read from one FedAvg update, and where that must fail."""

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dbcl
from audit.attacks.digits import DIGITS
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.simulation import preset
from dbcl.simulation.build import build_server
from dbcl_audit.attacks.labels import labels_of_gradient
from dbcl_audit.attacks.update_labels import Answered, LabelReader, named_correctly, update_label_findings

TRAINING = LocalTraining(lr=0.05, batch_size=10, epochs=1)
OWN = DIGITS.x_test, DIGITS.y_test
LABELS = DIGITS.y_train.numpy()


def shard(seed: int, examples: int = 40) -> NDArray[np.int64]:
    """Examples whose labels are uneven, as clients' are (Dirichlet 0.3)."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(examples, rng.dirichlet(np.full(10, 0.3)))
    pools = [np.flatnonzero(label == LABELS) for label in range(10)]
    return np.concatenate([rng.choice(pool, n, replace=False) for pool, n in zip(pools, counts, strict=True)])


@cache
def answered(name: str, seed: int, network: str = "mnist-mlp") -> Answered:
    model, rows = networks.build(network, seed=0), shard(seed)
    broadcast = build_server(preset(name), model, insecure_seed=0).open_round()
    local = dbcl.blinded(model, broadcast)
    TRAINING.train(local, (DIGITS.x_train[rows], DIGITS.y_train[rows]), seed=bytes([seed] * 32), round=0, client=0)
    return Answered(broadcast, dict(dbcl.make_update(local, broadcast, examples=len(rows)).tensors), rows)


def reader(network: str = "mnist-mlp", simulations: int = 100) -> LabelReader:
    return LabelReader(networks.build(network, seed=0), TRAINING, OWN, simulations=simulations)


@pytest.mark.parametrize("name", ["blind", "paper", "plain"])
def test_labels_of_an_update_of_four_steps_are_counted(name):
    (found,) = update_label_findings([answered(name, 1), answered(name, 2)], DIGITS.y_train, reader())
    assert (found.adversary, found.attacker, found.target, found.measure) == ("server", "adaptive", "label", "accuracy")
    assert found.chance is not None
    assert found.chance < 0.7
    assert found.value > 0.8
    assert found.value > found.chance + 0.2
    assert (found.budget["members"], found.budget["clients"]) == (80, 2)


def test_labels_of_a_network_without_a_dense_first_layer():
    (found,) = update_label_findings([answered("blind", 1, "dlg-lenet")], DIGITS.y_train, reader("dlg-lenet"))
    assert found.value > (found.chance or 1) + 0.2


def test_reading_beats_the_bias_alone_as_one_gradient():
    each = answered("blind", 1)
    true = np.bincount(LABELS[each.rows], minlength=10)
    bias = each.tensors["5.bias"] / -(TRAINING.lr * 4)
    as_one = np.bincount(labels_of_gradient(None, bias, 40).numpy(), minlength=10)
    assert (
        named_correctly(reader().counts(each.broadcast, each.tensors, 40), true) > named_correctly(as_one, true) + 0.1
    )


def test_the_labels_of_another_client_are_not_read():
    swapped = [answered("blind", 1)._replace(rows=shard(2)), answered("blind", 2)._replace(rows=shard(1))]
    (found,) = update_label_findings(swapped, DIGITS.y_train, reader())
    assert found.value < (found.chance or 0) + 0.1


def test_large_noise_and_a_sum_of_many_hide_the_labels():
    each = answered("blind", 1)
    generator = torch.Generator().manual_seed(0)
    noised = {
        name: change + 30 * change.square().mean().sqrt() * torch.randn(change.shape, generator=generator)
        for name, change in each.tensors.items()
    }
    together = [answered("blind", seed).tensors for seed in range(1, 13)]
    mean = {name: torch.stack([one[name] for one in together]).mean(0) for name in each.tensors}
    for tensors in (noised, mean):
        (found,) = update_label_findings([each._replace(tensors=tensors)], DIGITS.y_train, reader())
        assert found.value < (found.chance or 0) + 0.15


def test_a_label_that_the_server_has_no_example_of_is_never_named():
    few = DIGITS.y_test < 8
    own = DIGITS.x_test[few], DIGITS.y_test[few]
    each = answered("blind", 1)
    small = LabelReader(networks.build("mnist-mlp", seed=0), TRAINING, own, simulations=20)
    assert len(small.counts(each.broadcast, each.tensors, 40)) == 8
    (found,) = update_label_findings([each], DIGITS.y_train, small)
    assert 0 <= found.value < 1


def test_an_update_of_nothing_is_read_as_something():
    each = answered("blind", 1)
    empty = {name: torch.zeros_like(tensor) for name, tensor in each.tensors.items()}
    assert reader(simulations=20).counts(each.broadcast, empty, 40).sum() == 40


def test_what_cannot_be_used_is_refused():
    model = networks.build("mnist-mlp", seed=0)
    with pytest.raises(ConfigError, match="simulations must be 4 or more, got 3"):
        LabelReader(model, TRAINING, OWN, simulations=3)
    with pytest.raises(ConfigError, match="got 3 examples and 2 labels"):
        LabelReader(model, TRAINING, (OWN[0][:3], OWN[1][:2]))
    each = answered("blind", 1)
    infinite = {**each.tensors, "5.bias": torch.full((10,), torch.inf)}
    with pytest.raises(ConfigError, match="not finite, and no label can be read"):
        reader(simulations=4).counts(each.broadcast, infinite, 40)
    diverging = LabelReader(model, LocalTraining(lr=1e30, batch_size=10), OWN, simulations=6)
    with pytest.raises(ConfigError, match="0 of the server's simulations did not diverge"):
        diverging.counts(each.broadcast, each.tensors, 40)
