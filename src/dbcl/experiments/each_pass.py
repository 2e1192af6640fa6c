"""Networks whose hidden layers draw a sketch of their own in every forward pass, as dropout draws its masks.

That is how one version of the code published by the paper's authors has it. It takes the whole of W on the client, so
it hides nothing and can be no protocol; `table1` plays it to say which of the paper's numbers it gives.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dbcl import models

RATIO = 2
"""The paper's: a sketch has half as many outputs as inputs."""


def sketched(weight: Tensor) -> Tensor:
    """W S S^T of a balanced count sketch that is drawn here, from PyTorch's own generator.

    >>> weight = torch.ones(3, 4)
    >>> sorted(sketched(weight).abs().unique().tolist()) in ([0.0], [2.0], [0.0, 2.0])  # sums of two with signs
    True
    """
    flat = weight.flatten(1)  # (dout, dim)
    dim = flat.shape[1]
    width = max(1, dim // RATIO)
    bucket = torch.randperm(dim, device=weight.device) % width
    sign = torch.randint(0, 2, (dim,), device=weight.device).to(weight) * 2 - 1
    sums = flat.new_zeros(len(flat), width).index_add(1, bucket, flat * sign)
    return (sums[:, bucket] * sign).view_as(weight)


class EachPass(nn.Module):
    """A layer that computes with W S S^T while it is trained, S drawn in every pass, and with W otherwise.

    >>> layer = EachPass(nn.Linear(64, 3))
    >>> x = torch.randn(2, 64)
    >>> bool((layer(x) == layer(x)).all()), bool((layer.eval()(x) == layer.layer(x)).all())
    (False, True)
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        weight = sketched(self.layer.weight) if self.training else self.layer.weight
        result: Tensor = functional_call(self.layer, {"weight": weight}, (x,))
        return result


def mlp() -> nn.Module:
    """The paper's MLP for MNIST.

    >>> sum(isinstance(layer, EachPass) for layer in mlp().modules())
    2
    """
    return _hidden(models.mnist_mlp((1, 28, 28), 10))


def cnn() -> nn.Module:
    """The paper's CNN for MNIST.

    >>> sum(isinstance(layer, EachPass) for layer in cnn().modules())
    3
    """
    return _hidden(models.mnist_cnn((1, 28, 28), 10))


def _hidden(network: nn.Module) -> nn.Module:
    """A network with all its dense and convolutional layers but the last in `EachPass`."""
    layers = [name for name, each in network.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    for name in layers[:-1]:
        parent, _, key = name.rpartition(".")
        whole = network.get_submodule(parent)
        setattr(whole, key, EachPass(getattr(whole, key)))
    return network
