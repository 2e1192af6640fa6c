"""Messages, their bytes, the server, the client's verbs, and checkpoints."""

from dbcl.protocol.admission import Admission, Admitted, Door
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.base import load_base
from dbcl.protocol.client import blinded, update
from dbcl.protocol.codec import decode_base, decode_broadcast, decode_update, encode, encoded_size
from dbcl.protocol.messages import Base, Broadcast, RoundReport, Tally, Update, UpdateStack
from dbcl.protocol.policy import Policy
from dbcl.protocol.server import Server

__all__ = [
    "Admission",
    "Admitted",
    "Aggregate",
    "Base",
    "Broadcast",
    "Door",
    "Policy",
    "RoundReport",
    "Server",
    "Tally",
    "Update",
    "UpdateStack",
    "blinded",
    "decode_base",
    "decode_broadcast",
    "decode_update",
    "encode",
    "encoded_size",
    "load_base",
    "update",
]
