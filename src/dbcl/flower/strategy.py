"""Any Flower strategy, double-blind: what goes out is blinded, and what comes back is lifted before it is averaged."""

import contextlib
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from dbcl import seeds
from dbcl.config import SketchConfig
from dbcl.data.trees import Tree
from dbcl.engines.engine import RoundObserver
from dbcl.errors import ConfigError, ProtocolError, plain
from dbcl.files import locked, make_folder, remove_scratch, user_path
from dbcl.flower.checks import refuse, refuse_beside_guarantee, refuse_beside_sums
from dbcl.flower.grid import TimeoutGrid
from dbcl.flower.identity import NodeNames
from dbcl.flower.records import EXAMPLES, from_record, holds_only, to_record, update_of, with_broadcast
from dbcl.flower.replies import common_names, filled, metrics_of, with_content
from dbcl.flower.secure_server import SecureExchange
from dbcl.flower.state import StrategyState
from dbcl.optim import ServerOptimizer, fedavg
from dbcl.plan import SketchPlan
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import (
    Broadcast,
    Reason,
    Rejection,
    RoundReport,
    Server,
    UpdateValidator,
    ValidationResult,
    checkpoint,
    encode,
)
from dbcl.protocol.aggregation import Aggregate, mean_metrics, replacement
from dbcl.protocol.secagg import SecAggConfig
from dbcl.protocol.secagg.encoding import noisy_config
from dbcl.protocol.server import EMA_DECAY
from dbcl.state import State, join

log = logging.getLogger("flwr.dbcl")  # on the console of a Flower app, as the inner strategy's own words

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
ATTEMPTS = 3
"""How often a round is begun under secure aggregation before the run gives up."""

FEW = 10
"""With fewer nodes in a round than this, one that remembers tells single examples of the others'."""


class DoubleBlind(Strategy):
    """Wraps any strategy of Flower's Message API; clients answer with `dbcl.flower.blinded` and `dbcl.flower.reply`.

    The inner strategy chooses the nodes, sets their configuration and aggregates, and sees full-size weights only: the
    `validator` validates each answer, and the server lifts it to W + dV R^T before the strategy sees it. (FedAvg and
    FedProx see only the metrics: the server averages first and lifts once, which is the same.) Nodes get the round's
    broadcast, to train and to evaluate; the true weights stay here, in `server.model`, which is `model`. To evaluate, a
    node gets the broadcast of the next round. So that no node sees rounds in which it takes no part, only nodes that
    train in that round evaluate, of those that the inner strategy chooses: it is asked for the round's nodes before the
    evaluation and not after it. `evaluate_cohort_only=False` asks all nodes that it chooses, by Flower's default all
    nodes, and says so in the log.

    `sketch`, `wire`, `calibration`, `ema_decay` and `insecure_seed` are those of `dbcl.Server`. What is evaluated here
    and returned is `server.released`, a running mean of the true weights unless `ema_decay=0`. Around FedAvg and
    FedProx the server's `optimizer` steps on the average update, with momentum 0.5 by default; what any other strategy
    makes are the new weights as they are. A node's lane of a round follows from its identity: it evaluates and trains
    in the same one.

    With `privacy`, a `dbcl.privacy.PrivacyPlan`, the server keeps that guarantee, for one node: nodes take turns (the
    inner strategy is shown those whose turn it is), the server adds the updates itself, nothing that clients measure is
    asked for or reported, and what is evaluated and returned is W + N, never W.

    With `secagg`, the `dbcl.SecAggConfig` that the nodes insist on (`dbcl.flower.SecureMod`), the server learns the sum
    of the updates and no single one. Nodes take part in `batches` that stay together, in turns. A round in which no sum
    could be made begins anew without the nodes that failed in it, three times in all. The nodes' metrics stay with
    them.

    With a folder as `checkpoint` every finished round is kept there, the strategy's own memory too, and the same
    program started again goes on after the last of them. No wait is longer than `round_timeout` seconds, for answers or
    for nodes. `observer` is called after every round, as in the other engines, with what every node was sent of it,
    those that only evaluated or whose answers were refused too; and at the end, without answers, with what was sent of
    a round that is not played. `reports` holds the rounds' reports.

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
        if privacy is not None:
            refuse_beside_guarantee(strategy, privacy)
            if privacy.shared:
                if secagg not in (None, noisy_config(privacy)):
                    raise ConfigError("with noise_by='clients' the conditions follow from the plan: leave out secagg")
                secagg = noisy_config(privacy)
        if secagg is not None:
            refuse_beside_sums(strategy, model)
        if batches < 1 or (batches > 1 and (secagg is None or privacy is not None)):
            raise ConfigError(
                f"batches are 1 or more, and go with `secagg`; a guarantee has its own (clients, cohort); got {batches}"
            )
        if secagg is not None and (observer is not None or validator is not None):
            raise ConfigError(
                "an observer and a validator are shown single updates, and under secure aggregation there are none to "
                "show: leave them out; nodes clip to SecAggConfig(clip=...) themselves"
            )
        if not (math.isfinite(round_timeout) and round_timeout > 0):
            raise ConfigError(f"round_timeout must be above 0 seconds, got {round_timeout}")
        self.strategy, self.round_timeout, self.observer = strategy, round_timeout, observer
        self.evaluate_cohort_only = evaluate_cohort_only
        self._kept = StrategyState(strategy)
        self.server = Server(
            model,
            sketch,
            privacy=privacy,
            optimizer=self._step(optimizer, privacy),
            validator=validator,
            wire=wire,
            calibration=calibration,
            ema_decay=ema_decay,
            steady_lanes=secagg is not None,
            insecure_seed=insecure_seed,
        )
        self.reports: list[RoundReport] = []
        self.folder = None if checkpoint is None else user_path(checkpoint).absolute()
        self._secure: SecureExchange | None = None
        self._names = NodeNames(by_key=secagg is not None or privacy is not None, privacy=privacy)
        if secagg is not None:
            fewest = self._fewest("train")
            self._secure = SecureExchange(
                self.server, secagg, self._names, batches=batches, fewest=fewest, persist=self._save
            )
        self._fixed = None if insecure_seed is None else seeds.derive(bytes(32), "flower", insecure_seed)
        self._numbers: dict[str, int] = {}  # of the nodes, in the order in which they were first seen
        self._asked: list[str] = []
        self._shown: set[str] = set()  # who was sent something of the open round
        self._drawn: tuple[int, list[Message]] | None = None  # the inner strategy's messages of a round that is to come
        self._train_config = ConfigRecord()
        self._said: set[str] = set()
        self._written: tuple[int, ArrayRecord] | None = None
        self._result = Result()
        self._evaluated = False
        self._started = self._resumed = False
        if self.folder is not None:
            self._resume(self.folder)

    # The rounds

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
        """Play the rounds that are left of `num_rounds`, and give all their metrics and the final weights.

        `initial_arrays` replaces the model's weights in a run that begins, not in one that goes on. `timeout` is
        `round_timeout` unless given. The final weights are those of `server.released`, which `evaluate_fn` gets after
        every round, here on the server. With a guarantee `num_rounds` is at most what was planned.
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
        with self._held():
            return self._play(grid, num_rounds, train_config, evaluate_config, evaluate_fn)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the folder of the checkpoints, where there is one."""
        if self.folder is None:
            yield
            return
        make_folder(self.folder, secret=True)
        with locked(self.folder):
            remove_scratch(self.folder)
            there = checkpoint.newest(self.folder)
            if there is not None and there != self.server.round:
                raise ProtocolError(
                    f"{self.folder} is at round {there} and this strategy at round {self.server.round}: another "
                    "process has gone on with the run; make the strategy anew"
                )
            log.info("checkpoints are in %s", self.folder)
            yield

    def _play(
        self,
        grid: Grid,
        num_rounds: int,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        self._train_config, self._drawn = ConfigRecord(dict(train_config or {})), None
        self._save()  # the first round's secrets are on the disk before anything is sent
        if self._evaluated and self.server.round >= num_rounds:
            log.info("all %s rounds are done; nothing to train. %s", num_rounds, self._how_to_go_on())
        if evaluate_fn is not None and self.server.round == 0:
            self._note(self._result.evaluate_metrics_serverapp, 0, evaluate_fn(0, self._weights()))
        while self.server.round < num_rounds or (self.server.round and not self._evaluated):
            if self._evaluated or not self.server.round:
                self._train(grid)
            self._evaluate(grid, evaluate_config, evaluate_fn)
        if self.observer is not None and self._shown:
            self.observer(self._sent(), {})  # the last evaluation is of a round that is not played
        for line in self.server.contributions.lines():
            log.warning("not every update counted as it was: %s", line)
        self._result.arrays = self._weights()
        return self._result

    def _train(self, grid: Grid) -> None:
        number = self.server.round + 1
        log.info("round %s: train", number)
        if self._secure is None:
            messages = self._messages(number, grid)
            _, metrics = self.aggregate_train(number, grid.send_and_receive(messages, timeout=self.round_timeout))
        else:
            metrics = self._add_securely(self._secure, number, grid)
        self._note(self._result.train_metrics_clientapp, number, metrics)
        self._evaluated = False
        self._save()

    def _messages(self, number: int, grid: Grid) -> list[Message]:
        # The true weights never pass through here.
        return self.configure_train(number, ArrayRecord(), ConfigRecord(dict(self._train_config)), grid)

    def _add_securely(self, secure: SecureExchange, number: int, grid: Grid) -> MetricRecord:
        """Play a round in which only a sum is learned; where none could be made, begin it anew.

        Only the last attempt goes without nodes that are lost: from then on they are no part of their group.
        """
        for left in reversed(range(ATTEMPTS)):
            messages = self._messages(number, grid)
            try:
                report = secure.play(messages, grid, self.round_timeout, partial=not left)
                break
            except ProtocolError as error:
                if not left and self._may_void:
                    log.warning("%s\nround %s is given up: the next one has other nodes", error, number)
                    self.server.void_round()
                    self._shown.clear()
                    self.reports.append(RoundReport(number - 1, 0))
                    return MetricRecord({"dbcl-accepted": 0, "dbcl-refused": len(messages)})
                if not left:
                    raise ProtocolError(
                        f"{error}\nThis was attempt {ATTEMPTS} of {ATTEMPTS}. The remedy: start the nodes named above "
                        "again, each with its own folder, and then run the same command again"
                    ) from error
                log.warning("%s\nround %s begins anew", error, number)
        for reason in report.refused:
            log.warning("round %s: left out %s", number, reason)
        self._shown.clear()
        self.reports.append(report)
        return _counted(report, MetricRecord())

    @property
    def _may_void(self) -> bool:
        """Whether a round without a sum may be given up: where groups change, clients mask for one group in a round."""
        privacy = self.server.privacy
        return privacy is not None and privacy.shared and privacy.least < privacy.clients

    def _evaluate(self, grid: Grid, config: ConfigRecord | None, own: EvaluateFn | None) -> None:
        number = self.server.round
        messages = self.configure_evaluate(number, ArrayRecord(), ConfigRecord(dict(config or {})), grid)
        if messages:
            log.info("round %s: evaluate", number)
            metrics = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=self.round_timeout))
            self._note(self._result.evaluate_metrics_clientapp, number, metrics)
        if own is not None:
            self._note(self._result.evaluate_metrics_serverapp, number, own(number, self._weights()))
        self._evaluated = True
        self._save()

    # What Flower asks of a strategy

    def summary(self) -> None:
        """Log what a client will see, the guarantee, and the inner strategy's own summary."""
        log.info("double-blind around %s:\n%s", " around ".join(self._kept.names), self.server.plan)
        log.info("guarantee: %s", self.server.guarantee)
        if self.server.privacy is not None and self._fixed is not None:
            log.warning("the noise follows from insecure_seed, so there is no guarantee: for experiments only")
        if self.server.privacy is not None and self.folder is None:
            log.warning("no checkpoint: should this run die, another one on the same data spends a second budget")
        if self._secure is not None:
            log.info("secure aggregation (%s): the nodes' metrics stay with them", self._secure.rounds.config)
        inner = vars(self._kept.strategies[-1])
        train, evaluate = inner.get("fraction_train", 1.0), inner.get("fraction_evaluate", 0.0)
        if not self.evaluate_cohort_only and evaluate > 0 and train < 1:
            self._warn_of_onlookers(f"{evaluate:.0%} of the nodes evaluate and {train:.0%} train in a round")
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the inner strategy choose the nodes and their settings; they get the round's broadcast, not `arrays`.

        Where nodes have evaluated, it has chosen them for this round already.
        """
        self._check_outermost()
        own = self._own()
        asked = self._choose(server_round, own, config, grid)
        self._drawn = None
        onlookers = self._shown - set(self._named(asked))
        if onlookers and not self.evaluate_cohort_only:
            self._warn_of_onlookers(f"{len(onlookers)} nodes have seen round {server_round} and do not train in it")
        # Where a secret veil is what hides the nodes: without one there is worse to say, and the summary says it.
        veiled = self.server.privacy is None and self._fixed is None and any(self.server.plan.veils.values())
        if veiled and 0 < len(asked) < FEW:
            self._warn_of_few(len(asked))
        return self._blind(asked, own, grid)

    def _choose(self, server_round: int, own: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """The inner strategy's messages of a round, to whom it chooses."""
        if self._drawn is not None and self._drawn[0] == self.server.round:
            return self._drawn[1]
        with repeatable(self._fixed, "configure", server_round):
            waiting = self._with_timeout(grid, "train")
            batch = None if self._secure is None else waiting.settle()
            with self._kept.waiting_for_at_most(math.inf if batch is None else len(batch)):
                asked = list(self.strategy.configure_train(server_round, own, config, waiting))
        if batch is not None and {message.metadata.dst_node_id for message in asked} != set(batch):
            raise ConfigError(
                f"{self._kept.names[0]} takes {len(asked)} of the {len(batch)} nodes of this round, and under secure "
                "aggregation who adds up together stays together; take a strategy that asks all nodes it is shown"
            )
        return asked

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The same to evaluate: nodes get the broadcast of the round to come, since no weights may be veiled twice.

        Only those of them get it that train in that round, unless `evaluate_cohort_only` is off. With a guarantee and
        under secure aggregation no node evaluates.
        """
        self._check_outermost()
        if self.server.privacy is not None or self._secure is not None:
            return []
        own = self._own()
        with repeatable(self._fixed, "evaluate", server_round):
            asked = list(
                self.strategy.configure_evaluate(server_round, own, config, self._with_timeout(grid, "evaluate"))
            )
        if asked and self.evaluate_cohort_only:
            asked = self._of_next_cohort(asked, grid)
        return self._blind(asked, own, grid) if asked else []

    def _of_next_cohort(self, asked: list[Message], grid: Grid) -> list[Message]:
        """Those messages that go to nodes of the round to come, which see its broadcast anyway."""
        config = ConfigRecord(dict(self._train_config))
        self._drawn = self.server.round, self._choose(self.server.round + 1, self._own(), config, grid)
        cohort = {message.metadata.dst_node_id for message in self._drawn[1]}
        kept = [message for message in asked if message.metadata.dst_node_id in cohort]
        if len(kept) < len(asked):
            log.info(
                "of %s nodes that were chosen to evaluate, %s train in the next round, and only these are asked",
                len(asked),
                len(kept),
            )
        return kept

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the updates, lift them, let the inner strategy aggregate, and take its arrays as the new weights."""
        self._check_outermost()
        sent = self._sent()
        came = self._by_node(replies)
        admission, answers = self._admit(came)
        for reason in map(": ".join, ((w, str(r)) for w, r in admission.rejected.items())):
            log.warning("round %s: refused %s", server_round, reason)
        admission.require(self.server.validator.min_updates)
        new, summary = None, None
        if self.server.privacy is None:  # it would aggregate metrics, too, which no guarantee covers
            with repeatable(self._fixed, "aggregate", server_round):
                new, summary = self.strategy.aggregate_train(server_round, self._lifted(admission, came))
        if self._averages:
            made = self.server.average(admission)
        elif new:
            made = self._replaced(admission, from_record(new))
        else:
            raise ProtocolError(
                f"round {admission.round}: {self._kept.names[0]} made no weights of {len(admission.accepted)} good "
                "answers; its log says why, most often that it needs more of them"
            )
        report = self.server.close(made, admission.stats())
        self._shown.clear()
        self.reports.append(report)
        if self.observer is not None:
            told = {self._numbers[name]: answers[name] for name in came if name in admission.accepted}
            self.observer(sent, told)
        return None, _counted(report, MetricRecord() if summary is None else summary)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Check the nodes' metrics, which are those of the blinded model, and let the inner strategy aggregate them."""
        came = self._by_node(replies)
        refused = self._failures(came)
        good: dict[str, dict[str, float]] = {}
        for name, message in came.items():
            with _noting(refused, name):
                good[name] = metrics_of(message, self.server.validator.max_examples)
        for who, reason in refused.items():
            log.warning("round %s: no evaluation by %s: %s", server_round, who, reason)
        if not good:
            return None
        counts = self._bounded([metrics.pop(EXAMPLES) for metrics in good.values()])
        names = common_names(good.values())
        known = mean_metrics([(metrics, count) for metrics, count in zip(good.values(), counts, strict=True)])
        messages = []
        for (name, metrics), count in zip(good.items(), counts, strict=True):
            record = MetricRecord({**filled(metrics, names, known), self._weight_key: count})
            messages.append(with_content(came[name], RecordDict({"metrics": record})))
        return self.strategy.aggregate_evaluate(server_round, messages)

    # Their parts

    def _sent(self) -> dict[int, Broadcast]:
        """Return what was sent of the open round, by the number of the node, whether it has answered or not."""
        return {self._numbers[name]: self.server.open_round(name) for name in self._in_order(self._shown)}

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Sort nodes by when they were first seen."""
        return sorted(names, key=self._numbers.__getitem__)

    def _named(self, messages: Iterable[Message]) -> dict[str, Message]:
        """Return messages to nodes by the nodes' names, in the order of their ids."""
        in_order = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        return {name: each for each in in_order if (name := self._names.of(each.metadata.dst_node_id)) is not None}

    def _warn_of_onlookers(self, who: str) -> None:
        self._warn_once(
            "onlookers",
            f"{who}: who evaluates sees the broadcast of a round that it may take no part in, and the more rounds a "
            "node sees, the more it can work out; leave out evaluate_cohort_only=False, or take "
            "fraction_evaluate=0.0, and evaluate_fn on the server",
        )

    def _warn_of_few(self, nodes: int) -> None:
        self._warn_once(
            "few",
            f"{nodes} nodes train in a round: with fewer than {FEW}, a node that remembers what it received told "
            "whether single examples are another's (AUC 0.95 and more between two, about 0.8 with ten); more nodes in "
            "a round help, and only a guarantee bounds it: DoubleBlind(privacy=...)",
        )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s", text)

    def _blind(self, asked: list[Message], own: ArrayRecord, grid: Grid) -> list[Message]:
        if any(not holds_only(message, own) for message in asked):
            raise ProtocolError(
                f"{self._kept.names[0]} sends other arrays than the model's; only the model can be blinded, so a "
                "strategy that sends more (control variates, for example) cannot be inside DoubleBlind"
            )
        secure = self._secure is not None
        named = self._named(asked)
        self._asked = list(named)
        sent = {name: self.server.open_round(name) for name in named}  # in a fixed order: lanes follow it
        written = {id(broadcast): encode(broadcast) for broadcast in sent.values()}
        messages = [
            with_broadcast(message, written[id(sent[name])], ttl=self.round_timeout, secure=secure)
            for name, message in named.items()
        ]
        self._shown.update(self._asked)
        there = [name for node in sorted(grid.get_node_ids()) if (name := self._names.of(node)) is not None]
        for name in [*there, *self._asked]:
            self._numbers.setdefault(name, len(self._numbers))
        if self.server.plan.lanes > 1 or secure or self.observer is not None:
            self._save()  # after a crash a node must get the lane that it has seen, whoever is asked then
        return messages

    def _by_node(self, replies: Iterable[Message]) -> dict[str, Message]:
        """Return the replies in the order of the nodes, so that sums do not depend on who was first."""
        came: dict[str, Message] = {}
        for message in replies:
            name = self._names.of(message.metadata.src_node_id)
            if name is not None:
                came.setdefault(name, message)  # a node counts once, with its first reply
        return {name: came[name] for name in self._asked if name in came}

    def _failures(self, came: dict[str, Message]) -> dict[str, str]:
        """Take out the error replies, and say who failed and who did not answer."""
        failed = {name: "did not answer in time; see round_timeout" for name in self._asked if name not in came}
        for name in [name for name, message in came.items() if message.has_error()]:
            reason = f": {plain(str(came.pop(name).error.reason or 'without a reason'))}"
            # The text of an error may quote data, which a guarantee does not cover.
            failed[name] = f"failed{reason if self.server.privacy is None else ', and its own log says why'}"
        return failed

    def _admit(self, came: dict[str, Message]) -> tuple[ValidationResult, dict[str, bytes]]:
        """Return what passes the validator, and the updates as they came."""
        refused = self._failures(came)
        answers = {}
        for name, message in came.items():
            with _noting(refused, name):
                answers[name] = update_of(message)
        admission = self.server.validate(answers)
        failed = {name: Rejection(Reason.NO_ANSWER, reason) for name, reason in refused.items()}
        return replace(admission, rejected={**failed, **admission.rejected}), answers

    def _lifted(self, admission: ValidationResult, senders: Mapping[str, Message]) -> list[Message]:
        """The updates as the inner strategy expects them: full-size weights, metrics with the number of examples."""
        empty: dict[str, Tensor] = {}
        weights = ((who, empty) for who in admission.accepted) if self._averages else self.server.lifted(admission)
        accepted = admission.accepted
        names, known = common_names(each.update.metrics for each in accepted.values()), admission.stats().metrics
        own = [each.update.metrics.get(self._weight_key, each.weight) for each in accepted.values()]
        counts = dict(zip(accepted, self._bounded(own), strict=True))
        messages = []
        for who, tensors in weights:
            metrics: dict[str, Any] = filled(accepted[who].update.metrics, names, known)
            metrics |= {EXAMPLES: round(accepted[who].weight), self._weight_key: counts[who]}
            content = RecordDict({self._array_key: to_record(tensors), "metrics": MetricRecord(metrics)})
            messages.append(with_content(senders[who], content))
        return messages

    def _bounded(self, weights: Sequence[float]) -> list[int | float]:
        """What answers count for in the inner strategy: at least 0, and bounded by the validator as examples are."""
        limit = self.server.validator.max_influence
        positive = [max(0.0, weight) for weight in weights]
        middle = statistics.median(positive)
        capped = [min(weight, limit * middle) if limit and middle > 0 else weight for weight in positive]
        return [int(weight) if float(weight).is_integer() else weight for weight in capped]

    def _replaced(self, admission: ValidationResult, new: Mapping[str, Tensor]) -> Aggregate:
        """The strategy's new weights; statistics are no weights, so they are averaged whatever the strategy does."""
        made = replacement(new, self.server.weights(), len(admission.accepted))
        mean, statistics = self.server.average(admission).mean(), self.server.statistics
        kept = {name: tensor for name, tensor in made.sum.items() if name not in statistics}
        return replace(made, sum={**kept, **{name: mean[name] for name in statistics if name in mean}})

    def _with_timeout(self, grid: Grid, phase: str) -> TimeoutGrid:
        secure = self._secure
        choose = self._in_turn if secure is None else secure.choose

        def allowed(there: list[int]) -> list[int]:
            named = self._names.present(there, grid, self.round_timeout)
            return [named[name] for name in choose(list(named))]

        if secure is not None:
            return TimeoutGrid(grid, self.round_timeout, lambda: secure.needed, allowed)
        fewest = str(self._fewest(phase) or "more")
        return TimeoutGrid(grid, self.round_timeout, lambda: fewest, None if self.server.privacy is None else allowed)

    def _fewest(self, phase: str) -> int:
        """For how many nodes the inner strategy waits."""
        names = ("min_available_nodes", f"min_{phase}_nodes")
        return max(getattr(each, name, 0) for each in self._kept.strategies for name in names)

    def _in_turn(self, names: list[str]) -> list[str]:
        """Return whose turn it is by the guarantee: as many as planned, those with the fewest participations first."""
        privacy, tracker = self.server.privacy, self.server.keeper.tracker
        assert privacy is not None
        assert tracker is not None
        may = [name for name in names if tracker.refusal(self.server.round, name) is None]
        return sorted(may, key=tracker.uses)[: privacy.cohort]

    def _step(self, optimizer: ServerOptimizer | None, privacy: PrivacyPlan | None) -> ServerOptimizer | None:
        """Return the server's optimiser; None for its default. What another strategy makes is taken as it is."""
        if self._averages or privacy is not None:
            return optimizer
        if optimizer is not None:
            raise ConfigError(
                f"{self._kept.names[0]} makes the new weights itself; an optimizer goes with FedAvg and FedProx"
            )
        return fedavg()

    @property
    def _averages(self) -> bool:
        """Whether the inner strategy only averages by examples: to average first and lift once is equal and cheaper."""
        plain = type(self.strategy).aggregate_train is flower.FedAvg.aggregate_train
        return plain and self._weight_key == EXAMPLES

    @property
    def _weight_key(self) -> str:
        return str(getattr(self._kept.strategies[-1], "weighted_by_key", EXAMPLES))

    @property
    def _array_key(self) -> str:
        return str(getattr(self._kept.strategies[-1], "arrayrecord_key", "arrays"))

    def _check_outermost(self) -> None:
        if not self._started:
            raise ConfigError(
                "DoubleBlind must be the outermost strategy, and its own start() plays the rounds; put the other "
                "strategy inside: DoubleBlind(other, model)"
            )

    def _own(self) -> ArrayRecord:
        """The true weights for the inner strategy, written once a round, in a record that it may change.

        With a guarantee it sees what the clients see together.
        """
        if self._written is None or self._written[0] != self.server.round:
            seen = self.server.weights() if self.server.privacy is None else self.server.noisy_weights()
            self._written = self.server.round, to_record(seen)
        return ArrayRecord(dict(self._written[1]))

    def _weights(self) -> ArrayRecord:
        """Return the model to evaluate and to keep: a running mean of W, or with a guarantee of W + N."""
        return to_record(self.server.released.state_dict())

    @staticmethod
    def _note(history: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
        if metrics is not None:
            log.info("round %s: %s", number, dict(metrics))
            history[number] = metrics

    # Checkpoints

    def _save(self) -> None:
        if self.folder is None:
            return
        own = {
            "evaluated": self._evaluated,
            "nodes": list(self._numbers),
            "shown": self._in_order(self._shown),
            "history": [[[n, dict(m)] for n, m in kept.items()] for kept in _histories(self._result)],
        }
        parts = {
            "server": self.server.state(),
            "strategy": self._kept.state(),
            "names": self._names.state(),
            "flower": State(own, {}),
        }
        if self._secure is not None:
            parts["secure"] = self._secure.state()
        checkpoint.save(self.folder, self.server.round, join(**parts))

    def _how_to_go_on(self) -> str:
        if self.server.privacy is not None and self.server.round >= self.server.privacy.rounds:
            return "The budget of the guarantee is spent, and the run cannot go on"
        anew = "" if self.folder is None else f"; to begin anew, use another folder than {self.folder} as checkpoint"
        return f"To go on, ask for more rounds (num_rounds){anew}"

    def _resume(self, folder: Path) -> None:
        forgotten = self._kept.forgotten()
        if forgotten:
            log.warning("not in checkpoints, so a run that goes on starts with it anew: %s", ", ".join(forgotten))
        if not any(folder.glob("round-*.dbcl")):
            return
        state = checkpoint.load(folder)
        if not {"flower", "strategy", "server", "names"} <= state.values.keys():
            raise ProtocolError(
                f"{folder} holds checkpoints of another engine or of an older dbcl; choose another folder"
            )
        own: Mapping[str, Any] = state.values["flower"]
        if ("secure" in state.values) != (self._secure is not None):
            with_or_without = "with" if "secure" in state.values else "without"
            raise ProtocolError(
                f"the run in {folder} is one {with_or_without} secure aggregation; go on as it began, or take another "
                "folder as checkpoint, to begin anew"
            )
        try:
            if self._secure is not None:
                self._secure.load_state(state.part("secure"))
            self._kept.load_state(state.part("strategy"))
            self._names.load_state(state.part("names"))
            self.server.load_state(state.part("server"))
        except ProtocolError as error:
            raise ProtocolError(
                f"the run in {folder} cannot go on; use the model, the plan and the strategy that it began with, or "
                f"another folder as checkpoint, to begin anew: {error}"
            ) from error
        self._evaluated, self._resumed = own["evaluated"], True
        self._numbers = {str(name): number for number, name in enumerate(own["nodes"])}
        self._shown = set(map(str, own["shown"]))
        for kept, stored in zip(_histories(self._result), own["history"], strict=True):
            kept.update({number: MetricRecord(metrics) for number, metrics in stored})
        log.info("goes on after round %s, from %s", self.server.round, folder)


@contextlib.contextmanager
def repeatable(seed: bytes | None, phase: str, round: int) -> Iterator[None]:
    """With a seed, whatever a strategy draws follows from it; without one it is not repeatable."""
    if seed is None:
        yield
        return
    word = int(seeds.words(seed, phase, round, n=1)[0]) >> 32
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(word)
    np.random.seed(word)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


@contextlib.contextmanager
def _noting(refused: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        refused[name] = plain(str(error))
    except Exception as error:  # whatever one node sent, the others' round goes on
        log.debug("%s", name, exc_info=True)
        refused[name] = f"cannot be read ({type(error).__name__})"


def _counted(report: RoundReport, metrics: MetricRecord) -> MetricRecord:
    metrics["dbcl-accepted"], metrics["dbcl-refused"] = report.accepted, len(report.refused)
    return metrics


def _histories(result: Result) -> list[dict[int, MetricRecord]]:
    return [result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp]
