"""Training run: a folder with configuration, metrics, checkpoints and a figure."""

import copy
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from dbcl._version import __version__
from dbcl.engines import RoundResult, evaluate
from dbcl.errors import ConfigError, DivergedError, ProtocolError
from dbcl.files import SECRET, locked, naming, remove_scratch, write_atomic
from dbcl.plan import SketchPlan
from dbcl.protocol import Server, checkpoint, encode
from dbcl.protocol.contributions import Contributions
from dbcl.simulation.build import build_engine, build_run_server, new_seed, public_setting, resolve_device
from dbcl.simulation.checks import check_task
from dbcl.simulation.config import IN_PYTHON, RunConfig
from dbcl.simulation.divergence import divergence
from dbcl.simulation.metrics import RoundMetrics, as_text, read_metrics
from dbcl.simulation.planning import planned_for
from dbcl.simulation.plots import curves
from dbcl.simulation.presets import from_toml, to_toml
from dbcl.simulation.run_folder import beginning, data_digest, own_values, read_config, refuse_old
from dbcl.simulation.task import Task, task_of
from dbcl.simulation.user_code import enough_memory
from dbcl.state import State, join
from dbcl.trackers import Tracker, tracker
from dbcl.transcripts import Recorder, check_parties

log = logging.getLogger(__name__)


RESUMABLE = ("rounds", "target", "patience", "track")
"""Settings that may change when a run is resumed."""


class Run:
    """Training run in a folder. Use `start` for a new run, `resume` for an existing run, and `play`
    to train.

    >>> import tempfile
    >>> from dbcl.files import LOCK
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
        config = planned_for(self.task.adapt(resolve_device(config)), self.task)
        self.config, self.folder, self.seed = config, folder, seed
        self.trackers = [tracker(place) for place in config.track]
        with enough_memory():
            self.server = build_run_server(config, self.task, seed=seed)
            self._held_out = self.task.held_out.to(config.device)
            check_task(self.task, config, self.server.model, self._held_out)
            self.engine = build_engine(config, self.task, self.server, seed=seed)
        self.history: list[RoundMetrics] = []
        self._data_digest = data_digest([*self.engine.clients, self._held_out], exact=config.privacy is not None)

    @classmethod
    def start(cls, config: RunConfig, folder: Path, data_dir: str | None = None, *, task: Task | None = None) -> "Run":
        """Create a run in a folder that holds no run; `task` overrides the task named by the
        settings.
        """
        refuse_old(folder)
        run = cls(config, folder, data_dir, seed=new_seed(config), task=task)
        if config.transcripts:
            check_parties(config.transcripts, run.config.clients)
        with beginning(folder):
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
        allow_code: bool = False,
        **changes: Any,
    ) -> "Run":
        """Resume a run from its last valid checkpoint; `changes` may contain the settings in
        `RESUMABLE`.

        A run whose settings name user code as module:name requires `allow_code`.
        """
        config = read_config(folder)
        with locked(folder):
            return cls._resume(config, folder, data_dir, task, allow_code, changes)

    @classmethod
    def _resume(
        cls,
        config: RunConfig,
        folder: Path,
        data_dir: str | None,
        task: Task | None,
        allow_code: bool,
        changes: Mapping[str, Any],
    ) -> "Run":
        remove_scratch(folder)
        state = checkpoint.load(folder / "checkpoints")
        if not {"run", "server"} <= state.values.keys():
            raise ProtocolError(f"{folder} was written by an older dbcl, whose runs this one cannot go on with")
        seed, digest = own_values(state.values["run"])
        fixed = sorted(set(changes) - set(RESUMABLE))
        if "rounds" in changes and changes["rounds"] != config.rounds and config.privacy is not None:
            raise ConfigError(
                f"the budget of this run is {config.rounds} rounds at epsilon {config.privacy.epsilon:g}: it cannot go "
                "on past them, nor be planned anew"
            )
        if fixed:
            raise ConfigError(f"a run that goes on may change {', '.join(RESUMABLE)}, not {', '.join(fixed)}")
        config = from_toml(to_toml(config), **changes)
        run = cls(config, folder, data_dir, seed=seed, task=task or task_of(config, data_dir, allow_code=allow_code))
        if digest != run._data_digest:
            raise ProtocolError(
                "the examples, the clients' or the held-out ones, are not those that this run began with, or come in "
                "another order; give the same data, or begin a new run in another `folder`"
            )
        run.server.load_state(state.part("server"))
        run.history = read_metrics(folder)[: run.server.round]
        if len(run.history) < run.server.round:
            said = f"{folder / 'metrics.jsonl'} is whole for {len(run.history)} of {run.server.round} rounds"
            if not run.history and run.finished:
                raise ConfigError(f"{said}, and no round is left to play: raise `rounds`")
            log.warning("%s", said)
        checkpoint.prune(folder / "checkpoints")
        run._write_metrics()
        write_atomic(folder / "config.toml", to_toml(run.config).encode())
        run._record()
        return run

    @property
    def model(self) -> nn.Module:
        """Trained network: W, or its exponential moving average if the settings enable averaging."""
        return self.server.released

    @property
    def contributions(self) -> Contributions:
        """Number of each client's updates that were rejected or down-weighted."""
        return self.server.contributions

    @property
    def finished(self) -> bool:
        return self.stopped_by != ""

    @property
    def stopped_by(self) -> str:
        """Setting that ended the run: target, patience or rounds; empty if rounds remain."""
        target, patience = self.config.target, self.config.patience
        if target is not None and self.history and not self.task.objective.better(target, self.history[-1].score):
            return "target"
        if patience is not None and self.history and self.history[-1].round - self.best.round >= patience:
            return "patience"
        return "rounds" if self.server.round >= self.config.rounds else ""

    @property
    def best(self) -> RoundMetrics:
        """Metrics of the first round with the best score."""
        sign = -1 if self.task.objective.lower_is_better else 1
        return max(self.history, key=lambda metrics: -math.inf if math.isnan(metrics.score) else sign * metrics.score)

    def play(self, *trackers: Tracker) -> Iterator[RoundMetrics]:
        """Run the remaining rounds. Save each round before yielding its metrics, and write the
        results at the end.

        Every round is reported to `trackers` and to the trackers named by the settings.
        """
        with locked(self.folder):
            self._check_place()
            yield from self._play([*self.trackers, *trackers])

    def _check_place(self) -> None:
        """Raise `ConfigError` if another process has continued this run since it was created or
        resumed.
        """
        there = checkpoint.newest(self.folder / "checkpoints")
        if there != self.server.round:
            raise ConfigError(
                f"{self.folder} is at round {there} and this run at round {self.server.round}: another process has "
                "gone on with it; resume it anew"
            )

    def _play(self, told: list[Tracker]) -> Iterator[RoundMetrics]:
        try:
            for each in told:
                each.begin(self.folder, {**self.config.options(), "dbcl": __version__}, self.server.round)
            while not self.finished:
                began = time.perf_counter()
                with enough_memory():
                    result = self._play_round()
                    measured = evaluate(self.server.released, self._held_out, self.task.objective)
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
                        clipped=report.clipped if self.config.privacy is None else None,
                        seconds=round(time.perf_counter() - began, 4),
                        metric=self.task.objective.name,
                    )
                )
                lines = self.folder / "metrics.jsonl"
                with naming(lines), open(lines, "a") as file:
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
        except DivergedError as error:
            raise divergence(self.config, self.server.round + 1, error) from error

    def _save(self) -> None:
        own = {"seed": self.seed.hex(), "data": self._data_digest}
        state = join(run=State(own, {}), server=self.server.state())
        checkpoint.save(self.folder / "checkpoints", self.server.round, state)

    def _plan_text(self) -> str:
        server = self.server
        promise = "" if server.privacy is None else f"the guarantee: {server.guarantee}\n"
        validator = f"the validator: {server.validator}"
        if self.config.secure_aggregation:
            validator = (
                f"the server sees sums of {self.config.secagg.min_cohort} clients or more, and no update by itself"
            )
        return f"{self.server.plan}\n{validator}\n{promise}"

    def _record(self) -> None:
        if self.config.transcripts:
            known = public_setting(self.config, self.task, self.server.plan)
            self.engine.observer = Recorder(self.folder / "transcripts", self.config.transcripts, self.server, known)

    def _write_metrics(self) -> None:
        write_atomic(self.folder / "metrics.jsonl", as_text(self.history).encode())

    def _write_results(self) -> None:
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.server.released.state_dict().items()}
        write_atomic(self.folder / "model.safetensors", safetensors.torch.save(weights), mode=SECRET)
        write_atomic(self.folder / "curves.png", self.picture())

    @property
    def title(self) -> str:
        """Return a one-line description of model and data."""
        model, data = (text.removesuffix(IN_PYTHON) for text in (self.config.model, self.config.data))
        return f"{model} on {data}, {self.config.clients} clients"

    def __repr__(self) -> str:
        last = self.history[-1:]
        reached = "".join(f", {each.metric} {self.task.objective.shown(each.score)}" for each in last)
        return f"<Run of {self.title}: {self.server.round} of {self.config.rounds} rounds{reached}>"

    def _repr_png_(self) -> bytes | None:
        """Return the training curves for display in a notebook."""
        return self.picture() if self.history else None

    def picture(self) -> bytes:
        """Return the training curves as a PNG."""
        return curves([metrics.line() for metrics in self.history], self.title, self.task.objective)


def message_bytes(model: nn.Module, plan: SketchPlan, wire: str | None = None) -> int:
    """Return the bytes of an encoded broadcast. An update has the same size except for its header.

    >>> from dbcl.model import networks
    >>> model = networks.build("mnist-mlp")
    >>> from dbcl.config import UNSKETCHED
    >>> sketched, clear = SketchPlan.from_model(model), SketchPlan.from_model(model, UNSKETCHED)
    >>> round(message_bytes(model, sketched) / message_bytes(model, clear), 3)
    0.507
    """
    model = copy.deepcopy(model)
    for parameter in model.parameters():  # weights that are all 0 would have no veil
        nn.init.ones_(parameter)
    return len(encode(Server(model, plan, wire=wire, calibration=()).open_round()))  # no round closes


def transcript_bytes(run: Run) -> int:
    """Estimate the bytes of the transcripts of a run's remaining rounds; 0 without transcripts.

    A client's transcript contains one message in each direction per participation. The server's
    contains one broadcast per lane, all updates (or their sum per lane) and the weights. The ground
    truth contains the weights of every round.

    >>> import tempfile
    >>> run = Run.start(RunConfig(rounds=3, transcripts=("server",)), Path(tempfile.mkdtemp()) / "run")
    >>> transcript_bytes(run) // 10**6
    19
    """
    config = run.config
    if not config.transcripts:
        return 0
    message = message_bytes(run.server.model, run.server.plan, config.wire)
    weights = sum(tensor.nbytes for tensor in run.server.model.state_dict().values())
    plan = run.server.plan
    broadcasts = min(plan.lanes, config.cohort)
    a_round = float(weights)
    for party in config.transcripts:
        if party.isdigit():
            a_round += config.cohort / config.clients * 2 * message
        else:
            a_round += weights + (broadcasts + (broadcasts if party == "server-sum" else config.cohort)) * message
    return int(a_round * max(0, config.rounds - run.server.round))
