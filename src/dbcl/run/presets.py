"""A run's settings in a TOML file and back, and the presets that ship with dbcl."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from dbcl.errors import ConfigError
from dbcl.run.config import RunConfig
from dbcl.run.settings import about, check_type

MEANINGS = {
    "blind": "sketch and secret noise",
    "veil": "secret noise, no sketch",
    "private": "differential privacy for each of 1000 clients",
    "private-example": "the same for each example, of 10 clients",
    "paper": "a sketch that a client with a memory undoes",
    "plain": "nothing is hidden",
}
PRESETS = tuple(MEANINGS)
"""The presets that ship with dbcl; the first one is the default of the commands."""


def to_toml(config: RunConfig) -> str:
    """Write a configuration as a TOML file.

    >>> from_toml(to_toml(RunConfig(ratio=(2.0, 4.0)))).ratio
    (2.0, 4.0)
    """
    values = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def from_toml(text: str, **overrides: Any) -> RunConfig:
    """Read a configuration; `overrides` win over the file, and what neither names has its default.

    `cover`, `ratio` and `transcripts` may also be given as the text that the command line takes.

    >>> from_toml('lr = 0.1', rounds=7, ratio="2-4").ratio
    (2.0, 4.0)
    """
    return RunConfig(**{**_values(_parsed(text)), **_values(overrides)})


def read_toml(path: Path, **overrides: Any) -> RunConfig:
    """Read a configuration from a file, whose name stands before what is wrong in it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     _ = Path(name, "mine.toml").write_text("lr = 0.1")
    ...     read_toml(Path(name, "mine.toml"), rounds=7).lr
    0.1
    """
    try:
        values = _values(_parsed(path.read_text("utf-8")))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return RunConfig(**{**values, **_values(overrides)})


def preset(name: str, **overrides: Any) -> RunConfig:
    """A preset by name, or a TOML file of your own by its path.

    >>> preset("paper").veil, preset("plain").sketch
    (0.0, 'identity-v1')
    """
    if name in PRESETS:
        return from_toml(_preset_text(name), **overrides)
    try:
        return read_toml(Path(name), **overrides)
    except OSError as error:
        raise ConfigError(
            f"no preset {name!r}: neither one of {', '.join(PRESETS)} nor a file ({error.strerror})"
        ) from None


def explain(name: str) -> str:
    """A setting in full: what it decides, its choices, its default, and the presets that set something else.

    >>> explain("lanes")
    'Among how many complementary sketches ... Default: the ratio, rounded; preset paper: 1.'
    """
    field = next(field for field in dataclasses.fields(RunConfig) if field.name == name)
    setting = about(field)
    default = setting.shown(field.default)
    spoken = f"Default: {default}" if field.default in (None, ()) else f"Default {default}"
    others: dict[str, list[str]] = {}
    for each in PRESETS:
        value = setting.shown(getattr(preset(each), name))
        if value != default:
            others.setdefault(value, []).append(each)
    listed = [f"; preset{'s' * (len(names) > 1)} {', '.join(names)}: {value}" for value, names in others.items()]
    return f"{setting.sentence()} {spoken}{''.join(listed)}."


def _preset_text(name: str) -> str:
    return (resources.files("dbcl") / "presets" / f"{name}.toml").read_text("utf-8")


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with their texts read and their types checked."""
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    unknown = sorted(set(given) - set(fields))
    if "fixed_secrets" in unknown:
        raise ConfigError("fixed_secrets is gone since dbcl 0.2: with a seed all is fixed, without one nothing is")
    if unknown:
        near = [each for name in unknown for each in get_close_matches(name, fields, 1)]
        remedy = f"did you mean {', '.join(near)}?" if near else "`dbcl train --help` explains those that there are"
        raise ConfigError(f"unknown settings: {', '.join(unknown)}; {remedy}")
    hints, values = get_type_hints(RunConfig), dict(given)
    for name, value in given.items():
        read = about(fields[name]).read
        if isinstance(value, list):
            values[name] = tuple(value)
        elif isinstance(value, str) and read is not None:
            values[name] = read(value)
        check_type(name, values[name], hints[name])
    return values


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not a TOML file: {error}") from error


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # what JSON escapes, TOML reads
    return repr(value)
