"""Exceptions of dbcl, all derived from `DbclError`, and safe display of untrusted text in messages."""

import reprlib
from collections.abc import Sequence
from typing import Any

PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:;/+*=()'")

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 16, 4
"""`Repr` with limits on the depth and the number of items shown for a container."""


def shown(value: Any, limit: int = 60) -> str:
    """Format an untrusted value for an error message or a log, truncated and without control
    characters.

    >>> shown("loss"), shown("\\x1b[31m<b>" + 100 * "x", limit=12)
    ("'loss'", "'?(31m?b?xxxx...'")
    """
    try:
        text = str(value[: limit + 1]) if isinstance(value, str | bytes) else _SHORT.repr(value)
    except Exception:  # an untrusted object may raise anything
        text = f"a {type(value).__name__}"
    return f"'{plain(text, limit)}'"


def plain(text: str, limit: int = 200) -> str:
    """Truncate untrusted text and replace its control characters.

    >>> plain("the header is not JSON: \\x07", limit=30)
    'the header is not JSON: ?'
    """
    cut = text[:limit].replace("[", "(").replace("]", ")")
    return "".join(letter if letter in PLAIN else "?" for letter in cut) + ("..." if len(text) > limit else "")


def listed(head: str, problems: Sequence[str], most: int = 20) -> str:
    """Format a heading and a list of problems, truncated to `most` entries. Untrusted input may
    decide the number of problems.

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
    """A sketch cannot be drawn or applied with the given arguments."""


class PlanError(DbclError):
    """A plan does not fit a model; the message lists every problem found."""


class ProtocolError(DbclError):
    """A message, a round or a checkpoint is invalid."""


class DivergedError(ProtocolError):
    """A round failed only because values are not finite."""


class DataError(DbclError):
    """A dataset is missing, damaged, or cannot be divided as configured."""


class ConfigError(DbclError):
    """The settings of a run contradict each other or name something unknown."""


class GuaranteeError(ConfigError):
    """The settings, the model or the data are incompatible with the configured privacy guarantee."""


class OutOfMemoryError(DbclError):
    """The model, its clients or their data need more memory than is available."""


class AuditError(DbclError):
    """A transcript cannot be recorded or read, or an attack cannot run on it."""


class NotAttackableError(AuditError):
    """An attack does not apply to this run. Not a failure of the attack."""
