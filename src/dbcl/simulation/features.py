"""Public features in a run: feature extraction for its examples, and built-in heads."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from dbcl.data import EMBEDDED, Dataset, Examples, TensorExamples
from dbcl.errors import ConfigError
from dbcl.features import ImageFeatures, extract
from dbcl.features.extract import Features
from dbcl.model import networks
from dbcl.model.networks import Shape
from dbcl.simulation.config import SCATTERING, RunConfig
from dbcl.user_code import made

Progress = Callable[[int, int], None]
Maker = Callable[[int], nn.Module]
_EMBEDDED: dict[str, tuple[TensorExamples, TensorExamples]] = {}
"""Features of the embedded dataset, cached in memory. Features of other datasets are cached in
files.
"""


def no_progress(done: int, total: int) -> None:
    """Progress callback that does nothing."""


def on_features(
    config: RunConfig,
    train: Examples,
    held_out: Examples,
    images: Dataset | None,
    features: Features | None = None,
    *,
    cache: str | Path | None = None,
    progress: Progress = no_progress,
) -> tuple[Examples, Examples, Maker | None]:
    """Extract the features of both sets of examples.

    Args:
        config: Settings of the run.
        train: Training examples.
        held_out: Held-out examples.
        images: The same examples as images; None for other data.
        features: A frozen network or a function of inputs that overrides the settings.
        cache: Folder in which features of images are cached.
        progress: Callback with the number of processed examples and their total number.

    Returns:
        Both sets with features as inputs, and a function that makes the head if the settings name a
            built-in head.
    """
    if features is None and config.feature_map == SCATTERING:
        if images is not None:  # pixels as they are: no statistic of the training examples
            train, held_out = _pixels(images)
        features = ImageFeatures(_image_shape(train))
    elif features is None:
        assert config.feature_map is not None
        features = made(config.feature_map, "features")
    kept = features.version if config.data == EMBEDDED and isinstance(features, ImageFeatures) else ""
    if kept in _EMBEDDED:
        made_train, made_held_out = _EMBEDDED[kept]
    else:
        count, total = len(train), len(train) + len(held_out)
        made_train = extract(features, train, cache=cache, progress=lambda done, _: progress(done, total))
        made_held_out = extract(features, held_out, cache=cache, progress=lambda done, _: progress(count + done, total))
        if kept:
            _EMBEDDED[kept] = made_train, made_held_out
    head = _head(config.model, made_train, images) if config.model in networks.SCATTER else None
    return made_train, made_held_out, head


def input_shape(model: str, shape: Shape) -> Shape:
    """Return the input shape of a network: the image's shape, or the shape of its scattering
    features.

    >>> input_shape("scatter-linear", (1, 28, 28)), input_shape("mnist-mlp", (1, 28, 28))
    ((81, 7, 7), (1, 28, 28))
    """
    if model not in networks.SCATTER:
        return shape
    channels, height, width = ImageFeatures(shape).shape
    return channels, height, width


def _pixels(dataset: Dataset) -> tuple[Examples, Examples]:
    """Return the examples of a dataset with pixels in [0, 1]."""
    pairs = (dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)
    train, test = (TensorExamples(x * dataset.std + dataset.mean, y) for x, y in pairs)
    return train, test


def _image_shape(examples: Examples) -> tuple[int, int, int]:
    inputs = examples.first(1).inputs
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
        raise ConfigError(
            "scattering is for images: inputs of shape (n, channels, height, width) in floating point; for other data "
            "give `features=module:factory`, or the features themselves as data"
        )
    channels, height, width = inputs.shape[1:]
    return channels, height, width


def _head(name: str, train: Examples, images: Dataset | None) -> Maker:
    """Return a function that makes a built-in head for the given features."""
    batch = train.first(len(train))
    if not isinstance(batch.inputs, Tensor) or batch.inputs.ndim != 4 or not isinstance(batch.targets, Tensor):
        raise ConfigError(f"{name} is for scattering features and classes; give `model=module:factory` of your own")
    channels, height, width = batch.inputs.shape[1:]
    outputs = int(batch.targets.max()) + 1 if images is None else images.outputs
    return lambda seed: networks.build(name, shape=(channels, height, width), outputs=outputs, seed=seed)
