"""Flower mod that enforces a guarantee's participation limits on the node."""

import json
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from dbcl.errors import ConfigError, ProtocolError
from dbcl.flower.client import received
from dbcl.flower.identity import NodeStore, introduction, node_store
from dbcl.flower.records import STEP, message_bytes
from dbcl.privacy import ParticipationTracker, PrivacyPlan
from dbcl.protocol import Broadcast, encode
from dbcl.protocol.secagg.keys import digest
from dbcl.state import State

OWN = "this node"


@dataclass(frozen=True)
class GuaranteeMod:
    """Limits a node's participation to the schedule of a guarantee, with the node's own record.

    The server keeps a participation record too, by the nodes' keys. This mod sends the node's
    public key to the server and keeps an independent record on the node. It rejects rounds that
    come too early, too often or after the last planned round. It also rejects a second broadcast of
    a round and messages to evaluate.

    Args:
        privacy: The plan that the node accepts; it must equal the plan of
            `DoubleBlind(privacy=plan)`.
        folder: A folder on the node's local disk for the key and the participation record. A new
            run on the same data spends a second privacy budget and needs a new folder.

    >>> import tempfile, torch, dbcl.flower
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> plan = PrivacyPlan(epsilon=8, delta=1e-3, clip=0.1, rounds=2, clients=4, cohort=2)
    >>> app = ClientApp(mods=[GuaranteeMod(plan, folder=tempfile.mkdtemp())])
    >>> @app.train()
    ... def train(message, context):
    ...     model = dbcl.flower.blinded(torch.nn.Linear(6, 2), message)
    ...     return dbcl.flower.reply(model, message, examples=5)
    >>> inner, model = FedAvg(fraction_evaluate=0.0), torch.nn.Linear(6, 2)
    >>> strategy = dbcl.flower.DoubleBlind(inner, model, dbcl.SketchConfig(coverage="all"), privacy=plan)
    >>> result = strategy.start(dbcl.flower.LocalGrid(app, nodes=4), num_rounds=2)
    >>> [report.accepted for report in strategy.reports]
    [2, 2]
    """

    privacy: PrivacyPlan
    folder: str | Path

    def __post_init__(self) -> None:
        if self.privacy.shared:
            raise ConfigError(
                "this mod counts, and adds neither noise nor masks; with noise_by='clients' in the plan take "
                "SecureMod(folder=..., registry=..., privacy=plan)"
            )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message to train if the node's participation record allows the round."""
        category = message.metadata.message_type.split(".")[0]
        if category == "evaluate":
            raise ProtocolError(
                "what a node measures is not covered by the guarantee; on the server take fraction_evaluate=0.0"
            )
        if category != "train" or message_bytes(message, STEP) is not None:
            return call_next(message, context)
        with node_store(self.folder, context) as store:
            hello = introduction(store, message, self.privacy)
            if hello is not None:
                return hello
            check_turn(self.privacy, received(message), store)
        answer = call_next(message, context)
        if not answer.has_error():
            with node_store(self.folder, context) as store:
                check_turn(self.privacy, received(message), store, count=True)
        return answer


def check_turn(privacy: PrivacyPlan, broadcast: Broadcast, store: NodeStore, *, count: bool = False) -> None:
    """Raise `ProtocolError` if the node's own participation record forbids answering a broadcast.

    Args:
        privacy: The plan that the node accepts.
        broadcast: The received broadcast.
        store: The node's storage, which holds the participation record.
        count: Record the participation on disk. A repeated broadcast is recorded only once.
    """
    round, shown = broadcast.round, digest(encode(broadcast)).hex()
    tracker, kept = _tracker(privacy), store.read("participation")
    if kept is not None:
        values = json.loads(kept)
        if values["last"] == [round, shown]:
            return
        if values["last"][0] == round:
            raise ProtocolError(f"this node has answered another broadcast of round {round}")
        tracker.load_state(State(values["tracker"], {}))
    if (reason := tracker.refusal(round, OWN)) is not None:
        raise ProtocolError(f"round {round}: this node {reason}, by its own count")
    if count:
        tracker.use(round, [OWN])
        store.write("participation", json.dumps({"last": [round, shown], "tracker": tracker.state().values}).encode())


def _tracker(privacy: PrivacyPlan) -> ParticipationTracker:
    return ParticipationTracker(
        rounds=privacy.rounds, separation=privacy.separation, participations=privacy.participations, clients=1
    )
