"""Options that are made from the settings' own fields, so that no default is written in a command."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.markup import escape

from dbcl.errors import ConfigError
from dbcl.models import Shape
from dbcl.run.config import WHAT, WHO, RunConfig
from dbcl.run.presets import MEANINGS, PRESETS, explain
from dbcl.run.settings import about

DataDir = Annotated[
    str | None, typer.Option(help="Where the datasets lie. Default: DBCL_DATA if it is set, else ~/.cache/dbcl.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that the run's settings name (--model, --data and others as module:name)."
    ),
]
ExampleShape = Annotated[
    str, typer.Option("--shape", help="One example as channels,height,width.", rich_help_panel=WHAT)
]
Examples = Annotated[
    int,
    typer.Option(
        help="How many training examples all clients have together, where one of them is what --epsilon protects "
        "(--unit example). Default: those of the dataset.",
        rich_help_panel=WHO,
        show_default=False,
    ),
]
Outputs = Annotated[int, typer.Option(help="Outputs of a named model.", rich_help_panel=WHAT)]


def preset_option(default: str) -> Any:
    """The option that names a preset, for a command whose own is `default`."""
    meant = ", ".join(f"{name} ({meaning})" for name, meaning in MEANINGS.items())
    return typer.Option(
        help=f"Values for several options at once: {meant}, or a TOML file of your own. They replace the "
        f"defaults; an option that you give replaces them. Default {default}.",
        rich_help_panel=WHAT,
        show_default=False,
    )


Preset = Annotated[str | None, preset_option(PRESETS[0])]


def read_shape(text: str) -> Shape:
    """Read one example's shape, as a person writes it.

    >>> read_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        channels, height, width = (int(part) for part in text.split(","))
        if min(channels, height, width) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(f"shape is channels,height,width, for example 3,32,32; got {text!r}") from None
    return channels, height, width


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings of a run; without names, for all of them.

    The options stand in for the command's `**settings`, after its positional parameters. The command receives those
    that were given, as text where the setting has a way of its own to read it.

    >>> @with_settings("rounds", "lr")
    ... def command(**settings):
    ...     print(settings)
    >>> list(inspect.signature(command).parameters)
    ['lr', 'rounds']
    >>> command(rounds=3, lr=None)
    {'rounds': 3}
    """
    fields = [field for field in dataclasses.fields(RunConfig) if not names or field.name in names]
    options = {field.name: _option(field) for field in fields}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            given = {name: values.pop(name) for name in options if name in values}
            command(**values, **{name: value for name, value in given.items() if value is not None})

        own = inspect.signature(command).parameters.values()
        before = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        after = [each for each in own if each.kind is each.KEYWORD_ONLY]
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*before, *options.values(), *after)]
        vars(called)["__signature__"] = inspect.Signature(parameters)
        return called

    return decorate


def _option(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    setting, hint = about(field), get_type_hints(RunConfig)[field.name]
    kind = str if setting.read else next((each for each in get_args(hint) if each is not type(None)), hint)
    names = [f"--{field.name.replace('_', '-')}"] if kind is bool else []  # a second, --no-..., would widen the panel
    option = typer.Option(*names, help=escape(explain(field.name)), rich_help_panel=setting.panel, show_default=False)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
