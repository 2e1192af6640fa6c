"""The protocol: messages and their encoding, the server, the client functions, and checkpoints."""

from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.base import load_base
from dbcl.protocol.client import blinded, clipped_update, make_update
from dbcl.protocol.codec import decode, decode_base, decode_broadcast, decode_update, encode, encoded_size
from dbcl.protocol.messages import AggregationStats, Base, Broadcast, RoundReport, Update, UpdateStack
from dbcl.protocol.rejection import Reason, Rejection
from dbcl.protocol.requirements import BroadcastRequirements
from dbcl.protocol.server import Server
from dbcl.protocol.validation import AcceptedUpdate, UpdateValidator, ValidationResult

__all__ = [
    "AcceptedUpdate",
    "Aggregate",
    "AggregationStats",
    "Base",
    "Broadcast",
    "BroadcastRequirements",
    "Reason",
    "Rejection",
    "RoundReport",
    "Server",
    "Update",
    "UpdateStack",
    "UpdateValidator",
    "ValidationResult",
    "blinded",
    "clipped_update",
    "decode",
    "decode_base",
    "decode_broadcast",
    "decode_update",
    "encode",
    "encoded_size",
    "load_base",
    "make_update",
]
