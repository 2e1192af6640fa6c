"""Server optimisers, which apply the average update of a round.

A server optimiser is a function that makes a `torch.optim.Optimizer` for the master weights. The
gradient is the negative average update. Any optimiser of `torch.optim` works:
`functools.partial(torch.optim.AdamW, lr=0.01)`.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

ServerOptimizer = Callable[[Iterable[Parameter]], Optimizer]


def fedavg(lr: float = 1.0) -> ServerOptimizer:
    """Federated averaging: W + lr * average update.

    Args:
        lr: Server learning rate.

    Returns:
        A function that makes the optimiser for given parameters.

    >>> fedavg()([Parameter(torch.zeros(1))]).defaults["lr"]
    1.0
    """
    return partial(torch.optim.SGD, lr=lr)


def momentum(beta: float = 0.5, lr: float = 1.0) -> ServerOptimizer:
    """Federated averaging with server momentum (FedAvgM).

    Args:
        beta: Momentum.
        lr: Server learning rate.

    Returns:
        A function that makes the optimiser for given parameters.

    >>> momentum(0.9)([Parameter(torch.zeros(1))]).defaults["momentum"]
    0.9
    """
    return partial(torch.optim.SGD, lr=lr, momentum=beta)


def adam(lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3) -> ServerOptimizer:
    """Adam on the server (FedAdam).

    Args:
        lr: Server learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the denominator; large, as recommended for adaptive federated optimisation.

    Returns:
        A function that makes the optimiser for given parameters.

    >>> adam(0.02)([Parameter(torch.zeros(1))]).defaults["lr"]
    0.02
    """
    return partial(torch.optim.Adam, lr=lr, betas=betas, eps=eps)
