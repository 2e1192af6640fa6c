from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from dbcl import data
from dbcl.data import traits
from dbcl.errors import DataError


def test_dilated_digits_are_thick_and_eroded_ones_thin() -> None:
    digits = data.load("digits")
    images = (digits.x_train[::20, 0] * digits.std + digits.mean).numpy()
    labels = digits.y_train[::20].numpy()
    width = traits.thickness(images)
    assert (traits.thickness(ndimage.grey_dilation(images, size=(1, 3, 3))) > width + 0.5).all()
    both = np.concatenate([ndimage.grey_erosion(images, size=(1, 2, 2)), ndimage.grey_dilation(images, size=(1, 2, 2))])
    thick = traits.stroke_width(both, np.tile(labels, 2))
    assert (thick == (np.arange(len(both)) >= len(images))).mean() > 0.9


def test_thickness_does_not_depend_on_the_scale_of_the_pixels() -> None:
    digits = data.load("digits")
    raw = (digits.x_train[:50] * digits.std + digits.mean).numpy()
    np.testing.assert_allclose(traits.thickness(digits.x_train[:50].numpy()), traits.thickness(raw), rtol=1e-4)
    assert traits.thickness(np.zeros((1, 4, 4))) == 0


def test_stroke_width_says_nothing_about_the_class() -> None:
    thick, labels = traits.properties_of("digits"), data.load("digits").y_train.numpy()
    assert all(abs(thick[labels == label].mean() - 0.5) < 0.01 for label in range(10))


def test_lfw_properties_follow_the_loader(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    black = rng.integers(-1, 2, size=100).astype(np.int8)
    images = np.broadcast_to((black == 1)[:, None, None, None] * 255, (100, 4, 4, 3)).astype(np.uint8)
    (tmp_path / "lfw").mkdir()
    np.savez(tmp_path / "lfw" / "lfw.npz", images=images, gender=np.arange(100, dtype=np.uint8) % 2, black=black)
    bright = data.load("lfw", tmp_path).x_train.amax(dim=(1, 2, 3)) > 0
    found = traits.properties_of("lfw", tmp_path)
    assert 0 < found.sum() < len(found)
    assert np.array_equal(found, bright.numpy())


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="choose digits, mnist or lfw"):
        traits.properties_of("cifar10")
    with pytest.raises(DataError, match=r"lfw\.npz: no column 'black'"):
        traits.properties_of("lfw", tmp_path)
