"""Import of user code from `module:name` strings."""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dbcl.errors import ConfigError

SHORT = 300
"""Maximum number of characters shown of an error message of user code."""


def imported(name: str, what: str) -> Callable[..., Any]:
    """Import a user's function or class from `module:name`. The current folder is searched, too.

    Args:
        name: The string `module:name`.
        what: Description of the object for error messages.

    >>> imported("torch.nn.functional:mse_loss", "loss").__name__
    'mse_loss'
    """
    module_name, _, attribute = name.partition(":")
    with _own_folder(), _explained(f"cannot import the {what} {name!r}"):
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    if not callable(found):
        raise ConfigError(f"the {what} {name!r} is a {type(found).__name__}, and must be a function or a class")
    return found


def made(name: str, what: str) -> Any:
    """Call a user's factory without arguments and return its result.

    Args:
        name: The string `module:name` of the factory.
        what: Description of the result for error messages.

    >>> made("torch.nn:Identity", "model")
    Identity()
    """
    factory = imported(name, what)
    if isinstance(factory, nn.Module):
        raise ConfigError(f"the {what} {name!r} is a network, and must be a function that makes one")
    if missing := needed(factory):
        raise ConfigError(
            f"the factory {name!r} needs arguments ({', '.join(missing)}); write a function that needs none"
        )
    with _own_folder(), _explained(f"the factory {name!r} failed"):
        return factory()


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Make modules in the current folder importable, as `python -m` does."""
    here = os.getcwd()
    sys.path.append(here)  # last, so that no file there stands in for an installed package
    try:
        yield
    finally:
        sys.path.reverse()
        sys.path.remove(here)  # the last of its kind
        sys.path.reverse()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Report an error of user code in one sentence, with the file and line that raised the error."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = place.filename in (__file__, importlib.__file__) or place.filename.startswith("<frozen")
        where = "" if own else f" ({place.filename}, line {place.lineno})"
        spoken = own and isinstance(error, ImportError | AttributeError | ValueError)  # they say themselves what it is
        kind = "" if spoken else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{short(error)}{where}") from error


def short(error: object) -> str:
    """Return an error message as one short line, without PyTorch's C++ stack trace.

    >>> short(ValueError("one\\n  two"))
    'one two'
    """
    said = " ".join(str(error).split(" Exception raised from")[0].split())
    return said if len(said) <= SHORT else f"{said[:SHORT]}..."


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error of Python, CUDA or PyTorch's CPU
    allocator.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), out_of_memory(MemoryError())
    (True, True)
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def needed(factory: Callable[..., object]) -> list[str]:
    """Return the required arguments of a factory; empty if Python cannot inspect its signature.

    >>> needed(nn.Linear)
    ['in_features', 'out_features']
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]
