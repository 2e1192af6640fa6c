"""Run settings in TOML files, and the presets included in dbcl."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from dbcl.errors import ConfigError, DbclError, GuaranteeError
from dbcl.files import user_path
from dbcl.settings import about, read_setting
from dbcl.simulation.config import HINTS, OPTIONS, RunConfig

MEANINGS = {
    "guaranteed": "differential privacy for each example of 10 parties, against everyone, the server too",
    "blind": "sketch and secret noise",
    "veil": "secret noise, no sketch",
    "private": "differential privacy for each of 1000 clients",
    "private-example": "the same as guaranteed, with a trusted server",
    "paper": "a sketch that a client with a memory undoes",
    "plain": "nothing is hidden",
}
PRESETS = tuple(MEANINGS)
"""Names of the included presets."""
DEFAULT = "guaranteed"
"""Default preset of `dbcl train` and `dbcl.simulate`."""


def to_toml(config: RunConfig) -> str:
    """Format settings as TOML.

    >>> from_toml(to_toml(RunConfig.from_options(ratio=(2.0, 4.0)))).sketch.ratio
    (2.0, 4.0)
    """
    values = {name: value for name, value in config.options().items() if value is not None}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def from_toml(text: str, **overrides: Any) -> RunConfig:
    """Parse settings from TOML. Missing settings have their default values.

    `coverage`, `ratio` and `transcripts` may also have the text form of the command line.

    Args:
        text: The TOML text.
        overrides: Settings by option name that replace those in the text.

    >>> from_toml('lr = 0.1', rounds=7, ratio="2-4").sketch.ratio
    (2.0, 4.0)
    """
    return RunConfig.from_options(**{**_known(_parsed(text)), **_known(overrides)})


def read_toml(path: Path, **overrides: Any) -> RunConfig:
    """Read settings from a TOML file. Error messages contain the file name.

    Args:
        path: The file.
        overrides: Settings by option name that replace those in the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     _ = Path(name, "mine.toml").write_text("lr = 0.1")
    ...     read_toml(Path(name, "mine.toml"), rounds=7).lr
    0.1
    """
    try:
        values = _known(_parsed(path.read_text("utf-8")))
        if not overrides:
            return RunConfig.from_options(**values)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error}") from None
    except DbclError as error:
        raise type(error)(f"{path}: {error}") from None
    return RunConfig.from_options(**{**values, **_known(overrides)})


@contextmanager
def hint_of_default(name: object | None) -> Iterator[None]:
    """Add a hint to an error if the default preset was used because no preset was named.

    >>> with hint_of_default(None):
    ...     preset("guaranteed", fraction=0.1)
    Traceback (most recent call last):
        ...
    dbcl.errors.GuaranteeError: with `privacy_unit=example` ...; no preset was named, so this is guaranteed, ...
    """
    try:
        yield
    except GuaranteeError as error:
        if name is not None:
            raise
        raise GuaranteeError(
            f"{error}; no preset was named, so this is {DEFAULT}, which guarantees privacy for every example: without "
            "a guarantee name blind, veil, paper or plain"
        ) from None


def preset(name: str, **overrides: Any) -> RunConfig:
    """Return the settings of an included preset or of a TOML file.

    Args:
        name: Name of the preset, or path of the file.
        overrides: Settings by option name that replace those of the preset.

    >>> preset("paper").sketch.veil, preset("plain").sketch.sketch
    (0.0, 'identity-v1')
    """
    if name in PRESETS:
        return from_toml(_preset_text(name), **overrides)
    try:
        return read_toml(user_path(name), **overrides)
    except OSError as error:
        raise ConfigError(
            f"no preset {name!r}: neither one of {', '.join(PRESETS)} nor a file ({error.strerror})"
        ) from None


def explain(name: str) -> str:
    """Describe a setting: description, allowed values, default, and presets with other values.

    >>> explain("ema_decay")
    'Decay of the running mean ... Default 0.8; presets guaranteed, private, ...: 0.95; presets paper, plain: 0.'
    """
    field = OPTIONS[name]
    setting, none = about(field), field.default is MISSING
    default = setting.shown(None if none else field.default)
    spoken = f"Default: {default}" if none or field.default in (None, ()) else f"Default {default}"
    others: dict[str, list[str]] = {}
    for each in PRESETS:
        found = preset(each).options()[name]
        value = default if found is None else setting.shown(found)
        if value != default:
            others.setdefault(value, []).append(each)
    listed = [f"; preset{'s' * (len(names) > 1)} {', '.join(names)}: {value}" for value, names in others.items()]
    said = f"{spoken}{''.join(listed)}" if default else "".join(listed).removeprefix("; ").capitalize()
    return f"{setting.sentence()} {said}." if said else setting.sentence()


def _preset_text(name: str) -> str:
    return (resources.files("dbcl") / "presets" / f"{name}.toml").read_text("utf-8")


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to the types of their fields. Raise `ConfigError` for an unknown name or a
    wrong type.
    """
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        near = [each for name in unknown for each in get_close_matches(name, OPTIONS, 1)]
        remedy = f"did you mean {', '.join(near)}?" if near else "`dbcl train --help` lists the settings"
        raise ConfigError(f"unknown settings: {', '.join(unknown)}; {remedy}")
    return {
        name: None if value is None else read_setting(OPTIONS[name], value, HINTS[name])
        for name, value in given.items()
    }


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
