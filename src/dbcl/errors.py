"""Errors that dbcl raises, all of them a `DbclError`, and safe display of untrusted text in them."""

import reprlib
from collections.abc import Sequence
from typing import Any

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:;/+*=()'")

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 16, 4
"""Writes a few of a container's values, however many and however deep they are."""


def shown(value: Any, limit: int = 60) -> str:
    """Return an untrusted value for an error or a log: short, and without control characters.

    >>> shown("loss"), shown("\\x1b[31m<b>" + 100 * "x", limit=12)
    ("'loss'", "'?(31m?b?xxxx...'")
    """
    try:
        text = str(value[: limit + 1]) if isinstance(value, str | bytes) else _SHORT.repr(value)
    except Exception:  # an untrusted object may raise anything
        text = f"a {type(value).__name__}"
    return f"'{plain(text, limit)}'"


def plain(text: str, limit: int = 200) -> str:
    """Return untrusted text, made short and harmless.

    >>> plain("the header is not JSON: \\x07", limit=30)
    'the header is not JSON: ?'
    """
    cut = text[:limit].replace("[", "(").replace("]", ")")
    return "".join(letter if letter in PLAIN else "?" for letter in cut) + ("..." if len(text) > limit else "")


def listed(head: str, problems: Sequence[str], most: int = 20) -> str:
    """Return a line and the first of the problems below it, whose number others may decide.

    >>> print(listed("this does not fit:", ["a is missing", "b is missing", "c is missing"], most=2))
    this does not fit:
      - a is missing
      - b is missing
      - and 1 more
    """
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "\n  - ".join([head, *problems[:most], *more])


class DbclError(Exception):
    """Base class of all errors of this library.

    >>> issubclass(ProtocolError, DbclError)
    True
    """


class SketchError(DbclError):
    """A sketch cannot be drawn or applied as asked."""


class PlanError(DbclError):
    """A plan does not fit a model; the message lists every problem found."""


class ProtocolError(DbclError):
    """A message, a round or a checkpoint is invalid."""


class DivergedError(ProtocolError):
    """A round failed because values are no longer finite, and for no other reason."""


class DataError(DbclError):
    """A dataset is missing, damaged or cannot be divided as asked."""


class ConfigError(DbclError):
    """The settings of a run contradict each other or name something unknown."""


class GuaranteeError(ConfigError):
    """Settings, model or data do not fit the guarantee that is asked for."""


class OutOfMemoryError(DbclError):
    """A model, its clients or their data need more memory than there is."""


class AuditError(DbclError):
    """A transcript cannot be recorded or read, or an attack cannot be mounted on it."""


class NotAttackableError(AuditError):
    """An attack does not apply to this run; nothing failed."""
