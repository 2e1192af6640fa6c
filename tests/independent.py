"""One SGD step of a double-blind round computed a second time, without dbcl's sketches, layers, blinding or lift.

It is written after docs/concepts.md: a count sketch is a bucket and a sign for each input, both from SHAKE-256. With
P = S S^T (s_i s_j where i and j share a bucket, else 0) a client computes with W P, and its step changes W by -lr G P,
where G is the gradient with respect to the weight that it computes with. In lane k of several, s_i is also multiplied
by the i-th number of the k-th vector of an orthogonal basis of the bucket.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import dbcl
from dbcl.testing.nested import nested

Loss = Callable[[nn.Module], Tensor]


def gram(seed: bytes, round: int, name: str, dim: int, width: int, lane: int, lanes: int) -> Tensor:  # (dim, dim)
    """S S^T of a balanced count sketch, or of one of its lanes."""
    text = b"dbcl" + seed
    for label in ("count-v1" if lanes == 1 else "lanes-v1", round, name, dim, width):
        data = str(label).encode()
        text += (b"s" if isinstance(label, str) else b"i") + len(data).to_bytes(4, "little") + data
    words = np.frombuffer(hashlib.shake_256(text).digest(8 * dim), "<u8")
    signs = 1.0 - 2.0 * (words & 1).astype(float)
    bucket, turn = np.empty(dim, dtype=int), np.empty(dim, dtype=int)
    order = np.argsort(words >> 1, kind="stable")
    bucket[order], turn[order] = np.arange(dim) % width, np.arange(dim) // width
    if lanes > 1:
        sizes = np.bincount(bucket, minlength=width)
        signs *= [basis(int(sizes[own]))[lane % sizes[own], place] for own, place in zip(bucket, turn, strict=True)]
    return torch.from_numpy(np.outer(signs, signs) * (bucket[:, None] == bucket[None, :]))


def basis(size: int) -> NDArray[np.float64]:  # (size, size)
    """Orthogonal rows as long as a row of ones: Sylvester's where the size is a power of two, else cosines."""
    if size & (size - 1) == 0:
        rows = np.ones((1, 1))
        while len(rows) < size:
            rows = np.block([[rows, rows], [rows, -rows]])
        return rows
    row, place = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    return np.cos(np.pi * row * (2 * place + 1) / (2 * size)) * np.where(row == 0, 1.0, np.sqrt(2.0))


def times(weight: Tensor, P: Tensor, inputs: tuple[int, ...]) -> Tensor:
    """A weight's input axes times P, whatever the shape of the rest."""
    ends = tuple(range(-len(inputs), 0))
    moved = weight.movedim(inputs, ends)
    flat = moved.reshape(-1, len(P)).double() @ P
    return flat.reshape(moved.shape).movedim(ends, inputs).to(weight.dtype)


def expected_step(
    make: Callable[[], nn.Module], loss: Loss, broadcast: dbcl.Broadcast, inputs: dict[str, tuple[int, ...]], lr: float
) -> dict[str, Tensor]:
    """The weights after one step; `inputs` says for each sketched tensor on which axes its inputs lie."""
    own = dict(make().named_parameters())
    plain = make()
    parameters = dict(plain.named_parameters())
    grams = {}
    with torch.no_grad():
        for name, axes in inputs.items():
            part = next(part for part in broadcast.plan.tensors if part.name == name)
            dim = int(np.prod([own[name].shape[axis] for axis in axes]))
            lane = broadcast.plan.lane, broadcast.plan.lanes
            grams[name] = gram(broadcast.plan.seed, broadcast.round, name, dim, part.width, *lane)
            parameters[name].copy_(times(own[name], grams[name], axes))
    torch.manual_seed(1)
    loss(plain).backward()
    for name, parameter in own.items():
        if parameter.requires_grad and parameters[name].grad is not None:
            gradient = parameters[name].grad
            if name in inputs:
                gradient = times(gradient, grams[name], inputs[name])
            parameter.data.sub_(lr * gradient)
    return own


def blind_step(server: dbcl.Server, template: nn.Module, loss: Loss, lr: float, lane: int) -> dbcl.Broadcast:
    """One client's step through dbcl in one of the lanes, over bytes."""
    each = [server.open_round(f"client {number}") for number in range(server.plan.lanes)]
    client = [broadcast.plan.lane for broadcast in each].index(lane)
    broadcast = dbcl.protocol.decode_broadcast(dbcl.encode(each[client]))
    local = dbcl.blinded(template, broadcast)
    torch.manual_seed(1)
    loss(local).backward()
    torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=lr).step()
    report = server.close_round({f"client {client}": dbcl.encode(dbcl.make_update(local, broadcast, examples=1))})
    assert report.accepted == 1, report.refused
    return broadcast


def largest_error(
    make: Callable[[], nn.Module],
    loss: Loss,
    inputs: dict[str, tuple[int, ...]],
    *,
    lr: float = 0.1,
    lane: int = 0,
    **settings: object,
) -> float:
    """How far dbcl's step is from the one computed here: the largest error of a parameter, relative to its change.

    A change counts as at least a thousandth of the largest one in the model, since rounding is relative to weights.
    `make` gives the same model at every call. All sketched tensors must be in `inputs`, and no other.
    """
    start = {name: parameter for name, parameter in make().named_parameters() if parameter.requires_grad}
    server = dbcl.Server(
        make(), insecure_seed=0, **nested({"veil": 0, "coverage": "hidden", "calibration": (), **settings})
    )
    server.calibration = None  # the weights are compared: statistics may be those that the client measured
    broadcast = blind_step(server, make(), loss, lr, lane)
    assert set(broadcast.sketches()) == set(inputs), set(broadcast.sketches()) ^ set(inputs)
    expected = expected_step(make, loss, broadcast, inputs, lr)
    made = dict(server.model.named_parameters())
    with torch.no_grad():
        moved = {name: float((expected[name] - W).abs().max()) for name, W in start.items()}
        off = {name: float((made[name] - expected[name]).abs().max()) for name in start}
        frozen = [name for name in made if name not in start and type(made[name].data) is Tensor]
        assert all(torch.equal(made[name], expected[name]) for name in frozen)
    least = 1e-3 * max(moved.values())
    assert least > 0, "no parameter has moved"
    return max(off[name] / max(moved[name], least) for name in start)
