"""Secure aggregation (Bonawitz et al. 2017): the server learns only the sum of the updates."""

from dbcl.config import SecAggConfig
from dbcl.protocol.secagg.client import ClientRound
from dbcl.protocol.secagg.encoding import Encoding, NoisySum, Total, WeightedMean
from dbcl.protocol.secagg.groups import groups
from dbcl.protocol.secagg.history import SumHistory
from dbcl.protocol.secagg.keys import Registry, SigningKey
from dbcl.protocol.secagg.messages import decode_message, encode_message
from dbcl.protocol.secagg.participant import SecureClient
from dbcl.protocol.secagg.rounds import SecureRounds
from dbcl.protocol.secagg.server import GroupRound

__all__ = [
    "ClientRound",
    "Encoding",
    "GroupRound",
    "NoisySum",
    "Registry",
    "SecAggConfig",
    "SecureClient",
    "SecureRounds",
    "SigningKey",
    "SumHistory",
    "Total",
    "WeightedMean",
    "decode_message",
    "encode_message",
    "groups",
]
