"""Every error that dbcl raises on purpose is a `DbclError`."""


class DbclError(Exception):
    """The base of all errors of this library.

    >>> issubclass(ProtocolError, DbclError)
    True
    """


class SketchError(DbclError):
    """A sketch cannot be drawn or applied as asked."""


class PlanError(DbclError):
    """A plan does not fit a model; the message lists every problem found."""


class ProtocolError(DbclError):
    """A message, a round or a checkpoint is not what it must be."""


class DataError(DbclError):
    """A dataset is missing, damaged or cannot be divided as asked."""


class ConfigError(DbclError):
    """The settings of a run contradict each other or name something unknown."""


class AuditError(DbclError):
    """A transcript cannot be recorded or read, or an attack cannot be mounted on it."""
