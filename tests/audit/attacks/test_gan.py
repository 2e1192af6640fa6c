from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dbcl
from dbcl import data
from dbcl.data import TensorExamples
from dbcl.engines import LocalTraining
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.simulation import preset, task_of
from dbcl_audit.attacks import gan
from dbcl_audit.attacks.gan import KEPT_ROUNDS, GanAttacker, GanEngine, GanSettings
from dbcl_audit.simulated_run import draw_batches, simulate_batches

SHAPE, BOX = (1, 28, 28), (-0.5, 2.5)


def attacker(steps: int = 1, count: int = 10) -> GanAttacker:
    return GanAttacker(SHAPE, BOX, GanSettings(target=3, steps=steps), count=count, seed=0)


def test_the_generator_learns_what_a_model_takes_for_the_class() -> None:
    model, drawer = networks.build("mnist-mlp", outputs=11, seed=5), attacker(steps=20, count=50)

    def probabilities() -> torch.Tensor:
        return F.softmax(model(drawer.drawings), dim=1)[:, 3].detach()

    before = probabilities().mean()
    for _ in range(10):
        drawer.learn(model)
    assert probabilities()[(drawer.turns - 1) % KEPT_ROUNDS :: KEPT_ROUNDS].mean() > 0.5 > 0.2 > before
    assert BOX[0] <= float(drawer.drawings.min()) <= float(drawer.drawings.max()) <= BOX[1]


def test_a_share_of_the_drawings_is_new_for_each_model() -> None:
    drawer, model = attacker(), networks.build("mnist-mlp", outputs=11)
    for turn in range(KEPT_ROUNDS + 1):
        before = drawer.drawings.clone()
        drawer.learn(model)
        changed = {row for row in range(10) if not drawer.drawings[row].equal(before[row])}
        assert changed == set(range(turn % KEPT_ROUNDS, 10, KEPT_ROUNDS))


def test_a_generator_needs_images_that_it_can_double() -> None:
    with pytest.raises(ConfigError, match="30 x 28 must be divisible by 4"):
        gan.generator((1, 30, 28), GanSettings(target=0))


def test_only_the_victim_holds_the_class_and_only_the_attacker_the_drawings() -> None:
    labels = torch.arange(11).repeat_interleave(8)
    parts = gan.divide_classes(labels, target=3, fake=10, clients=4)
    held = [np.bincount(labels.numpy()[part], minlength=11) for part in parts]
    assert sorted(np.concatenate(parts).tolist()) == list(range(88))
    assert [counts[3] for counts in held] == [0, 8, 0, 0]
    assert [counts[10] for counts in held] == [8, 0, 0, 0]
    assert all(counts[label] == 2 for counts in held for label in range(10) if label != 3)
    without = gan.divide_classes(labels, target=3, fake=10, clients=4, held=False)
    assert not any((labels.numpy()[part] == 3).any() for part in without)


def test_an_attacker_that_looks_on_changes_no_update() -> None:
    weights = []
    for looking in (False, True):
        net = networks.build("mnist-mlp", outputs=11, seed=0)
        examples = TensorExamples(
            torch.randn(20, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10
        )
        server = dbcl.Server(net, insecure_seed=0)
        clients = examples.divide([np.arange(10), np.arange(10, 20)])
        engine = GanEngine(server, networks.build("mnist-mlp", outputs=11), clients, LocalTraining(), seed=bytes(32))
        engine.attacker = attacker() if looking else None
        engine.play_round()
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))


def test_it_learns_in_its_own_rounds_only_and_trains_on_its_drawings() -> None:
    net = networks.build("mnist-mlp", outputs=11)
    examples = TensorExamples(torch.zeros(40, *SHAPE), torch.arange(40) % 10)
    clients = examples.divide(np.split(np.arange(40), 4))
    engine = GanEngine(dbcl.Server(net), net, clients, LocalTraining(), fraction=0.5, seed=bytes(32))
    engine.attacker, engine.drawings = attacker(count=5), np.arange(5)
    there = 0
    for number in range(6):
        there += gan.ATTACKER in engine.cohort(number)
        engine.play_round()
    assert 0 < there < 6
    assert engine.attacker.turns == there
    assert isinstance(examples.inputs, torch.Tensor)
    assert examples.inputs[:5].equal(engine.attacker.drawings)
    assert not examples.inputs[5:].any()


def test_the_estimated_models_of_a_sketched_run_are_w(tmp_path: Path) -> None:
    config = preset("paper", model="dlg-lenet", lr=0.1)
    script = draw_batches(np.arange(1000), (50, 2, 4), seed=0)
    played = simulate_batches(config, task_of(config), script, tmp_path)
    estimated = next(iter(gan.estimated_models(played.attacker)))
    truth = played.truth.weights(0)
    for name, tensor in estimated.state_dict().items():
        assert float((tensor - truth[name]).norm() / truth[name].norm()) < 1e-3, name


def test_the_judge_knows_digits_and_what_is_none() -> None:
    digits, rng = data.load("digits"), np.random.default_rng(1)
    model = gan.judge(digits, steps=40)
    rows = torch.from_numpy(rng.permutation(4000)[:300])
    x, y = digits.x_train[rows], digits.y_train[rows]
    called = {
        "digits": (model(x).argmax(dim=1) == y).double().mean(),
        "scrambled": (model(gan.scrambled(x, 4, rng)).argmax(dim=1) == 10).double().mean(),
        "blots": (model(gan.blots(x, 7, (-0.4, 2.8), rng)).argmax(dim=1) == 10).double().mean(),
    }
    assert all(share > 0.75 for share in called.values()), called


def test_images_of_the_class_are_measured_as_such() -> None:
    digits = data.load("digits")
    of_class = torch.eye(10)[digits.y_train[digits.y_train == 4]]
    says_four = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with torch.no_grad():
        says_four[1].weight.zero_()
        says_four[1].bias.copy_(of_class[0])
    real = gan.measure(digits.x_train[digits.y_train == 4], digits, 4, says_four)
    others = gan.measure(digits.x_train[digits.y_train == 0], digits, 4, says_four)
    assert real.called == others.called == 1
    assert real.nearest > 0.7 > 0.1 > others.nearest
    assert real.psnr > others.psnr + 1
