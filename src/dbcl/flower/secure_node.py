"""Flower mod for secure aggregation: only the five protocol messages leave the node."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower.client import protected, received
from dbcl.flower.guarantee_node import check_turn
from dbcl.flower.identity import KeyRegistry, NodeStore, introduction, key_name, node_store
from dbcl.flower.records import RECORD, SECURE, STEP, message_bytes, update_of
from dbcl.privacy import PrivacyPlan
from dbcl.protocol import Broadcast
from dbcl.protocol.codec import CHECKPOINT, pack, unpack
from dbcl.protocol.secagg import NoisySum, SecAggConfig, SecureClient
from dbcl.protocol.secagg.encoding import noisy_config
from dbcl.state import State

log = logging.getLogger("flwr.dbcl")

FAILED = "the app of this node failed, and the node's own log says why"
"""Error text sent to the server. The app's own error may contain data."""


@dataclass(frozen=True)
class SecureMod:
    """Adds secure aggregation to an app: the server learns only the sum of the nodes' updates.

    The app's train function does not change: the mod intercepts the reply of `dbcl.flower.reply`. A
    round has five messages. The app answers the first message, which asks to train; the mod answers
    the others. Metrics and example counts do not leave the node, and the mod rejects messages to
    evaluate.

    Args:
        config: Secure aggregation settings that the node requires; they must equal the settings of
            `DoubleBlind(secagg=config)`.
        folder: A folder on the node's local disk for its key, its aggregation group and the state
            of the round. The stored state ensures that the node takes each step only once, even if
            Flower starts several processes or the server repeats messages. A new run needs a new
            folder. Without a folder, the state is in `context.state`; this is enough if the server
            follows the protocol and states no guarantee.
        registry: Public keys of all nodes, from their `public-key` files or from `make_key`.
            Without a registry, a malicious server can add fake nodes.
        privacy: Plan of a guarantee; it must equal the plan of `DoubleBlind(privacy=plan)` and
            needs a folder. The node keeps its own participation record and rejects unplanned
            rounds. If the clients add the noise, the node adds its noise share to the update before
            masking it. The mod then also needs a registry, and derives `config` from the plan.

    >>> import torch, dbcl.flower
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> config = SecAggConfig(clip=1.0, min_cohort=3)
    >>> app = ClientApp(mods=[SecureMod(config)])
    >>> @app.train()
    ... def train(message, context):
    ...     model = dbcl.flower.blinded(torch.nn.Linear(6, 2), message)
    ...     return dbcl.flower.reply(model, message, examples=5)
    >>> inner, model = FedAvg(fraction_evaluate=0.0), torch.nn.Linear(6, 2)
    >>> strategy = dbcl.flower.DoubleBlind(inner, model, dbcl.SketchConfig(coverage="all", lanes=1), secagg=config)
    >>> result = strategy.start(dbcl.flower.LocalGrid(app, nodes=3), num_rounds=2)
    >>> [report.accepted for report in strategy.reports]
    [3, 3]
    """

    config: SecAggConfig | None = None
    folder: str | Path | None = None
    registry: KeyRegistry | None = None
    privacy: PrivacyPlan | None = None

    def __post_init__(self) -> None:
        if self.config is None and not self._noisy:
            raise ConfigError("SecureMod needs a config with the node's conditions, or a plan with noise_by='clients'")
        if self.privacy is None:
            return
        if self._noisy and self.config not in (None, noisy_config(self.privacy)):
            raise ConfigError("with noise_by='clients' in the plan the config follows from it: leave it out")
        if self.folder is None:
            raise ConfigError(
                "a guarantee needs a folder on the node's own disk, where the node counts its participations and keeps "
                "its noise: SecureMod(folder=..., privacy=plan)"
            )
        if not self._noisy:
            return
        known = None if self.registry is None else self.registry.keys
        if known is None:
            raise ConfigError(
                "a guarantee against the server needs the keys of all nodes: "
                "SecureMod(folder=..., registry=KeyRegistry.read(file), privacy=plan)"
            )
        if self.privacy.cohort == self.privacy.clients != len(known):
            raise ConfigError(
                f"the guarantee is planned for {self.privacy.clients} nodes that all take part in every round, and the "
                f"registry has {len(known)} keys"
            )

    @property
    def _noisy(self) -> bool:
        return self.privacy is not None and self.privacy.shared

    @property
    def conditions(self) -> SecAggConfig:
        """Return the secure aggregation settings that the node requires."""
        if self.privacy is not None and self.privacy.shared:
            return noisy_config(self.privacy)
        assert self.config is not None
        return self.config

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a protocol message. Pass any other message to the app."""
        category = message.metadata.message_type.split(".")[0]
        if category == "evaluate":
            raise ProtocolError(
                "what a node measures would leave it unprotected, and this one adds securely; on the server take "
                "fraction_evaluate=0.0"
            )
        if category != "train":
            return call_next(message, context)
        step = message_bytes(message, STEP)
        with node_store(self.folder, context) as store:
            hello = introduction(store, message, self.privacy)
            if hello is not None:
                return hello
        with self._client(context) as (client, store):
            if step is not None:
                return _answer(message, client.answer(step))
            record = message.content.get(RECORD)
            if not isinstance(record, ConfigRecord) or not record.pop(SECURE, False):
                raise ProtocolError(
                    "this node adds securely, and it was asked for an unprotected update; on the server take "
                    "DoubleBlind(secagg=config)"
                )
            broadcast = received(message)
            client.check(broadcast)
            self._check_turn(broadcast, store)
        trained = self._trained(message, context, call_next)
        if trained.has_error():
            return trained
        with self._client(context) as (client, store):
            keys = client.begin(broadcast, update_of(trained))
            self._check_turn(broadcast, store, count=True)
            return _answer(message, keys)

    def _trained(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the app's reply.

        With distributed noise, the text of an error is hidden from the server.
        """
        try:
            with protected():
                trained = call_next(message, context)
        except Exception:
            if not self._noisy:
                raise
            log.exception("the app of this node failed")
            raise ProtocolError(FAILED) from None
        if self._noisy and trained.has_error():
            log.error("the app of this node failed: %s", trained.error.reason)
            raise ProtocolError(FAILED)
        return trained

    def _check_turn(self, broadcast: Broadcast, store: NodeStore, *, count: bool = False) -> None:
        """Check and record the node's participation.

        With distributed noise, `NoisySum` records it.
        """
        if self.privacy is not None and not self.privacy.shared:
            check_turn(self.privacy, broadcast, store, count=count)

    @contextlib.contextmanager
    def _client(self, context: Context) -> Iterator[tuple[SecureClient, NodeStore]]:
        """Context manager that restores the node's state and saves it before a reply leaves."""
        with node_store(self.folder, context) as store:
            identity, kept = store.identity(), store.read("secure")
            encoding = NoisySum.of_client(self.privacy) if self.privacy is not None and self.privacy.shared else None
            name, registry = key_name(identity.public), self.registry or KeyRegistry()
            client = SecureClient(name, identity, self.conditions, registry, encoding)
            if kept is not None:
                client.load_state(State(*unpack(CHECKPOINT, kept)))
            try:
                yield client, store
            finally:  # a step that failed half way counts as taken
                store.write("secure", pack(CHECKPOINT, *client.state()))


def _answer(message: Message, data: bytes) -> Message:
    return Message(RecordDict({RECORD: ConfigRecord({STEP: data})}), reply_to=message)
