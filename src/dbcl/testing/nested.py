"""Flat keyword arguments for tests that vary one setting at a time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dbcl.config import SketchConfig

FIELDS = {field.name for field in dataclasses.fields(SketchConfig)}


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Move the fields of `SketchConfig` from keyword arguments into one argument `sketch`.

    >>> nested({"sketch": "identity-v1", "wire": "float32"})["sketch"].sketch
    'identity-v1'
    """
    own = {name: value for name, value in settings.items() if name in FIELDS}
    rest = {name: value for name, value in settings.items() if name not in FIELDS}
    return {"sketch": SketchConfig(**own), **rest} if own else rest
