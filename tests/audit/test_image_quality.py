"""How near recovered images are to the true ones."""

import base64

import pytest
import torch

from dbcl import data
from dbcl_audit import image_quality


def test_psnr_pairs_the_images_of_a_batch():
    truth = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    shuffled = truth[[2, 0, 1]]
    assert image_quality.psnr(shuffled, truth).tolist() == [image_quality.CEILING] * 3
    assert image_quality.psnr(shuffled, truth, ordered=True).max() < 20
    assert image_quality.ssim(shuffled, truth).min() > 0.99
    assert image_quality.ssim(shuffled, truth, ordered=True).max() < 0.5


def test_psnr_is_that_of_pixels_clipped_to_the_data_s_range():
    truth = torch.full((1, 1, 4, 4), 2.0)
    assert image_quality.psnr(torch.full((1, 1, 4, 4), 99.0), truth, (-2.0, 2.0)).item() == image_quality.CEILING
    assert image_quality.psnr(torch.full((1, 1, 4, 4), 1.6), truth, (-2.0, 2.0)).item() == pytest.approx(20, abs=1e-4)


def test_the_grid_is_a_image():
    digits = data.load("digits")
    x = digits.x_test[[0, 500]].double()
    rows = [("truth", x), ("attack", x + 0.1), ("other", 0 * x)]
    png = base64.b64decode(image_quality.grid_png(rows, image_quality.span(digits)))
    assert png.startswith(b"\x89PNG")
    colour = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert image_quality.grid_png([("truth", colour), ("attack", colour)]).startswith("iVBOR")
