"""A training run: a folder with its configuration, its metrics, its checkpoints and its picture."""

import contextlib
import hashlib
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from dbcl._version import __version__
from dbcl.engines import RoundResult, evaluate
from dbcl.errors import ConfigError, ProtocolError
from dbcl.files import LOCK, SECRET, locked, make_folder, remove_scratch, write_atomic
from dbcl.plan import SketchPlan
from dbcl.protocol import Server, checkpoint, encode
from dbcl.protocol.admission import diverged
from dbcl.run.assemble import build_engine, build_session, new_seed, public_setting, resolve_device
from dbcl.run.checks import check_task
from dbcl.run.config import IN_PYTHON, RunConfig
from dbcl.run.divergence import divergence
from dbcl.run.metrics import RoundMetrics, as_text, read_metrics
from dbcl.run.plots import curves
from dbcl.run.presets import from_toml, read_toml, to_toml
from dbcl.run.task import Task, task_of
from dbcl.state import State, join
from dbcl.trackers import Tracker, tracker
from dbcl.transcripts import Recorder, check_parties

log = logging.getLogger(__name__)


RESUMABLE = ("rounds", "target", "patience", "track")
"""The settings that may change when a run goes on."""


class Run:
    """One run and its folder. `start` makes a new one, `resume` goes on with one; `play` plays its rounds.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> run = Run.start(RunConfig(rounds=2, clients=10, seed=0), folder)
    >>> [metrics.round for metrics in run.play()]
    [1, 2]
    >>> sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    ['checkpoints', 'config.toml', 'curves.png', 'metrics.jsonl', 'model.safetensors', 'plan.txt']
    """

    def __init__(
        self, config: RunConfig, folder: Path, data_dir: str | None = None, *, seed: bytes, task: Task | None = None
    ) -> None:
        self.task = task or task_of(config, data_dir)
        config = self.task.adapt(resolve_device(config))
        self.config, self.folder, self.seed = config, folder, seed
        self.trackers = [tracker(place) for place in config.track]
        self.session = build_session(config, self.task, seed=seed)
        self._held_out = self.task.held_out.to(config.device)
        check_task(self.task, config, self.session.released, self._held_out)
        self.engine = build_engine(config, self.task, self.session, seed=seed)
        self.history: list[RoundMetrics] = []
        self._data_digest: str | None = None
        if config.epsilon is not None:
            held = b"".join(client.digest() for client in self.engine.clients)
            self._data_digest = hashlib.sha256(held).hexdigest()

    @classmethod
    def start(cls, config: RunConfig, folder: Path, data_dir: str | None = None, *, task: Task | None = None) -> "Run":
        """Make a new run, of a task that is given or that the settings name; the folder must not hold one already."""
        refuse_old(folder)
        run = cls(config, folder, data_dir, seed=new_seed(config), task=task)
        if config.transcripts:
            check_parties(config.transcripts, run.config.clients)
        with _beginning(folder):
            write_atomic(folder / "plan.txt", run._plan_text().encode())
            write_atomic(folder / "metrics.jsonl", b"")
            # The first round's secrets are on the disk before anything is sent: a run that dies never veils twice.
            run._save()
            write_atomic(folder / "config.toml", to_toml(run.config).encode())
            run._record()
        return run

    @classmethod
    def resume(
        cls,
        folder: Path,
        data_dir: str | None = None,
        *,
        task: Task | None = None,
        trust: bool = False,
        **changes: Any,
    ) -> "Run":
        """Go on with a run from its last whole checkpoint; `changes` may set what `RESUMABLE` names.

        A run whose settings name code of somebody's, as module:name, goes on only with `trust`.
        """
        config = read_config(folder)
        with locked(folder):
            return cls._resume(config, folder, data_dir, task, trust, changes)

    @classmethod
    def _resume(
        cls,
        config: RunConfig,
        folder: Path,
        data_dir: str | None,
        task: Task | None,
        trust: bool,
        changes: Mapping[str, Any],
    ) -> "Run":
        remove_scratch(folder)
        state = checkpoint.load(folder / "checkpoints")
        if not {"run", "session"} <= state.values.keys():
            raise ProtocolError(f"{folder} was written by an older dbcl, whose runs this one cannot go on with")
        seed = bytes.fromhex(state.values["run"]["seed"])
        fixed = sorted(set(changes) - set(RESUMABLE))
        if "rounds" in changes and changes["rounds"] != config.rounds and config.epsilon is not None:
            raise ConfigError(
                f"the budget of this run is {config.rounds} rounds at epsilon {config.epsilon:g}: it cannot go on past "
                "them, nor be planned anew"
            )
        if fixed:
            raise ConfigError(f"a run that goes on may change {', '.join(RESUMABLE)}, not {', '.join(fixed)}")
        config = from_toml(to_toml(config), **changes)
        run = cls(config, folder, data_dir, seed=seed, task=task or task_of(config, data_dir, trust=trust))
        if state.values["run"].get("data") != run._data_digest:
            raise ProtocolError(
                "the clients' examples are not those that this run began with, or come in another order: its guarantee "
                "counts how often each is used, so the run goes on with the same data only"
            )
        run.session.load_state(state.part("session"))
        run.history = read_metrics(folder)[: run.session.round]
        if len(run.history) < run.session.round:
            said = f"{folder / 'metrics.jsonl'} is whole for {len(run.history)} of {run.session.round} rounds"
            if not run.history and run.finished:
                raise ConfigError(f"{said}, and no round is left to play: raise --rounds")
            log.warning("%s", said)
        checkpoint.prune(folder / "checkpoints")
        run._write_metrics()
        write_atomic(folder / "config.toml", to_toml(run.config).encode())
        run._record()
        return run

    @property
    def model(self) -> nn.Module:
        """The trained network: W, or its moving average where the settings ask for one."""
        return self.session.released

    @property
    def finished(self) -> bool:
        return self.stopped_by != ""

    @property
    def stopped_by(self) -> str:
        """Which setting ended the run: target, patience or rounds; empty while there are rounds to play."""
        target, patience = self.config.target, self.config.patience
        if target is not None and self.history and not self.task.objective.better(target, self.history[-1].score):
            return "target"
        if patience is not None and self.history and self.history[-1].round - self.best.round >= patience:
            return "patience"
        return "rounds" if self.session.round >= self.config.rounds else ""

    @property
    def best(self) -> RoundMetrics:
        """The round with the best score, the first of several."""
        sign = -1 if self.task.objective.lower_is_better else 1
        return max(self.history, key=lambda metrics: -math.inf if math.isnan(metrics.score) else sign * metrics.score)

    def play(self, *trackers: Tracker) -> Iterator[RoundMetrics]:
        """Play the rounds that are left, each written to the folder before it is given out; then write the results.

        The `trackers`, and those that the settings name, are told of every round.
        """
        with locked(self.folder):
            self._check_place()
            yield from self._play([*self.trackers, *trackers])

    def _check_place(self) -> None:
        """Refuse to play where somebody else has gone on since this run was made or resumed."""
        there = checkpoint.newest(self.folder / "checkpoints")
        if there != self.session.round:
            raise ConfigError(
                f"{self.folder} is at round {there} and this run at round {self.session.round}: another process has "
                "gone on with it; resume it anew"
            )

    def _play(self, told: list[Tracker]) -> Iterator[RoundMetrics]:
        try:
            for each in told:
                each.begin(self.folder, {**asdict(self.config), "dbcl": __version__}, self.session.round)
            while not self.finished:
                began = time.perf_counter()
                result = self._play_round()
                measured = evaluate(self.session.released, self._held_out, self.task.objective)
                report = result.report
                self.history.append(
                    RoundMetrics(
                        round=report.round + 1,
                        score=measured.score,
                        loss=measured.loss,
                        train_loss=report.metrics.get("loss", float("nan")),
                        bytes_down=result.bytes_down,
                        bytes_up=result.bytes_up,
                        accepted=report.accepted,
                        refused=list(report.refused),
                        # How many were clipped says something about clients' data that no noise is on.
                        clipped=report.clipped if self.config.epsilon is None else None,
                        seconds=round(time.perf_counter() - began, 4),
                        metric=self.task.objective.name,
                    )
                )
                with open(self.folder / "metrics.jsonl", "a") as file:
                    file.write(as_text(self.history[-1:]))
                # The line before the checkpoint: a crash between the two leaves one line too many, which resume drops.
                self._save()
                for each in told:
                    each.log(self.history[-1].round, self.history[-1].numbers())
                yield self.history[-1]
        finally:
            self.engine.close()
            for each in told:
                each.end()
        self._write_results()

    def _play_round(self) -> RoundResult:
        try:
            return self.engine.play_round()
        except ProtocolError as error:
            if diverged(error):
                raise divergence(self.config, self.session.round + 1, error) from error
            raise

    def _save(self) -> None:
        own = {"seed": self.seed.hex()} | ({} if self._data_digest is None else {"data": self._data_digest})
        state = join(run=State(own, {}), session=self.session.state())
        checkpoint.save(self.folder / "checkpoints", self.session.round, state)

    def _plan_text(self) -> str:
        server = self.session.server
        promise = "" if server.privacy is None else f"the guarantee: {server.guarantee}\n"
        door = f"the door: {server.door}"
        if self.config.secure_aggregation:
            door = f"the server sees sums of {self.config.min_cohort} clients or more, and no update by itself"
        return f"{self.session.plan}\n{door}\n{promise}"

    def _record(self) -> None:
        if self.config.transcripts:
            known = public_setting(self.config, self.task, self.session.plan)
            self.engine.observer = Recorder(self.folder / "transcripts", self.config.transcripts, self.session, known)

    def _write_metrics(self) -> None:
        write_atomic(self.folder / "metrics.jsonl", as_text(self.history).encode())

    def _write_results(self) -> None:
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.session.released.state_dict().items()}
        write_atomic(self.folder / "model.safetensors", safetensors.torch.save(weights), mode=SECRET)
        write_atomic(self.folder / "curves.png", self.picture())

    @property
    def title(self) -> str:
        """What is trained on what, in a line."""
        model, data = (text.removesuffix(IN_PYTHON) for text in (self.config.model, self.config.data))
        return f"{model} on {data}, {self.config.clients} clients"

    def __repr__(self) -> str:
        last = self.history[-1:]
        reached = "".join(f", {each.metric} {self.task.objective.shown(each.score)}" for each in last)
        return f"<Run of {self.title}: {self.session.round} of {self.config.rounds} rounds{reached}>"

    def _repr_png_(self) -> bytes | None:
        """The run's curves, which a notebook shows in its place."""
        return self.picture() if self.history else None

    def picture(self) -> bytes:
        """The run's curves as a PNG."""
        return curves([metrics.line() for metrics in self.history], self.title, self.task.objective)


def read_config(folder: Path) -> RunConfig:
    """The settings of a run by its folder.

    >>> read_config(Path("nowhere"))
    Traceback (most recent call last):
        ...
    dbcl.errors.ConfigError: nowhere holds no run: it has no config.toml
    """
    try:
        return read_toml(folder / "config.toml")
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no run: it has no config.toml") from None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is a file, and the run is its folder") from None
    except OSError as error:
        raise ConfigError(f"{folder / 'config.toml'} cannot be read: {error.strerror}") from None


def refuse_old(folder: Path) -> None:
    """Refuse a folder that holds anything: a new run must not take old files for its own.

    >>> refuse_old(Path("nowhere"))
    """
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a run already; go on with --resume {folder}, or choose another --out")
    if folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose another --out, or empty it")


@contextlib.contextmanager
def _beginning(folder: Path) -> Iterator[None]:
    """Hold a new folder while a run begins in it; where it does not begin, nothing that was made stays."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    ours = False
    try:
        make_folder(folder)
        with locked(folder):
            refuse_old(folder)  # of two that start at once, the second
            ours = True
            yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            if ours:  # it was empty, and nobody else could write to it since
                for path in (*folder.glob("*"), folder / LOCK):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            elif isinstance(error, OSError) and folder in made and not any(folder.glob("*")):
                (folder / LOCK).unlink(missing_ok=True)
        for each in made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                each.rmdir()
        raise


def message_bytes(model: nn.Module, plan: SketchPlan, wire: str | None = None) -> int:
    """How long one encoded broadcast of a plan is. An answer is as long, give or take its header.

    >>> from dbcl import models
    >>> model = models.build("mnist-mlp")
    >>> sketched, clear = SketchPlan.of(model), SketchPlan.of(model, sketch="identity-v1")
    >>> round(message_bytes(model, sketched) / message_bytes(model, clear), 3)
    0.507
    """
    return len(encode(Server(model, plan, wire=wire).open_round()))


def transcript_bytes(run: Run) -> int:
    """About how much the transcripts of a run's remaining rounds will take on the disk; 0 where nothing is recorded.

    A client's take a message each way in the rounds of its own, the server's a broadcast of each lane, all updates (or
    their sum in each lane) and the weights, and the truth the weights of every round.

    >>> import tempfile
    >>> run = Run.start(RunConfig(rounds=3, transcripts=("server",)), Path(tempfile.mkdtemp()) / "run")
    >>> transcript_bytes(run) // 10**6
    19
    """
    config = run.config
    if not config.transcripts:
        return 0
    message = message_bytes(run.session.model, run.session.plan, config.wire)
    weights = sum(tensor.nbytes for tensor in run.session.model.state_dict().values())
    plan = run.session.plan
    broadcasts = config.cohort if plan.grouped else min(plan.lanes, config.cohort)
    a_round = float(weights)
    for party in config.transcripts:
        if party.isdigit():
            a_round += config.cohort / config.clients * 2 * message
        else:
            a_round += weights + (broadcasts + (broadcasts if party == "server-sum" else config.cohort)) * message
    return int(a_round * max(0, config.rounds - run.session.round))
