"""Search of all objects that a client can reach for secret values."""

import gc
import types
from collections.abc import Iterable

import torch
from torch import Tensor

from dbcl._torch import view_base

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SKIPPED = (types.ModuleType, type, types.BuiltinFunctionType, types.FrameType)


def reachable(root: object) -> Iterable[object]:
    """Return all objects reachable from `root` through any kind of reference."""
    seen: dict[int, object] = {}
    stack = [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, SKIPPED):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, types.FunctionType):  # what it closes over, not the module it was written in
            stack += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
        else:
            stack += gc.get_referents(thing)
        if isinstance(thing, Tensor):
            stack += [thing.grad if thing.is_leaf else None, thing.grad_fn, view_base(thing)]
        if hasattr(thing, "__dict__"):
            stack.append(vars(thing))
        if isinstance(thing, torch.autograd.graph.Node):  # the graph of a backward pass that is still to come
            stack += [
                thing.next_functions,
                *(getattr(thing, name) for name in dir(thing) if name.startswith("_saved_")),
            ]
    return seen.values()


def leaks(root: object, secrets: dict[str, Tensor]) -> list[str]:
    """Return the places that contain a secret matrix, as raw bytes or as a similar tensor.

    Raw bytes match if they contain any of four rows of the secret, in any dtype. The complete
    storage of each tensor is searched, so that a view cannot hide a larger tensor. A tensor is
    similar if it has the same number of values and its cosine with the secret is above 0.9. For
    comparison, the effective weight of a sketch with ratio 2 has a cosine of 0.71.
    """
    found, storages = [], set[int]()
    needles = {
        name: [
            row.to(dtype).contiguous().view(torch.uint8).numpy().tobytes() for dtype in DTYPES for row in rows(secret)
        ]
        for name, secret in secrets.items()
    }
    for thing in reachable(root):
        if isinstance(thing, Tensor):
            pointer = thing.untyped_storage().data_ptr()
            whole = torch.empty(0, dtype=torch.uint8, device=thing.device).set_(thing.untyped_storage())
            haystack = b"" if pointer in storages else whole.cpu().numpy().tobytes()
            storages.add(pointer)
            where = f"a tensor of shape {tuple(thing.shape)}"
            for name, secret in secrets.items():
                if thing.is_floating_point() and thing.numel() == secret.numel() and cosine(thing, secret) > 0.9:
                    found.append(f"{name} in {where}, in disguise")
        elif isinstance(thing, bytes | bytearray):
            haystack, where = bytes(thing), f"{len(thing)} bytes"
        else:
            continue
        found += [f"{name} in {where}" for name, rows_ in needles.items() if any(row in haystack for row in rows_)]
    return found


def rows(secret: Tensor) -> Tensor:
    """Return four evenly spaced rows of a secret matrix, as search patterns."""
    matrix = secret.detach().reshape(len(secret), -1)
    return matrix[torch.linspace(0, len(matrix) - 1, min(4, len(matrix))).long()]


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().flatten().cpu(), b.detach().double().flatten()
    return float(a @ b / (a.norm() * b.norm() + 1e-300)) if a.norm() else 0.0
