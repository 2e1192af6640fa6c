"""The `dbcl` command: the only place that prints."""

import json
import logging
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import dbcl
from dbcl import data as datasets
from dbcl import models
from dbcl.errors import ConfigError, DbclError
from dbcl.files import write_atomic
from dbcl.plan import SketchPlan
from dbcl.run import Run, message_bytes
from dbcl.run import config as settings

console = Console()
errors = Console(stderr=True)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Double-Blind Collaborative Learning: train one model together over random sketches of its weights.",
)
data_app = typer.Typer(invoke_without_command=True, help="Say which datasets are here, or fetch one.")
app.add_typer(data_app, name="data")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[str | None, typer.Option(help="Where the datasets lie; else DBCL_DATA, else ~/.cache/dbcl.")]


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


WHAT, WHO, CLIENT, HIDE, SERVER, LONG = (
    "What is trained",
    "Who takes part",
    "What a client does",
    "What is hidden",
    "What the server does",
    "How long, and how",
)


@app.command()
def train(
    preset: Annotated[
        str, _option("blind (default), paper, plain, or a TOML file of your own; options below win over it.", WHAT)
    ] = "blind",
    data: Annotated[str | None, _option("digits (embedded, default), mnist, cifar10 or lfw.", WHAT)] = None,
    model: Annotated[
        str | None,
        _option(f"{', '.join(models.NETWORKS)}, or module:factory of your own. Default mnist-mlp.", WHAT),
    ] = None,
    data_dir: DataDir = None,
    clients: Annotated[int | None, _option("How many clients share the data. Default 100.", WHO)] = None,
    fraction: Annotated[float | None, _option("The share of them in each round. Default 0.1.", WHO)] = None,
    partition: Annotated[str | None, _option("iid (default), dirichlet, or shards by label.", WHO)] = None,
    alpha: Annotated[float | None, _option("Dirichlet's evenness. Default 0.5.", WHO)] = None,
    algorithm: Annotated[
        str | None, _option("fedavg (default), fedprox, or sgd: one batch a round, plain gradients.", CLIENT)
    ] = None,
    epochs: Annotated[int | None, _option("Local passes over a client's data. Default 1.", CLIENT)] = None,
    batch_size: Annotated[int | None, _option("Default 10.", CLIENT)] = None,
    lr: Annotated[float | None, _option("Local learning rate. Default 0.05.", CLIENT)] = None,
    lr_decay: Annotated[
        float | None, _option("The learning rate is multiplied by this after every round. Default 1.", CLIENT)
    ] = None,
    momentum: Annotated[float | None, _option("Local momentum. Default 0.", CLIENT)] = None,
    proximal: Annotated[float | None, _option("FedProx's pull to what was sent. Default 0.1.", CLIENT)] = None,
    update_clip: Annotated[
        float | None, _option("Clients shorten their updates to this length. Default: they do not.", CLIENT)
    ] = None,
    update_noise: Annotated[
        float | None, _option("Clients add normal noise, relative to --update-clip. Default 0.", CLIENT)
    ] = None,
    cover: Annotated[
        str | None,
        _option(
            "What is sketched: hidden (default: all but the output layer), all, or patterns such as 'conv*,!conv1*'.",
            HIDE,
        ),
    ] = None,
    sketch: Annotated[
        str | None, _option("count-v1 (default), count-hashed-v1, sampling-v1, or identity-v1 for none.", HIDE)
    ] = None,
    ratio: Annotated[
        str | None, _option("Inputs to outputs of a sketch, or a range that rounds draw from: 2-4. Default 2.", HIDE)
    ] = None,
    veil: Annotated[
        float | None, _option("Secret noise on all that leaves the server, relative to the weights. Default 0.2.", HIDE)
    ] = None,
    server_optimizer: Annotated[str | None, _option("fedavg, momentum or adam.", SERVER)] = None,
    server_lr: Annotated[float | None, _option("Default 1 (adam: 0.01).", SERVER)] = None,
    server_momentum: Annotated[float | None, _option("Default 0.5.", SERVER)] = None,
    ema_decay: Annotated[
        float | None,
        _option("Evaluate and keep a running mean of W; 0.95: over 20 rounds. Default 0.", SERVER),
    ] = None,
    min_updates: Annotated[int | None, _option("Fewer good answers are an error. Default 1.", SERVER)] = None,
    norm_bound: Annotated[float | None, _option("Shorten longer updates to this length.", SERVER)] = None,
    wire: Annotated[str | None, _option("float32 (default), bfloat16, float16 or float64.", SERVER)] = None,
    rounds: Annotated[int | None, _option("At most so many rounds. Default 200.", LONG)] = None,
    target: Annotated[float | None, _option("Stop at this accuracy, for example 0.97.", LONG)] = None,
    seed: Annotated[
        int | None, _option("Fix everything, the server's secrets too, to repeat an experiment. Default: fresh.", LONG)
    ] = None,
    engine: Annotated[
        str | None,
        _option(
            "stacked (default): all clients of a round at once; local: one after another; flower: Flower's simulation.",
            LONG,
        ),
    ] = None,
    device: Annotated[str | None, _option("cpu (default) or cuda.", LONG)] = None,
    precision: Annotated[
        str | None, _option("Products on a GPU: float32 (default), tf32 or bf16; faster and less exact.", LONG)
    ] = None,
    transcripts: Annotated[
        str | None,
        _option(
            "Record for an audit what these saw: numbers of clients, server, server-sum; for example 0,server.", LONG
        ),
    ] = None,
    out: Annotated[Path | None, _option("The run's folder. Default: the next free one under runs/.", LONG)] = None,
    resume: Annotated[
        Path | None, _option("Go on with this run's folder; only --rounds and --target may change.", LONG)
    ] = None,
) -> None:
    """Train a model double-blind: clients get sketches of the weights, the server gets sketches of their updates.

    Without options this trains a small network on the embedded digits, within a minute, and leaves a folder with the
    configuration, metrics, checkpoints, the model and a picture.

    Examples:
      dbcl train
      dbcl train --preset paper --data mnist --target 0.97
      dbcl train --model mypackage.nets:make --cover 'encoder.*' --ratio 2-4 --veil 0.5
      dbcl train --resume runs/001-blind-digits --rounds 400
    """
    given = {key: value for key, value in locals().items() if value is not None}
    for name in ("preset", "data_dir", "out", "resume"):
        given.pop(name, None)
    if resume is not None:
        fixed = sorted(set(given) - {"rounds", "target"})
        if fixed:
            raise ConfigError(f"with --resume only --rounds and --target may change, not {', '.join(fixed)}")
        run = Run.resume(resume, data_dir, **given)
    else:
        if cover is not None and cover not in ("hidden", "all"):
            given["cover"] = tuple(cover.split(","))
        if ratio is not None:
            given["ratio"] = _ratio(ratio)
        if transcripts is not None:
            given["transcripts"] = tuple(transcripts.split(","))
        given["fixed_secrets"] = seed is not None
        given.setdefault("seed", secrets.randbelow(1 << 31))
        config = settings.preset(preset, **given)
        run = Run.start(config, out or _next_folder(f"{Path(preset).stem}-{config.data}"), data_dir)
    try:
        _play(run)
    except KeyboardInterrupt:
        console.print(f"stopped after round {run.server.round}; go on with: dbcl train --resume {run.folder}")
        raise typer.Exit(130) from None
    _summary(run)


def _play(run: Run) -> None:
    columns = (
        TextColumn("[bold]training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds  accuracy {task.fields[accuracy]}"),
        TimeRemainingColumn(),
    )
    last = run.history[-1].accuracy if run.history else None
    shown = "   –  " if last is None else f"{last:6.1%}"
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=run.config.rounds, completed=run.server.round, accuracy=shown)
        for metrics in run.play():
            progress.update(task, completed=metrics.round, accuracy=f"{metrics.accuracy:6.1%}")
            for reason in metrics.refused:
                progress.console.print(f"[yellow]round {metrics.round}: refused {reason}")


def _summary(run: Run) -> None:
    config, last = run.config, run.history[-1]
    model, plan = run.server.model, run.server.plan
    plain = SketchPlan.of(model, sketch="identity-v1", veil=0)
    share = message_bytes(model, plan, config.wire) / message_bytes(model, plain, config.wire)
    up, down = sum(m.bytes_up for m in run.history), sum(m.bytes_down for m in run.history)
    refused = sum(len(m.refused) for m in run.history)
    table = Table(title=f"{config.model} on {config.data}, {config.clients} clients", show_header=False, min_width=60)
    best = max(run.history, key=lambda metrics: metrics.accuracy)
    what = "mean of W" if config.ema_decay else "W"
    table.add_row(
        f"accuracy of {what}, held-out", f"{last.accuracy:.2%}  (best {best.accuracy:.2%} in round {best.round})"
    )
    table.add_row("rounds", f"{last.round}" + (f", {refused} updates refused" if refused else ""))
    table.add_row("bytes", f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down; a message is {share:.3f} of a plain one")
    table.add_row("a client saw", _seen(plan))
    table.add_row("veil", _veil(plan))
    table.add_row("in clear", ", ".join(plan.in_clear) or "nothing")
    table.add_row("secrets", "fixed by --seed, for experiments" if config.fixed_secrets else "fresh in every round")
    table.add_row("accuracy by round", _sparkline([metrics.accuracy for metrics in run.history]))
    console.print(table)
    console.print(f"picture  {run.folder / 'curves.png'}", soft_wrap=True)
    console.print(f"model    {run.folder / 'model.safetensors'}", soft_wrap=True)
    beyond = " --target 1" if config.target else ""
    console.print(f"go on    dbcl train --resume {run.folder} --rounds {2 * last.round}{beyond}", soft_wrap=True)


def _seen(plan: SketchPlan) -> str:
    covered = [tensor for tensor in plan.tensors if tensor.sketched]
    if not covered:
        return "every number of every tensor"
    return "\n".join(f"{tensor.row()[3]} of {tensor.name}" for tensor in covered)


def _veil(plan: SketchPlan) -> str:
    sizes = sorted({tensor.veil for tensor in plan.tensors})
    if sizes == [0.0]:
        if not any(tensor.sketched for tensor in plan.tensors):
            return "none"
        return "none: a client that remembers can undo the sketch (docs/threat-model.md)"
    return f"secret noise of {' or '.join(f'{size:g}' for size in sizes)} times the weights, on all that was sent"


def _sparkline(values: Sequence[float], width: int = 32) -> str:
    low, high = min(values), max(values)
    picked = [values[i * (len(values) - 1) // max(1, width - 1)] for i in range(min(width, len(values)))]
    bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in picked)
    return f"{low:.1%} {bars} {high:.1%}"


def _ratio(text: str) -> float | tuple[float, float]:
    try:
        numbers = tuple(float(part) for part in text.split("-"))
    except ValueError:
        numbers = ()
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    raise ConfigError(f"ratio is a number or a range such as 2-4, got {text!r}")


def _next_folder(name: str) -> Path:
    root = Path("runs")
    taken = [int(path.name[:3]) for path in root.glob("[0-9][0-9][0-9]-*")]
    return root / f"{max(taken, default=0) + 1:03d}-{name}"


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=f"{', '.join(models.NETWORKS)}, or module:factory of your own.")],
    preset: Annotated[str, typer.Option(help="blind, paper, plain, or a TOML file.")] = "blind",
    shape: Annotated[str, typer.Option(help="One example as channels,height,width.")] = "1,28,28",
    outputs: Annotated[int, typer.Option(help="Outputs of a named model.")] = 10,
    cover: Annotated[str | None, typer.Option(help="hidden, all, or patterns: 'conv*,!conv1*'.")] = None,
    ratio: Annotated[str | None, typer.Option(help="A number, or a range such as 2-4.")] = None,
    veil: Annotated[float | None, typer.Option(help="Relative size of the secret noise.")] = None,
    sketch: Annotated[str | None, typer.Option(help="count-v1, count-hashed-v1, sampling-v1 or identity-v1.")] = None,
    wire: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Show, before any training, what a client would see of each tensor, what goes in clear, and the bytes of a round.

    Examples:
      dbcl plan mnist-mlp
      dbcl plan cifar-cnn --shape 3,32,32 --cover all
      dbcl plan mypackage.nets:make --preset paper --json
    """
    config = settings.preset(preset)
    channels, height, width = _shape(shape)
    net = models.build(model, shape=(channels, height, width), outputs=outputs)
    chosen = tuple(cover.split(",")) if cover and cover not in ("hidden", "all") else cover
    made = SketchPlan.of(
        net,
        cover=chosen or config.cover,
        ratio=_ratio(ratio) if ratio else config.ratio,
        veil=config.veil if veil is None else veil,
        sketch=sketch or config.sketch,
    )
    clear = message_bytes(net, SketchPlan.of(net, sketch="identity-v1", veil=0), "float32")
    size = message_bytes(net, made, wire)
    if as_json:
        rows = [dict(zip(made.header(), row, strict=True)) for row in made.rows()]
        facts = {"model": model, "tensors": rows, "in_clear": list(made.in_clear)}
        print(json.dumps({**facts, "message_bytes": size, "plain_message_bytes": clear, "wire": wire}, indent=2))
        return
    table = Table(title=f"what a client of {model} sees")
    for heading in made.header():
        table.add_column(heading, overflow="fold")
    for row in made.rows():
        table.add_row(*row)
    console.print(table)
    console.print(f"in clear: {', '.join(made.in_clear) or 'nothing'}")
    console.print(f"one message, each way and client: {size:,} bytes, {size / clear:.3f} of a plain one in float32")
    if any(tensor.sketched and not tensor.veil for tensor in made.tensors):
        console.print("[yellow]no veil: a client that remembers can undo the sketch (docs/threat-model.md)")


def _shape(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"shape is channels,height,width, for example 3,32,32; got {text!r}") from None
    return channels, height, width


@data_app.callback()
def data(context: typer.Context, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Say which datasets are here, or fetch one: dbcl data fetch mnist."""
    if context.invoked_subcommand:
        context.obj = data_dir
        return
    rows = []
    for name in datasets.LOADERS:
        try:
            found = datasets.load(name, data_dir)
        except DbclError as error:
            rows.append({"name": name, "here": False, "what": str(error)})
            continue
        size = f"{len(found.y_train):,} to learn from, {len(found.y_test):,} held out, each {found.shape}"
        rows.append({"name": name, "here": True, "what": size})
    if as_json:
        print(json.dumps({"folder": str(datasets.data_root(data_dir)), "datasets": rows}, indent=2))
        return
    table = Table(title=f"datasets under {datasets.data_root(data_dir)}")
    for heading in ("name", "here", "what"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(str(row["name"]), "yes" if row["here"] else "no", str(row["what"]))
    console.print(table)


@data_app.command()
def fetch(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="mnist or cifar10.")],
    data_dir: DataDir = None,
) -> None:
    """Download a dataset from its official address, check it, and keep it under the data folder."""
    data_dir = data_dir or context.obj
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as progress:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, size: int) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=size or None)
            progress.update(tasks[file], completed=done)

        for path in datasets.fetch(name, datasets.data_root(data_dir), progress=show):
            progress.console.print(f"here: {path}", soft_wrap=True)


MAIN_MEASURES = ("cosine", "psnr", "accuracy", "auc", "tpr at 1 % fpr")
"""What the terminal shows of an audit; the page shows all."""


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, pictures and attacks: within 3 minutes.")
    ] = False,
    parties: Annotated[int, typer.Option(help="How many clients take part in the rehearsals, attacker included.")] = 2,
    fail_above: Annotated[
        str | None, typer.Option(help="Exit with status 1 above these: cosine=0.3,psnr=15,auc=0.65.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes. Default: audit.html in the run's folder.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which examples and starts the attacks draw.")] = 0,
    data_dir: DataDir = None,
) -> None:
    """Attack a run as its clients and its server could, and say what leaks.

    Attacks what the run recorded (train with --transcripts 0,server), and rehearses short runs under the same settings
    in which it knows what the victim trained on. Writes one page that opens in any browser, and JSON beside it.

    Examples:
      dbcl audit runs/001-blind-digits --quick
      dbcl audit runs/001-blind-digits --parties 10 --fail-above cosine=0.3,psnr=15,auc=0.65
    """
    try:
        from dbcl.audit import suite
        from dbcl.audit.report import page as report
        from dbcl.audit.report import rating as words
    except ImportError as error:
        raise ConfigError(
            f"an audit needs more packages ({error.name} is missing): pip install 'dbcl[audit]'"
        ) from None
    limits = words.parse_limits(fail_above) if fail_above else {}
    if parties < 2:
        raise ConfigError(f"parties must be 2 or more, an attacker and a victim, got {parties}")
    columns = (TextColumn("[bold]auditing"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("")
        found = suite.audit(
            run,
            budget=suite.QUICK if quick else suite.FULL,
            clients=parties,
            seed=seed,
            data_dir=data_dir,
            tell=lambda text: progress.update(task, description=text),
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    page = out or run / "audit.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, report.page(found).encode())
    write_atomic(page.with_suffix(".json"), found.json().encode())
    table = Table(title=f"what leaked from {found.name}: the worst naive and the worst adaptive attack")
    for heading in ("what", "who", "guessing", "naive", "adaptive"):
        table.add_column(heading, overflow="fold")
    for row in words.risk_rows(found):
        if row.measure not in MAIN_MEASURES:
            continue
        naive, adaptive = (
            f"{value.split(' (')[0].split(',')[0]}\n[bold]{word.split(',')[0]}" if word else "–"
            for value, word in ((row.naive, row.naive_word), (row.adaptive, row.adaptive_word))
        )
        table.add_row(f"{row.target}\n{row.measure}", row.seat, row.guessing, naive, adaptive)
    console.print(table)
    console.print("An attack that failed proves nothing: a better one may not.")
    console.print(f"page     {page}", soft_wrap=True)
    broken = words.exceeded(found, limits)
    for sentence in broken:
        console.print(f"[red]{sentence}")
    if broken:
        raise typer.Exit(1)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs that were audited, or their audit.json files.")],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("compare.html"),
) -> None:
    """Put several audits side by side: what each defence costs and what it stops.

    Example:
      dbcl compare runs/001-plain-digits runs/002-paper-digits runs/003-blind-digits
    """
    from dbcl.audit.findings import Audit
    from dbcl.audit.report import page as report

    audits = []
    for run in runs:
        path = run if run.suffix == ".json" else run / "audit.json"
        try:
            audits.append(Audit.from_json(path.read_text()))
        except OSError:
            raise ConfigError(f"{path} is missing: run `dbcl audit {run}` first") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no audit: {error}") from None
    table = Table(
        title="audits side by side: the worst that any attack reached", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("run", overflow="fold")
    for heading in ("accuracy", "rounds", "MB", *(f"{seat}\n{name}" for seat, _, name in report.LEAKS)):
        table.add_column(heading, no_wrap=True)
    for each in audits:
        worst = [each.worst(measure, seat) for seat, measure, _ in report.LEAKS]
        accuracy, sent = each.run.get("accuracy"), each.run.get("bytes")
        table.add_row(
            each.name,
            "–" if accuracy is None else f"{accuracy:.1%}",
            str(each.run.get("rounds", "–")),
            "–" if sent is None else f"{sent / 1e6:.0f}",
            *("–" if value is None else f"{value:.3g}" for value in worst),
        )
    write_atomic(out, report.comparison(audits).encode())
    console.print(table)
    console.print(f"page     {out}", soft_wrap=True)


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print a block to paste into a bug report."""
    import numpy
    import safetensors

    facts = {
        "dbcl": dbcl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "no",
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "DBCL_DATA": os.environ.get("DBCL_DATA", "not set"),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        console.print(f"{name + ':':<15}{value}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command; an error of dbcl's own is one message and exit status 2, never a traceback."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    try:
        app()
    except DbclError as error:
        errors.print("[bold red]error[/]", end=" ")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
