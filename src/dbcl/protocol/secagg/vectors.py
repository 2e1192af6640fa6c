"""Conversion of updates to validated vectors, and of summed vectors to tensors."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbcl.protocol.codec import decode_update, encode
from dbcl.protocol.messages import Broadcast, Update
from dbcl.protocol.rejection import Reason, RejectedError
from dbcl.protocol.validation import UpdateValidator
from dbcl.round_plan import RoundPlan


def update_vector(update: Update | bytes, broadcast: Broadcast, bound: float) -> tuple[NDArray[np.float64], int]:
    """Convert an update to a vector in the order of the plan, clipped to the norm `bound`.

    Non-finite values or zero examples lead to a zero update with one example, without a log
    message. A client that left the round would cost its group the sum. Under a guarantee, a log
    message could reveal information about the client's data.

    Returns:
        The vector and the number of examples.

    Raises:
        ProtocolError: The update has another round, plan, tensor name, shape or dtype.

    >>> import dbcl
    >>> server = dbcl.Server(torch.nn.Linear(2, 1), dbcl.SketchConfig(sketch="identity-v1"))
    >>> broadcast = server.open_round()
    >>> change = {"weight": torch.tensor([[3.0, 0.0]]), "bias": torch.tensor([4.0])}
    >>> update_vector(Update(0, broadcast.plan.digest, change, examples=6), broadcast, bound=1.0)
    (array([0.6, 0. , 0.8]), 6)
    """
    own = decode_update(bytes(update)) if isinstance(update, bytes | bytearray | memoryview) else update
    accepted = _FORM.validate(own, broadcast)
    examples = int(accepted.weight)
    if examples < 1 or accepted.update is not own:
        return np.zeros(vector_length(broadcast.plan)), 1
    values = flat({part.name: own.tensors[part.name] for part in broadcast.plan.tensors})
    return values * min(1.0, bound / max(accepted.norm, bound)), examples


def sum_vector(update: Update | bytes, broadcast: Broadcast) -> NDArray[np.float64]:
    """Convert a sum of clipped gradients to a vector in the order of the plan.

    The sum is neither clipped nor weighted. Non-finite values lead to a zero sum.

    Raises:
        RejectedError: The structure is wrong, or the dtype is not float64. Rounding a sum of many
            gradients to float32 can exceed the contribution of one gradient.

    >>> import dbcl
    >>> broadcast = dbcl.Server(torch.nn.Linear(2, 1), dbcl.config.UNSKETCHED).open_round()
    >>> sums = {"weight": torch.tensor([[3.0, 0.0]]).double(), "bias": torch.tensor([4.0]).double()}
    >>> sum_vector(Update(0, broadcast.plan.digest, sums, examples=1), broadcast)
    array([3., 0., 4.])
    """
    own = decode_update(bytes(update)) if isinstance(update, bytes | bytearray | memoryview) else update
    wide = replace(broadcast, tensors={name: tensor.double() for name, tensor in broadcast.tensors.items()})
    try:
        _FORM.validate(own, wide)
    except RejectedError as error:
        if error.rejection.reason is not Reason.FORM:
            raise
        raise RejectedError(
            Reason.FORM,
            f"{error}; with shares of noise an update is a sum of clipped gradients in float64, as "
            "dbcl.protocol.clipped_update makes it",
        ) from error
    if not all(tensor.isfinite().all() for tensor in own.tensors.values()):
        return np.zeros(vector_length(broadcast.plan))
    return flat({part.name: own.tensors[part.name] for part in broadcast.plan.tensors})


_FORM = UpdateValidator(max_influence=None, outlier_factor=None, reject_by_value=False)


def vector_length(plan: RoundPlan) -> int:
    """Return the number of values in an update, given its round plan."""
    return sum(int(np.prod(tensor.sent_shape, dtype=np.int64)) for tensor in plan.tensors)


def flat(tensors: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """Concatenate the values of tensors to one float64 vector.

    >>> flat({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    array([1., 1., 0.])
    """
    parts: list[NDArray[np.float64]] = [
        tensor.detach().cpu().double().reshape(-1).numpy() for tensor in tensors.values()
    ]
    return np.concatenate(parts)


def shaped(plan: RoundPlan, values: NDArray[np.float64]) -> dict[str, Tensor]:
    """Split a vector from `flat` into the tensors of a plan."""
    tensors, start = {}, 0
    for part in plan.tensors:
        count = int(np.prod(part.sent_shape, dtype=np.int64))
        tensors[part.name] = torch.from_numpy(values[start : start + count].copy()).reshape(part.sent_shape)
        start += count
    return tensors


def broadcast_digest(broadcast: Broadcast) -> bytes:
    """Return the digest of a broadcast for deriving masks.

    Masks cancel only between clients that received the same bytes.

    >>> import dbcl
    >>> len(broadcast_digest(dbcl.Server(torch.nn.Linear(6, 2), dbcl.SketchConfig(coverage="all")).open_round()))
    32
    """
    kept: dict[str, bytes] = vars(broadcast)  # computed once: in a simulation all clients receive the same object
    if "_digest" not in kept:
        object.__setattr__(broadcast, "_digest", hashlib.sha256(encode(broadcast)).digest())
    return kept["_digest"]
