"""Built-in networks: the paper's five networks with their initialisation, and heads for scattering
features.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from dbcl.errors import ConfigError
from dbcl.user_code import made, short

Shape = tuple[int, int, int]


def build(name: str, *, shape: Shape = (1, 28, 28), outputs: int = 10, seed: int = 0) -> nn.Module:
    """Make a network by name, or by `module:factory` with a factory that takes no arguments.

    Args:
        name: Name of the network.
        shape: Shape of one example, (channels, height, width).
        outputs: Number of outputs.
        seed: Seed of the initial weights.

    >>> sum(parameter.numel() for parameter in build("mnist-mlp").parameters())
    199210
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in name:
            return _imported(name)
        if name not in NETWORKS:
            raise ConfigError(f"no model {name!r}; choose {', '.join(NETWORKS)} or module:factory of your own")
        if min(*shape, outputs) < 1:
            raise ConfigError(f"shape and outputs must be 1 or more, got {shape} and {outputs}")
        try:
            return NETWORKS[name](shape, outputs)
        except (RuntimeError, OverflowError, TypeError) as error:  # of sizes that PyTorch or the memory does not have
            raise ConfigError(
                f"{name} cannot be made for examples of shape {shape} and {outputs} outputs: {short(error)}"
            ) from error


def mnist_mlp(shape: Shape, outputs: int) -> nn.Module:
    """Multilayer perceptron with three dense layers of 200, 200 and `outputs` units."""
    return _uniform(nn.Sequential(nn.Flatten(), *_dense(math.prod(shape), 200, 200), nn.Linear(200, outputs)))


def mnist_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Two 5x5 convolutions with pooling, then dense layers of 512 and `outputs` units."""
    features = nn.Sequential(*_conv(shape[0], 32, 5), nn.MaxPool2d(2), *_conv(32, 64, 5), nn.MaxPool2d(2), nn.Flatten())
    return _uniform(nn.Sequential(features, *_dense(_size(features, shape), 512), nn.Linear(512, outputs)))


def cifar_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Three 5x5 convolutions, two of them with pooling, then dense layers of 200 and `outputs`
    units.
    """
    features = nn.Sequential(
        *_conv(shape[0], 32, 5),
        *_conv(32, 64, 5),
        nn.MaxPool2d(2),
        *_conv(64, 128, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return _uniform(nn.Sequential(features, *_dense(_size(features, shape), 200), nn.Linear(200, outputs)))


def lfw_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Three 3x3 convolutions with pooling, then dense layers of 32, 32 and `outputs` units. A
    single output is the logit of a binary task.
    """
    features = nn.Sequential(
        *_conv(shape[0], 64, 3),
        nn.MaxPool2d(2),
        *_conv(64, 64, 3),
        nn.MaxPool2d(2),
        *_conv(64, 128, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return _uniform(nn.Sequential(features, *_dense(_size(features, shape), 32, 32), nn.Linear(32, outputs)))


def dlg_lenet(shape: Shape, outputs: int) -> nn.Module:
    """LeNet of the gradient inversion literature: three 5x5 convolutions with sigmoids and a dense
    layer, initialised uniformly within +-0.5.
    """
    features = nn.Sequential(
        nn.Conv2d(shape[0], 12, 5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
    )
    model = nn.Sequential(features, nn.Linear(_size(features, shape), outputs))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def scatter_linear(shape: Shape, outputs: int) -> nn.Module:
    """Dense layer on scattering features of the given shape, initialised to 0."""
    head = nn.Linear(math.prod(shape), outputs)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), head)


def scatter_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Two convolutions and a dense layer on scattering features of the given shape. The last layer
    is initialised to 0.
    """
    features = nn.Sequential(
        nn.Conv2d(shape[0], 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )
    head = nn.Linear(_size(features, shape), outputs)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(features, head)


SCATTER = ("scatter-linear", "scatter-cnn")
"""Networks whose inputs are scattering features."""
NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mnist-mlp": mnist_mlp,
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
    "lfw-cnn": lfw_cnn,
    "dlg-lenet": dlg_lenet,
    "scatter-linear": scatter_linear,
    "scatter-cnn": scatter_cnn,
}


def _imported(name: str) -> nn.Module:
    model = made(name, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name!r} made a {type(model).__name__}, and must make a torch.nn.Module")
    return model


def _dense(*sizes: int) -> list[nn.Module]:
    return [layer for din, dout in pairwise(sizes) for layer in (nn.Linear(din, dout), nn.ReLU())]


def _conv(channels: int, filters: int, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, filters, kernel), nn.ReLU()]


def _size(features: nn.Module, shape: Shape) -> int:
    try:
        return int(features(torch.zeros(1, *shape)).numel())
    except RuntimeError as error:
        raise ConfigError(f"this network cannot take examples of shape {shape}: {short(error)}") from error


def _uniform(model: nn.Module) -> nn.Module:
    """Apply the paper's uniform initialisation: +-sqrt(3 / fan-in) for dense layers, +-sqrt(6 /
    fan-in) for convolutions.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert layer.bias is not None
            fan_in = layer.weight[0].numel()
            scale = math.sqrt((3 if isinstance(layer, nn.Linear) else 6) / fan_in)
            nn.init.uniform_(layer.weight, -scale, scale)
            nn.init.uniform_(layer.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
    return model
