"""The client's two lines in a Flower app: make the model of a message, and reply with its change."""

from collections.abc import Mapping
from functools import lru_cache

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from dbcl import protocol
from dbcl.errors import ProtocolError
from dbcl.flower.records import EXAMPLES, RECORD, SECURE, message_bytes
from dbcl.privacy import UpdateNoise
from dbcl.protocol import Broadcast, Policy, decode_broadcast, encode
from dbcl.protocol.client import as_number


def blinded(module: nn.Module, message: Message, *, require: Policy | None = None) -> nn.Module:
    """Make a client's model from a message of `DoubleBlind`: a copy of `module` with the compact weights in it.

    Train it with any loop and any optimiser; see `dbcl.blinded` for learning rates and for `require`.

    >>> import dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)  # messages can only be made where there is a grid
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), cover="all").open_round()
    >>> message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": encode(broadcast)})}), 1000, "train")
    >>> {name: tuple(parameter.shape) for name, parameter in blinded(nn.Linear(6, 2), message).named_parameters()}
    {'bias': (2,), 'parametrizations.weight.original': (2, 3)}
    """
    return protocol.blinded(module, received(message), require=require)


def reply(
    model: nn.Module | None,
    message: Message,
    *,
    examples: int,
    metrics: Mapping[str, float] | None = None,
    noise: UpdateNoise | None = None,
) -> Message:
    """Answer a message of `DoubleBlind`: to train with the change of the model, to evaluate with the metrics alone.

    In a function that evaluates, `model` may be None. With `noise` the client clips its update and adds noise to it.

    >>> import dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), cover="all").open_round()
    >>> message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": encode(broadcast)})}), 1000, "train")
    >>> answer = reply(blinded(nn.Linear(6, 2), message), message, examples=600, metrics={"loss": 0.5})
    >>> dbcl.decode_update(answer.content["dbcl"]["update"]).examples
    600
    """
    numbers = {name: as_number(value) for name, value in (metrics or {}).items()}
    if message.metadata.message_type.split(".")[0] != "train":
        return Message(RecordDict({"metrics": MetricRecord({EXAMPLES: examples, **numbers})}), reply_to=message)
    if model is None:
        raise ProtocolError("an answer to a train message needs the trained model, got None")
    broadcast = received(message)
    if message.content[RECORD].get(SECURE):
        raise ProtocolError(
            "the server adds securely, and this update would leave in clear; make the app with "
            "ClientApp(mods=[dbcl.flower.SecureMod(terms)])"
        )
    update = protocol.update(model, broadcast, examples=examples, metrics=numbers, noise=noise)
    return Message(RecordDict({RECORD: ConfigRecord({"update": encode(update)})}), reply_to=message)


def received(message: Message) -> Broadcast:
    """The broadcast in a message."""
    data = message_bytes(message, "broadcast")
    if data is None:
        raise ProtocolError(
            "this message holds no dbcl broadcast; wrap the server's strategy: DoubleBlind(strategy, model)"
        )
    return _decoded(data)


@lru_cache(maxsize=1)
def _decoded(data: bytes) -> Broadcast:
    # A client reads its message twice, to begin and to answer; models and updates are made of copies.
    return decode_broadcast(data)
