"""A training run: a folder with its configuration, its metrics, its checkpoints and its picture."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from dbcl import data, models, seeds
from dbcl.data import Dataset
from dbcl.engines import Engine, StackedEngine, evaluate
from dbcl.errors import ConfigError
from dbcl.files import write_atomic
from dbcl.plan import SketchPlan
from dbcl.protocol import Server, checkpoint, encode
from dbcl.run.config import ENGINES, RunConfig, from_toml
from dbcl.run.plots import curves
from dbcl.transcripts import Recorder, Setting, check_parties


@dataclass(frozen=True)
class RoundMetrics:
    """One line of metrics.jsonl.

    Accuracy and loss are those of W on held-out examples, measured by the server; of the running mean of W where the
    configuration sets `ema_decay`.
    """

    round: int
    accuracy: float
    loss: float
    train_loss: float
    bytes_down: int
    bytes_up: int
    accepted: int
    refused: list[str]
    clipped: int
    seconds: float


class Run:
    """One run and its folder. `start` makes a new one, `resume` goes on with one; `play` plays its rounds.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> run = Run.start(RunConfig(rounds=2, clients=10, fixed_secrets=True), folder)
    >>> [metrics.round for metrics in run.play()]
    [1, 2]
    >>> sorted(path.name for path in folder.iterdir())
    ['checkpoints', 'config.toml', 'curves.png', 'metrics.jsonl', 'model.safetensors', 'plan.txt']
    """

    def __init__(self, config: RunConfig, folder: Path, data_dir: str | None = None) -> None:
        self.config, self.folder = config, folder
        self.dataset = data.load(config.data, data_dir)
        self.server, self.engine = _assemble(config, self.dataset)
        self._x_test, self._y_test = (t.to(config.device) for t in (self.dataset.x_test, self.dataset.y_test))
        self.history: list[RoundMetrics] = []

    @classmethod
    def start(cls, config: RunConfig, folder: Path, data_dir: str | None = None) -> "Run":
        """Make a new run; the folder must not hold one already."""
        if (folder / "config.toml").exists():
            raise ConfigError(f"{folder} holds a run already; go on with --resume {folder}, or choose another --out")
        if config.transcripts:
            check_parties(config.transcripts, config.clients)
        run = cls(config, folder, data_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "plan.txt", f"{run.server.plan}\n".encode())
        write_atomic(folder / "metrics.jsonl", b"")
        # The first round's secrets are on the disk before anything is sent: a run that dies never veils twice.
        checkpoint.save(folder / "checkpoints", *run.server.state())
        write_atomic(folder / "config.toml", config.toml().encode())
        run._record()
        return run

    @classmethod
    def resume(cls, folder: Path, data_dir: str | None = None, **changes: Any) -> "Run":
        """Go on with a run from its last whole checkpoint; `changes` may set `rounds` and `target`."""
        try:
            config = from_toml((folder / "config.toml").read_text())
        except OSError:
            raise ConfigError(f"{folder} holds no run: it has no config.toml") from None
        run = cls(replace(config, **changes), folder, data_dir)
        run.server.load_state(*checkpoint.load(folder / "checkpoints"))
        run.history = read_metrics(folder)[: run.server.round]
        run._write_metrics()
        write_atomic(folder / "config.toml", run.config.toml().encode())
        run._record()
        return run

    @property
    def finished(self) -> bool:
        target = self.config.target
        reached = target is not None and bool(self.history) and self.history[-1].accuracy >= target
        return reached or self.server.round >= self.config.rounds

    def play(self) -> Iterator[RoundMetrics]:
        """Play the rounds that are left, each written to the folder before it is given out; then write the results."""
        try:
            while not self.finished:
                began = time.perf_counter()
                result = self.engine.play_round()
                measured = evaluate(self.server.averaged, self._x_test, self._y_test)
                report = result.report
                self.history.append(
                    RoundMetrics(
                        round=report.round + 1,
                        accuracy=measured.accuracy,
                        loss=measured.loss,
                        train_loss=report.metrics.get("loss", float("nan")),
                        bytes_down=result.bytes_down,
                        bytes_up=result.bytes_up,
                        accepted=report.accepted,
                        refused=list(report.refused),
                        clipped=report.clipped,
                        seconds=round(time.perf_counter() - began, 4),
                    )
                )
                with open(self.folder / "metrics.jsonl", "a") as file:
                    file.write(_line(self.history[-1]))
                # The line before the checkpoint: a crash between the two leaves one line too many, which resume drops.
                checkpoint.save(self.folder / "checkpoints", *self.server.state())
                yield self.history[-1]
        finally:
            self.engine.close()
        self._write_results()

    def _record(self) -> None:
        if self.config.transcripts:
            place = self.folder / "transcripts"
            self.engine.observer = Recorder(
                place, self.config.transcripts, self.server, setting(self.config, self.dataset)
            )

    def _write_metrics(self) -> None:
        write_atomic(self.folder / "metrics.jsonl", "".join(map(_line, self.history)).encode())

    def _write_results(self) -> None:
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.server.averaged.state_dict().items()}
        write_atomic(self.folder / "model.safetensors", safetensors.torch.save(weights))
        title = f"{self.config.model} on {self.config.data}, {self.config.clients} clients"
        write_atomic(self.folder / "curves.png", curves([asdict(metrics) for metrics in self.history], title))


def read_metrics(folder: Path) -> list[RoundMetrics]:
    """Read metrics.jsonl; a last line that a crash cut off is left out."""
    history = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            history.append(RoundMetrics(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return history


def setting(config: RunConfig, dataset: Dataset) -> Setting:
    """What every party of a run knows.

    >>> setting(RunConfig(clients=2, fraction=1.0), data.load("digits")).cohort
    2
    """
    return Setting(
        model=config.model,
        shape=dataset.shape,
        outputs=dataset.outputs,
        training=asdict(config.training()),
        clients=config.clients,
        cohort=config.cohort,
        optimizer=config.server_optimizer,
        momentum=config.server_momentum if config.server_optimizer == "momentum" else 0.0,
        server_lr=config.server_lr or 1.0,
        veil=config.veil,
    )


def message_bytes(model: nn.Module, plan: SketchPlan, wire: str | None = None) -> int:
    """How long one encoded broadcast of a plan is. An answer is as long, give or take its header.

    >>> model = models.build("mnist-mlp")
    >>> sketched, clear = SketchPlan.of(model), SketchPlan.of(model, sketch="identity-v1")
    >>> round(message_bytes(model, sketched) / message_bytes(model, clear), 3)
    0.507
    """
    return len(encode(Server(model, plan, wire=wire).open_round()))


def _assemble(config: RunConfig, dataset: Dataset) -> tuple[Server, Engine]:
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, and PyTorch finds no CUDA device here")
    seed = seeds.derive(bytes(32), "run", config.seed)
    model = models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=config.seed).to(device)
    server = Server(
        model,
        ratio=config.ratio,
        cover=config.cover,
        veil=config.veil,
        sketch=config.sketch,
        optimizer=config.optimizer(),
        door=config.door(),
        wire=config.wire,
        ema_decay=config.ema_decay,
        insecure_seed=config.seed if config.fixed_secrets else None,
    )
    labels = dataset.y_train.numpy()
    if config.partition == "dirichlet":
        shards = data.dirichlet(labels, config.clients, alpha=config.alpha, seed=seed)
    elif config.partition == "shards":
        shards = data.shards(labels, config.clients, seed=seed)
    else:
        shards = data.iid(labels, config.clients, seed=seed)
    # A client's own network has weights of its own, which the broadcast replaces.
    template = models.build(config.model, shape=dataset.shape, outputs=dataset.outputs, seed=config.seed + 1).to(device)
    engine = ENGINES[config.engine](
        server,
        template,
        dataset.x_train.to(device),
        dataset.y_train.to(device),
        shards,
        config.training(),
        fraction=config.fraction,
        seed=seed,
    )
    engine.noise = config.noise()
    if isinstance(engine, StackedEngine):
        engine.precision = config.precision
    return server, engine


def _line(metrics: RoundMetrics) -> str:
    return json.dumps(asdict(metrics)) + "\n"
