"""`DoubleBlind`: any Flower strategy, applied to blinded models and lifted updates.

Longer than 350 lines: one class implements all methods of Flower's `Strategy` interface.
"""

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from dbcl import seeds
from dbcl.config import SketchConfig
from dbcl.data.trees import Tree
from dbcl.engines.engine import RoundObserver
from dbcl.errors import ConfigError
from dbcl.flower.advice import Advice
from dbcl.flower.aggregation import StrategyAggregation, aggregate_evaluation, validated
from dbcl.flower.attempts import counted, play_securely
from dbcl.flower.checks import conditions, refuse
from dbcl.flower.identity import NodeNames
from dbcl.flower.inner import InnerStrategy
from dbcl.flower.node_choice import NodeChoice
from dbcl.flower.nodes import RunNodes, blind_messages
from dbcl.flower.progress import Progress
from dbcl.flower.records import to_record
from dbcl.flower.run_folder import RunFolder
from dbcl.flower.secure_server import SecureExchange
from dbcl.optim import ServerOptimizer
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import RoundReport, Server, UpdateValidator
from dbcl.protocol.release import EMA_DECAY
from dbcl.protocol.secagg import SecAggConfig
from dbcl.state import Stateful

log = logging.getLogger("flwr.dbcl")  # below Flower's own logger, so that a Flower app shows it on the console

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class DoubleBlind(Strategy):
    """Wraps a Flower strategy; clients call `dbcl.flower.blinded` and `dbcl.flower.reply`.

    The inner strategy selects the nodes, configures them and aggregates the updates. It receives
    only full-size weights: the server first validates each update and lifts it to W + dV R^T.
    FedAvg and FedProx receive only the metrics, because the server can average first and lift once.
    Nodes receive the broadcast of the round to train on it, and the broadcast of the next round to
    evaluate it. The true weights stay on the server, in `server.model`.

    The server evaluates and returns `server.released`, a running mean of the true weights. With
    FedAvg and FedProx, the server's `optimizer` takes a step with the average update. Weights from
    any other strategy replace the server's weights. `reports` holds the reports of the rounds.

    Args:
        strategy: The inner strategy.
        model, sketch, wire, validator, calibration, ema_decay: See `dbcl.Server`.
        optimizer: Optimizer of the server, for FedAvg and FedProx only; momentum 0.5 by default.
        privacy: Plan of a formal guarantee. Only nodes whose turn it is take part. The server
            computes the sum itself, does not request or report the nodes' metrics, and evaluates
            and returns W + N, never W.
        secagg: Secure aggregation settings, equal on all nodes (`dbcl.flower.SecureMod`). The
            server learns only the sum of the updates. A round that yields no sum is repeated
            without the failed nodes, up to three attempts in total. The nodes' metrics are not
            sent.
        batches: Number of batches of nodes that stay together under secure aggregation and take
            turns.
        evaluate_cohort_only: Only nodes in the training cohort of the next round evaluate, so that
            no node sees the broadcast of a round without training in it. The inner strategy then
            selects the cohort before the evaluation. If False, all nodes selected by the strategy
            evaluate (all nodes by Flower's default), with a warning.
        insecure_seed: Fixes all secrets and the strategy's random draws, for reproducible
            experiments.
        checkpoint: Folder in which the state of every completed round is saved, including the
            strategy's state. A restarted program continues after the last completed round.
        round_timeout: Maximum time to wait for replies or nodes, in seconds.
        observer: Called after every round, as in the other engines, with the broadcasts to all
            nodes, including nodes that only evaluated or were rejected. It is also called at the
            end of the run, without updates, with broadcasts of a round that does not take place.

    Raises:
        ConfigError: The strategy and the settings are incompatible.
        ProtocolError: The checkpoint is damaged or belongs to another run.

    >>> import torch, dbcl.flower
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> def net():
    ...     return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     model = dbcl.flower.blinded(net(), message)
    ...     model(torch.ones(5, 8)).square().mean().backward()
    ...     torch.optim.SGD(model.parameters(), lr=0.1).step()
    ...     return dbcl.flower.reply(model, message, examples=5)
    >>> strategy = DoubleBlind(FedAvg(fraction_evaluate=0.0), net(), SketchConfig(ratio=2))
    >>> result = strategy.start(dbcl.flower.LocalGrid(app, nodes=3), num_rounds=2)
    >>> [report.accepted for report in strategy.reports]
    [3, 3]
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        sketch: SketchConfig | SketchPlan | None = None,
        *,
        wire: str | None = None,
        validator: UpdateValidator | None = None,
        calibration: Tree | None = None,
        optimizer: ServerOptimizer | None = None,
        ema_decay: float = EMA_DECAY,
        privacy: PrivacyPlan | None = None,
        secagg: SecAggConfig | None = None,
        batches: int = 1,
        evaluate_cohort_only: bool = True,
        insecure_seed: int | None = None,
        checkpoint: str | Path | None = None,
        round_timeout: float = 600.0,
        observer: RoundObserver | None = None,
    ) -> None:
        refuse(strategy, outer=DoubleBlind, resumes=checkpoint is not None)
        secagg = conditions(strategy, model, privacy, secagg, batches)
        if secagg is not None and (observer is not None or validator is not None):
            raise ConfigError(
                "an observer and a validator are shown single updates, and under secure aggregation there are none to "
                "show: leave them out; nodes clip to SecAggConfig(clip=...) themselves"
            )
        if not (math.isfinite(round_timeout) and round_timeout > 0):
            raise ConfigError(f"round_timeout must be above 0 seconds, got {round_timeout}")
        self.strategy, self.round_timeout, self.observer = strategy, round_timeout, observer
        self.evaluate_cohort_only, self.reports = evaluate_cohort_only, list[RoundReport]()
        seed = None if insecure_seed is None else seeds.derive(bytes(32), "flower", insecure_seed)
        self._inner = InnerStrategy(strategy, seed)
        self.server = Server(
            model,
            sketch,
            privacy=privacy,
            optimizer=optimizer if privacy is not None else self._inner.server_optimizer(optimizer),
            validator=validator,
            wire=wire,
            calibration=calibration,
            ema_decay=ema_decay,
            steady_lanes=secagg is not None,
            insecure_seed=insecure_seed,
        )
        self._names = NodeNames(by_key=secagg is not None or privacy is not None, privacy=privacy)
        self._nodes = RunNodes(self._names)
        self._progress = Progress(self._nodes)
        self._secure: SecureExchange | None = None
        parts: dict[str, Stateful] = {}
        if secagg is not None:
            needs = {"batches": batches, "fewest": self._inner.fewest("train")}
            self._secure = SecureExchange(self.server, secagg, self._names, **needs, persist=self._save)
            parts["secure"] = self._secure
        parts |= {"strategy": self._inner, "names": self._names, "flower": self._progress, "server": self.server}
        self._choice = NodeChoice(self.server, self._inner, self._names, self._secure)
        self._advice = Advice(self.server, insecure=seed is not None, evaluate_cohort_only=evaluate_cohort_only)
        self._folder = RunFolder(checkpoint, parts)
        self._train_config = ConfigRecord()
        self._started = False
        self._resumed = self._folder.resume(self._inner.forgotten())
        if self._resumed:
            log.info("goes on after round %s, from %s", self.server.round, self.folder)

    @property
    def folder(self) -> Path | None:
        """The folder of the checkpoints."""
        return self._folder.path

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the remaining rounds of `num_rounds`.

        Args:
            grid: The grid that transports the messages.
            initial_arrays: Initial weights instead of the model's weights. A resumed run ignores
                them.
            num_rounds: Total number of rounds; under a guarantee at most the planned number.
            timeout: Overrides `round_timeout`.
            train_config: Settings sent to the nodes for training.
            evaluate_config: Settings sent to the nodes for evaluation.
            evaluate_fn: Evaluates the weights of `server.released` on the server after every round.

        Returns:
            The metrics of all rounds and the final weights of `server.released`.

        Raises:
            ConfigError: `num_rounds` exceeds the number of rounds that the guarantee covers.
            ProtocolError: A round failed. The run can be resumed after its last completed round.
        """
        privacy = self.server.privacy
        if privacy is not None and num_rounds > privacy.rounds:
            raise ConfigError(f"the guarantee is planned for {privacy.rounds} rounds, and num_rounds is {num_rounds}")
        if timeout is not None:
            self.round_timeout = timeout
        if initial_arrays is not None and not self._started and not self._resumed:
            # Never later: other weights under the veil of a round that was sent already would undo it.
            self.server.model.load_state_dict(initial_arrays.to_torch_state_dict())
        self._started = True
        self.summary()
        self._train_config = ConfigRecord(dict(train_config or {}))
        self._choice.forget()
        with self._folder.held(self.server.round):
            return self._play(grid, num_rounds, ConfigRecord(dict(evaluate_config or {})), evaluate_fn)

    def _play(self, grid: Grid, num_rounds: int, config: ConfigRecord, evaluate_fn: EvaluateFn | None) -> Result:
        self._save()  # the first round's secrets are on the disk before anything is sent
        server, progress = self.server, self._progress
        if progress.evaluated and server.round >= num_rounds:
            log.info("all %s rounds are done; nothing to train. %s", num_rounds, self._folder.how_to_go_on(server))
        if evaluate_fn is not None and server.round == 0:
            progress.evaluated_by_server(0, evaluate_fn(0, self._released()))
        while server.round < num_rounds or (server.round and not progress.evaluated):
            if progress.evaluated or not server.round:
                self._train(grid)
            self._evaluate(grid, config, evaluate_fn)
        if self.observer is not None and self._nodes.shown:
            self.observer(
                self._nodes.broadcasts(self.server), {}
            )  # the last evaluation is of a round that is not played
        for line in server.contributions.lines():
            log.warning("not every update counted as it was: %s", line)
        progress.result.arrays = self._released()
        return progress.result

    def _train(self, grid: Grid) -> None:
        number = self.server.round + 1
        log.info("round %s: train", number)

        def configure() -> list[Message]:  # the true weights never pass through here
            return self.configure_train(number, ArrayRecord(), ConfigRecord(dict(self._train_config)), grid)

        if self._secure is None:
            _, metrics = self.aggregate_train(number, grid.send_and_receive(configure(), timeout=self.round_timeout))
        else:
            report, metrics = play_securely(self._secure, configure, grid, self.round_timeout)
            self._closed(report)
        self._progress.trained(number, metrics)
        self._save()

    def _evaluate(self, grid: Grid, config: ConfigRecord, evaluate_fn: EvaluateFn | None) -> None:
        number = self.server.round
        messages = self.configure_evaluate(number, ArrayRecord(), ConfigRecord(dict(config)), grid)
        if messages:
            log.info("round %s: evaluate", number)
            metrics = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=self.round_timeout))
            self._progress.evaluated_by_nodes(number, metrics)
        if evaluate_fn is not None:
            self._progress.evaluated_by_server(number, evaluate_fn(number, self._released()))
        self._progress.evaluated = True
        self._save()

    def summary(self) -> None:
        """Log the protection of the weights, the guarantee, and the inner strategy's summary."""
        log.info("double-blind around %s:\n%s", self._inner.described, self.server.plan)
        log.info("guarantee: %s", self.server.guarantee)
        if self._secure is not None:
            log.info("secure aggregation (%s): the nodes' metrics stay with them", self._secure.rounds.config)
        self._advice.on_start(self._inner, checkpoints=self.folder is not None)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return messages to train, with the round's broadcast, to nodes selected by the strategy.

        `arrays` is ignored: the server holds the weights.
        """
        self._check_outermost()
        asked = self._choice.to_train(server_round, config, grid, self.round_timeout)
        onlookers = set(self._nodes.shown) - self._nodes.named(asked).keys()
        self._advice.on_round(server_round, nodes=len(asked), onlookers=len(onlookers))
        return self._blind(asked, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return messages to evaluate with the next round's broadcast.

        The inner strategy selects the nodes. A second broadcast of the same weights would need a
        second veil, so nodes evaluate the next round's broadcast. No node evaluates under a
        guarantee or secure aggregation. `arrays` is ignored.
        """
        self._check_outermost()
        if self.server.privacy is not None or self._secure is not None:
            return []
        asked = self._choice.to_evaluate(server_round, config, grid, self.round_timeout)
        if asked and self.evaluate_cohort_only:
            training = ConfigRecord(dict(self._train_config))
            asked = self._choice.only_cohort(asked, training, grid, self.round_timeout)
        return self._blind(asked, grid) if asked else []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate, lift and aggregate the updates with the inner strategy, and close the round.

        Returns:
            None instead of arrays, because the weights stay on the server, and the round's metrics.

        Raises:
            ProtocolError: Too few updates were accepted, or the strategy returned no weights. The
                round stays open.
        """
        self._check_outermost()
        sent, came = self._nodes.broadcasts(self.server), self._nodes.replies(replies)
        result, answers = validated(self.server, came, self._nodes.asked)
        for who, rejection in result.rejected.items():
            log.warning("round %s: refused %s: %s", server_round, who, rejection)
        aggregation = StrategyAggregation(self.server, self._inner, server_round, came)
        self._closed(report := self.server.close_validated(result, aggregation))
        if self.observer is not None:
            self.observer(sent, {self._nodes.number(name): answers[name] for name in result.accepted})
        return None, counted(report, aggregation.metrics or MetricRecord())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate the nodes' valid metrics of the blinded model with the inner strategy."""
        came = self._nodes.replies(replies)
        metrics, rejected = aggregate_evaluation(self.server, self._inner, server_round, came, self._nodes.asked)
        for who, rejection in rejected.items():
            log.warning("round %s: no evaluation by %s: %s", server_round, who, rejection)
        return metrics

    def _blind(self, asked: list[Message], grid: Grid) -> list[Message]:
        named, secure = self._nodes.named(asked), self._secure is not None
        messages = blind_messages(self.server, named, ttl=self.round_timeout, secure=secure)
        self._nodes.ask(named, grid.get_node_ids())
        if self.server.plan.lanes > 1 or secure or self.observer is not None:
            self._save()  # after a crash a node must get the lane that it has seen, whichever nodes are asked then
        return messages

    def _closed(self, report: RoundReport) -> None:
        self._nodes.close_round()
        self.reports.append(report)

    def _save(self) -> None:
        self._folder.save(self.server.round)

    def _check_outermost(self) -> None:
        if not self._started:
            raise ConfigError(
                "DoubleBlind must be the outermost strategy, whose start() plays the rounds: DoubleBlind(other, model)"
            )

    def _released(self) -> ArrayRecord:
        return to_record(self.server.released.state_dict())
