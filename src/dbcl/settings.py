"""Settings: dataclass fields with a description, allowed values and a text parser.

The command line derives its options from these fields, so each default is defined once, in the
dataclass.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch

from dbcl.errors import ConfigError

KINDS = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}
"""Type names in error messages, singular and plural."""
MAX_FLOAT = torch.finfo(torch.float32).max

WHAT, WHO, CLIENT, HIDE, PROMISE, SERVER, LONG = (
    "What is trained",
    "Who takes part",
    "Client training",
    "What is hidden",
    "Formal guarantee",
    "Server",
    "Duration and hardware",
)
"""Titles of the option groups of `--help`."""


@dataclass(frozen=True)
class About:
    """Documentation of a setting.

    Args:
        help: Description of the setting.
        panel: Group of `--help` that lists the option.
        choices: Allowed values, each with a note that may be empty.
        unset: Meaning of None or of an empty tuple.
        read: Parser of the text form, for types without a default parser.
        option: Option name on the command line and in TOML files; empty for the field's own name.

    >>> About("The dataset", "What", choices={"digits": "in the package", "mnist": "", "lfw": ""}).sentence()
    'The dataset: digits (in the package), mnist or lfw.'
    """

    help: str
    panel: str
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unset: str = ""
    read: Callable[[str], Any] | None = None
    option: str = ""

    def sentence(self) -> str:
        """Return the description and the allowed values as one sentence."""
        *most, last = [f"{name} ({note})" if note else name for name, note in self.choices.items()] or [""]
        return f"{self.help}: {', '.join(most)} or {last}." if most else f"{self.help}."

    def shown(self, value: Any) -> str:
        """Format a value in the notation of the command line.

        >>> About("At most", "How long", unset="no end").shown(None), About("Ratio", "What").shown((2.0, 4.0))
        ('no end', '2-4')
        """
        if value is None or value == ():
            return self.unset
        if isinstance(value, tuple):
            return ",".join(value) if isinstance(value[0], str) else "-".join(f"{number:g}" for number in value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def described(
    default: Any,
    help: str,
    panel: str,
    *,
    choices: Mapping[str, str] | None = None,
    unset: str = "",
    read: Callable[[str], Any] | None = None,
    option: str = "",
) -> Any:
    """Declare a dataclass field with a default and an `About`. The default `dataclasses.MISSING`
    makes the field required.

    Args:
        default: Default value.
        help: Description of the setting.
        panel: Group of `--help` that lists the option.
        choices: Allowed values, each with a note.
        unset: Meaning of None or of an empty tuple.
        read: Parser of the text form.
        option: Option name; empty for the field's own name.

    >>> @dataclass
    ... class Config:
    ...     rounds: int = described(200, "Largest number of rounds", "How long")
    >>> Config().rounds, about(dataclasses.fields(Config)[0]).sentence()
    (200, 'Largest number of rounds.')
    """
    metadata = {"about": About(help, panel, choices or {}, unset, read, option)}
    return dataclasses.field(default=default, metadata=metadata)


def about(field: "dataclasses.Field[Any]") -> About:
    """Return the `About` of a field declared with `described`.

    >>> @dataclass
    ... class Config:
    ...     lr: float = described(0.1, "Learning rate", "Training")
    >>> about(dataclasses.fields(Config)[0]).panel
    'Training'
    """
    found: About = field.metadata["about"]
    return found


def option_name(field: "dataclasses.Field[Any]") -> str:
    """Return the option name of a setting on the command line and in TOML files."""
    return about(field).option or field.name


def described_fields(kind: type) -> "Iterator[dataclasses.Field[Any]]":
    """Iterate over the dataclass fields that are settings."""
    return (field for field in dataclasses.fields(kind) if "about" in field.metadata)


def check_settings(config: Any) -> None:
    """Convert the settings of a frozen dataclass to their types in place, and validate type,
    allowed values and size.

    Raises:
        ConfigError: A value has a wrong type, is not an allowed value, or is too large.

    >>> @dataclass(frozen=True)
    ... class Config:
    ...     rounds: int = described(200, "Largest number of rounds", "How long")
    ...     def __post_init__(self):
    ...         check_settings(self)
    >>> Config(rounds=1.5)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: rounds must be a whole number, got 1.5
    """
    hints = get_type_hints(type(config))
    for field in described_fields(type(config)):
        value, allowed = read_setting(field, getattr(config, field.name), hints[field.name]), about(field).choices
        object.__setattr__(config, field.name, value)
        if allowed and value not in allowed:
            raise ConfigError(f"{option_name(field)} must be one of {', '.join(allowed)}, got {value!r}")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not abs(number) <= MAX_FLOAT:
                raise ConfigError(f"{option_name(field)} must be finite and at most {MAX_FLOAT:.3g}, got {number}")
            if isinstance(number, int) and abs(number) >= 2**63:
                raise ConfigError(f"{option_name(field)} must be between -2^63 and 2^63, got {number}")


def read_setting(field: "dataclasses.Field[Any]", value: Any, hint: Any) -> Any:
    """Convert a setting from a file, the command line or Python to the field's type.

    A list becomes a tuple, text is parsed by `About.read`, and a NumPy scalar becomes a Python
    number. An int is accepted for a float field.

    Raises:
        ConfigError: The value does not have the field's type.
    """
    read = about(field).read
    if isinstance(value, list):
        value = tuple(value)
    elif isinstance(value, str) and read is not None:
        value = read(value)
    elif isinstance(value, np.generic):
        value = value.item()
    if not fits(value, hint):
        raise ConfigError(f"{option_name(field)} must be {_expected(hint)}, got {value!r}")
    return value


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value matches a type hint, including the elements of containers. An int
    matches float.

    >>> fits(("0", "server"), tuple[str, ...]), fits({"lr": "fast"}, Mapping[str, float]), fits(None, int | None)
    (True, False, True)
    """
    parts, kind = get_args(hint), get_origin(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(fits(value, part) for part in parts)
    if kind is tuple:
        hints = parts[:1] * len(value) if isinstance(value, tuple) and parts[-1] is ... else parts
        return isinstance(value, tuple) and len(value) == len(hints) and all(map(fits, value, hints))
    if kind is list:
        return isinstance(value, list) and all(fits(each, parts[0]) for each in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(fits(each, parts[1]) for each in value.values())
    if dataclasses.is_dataclass(hint):
        hints_of = get_type_hints(hint)
        return type(value) is hint and all(fits(getattr(value, name), each) for name, each in hints_of.items())
    return type(value) is hint or (hint is float and type(value) is int)


def read_names(text: str) -> tuple[str, ...]:
    """Split text at commas.

    >>> read_names("0, server")
    ('0', 'server')
    """
    return tuple(part.strip() for part in text.split(","))


def _expected(hint: Any) -> str:
    if get_origin(hint) is UnionType:
        return " or ".join(_expected(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        count = "" if parts[-1] is ... else f"{len(parts)} "
        return f"a list of {count}{KINDS[parts[0]][1]}"
    return KINDS[hint][0]
