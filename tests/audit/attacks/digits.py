"""Single digits, and one round of a network that is attacked."""

from torch import Tensor, nn

import dbcl
from dbcl import data
from dbcl.model import networks
from dbcl.testing.nested import nested
from dbcl_audit import image_quality

DIGITS = data.load("digits")
SPAN = image_quality.span(DIGITS)


def digit(*numbers: int) -> tuple[Tensor, Tensor]:
    """Held-out examples and their labels."""
    return DIGITS.x_test[list(numbers)].double(), DIGITS.y_test[list(numbers)]


def round_of(name: str, seed: int = 0, **plan: object) -> tuple[nn.Module, dbcl.Broadcast, nn.Module]:
    """The server's model, its broadcast without a veil, and the model of a client that received it."""
    model = networks.build(name, seed=seed).double()
    broadcast = dbcl.Server(model, insecure_seed=seed, **nested({"veil": 0, "lanes": 1, **plan})).open_round()
    return model, broadcast, dbcl.blinded(model, broadcast)
