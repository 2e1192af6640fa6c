"""Client side of a round: load a broadcast into a model, and make an update from the change."""

import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from torch import Tensor, nn

from dbcl._torch import unwrapped
from dbcl.blinding import build_client, client_tensors
from dbcl.data.examples import Batch
from dbcl.model.norm_stats import measured
from dbcl.model.parametrization import inner_name
from dbcl.model.tensors import owner
from dbcl.objective import Loss
from dbcl.privacy import UpdateNoise, clipped_sums
from dbcl.protocol.messages import Broadcast, Update
from dbcl.protocol.requirements import BroadcastRequirements


def blinded(module: nn.Module, broadcast: Broadcast, *, require: BroadcastRequirements | None = None) -> nn.Module:
    """Build a client's model: a copy of `module` with compact weights and without W.

    Train the model with any loop and any optimiser. Plain SGD and momentum use the learning rate of
    the unsketched model. Optimisers that normalise the gradient, such as Adam, use sqrt(ratio)
    times that rate.

    Args:
        module: A network with the architecture of the server's model. It is not changed.
        broadcast: The server's message of the round.
        require: Minimum protection of the broadcast.

    Returns:
        The model to train.

    Raises:
        PlanError: The architecture differs, or the broadcast does not meet `require`.

    >>> import torch, dbcl
    >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> local = dbcl.blinded(torch.nn.Linear(6, 2), broadcast)
    >>> {name: tuple(parameter.shape) for name, parameter in local.named_parameters()}
    {'bias': (2,), 'parametrizations.weight.original': (2, 3)}
    """
    if require is not None:
        require.check(unwrapped(module), broadcast)
    return build_client(module, broadcast.plan, broadcast.tensors)


def make_update(
    local: nn.Module,
    broadcast: Broadcast,
    *,
    examples: int,
    metrics: Mapping[str, SupportsFloat] | None = None,
    noise: UpdateNoise | None = None,
) -> Update:
    """Make an update: the change of every tensor since the broadcast, in its transmitted dtype.

    For normalisation statistics, the update holds the client's own values if its layers have
    processed a batch.

    Args:
        local: The trained model from `blinded`, optionally wrapped in DataParallel,
            DistributedDataParallel or `torch.compile`.
        broadcast: The broadcast of the same round.
        examples: Number of training examples, which weights the update.
        metrics: Python, NumPy or PyTorch scalars to report. Non-finite values are omitted.
        noise: Clipping and noise that the client applies to its update. Normalisation statistics
            are then not sent.

    Returns:
        The update, for `dbcl.encode` and `Server.close_round`.

    >>> import torch, dbcl
    >>> broadcast = dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()
    >>> local = dbcl.blinded(torch.nn.Linear(6, 2), broadcast)
    >>> dbcl.make_update(local, broadcast, examples=10).tensors["bias"]
    tensor([0., 0.])
    """
    local = unwrapped(local)
    current, changes, statistics = client_tensors(local, broadcast.plan), {}, {}
    for tensor in broadcast.plan.tensors:
        now, sent = current[tensor.name], broadcast.tensors[tensor.name]
        if tensor.measured:
            value = measured(*owner(local, tensor.name), sent)
            if value is not None:
                statistics[tensor.name] = value.to(sent)
        else:
            changes[tensor.name] = (now - sent.to(now)).to(sent)
    if noise is not None:
        changes, statistics = noise(changes, round=broadcast.round), {}
    numbers = {name: as_number(value) for name, value in (metrics or {}).items()}
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return Update(broadcast.round, broadcast.plan.digest, {**changes, **statistics}, examples, numbers)


def clipped_update(
    local: nn.Module, broadcast: Broadcast, batches: Sequence[Batch], loss: Loss, *, clip: float, rate: float = 1.0
) -> Update:
    """Make an update for example-level privacy: a float64 sum of clipped per-example gradients.

    The sum is multiplied by the negative learning rate, so the update is the change of one SGD
    step. It is not a mean: the server divides by the planned number of examples. If the clients add
    the noise, pass the update to a `dbcl.protocol.secagg.SecureClient` with `NoisySum`; it must not
    leave the client unprotected.

    Args:
        local: The client's model from `blinded`. It is not changed.
        broadcast: The received broadcast.
        batches: The examples of the round, from `Examples.take_alone`.
        loss: Loss of a batch. It is called with one example at a time.
        clip: Bound on the gradient norm of one example.
        rate: Learning rate; `clip` times `rate` is the clip of the privacy plan.

    Returns:
        The update with the sum.

    >>> import torch, dbcl
    >>> from dbcl.data.examples import Batch
    >>> net = torch.nn.Linear(6, 2)
    >>> broadcast = dbcl.Server(net, dbcl.config.UNSKETCHED).open_round()
    >>> examples = Batch(torch.ones(10, 6), torch.arange(10) % 2)
    >>> local = dbcl.blinded(net, broadcast)
    >>> sums = clipped_update(local, broadcast, [examples], torch.nn.CrossEntropyLoss(), clip=0.1)
    >>> sums.tensors["weight"].dtype, bool(sums.tensors["weight"].norm() <= 10 * 0.1)
    (torch.float64, True)
    """
    sums, _ = clipped_sums(unwrapped(local), batches, loss, clip)
    held = {part.name: inner_name(part.name) if part.sketched else part.name for part in broadcast.plan.tensors}
    tensors = {name: -rate * sums[inner] for name, inner in held.items()}
    return Update(broadcast.round, broadcast.plan.digest, tensors, examples=1)


def as_number(value: SupportsFloat) -> float:
    """Convert a metric to a Python float, including tensors that require a gradient.

    >>> import torch
    >>> as_number(torch.ones((), requires_grad=True))
    1.0
    """
    return float(value.detach() if isinstance(value, Tensor) else value)
