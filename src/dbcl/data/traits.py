"""Label-independent properties of examples, as targets of property inference attacks."""

from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbcl import seeds
from dbcl.data.datasets import DAMAGED, data_root, load
from dbcl.errors import DataError


def thickness(images: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Estimate the stroke width in pixels: 2 * ink area / contour length = 2 sum(I) / sum(|grad
    I|).

    Each image is rescaled such that its darkest value is 0 and its brightest value is 1.

    >>> bars = np.zeros((2, 20, 20))
    >>> bars[0, :, 8:11], bars[1, :, 8:14] = 1, 1
    >>> thickness(bars).round(1)
    array([3., 6.])
    """
    flat = images.reshape(-1, *images.shape[-2:])
    low, high = flat.min(axis=(1, 2), keepdims=True), flat.max(axis=(1, 2), keepdims=True)
    ink = (flat - low) / np.where(high > low, high - low, 1)
    across, down = np.diff(ink, axis=2, append=0), np.diff(ink, axis=1, append=ink[:, -1:])
    edge = np.hypot(across, down).sum(axis=(1, 2), dtype=np.float64)
    return np.asarray(2 * ink.sum(axis=(1, 2), dtype=np.float64) / np.where(edge > 0, edge, 1), dtype=np.float64)


def stroke_width(images: NDArray[np.floating[Any]], labels: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return whether each digit has a stroke width above the median *of its class*.

    Half of every class has the property, so that the property is independent of the class.

    >>> bars = np.zeros((4, 20, 20))
    >>> for number, width in enumerate([2, 3, 6, 7]):
    ...     bars[number, :, 8 : 8 + width] = 1
    >>> stroke_width(bars, np.array([0, 0, 1, 1]))
    array([False,  True, False,  True])
    """
    width = np.concatenate([thickness(images[start : start + 5000]) for start in range(0, len(images), 5000)])
    thick = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        of_class = labels == label
        thick[of_class] = width[of_class] > np.median(width[of_class])
    return thick


PROPERTY_NAMES = {
    "digits": "thick strokes",
    "mnist": "thick strokes",
    "lfw": "Black (mostly machine-guessed labels)",
}
"""Name of the property returned by `properties_of`, by dataset."""


def properties_of(name: str, data_dir: str | PathLike[str] | None = None) -> NDArray[np.bool_]:
    """Return the target property of the training examples, in the order of
    `data.load(name).x_train`.

    The property is a thick stroke for digits and mnist. For lfw it is the column `black`, whose
    labels are mostly machine-generated.

    Args:
        name: Name of the dataset.
        data_dir: Folder of the datasets.

    >>> float(properties_of("digits").mean())
    0.5
    """
    if name in ("digits", "mnist"):
        dataset = load(name, data_dir)
        return stroke_width(dataset.x_train.numpy(), dataset.y_train.numpy())
    if name != "lfw":
        raise DataError(f"no property is known for {name!r}; choose digits, mnist or lfw")
    path = data_root(data_dir) / "lfw" / "lfw.npz"
    try:
        with open(path, "rb") as stream, np.load(stream) as file:
            black = file["black"]
    except DAMAGED as error:
        raise DataError(f"{path}: no column 'black' could be read, see docs/data.md ({error})") from error
    known = black[black >= 0]  # the loader drops the others, and its split is the first 70 % of this order
    order = seeds.permutation(bytes(32), "lfw-split", n=len(known))
    return np.asarray(known[order[: int(0.7 * len(known))]] == 1)
