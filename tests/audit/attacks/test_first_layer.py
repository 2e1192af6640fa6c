"""A dense first layer, solved: exact after as many rounds as the ratio, and refused where nothing can be read."""

import pytest
import torch
from torch import Tensor

import dbcl
from audit.attacks.digits import DIGITS, SPAN, digit, round_of
from dbcl.errors import ConfigError
from dbcl.model import networks
from dbcl_audit import image_quality
from dbcl_audit.attacks.first_layer import FirstLayer, solve_first_layer
from dbcl_audit.attacks.gradients import gradients


def seen_layers(rounds: int, x: Tensor, y: Tensor) -> list[FirstLayer]:
    seen = []
    for seed in range(rounds):
        _, broadcast, local = round_of("mnist-mlp", seed)
        found = gradients(local, x, y)
        seen.append(FirstLayer(found["1.weight"], found["1.bias"], broadcast.sketches()["1.weight"]))
    return seen


def test_a_dense_first_layer_is_read_off_from_two_rounds():
    x, y = digit(0)
    one = solve_first_layer(seen_layers(1, x, y), DIGITS.shape, box=SPAN)
    two = solve_first_layer(seen_layers(2, x, y), DIGITS.shape, box=SPAN)
    assert image_quality.psnr(one[None], x, SPAN).item() > 20
    assert image_quality.psnr(two[None], x, SPAN).item() > 100


def test_a_first_layer_without_a_sketch_needs_one_round():
    x, y = digit(0)
    model = networks.build("mnist-mlp").double()
    found = gradients(model, x, y)
    image = solve_first_layer(
        [FirstLayer(found["1.weight"], found["1.bias"], dbcl.sketch.Identity(784))], DIGITS.shape, box=SPAN
    )
    assert image_quality.psnr(image[None], x, SPAN).item() > 100


def test_a_dead_first_layer_is_refused():
    with pytest.raises(ConfigError, match="no unit was active"):
        solve_first_layer([FirstLayer(torch.zeros(2, 3), torch.zeros(2), dbcl.sketch.Identity(3))], (3,), box=(0, 1))
