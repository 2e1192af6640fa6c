"""Small networks that a configuration can name as `module:factory`."""

from torch import nn


def twelve() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.ReLU(), nn.Linear(12, 10))


def thirty_two() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def two_classes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 2))


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8, bias=False), nn.ReLU(), nn.Linear(8, 10, bias=False))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def upwards() -> nn.Module:
    """The inputs of the second layer's weight are its first axis and its kernel."""
    down = nn.Conv2d(1, 3, 8, stride=4)
    return nn.Sequential(down, nn.ConvTranspose2d(3, 2, 2), nn.Flatten(), nn.Linear(98, 10))
