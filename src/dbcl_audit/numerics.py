"""Safe division by computed quantities: standard deviations that may be pure rounding error, and
very small norms.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

ROUNDING = 1e-5
"""Relative spread below which differences are treated as rounding errors of float32, which depend
on the CPU.
"""


def spread_floor(values: Array) -> float:
    """Return the smallest meaningful spread of values of this magnitude, or 1 if all values are 0.

    >>> spread_floor(np.array([3.0, -100.0])), spread_floor(np.zeros(2))
    (0.001, 1.0)
    """
    return ROUNDING * float(np.abs(values).max(initial=0.0)) or 1.0


def standardized(values: Array, known: Array) -> Array:
    """Subtract the mean of the `known` values and divide by their standard deviation, which is at
    least `spread_floor`.

    >>> standardized(np.array([2.0, 5.0]), np.array([1.0, 3.0]))
    array([0., 3.])
    >>> standardized(np.array([2.0, 2.0]), np.array([2.0, 2.0]))
    array([0., 0.])
    """
    found: Array = (values - known.mean()) / max(float(known.std()), spread_floor(np.concatenate([values, known])))
    return found


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine similarity of two tensors of any norm; 0 if either tensor is 0.

    PyTorch's `cosine_similarity` divides by at least 1e-8 and underestimates the cosine of tensors
    with smaller norms.

    >>> x = torch.tensor([3e-30, 4e-30])
    >>> cosine(x, x), cosine(x, 0 * x)
    (1.0, 0.0)
    """
    one, other = one.flatten().double(), other.flatten().double()
    sizes = float(torch.linalg.vector_norm(one)), float(torch.linalg.vector_norm(other))
    if min(sizes) == 0:
        return 0.0
    return float((one / sizes[0]) @ (other / sizes[1]))
