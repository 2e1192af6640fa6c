"""Which strategies cannot be inside DoubleBlind, and what to do instead."""

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from dbcl.errors import ConfigError
from dbcl.flower.state import chain

CLIENT_SIDE = (
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)
TREES = (flower.FedXgbBagging, flower.FedXgbCyclic)


def refuse(strategy: Strategy, *, outer: type[Strategy], resumes: bool) -> None:
    """Say what to do instead of a composition that cannot work."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{type(strategy).__name__} is no strategy of Flower's Message API; take one of flwr.serverapp.strategy or "
            "a subclass of its Strategy (those of flwr.server.strategy are the old generation)"
        )
    for each in chain(strategy):
        name = type(each).__name__
        if isinstance(each, outer):
            raise ConfigError(f"a {name} is inside a {name}; one is enough")
        if isinstance(each, CLIENT_SIDE):
            raise ConfigError(
                f"{name} leaves the clipping to a client mod, which does not see a blinded update; "
                f"take {name.replace('Client', 'Server')}: lifting keeps lengths, so it clips the same"
            )
        if isinstance(each, TREES):
            raise ConfigError(f"{name} trains trees; only the weights of a PyTorch model can be blinded")
        if resumes and getattr(each, "accountant", None) is not None:
            raise ConfigError(
                f"{name} has a privacy accountant, whose spending a checkpoint cannot keep: a run that goes on would "
                "count from zero; leave out accountant or checkpoint"
            )
