"""The preset `guaranteed`: its plan, a linear head on public features, and the mod of a node that insists on it."""

from dataclasses import replace

from flwr.app import Context, Message, UserConfig
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

import dbcl.flower
from dbcl import data
from dbcl.data import TensorExamples
from dbcl.features import ImageFeatures, extract
from dbcl.model import networks
from dbcl.privacy import PrivacyPlan
from dbcl.privacy.planning import suggest

PRESET = "guaranteed"
CLIP = 0.1
"""Bound on the norm of the gradient of one example."""
TARGET = dbcl.PrivacyConfig(epsilon=2.0, delta=1e-5, clip=CLIP, unit="example", noise_by="clients")
IMAGE, FEATURES, CLASSES = (1, 28, 28), (81, 7, 7), 10


def plan_of(name: str, parties: int, rounds: int) -> PrivacyPlan:
    """Return the plan of the guarantee, which the server and every node compute by themselves from public numbers.

    Args:
        name: The dataset.
        parties: Number of nodes, which all take part in every round.
        rounds: Number of rounds.
    """
    examples, values = len(data.load(name).y_train), sum(each.numel() for each in head().parameters())
    found = suggest(TARGET, clients=parties, examples=examples, values=values, rounds=rounds)
    return PrivacyPlan.from_config(
        replace(TARGET, clip=found.step, separation=found.separation),
        rounds=found.rounds,
        clients=parties,
        cohort=parties,
        examples=examples,
        batch=examples // found.separation,
        values=values,
    )


def head() -> nn.Module:
    """Make the network: one linear layer, initially 0."""
    return networks.scatter_linear(FEATURES, CLASSES)


def features(name: str, x: Tensor, y: Tensor, cache: str | None = None) -> TensorExamples:
    """Compute the scattering features of images, which no data have shaped, or read them from a folder."""
    dataset = data.load(name)
    pixels = x * dataset.std + dataset.mean  # from 0 to 1: the normalisation of the dataset is a statistic of data
    return extract(ImageFeatures(IMAGE), data.examples_of((pixels, y)), cache=cache)


def insists(own: UserConfig) -> bool:
    """Return whether a node's own configuration, which the server cannot change, asks for the guarantee."""
    return own.get("preset") == PRESET


def data_of_node(own: UserConfig) -> str:
    """Return the dataset by a node's own configuration."""
    return str(own.get("data", "digits"))


def plan_of_node(own: UserConfig) -> PrivacyPlan:
    """Return the plan by a node's own configuration."""
    return plan_of(data_of_node(own), int(own["num-partitions"]), int(own["rounds"]))


def guarantee(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let a node that insists on the guarantee take part with its share of the noise, or not at all."""
    own = context.node_config
    if not insists(own):
        return call_next(message, context)
    registry = dbcl.flower.KeyRegistry.read(str(own["keys"]))
    mod = dbcl.flower.SecureMod(folder=str(own["secrets"]), registry=registry, privacy=plan_of_node(own))
    return mod(message, context, call_next)
