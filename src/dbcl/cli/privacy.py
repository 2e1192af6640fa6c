"""`dbcl privacy`: the privacy plan of settings compared to alternatives, or the spent budget of a
run.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import nn

from dbcl.cli.console import AsJson, check_place, console, print_json, print_path, table
from dbcl.cli.forecast import ExamplePlan
from dbcl.cli.options import DataDir, Examples, ExampleShape, Outputs, preset_option, read_shape, with_settings
from dbcl.errors import ConfigError
from dbcl.files import user_path, write_atomic
from dbcl.model import networks
from dbcl.privacy import PrivacyPlan
from dbcl.settings import PROMISE
from dbcl.simulation import plots, presets
from dbcl.simulation.config import RunConfig
from dbcl.simulation.features import input_shape
from dbcl.simulation.planning import parameter_count, rms, weight_scale
from dbcl.simulation.privacy_budget import Account, account_in, choices, noise_by_epsilon, plan_of, units_in

DRAWN = tuple(2 ** (step / 4) for step in range(-4, 17))
"""Values of epsilon in the figure, from 0.5 to 16."""


@with_settings(
    "data",
    "model",
    "clients",
    "fraction",
    "algorithm",
    "lr",
    "noise_by",
    "colluders",
    "fewest",
    "secure_aggregation",
    "epsilon",
    "delta",
    "clip",
    "privacy_unit",
    "separation",
    "correlation",
    "weight_cap",
    "server_optimizer",
    "server_lr",
    "server_momentum",
    "rounds",
)
def privacy(
    run: Annotated[Path | None, typer.Argument(show_default=False, parser=user_path)] = None,
    preset: Annotated[str | None, preset_option(presets.DEFAULT)] = None,
    shape: ExampleShape = "1,28,28",
    outputs: Outputs = 10,
    *,
    examples: Examples = 0,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Draw epsilon against noise into this PNG file.",
            rich_help_panel=PROMISE,
            show_default=False,
            parser=user_path,
        ),
    ] = None,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Say what a guarantee costs before a run, beside other choices; or what RUN has spent.

    Without RUN, the folder of a run, nothing is trained. For one example as the privacy unit, the default, this plans
    noise, rounds and rates from the number of parties, examples and parameters, and says what accuracy to expect. For
    one client as the unit (--preset private) it says how large the noise is beside the network's initial weights.

    Examples:

      dbcl privacy
      dbcl privacy --clients 5 --examples 20000 --epsilon 1 --out privacy.png
      dbcl privacy --preset private-example --data mnist
      dbcl privacy --preset private --epsilon 4 --clip 0.2 --clients 2000
      dbcl privacy runs/001-guaranteed-digits
    """
    if run is not None:
        given = [f"--{name.replace('_', '-')}" for name in settings]
        others = {"--preset": preset, "--examples": examples or None, "--data-dir": data_dir, "--out": out}
        given += [name for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(f"{', '.join(given)}: for a run that is planned, and {run} has settings of its own")
        _after(run, as_json)
        return
    if out is not None:
        check_place(out)
    preset = presets.DEFAULT if preset is None else preset
    config = presets.preset(preset, **settings)
    examples = examples or units_in(config, data_dir)
    size = input_shape(config.model, read_shape(shape))
    model = networks.build(config.model, shape=size, outputs=outputs)
    if config.privacy is not None and config.privacy.unit == "example":
        useful, picture = _plan_examples(config, model, examples, as_json)
    else:
        useful, picture = _plan_clients(config, model, examples, as_json)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, picture())
        if not as_json:
            print_path("picture", out)
    if not as_json and useful:
        place = {} if data_dir is None else {"data_dir": data_dir}
        print_path("train", _command(preset, settings | place))


def _plan_examples(
    config: RunConfig, model: nn.Module, examples: int, as_json: bool
) -> tuple[bool, Callable[[], bytes]]:
    """Show the plan for one example as the privacy unit; return whether it is useful, and a
    function that plots it.
    """
    made = ExamplePlan(config, examples=examples, values=parameter_count(model))
    if as_json:
        print_json(made.facts())
    else:
        made.show()
    return made.plan is not None, made.picture


def _plan_clients(
    config: RunConfig, model: nn.Module, examples: int, as_json: bool
) -> tuple[bool, Callable[[], bytes]]:
    """Show the plan for one client as the privacy unit; return whether it is useful, and a function
    that plots it.
    """
    plan = plan_of(config, examples, parameter_count(model))
    size = weight_scale(model, plan)
    if as_json:
        print_json(_facts(plan, config, model))
    else:
        _show(plan, config, model)

    def picture() -> bytes:
        relative = noise_by_epsilon(plan, size, DRAWN)
        title = f"{plan.per_round} of {plan.units} {plan.unit}s in each of {plan.rounds} rounds, {_clip(config)}"
        return plots.noise_by_epsilon(DRAWN, relative, (plan.epsilon, plan.relative(size)), title)

    return plan.useful(rms(model), parameter_count(model)), picture


def _clip(config: RunConfig) -> str:
    assert config.privacy is not None
    return f"clip {config.privacy.clip:g}"


def _facts(plan: PrivacyPlan, config: RunConfig, model: nn.Module) -> dict[str, Any]:
    """Return the plan as JSON values."""
    assert config.privacy is not None
    size = weight_scale(model, plan)
    relative = plan.relative(size)
    return {
        "unit": plan.unit,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "clip": config.privacy.clip,
        "correlation": plan.correlation,
        "clients": plan.clients,
        "cohort": plan.cohort,
        "examples": plan.examples,
        "batch": plan.batch,
        "weight_cap": config.privacy.weight_cap,
        "rounds": plan.rounds,
        "separation": plan.separation,
        "participations": plan.participations,
        "mu": plan.mu,
        "sigma": plan.sigma,
        "noise": plan.noise,
        "noise_before_optimizer": plan.noise_on_updates,
        "model": config.model,
        "relative_noise": relative,
        "noise_to_signal": plan.noise_to_signal(parameter_count(model)),
        "useful": plan.useful(rms(model), parameter_count(model)),
        "promise": plan.promise,
        "other_choices": [{"choice": name, "relative_noise": other} for name, other in choices(plan, size)],
    }


def _show(plan: PrivacyPlan, config: RunConfig, model: nn.Module) -> None:
    size = weight_scale(model, plan)
    relative = plan.relative(size)
    shown = Table(title=f"epsilon {plan.epsilon:g} at delta {plan.delta:g} for one {plan.unit}", show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for row in (
        ("takes part", f"{plan.per_round} of {plan.units} {plan.unit}s in each of {plan.rounds} rounds, in turns"),
        ("separation", f"{plan.separation} rounds at least between two turns of one {plan.unit}"),
        ("participations", f"{plan.participations} of one {plan.unit} at most"),
        ("clip", _clipped(plan, config)),
        ("mu", f"{plan.mu:.4g}: how far one {plan.unit} can move what is shown, in standard deviations"),
        ("sigma", f"{plan.sigma:.4g}: the fresh noise of a round, before it is correlated ({plan.correlation})"),
        _noise_row(plan, config, model),
    ):
        shown.add_row(*row)
    console.print(shown)
    console.print(f"the guarantee: {plan.promise}", highlight=False, markup=False)
    if plan.noise_on_updates:
        console.print(BEFORE, highlight=False)
    with console.status("working out what other choices would give"):
        others = choices(plan, size)
    rows = [("as planned", f"{relative:.3g}", "1")]
    rows += [(name, f"{other:.3g}", f"{other / relative:.3g}") for name, other in others]
    console.print(
        table("what other choices would give", ("all else the same", "noise / weights", "times as much"), rows)
    )
    console.print(
        "Half the clip is half the noise and shorter updates, too: which is best, noise alone does not say.",
        highlight=False,
    )
    try:
        plan.require_useful(rms(model), parameter_count(model))
    except ConfigError as error:
        console.print(str(error), style="yellow", highlight=False, markup=False)


BEFORE = (
    "adam is not linear, so the noise goes into every average update, before the optimiser: W itself carries it, and "
    "clients see W as it is. How much of it reaches W is not known ahead; what the table sets beside the weights is "
    "what would, were the updates simply added."
)


def _clipped(plan: PrivacyPlan, config: RunConfig) -> str:
    assert config.privacy is not None
    counted = f"count by their examples, {plan.weight_cap:g} and more as one" if plan.weight_cap else "all count alike"
    return f"{config.privacy.clip:g}: no client's update is longer; they {counted}"


def _noise_row(plan: PrivacyPlan, config: RunConfig, model: nn.Module) -> tuple[str, str]:
    if not plan.noise_on_updates:
        if not rms(model):
            return "noise on W", f"{plan.noise:.4g}; the weights of {config.model} all begin at 0"
        relative = plan.relative(rms(model))
        return "noise on W", f"{plan.noise:.4g}, which is {relative:.3g} times the initial weights of {config.model}"
    numbers = parameter_count(model)
    return "noise on an update", (
        f"{plan.noise:.4g} on each of {numbers:,} numbers of {config.model}: {plan.noise * math.sqrt(numbers):.3g} "
        f"long, where a round's average update is at most {plan.clip:g} long"
    )


def _command(preset: str, settings: Mapping[str, Any]) -> str:
    words = ["dbcl", "train", "--preset", preset]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", f"{value:.15g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _after(run: Path, as_json: bool) -> None:
    account = account_in(run)
    if as_json:
        print_json({"run": str(run), "guarantee": None if account is None else account.facts()})
        return
    if account is None:
        console.print(
            f"{run} has no guarantee: it was trained without --epsilon. What its veil hides, `dbcl audit` measures.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    plan, spent = account.plan, account.spent
    shown = Table(title=f"what {run} has spent", show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for row in (
        ("promised", f"epsilon {plan.epsilon:g} at delta {plan.delta:g} (mu {plan.mu:.4g}) for one {plan.unit}"),
        ("spent", f"epsilon {spent.epsilon:.3g} at delta {spent.delta:g} (mu {spent.mu:.4g})"),
        ("rounds", f"{account.rounds} of {plan.rounds}"),
        ("participations", f"{account.turns} of one {plan.unit} at most, of {plan.participations}"),
        *_attendance(account),
    ):
        shown.add_row(*row)
    console.print(shown)
    for sentence in _notes(account):
        console.print(sentence, highlight=False, markup=False)


def _attendance(account: Account) -> list[tuple[str, str]]:
    """Return the table row about the clients in the revealed sums, if the spent budget depends on
    them.
    """
    if account.attendance is None:
        return []
    facts = account.facts()
    sums, least = facts["revealed_sums"], facts["fewest_in_a_sum"]
    return [("attendance", f"{least} or more of {account.plan.clients} clients in each of {sums} revealed sums")]


def _notes(account: Account) -> list[str]:
    if account.insecure:
        return [f"This run has no guarantee: {VOID}. Without --seed it would have: {account.plan.promise}"]
    said = [f"the guarantee: {account.plan.promise}"]
    if account.caveat:
        said.append(account.caveat)
    if account.plan.shared:
        return [*said, f"{RELEASED}; {KEYS_KEPT}."]
    return [*said, f"{RELEASED}; {NOISE_KEPT if account.plan.noise_on_updates else CLEAN}."]


VOID = "--seed fixes its noise, and anyone who knows or guesses the seed can take that off"
RELEASED = "model.safetensors is the mean of noisy models, which the guarantee covers"
KEYS_KEPT = "checkpoints/ of this simulation hold the noise keys of all clients, which it does not: keep them secret"
CLEAN = "checkpoints/ hold the clean W, which it does not: keep them secret"


NOISE_KEPT = "checkpoints/ hold the noise of the last rounds, which it does not: keep them secret"


def guarantee_text(account: Account, relative: float, stopped_by: str) -> str:
    """Return a short text about a run's guarantee for the end of `dbcl train`.

    Args:
        account: Privacy account of the run.
        relative: Noise relative to the initial weights.
        stopped_by: Setting that ended the run.

    >>> plan = PrivacyPlan(epsilon=8, delta=1e-5, clip=0.2, rounds=400, clients=1000, cohort=100)
    >>> print(guarantee_text(Account(plan, 100, 10, insecure=False), 1.62, "rounds"))
    epsilon 8, delta 1e-05 for one client; spent so far: epsilon 3.55
    by noise of 1.62 times the initial weights, on all that was sent
    model.safetensors is the mean of noisy models, which the guarantee covers
    checkpoints/ hold the clean W, which it does not: keep them secret
    """
    plan = account.plan
    promised = f"epsilon {plan.epsilon:g}, delta {plan.delta:g} for one {plan.unit}"
    if account.insecure:
        return f"none: {VOID}; without --seed {promised}"
    spent = f"spent so far: epsilon {account.spent.epsilon:.3g}"
    if stopped_by in ("target", "patience"):
        spent += f" (but {plan.epsilon:g} counts: what it showed decided when to stop)"
    if plan.noise_on_updates:
        noise = f"by noise of {plan.noise:.3g} on every number of an average update, before the server's optimiser"
        return "\n".join([f"{promised}; {spent}", noise, RELEASED, NOISE_KEPT])
    noise = f"by noise of {relative:.3g} times the initial weights, on all that was sent"
    return "\n".join([f"{promised}; {spent}", noise, RELEASED, CLEAN])
