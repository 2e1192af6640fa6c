import sys
from pathlib import Path

import pytest
import torch

from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl.objective import cross_entropies, cross_entropies_and_gradients, cross_entropy, predicted_classes


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "parameters"),
    [
        ("mnist-mlp", (1, 28, 28), 10, 199_210),
        ("mnist-cnn", (1, 28, 28), 10, 582_026),
        ("cifar-cnn", (3, 32, 32), 10, 670_434),
        ("lfw-cnn", (3, 62, 47), 1, 212_001),
        ("dlg-lenet", (1, 28, 28), 10, 13_426),
        ("dlg-lenet", (3, 32, 32), 100, 85_036),
    ],
)
def test_the_papers_networks(name: str, shape: tuple, outputs: int, parameters: int) -> None:
    model = networks.build(name, shape=shape, outputs=outputs)
    assert model(torch.zeros(2, *shape)).shape == (2, outputs)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_weights_follow_from_the_seed_and_have_the_papers_size() -> None:
    one, two, other = (networks.build("mnist-cnn", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one[0][0].weight, two[0][0].weight)
    assert not torch.equal(one[0][0].weight, other[0][0].weight)
    assert one[0][3].weight.abs().max().item() == pytest.approx((6 / 800) ** 0.5, rel=1e-3)
    assert one[1].weight.abs().max().item() == pytest.approx((3 / 1024) ** 0.5, rel=1e-3)
    assert one[1].bias.abs().max() <= (1 / 1024) ** 0.5


def test_building_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    networks.build("dlg-lenet")
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)


def test_a_factory_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\ndef make():\n    return torch.nn.Linear(3, 2)\ndef word():\n    return 'no module'\n"
    (tmp_path / "mynets.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert networks.build("mynets:make").weight.shape == (2, 3)
    assert sys.path == path
    with pytest.raises(ConfigError, match="made a str, and must make a"):
        networks.build("mynets:word")
    with pytest.raises(ConfigError, match="cannot import the model 'mynets:none'"):
        networks.build("mynets:none")
    with pytest.raises(ConfigError, match=r"cannot import the model 'nowhere\.at\.all:make'"):
        networks.build("nowhere.at.all:make")


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model 'resnet'; choose mnist-mlp"):
        networks.build("resnet")
    with pytest.raises(ConfigError, match=r"cannot take examples of shape \(1, 4, 4\)"):
        networks.build("mnist-cnn", shape=(1, 4, 4))


def test_one_output_is_a_yes_or_no_task() -> None:
    logits, labels = torch.tensor([[2.0], [-3.0]]), torch.tensor([1, 0])
    assert predicted_classes(logits).tolist() == [1, 0]
    assert cross_entropy(logits, labels) < 0.1 < cross_entropy(-logits, labels)


@pytest.mark.parametrize("outputs", [1, 4])
def test_the_loss_is_the_mean_of_the_losses_and_the_gradient_is_autograds(outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, outputs, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.randint(0, max(2, outputs), (6,), generator=generator)
    each = cross_entropies(logits, labels)
    torch.testing.assert_close(each.mean(), cross_entropy(logits, labels))
    (expected,) = torch.autograd.grad(each.sum(), logits)
    again, gradients = cross_entropies_and_gradients(logits.detach(), labels)
    torch.testing.assert_close(again, each.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-14)
    in_a_grid = cross_entropies_and_gradients(logits.detach().view(2, 3, outputs), labels.view(2, 3))
    assert torch.equal(in_a_grid[0].flatten(), again)
    assert torch.equal(in_a_grid[1].flatten(0, 1), gradients)


def test_labels_may_be_probabilities() -> None:
    logits, soft = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[0.2, 0.5, 0.3]])
    by_class = torch.cat([cross_entropies(logits, torch.tensor([label])) for label in range(3)])
    torch.testing.assert_close(cross_entropies(logits, soft), (soft @ by_class))
    torch.testing.assert_close(cross_entropy(logits, soft), (soft @ by_class)[0])
    logit, probability = torch.tensor([[2.0]]), torch.tensor([0.3])
    no, yes = (cross_entropies(logit, torch.tensor([label])) for label in (0, 1))
    torch.testing.assert_close(cross_entropies(logit, probability), 0.7 * no + 0.3 * yes)
