"""One SGD step of a double-blind round computed a second time, without dbcl's sketches, layers, blinding or lift.

It is written after docs/concepts.md: a count sketch is a bucket and a sign for each input, both from SHAKE-256. With
P = S S^T (s_i s_j where i and j share a bucket, else 0) a client computes with W P, and its step changes W by -lr G P,
where G is the gradient with respect to the weight that it computes with.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import dbcl

Loss = Callable[[nn.Module], Tensor]


def gram(seed: bytes, round: int, name: str, dim: int, width: int) -> Tensor:  # (dim, dim)
    """S S^T of a balanced count sketch."""
    text = b"dbcl" + seed
    for label in ("count-v1", round, name, dim, width):
        data = str(label).encode()
        text += (b"s" if isinstance(label, str) else b"i") + len(data).to_bytes(4, "little") + data
    words = np.frombuffer(hashlib.shake_256(text).digest(8 * dim), "<u8")
    signs = 1.0 - 2.0 * (words & 1).astype(float)
    bucket = np.empty(dim, dtype=int)
    bucket[np.argsort(words >> 1, kind="stable")] = np.arange(dim) % width
    return torch.from_numpy(np.outer(signs, signs) * (bucket[:, None] == bucket[None, :]))


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
            grams[name] = gram(broadcast.plan.seed, broadcast.round, name, dim, part.width)
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


def blind_step(server: dbcl.Server, template: nn.Module, loss: Loss, lr: float) -> dbcl.Broadcast:
    """One client's step through dbcl, over bytes."""
    broadcast = dbcl.decode_broadcast(dbcl.encode(server.open_round()))
    local = dbcl.blinded(template, broadcast)
    torch.manual_seed(1)
    loss(local).backward()
    torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=lr).step()
    report = server.close_round([dbcl.encode(dbcl.update(local, broadcast, examples=1))])
    assert report.accepted == 1, report.refused
    return broadcast


def largest_error(
    make: Callable[[], nn.Module],
    loss: Loss,
    inputs: dict[str, tuple[int, ...]],
    *,
    lr: float = 0.1,
    **settings: object,
) -> float:
    """How far dbcl's step is from the one computed here: the largest error of a parameter, relative to its change.

    A change counts as at least a thousandth of the largest one in the model, since rounding is relative to weights.
    `make` gives the same model at every call. All sketched tensors must be in `inputs`, and no other.
    """
    start = {name: parameter for name, parameter in make().named_parameters() if parameter.requires_grad}
    server = dbcl.Server(make(), veil=0, insecure_seed=0, **settings)
    broadcast = blind_step(server, make(), loss, lr)
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
