"""Commands `dbcl audit` and `dbcl compare`, which `dbcl` loads through entry points."""

from dbcl.errors import ConfigError


def missing_extra(error: ImportError) -> ConfigError:
    """Return the error message of a command whose optional packages are not installed.

    >>> str(missing_extra(ImportError("no scipy", name="scipy")))[:51]
    'an audit needs more packages (scipy is missing): pi'
    """
    return ConfigError(
        f"an audit needs more packages ({error.name} is missing): pip install '.[audit]' in a clone of dbcl"
    )
