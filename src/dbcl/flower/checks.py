"""Checks for strategies that `DoubleBlind` does not support. Each error suggests an alternative."""

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from torch import nn

from dbcl.errors import ConfigError
from dbcl.flower.records import EXAMPLES
from dbcl.flower.state import chain
from dbcl.model.norm_stats import is_statistic
from dbcl.model.tensors import broadcast_names
from dbcl.privacy import PrivacyPlan
from dbcl.protocol.secagg import SecAggConfig
from dbcl.protocol.secagg.encoding import noisy_config
from dbcl.protocol.secagg.rounds import unbounded

CLIENT_SIDE = (
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)
TREES = (flower.FedXgbBagging, flower.FedXgbCyclic)


def refuse_beside_guarantee(strategy: Strategy, privacy: PrivacyPlan) -> None:
    """Raise `ConfigError` for aggregation or client metrics that a guarantee does not cover."""
    name, settings = type(strategy).__name__, vars(strategy)
    if privacy.unit != "client" and not privacy.shared:
        raise ConfigError(
            "an app's own training loop need not clip every example, and the server could not tell; with Flower take "
            'unit="client", or let the clients add the noise: noise_by="clients"'
        )
    if type(strategy).aggregate_train is not flower.FedAvg.aggregate_train:
        raise ConfigError(
            f"{name} makes more of the updates than their sum, and the guarantee is planned for the sum alone; take "
            "FedAvg or FedProx"
        )
    if settings.get("weighted_by_key", EXAMPLES) != EXAMPLES:
        raise ConfigError(
            "with a guarantee all updates count alike, or by their examples up to the plan's weight_cap; leave out "
            f"{name}(weighted_by_key=...)"
        )
    if settings.get("fraction_evaluate"):
        raise ConfigError(
            "what clients measure would leave without noise, and the guarantee does not cover it; take "
            f"{name}(fraction_evaluate=0.0), and evaluate_fn for what the server can measure itself"
        )
    if settings.get("fraction_train", 1.0) != 1.0:
        raise ConfigError(
            f"the guarantee is planned for {privacy.cohort} clients in a round, and {name} is shown only those whose "
            "turn it is; leave out fraction_train"
        )
    most = max(settings.get("min_available_nodes", 0), settings.get("min_train_nodes", 0))
    if most > privacy.cohort:
        raise ConfigError(
            f"the guarantee is planned for {privacy.cohort} clients in a round, and {name} waits for {most}; lower "
            "min_available_nodes and min_train_nodes"
        )


def refuse_beside_sums(strategy: Strategy, model: nn.Module) -> None:
    """Raise `ConfigError` if a strategy or model needs more than the sum of the updates.

    Under secure aggregation the server learns only this sum.
    """
    name, settings = type(strategy).__name__, vars(strategy)
    if (problem := unbounded(filter(is_statistic, broadcast_names(model)))) is not None:
        raise ConfigError(problem)
    if type(strategy).aggregate_train is not flower.FedAvg.aggregate_train:
        raise ConfigError(
            f"{name} makes more of the updates than their mean, and under secure aggregation no single one is seen; "
            "take FedAvg or FedProx, or leave out secure"
        )
    if settings.get("weighted_by_key", EXAMPLES) != EXAMPLES:
        raise ConfigError(
            "under secure aggregation an update counts by its examples, up to SecAggConfig(weight_cap=...); leave out "
            f"{name}(weighted_by_key=...)"
        )
    if settings.get("fraction_evaluate"):
        raise ConfigError(
            "what nodes measure would leave them without protection; take "
            f"{name}(fraction_evaluate=0.0), and evaluate_fn for what the server can measure itself"
        )
    if settings.get("fraction_train", 1.0) != 1.0:
        raise ConfigError(
            "under secure aggregation the nodes of a round are a batch that stays together; leave out "
            f"{name}(fraction_train=...), and take DoubleBlind(batches=...)"
        )


def conditions(
    strategy: Strategy, model: nn.Module, privacy: PrivacyPlan | None, secagg: SecAggConfig | None, batches: int
) -> SecAggConfig | None:
    """Return the secure aggregation settings; distributed noise derives them from the privacy plan.

    Raises:
        ConfigError: The guarantee, the settings and the strategy are incompatible.
    """
    if privacy is not None:
        refuse_beside_guarantee(strategy, privacy)
        if privacy.shared:
            if secagg not in (None, noisy_config(privacy)):
                raise ConfigError("with noise_by='clients' the conditions follow from the plan: leave out secagg")
            secagg = noisy_config(privacy)
    if secagg is not None:
        refuse_beside_sums(strategy, model)
    if batches < 1 or (batches > 1 and (secagg is None or privacy is not None)):
        raise ConfigError(
            f"batches are 1 or more, and go with `secagg`; a guarantee has its own (clients, cohort); got {batches}"
        )
    return secagg


def refuse(strategy: Strategy, *, outer: type[Strategy], resumes: bool) -> None:
    """Raise `ConfigError`, with an alternative, for an unsupported composition of strategies."""
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
