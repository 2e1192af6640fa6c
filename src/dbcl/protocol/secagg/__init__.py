"""Secure aggregation: the server learns the sum of the clients' updates and no single one (Bonawitz et al. 2017)."""

from importlib.util import find_spec

from dbcl.errors import ConfigError

if find_spec("cryptography") is None or find_spec("Crypto") is None:
    raise ConfigError(
        "secure aggregation needs cryptography and PyCryptodome, which are not installed; the remedy: "
        "pip install '.[secure]' in a clone of dbcl"
    )

from dbcl.protocol.secagg.client import ClientRound
from dbcl.protocol.secagg.keys import Identity, Registry
from dbcl.protocol.secagg.messages import decode_message, encode_message
from dbcl.protocol.secagg.rosters import Rosters
from dbcl.protocol.secagg.rounds import SecureClient, SecureRounds
from dbcl.protocol.secagg.server import GroupRound, Total
from dbcl.protocol.secagg.terms import Terms, groups

__all__ = [
    "ClientRound",
    "GroupRound",
    "Identity",
    "Registry",
    "Rosters",
    "SecureClient",
    "SecureRounds",
    "Terms",
    "Total",
    "decode_message",
    "encode_message",
    "groups",
]
