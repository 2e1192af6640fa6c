"""Secure aggregation: the server learns the sum of the clients' updates and no single one (Bonawitz et al. 2017)."""

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
