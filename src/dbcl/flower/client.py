"""Client side of a Flower app: build a model from a message and reply with its update."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from dbcl import protocol, seeds
from dbcl.data import examples_of
from dbcl.engines import LocalTraining
from dbcl.errors import ProtocolError
from dbcl.flower.records import EXAMPLES, RECORD, SECURE, message_bytes
from dbcl.objective import Loss, cross_entropy
from dbcl.privacy import PrivacyPlan, UpdateNoise
from dbcl.protocol import Broadcast, BroadcastRequirements, decode_broadcast, encode
from dbcl.protocol.client import as_number

_PROTECTED = ContextVar("protected", default=False)
"""True in an app while a mod protects the app's reply."""


def blinded(module: nn.Module, message: Message, *, require: BroadcastRequirements | None = None) -> nn.Module:
    """Build a client's model from a `DoubleBlind` message: a copy of `module` with compact weights.

    Train the model with any loop and any optimiser. See `dbcl.blinded` for learning rates.

    Args:
        module: A network with the architecture of the server's model. It is not changed.
        message: The server's message, to train or to evaluate.
        require: Minimum protection of the broadcast.

    Returns:
        The model to train or to evaluate.

    Raises:
        ProtocolError: The message holds no valid broadcast.
        PlanError: The architecture differs, or the broadcast does not meet `require`.

    >>> import dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)  # messages can only be made where there is a grid
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
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
    """Reply to a `DoubleBlind` message with an update, or with metrics only if it asks to evaluate.

    Args:
        model: The trained model; may be None for a message to evaluate.
        message: The message to reply to.
        examples: Number of examples that the client used.
        metrics: Metrics to report.
        noise: Clipping and noise that the client applies to its update.

    Returns:
        The reply.

    Raises:
        ProtocolError: The update would leave the node unprotected, or the message is invalid.

    >>> import dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": encode(broadcast)})}), 1000, "train")
    >>> answer = reply(blinded(nn.Linear(6, 2), message), message, examples=600, metrics={"loss": 0.5})
    >>> dbcl.protocol.decode_update(answer.content["dbcl"]["update"]).examples
    600
    """
    numbers = {name: as_number(value) for name, value in (metrics or {}).items()}
    if message.metadata.message_type.split(".")[0] != "train":
        return Message(RecordDict({"metrics": MetricRecord({EXAMPLES: examples, **numbers})}), reply_to=message)
    if model is None:
        raise ProtocolError("an answer to a train message needs the trained model, got None")
    broadcast = received(message)
    _refuse_unprotected(message)
    update = protocol.make_update(model, broadcast, examples=examples, metrics=numbers, noise=noise)
    return Message(RecordDict({RECORD: ConfigRecord({"update": encode(update)})}), reply_to=message)


def clipped_reply(
    module: nn.Module,
    message: Message,
    data: Any,
    *,
    privacy: PrivacyPlan,
    clip: float,
    loss: Loss = cross_entropy,
) -> Message:
    """Reply to a message to train with a sum of clipped gradients, computed in float64.

    This call is the client's complete training if one example is the privacy unit. The round and
    the plan determine the batch, and each gradient is clipped separately. The sum does not leave
    the node unprotected: if the clients add the noise, the app needs `SecureMod(privacy=plan)`,
    which adds noise and masks.

    Args:
        module: The network.
        message: The server's message.
        data: The node's examples, in a form that `dbcl.data.examples_of` accepts.
        privacy: The privacy plan that the node has accepted.
        clip: Bound on the gradient norm of one example. The learning rate is the plan's clip
            divided by this bound.
        loss: Loss of a batch. It is called with one example at a time.

    Returns:
        The reply with the sum.

    Raises:
        ProtocolError: The sum would leave the node unprotected, or the plan has another privacy
            unit.

    >>> import torch, dbcl
    >>> from dbcl.flower import LocalGrid
    >>> from flwr.clientapp import ClientApp
    >>> grid = LocalGrid(ClientApp(), nodes=1)
    >>> plan = PrivacyPlan(
    ...     epsilon=2, delta=1e-5, clip=0.2, unit="example", separation=2, rounds=8, clients=4, cohort=4, examples=800,
    ...     batch=400, values=14, noise_by="clients",
    ... )
    >>> broadcast = dbcl.Server(nn.Linear(6, 2), dbcl.config.UNSKETCHED).open_round()
    >>> message = Message(RecordDict({"dbcl": ConfigRecord({"broadcast": encode(broadcast)})}), 1000, "train")
    >>> data = torch.ones(10, 6), torch.arange(10) % 2
    >>> with protected():  # as SecureMod does
    ...     answer = clipped_reply(nn.Linear(6, 2), message, data, privacy=plan, clip=0.1)
    >>> float(dbcl.protocol.decode_update(answer.content["dbcl"]["update"]).tensors["weight"].norm()) <= 5 * 0.2
    True
    >>> clipped_reply(nn.Linear(6, 2), message, data, privacy=plan, clip=0.1)
    Traceback (most recent call last):
        ...
    dbcl.errors.ProtocolError: this update would leave without noise ...
    """
    if privacy.unit != "example":
        raise ProtocolError("clipped_reply is for plans that protect one example; answer with reply")
    if privacy.shared and not _PROTECTED.get():  # whatever the server says that it asks for
        raise ProtocolError(
            "this update would leave without noise and without a mask; make the app with "
            "ClientApp(mods=[dbcl.flower.SecureMod(folder=..., registry=..., privacy=plan)])"
        )
    broadcast, own = received(message), examples_of(data)
    _refuse_unprotected(message)
    training = LocalTraining(lr=privacy.clip / clip, steps=1, example_clip=clip, separation=privacy.separation)
    model = protocol.blinded(module, broadcast)
    update = training.clipped_update(model, broadcast, own, seed=seeds.fresh(), client=0, loss=loss)
    return Message(RecordDict({RECORD: ConfigRecord({"update": encode(update)})}), reply_to=message)


@contextlib.contextmanager
def protected() -> Iterator[None]:
    """Context manager that marks the app's reply as protected by a mod."""
    token = _PROTECTED.set(True)
    try:
        yield
    finally:
        _PROTECTED.reset(token)


def _refuse_unprotected(message: Message) -> None:
    """Raise `ProtocolError` if secure aggregation is requested and no mod protects the update."""
    record = message.content.get(RECORD)
    if isinstance(record, ConfigRecord) and record.get(SECURE):
        raise ProtocolError(
            "the server adds securely, and this update would leave unprotected; make the app with "
            "ClientApp(mods=[dbcl.flower.SecureMod(config)])"
        )


def received(message: Message) -> Broadcast:
    """Decode the broadcast in a message."""
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
