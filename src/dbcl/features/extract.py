"""One-time extraction of the features of a set of examples."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from dbcl.data import Examples, TensorExamples
from dbcl.data.trees import call, join
from dbcl.errors import DataError
from dbcl.files import make_folder, user_path, write_atomic

log = logging.getLogger(__name__)

BATCH = 50
"""Number of examples per feature batch, chosen such that intermediate values fit the cache."""
Features = Callable[..., Any]


@torch.no_grad()
def extract(
    features: Features,
    examples: Examples,
    *,
    cache: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TensorExamples:
    """Replace the inputs of examples by their features, in memory.

    Args:
        features: A frozen network or any function from inputs to features, called like a model.
        examples: The examples.
        cache: Folder in which features are cached, keyed by a digest of the examples and the
            features. Requires a `version` attribute that identifies the computation, as
            `ImageFeatures` has.
        progress: Callback with the number of processed examples and their total number.

    Returns:
        Examples with features as inputs.

    >>> from dbcl.data import examples_of
    >>> made = extract(nn.Flatten(), examples_of((torch.ones(5, 2, 3), torch.zeros(5))))
    >>> made.inputs.shape
    torch.Size([5, 6])
    """
    place = _place(features, examples, cache)
    if place is not None and place.exists():
        read = safetensors.torch.load_file(place)
        progress(len(examples), len(examples))
        return TensorExamples(read["features"], _targets(examples))
    if isinstance(features, nn.Module):
        features = features.eval()
    found = []
    for start in range(0, len(examples), BATCH):
        batch = examples.take(np.arange(start, min(start + BATCH, len(examples))))
        made = call(features, batch.inputs)  # type: ignore[arg-type]
        _check(made, batch.targets)
        found.append((made, batch.targets))
        progress(min(start + BATCH, len(examples)), len(examples))
    whole = TensorExamples(*join(found))
    if place is not None and isinstance(whole.inputs, Tensor):
        try:
            make_folder(place.parent)
            write_atomic(place, safetensors.torch.save({"features": whole.inputs}))
        except OSError as error:  # a folder that cannot be written costs time, and nothing else
            log.warning("features are not kept in %s: %s", place.parent, error)
    return whole


def _check(made: Any, targets: Any) -> None:
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, tuple) else [made]
    if not all(isinstance(each, Tensor) for each in parts):
        raise DataError(f"features must be tensors, or a tuple or dictionary of them, got {type(made).__name__}")
    count = len(targets) if isinstance(targets, Tensor) else None
    if count is not None and any(len(each) != count for each in parts):
        raise DataError(f"features must have one row for each example, got {[len(each) for each in parts]} for {count}")


def _place(features: Features, examples: Examples, cache: str | Path | None) -> Path | None:
    version = getattr(features, "version", None)
    if cache is None or not isinstance(version, str):
        return None
    name = hashlib.sha256(version.encode() + b"|" + examples.digest()).hexdigest()[:32]
    return user_path(cache) / f"{name}.safetensors"


def _targets(examples: Examples) -> Any:
    starts = range(0, len(examples), BATCH)
    return join([examples.take(np.arange(start, min(start + BATCH, len(examples)))).targets for start in starts])
