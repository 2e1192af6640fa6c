"""A node under secure aggregation: a mod that lets nothing leave but the five answers of the protocol."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from dbcl.errors import ProtocolError
from dbcl.files import SECRET, locked, make_folder, write_atomic
from dbcl.flower.client import received
from dbcl.flower.records import RECORD, SECURE, STEP, message_bytes, node_name, update_of
from dbcl.protocol import decode_update
from dbcl.protocol.codec import CHECKPOINT, pack, unpack
from dbcl.protocol.secagg import Identity, Registry, SecureClient, Terms
from dbcl.protocol.secagg.pins import FirstUse
from dbcl.state import State

KEPT = "dbcl-secure"
"""The record in a node's context that holds its side of the round, where there is no folder."""


@dataclass(frozen=True)
class SecureMod:
    """Makes an app add securely: the server learns the sum of the nodes' updates, and no single one.

    The app's train function stays as it is; what it answers with `dbcl.flower.reply` goes no further than this mod. Of
    the five messages of a round the first is to train, and the mod answers the others. Metrics and the number of
    examples do not leave the node, and messages to evaluate are refused.

    `terms` must be those of `DoubleBlind(secure=terms)`. Flower may start a process for each message, and two at once
    where a server sends two: in `folder`, on the node's own disk, the node keeps its key, the keys of the others and
    its side of the round, and takes each step once, whatever it is sent. Without one all that is in `context.state`,
    which is enough for a server that keeps to the protocol. `registry` says who the others are, by what is in the file
    `public-key` of their folders; without it their keys are remembered from the first time on.

    >>> import torch, dbcl.flower
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> terms = Terms(bound=1.0, min_cohort=3)
    >>> app = ClientApp(mods=[SecureMod(terms)])
    >>> @app.train()
    ... def train(message, context):
    ...     model = dbcl.flower.blinded(torch.nn.Linear(6, 2), message)
    ...     return dbcl.flower.reply(model, message, examples=5)
    >>> inner, model = FedAvg(fraction_evaluate=0.0), torch.nn.Linear(6, 2)
    >>> strategy = dbcl.flower.DoubleBlind(inner, model, cover="all", lanes=1, secure=terms)
    >>> result = strategy.start(dbcl.flower.LocalGrid(app, nodes=3), num_rounds=2)
    >>> [report.accepted for report in strategy.reports]
    [3, 3]
    """

    terms: Terms
    folder: str | Path | None = None
    registry: Registry | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message to train, or let another one through."""
        category = message.metadata.message_type.split(".")[0]
        if category == "evaluate":
            raise ProtocolError(
                "what a node measures would leave it in clear, and this one adds securely; on the server take "
                "fraction_evaluate=0.0"
            )
        if category != "train":
            return call_next(message, context)
        step = message_bytes(message, STEP)
        if step is not None:
            with self._client(context) as client:
                answer = client.answer(step)
        else:
            record = message.content.get(RECORD)
            if not isinstance(record, ConfigRecord) or not record.pop(SECURE, False):
                raise ProtocolError(
                    "this node adds securely, and it was asked for an update in clear; on the server take "
                    "DoubleBlind(secure=terms)"
                )
            broadcast, trained = received(message), call_next(message, context)
            if trained.has_error():
                return trained
            with self._client(context) as client:
                answer = client.begin(broadcast, decode_update(update_of(trained)))
        return Message(RecordDict({RECORD: ConfigRecord({STEP: answer})}), reply_to=message)

    @contextlib.contextmanager
    def _client(self, context: Context) -> Iterator[SecureClient]:
        """The node as it was after its last step. What it has done since is written down before anything is said."""
        name = node_name(context.node_id)
        registry = FirstUse() if self.registry is None else self.registry
        client = SecureClient(name, Identity(), self.terms, registry)
        with self._place(context) as place:
            kept = place.read()
            if kept is not None:
                client.load_state(State(*unpack(CHECKPOINT, kept)))
            try:
                yield client
            finally:  # a step that failed half way is taken
                place.write(pack(CHECKPOINT, *client.state()), client.identity.public)

    @contextlib.contextmanager
    def _place(self, context: Context) -> "Iterator[_Folder | _Context]":
        if self.folder is None:
            yield _Context(context)
            return
        folder = Path(self.folder).expanduser() / f"node-{context.node_id}"
        make_folder(folder, secret=True)
        with locked(folder):  # a second message at the same time is refused
            yield _Folder(folder)


@dataclass(frozen=True)
class _Folder:
    path: Path

    def read(self) -> bytes | None:
        own = self.path / "secure.dbcl"
        return own.read_bytes() if own.exists() else None

    def write(self, data: bytes, public: bytes) -> None:
        write_atomic(self.path / "secure.dbcl", data, mode=SECRET)
        if not (self.path / "public-key").exists():  # for the registries of others
            write_atomic(self.path / "public-key", public.hex().encode())


@dataclass(frozen=True)
class _Context:
    context: Context

    def read(self) -> bytes | None:
        record = self.context.state.get(KEPT)
        data = record.get("state") if isinstance(record, ConfigRecord) else None
        return data if isinstance(data, bytes) else None

    def write(self, data: bytes, public: bytes) -> None:
        self.context.state[KEPT] = ConfigRecord({"state": data})
