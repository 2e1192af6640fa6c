"""Initial weights that nobody can guess."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from dbcl.errors import ConfigError
from dbcl.flower import secret_weights, weights


def made(seed: int | None = None) -> Tensor:
    with secret_weights(seed):
        return nn.Linear(300, 40).weight.detach()


def test_pytorchs_own_seeds_have_32_bits() -> None:
    """Why there is `secret_weights` at all; where this fails, PyTorch has mended it."""
    drawn = [torch.rand(4, generator=torch.Generator().manual_seed(7 + high * 2**32)) for high in (0, 1, 2**20)]
    assert all(torch.equal(drawn[0], each) for each in drawn)


def test_every_network_has_its_own_and_an_experiment_can_be_repeated() -> None:
    secret = [made() for _ in range(3)]
    assert all((one == two).float().mean() < 0.001 for one, two in pairwise(secret))
    assert torch.equal(made(3), made(3))
    torch.manual_seed(3)
    assert torch.equal(made(3), nn.Linear(300, 40).weight)


def test_what_is_drawn_elsewhere_stays_as_it_is() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    made()
    assert torch.equal(torch.rand(4), expected)


def test_every_part_of_the_seed_counts_and_the_numbers_are_uniform() -> None:
    def drawn(seed: bytes) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            weights._seed(seed)
            return torch.rand(20_000)

    first = drawn(bytes(32))
    assert torch.equal(first, drawn(bytes(32)))
    for place in (0, 15, 31):
        other = bytearray(32)
        other[place] = 1
        assert (first == drawn(bytes(other))).float().mean() < 0.001
    assert abs(first.mean() - 0.5) < 0.01  # five standard deviations
    assert abs(first.var() - 1 / 12) < 0.003


def test_a_generator_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HEADER", weights.HEADER + 8)
    with pytest.raises(ConfigError, match="keeps its generator in another form than dbcl knows"):
        made()
