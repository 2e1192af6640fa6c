"""Command-line options derived from the fields of the settings, so that each default is defined
only once.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape

from dbcl.errors import ConfigError
from dbcl.model.networks import Shape
from dbcl.settings import WHAT, WHO, about
from dbcl.simulation.config import HINTS, OPTIONS
from dbcl.simulation.presets import DEFAULT, MEANINGS, explain

DataDir = Annotated[
    str | None, typer.Option(help="Where the datasets lie. Default: DBCL_DATA if it is set, else ~/.cache/dbcl.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Run the code that the run's settings name (--model, --data and others as module:name)."
    ),
]
ExampleShape = Annotated[
    str, typer.Option("--shape", help="One example as channels,height,width.", rich_help_panel=WHAT)
]
Examples = Annotated[
    int,
    typer.Option(
        help="How many training examples all clients have together, where one of them is what --epsilon protects "
        "(--privacy-unit example). Default: those of the dataset.",
        rich_help_panel=WHO,
        show_default=False,
    ),
]
Outputs = Annotated[int, typer.Option(help="Outputs of a named model.", rich_help_panel=WHAT)]


def preset_option(default: str) -> Any:
    """Return the preset option of a command with the given default preset."""
    meant = ", ".join(f"{name} ({meaning})" for name, meaning in MEANINGS.items())
    return typer.Option(
        help=f"Values for several options at once: {meant}, or a TOML file of your own. They replace the "
        f"defaults; an option that you give replaces them. Default {default}.",
        rich_help_panel=WHAT,
        show_default=False,
    )


Preset = Annotated[str | None, preset_option(DEFAULT)]


def read_shape(text: str) -> Shape:
    """Parse an example's shape.

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
    """Decorate a command with an option for each named setting of a run, or for all settings.

    The options replace the command's `**settings`, after its positional parameters. The command
    receives only settings that the user gave, as text if the setting has its own parser.

    Args:
        names: Option names of the settings; empty for all settings.

    >>> @with_settings("rounds", "lr")
    ... def command(**settings):
    ...     print(settings)
    >>> list(inspect.signature(command).parameters)
    ['lr', 'rounds']
    >>> command(rounds=3, lr=None)
    {'rounds': 3}
    """
    options = {name: _option(name) for name in OPTIONS if not names or name in names}

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


def _option(name: str) -> inspect.Parameter:
    setting, hint = about(OPTIONS[name]), HINTS[name]
    kind = str if setting.read else next((each for each in get_args(hint) if each is not type(None)), hint)
    names = [f"--{name.replace('_', '-')}"] if kind is bool else []  # a second, --no-..., would widen the panel
    option = typer.Option(*names, help=escape(explain(name)), rich_help_panel=setting.panel, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
