"""Published properties of the scattering transform: stability, invariance, covariance, and where its energy lies."""

import math

import pytest
import torch
from torch import Tensor

from dbcl.errors import ConfigError
from dbcl.features import ImageFeatures, Scattering

SIZE = 32


def textures(count: int = 4) -> Tensor:
    """Smooth random images, whose energy lies at low frequencies as that of photographs does."""
    noise = torch.randn(count, 1, 2 * SIZE, 2 * SIZE, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.fft.fftfreq(2 * SIZE)[:, None], torch.fft.fftfreq(2 * SIZE)[None]
    decay = 1 / (0.05 + torch.hypot(rows, columns))
    images: Tensor = torch.fft.ifft2(torch.fft.fft2(noise) * decay).real
    return images


def norms(features: Tensor) -> Tensor:
    return features.flatten(1).norm(dim=1)


@pytest.mark.parametrize(("scales", "angles"), [(1, 4), (2, 8), (3, 6)])
def test_the_filters_leave_no_frequency_out_and_amplify_none(scales: int, angles: int) -> None:
    """Littlewood and Paley: |phi|^2 + 1/2 sum |psi|^2 over both signs of the frequency is at most 1."""
    made = Scattering(SIZE, SIZE, scales=scales, angles=angles)
    squares = made.psi.square().sum(dim=(0, 1))
    mirrored = squares.flip(0, 1).roll((1, 1), (0, 1))
    covered = made.phi.square() + (squares + mirrored) / 2
    assert covered.max() <= 1.15
    rows, columns = (torch.fft.fftfreq(length).abs() for length in covered.shape)
    inside = torch.hypot(rows[:, None], columns[None]) < 0.4  # all but the corners, where images have little
    assert covered[inside].min() > 0.05


def test_wavelets_do_not_see_a_constant() -> None:
    features = Scattering(SIZE, SIZE)(torch.full((1, 1, SIZE, SIZE), 3.0))
    torch.testing.assert_close(features[:, :, 0], torch.full_like(features[:, :, 0], 3.0))
    assert features[:, :, 1:].abs().max() < 1e-5


def test_features_of_two_images_are_no_further_apart_than_the_images() -> None:
    one, other = textures()[:2, :, :SIZE, :SIZE], textures()[2:, :, :SIZE, :SIZE]
    made, cell = Scattering(SIZE, SIZE), 4  # a coefficient stands for a block of 4 x 4 pixels
    apart = norms(made(one) - made(other)) * cell
    assert (apart <= 1.2 * norms(one - other)).all()
    assert (apart >= 0.3 * norms(one - other)).all()


def test_a_small_shift_changes_features_little_and_pixels_much() -> None:
    images, made = textures(), Scattering(SIZE, SIZE, scales=3)
    still, moved = images[..., 16:48, 16:48], images[..., 16:48, 17:49]
    features = norms(made(still) - made(moved)) / norms(made(still))
    pixels = norms(still - moved) / norms(still)
    assert (features < pixels / 2).all()


def test_a_quarter_turn_of_an_image_moves_the_energy_to_the_angles_half_way_on() -> None:
    image, made = textures(1)[..., :SIZE, :SIZE], Scattering(SIZE, SIZE, scales=1)
    plain, turned = (made(each)[0, 0, 1:].square().sum(dim=(1, 2)) for each in (image, image.rot90(1, (2, 3))))
    torch.testing.assert_close(turned.roll(4), plain, rtol=0.05, atol=0)
    assert plain.max() > 1.2 * plain.min()


def test_the_second_order_holds_less_energy_than_the_first() -> None:
    energies = Scattering(SIZE, SIZE)(textures()[..., :SIZE, :SIZE]).square().sum(dim=(0, 1, 3, 4))
    assert energies[1:17].sum() > 2 * energies[17:].sum() > 0


def test_it_is_the_convolution_that_it_says() -> None:
    """One coefficient of order 1, written out in the space of pixels."""
    image, made = textures(1)[..., :SIZE, :SIZE].double(), Scattering(SIZE, SIZE).double()
    left, right, top, bottom = made._padding
    padded = torch.nn.functional.pad(image, (left, right, top, bottom), mode="reflect")[0, 0]
    spectrum = torch.fft.fft2(padded)
    modulus = torch.fft.ifft2(spectrum * made.psi[0, 3]).abs()
    smooth = torch.fft.ifft2(torch.fft.fft2(modulus) * made.phi).real[::4, ::4]
    torch.testing.assert_close(made(image)[0, 0, 1 + 3], smooth[1:9, 1:9], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 62, 47)])
def test_features_of_images_are_normalised_in_each_image_by_itself(shape: tuple[int, int, int]) -> None:
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    made = ImageFeatures(shape)
    whole = made(images)
    assert whole.shape == (3, 81 * shape[0], math.ceil(shape[1] / 4), math.ceil(shape[2] / 4))
    torch.testing.assert_close(made(images[1:2]), whole[1:2])
    assert whole.unflatten(1, (-1, 3)).mean(dim=(2, 3, 4)).abs().max() < 1e-4
    assert 0.3 < whole.square().mean().sqrt() <= 1
    assert not list(made.parameters())
    assert made.state_dict() == {}


@pytest.mark.parametrize("wrong", [{"height": 4}, {"scales": 0}, {"angles": 0}])
def test_what_cannot_be_scattered_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="scattering takes"):
        Scattering(**{"height": 28, "width": 28, **wrong})  # type: ignore[arg-type]
