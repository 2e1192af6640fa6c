"""Errors of user code, reported as one sentence with function and line instead of a traceback."""

import contextlib
import traceback
from collections.abc import Iterator, Mapping

from dbcl.errors import ConfigError, DbclError, OutOfMemoryError
from dbcl.simulation.config import RunConfig
from dbcl.simulation.task import code_of
from dbcl.user_code import out_of_memory, short


@contextlib.contextmanager
def user_code(config: RunConfig, then: str = "") -> Iterator[None]:
    """Report an error of the user code named by the settings in one sentence, with function and
    line.

    Errors of dbcl and of the operating system are unchanged, and so are all errors if the settings
    name no user code.

    Args:
        config: Settings of the run.
        then: Text appended to the error message.

    >>> import torch
    >>> with user_code(RunConfig(loss="torch.nn.functional:mse_loss"), then="; mend it"):
    ...     torch.nn.functional.mse_loss(None, None)
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: torch.nn.functional:mse_loss failed: AttributeError: ... line ...; mend it
    """
    code = code_of(config)
    try:
        yield
    except (DbclError, OSError):
        raise
    except (Exception, SystemExit) as error:
        if not code or out_of_memory(error):
            raise
        raise ConfigError(f"{_blame(error, code)}{then}") from error


def _blame(error: BaseException, code: Mapping[str, str]) -> str:
    modules = {value.partition(":")[0] for value in code.values()}
    steps = list(traceback.walk_tb(error.__traceback__))
    own = [step for step in steps if step[0].f_globals.get("__name__") in modules]
    frame, line = (own or steps)[-1]
    what = f"{type(error).__name__}: {short(error)} ({frame.f_code.co_filename}, line {line})"
    if not own:
        return f"the run's own code ({', '.join(code.values())}) does not do what it must: {what}"
    first = own[0][0]
    return f"{first.f_globals['__name__']}:{first.f_code.co_qualname} failed: {what}"


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """Convert an out-of-memory error to `OutOfMemoryError` with remedies.

    >>> with enough_memory():
    ...     raise MemoryError
    Traceback (most recent call last):
        ...
    dbcl.errors.OutOfMemoryError: out of memory; `engine="local"` trains one client at a time, and ...
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(memory_remedy(error)) from error


def memory_remedy(error: BaseException) -> str:
    """Return an out-of-memory message with remedies and the original error message."""
    remedy = '`engine="local"` trains one client at a time, and a smaller model or `batch_size` takes less'
    return f"out of memory; {remedy}" + (f" ({said})" if (said := short(error)) else "")
