"""Normalisation statistics: a client's own estimates, independent of the initial running averages.

In training mode, a layer updates its running averages, r <- (1 - m) r + m * (batch statistic),
without using them. The update is linear, so the contribution of k batches can be computed from the
initial value: own = (r - (1 - m)^k start) / (1 - (1 - m)^k). Sending a change of r relative to a
veiled start would return the veil's noise to the server; the client's own estimate does not contain
this noise.
"""

import torch
from torch import Tensor, nn

from dbcl.data.trees import Tree, call, map_tensors, tensors
from dbcl.model.tensors import STATISTICS


def is_statistic(name: str) -> bool:
    """Return whether a tensor's name is that of a running mean or variance.

    >>> is_statistic("1.running_var"), is_statistic("1.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in STATISTICS


def restart(model: nn.Module) -> None:
    """Reset the batch counters of all normalisation layers.

    >>> layer = nn.BatchNorm1d(2)
    >>> layer.num_batches_tracked += 5
    >>> restart(layer)
    >>> int(layer.num_batches_tracked)
    0
    """
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "num_batches_tracked":
            buffer.zero_()


def own_part(now: Tensor, start: Tensor, momentum: float | None, batches: Tensor | int) -> Tensor:
    """Return the contribution of the latest batches to a running average.

    Args:
        now: Current running average.
        start: Running average before the batches.
        momentum: Momentum of the layer; None for a cumulative average.
        batches: Number of batches.

    >>> layer = nn.BatchNorm1d(1).train()
    >>> start = layer.running_mean.fill_(100.0).clone()
    >>> _ = layer(torch.tensor([[1.0], [3.0]]))
    >>> own_part(layer.running_mean, start, layer.momentum, 1).round(decimals=3)
    tensor([2.])
    """
    if momentum is None:  # a plain average, which forgets its start with the first batch
        return now
    kept = (1 - momentum) ** batches
    return (now - kept * start) / (1 - kept)


@torch.no_grad()
def calibrate(model: nn.Module, inputs: Tree, *, batch_size: int = 100) -> None:
    """Re-estimate the statistics of every normalisation layer from inputs. The rest of the model is
    unchanged.

    Args:
        model: The network.
        inputs: A tensor, or a tuple or dictionary of tensors, with one row per example.
        batch_size: Examples per forward pass.

    >>> model = nn.Sequential(nn.BatchNorm1d(1))
    >>> calibrate(model, torch.tensor([[1.0], [3.0]]))
    >>> model[0].running_mean
    tensor([2.])
    """
    mode, layers = model.training, [module for module in model.modules() if hasattr(module, "running_mean")]
    momenta = [getattr(layer, "momentum", None) for layer in layers]
    model.eval()  # dropout stays off
    restart(model)
    for layer in layers:
        layer.momentum = None  # type: ignore[assignment]  # the plain average over the batches
        layer.train()
    for start in range(0, len(next(tensors(inputs))), batch_size):
        call(model, map_tensors(lambda tensor: tensor[start : start + batch_size], inputs))  # noqa: B023
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum  # type: ignore[assignment]
    model.train(mode)


def measured(module: nn.Module, name: str, start: Tensor) -> Tensor | None:
    """Return a layer's own statistic since `restart`; None if the layer processed no batch.

    For a custom layer without a batch counter, return the running average if it has changed.

    >>> measured(nn.BatchNorm1d(2), "running_mean", nn.BatchNorm1d(2).running_mean) is None
    True
    """
    now: Tensor = getattr(module, name).detach()
    start = start.to(now)
    counter = getattr(module, "num_batches_tracked", None)
    if counter is None:
        return None if now.equal(start) else now
    if int(counter) == 0:
        return None
    own = own_part(now, start, getattr(module, "momentum", None), int(counter))
    return own.clamp(min=0) if name == "running_var" else own
