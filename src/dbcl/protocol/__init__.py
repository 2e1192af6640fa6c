"""Messages, their bytes, the server, the client's verbs, and checkpoints."""

from dbcl.protocol.admission import Admission, Admitted, Door
from dbcl.protocol.aggregation import Aggregate
from dbcl.protocol.client import blinded, update
from dbcl.protocol.codec import decode_broadcast, decode_update, encode, encoded_size
from dbcl.protocol.messages import Broadcast, RoundReport, Tally, Update
from dbcl.protocol.server import Server

__all__ = [
    "Admission",
    "Admitted",
    "Aggregate",
    "Broadcast",
    "Door",
    "RoundReport",
    "Server",
    "Tally",
    "Update",
    "blinded",
    "decode_broadcast",
    "decode_update",
    "encode",
    "encoded_size",
    "update",
]
