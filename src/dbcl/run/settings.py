"""What a setting is: a dataclass field that carries its meaning, its choices and the way to read its text.

The command line makes its options from these fields, so a default is written once, in the dataclass.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dbcl.errors import ConfigError

KINDS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers"), str: ("text", "texts")}
"""What a type is called in an error, one and several."""


@dataclass(frozen=True)
class About:
    """What a person needs to know about a setting.

    `panel` is the group in which `--help` shows it. `choices` maps each allowed value to a note, which may be empty.
    `unset` says what None, or no value, means. `read` turns text into the value where the type alone does not say how.

    >>> About("The dataset", "What", choices={"digits": "in the package", "mnist": "", "lfw": ""}).sentence()
    'The dataset: digits (in the package), mnist or lfw.'
    """

    help: str
    panel: str
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unset: str = ""
    read: Callable[[str], Any] | None = None

    def sentence(self) -> str:
        """What the setting decides, with its choices."""
        *most, last = [f"{name} ({note})" if note else name for name, note in self.choices.items()] or [""]
        return f"{self.help}: {', '.join(most)} or {last}." if most else f"{self.help}."

    def shown(self, value: Any) -> str:
        """A value as a person writes it, or what it means to have none.

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
) -> Any:
    """Make a dataclass field with a default and an `About`.

    >>> @dataclass
    ... class Config:
    ...     rounds: int = described(200, "At most so many rounds", "How long")
    >>> Config().rounds, about(dataclasses.fields(Config)[0]).sentence()
    (200, 'At most so many rounds.')
    """
    return dataclasses.field(default=default, metadata={"about": About(help, panel, choices or {}, unset, read)})


def about(field: "dataclasses.Field[Any]") -> About:
    """The description that `described` gave to a field.

    >>> @dataclass
    ... class Config:
    ...     lr: float = described(0.1, "Learning rate", "Training")
    >>> about(dataclasses.fields(Config)[0]).panel
    'Training'
    """
    found: About = field.metadata["about"]
    return found


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that does not fit a field's type; a whole number fits where a number is expected.

    >>> check_type("lr", 1, float)
    >>> check_type("rounds", 1.5, int | None)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: rounds must be a whole number, got 1.5
    """
    if not fits(value, hint):
        raise ConfigError(f"{name} must be {_expected(hint)}, got {value!r}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, and so is all that it holds; a whole number is a number.

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


def _expected(hint: Any) -> str:
    if get_origin(hint) is UnionType:
        return " or ".join(_expected(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        count = "" if parts[-1] is ... else f"{len(parts)} "
        return f"a list of {count}{KINDS[parts[0]][1]}"
    return KINDS[hint][0]
