"""The paper's five networks, by name, with the paper's initial weights; and the loss that they are trained with."""

import contextlib
import functools
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbcl.errors import ConfigError

Shape = tuple[int, int, int]
SHORT = 300
"""So many characters of somebody else's error are shown."""


def build(name: str, *, shape: Shape = (1, 28, 28), outputs: int = 10, seed: int = 0) -> nn.Module:
    """Make a network by name, or by `module:factory` where the factory takes no arguments.

    `shape` is one example's (channels, height, width); the initial weights follow from `seed`.

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
    """Three dense layers, 200-200-outputs."""
    return _uniform(nn.Sequential(nn.Flatten(), *_dense(math.prod(shape), 200, 200), nn.Linear(200, outputs)))


def mnist_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Two 5x5 convolutions with pooling, then 512-outputs."""
    features = nn.Sequential(*_conv(shape[0], 32, 5), nn.MaxPool2d(2), *_conv(32, 64, 5), nn.MaxPool2d(2), nn.Flatten())
    return _uniform(nn.Sequential(features, *_dense(_size(features, shape), 512), nn.Linear(512, outputs)))


def cifar_cnn(shape: Shape, outputs: int) -> nn.Module:
    """Three 5x5 convolutions, two of them pooled, then 200-outputs."""
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
    """Three 3x3 convolutions with pooling, then 32-32-outputs; one output is a logit for a yes-or-no task."""
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
    """The network of gradient matching: three 5x5 convolutions with sigmoids and a dense layer, all within +-0.5."""
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


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mnist-mlp": mnist_mlp,
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
    "lfw-cnn": lfw_cnn,
    "dlg-lenet": dlg_lenet,
}


def loss(logits: Tensor, labels: Tensor) -> Tensor:  # (n, outputs), (n,) -> ()
    """The mean of `losses`.

    >>> loss(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.3863)
    """
    return _cross_entropy(logits, labels, "mean")


def losses(logits: Tensor, labels: Tensor) -> Tensor:  # (n, outputs), (n,) -> (n,)
    """The cross entropy of every example. With a single output, that is the logit of class 1 against class 0.

    The labels are classes, or probabilities of the classes, (n, outputs); of class 1, (n,), with a single output.

    >>> losses(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor([1.3863, 1.3863])
    >>> losses(torch.zeros(2, 4), torch.full((2, 4), 0.25))
    tensor([1.3863, 1.3863])
    """
    return _cross_entropy(logits, labels, "none")


def losses_and_gradients(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """`losses` for classes, (..., outputs) and (...), and the derivative of each by its logits.

    The derivative is softmax(logits) - onehot(label), or sigmoid(logit) - label with a single output.

    >>> losses_and_gradients(torch.zeros(1, 4), torch.tensor([3]))
    (tensor([1.3863]), tensor([[ 0.2500,  0.2500,  0.2500, -0.7500]]))
    """
    if logits.shape[-1] == 1:
        return _cross_entropy(logits, labels, "none"), (logits.squeeze(-1).sigmoid() - labels).unsqueeze(-1)
    logp = F.log_softmax(logits, dim=-1)
    label = labels.unsqueeze(-1)
    each = logp.gather(-1, label).squeeze(-1).neg_()
    gradients = logp.exp_()
    gradients.scatter_add_(-1, label, gradients.new_full((), -1.0).expand_as(label))
    return each, gradients


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    if logits.shape == (*labels.shape, 1):
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), labels.to(logits.dtype), reduction=reduction)
    return F.cross_entropy(logits, labels, reduction=reduction)


def predict(logits: Tensor) -> Tensor:
    """The most probable class of every example, or of every pixel or word where classes are the second axis.

    >>> predict(torch.tensor([[0.1, 0.9], [0.8, 0.2]]))
    tensor([1, 0])
    """
    if logits.ndim == 2 and logits.shape[-1] == 1:
        return (logits.squeeze(-1) > 0).long()
    return logits.argmax(dim=min(1, logits.ndim - 1))


def imported(name: str, what: str) -> Callable[..., Any]:
    """A function or class of the user's own by `module:name`, looked for beside the caller too; `what` is for errors.

    >>> imported("torch.nn.functional:mse_loss", "loss").__name__
    'mse_loss'
    """
    module_name, _, attribute = name.partition(":")
    with _own_folder(), _explained(f"cannot import the {what} {name!r}"):
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    if not callable(found):
        raise ConfigError(f"the {what} {name!r} is a {type(found).__name__}, and must be a function or a class")
    return found


def made(name: str, what: str) -> Any:
    """What a factory of the user's own makes, which is called without arguments.

    >>> made("torch.nn:Identity", "model")
    Identity()
    """
    factory = imported(name, what)
    if isinstance(factory, nn.Module):
        raise ConfigError(f"the {what} {name!r} is a network, and must be a function that makes one")
    if missing := needed(factory):
        raise ConfigError(
            f"the factory {name!r} needs arguments ({', '.join(missing)}); write a function that needs none"
        )
    with _own_folder(), _explained(f"the factory {name!r} failed"):
        return factory()


def _imported(name: str) -> nn.Module:
    model = made(name, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name!r} made a {type(model).__name__}, and must make a torch.nn.Module")
    return model


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Let a file beside the caller be found, as `python -m` would."""
    here = os.getcwd()
    sys.path.append(here)  # last, so that no file there stands in for an installed package
    try:
        yield
    finally:
        sys.path.reverse()
        sys.path.remove(here)  # the last of its kind
        sys.path.reverse()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Whatever code that is not ours raises becomes one sentence, with the place where it was raised."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = place.filename in (__file__, importlib.__file__) or place.filename.startswith("<frozen")
        where = "" if own else f" ({place.filename}, line {place.lineno})"
        spoken = own and isinstance(error, ImportError | AttributeError | ValueError)  # they say themselves what it is
        kind = "" if spoken else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{short(error)}{where}") from error


def short(error: object) -> str:
    """What an error says, on one line and no longer than a person reads; PyTorch's may hold a stack of C++.

    >>> short(ValueError("one\\n  two"))
    'one two'
    """
    said = " ".join(str(error).split(" Exception raised from")[0].split())
    return said if len(said) <= SHORT else f"{said[:SHORT]}..."


def needed(factory: Callable[..., object]) -> list[str]:
    """The arguments without which a factory cannot be called; none where Python cannot tell.

    >>> needed(nn.Linear)
    ['in_features', 'out_features']
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


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
    """The paper's initial weights: +-sqrt(3 / fan-in) for dense layers, +-sqrt(6 / fan-in) for convolutions."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert layer.bias is not None
            fan_in = layer.weight[0].numel()
            scale = math.sqrt((3 if isinstance(layer, nn.Linear) else 6) / fan_in)
            nn.init.uniform_(layer.weight, -scale, scale)
            nn.init.uniform_(layer.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
    return model
