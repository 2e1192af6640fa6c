"""`dbcl privacy`: what a guarantee takes before a run, beside other choices; and what of it a run has spent."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dbcl import models
from dbcl.cli.console import AsJson, check_place, console, print_json, print_path, table
from dbcl.cli.options import ExampleShape, Outputs, preset_option, read_shape, with_settings
from dbcl.errors import ConfigError
from dbcl.files import write_atomic
from dbcl.privacy import PrivacyPlan
from dbcl.privacy.accounting import USEFUL
from dbcl.run import plots, presets
from dbcl.run.assemble import rms
from dbcl.run.budget import Account, account_in, choices, noise_by_epsilon, plan_of
from dbcl.run.config import PROMISE, WHO

DEFAULT = "private"
DRAWN = tuple(2 ** (step / 4) for step in range(-4, 17))
"""The picture's epsilons: from a half to 16."""


@with_settings(
    "model",
    "clients",
    "fraction",
    "algorithm",
    "lr",
    "epsilon",
    "delta",
    "clip",
    "unit",
    "separation",
    "mechanism",
    "server_optimizer",
    "server_lr",
    "server_momentum",
    "rounds",
)
def privacy(
    run: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    preset: Annotated[str | None, preset_option(DEFAULT)] = None,
    shape: ExampleShape = "1,28,28",
    outputs: Outputs = 10,
    *,
    examples: Annotated[
        int,
        typer.Option(
            help="With --unit example: how many training examples all clients have together.",
            rich_help_panel=WHO,
            show_default=False,
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Draw epsilon against noise into this PNG file.", rich_help_panel=PROMISE, show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Say what noise a guarantee takes before a run, and what other choices would give; or what RUN has spent.

    Without RUN, the folder of a run, nothing is trained. Epsilon and delta allow a mu; who takes part how often, the
    clip and the server's optimiser then decide how large the noise is beside the network's initial weights. The smaller
    it is, the more is learned; what accuracy a run will reach it does not say.

    Examples:

      dbcl privacy
      dbcl privacy --epsilon 4 --clip 0.2 --clients 2000 --out privacy.png
      dbcl privacy --model cifar-cnn --shape 3,32,32 --json
      dbcl privacy runs/001-private-digits
    """
    if run is not None:
        given = [f"--{name.replace('_', '-')}" for name in settings]
        given += [name for name, value in {"--preset": preset, "--out": out}.items() if value is not None]
        if given:
            raise ConfigError(f"{', '.join(given)}: for a run that is planned, and {run} has settings of its own")
        _after(run, as_json)
        return
    if out is not None:
        check_place(out)
    config = presets.preset(preset or DEFAULT, **settings)
    plan = plan_of(config, examples)
    size = rms(models.build(config.model, shape=read_shape(shape), outputs=outputs))
    if as_json:
        print_json(_facts(plan, size, config.model))
    else:
        _show(plan, size, config.model)
    if out is not None:
        relative = noise_by_epsilon(plan, size, DRAWN)
        title = f"{plan.per_round} of {plan.units} {plan.unit}s in each of {plan.rounds} rounds, clip {plan.clip:g}"
        picture = plots.noise_by_epsilon(DRAWN, relative, (plan.epsilon, plan.relative(size)), title)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, picture)
        if not as_json:
            print_path("picture", out)
    if not as_json and plan.relative(size) <= USEFUL:
        print_path("train", _command(preset or DEFAULT, settings))


def _facts(plan: PrivacyPlan, size: float, model: str) -> dict[str, Any]:
    """What `--json` prints before a run."""
    relative = plan.relative(size)
    return {
        "unit": plan.unit,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "clip": plan.clip,
        "mechanism": plan.kind,
        "clients": plan.clients,
        "cohort": plan.cohort,
        "rounds": plan.rounds,
        "separation": plan.separation,
        "participations": plan.participations,
        "mu": plan.mu,
        "sigma": plan.sigma,
        "noise": plan.noise,
        "model": model,
        "relative_noise": relative,
        "useful": relative <= USEFUL,
        "promise": plan.promise,
        "other_choices": [{"choice": name, "relative_noise": other} for name, other in choices(plan, size)],
    }


def _show(plan: PrivacyPlan, size: float, model: str) -> None:
    relative = plan.relative(size)
    shown = Table(title=f"epsilon {plan.epsilon:g} at delta {plan.delta:g} for one {plan.unit}", show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for row in (
        ("takes part", f"{plan.per_round} of {plan.units} {plan.unit}s in each of {plan.rounds} rounds, in turns"),
        ("separation", f"{plan.separation} rounds at least between two turns of one {plan.unit}"),
        ("participations", f"{plan.participations} of one {plan.unit} at most"),
        ("mu", f"{plan.mu:.4g}: how far one {plan.unit} can move what is shown, in standard deviations"),
        ("sigma", f"{plan.sigma:.4g}: the fresh noise of a round, before it is correlated ({plan.kind})"),
        ("noise on W", f"{plan.noise:.4g}, which is {relative:.3g} times the initial weights of {model}"),
    ):
        shown.add_row(*row)
    console.print(shown)
    console.print(f"the guarantee: {plan.promise}", highlight=False, markup=False)
    others = choices(plan, size)
    rows = [("as planned", f"{relative:.3g}", "1")]
    rows += [(name, f"{other:.3g}", f"{other / relative:.2g}") for name, other in others]
    console.print(
        table("what other choices would give", ("all else the same", "noise / weights", "times as much"), rows)
    )
    console.print(
        "Half the clip is half the noise and shorter updates, too: which clip is best, noise alone does not say.",
        highlight=False,
    )
    try:
        plan.require_useful(size)
    except ConfigError as error:
        console.print(str(error), style="yellow", highlight=False, markup=False)


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
    ):
        shown.add_row(*row)
    console.print(shown)
    for sentence in _notes(account):
        console.print(sentence, highlight=False, markup=False)


def _notes(account: Account) -> list[str]:
    if account.insecure:
        return [f"This run has no guarantee: {VOID}. Without --seed it would have: {account.plan.promise}"]
    said = [f"the guarantee: {account.plan.promise}"]
    if account.rounds < account.plan.rounds:
        said.append(
            "What is spent counts where the run ends here for a reason that has nothing to do with its data; where it "
            "was stopped for what it showed, as by --target or --patience, what is promised counts."
        )
    return [*said, f"{RELEASED}; {CLEAN}."]


VOID = "--seed fixes its noise, and whoever knows or guesses the seed can take that off"
RELEASED = "model.safetensors is the mean of noisy models, which the guarantee covers"
CLEAN = "checkpoints/ hold the clean W, which it does not: keep them secret"


def guarantee_text(account: Account, relative: float, stopped_by: str) -> str:
    """The guarantee of a run in a few short lines, for the end of `dbcl train`; `stopped_by` is the run's.

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
    noise = f"by noise of {relative:.3g} times the initial weights, on all that was sent"
    return "\n".join([f"{promised}; {spent}", noise, RELEASED, CLEAN])
